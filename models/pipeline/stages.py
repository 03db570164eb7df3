"""A rank's part of the pipeline: DeepSpeed's module, holding any number of chunks.

DeepSpeed builds the layers and joins the copies of tied ones; how a rank runs its layers (contexts,
recomputation) is `run_layers`, the same as without a pipeline.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from models.layer_specs import run_layers
from models.parallel.context import Context
from models.pipeline.order import Pipeline


class Stage(PipelineModule):
    """The layers of one stage.

    layers_of_positions: of each chunk of the pipeline, in the model's order
    recompute_interval: so many blocks at a time are computed again by the backward pass; 0: none
    """

    def __init__(
        self,
        *arguments: Any,
        pipeline: Pipeline,
        layers_of_positions: Sequence[int],
        recompute_interval: int,
        **settings: Any,
    ):
        assert len(layers_of_positions) == pipeline.positions
        self.pipeline = pipeline
        self.parts = [0, *accumulate(layers_of_positions)]
        super().__init__(*arguments, **settings)
        self.recompute_interval = recompute_interval
        self.take_contexts([])

    def _partition_layers(self, method: str = "") -> None:
        """Which layers are whose has been decided; DeepSpeed's name for the hook."""
        assert self.parts[-1] == self._num_layers
        chunks = range(self.pipeline.chunks)
        positions = [self.pipeline.position(self.stage_id, chunk) for chunk in chunks]
        self.bounds = [(self.parts[n], self.parts[n + 1]) for n in positions]
        self._set_bounds(*self.bounds[0])

    def _build(self) -> None:
        self.layers_of_chunks = []
        for start, stop in self.bounds:
            self._set_bounds(start, stop)
            self.forward_funcs = []
            super()._build()
            self.layers_of_chunks.append(self.forward_funcs)
        self.forward_funcs = [layer for chunk in self.layers_of_chunks for layer in chunk]
        self._set_bounds(*self.bounds[0])

    def _synchronize_tied_weights(self) -> None:
        """Nothing: `initialize` gives all copies the same, and DeepSpeed's broadcast warns."""

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a layer."""
        position = next(n for n, stop in enumerate(self.parts[1:]) if layer_idx < stop)
        return self.pipeline.place(position)[0]

    def parameters_of_chunk(self, chunk: int) -> Iterator[nn.Parameter]:
        """Of a chunk's layers, without tied ones, which other chunks may hold too."""
        start, stop = self.bounds[chunk]
        for number, layer in self.named_children():
            if number.isdecimal() and start <= int(number) < stop:
                yield from layer.parameters()

    def take_contexts(self, contexts: Sequence[Context]) -> None:
        """The contexts of the micro-batches that are about to come through, in this order."""
        self.contexts = [iter(contexts) for _ in range(self.pipeline.chunks)]

    def check_contexts_taken(self) -> None:
        """Check that every micro-batch has come through every chunk."""
        assert not any(list(contexts) for contexts in self.contexts)

    def forward(self, x: Tensor, chunk: int, labels: Tensor | None = None) -> Tensor:
        """The next micro-batch through one of this rank's chunks.

        labels: [b, s], for the end of the model, which then gives the loss
        """
        return run_layers(
            self.layers_of_chunks[chunk],
            x,
            context=next(self.contexts[chunk]),
            labels=labels,
            recompute_interval=self.recompute_interval,
        )
