"""The model as one list of LayerSpecs, which a pipeline divides among its stages.

| layer               | input        | output      | note                               |
|---------------------|--------------|-------------|------------------------------------|
| embedding           | tokens [b, s] | [s, b, h]  | tied with the head if the model is |
| positions           | [s, b, h]    | [s, b, h]   | learned positions only             |
| blocks.0, 1, ...    | [s, b, h]    | [s, b, h]   |                                    |
| final_norm          | [s, b, h]    | [s, b, h]   |                                    |
| look_ahead          | labels       | D [s, b, h] | the embedding, of further tokens   |
| predictions         | 1 + D [s, b, h] | D [s, b, h] | predict further tokens          |
| head                | [s, b, h]    | [s, b, v/t] | logits of this rank's vocabulary;  |
|                     |              | or []       | given the labels, their loss       |

Models without prediction modules (`models/transformer.py`) have neither look_ahead nor predictions.

s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor ranks; under sequence parallelism
everything between embedding and head is [s/t, b, h]. This module also defines the names of the
parameters, which do not depend on the layout: `blocks.3.attention.qkv.weight`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

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
from models.parallel.layers import NORMS, Deferring, VocabParallelEmbedding
from models.parallel.micro_batch_info import MicroBatchInfo, dropout, positions_in, rows_in
from models.sharding import Role, Sharding, declared_parameter, sharding_of
from models.transformer import Block, Predictions

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
        "look_ahead": TokenEmbedding.spec(config, tensor, forward_fn=TokenEmbedding.look_ahead),
        "predictions": LayerSpec(Predictions, config, axes, recompute_core=recompute_core),
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
    predictions = ["look_ahead", "predictions"] if config.prediction else []
    return ["embedding", *positions, *blocks, "final_norm", *predictions, "head"]


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

    Further tokens are predicted only in training, because their losses only have gradients.

    labels: [b, s], an input of the last layer; [b, s, 1 + D] in training if D further tokens are
        predicted
    recompute_interval: number of blocks that the backward pass recomputes at a time; 0: none
    """
    layers = list(layers)
    predicting: list[Callable[..., Any]] = []
    if any(isinstance(layer, Predictions) for layer in layers):
        *layers, look_ahead, predictions, head = layers
        predicting, layers = [look_ahead, predictions], [*layers, head]
    if labels is None:
        return _run_all(layers, x, info, recompute_interval)
    *layers, head = layers
    x = _run_all(layers, x, info, recompute_interval)
    if not predicting or labels.dim() == 2:
        return head(x, labels)
    look_ahead, predictions = predicting
    embedded = look_ahead(labels, info)
    return head(x, labels, predictions(x, embedded, info, recompute_interval > 0))


def _run_all(
    layers: Sequence[Callable[..., Tensor]],
    x: Tensor,
    info: MicroBatchInfo,
    recompute_interval: int,
) -> Tensor:
    for are_blocks, group in groupby(layers, key=lambda layer: isinstance(layer, Block)):
        run = list(group)
        if not are_blocks or recompute_interval == 0:
            x = _run_in_turn(x, run, info)
            continue
        for first in range(0, len(run), recompute_interval):
            blocks = run[first : first + recompute_interval]
            x = recomputed(partial(_run_in_turn, layers=blocks, info=info), x)
    return x


def _run_in_turn(x: Tensor, layers: list[Callable[..., Tensor]], info: MicroBatchInfo) -> Tensor:
    for layer in layers:
        x = layer(x, info) if isinstance(layer, LAYERS_WITH_INFO) else layer(x)
    return x


class VocabularyTable(VocabParallelEmbedding, Fusing):
    """The embedding table of a model: in the embedding, in the head, or tied in both.

    gradient_scale: function that returns the gradient of the loss in the coming backward pass
    observe: function that receives the scores of the labels, as `vocab_parallel_loss` describes it
    prediction_sums: for each further token, sum of the losses and number of the labels of all
        micro-batches since the attribute was reset, [D, 2]; None before the first micro-batch
    """

    gradient_scale: Callable[[], float] = staticmethod(lambda: 1.0)
    observe: Callable[[Tensor], None] | None = None
    prediction_sums: Tensor | None = None

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
        self.prediction_weight = 0.0  # factor of the loss of each prediction module
        if config.prediction is not None:
            self.prediction_weight = config.prediction.loss_weight / config.prediction.depth

    def predict(
        self, x: Tensor, labels: Tensor | None = None, further: Sequence[Tensor] = ()
    ) -> Tensor:
        """[s, b, h] to the logits [s, b, v/t]; given labels [b, s], to their mean loss in nats.

        Args:
            labels: [b, s], or [b, s, 1 + D] with `further`
            further: outputs of D prediction modules, whose losses only have gradients
        """
        if self.multiplier != 1:
            x = x * self.multiplier  # cheaper than the logits, which are larger
            further = [y * self.multiplier for y in further]
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
            further=further,
            further_weight=self.prediction_weight,
            note=self._note,
        )

    def _note(self, sums: Tensor) -> None:
        """Add the sums of a micro-batch, without waiting for the device."""
        total = self.prediction_sums
        self.prediction_sums = sums.double() if total is None else total + sums


