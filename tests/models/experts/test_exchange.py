"""Tokens sent to experts on other ranks and back, against a plain loop over tokens."""

import contextlib
import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.experts import dispatch, routing
from models.experts.dispatch import begin_combine, begin_dispatch
from models.experts.routing import ExpertAxis, count_tokens, plan_routes
from models.kernels.compile import Function, as_written, compiled
from tests.ranks import run_ranks
from threefold.runtime.processes import compiler

EXPERTS, HIDDEN = 8, 6


@dataclass(frozen=True)
class Case:
    """Tokens of each rank, and the experts among which they choose."""

    per_token: int
    among: tuple[int, ...] = tuple(range(EXPERTS))
    tokens: tuple[int, ...] = (5, 7, 2, 9)  # of each rank


CASES = {
    "any expert": Case(3),
    "every expert": Case(EXPERTS),
    "one expert per token": Case(1),
    "all tokens to one expert": Case(1, (5,)),
    "all tokens to the first and the last expert": Case(2, (0, 7)),
    "a rank that receives no token": Case(2, (4, 5, 6)),
    "only a rank that has one token": Case(1, (0,), (1, 60, 3, 2)),
}
needs_compiler = pytest.mark.skipif(
    shutil.which(compiler()) is None, reason="there is no C++ compiler"
)
FAULTS_BETWEEN_RANKS = (  # one rank sends its rows sorted
    "rows sorted by rank instead of by expert",
    "rows of experts not returned to their ranks",
    "gradients of rows not returned to their ranks",
)
FAULTS = (
    "permutation not undone",
    "permutation not undone in the backward pass",
    "gates not applied in the backward pass",
    "gates without a gradient",
    "copies of a token not added",
    *FAULTS_BETWEEN_RANKS,
)
SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Example:
    """Inputs of a rank: tokens [n, h], experts and gates [n, k], gradient of the output [n, h]."""

    x: Tensor
    chosen: Tensor
    gates: Tensor
    grad: Tensor


def example(case: Case, rank: int) -> Example:
    generator = torch.Generator().manual_seed(100 + rank)
    n = case.tokens[rank]
    places = torch.rand(n, len(case.among), generator=generator).argsort(1)[:, : case.per_token]
    return Example(
        x=torch.randn(n, HIDDEN, generator=generator).requires_grad_(),
        chosen=torch.tensor(case.among)[places],
        gates=torch.rand(n, case.per_token, generator=generator).requires_grad_(),
        grad=torch.randn(n, HIDDEN, generator=generator),
    )


def weights_of(experts: range) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / 2
    return [weights[number].clone().requires_grad_() for number in experts]


@dataclass(frozen=True)
class Outcome:
    """Results of a rank.

    y: outputs of its tokens [n, h]
    x: their gradients
    gates: the gradients of their gates
    weights: gradients of the weights of its experts, by number
    arrived: (sending rank, token) of each row that reached each of its experts, in order
    """

    y: Tensor
    x: Tensor
    gates: Tensor
    weights: dict[int, Tensor]
    arrived: dict[int, list[tuple[int, int]]]


def run_on_expert_ranks(case: Case, axis: ExpertAxis) -> Outcome:
    """Run forward and backward on this rank, each expert being tanh(W x)."""
    given, experts = example(case, axis.rank), axis.experts_here(EXPERTS)
    weights = weights_of(experts)
    routes = plan_routes(given.chosen, EXPERTS, axis)
    rows = begin_dispatch(given.x, routes, axis)()
    pairs = zip(rows.split(routes.rows), weights, strict=True)
    outputs = torch.cat([torch.tanh(part @ weight.t()) for part, weight in pairs])
    y = begin_combine(outputs, given.gates, routes, axis)()
    y.backward(given.grad)
    labels = torch.tensor([[axis.rank, token] for token in range(len(given.x))]).double()
    arrived = begin_dispatch(labels, routes, axis)().split(routes.rows)
    assert given.x.grad is not None and given.gates.grad is not None
    return Outcome(
        y=y.detach(),
        x=given.x.grad,
        gates=given.gates.grad,
        weights={
            number: torch.zeros_like(weight) if weight.grad is None else weight.grad
            for number, weight in zip(experts, weights, strict=True)
        },
        arrived={
            number: [(int(rank), int(token)) for rank, token in part.tolist()]
            for number, part in zip(experts, arrived, strict=True)
        },
    )


