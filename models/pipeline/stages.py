"""A rank's part of the pipeline: DeepSpeed's modules, running their layers our way.

DeepSpeed deals the layers to the ranks and moves activations between them; how a rank runs its
layers (contexts, recomputation) is `run_layers`, the same as without a pipeline.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed.pipe import DualPipeVModule, PipelineModule
from torch import Tensor

from models.layer_specs import run_layers
from models.parallel.context import Context


class Stage(PipelineModule):
    """The layers of one stage.

    recompute_interval: so many blocks at a time are computed again by the backward pass; 0: none
    """

    chunks = 1  # parts of the model that it holds

    def __init__(self, *arguments: Any, recompute_interval: int, **settings: Any):
        super().__init__(*arguments, **settings)
        self.recompute_interval = recompute_interval
        self.expect([])

    def expect(self, contexts: Sequence[Context]) -> None:
        """The contexts of the micro-batches that are about to come through, in this order."""
        self.contexts_left: list[Iterator[Context]] = [iter(contexts) for _ in range(self.chunks)]

    def expect_no_more(self) -> None:
        """Check that every micro-batch has come through every chunk."""
        assert not any(list(left) for left in self.contexts_left)

    @property
    def chunk(self) -> int:
        """Which of this rank's parts is running."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        """The next micro-batch through this rank's layers."""
        context = next(self.contexts_left[self.chunk])
        interval = self.recompute_interval
        return run_layers(self.forward_funcs, x, context=context, recompute_interval=interval)


class FoldedStage(Stage, DualPipeVModule):
    """The layers of two stages, one on the way out and one on the way back (DualPipeV).

    The first rank has the first layers and the last ones: of p ranks, rank r has the parts r and
    2 p - 1 - r.
    """

    chunks = 2

    @property
    def chunk(self) -> int:
        """Which of this rank's parts is running."""
        return self.active_phase