class TokenEmbedding(VocabularyTable):
    """Tokens [b, s] to [s, b, h], with a factor, then dropout unless learned positions follow."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis):
        super().__init__(config, tensor)
        self.dropout = 0.0 if config.positions == "learned" else config.dropout
        self.embedding_multiplier = config.embedding_multiplier

    def forward(self, tokens: Tensor, info: MicroBatchInfo) -> Tensor:
        """[b, s] to [s, b, h]."""
        return self._embedded(tokens, info, "embedding")

    def _embedded(self, tokens: Tensor, info: MicroBatchInfo, layer: str) -> Tensor:
        """[b, s] to [s, b, h].

        layer: name on which the dropout mask depends
        """
        x = self.embed(tokens)
        if self.embedding_multiplier != 1:
            x = x * self.embedding_multiplier
        return dropout(
            x,
            self.dropout,
            key=info.dropout,
            layer=layer,
            tensor=self.tensor,
            fuse=self.fuse,
            slices=info.slices,
        )

    def look_ahead(self, labels: Tensor, info: MicroBatchInfo) -> list[Tensor]:
        """Embed the tokens 1, 2, ..., D positions later: D tensors [s, b, h].

        A token that does not exist is replaced by the token 0. Its output predicts no label.

        Args:
            labels: [b, s, 1 + D]
        """
        tokens = labels.clamp(min=0).unbind(-1)[:-1]
        return [
            self._embedded(of_depth, info, f"embedding.{depth}")
            for depth, of_depth in enumerate(tokens, start=1)
        ]

    @classmethod
    def spec(
        cls,
        config: ModelConfig,
        tensor: TensorAxis,
        *,
        forward_fn: Callable[..., list[Tensor]] | None = None,
    ) -> LayerSpec:
        """Return the layer's spec, tied if several layers have the embedding."""
        if config.copies_embedding:
            return TiedLayerSpec(TIED_KEY, cls, config, tensor, forward_fn=forward_fn)
        return LayerSpec(cls, config, tensor)


class Head(VocabularyTable):
    """The output layer: [s, b, h] to logits, or to the loss."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis):
        super().__init__(config, tensor, role="output")

    def forward(
        self, x: Tensor, labels: Tensor | None = None, further: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return the logits or the loss, as `predict`."""
        return self.predict(x, labels, further)

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
    for table in vocabulary_tables(module):
        table.gradient_scale = scale


@contextmanager
def observed_scores(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that receives the scores of the labels of each forward pass in the block.

    The scores of a micro-batch are fp32 [2, b, s], as `vocab_parallel_loss` describes them. The
    list stays empty if the module does not compute the loss.
    """
    scores: list[Tensor] = []
    tables = vocabulary_tables(module)
    try:
        for table in tables:
            table.observe = scores.append
        yield scores
    finally:
        for table in tables:
            table.observe = None


def vocabulary_tables(module: nn.Module) -> list[VocabularyTable]:
    """Return the embedding and output tables of a module."""
    return [layer for layer in module.modules() if isinstance(layer, VocabularyTable)]


def compute_in_fp8(module: nn.Module) -> None:
    """Let the matmuls of attention, MLPs and experts run in FP8.

    The expansion of latents to keys and values stays in the type of the weights: over context ranks
    that exchange latents, the gradient of its output is a partial sum, whose tiles would depend on
    the layout.
    """
    for block in module.modules():
        if not isinstance(block, Block):
            continue
        for name, layer in block.named_modules():
            if isinstance(layer, Deferring) and not name.endswith("kv_up"):
                layer.fp8 = True


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
    """All layers in one module: for ZeRO-3, and to run a model without an engine.

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
