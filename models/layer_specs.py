"""The model as one list of LayerSpecs, which a pipeline divides among its stages.

| layer               | input        | output      | note                               |
|---------------------|--------------|-------------|------------------------------------|
| embedding           | tokens [b, s] | [s, b, h]  | tied with the head if the model is |
| positions           | [s, b, h]    | [s, b, h]   | learned positions only             |
| blocks.0, 1, ...    | [s, b, h]    | [s, b, h]   |                                    |
| final_norm          | [s, b, h]    | [s, b, h]   |                                    |
| head                | [s, b, h]    | [s, b, v/t] | logits of this rank's vocabulary;  |
|                     |              | or []       | given the labels, their loss       |

s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor ranks; under sequence parallelism
everything between embedding and head is [s/t, b, h]. This module also defines the names of the
parameters, which do not depend on the layout: `blocks.3.attention.qkv.weight`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from models.attention import ModelAxes, recomputed
from models.config import ModelConfig
from models.initialization import output_multiplier
from models.kernels.compile import Fusing
from models.kernels.elementwise import look_up
from models.parallel.collectives import TensorAxis, scatter_to_tensor_axis
from models.parallel.cross_entropy import soft_capped, vocab_parallel_loss
from models.parallel.layers import NORMS, VocabParallelEmbedding
from models.parallel.micro_batch_info import MicroBatchInfo, dropout, positions_in, rows_in
from models.sharding import Role, Sharding, declared_parameter, sharding_of
from models.transformer import Block

TIED_KEY = "embedding"


def layer_specs(
    config: ModelConfig, axes: ModelAxes | None = None, *, recompute_core: bool = False
) -> list[LayerSpec]:
    """Return the layers in order, as `layer_names` lists their names.

    axes: the parallel axes; None: one rank has everything
    recompute_core: the backward pass recomputes the attention cores
    """
    axes = axes or ModelAxes()
    tensor = axes.tensor
    norm = partial(LayerSpec, NORMS[config.norm], config.hidden_size, config.norm_epsilon)
    specs = {
        "embedding": TokenEmbedding.spec(config, tensor),
        "positions": LayerSpec(LearnedPositions, config, tensor),
        "final_norm": norm(input_is_split=tensor.sequence_parallel, tensor=tensor),
        "head": Head.spec(config, tensor),
    }
    for number in range(config.layers):
        specs[f"blocks.{number}"] = LayerSpec(
            Block, config, axes, number=number, recompute_core=recompute_core
        )
    return [specs[name] for name in layer_names(config)]


def layer_names(config: ModelConfig) -> list[str]:
    """Return the names of the layers, in the order of `layer_specs`."""
    positions = ["positions"] if config.positions == "learned" else []
    blocks = [f"blocks.{index}" for index in range(config.layers)]
    return ["embedding", *positions, *blocks, "final_norm", "head"]


def logical_parameters(
    module: nn.Module, config: ModelConfig
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (logical name, parameter) of all layers of a PipelineModule or SequentialModel."""
    names = layer_names(config)
    for name, parameter in module.named_parameters():
        layer, rest = name.split(".", 1)  # "3.attention.qkv.weight", "tied_modules.embedding.x"
        yield (rest if layer == "tied_modules" else f"{names[int(layer)]}.{rest}"), parameter


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of every parameter by name, without allocating memory."""
    with torch.device("meta"):
        model = SequentialModel(layer_specs(config))
    return {name: sharding_of(p).shape for name, p in logical_parameters(model, config)}


def run_layers(
    layers: Iterable[Callable[..., Tensor]],
    x: Tensor,
    *,
    info: MicroBatchInfo,
    labels: Tensor | None = None,
    recompute_interval: int = 0,
) -> Tensor:
    """Run layers one after the other and return the output of the last one.

    labels: [b, s], an input of the last layer
    recompute_interval: number of blocks that the backward pass recomputes at a time; 0: none
    """
    if labels is not None:
        *layers, head = layers
    for are_blocks, group in groupby(layers, key=lambda layer: isinstance(layer, Block)):
        run = list(group)
        if not are_blocks or recompute_interval == 0:
            x = _run_in_turn(x, run, info)
            continue
        for first in range(0, len(run), recompute_interval):
            blocks = run[first : first + recompute_interval]
            x = recomputed(partial(_run_in_turn, layers=blocks, info=info), x)
    return x if labels is None else head(x, labels)


def _run_in_turn(x: Tensor, layers: list[Callable[..., Tensor]], info: MicroBatchInfo) -> Tensor:
    for layer in layers:
        x = layer(x, info) if isinstance(layer, LAYERS_WITH_INFO) else layer(x)
    return x


class VocabularyTable(VocabParallelEmbedding, Fusing):
    """The embedding table of a model: in the embedding, in the head, or tied in both.

    gradient_scale: function that returns the gradient of the loss in the coming backward pass
    observe: function that receives the scores of the labels, as `vocab_parallel_loss` describes it
    """

    gradient_scale: Callable[[], float] = staticmethod(lambda: 1.0)
    observe: Callable[[Tensor], None] | None = None

    def __init__(self, config: ModelConfig, tensor: TensorAxis, *, role: Role = "input"):
        super().__init__(
            config.vocab_size,
            config.hidden_size,
            padded_vocab_size=config.padded_vocab_size(tensor.size),
            tensor=tensor,
            role=role,
        )
        self.vocab_size = config.vocab_size
        self.multiplier = output_multiplier(config)
        self.soft_cap, self.z_loss = config.logit_soft_cap, config.z_loss

    def predict(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[s, b, h] to the logits [s, b, v/t]; given labels [b, s], to their mean loss in nats."""
        if self.multiplier != 1:
            x = x * self.multiplier  # cheaper than the logits, which are larger
        if labels is None:
            return soft_capped(self.logits(x), self.soft_cap)
        return vocab_parallel_loss(
            x,
            self.weight,
            labels,
            vocab_size=self.vocab_size,
            tensor=self.tensor,
            fuse=self.fuse,
            gradient_scale=self.gradient_scale(),
            soft_cap=self.soft_cap,
            z_loss=self.z_loss,
            observe=self.observe,
        )