def run_plainly(case: Case, size: int) -> list[Outcome]:
    """Return the outcome of each rank from a loop over the tokens of all ranks."""
    weights = weights_of(range(EXPERTS))
    arrived: dict[int, list[tuple[int, int]]] = {number: [] for number in range(EXPERTS)}
    ys, given = [], [example(case, rank) for rank in range(size)]
    for rank, each in enumerate(given):
        rows = []
        for token, (x, chosen, gates) in enumerate(
            zip(each.x, each.chosen.tolist(), each.gates, strict=True)
        ):
            terms = [
                gate * torch.tanh(weights[number] @ x)
                for number, gate in zip(chosen, gates, strict=True)
            ]
            rows.append(torch.stack(terms).sum(0))
            for number in chosen:
                arrived[number].append((rank, token))
        y = torch.stack(rows)
        y.backward(each.grad)
        ys.append(y.detach())
    found = []
    for rank, (y, each) in enumerate(zip(ys, given, strict=True)):
        assert each.x.grad is not None and each.gates.grad is not None
        experts = ExpertAxis(rank=rank, size=size).experts_here(EXPERTS)
        gradients = {
            number: torch.zeros(HIDDEN, HIDDEN)
            if (gradient := weights[number].grad) is None
            else gradient
            for number in experts
        }
        here = {number: arrived[number] for number in experts}
        found.append(Outcome(y, each.x.grad, each.gates.grad, gradients, here))
    return found


def largest_difference(found: list[Outcome], expected: list[Outcome]) -> float:
    """Return the largest difference of outputs and gradients, whose entries are about 1."""
    differences = []
    for one, other in zip(found, expected, strict=True):
        assert one.weights.keys() == other.weights.keys()
        pairs = [(one.y, other.y), (one.x, other.x), (one.gates, other.gates)]
        pairs += [(one.weights[number], other.weights[number]) for number in one.weights]
        assert all(ours.shape == theirs.shape for ours, theirs in pairs)
        differences += [float((ours - theirs).abs().max()) for ours, theirs in pairs]
    return float(torch.tensor(differences).max())  # NaN if one is NaN


def worker() -> dict[tuple[str, str], Outcome]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axis = ExpertAxis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    outcomes = {("", name): run_on_expert_ranks(case, axis) for name, case in CASES.items()}
    for fault in FAULTS:
        with seeded_fault(fault):
            outcomes["fault", fault] = run_on_expert_ranks(CASES["any expert"], axis)
    dist.barrier()
    return outcomes


@contextlib.contextmanager
def seeded_fault(fault: str) -> Iterator[None]:
    """Break the exchange in one way."""

    forward, backward = dispatch._weighted_sum, dispatch._weighted_sum_backward

    def in_order(rows: Tensor) -> Tensor:
        return torch.arange(rows.numel()).view(rows.shape)

    def unpermuted(ctx: Any, x: Tensor, permutation: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.clone()

    faults: dict[str, tuple[str, Any]] = {
        "permutation not undone": (
            "_weighted_sum",
            lambda x, weights, rows: forward(x, weights, in_order(rows)),
        ),
        "permutation not undone in the backward pass": (
            "_weighted_sum_backward",
            lambda grad, x, weights, rows: backward(grad, x, weights, in_order(rows)),
        ),
        "gates not applied in the backward pass": (
            "_weighted_sum_backward",
            lambda grad, x, weights, rows: backward(grad, x, torch.ones_like(weights), rows),
        ),
        "gates without a gradient": (
            "_weighted_sum_backward",
            lambda *inputs: (backward(*inputs)[0], torch.zeros_like(inputs[2])),
        ),
        "copies of a token not added": ("_sum_of_copies", lambda x, rows: x[rows[:, 0]]),
        "rows of experts not returned to their ranks": (
            "_Rearrange.forward",
            staticmethod(unpermuted),
        ),
        "gradients of rows not returned to their ranks": (
            "_Rearrange.backward",
            staticmethod(lambda ctx, grad: (grad, None, None)),
        ),
        "rows sorted by rank instead of by expert": (
            "_by_expert",
            lambda counts, total: torch.arange(total),
        ),
    }
    target, broken = faults[fault]
    module = routing if target == "_by_expert" else dispatch
    with mock.patch(f"{module.__name__}.{target}", broken):
        yield


@pytest.fixture(scope="module", params=SIZES)
def outcomes(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Outcome]]:
    """Return the outcomes of each rank."""
    return run_ranks(request.param, worker)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(
    name: str, outcomes: list[dict[tuple[str, str], Outcome]]
) -> None:
    expected = run_plainly(CASES[name], len(outcomes))
    assert largest_difference([each["", name] for each in outcomes], expected) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_rows_arrive_by_expert_then_rank_then_token(
    name: str, outcomes: list[dict[tuple[str, str], Outcome]]
) -> None:
    expected = run_plainly(CASES[name], len(outcomes))
    for found, other in zip((each["", name] for each in outcomes), expected, strict=True):
        assert found.arrived == other.arrived


