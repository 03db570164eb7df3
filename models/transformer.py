"""MLP and block. With one tensor rank (t = 1) this is the plain transformer.

s sequence, b micro-batch, h hidden, f MLP hidden, t tensor ranks. Under sequence parallelism the
residual stream is [s/t, b, h].
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from models.attention import Attention, ModelAxes, recomputed
from models.config import GATED, ModelConfig
from models.experts.layer import MixtureOfExperts
from models.initialization import residual_multiplier
from models.kernels.compile import Fusing
from models.kernels.elementwise import ACTIVATIONS, gelu
from models.kernels.norms import ResidualBranch, add
from models.latent_attention import LatentAttention
from models.parallel.collectives import TensorAxis
from models.parallel.layers import NORMS, ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from models.parallel.micro_batch_info import MicroBatchInfo, stream_rows


class Block(Fusing):
    """x + m attention(norm(x)), then x + m mlp(norm(x)), with a residual multiplier m, mostly 1.

    With norms after, it is x + m norm(attention(x)), then x + m norm(mlp(x)), as in OLMo 2; with
    both, x + m norm(attention(norm(x))) and the same for the MLP, as in Gemma. A norm of the output
    includes the output bias. Dropout comes after the norm, as the last operation of the branch.

    number: number of the block in the model; its dropout masks depend on it
    recompute_core: the backward pass recomputes the attention core (arXiv 2205.05198)
    """

    def __init__(
        self,
        config: ModelConfig,
        axes: ModelAxes,
        *,
        number: int,
        recompute_core: bool = False,
    ):
        super().__init__()
        tensor = axes.tensor
        norm = partial(
            NORMS[config.norm],
            config.hidden_size,
            config.norm_epsilon,
            input_is_split=tensor.sequence_parallel,
            tensor=tensor,
        )
        self.name, self.number = f"blocks.{number}", number
        self.norm_placement = config.norm_placement
        before, after = config.norm_placement != "after", config.norm_placement != "before"
        # Modules are in the order of the forward pass, in which gradients are put into buckets.
        if before:
            self.attention_norm = norm()
        kind_of_attention = Attention if config.latent is None else LatentAttention
        self.attention = kind_of_attention(
            config,
            axes,
            name=f"{self.name}.attention.core",
            kind=config.attention_kind(number),
            recompute_core=recompute_core,
        )
        if after:
            self.attention_output_norm = norm()
        if before:
            self.mlp_norm = norm()
        self.mlp: MLP | MixtureOfExperts
        if config.has_experts(number):
            assert config.experts is not None
            size = config.experts.shared_ffn_hidden_size
            self.mlp = MixtureOfExperts(
                config.experts,
                hidden_size=config.hidden_size,
                activation=config.activation,
                bias=config.bias,
                tensor=tensor,
                expert=axes.expert,
                shared=MLP(config, tensor, ffn_hidden_size=size) if size else None,
                number=number,
            )
        else:
            self.mlp = MLP(config, tensor)
        if after:
            self.mlp_output_norm = norm()
        self.dropout, self.tensor = config.dropout, tensor
        self.multiplier = residual_multiplier(config)

    def forward(self, x: Tensor, info: MicroBatchInfo) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        if self.norm_placement != "before":
            return self._with_output_norms(x, info)
        x, normed = self.attention_norm.with_input(x)
        attended = self.attention(normed, info)
        bias = self.attention.output.bias_here()
        attended = self._branch(attended, bias, "attention", info)
        x, normed = self.mlp_norm.of_sum(x, attended)
        y = self.mlp(normed)
        return add(x, self._branch(y, self.mlp.bias_here(), "mlp", info), self.fuse)

    def _with_output_norms(self, x: Tensor, info: MicroBatchInfo) -> Tensor:
        """[s, b, h] to [s, b, h], with norms after, or before and after."""
        before = self.norm_placement == "both"
        x, inputs = self.attention_norm.with_input(x) if before else (x, x)
        y = self.attention(inputs, info)
        y = _with_bias(y, self.attention.output.bias_here())
        branch = self._branch(self.attention_output_norm(y), None, "attention", info)
        if before:
            x, inputs = self.mlp_norm.of_sum(x, branch)
        else:
            inputs = x = add(x, branch, self.fuse)
        y = _with_bias(self.mlp(inputs), self.mlp.bias_here())
        return add(x, self._branch(self.mlp_output_norm(y), None, "mlp", info), self.fuse)

    def _branch(
        self, y: Tensor, bias: Tensor | None, half: str, info: MicroBatchInfo
    ) -> ResidualBranch:
        """Return the term that one half of the block adds to the residual stream."""
        rows, key = None, info.dropout
        if key is not None and self.dropout > 0:
            layer = f"{self.name}.{half}"
            rows = stream_rows(
                y, key=key, layer=layer, tensor=self.tensor, fuse=self.fuse, slices=info.slices
            )
        return ResidualBranch(y, bias, rows, self.dropout, self.multiplier)


class MLP(Fusing):
    """activation(x U) D, without the output bias; a gated activation reads x G and x U.

    Communication: that of its column-parallel, then of its row-parallel linear layer.

    ffn_hidden_size: size of the activations inside; None: that of the config
    """

    def __init__(
        self, config: ModelConfig, tensor: TensorAxis, *, ffn_hidden_size: int | None = None
    ):
        super().__init__()
        h, f = config.hidden_size, ffn_hidden_size or config.ffn_hidden_size
        self.activation = config.activation
        blocks = (f, f) if config.activation in GATED else (f,)  # gate|up, or up
        self.up = ColumnParallelLinear(h, blocks, bias=config.bias, tensor=tensor)
        self.down = RowParallelLinear(f, h, bias=config.bias, tensor=tensor)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        return self.down(self.activated(x))

    def activated(self, x: Tensor) -> Tensor:
        """[s, b, h] to the input of the second linear layer, [s, b, f/t]."""
        if self.activation in ACTIVATIONS:
            x = self.up(x)  # [s, b, 2f/t] with the gate first; [s, b, f/t] without a gate
            return ACTIVATIONS[self.activation](x, self.fuse)
        x = self.up(x, bias_gradient=False)  # [s, b, f/t]
        return gelu(x, self.up.bias, self.fuse, exact=self.activation == "gelu_erf")

    def bias_here(self) -> Tensor | None:
        """Return the output bias for this rank's positions."""
        return self.down.bias_here()


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Return y + bias: [s, b, h]."""
    return y if bias is None else y + bias


# Modules that predict further tokens in training (DeepSeek-V3, arXiv 2412.19437, section 2.2).
# Module k = 1, 2, ... combines the output h of the module before it, at position i, with the
# embedding of token i + k, and predicts token i + k + 1:
#
#     h_k = norm(block([norm(embedding(t_{i+k})), norm(h_{k-1})] W))
#
# h_0 is the output of the model's final norm. The embedding, and the output matrix that h_k is
# multiplied by, are those of the model. The paper leaves the norms open; they are those of the
# released DeepSeek-V3 and of Megatron-Core. The losses of the modules are part of the function of
# the model's loss (`models/parallel/cross_entropy.py`), and have gradients only.


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
