"""Modules that predict further tokens in training (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k = 1, 2, ... combines the output h of the module before it, at position i, with the
embedding of token i + k, and predicts token i + k + 1:

    h_k = norm(block([norm(embedding(t_{i+k})), norm(h_{k-1})] W))

h_0 is the output of the model's final norm. The embedding, and the output matrix that h_k is
multiplied by, are those of the model. The paper leaves the norms open; they are those of the
released DeepSeek-V3 and of Megatron-Core.

The losses of the modules are part of the function of the model's loss
(`models/parallel/cross_entropy.py`), and have gradients only.

s sequence, b micro-batch, h hidden, t tensor ranks. Under sequence parallelism all activations are
[s/t, b, h].
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from models.attention import ModelAxes, recomputed
from models.config import ModelConfig
from models.parallel.layers import NORMS, ReplicatedLinear
from models.parallel.micro_batch_info import MicroBatchInfo
from models.transformer import Block


class PredictionModule(nn.Module):
    """One module: two norms, a projection, a block and a norm.

    Communication: that of a block, and under sequence parallelism an all-reduce of the gradient of
    the projection.

    number: number of the block, which follows those of the model
    recompute_core: the backward pass recomputes the attention core
    """

    def __init__(
        self, config: ModelConfig, axes: ModelAxes, *, number: int, recompute_core: bool = False
    ):
        super().__init__()
        h, tensor = config.hidden_size, axes.tensor
        norm = partial(
            NORMS[config.norm],
            h,
            config.norm_epsilon,
            input_is_split=tensor.sequence_parallel,
            tensor=tensor,
        )
        self.embedding_norm = norm()
        self.hidden_norm = norm()
        self.projection = ReplicatedLinear(2 * h, h, tensor=tensor)
        self.block = Block(config, axes, number=number, recompute_core=recompute_core)
        self.output_norm = norm()

    def forward(self, x: Tensor, embedded: Tensor, info: MicroBatchInfo) -> Tensor:
        """[s, b, h] to [s, b, h].

        Args:
            embedded: embedded tokens k positions later, [s, b, h]
        """
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(x)], dim=-1)
        return self.output_norm(self.block(self.projection(both), info))


class Predictions(nn.ModuleList):
    """All modules, in the order of the tokens that they predict."""

    def __init__(self, config: ModelConfig, axes: ModelAxes, *, recompute_core: bool = False):
        super().__init__(
            PredictionModule(config, axes, number=number, recompute_core=recompute_core)
            for number in range(config.layers, config.layers + config.prediction_depth)
        )

    def forward(
        self, x: Tensor, embedded: Sequence[Tensor], info: MicroBatchInfo, recompute: bool
    ) -> list[Tensor]:
        """Return the outputs of the modules, each [s, b, h].

        Args:
            x: the output of the model's final norm, [s, b, h]
            embedded: embedded tokens 1, 2, ... positions later, each [s, b, h]
            recompute: the backward pass recomputes one module at a time
        """
        outputs = []
        for module, tokens in zip(self, embedded, strict=True):
            run = partial(module, info=info)
            x = recomputed(run, x, tokens) if recompute else run(x, tokens)
            outputs.append(x)
        return outputs
