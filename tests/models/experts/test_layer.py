"""A model with experts on several ranks against one rank, and the layer against a plain loop."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from models.attention import ModelAxes
from models.config import Experts, ModelConfig
from models.context_parallel.collectives import ContextAxis
from models.context_parallel.division import divide
from models.experts import dispatch, routing
from models.experts import layer as layer_module
from models.experts.layer import MixtureOfExperts, expert_layers
from models.experts.routing import ExpertAxis, choose_experts
from models.initialization import NormalRows, initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.parallel import layers
from models.parallel.collectives import TensorAxis, conjugate, create_groups, scatter_to_tensor_axis
from models.parallel.layers import Deferral, defer_weights
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import Sharding, sharding_of
from models.transformer import MLP
from tests.conftest import quick_and_long, selected
from tests.models.test_transformer import LLAMA, RECOMPUTE, labels_of, relative
from tests.ranks import run_ranks
from threefold.config.parallel_dims import ParallelDims

SEQUENCES = 4  # of the global batch
MODELS = {
    "softmax, normalized": replace(
        LLAMA,
        experts=Experts(
            count=8, per_token=2, ffn_hidden_size=24, shared=1, dense_layers=1, normalize=True,
            balance_loss=0.3, z_loss=0.05,
        ),
    ),
    "softmax-after-topk": replace(
        LLAMA,
        experts=Experts(
            count=8, per_token=3, ffn_hidden_size=24, router="softmax-after-topk", balance_loss=0.3
        ),
    ),
    "sigmoid": replace(
        LLAMA, layers=3,
        experts=Experts(
            count=8, per_token=2, ffn_hidden_size=24, shared=1, router="sigmoid", normalize=True,
            output_scale=2.5, balance_loss=0.3,
        ),
    ),
    "sigmoid, in groups": replace(
        LLAMA,
        experts=Experts(
            count=8, per_token=2, ffn_hidden_size=24, router="sigmoid", normalize=True, groups=4,
            groups_per_token=2, balance_loss=0.3,
        ),
    ),
    "gelu, tied": replace(
        LLAMA, activation="gelu", norm="layernorm", positions="learned", tie_embeddings=True,
        experts=Experts(count=4, per_token=2, ffn_hidden_size=16, shared=2, z_loss=0.05),
    ),
    "biases": replace(
        LLAMA, activation="clamped_swiglu", bias=True,
        experts=Experts(
            count=8, per_token=3, ffn_hidden_size=24, shared=1, router="softmax-after-topk",
            balance_loss=0.3, z_loss=0.05,
        ),
    ),
}  # fmt: skip
MODEL = "softmax, normalized"  # runs in every layout


@dataclass(frozen=True)
class Layout:
    """A layout of ranks; data ranks are those that remain."""

    dims: ParallelDims
    sequence_parallel: bool = False
    recompute: str = "none"
    micro_batches: int = 1


def layout_of(
    data: int = 1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    *,
    expert_tensor: int = 1,
    **rest: Any,
) -> Layout:
    sizes = {"data": data, "tensor": tensor, "context": context, "expert": expert}
    return Layout(ParallelDims(pipeline=1, **sizes, expert_tensor=expert_tensor), **rest)


LAYOUTS = {
    1: {
        "two micro-batches": layout_of(micro_batches=2),
        "four micro-batches": layout_of(micro_batches=4),
        "full recomputation": layout_of(recompute="full"),
        "two blocks recomputed": layout_of(recompute="full, two blocks at a time"),
    },
    2: {
        "data 2": layout_of(data=2),
        "expert 2": layout_of(data=2, expert=2),
        "expert 2, two micro-batches": layout_of(data=2, expert=2, micro_batches=2),
        "expert 2, recomputed": layout_of(data=2, expert=2, recompute="full"),
        "tensor 2": layout_of(tensor=2),
        "tensor 2, sequence-parallel": layout_of(tensor=2, sequence_parallel=True),
        "tensor 2, sequence-parallel, recomputed": layout_of(
            tensor=2, sequence_parallel=True, recompute="full"
        ),
        "expert tensor 2": layout_of(tensor=2, expert_tensor=2),
        "expert tensor 2, recomputed": layout_of(
            tensor=2, expert_tensor=2, sequence_parallel=True, recompute="full", micro_batches=2
        ),
        "context 2": layout_of(context=2),
        "context 2, expert 2": layout_of(context=2, expert=2),
    },
    4: {
        "expert 4": layout_of(data=4, expert=4),
        "expert 2, data 4": layout_of(data=4, expert=2),
        "expert 2, tensor 2": layout_of(data=2, tensor=2, expert=2),
        "expert 2, tensor 2, sequence-parallel": layout_of(
            data=2, tensor=2, expert=2, sequence_parallel=True, micro_batches=2
        ),
        "expert 2, tensor 2, recomputed": layout_of(
            data=2, tensor=2, expert=2, sequence_parallel=True, recompute="selective"
        ),
        "expert 2, expert tensor 2": layout_of(data=2, tensor=2, expert=2, expert_tensor=2),
        "expert 2, expert tensor 2, sequence-parallel": layout_of(
            data=2, tensor=2, expert=2, expert_tensor=2, sequence_parallel=True, micro_batches=2
        ),
        "expert 2, context 2, expert tensor 2": layout_of(
            tensor=2, context=2, expert=2, expert_tensor=2
        ),
        "data 2, expert tensor 2": layout_of(data=2, tensor=2, expert_tensor=2),
        "expert 2, context 2, tensor 2": layout_of(tensor=2, context=2, expert=2),
        "expert 4, context 2": layout_of(data=2, context=2, expert=4),
        "context 2, tensor 2": layout_of(tensor=2, context=2),
    },
}
LONG_LAYOUTS = (  # several of the other layouts together have their settings
    *("two micro-batches", "two blocks recomputed", "expert 2", "expert 2, recomputed"),
    *("tensor 2, sequence-parallel", "expert 2, data 4", "expert 2, tensor 2"),
    *("expert 2, tensor 2, recomputed", "expert 2, expert tensor 2", "data 2, expert tensor 2"),
    *("expert 4, context 2", "context 2, tensor 2"),
)
QUICK_LAYOUTS_OF_ALL_MODELS = ("expert tensor 2", "context 2, expert 2")
LAYOUTS_OF_ALL_MODELS = (
    *("four micro-batches", "expert 2", "tensor 2", "context 2, expert 2"),
    *("expert 2, tensor 2, sequence-parallel", "expert 2, context 2, tensor 2"),
    *("expert tensor 2", "expert 2, expert tensor 2, sequence-parallel"),
)
Case = tuple[str, int, str]  # model or seeded fault, number of ranks, layout
CASES: list[Case] = [
    (model, size, layout)
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    for model in (MODELS if layout in LAYOUTS_OF_ALL_MODELS else [MODEL])
]
QUICK_CASES = [
    (model, size, layout)
    for model, size, layout in CASES
    if layout in QUICK_LAYOUTS_OF_ALL_MODELS or (model == MODEL and layout not in LONG_LAYOUTS)
]
FAULTS: list[Case] = [  # seeded fault, number of ranks and layout on which it must show
    ("outputs not returned to their tokens", 2, "expert 2"),
    ("outputs not returned to their tokens", 4, "expert 2, tensor 2"),
    ("gates not applied in the backward pass", 2, "expert 2"),
    ("gates not applied in the backward pass", 2, "tensor 2"),
    ("counts of this rank only", 2, "tensor 2"),
    ("counts of this rank only", 2, "context 2"),
    ("counts of this rank only", 4, "expert 2, context 2, tensor 2"),
    ("router's gradient not summed over tensor ranks", 2, "tensor 2"),
    ("router's gradient not summed over tensor ranks", 2, "tensor 2, sequence-parallel"),
    ("router's gradient not summed over tensor ranks", 4, "expert 2, tensor 2, sequence-parallel"),
    ("losses not divided by the number of micro-batches", 1, "two micro-batches"),
    ("losses not divided by the number of micro-batches", 2, "expert 2, two micro-batches"),
    ("fractions of the whole micro-batch", 1, "two micro-batches"),
    ("fractions of the whole micro-batch", 2, "expert 2"),
    ("experts numbered from the last rank", 2, "expert 2"),
    ("experts numbered from the last rank", 4, "expert 4"),
    ("each tensor rank routes the first tokens", 2, "tensor 2"),
    ("rows sorted by rank instead of by expert", 4, "expert 2, tensor 2"),
    ("noted in the forward pass too", 2, "expert 2, recomputed"),
    ("terms of one tensor rank only", 2, "expert tensor 2"),
    ("terms of one tensor rank only", 4, "expert 2, expert tensor 2"),
    ("gradients of gathered rows not summed", 2, "expert tensor 2"),
    ("gradients of gathered rows not summed", 4, "expert 2, context 2, expert tensor 2"),
    ("gathered rows in reverse order of ranks", 2, "expert tensor 2"),
    ("gathered rows in reverse order of ranks", 4, "data 2, expert tensor 2"),
    ("rows sorted by rank instead of by expert", 2, "expert tensor 2"),
    ("experts numbered from the last rank", 4, "expert 2, expert tensor 2"),
]
QUICK_FAULTS = list({fault: (fault, size, layout) for fault, size, layout in FAULTS[::-1]}.values())


@dataclass(frozen=True)
class Outcome:
    """The results of a rank or of the global batch.

    loss: mean loss in nats
    evaluated: the same without gradients, as in an evaluation
    gradients: by logical name; of the global batch, those of each tensor rank if all have the same
        parameter, and one whole tensor otherwise
    statistics: tokens of each expert, balance loss, z-loss and margin of each layer with experts
    """

    loss: Tensor
    evaluated: Tensor
    gradients: dict[str, list[Tensor]]
    statistics: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)


def run_on_a_rank(config: ModelConfig, layout: Layout, rank: int) -> Outcome:
    """Run forward and backward on this rank's part of the global batch."""
    dims = layout.dims
    place = dims.coordinates(rank)
    tensor, context, experts = axes(layout, rank)
    cores, interval = RECOMPUTE[layout.recompute]
    specs = layer_specs(
        config, ModelAxes(tensor=tensor, context=context, expert=experts), recompute_core=cores
    )
    model = SequentialModel(specs, recompute_interval=interval)
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3, tensor=tensor)
    for name, parameter in parameters.items():
        if config.bias and name.endswith("bias"):  # instead of zeros
            sharding = sharding_of(parameter)
            rows = NormalRows(sharding.shape, name=name, seed=4)(0, sharding.shape[0])
            parameter.data.copy_(sharding.local_part(rows / 5, tensor))
    micro_batches = layout.micro_batches
    for layer in expert_layers(model):
        layer.gradient_scale = lambda: 1 / micro_batches
    info = MicroBatchInfo()
    own = example_tokens(config).chunk(dims.data)[place.data]
    labels = labels_of(own)
    if context.size > 1:
        division = divide(config.sequence_length, context.rank, context.size, None)
        own, labels = (
            torch.cat([x[:, each.start : each.stop] for each in division.slices], dim=1)
            for x in (own, labels)
        )
        info = MicroBatchInfo(division=division)
    total = evaluated = torch.zeros(())
    for tokens, targets in zip(own.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
        loss = model(tokens, targets, info) / micro_batches
        loss.backward()
        total = total + loss.detach()
        with torch.no_grad():
            evaluated = evaluated + model(tokens, targets, info) / micro_batches
    return Outcome(
        total,
        evaluated,
        {name: [gradient_of(parameter)] for name, parameter in parameters.items()},
        [statistics_of(layer, micro_batches) for layer in expert_layers(model)],
    )


@functools.cache
def axes(layout: Layout, rank: int) -> tuple[TensorAxis, ContextAxis, ExpertAxis]:
    """Create the groups of a layout, and return the axes from this rank's perspective."""
    dims = layout.dims
    place = dims.coordinates(rank)
    size = dims.expert * dims.tensor // dims.expert_tensor
    sharing = dims.context * dims.tensor
    tensor, context = TensorAxis(), ContextAxis()
    if dims.tensor > 1:
        group = create_groups(dims.groups("tensor"))
        tensor = TensorAxis(group, place.tensor, dims.tensor, layout.sequence_parallel)
    if dims.context > 1:
        group = create_groups(dims.groups("context"))
        context = ContextAxis(group, place.context, dims.context, "gather")
    experts = ExpertAxis(
        group=create_groups(dims.expert_groups()) if size > 1 else None,
        rank=rank // dims.expert_tensor % size,
        size=size,
        sequence_group=create_groups(dims.groups("context", "tensor")) if sharing > 1 else None,
        sequence_size=sharing,
        tensor=tensor,
        columns=tensor if dims.expert_tensor > 1 else TensorAxis(),
    )
    return tensor, context, experts


def example_tokens(config: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (SEQUENCES, config.sequence_length)
    return torch.randint(config.vocab_size, shape, generator=generator)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def statistics_of(
    layer: MixtureOfExperts, micro_batches: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = layer.statistics
    assert found.counts is not None
    balance, z, margin = (torch.as_tensor(x) for x in (found.balance, found.z, found.margin))
    return found.counts, balance.detach() / micro_batches, z.detach() / micro_batches, margin


def joined(config: ModelConfig, layout: Layout, parts: list[Outcome]) -> Outcome:
    """Return the outcome of the global batch.

    Gradients are averaged over data and context ranks. Those of an expert are already sums over the
    ranks of its expert group.
    """
    dims = layout.dims
    replicas, tensor = dims.dp_cp_size, dims.tensor
    shardings = shardings_of(config, dims)
    assert {name for part in parts for name in part.gradients} == shardings.keys()
    gradients = {}
    for name, sharding in shardings.items():
        held = [part.gradients[name][0] for part in parts if name in part.gradients]
        if sharding.of_expert:
            assert len(held) == replicas // dims.expert * dims.expert_tensor
            ranks = dims.expert_tensor
            sums = [torch.stack(held[rank::ranks]).sum(0) for rank in range(ranks)]
            gradients[name] = [sharding.logical_tensor(sums) / replicas]
            continue
        of_tensor_ranks = [torch.stack(held[rank::tensor]).mean(0) for rank in range(tensor)]
        gradients[name] = (
            of_tensor_ranks if sharding.replicated else [sharding.logical_tensor(of_tensor_ranks)]
        )
    layers = [
        (
            sum(each[0] for each in ranks),
            sum(each[1] for each in ranks) / replicas,
            sum(each[2] for each in ranks) / replicas,
            torch.stack([each[3] for each in ranks]).min(),
        )
        for ranks in zip(*(part.statistics for part in parts), strict=True)
    ]
    loss, evaluated = (
        torch.stack([getattr(part, kind) for part in parts]).mean()
        for kind in ("loss", "evaluated")
    )
    return Outcome(loss, evaluated, gradients, layers)


def shardings_of(config: ModelConfig, dims: ParallelDims) -> dict[str, Sharding]:
    """Return the declaration of every parameter by logical name."""
    axis = TensorAxis(size=dims.tensor)
    experts = ExpertAxis(
        tensor=TensorAxis(size=dims.tensor), columns=TensorAxis(size=dims.expert_tensor)
    )
    with torch.device("meta"):
        model = SequentialModel(layer_specs(config, ModelAxes(tensor=axis, expert=experts)))
    return {name: sharding_of(each) for name, each in logical_parameters(model, config)}


def largest_difference(found: Outcome, expected: Outcome) -> float:
    """Return the largest relative difference of loss, gradients and statistics; counts are exact.

    It is relative to the largest entry of each tensor. Margins are not compared, because they are
    differences of nearly equal numbers.
    """
    assert found.gradients.keys() == expected.gradients.keys()
    differences = [relative(each, expected.loss) for each in (found.loss, found.evaluated)]
    for name, copies in found.gradients.items():
        differences += [relative(each, expected.gradients[name][0]) for each in copies]
    for one, other in zip(found.statistics, expected.statistics, strict=True):
        differences.append(0.0 if torch.equal(one[0], other[0]) else torch.inf)
        differences += [relative(one[place], other[place]) for place in (1, 2)]
    return float(torch.tensor(differences).max())  # NaN if one is NaN


def worker(cases: list[Case], faults: list[Case]) -> dict[Any, Outcome]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    outcomes = run_cases(cases, faults, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    return outcomes


def run_cases(cases: list[Case], faults: list[Case], rank: int, size: int) -> dict[Any, Outcome]:
    """Run the cases and the seeded faults of a world on one rank."""
    outcomes: dict[Any, Outcome] = {}
    for model, ranks, name in cases:
        if ranks == size:
            outcomes[model, name] = run_on_a_rank(MODELS[model], LAYOUTS[size][name], rank)
    for fault, ranks, name in faults:
        if ranks == size:
            with seeded_fault(fault):
                found = run_on_a_rank(MODELS[MODEL], LAYOUTS[size][name], rank)
            outcomes["fault", fault, name] = found
    return outcomes


@contextlib.contextmanager
def seeded_fault(fault: str) -> Iterator[None]:
    """Break the layer in one way."""
    combine, attach, balance_loss = (
        dispatch.begin_combine,
        routing._Attach.forward,
        routing.balance_loss,
    )
    gather = dispatch._gather
    experts_here, with_losses = ExpertAxis.experts_here, routing.with_router_losses

    def unpermuted(
        y: Tensor, gates: Tensor, ways: routing.Routes, axis: ExpertAxis, **settings: Any
    ) -> Callable[[], Tensor]:
        ways = replace(ways, sent_rows=torch.arange(len(ways.tokens)).view(gates.shape))
        return combine(y, gates, ways, axis, **settings)

    weighted_sum_backward = dispatch._weighted_sum_backward

    def unweighted(grad: Tensor, x: Tensor, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_sum_backward(grad, x, torch.ones_like(weights), rows)

    def pooled(probabilities: Tensor, counts: Tensor, k: int, axis: ExpertAxis) -> Tensor:
        probabilities = probabilities.flatten(0, 1)[:, None]
        return balance_loss(probabilities, counts.sum(0, keepdim=True), k, axis)

    def unscaled(*given: Any, gradient_scale: Callable[[], float], **rest: Any) -> Tensor:
        return with_losses(*given, gradient_scale=lambda: 1.0, **rest)

    def noting(ctx: Any, gates: Tensor, *rest: Any) -> Tensor:
        balance, z, counts, margin, *_, found, _ = rest
        found.note(counts, balance, z, margin)
        return attach(ctx, gates, *rest)

    def own_rows(x: Tensor, rows: list[int], axis: TensorAxis) -> Tensor:
        return x.split(rows)[axis.rank]

    def gathered_in_reverse(x: Tensor, rows: list[int], axis: TensorAxis) -> Tensor:
        return torch.cat(gather(x, rows, axis).split(rows)[::-1])

    def reversed_numbers(axis: ExpertAxis, experts: int) -> range:
        return experts_here(replace(axis, rank=axis.size - 1 - axis.rank), experts)

    faults: dict[str, tuple[Any, str, Any]] = {
        "outputs not returned to their tokens": (layer_module, "begin_combine", unpermuted),
        "gates not applied in the backward pass": (
            dispatch,
            "_weighted_sum_backward",
            unweighted,
        ),
        "counts of this rank only": (
            routing,
            "dist",
            mock.Mock(wraps=dist, all_reduce=lambda counts, group: None),
        ),
        "router's gradient not summed over tensor ranks": (
            layer_module,
            "copy_to_tensor_axis",
            lambda weight, axis: weight,
        ),
        "losses not divided by the number of micro-batches": (
            layer_module,
            "with_router_losses",
            unscaled,
        ),
        "fractions of the whole micro-batch": (routing, "balance_loss", pooled),
        "experts numbered from the last rank": (ExpertAxis, "experts_here", reversed_numbers),
        "each tensor rank routes the first tokens": (
            layer_module,
            "scatter_to_tensor_axis",
            lambda x, axis: scatter_to_tensor_axis(x, replace(axis, rank=0)),
        ),
        "rows sorted by rank instead of by expert": (
            routing,
            "_by_expert",
            lambda counts, total: torch.arange(total),
        ),
        "terms of one tensor rank only": (dispatch, "sum_rows", own_rows),
        "gradients of gathered rows not summed": (
            dispatch,
            "gather_rows",
            lambda x, rows, axis: conjugate(x, gather, own_rows, rows, axis),
        ),
        "gathered rows in reverse order of ranks": (
            dispatch,
            "_gather",
            gathered_in_reverse,
        ),
        "noted in the forward pass too": (routing._Attach, "forward", staticmethod(noting)),
    }
    with mock.patch.object(*faults[fault]):
        yield


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[int, list[dict[Any, Outcome]]]:
    """Return the outcomes of each rank, by the size of the world."""
    cases = selected(request, test_every_layout_agrees_with_one_rank, "case")
    faults = selected(request, test_a_seeded_fault_is_noticed, "case")
    of_ranks = {size: run_ranks(size, worker, cases, faults) for size in (2, 4)}
    return {1: [run_cases(cases, faults, 0, 1)]} | of_ranks


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    """Return the outcome of one rank with one micro-batch, by model."""
    return {
        name: joined(config, layout_of(), [run_on_a_rank(config, layout_of(), 0)])
        for name, config in MODELS.items()
    }


@pytest.mark.parametrize("case", quick_and_long(QUICK_CASES, CASES), ids=str)
def test_every_layout_agrees_with_one_rank(
    case: Case,
    outcomes: dict[int, list[dict[Any, Outcome]]],
    alone: dict[str, Outcome],
) -> None:
    model, size, layout = case
    parts = [each[model, layout] for each in outcomes[size]]
    found = joined(MODELS[model], LAYOUTS[size][layout], parts)
    assert largest_difference(found, alone[model]) < 1e-5


@pytest.mark.parametrize("case", quick_and_long(QUICK_FAULTS, FAULTS), ids=str)
def test_a_seeded_fault_is_noticed(
    case: Case,
    outcomes: dict[int, list[dict[Any, Outcome]]],
    alone: dict[str, Outcome],
) -> None:
    fault, size, layout = case
    parts = [each["fault", fault, layout] for each in outcomes[size]]
    found = joined(MODELS[MODEL], LAYOUTS[size][layout], parts)
    assert not largest_difference(found, alone[MODEL]) < 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_the_example_uses_every_expert_and_has_no_near_tie(
    model: str, alone: dict[str, Outcome]
) -> None:
    """Show that rounding cannot change the choice, and that all gradients are compared."""
    config = MODELS[model]
    assert config.experts is not None
    assert len(alone[model].statistics) == config.expert_layers
    for counts, *_, margin in alone[model].statistics:
        choices = SEQUENCES * config.sequence_length * config.experts.per_token
        assert int(counts.sum()) == choices and int(counts.min()) > 0
        assert float(margin) > 1e-4


def layer_of(config: ModelConfig) -> MixtureOfExperts:
    """Return a layer with experts on one rank, with random weights."""
    layer = expert_layers(SequentialModel(layer_specs(config)))[0]
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return layer


def run_layer_plainly(layer: MixtureOfExperts, config: ModelConfig, x: Tensor) -> Tensor:
    """Return the sum of the layer's outputs and losses from a loop over tokens: [].

    The outputs are multiplied by `output_weights` first.
    """
    experts = config.experts
    assert experts is not None

    def expert(name: str, token: Tensor, *, weight: str = "", bias: str = "_bias") -> Tensor:
        def times(matrix: str, x: Tensor) -> Tensor:
            return F.linear(x, parameters[matrix + weight], parameters.get(matrix + bias))

        inner = times(name.format("up"), token)
        if config.activation == "swiglu":
            gate, value = inner.chunk(2)
            inner = F.silu(gate) * value
        elif config.activation == "clamped_swiglu":
            gate, value = inner.chunk(2)
            gate, value = gate.clamp(max=7.0), value.clamp(-7.0, 7.0)
            inner = (value + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            inner = F.gelu(inner, approximate="tanh")
        return times(name.format("down"), inner)

    parameters = dict(layer.named_parameters())
    total, logits_of, weights = torch.zeros(()), [], output_weights(x)
    for sequence in range(x.shape[1]):
        logits = F.linear(
            x[:, sequence], layer.router.weight, layer.router.bias if config.bias else None
        )
        logits_of.append(logits)
        scores = logits.sigmoid() if experts.router == "sigmoid" else logits.softmax(1)
        probabilities = scores / scores.sum(1, keepdim=True)
        bias = layer.router.bias if experts.has_bias else torch.zeros(experts.count)
        preferences = (scores + bias).detach()
        if experts.groups > 1:
            two_best = preferences.view(len(x), experts.groups, -1).sort().values[..., -2:]
            best = two_best.sum(-1).argsort(descending=True)[:, : experts.groups_per_token]
            group_of = torch.arange(experts.count) // (experts.count // experts.groups)
            is_allowed = (best[..., None] == group_of).any(1)
            preferences = preferences.where(is_allowed, -torch.inf)
        chosen = choose_experts(preferences, experts.per_token)
        for place, token in enumerate(x[:, sequence]):
            gates = scores[place, chosen[place]]
            if experts.weights_sum_to_one:
                gates = gates / gates.sum()
            gates = gates * experts.output_scale
            y = torch.zeros_like(token)
            for number, gate in zip(chosen[place].tolist(), gates, strict=True):
                y = y + gate * expert(f"experts.{{}}_{number}", token)
            if layer.shared is not None:
                y = y + expert("shared.{}", token, weight=".weight", bias=".bias")
            total = total + (y * weights[place, sequence]).sum()
        used = F.one_hot(chosen, experts.count).sum((0, 1)) / (len(x) * experts.per_token)
        balance = experts.count * (used * probabilities.mean(0)).sum() / x.shape[1]
        total = total + experts.balance_loss * balance
    z = torch.stack(logits_of).logsumexp(-1).square().mean()
    for parameter in layer.parameters():  # experts without tokens, and the router's bias
        total = total + 0.0 * parameter.sum()
    return total + experts.z_loss * z


def output_weights(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(9))


def with_bias(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """Return the output, with the bias of the shared experts that the block adds."""
    bias = layer.bias_here()
    return layer(x) if bias is None else layer(x) + bias


def difference_of_layer(config: ModelConfig) -> float:
    """Return the largest relative difference of gradients between the layer and the loop."""
    layer = layer_of(config)
    inputs = torch.randn(12, 3, config.hidden_size, generator=torch.Generator().manual_seed(6))
    gradients = []
    for plain in (False, True):
        layer.zero_grad()
        x = inputs.clone().requires_grad_()
        if plain:
            total = run_layer_plainly(layer, config, x)
        else:
            total = (with_bias(layer, x) * output_weights(x)).sum()
        total.backward()
        assert x.grad is not None
        gradients.append([x.grad, *map(gradient_of, layer.parameters())])
    return float(torch.tensor(list(map(relative, *gradients))).max())  # NaN if one is NaN


@pytest.mark.parametrize("model", MODELS)
def test_the_layer_is_the_weighted_sum_of_its_experts(model: str) -> None:
    assert difference_of_layer(MODELS[model]) < 1e-5


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (MODEL, "outputs not returned to their tokens"),
        (MODEL, "gates not applied in the backward pass"),
        (MODEL, "fractions of the whole micro-batch"),
        ("softmax-after-topk", "gates not applied in the backward pass"),
        ("gelu, tied", "outputs not returned to their tokens"),
    ],
)
def test_a_fault_of_the_layer_is_noticed(model: str, fault: str) -> None:
    with seeded_fault(fault):
        assert difference_of_layer(MODELS[model]) > 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_deferred_weight_gradients_change_nothing(model: str) -> None:
    gradients = []
    for deferral in (None, Deferral()):
        layer = layer_of(MODELS[model])
        if deferral is not None:
            defer_weights(layer, deferral)
        x = torch.randn(12, 3, LLAMA.hidden_size, generator=torch.Generator().manual_seed(6))
        with_bias(layer, x.requires_grad_()).square().sum().backward()
        if deferral is not None:
            of_experts = dict(layer.experts.named_parameters())
            assert [name for name, weight in of_experts.items() if weight.grad is not None] == [
                name for name in of_experts if name.endswith("bias")
            ]
            for weight, gradient in deferral.take():
                weight.grad = gradient()
        gradients.append([gradient_of(parameter) for parameter in layer.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_rank_has_an_equal_share_of_the_experts_in_their_order() -> None:
    config = MODELS[MODEL]
    names = []
    for rank in range(4):
        axis = ExpertAxis(rank=rank, size=4)
        model = SequentialModel(layer_specs(config, ModelAxes(expert=axis)))
        names.append([name for name, _ in expert_layers(model)[0].experts.named_parameters()])
    expected = [
        [f"{kind}_{number}" for kind in ("up", "down") for number in (2 * rank, 2 * rank + 1)]
        for rank in range(4)
    ]
    assert names == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_experts_are_computed_in_fp32(dtype: torch.dtype) -> None:
    router = layer_of(MODELS[MODEL]).router
    generator = torch.Generator().manual_seed(4)
    router.to(dtype)
    x = torch.randn(5, 3, LLAMA.hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = router.weight.detach().float().requires_grad_()
    inputs = x.detach().float().requires_grad_()
    (logits, *_), expected = router(x), F.linear(inputs, weight)
    assert logits.dtype == torch.float32 and torch.equal(logits, expected)
    grad = torch.randn(logits.shape, generator=generator)
    logits.backward(grad)
    expected.backward(grad)
    for ours, plain in ((x, inputs), (router.weight, weight)):
        assert ours.grad is not None and plain.grad is not None and ours.grad.dtype == dtype
        rounding = torch.finfo(dtype).eps
        assert torch.allclose(ours.grad.float(), plain.grad, rtol=rounding, atol=1e-5)


def overlap_worker() -> list[str]:
    """Return what a rank of two expert ranks does in a forward and a backward pass, in order."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    events: list[str] = []

    def noting(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **rest: Any) -> Any:
            if not events or events[-1] != event:
                events.append(event)
            return function(*given, **rest)

        return noted

    layout = LAYOUTS[2]["expert 2"]
    model = SequentialModel(
        layer_specs(MODELS[MODEL], ModelAxes(expert=axes(layout, dist.get_rank())[2]))
    )
    layer = expert_layers(model)[0]
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    assert isinstance(layer.shared, MLP)
    for name, linear in (("first", layer.shared.up), ("second", layer.shared.down)):
        linear.register_forward_hook(noting(f"{name} of shared", lambda *_: None))
        hook = noting(f"gradient of {name} of shared", lambda *_: None)
        linear.weight.register_post_accumulate_grad_hook(hook)
    layer.experts.register_forward_hook(noting("experts", lambda *_: None))
    weight_gradient = noting("gradient of experts", layers.weight_gradient)
    with (
        mock.patch.object(dispatch.Transfer, "begin", noting("begin", dispatch.Transfer.begin)),
        mock.patch.object(dispatch.Transfer, "wait", noting("wait", dispatch.Transfer.wait)),
        mock.patch.object(layer_module, "weight_gradient", weight_gradient),
        mock.patch.object(layers, "weight_gradient", weight_gradient),
    ):
        x = torch.randn(12, 3, LLAMA.hidden_size, generator=generator).requires_grad_()
        layer(x).square().sum().backward()
    dist.barrier()
    return events


def test_shared_experts_and_weight_gradients_run_during_the_exchanges() -> None:
    assert run_ranks(2, overlap_worker)[0] == [
        *("begin", "first of shared", "wait", "experts"),
        *("begin", "second of shared", "wait"),
        *("begin", "gradient of second of shared", "wait"),
        "gradient of experts",  # of the second matrices
        *("begin", "gradient of first of shared", "gradient of experts", "wait"),
    ]