def test_a_rank_without_tokens_has_gradients_of_zeros(
    outcomes: list[dict[tuple[str, str], Outcome]],
) -> None:
    name = "a rank that receives no token"
    share = EXPERTS // len(outcomes)
    idle = {number // share for number in range(EXPERTS)} - {n // share for n in CASES[name].among}
    assert len(idle) == len(outcomes) // 2
    for rank, outcome in enumerate(each["", name] for each in outcomes):
        assert any(outcome.arrived.values()) == (rank not in idle)
        assert any(gradient.any() for gradient in outcome.weights.values()) == (rank not in idle)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_noticed(
    fault: str, outcomes: list[dict[tuple[str, str], Outcome]]
) -> None:
    expected = run_plainly(CASES["any expert"], len(outcomes))
    found = [each["fault", fault] for each in outcomes]
    if len(outcomes) == 1 and fault in FAULTS_BETWEEN_RANKS:
        assert largest_difference(found, expected) < 1e-5
        return
    assert largest_difference(found, expected) > 1e-2


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    for case in CASES.values():
        found = [run_on_expert_ranks(case, ExpertAxis())]
        assert largest_difference(found, run_plainly(case, 1)) < 1e-5


def test_counts_include_experts_without_tokens() -> None:
    assert count_tokens(torch.tensor([2, 0, 2]), 5).tolist() == [1, 0, 2, 0, 0]
    assert count_tokens(torch.empty(0, dtype=torch.int64), 3).tolist() == [0, 0, 0]


def sums_in_16_bits(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a combined output, the gradient of a dispatched token, and both rounded once.

    Four terms are added, of which the first is so large that its neighbours differ by 2 or more.
    Added in 16 bits, the other terms of 1 would be lost.
    """
    k, large = 4, 256.0 if dtype == torch.bfloat16 else 2048.0
    routes = plan_routes(torch.tensor([[3, 0, 2, 1]]), k, ExpertAxis())
    x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    copies = begin_dispatch(x, routes, ExpertAxis())()
    terms = torch.tensor([[large if number == 3 else 1.0] for number in range(k)]).to(dtype)
    copies.backward(terms)
    y = begin_combine(terms, torch.ones(1, k), routes, ExpertAxis())()
    assert x.grad is not None
    return y, x.grad, torch.full((1, 1), large + 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    y, grad, expected = sums_in_16_bits(dtype)
    assert y.dtype == grad.dtype == dtype
    assert torch.equal(y, expected) and torch.equal(grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_are_rounded_at_each_addition_are_noticed(dtype: torch.dtype) -> None:
    def weighted_sum(x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        terms = x[rows] * weights[..., None].to(x.dtype)
        return functools.reduce(torch.add, terms.unbind(1))

    def sum_of_copies(x: Tensor, rows: Tensor) -> Tensor:
        return functools.reduce(torch.add, x[rows].unbind(1))

    with (
        mock.patch.object(dispatch, "_weighted_sum", weighted_sum),
        mock.patch.object(dispatch, "_sum_of_copies", sum_of_copies),
    ):
        y, grad, expected = sums_in_16_bits(dtype)
    assert not torch.equal(y, expected) and not torch.equal(grad, expected)


FUSED = (dispatch._sum_of_copies, dispatch._weighted_sum, dispatch._weighted_sum_backward)


def exchanged(dtype: torch.dtype, fuse: Function) -> list[Tensor]:
    """Return the combined outputs of one rank, and the gradients of its tokens and gates."""
    given = example(Case(3), 0)
    x, gates = given.x.detach().to(dtype).requires_grad_(), given.gates
    routes, axis = plan_routes(given.chosen, EXPERTS, ExpertAxis()), ExpertAxis()
    rows = begin_dispatch(x, routes, axis, fuse=fuse)()
    y = begin_combine(rows.square(), gates, routes, axis, fuse=fuse)()
    y.backward(given.grad.to(dtype))
    assert x.grad is not None and gates.grad is not None
    return [y.detach(), x.grad, gates.grad]


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_sums_are_those_of_eager_mode(dtype: torch.dtype) -> None:
    """On CPUs they run eagerly, so the test removes their mark."""
    with contextlib.ExitStack() as stack:
        for function in FUSED:
            stack.enter_context(mock.patch.object(function, "native_on_cpu", False))
        found = exchanged(dtype, compiled)
    for ours, eager in zip(found, exchanged(dtype, as_written), strict=True):
        assert ours.dtype == eager.dtype
        torch.testing.assert_close(ours, eager)


def test_a_cpu_exchanges_tokens_eagerly() -> None:
    """A run on a CPU has the same losses with compiled kernels as without."""
    with mock.patch.object(torch, "compile", lambda function, **settings: torch.zeros_like):
        found = exchanged(torch.float32, compiled)
    assert all(map(torch.equal, found, exchanged(torch.float32, as_written)))
