"""Recording of one step: the logical activations and gradients of every module, in their order.

A rank holds parts of an activation: its micro-batches, its positions of each sequence, and its
columns. Each kind of activation declares here once how the ranks divide it, as parameters do in
`models/sharding.py`; the parts are then joined to [B, s, columns] for the B sequences of the step.

This module also perturbs the reference, a run in one process, by errors of the size of those by
which layouts differ.

B sequences of a step, s sequence, b micro-batch, h hidden, c context ranks, t tensor ranks.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import layer_specs
from models.attention import AttentionCore
from models.experts.layer import MixtureOfExperts, Router
from models.layer_specs import layer_names
from models.parallel.collectives import TensorAxis
from models.parallel.layers import ColumnParallelLinear, Norm, RowParallelLinear
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import Sharding, sharding_of
from models.transformer import MLP, Block
from threefold.engine.engine import Engine
from threefold.pipeline import stage
from threefold.pipeline.stage import replaced

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
# How the ranks divide an activation, in addition to the micro-batches and to the context ranks:
# "stream": [s, b, h], under sequence parallelism [s/t, b, h]
# "columns": [s, b, columns/t], whatever the layout of the stream is
# "tokens": [s/t, b, columns], also without sequence parallelism
Division = Literal["stream", "columns", "tokens"]


@dataclass(frozen=True)
class Value:
    """The name of a recorded tensor.

    module: logical name of the module that computes it, such as "blocks.0.mlp.down"
    phase: FORWARD (the output), BACKWARD (the gradient of an input), UPDATE (what follows the
        backward pass)
    tensor: the tensor, in words
    """

    module: str
    phase: str
    tensor: str


@dataclass
class Recording:
    """The logical tensors of a step.

    Attributes:
        values: one tensor for each tensor rank that holds a copy, in the order of computation
    """

    values: dict[Value, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Piece:
    """A rank's part of a logical tensor.

    rows: positions in the sequence of the rows of `part`
    copy: tensor rank that holds this copy; 0 if the tensor ranks hold different parts
    columns: declaration of the columns; None: the part has all of them
    """

    value: Value
    part: np.ndarray  # [s, b, columns]; arrays are pickled far faster than tensors
    samples: range
    rows: list[int]
    copy: int
    tensor_rank: int
    columns: Sharding | None


class Recorder:
    """Records what the modules of an engine compute, on this rank.

    Attributes:
        losses: for each micro-batch, the sum of the losses of its sequences
    """

    def __init__(self, engine: Engine):
        self.engine, self.tensor = engine, engine.axes.tensor
        self.pieces: list[_Piece] = []
        self.losses: list[float] = []
        self._local = threading.local()  # paired passes run in two threads
        self._names = dict(_logical_modules(engine))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the passes in this context."""
        hooks = [hook for name, module in self._names.items() for hook in self._hooks(name, module)]
        with (
            replaced(stage, "run_layers", self._following(stage.run_layers)),
            replaced(layer_specs, "run_layers", self._following(layer_specs.run_layers)),
        ):
            yield
        for hook in hooks:
            hook.remove()

    def _following(self, run_layers: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that notes which samples run, and their loss."""

        def run(layers: Any, x: Tensor, *, info: MicroBatchInfo, **settings: Any) -> Tensor:
            self._local.info = info
            y = run_layers(layers, x, info=info, **settings)
            if settings.get("labels") is not None and torch.is_grad_enabled():
                assert info.dropout is not None
                self.losses.append(float(y.detach()) * len(info.dropout.samples))
            return y

        return run

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        """Hook a module; the input of a module is the output of the norm or layer before it."""
        if isinstance(module, Block):
            first = self._before(name)
            into = lambda _, x: self._note(x[0], first, f"{name}", "stream")  # noqa: E731
            yield module.register_forward_pre_hook(into)
            yield self._on_output(module, name, "", "stream")
        elif isinstance(module, ColumnParallelLinear):
            sharding = sharding_of(module.weight)
            after = {"qkv": "core", "up": "activation"}.get(name.split(".")[-1], "")
            follower = f"{name.rpartition('.')[0]}.{after}" if after else name
            columns = Sharding((sharding.shape[0],), 0, sharding.blocks)
            yield self._on_output(module, name, follower, "columns", columns)
        elif isinstance(module, RowParallelLinear):
            size = sharding_of(module.weight).shape[1]
            parent, _, last = name.rpartition(".")
            before = f"{parent}.{'core' if last == 'output' else 'activation'}"
            columns = Sharding((size,), 0, (size,))
            into = lambda _, x: self._note(x[0], before, name, "columns", columns)  # noqa: E731
            yield module.register_forward_pre_hook(into)
            yield self._on_output(module, name, "", "stream")
        elif isinstance(module, AttentionCore | MLP | MixtureOfExperts):
            if isinstance(module, MLP) and name.endswith(".shared"):
                return
            norm, linear = f"{name}_norm", f"{name}.{'up' if isinstance(module, MLP) else 'qkv'}"
            first = norm if norm in self._names else f"{name}.input"
            reads = linear if linear in self._names else name
            into = lambda _, x: self._note(x[0], first, reads, "stream")  # noqa: E731
            yield module.register_forward_pre_hook(into)
            if isinstance(module, MixtureOfExperts):
                yield self._on_output(module, name, "", "stream")
        elif isinstance(module, Router):
            logits = lambda _, x, y: self._note(y[0], name, f"{name}.loss", "tokens")  # noqa: E731
            yield module.register_forward_hook(logits)
        elif isinstance(module, Norm) and name == "final_norm":
            yield self._on_output(module, name, "head", "stream")

    def _before(self, block: str) -> str:
        """Return the name of what computes the input of a block."""
        prefix, _, number = block.rpartition(".")
        if number != "0":
            return f"{prefix}.{int(number) - 1}.output"
        names = layer_names(self.engine.recipe.model)
        return names[names.index(block) - 1] if block in names else f"{block}.input"

    def _on_output(
        self,
        module: nn.Module,
        name: str,
        follower: str,
        division: Division,
        columns: Sharding | None = None,
    ) -> Any:
        return module.register_forward_hook(
            lambda _, x, y: self._note(y, name, follower, division, columns)
        )

    def _note(
        self,
        x: Tensor,
        module: str,
        follower: str,
        division: Division,
        columns: Sharding | None = None,
    ) -> None:
        """Keep a copy of an activation now, and of its gradient in the backward pass.

        Args:
            module: computes the activation
            follower: computes its gradient in the backward pass; empty: several modules do
        """
        # A recomputed forward pass runs within a backward pass.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        info: MicroBatchInfo = self._local.info
        assert info.dropout is not None
        samples, rows = info.dropout.samples, self._rows(info, division)
        is_copy = division == "stream" and not self.tensor.sequence_parallel

        def keep(value: Value, part: Tensor, scale: float = 1.0) -> None:
            copied = (part.detach().float().cpu() * scale).numpy()
            copy = self.tensor.rank if is_copy else 0
            self.pieces.append(
                _Piece(value, copied, samples, rows, copy, self.tensor.rank, columns)
            )

        keep(Value(module, FORWARD, "output"), x)
        if follower and x.requires_grad:
            value = Value(follower, BACKWARD, f"gradient of the output of {module}")
            # The loss of a rank is a mean over its own tokens.
            scale = 1 / self.engine.axes.dims.dp_cp_size
            x.register_hook(lambda gradient: keep(value, gradient, scale))

    def _rows(self, info: MicroBatchInfo, division: Division) -> list[int]:
        """Return the positions in the sequence of this rank's rows."""
        length = self.engine.recipe.model.sequence_length
        rows = [position for held in info.slices or (range(length),) for position in held]
        is_split = division == "tokens" or (division == "stream" and self.tensor.sequence_parallel)
        if not is_split:
            return rows
        share = len(rows) // self.tensor.size
        return rows[self.tensor.rank * share :][:share]

    def gather(self) -> Recording | None:
        """Return the logical tensors on rank 0, None on other ranks; collective."""
        sequences = self.engine.recipe.batch.global_sequences
        of_ranks: list[Any] | None = (
            [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        )
        is_reporting = self.tensor.rank == 0
        dist.gather_object((self.pieces, sum(self.losses) if is_reporting else 0.0), of_ranks)
        if of_ranks is None:
            return None
        values: dict[Value, list[Tensor]] = {}
        whole: dict[tuple[Value, int], Tensor] = {}
        length = self.engine.recipe.model.sequence_length
        for piece in (piece for pieces, _ in of_ranks for piece in pieces):
            part = torch.from_numpy(piece.part)
            width = piece.columns.shape[0] if piece.columns else part.shape[-1]
            key = piece.value, piece.copy
            if key not in whole:
                whole[key] = torch.full((sequences, length, width), torch.nan)
                values.setdefault(piece.value, []).append(whole[key])
            columns = _columns(piece.columns, piece.tensor_rank, self.tensor.size, width)
            rows = torch.tensor(piece.rows)
            for number, sample in enumerate(piece.samples):
                if sample < sequences:  # a fault may read others
                    whole[key][sample, rows[:, None], columns] = part[:, number]
        context = self.engine.axes.dims.context
        loss = torch.tensor(sum(total for _, total in of_ranks) / (sequences * context))
        forward = {value: parts for value, parts in values.items() if value.phase == FORWARD}
        backward = {value: parts for value, parts in values.items() if value.phase == BACKWARD}
        return Recording(forward | {Value("head", FORWARD, "loss"): [loss]} | backward)


def _columns(sharding: Sharding | None, rank: int, size: int, width: int) -> Tensor:
    """Return the numbers of the columns that a tensor rank holds."""
    if sharding is None or size == 1:
        return torch.arange(width)
    return sharding.local_part(torch.arange(width), TensorAxis(rank=rank, size=size))


def _logical_modules(engine: Engine) -> Iterator[tuple[str, nn.Module]]:
    """Yield the logical names and the modules of this rank's layers."""
    names = layer_names(engine.recipe.model)
    for name, module in engine.wrapped.module.named_modules():
        layer, _, rest = name.partition(".")
        if layer.isdecimal():
            yield ".".join(filter(None, (names[int(layer)], rest))), module


# Perturbations of a run in one process.


@contextlib.contextmanager
def perturbed(engine: Engine, number: int) -> Iterator[None]:
    """Perturb the passes in this context, as other layouts round differently.

    Every linear layer sums in 2 or 4 parts, as tensor ranks do: forward the columns of a
    row-parallel one, backward the rows of a column-parallel one. The values that layers and blocks
    compute, and the gradients that they receive, change by one unit in the last place or stay. Size
    and order of the micro-batches stay, because a fault that depends on them would widen the bands
    that have to show it; sums over micro-batches are in fp32.

    Args:
        number: of the run; it decides the random numbers
    """
    generator = torch.Generator().manual_seed(number)
    parts = (2, 4)[number // 2 % 2]
    hooks, split = [], []
    for module in engine.wrapped.module.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.forward = _in_parts(module, parts)  # type: ignore[method-assign]
            split.append(module)
        if isinstance(module, Block | Norm | ColumnParallelLinear | RowParallelLinear):
            hooks.append(
                module.register_forward_hook(lambda _, x, y: _NextFloat.apply(y, generator))
            )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in split:
            del module.forward


def _in_parts(
    module: ColumnParallelLinear | RowParallelLinear, parts: int
) -> Callable[..., Tensor]:
    """Return the forward pass of a linear layer that computes parts, as tensor ranks do."""

    def forward(x: Tensor, *, bias_gradient: bool = True) -> Tensor:
        weight, bias = module.weight, module.bias
        if isinstance(module, RowParallelLinear):
            pairs = zip(x.chunk(parts, -1), weight.chunk(parts, 1), strict=True)
            total, *others = [nn.functional.linear(*pair) for pair in pairs]
            for other in others:
                total = total + other
            return total
        y = torch.cat([nn.functional.linear(x, rows) for rows in weight.chunk(parts)], dim=-1)
        if bias is None:
            return y
        return y + (bias if bias_gradient else bias.detach())

    return forward


class _NextFloat(torch.autograd.Function):
    """Each number, or one of its neighbours; the same for its gradient."""

    @staticmethod
    def forward(ctx, x, generator):
        ctx.generator = generator
        return next_float(x, generator)

    @staticmethod
    def backward(ctx, grad):
        return next_float(grad, ctx.generator), None


def next_float(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers that are one unit in the last place larger or smaller, or the same.

    The bits of a float are those of an integer whose successor is the next float.
    """
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    steps = torch.randint(-1, 2, x.shape, generator=generator, dtype=bits)
    moved = (x.contiguous().view(bits) + steps).view(x.dtype)
    return torch.where(x == 0, x, moved)