class TokenEmbedding(VocabularyTable):
    """Tokens [b, s] to [s, b, h], with a factor, then dropout unless learned positions follow."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis):
        super().__init__(config, tensor)
        self.dropout = 0.0 if config.positions == "learned" else config.dropout
        self.embedding_multiplier = config.embedding_multiplier

    def forward(self, tokens: Tensor, info: MicroBatchInfo) -> Tensor:
        """[b, s] to [s, b, h]."""
        x = self.embed(tokens)
        if self.embedding_multiplier != 1:
            x = x * self.embedding_multiplier
        return dropout(
            x,
            self.dropout,
            key=info.dropout,
            layer="embedding",
            tensor=self.tensor,
            fuse=self.fuse,
            slices=info.slices,
        )

    @classmethod
    def spec(cls, config: ModelConfig, tensor: TensorAxis) -> LayerSpec:
        """Return the layer's spec, tied if the model ties its embeddings."""
        if config.tie_embeddings:
            return TiedLayerSpec(TIED_KEY, cls, config, tensor)
        return LayerSpec(cls, config, tensor)


class Head(VocabularyTable):
    """The output layer: [s, b, h] to logits, or to the loss."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis):
        super().__init__(config, tensor, role="output")

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[s, b, h] to the logits [s, b, v/t]; given labels [b, s], to their mean loss in nats."""
        return self.predict(x, labels)

    @classmethod
    def spec(cls, config: ModelConfig, tensor: TensorAxis) -> LayerSpec:
        """Return the layer's spec; if tied, it is the embedding's module with another forward."""
        if config.tie_embeddings:
            return TiedLayerSpec(
                TIED_KEY, TokenEmbedding, config, tensor, forward_fn=TokenEmbedding.predict
            )
        return LayerSpec(cls, config, tensor)


def expect_gradient_scale(module: nn.Module, scale: Callable[[], float]) -> None:
    """Let the losses in a module know the gradient that they will receive in the backward pass."""
    for layer in module.modules():
        if isinstance(layer, VocabularyTable):
            layer.gradient_scale = scale


@contextmanager
def observed_scores(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that receives the scores of the labels of each forward pass in the block.

    The scores of a micro-batch are fp32 [2, b, s], as `vocab_parallel_loss` describes them. The
    list stays empty if the module does not compute the loss.
    """
    scores: list[Tensor] = []
    tables = [table for table in module.modules() if isinstance(table, VocabularyTable)]
    try:
        for table in tables:
            table.observe = scores.append
        yield scores
    finally:
        for table in tables:
            table.observe = None


class LearnedPositions(Fusing):
    """Add a learned vector per position in the document to [s, b, h]."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis):
        super().__init__()
        self.dropout, self.tensor = config.dropout, tensor
        shape = (config.sequence_length, config.hidden_size)
        self.weight = declared_parameter(Sharding(shape, role="input"), tensor)

    def forward(self, x: Tensor, info: MicroBatchInfo) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        split = self.tensor.sequence_parallel
        if info.documents is not None:
            indices = positions_in(info.documents, x.device, info.slices)
            positions = look_up(indices, self.weight)  # [s, b, h]
        elif info.slices is not None:
            positions = rows_in(info.slices, self.weight).unsqueeze(1)  # [s, 1, h]
        else:
            length = x.shape[0] * (self.tensor.size if split else 1)
            positions = self.weight[:length].unsqueeze(1)  # [s, 1, h]
        if split:
            positions = scatter_to_tensor_axis(positions, self.tensor)  # [s/t, 1 or b, h]
        x = x + positions
        return dropout(
            x,
            self.dropout,
            key=info.dropout,
            layer="positions",
            tensor=self.tensor,
            fuse=self.fuse,
            slices=info.slices,
        )


LAYERS_WITH_INFO = (TokenEmbedding, LearnedPositions, Block)  # the other layers take only x


class SequentialModel(nn.Module):
    """All layers in one module, for the ZeRO stages that DeepSpeed's pipeline does not support.

    Parameters have the names that a PipelineModule of the same specs gives them.

    Args:
        specs: the layers in order, as `layer_specs` returns them
        recompute_interval: number of blocks that the backward pass recomputes at a time; 0: none
        created: called with the number and the module of each layer, before the next one is built
    """

    def __init__(
        self,
        specs: list[LayerSpec],
        *,
        recompute_interval: int = 0,
        created: Callable[[int, nn.Module], None] = lambda number, layer: None,
    ):
        super().__init__()
        self.recompute_interval = recompute_interval
        self.tied_modules = nn.ModuleDict()
        self.layers: list[Callable[..., Tensor]] = []
        for index, spec in enumerate(specs):
            if not isinstance(spec, TiedLayerSpec):
                layer = spec.build()
                self.add_module(str(index), layer)
                created(index, layer)
            else:
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                    created(index, self.tied_modules[spec.key])
                layer = self.tied_modules[spec.key]
                if spec.forward_fn:
                    layer = partial(spec.forward_fn, layer)
            self.layers.append(layer)

    def forward(self, tokens: Tensor, labels: Tensor, info: MicroBatchInfo) -> Tensor:
        """Return the mean cross-entropy of labels [b, s] after tokens [b, s]."""
        return run_layers(
            self.layers,
            tokens,
            info=info,
            labels=labels,
            recompute_interval=self.recompute_interval,
        )
