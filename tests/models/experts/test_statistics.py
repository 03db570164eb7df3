"""Losses and counts of the router: by hand, and the same for every division of the batch."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.attention import recomputed
from models.config import Experts, Router
from models.experts import routing as routing_module
from models.experts.routing import (
    ExpertAxis,
    RouterStatistics,
    Routing,
    balance_loss,
    choose_experts,
    count_by_sequence,
    count_tokens,
    limit_to_groups,
    scores_of,
    smallest_margin,
    with_router_losses,
    z_loss,
)
from models.parallel.collectives import TensorAxis
from tests.ranks import run_ranks

TOKENS, SEQUENCES, EXPERTS, PER_TOKEN = 16, 4, 8, 2  # of the global batch
WEIGHTS = (0.3, 0.05)  # of the balance loss and of the z-loss
DIVISIONS = {  # ranks -> (context ranks, tensor ranks), which divide each sequence
    1: [(1, 1)],
    2: [(2, 1), (1, 2)],
    4: [(4, 1), (2, 2), (1, 4)],
}
MICRO_BATCHES = (1, 2, 4)
CASES = [
    (division, micro_batches)
    for divisions in DIVISIONS.values()
    for division in divisions
    for micro_batches in MICRO_BATCHES
]
FAULTY_CASES = [  # seeded fault, a division and a number of micro-batches on which it must show
    ("counts of this rank only", (2, 1), 1),
    ("counts of this rank only", (1, 2), 1),
    ("counts of this rank only", (2, 2), 2),
    ("probabilities averaged over the tokens of a tensor rank", (1, 2), 1),
    ("probabilities averaged over the tokens of a tensor rank", (2, 2), 1),
    ("fractions of the whole micro-batch", (1, 1), 1),
    ("fractions of the whole micro-batch", (1, 1), 2),
    ("not divided by the number of micro-batches", (1, 1), 2),
    ("not divided by the number of micro-batches", (2, 2), 4),
    ("noted in the forward pass too", (1, 1), 1),
    ("noted in the forward pass too", (2, 1), 2),
]


@dataclass(frozen=True)
class Outcome:
    """Statistics of a global batch, and gradients of the losses.

    gradient: of the logits [s, b, E], multiplied by their factors
    counts: tokens of each expert
    balance: the balance loss
    z: the z-loss
    margin: smallest difference between a chosen and an unchosen logit
    """

    gradient: Tensor
    counts: Tensor
    balance: float
    z: float
    margin: float


def example() -> tuple[Tensor, Tensor]:
    """Return logits [s, b, E], which prefer few experts, and the chosen experts [s, b, k]."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, SEQUENCES, EXPERTS, generator=generator)
    logits += torch.linspace(0, 2, EXPERTS) * torch.linspace(-1, 1, SEQUENCES)[:, None]
    return logits, choose_experts(logits.flatten(0, 1), PER_TOKEN).view(TOKENS, SEQUENCES, -1)


def settings_of(router: Router = "softmax") -> Experts:
    return Experts(
        count=EXPERTS, per_token=PER_TOKEN, ffn_hidden_size=8, router=router,
        balance_loss=WEIGHTS[0], z_loss=WEIGHTS[1],
    )  # fmt: skip


def routing_of(logits: Tensor, chosen: Tensor, router: Router = "softmax") -> Routing:
    return Routing(logits, scores_of(logits, router), logits.detach(), chosen)


def run_by_hand(router: Router = "softmax") -> Outcome:
    """Return the outcome from loops over sequences, tokens and experts."""
    logits, chosen = example()
    logits.requires_grad_()
    balance = z = torch.zeros(())

    def probabilities_of_token(logits: Tensor) -> Tensor:
        if router == "softmax":
            return logits.softmax(0)
        return logits.sigmoid() / sum(1 / (1 + (-each).exp()) for each in logits)

    for sequence in range(SEQUENCES):
        probabilities = [probabilities_of_token(logits[token, sequence]) for token in range(TOKENS)]
        for expert in range(EXPERTS):
            uses = sum(expert in chosen[token, sequence].tolist() for token in range(TOKENS))
            fraction = EXPERTS / (PER_TOKEN * TOKENS) * uses
            probability = sum(each[expert] for each in probabilities) / TOKENS
            balance = balance + fraction * probability / SEQUENCES
        for token in range(TOKENS):
            z = z + logits[token, sequence].exp().sum().log() ** 2 / (TOKENS * SEQUENCES)
    (WEIGHTS[0] * balance + WEIGHTS[1] * z).backward()
    assert logits.grad is not None
    balance, z = balance.detach(), z.detach()
    return Outcome(
        gradient=logits.grad,
        counts=torch.tensor([int((chosen == expert).sum()) for expert in range(EXPERTS)]),
        balance=float(balance),
        z=float(z),
        margin=float(smallest_margin(logits.detach().flatten(0, 1), chosen.flatten(0, 1))),
    )


def run_on_a_rank(
    division: tuple[int, int], micro_batches: int, rank: int, router: Router = "softmax"
) -> Outcome:
    """Return this rank's part of the outcome: sums over its micro-batches, gradients as they are.

    The tokens of a context rank are adjacent, and its tensor ranks have adjacent parts of them.
    """
    context, tensor = division
    size = context * tensor
    axis = ExpertAxis(
        sequence_group=dist.group.WORLD if size > 1 else None,
        sequence_size=size,
        tensor=TensorAxis(size=tensor),
    )
    found, gradients = RouterStatistics(), []
    parts = (each.chunk(size)[rank].chunk(micro_batches, dim=1) for each in example())
    for logits, chosen in zip(*parts, strict=True):
        logits = logits.clone().requires_grad_()
        with_losses(logits, chosen, axis, found, micro_batches, router).sum().backward()
        assert (logits.grad is not None) == any(WEIGHTS)
        gradients.append(torch.zeros_like(logits) if logits.grad is None else logits.grad)
    assert found.counts is not None and found.margin is not None
    return Outcome(
        torch.cat(gradients, 1),
        found.counts,
        float(found.balance),
        float(found.z),
        float(found.margin),
    )


def with_losses(
    logits: Tensor,
    chosen: Tensor,
    axis: ExpertAxis,
    found: RouterStatistics,
    micro_batches: int = 1,
    router: Router = "softmax",
) -> Tensor:
    """Return gates of ones, whose backward pass adds the losses' gradients to the logits."""
    return routing_module.with_router_losses(
        torch.ones(chosen.flatten(0, 1).shape, requires_grad=True),
        routing_of(logits, chosen, router),
        settings=settings_of(router),
        axis=axis,
        gradient_scale=lambda: 1 / micro_batches,
        statistics=found,
    )


def joined(parts: list[Outcome], division: tuple[int, int], micro_batches: int) -> Outcome:
    """Return the outcome of the global batch: a mean over context ranks, a sum over tensor ranks.

    Gradients are averaged over context ranks because they are data ranks to ZeRO.
    """
    context, _ = division
    return Outcome(
        gradient=torch.cat([each.gradient for each in parts]) / context,
        counts=sum((each.counts for each in parts), torch.zeros(EXPERTS, dtype=torch.int64)),
        balance=sum(each.balance for each in parts) / context / micro_batches,
        z=sum(each.z for each in parts) / context / micro_batches,
        margin=min(each.margin for each in parts),
    )


def is_right(found: Outcome, router: Router = "softmax") -> bool:
    """Return True if an outcome agrees with the one computed by hand."""
    expected = run_by_hand(router)
    return (
        torch.equal(found.counts, expected.counts)
        and found.balance == pytest.approx(expected.balance, rel=1e-5)
        and found.z == pytest.approx(expected.z, rel=1e-5)
        and found.margin == expected.margin
        and torch.allclose(found.gradient, expected.gradient, rtol=1e-5, atol=1e-8)
    )


def worker() -> dict[Any, Outcome]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    outcomes = run_cases(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    return outcomes


def run_cases(rank: int, size: int) -> dict[Any, Outcome]:
    """Run the divisions of a world and its seeded faults on one rank."""
    outcomes: dict[Any, Outcome] = {}
    for division in DIVISIONS[size]:
        for micro_batches in MICRO_BATCHES:
            outcomes[division, micro_batches] = run_on_a_rank(division, micro_batches, rank)
    for fault, division, micro_batches in FAULTY_CASES:
        if division in DIVISIONS[size]:
            with seeded_fault(fault):
                found = run_on_a_rank(division, micro_batches, rank)
            outcomes[fault, division, micro_batches] = found
    return outcomes


@contextlib.contextmanager
def seeded_fault(fault: str) -> Iterator[None]:
    """Break the statistics in one way."""
    attach = routing_module._Attach.forward

    def of_a_rank(probabilities: Tensor, counts: Tensor, k: int, axis: ExpertAxis) -> Tensor:
        return balance_loss(probabilities, counts, k, replace(axis, tensor=TensorAxis()))

    def pooled(probabilities: Tensor, counts: Tensor, k: int, axis: ExpertAxis) -> Tensor:
        probabilities = probabilities.flatten(0, 1)[:, None]
        return balance_loss(probabilities, counts.sum(0, keepdim=True), k, axis)

    def unscaled(*given: Any, gradient_scale: Callable[[], float], **rest: Any) -> Tensor:
        return with_router_losses(*given, gradient_scale=lambda: 1.0, **rest)

    def noting(ctx: Any, gates: Tensor, *rest: Any) -> Tensor:
        balance, z, counts, margin, *_, found, _ = rest
        found.note(counts, balance, z, margin)
        return attach(ctx, gates, *rest)

    targets: dict[str, tuple[Any, str, Any]] = {
        "counts of this rank only": (
            routing_module,
            "dist",
            SimpleNamespace(all_reduce=lambda counts, group: None),
        ),
        "probabilities averaged over the tokens of a tensor rank": (
            routing_module,
            "balance_loss",
            of_a_rank,
        ),
        "fractions of the whole micro-batch": (routing_module, "balance_loss", pooled),
        "not divided by the number of micro-batches": (
            routing_module,
            "with_router_losses",
            unscaled,
        ),
        "noted in the forward pass too": (routing_module._Attach, "forward", staticmethod(noting)),
    }
    with mock.patch.object(*targets[fault]):
        yield


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[dict[Any, Outcome]]]:
    """Return the outcomes of each rank, by the size of the world."""
    return {1: [run_cases(0, 1)]} | {size: run_ranks(size, worker) for size in (2, 4)}


@pytest.mark.parametrize(("division", "micro_batches"), CASES)
def test_no_division_of_the_batch_changes_losses_gradients_and_counts(
    division: tuple[int, int], micro_batches: int, outcomes: dict[int, list[dict[Any, Outcome]]]
) -> None:
    parts = [each[division, micro_batches] for each in outcomes[division[0] * division[1]]]
    assert is_right(joined(parts, division, micro_batches))


@pytest.mark.parametrize(("fault", "division", "micro_batches"), FAULTY_CASES)
def test_a_seeded_fault_is_noticed(
    fault: str,
    division: tuple[int, int],
    micro_batches: int,
    outcomes: dict[int, list[dict[Any, Outcome]]],
) -> None:
    parts = [each[fault, division, micro_batches] for each in outcomes[division[0] * division[1]]]
    assert not is_right(joined(parts, division, micro_batches))


def test_the_balance_loss_of_equally_used_experts_is_one() -> None:
    chosen = torch.arange(TOKENS * PER_TOKEN).view(TOKENS, 1, PER_TOKEN) % EXPERTS
    counts = count_by_sequence(chosen, EXPERTS)
    assert counts.tolist() == [[TOKENS * PER_TOKEN // EXPERTS] * EXPERTS]
    equal = torch.full((TOKENS, 1, EXPERTS), 1 / EXPERTS)
    assert float(balance_loss(equal, counts, PER_TOKEN, ExpertAxis())) == 1.0
    one_sided = torch.zeros(TOKENS, 1, EXPERTS)
    one_sided[:, :, :PER_TOKEN] = 1 / PER_TOKEN
    chosen = choose_experts(one_sided[:, 0], PER_TOKEN)[:, None]
    worst = balance_loss(one_sided, count_by_sequence(chosen, EXPERTS), PER_TOKEN, ExpertAxis())
    assert float(worst) == pytest.approx(EXPERTS / PER_TOKEN)


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_the_losses_of_a_sigmoid_router_are_those_computed_by_hand(micro_batches: int) -> None:
    found = [run_on_a_rank((1, 1), micro_batches, 0, "sigmoid")]
    assert is_right(joined(found, (1, 1), micro_batches), "sigmoid")


def test_scores_that_are_not_divided_by_their_sum_are_noticed() -> None:
    with mock.patch.object(routing_module, "probabilities_of", lambda scores, router: scores):
        found = [run_on_a_rank((1, 1), 1, 0, "sigmoid")]
    assert not is_right(joined(found, (1, 1), 1), "sigmoid")


def test_the_z_loss_of_a_constant_is_the_square_of_its_logsumexp() -> None:
    logits = torch.full((TOKENS, SEQUENCES, EXPERTS), 0.5)
    expected = (0.5 + torch.tensor(float(EXPERTS)).log()) ** 2
    assert float(z_loss(logits, ExpertAxis())) == pytest.approx(float(expected))


def test_tokens_are_counted_by_sequence() -> None:
    _, chosen = example()
    expected = [count_tokens(chosen[:, each].flatten(), EXPERTS) for each in range(SEQUENCES)]
    assert torch.equal(count_by_sequence(chosen, EXPERTS), torch.stack(expected))


@pytest.mark.parametrize("weights", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.05)])
def test_a_factor_of_zero_switches_a_loss_off(weights: tuple[float, float]) -> None:
    gradients = []
    for each in (weights, (0.3, 0.05)):
        with mock.patch(f"{__name__}.WEIGHTS", each):
            gradients.append([run_on_a_rank((1, 1), 1, 0).gradient, run_by_hand().gradient])
    assert torch.allclose(gradients[0][0], gradients[0][1], rtol=1e-5, atol=1e-8)
    assert bool(gradients[0][0].any()) == any(weights)
    assert not torch.allclose(gradients[0][0], gradients[1][0])


def test_gates_and_their_gradients_pass_unchanged() -> None:
    logits, chosen = example()
    gates = torch.rand(TOKENS * SEQUENCES, PER_TOKEN, requires_grad=True)
    grad = torch.rand(gates.shape)
    attached = with_router_losses(
        gates,
        routing_of(logits.requires_grad_(), chosen),
        settings=settings_of(),
        axis=ExpertAxis(),
        gradient_scale=lambda: 1.0,
        statistics=RouterStatistics(),
    )
    attached.backward(grad)
    assert torch.equal(attached, gates)
    assert gates.grad is not None and torch.equal(gates.grad, grad)


def test_the_noted_margin_is_that_of_experts_or_half_of_that_of_groups() -> None:
    logits, _ = example()
    settings = Experts(
        count=EXPERTS, per_token=PER_TOKEN, ffn_hidden_size=8, router="sigmoid", groups=4,
        groups_per_token=2,
    )  # fmt: skip
    noted, expected = [], []
    for tokens in logits[:, :, None]:  # [b, 1, E]
        found, scores = RouterStatistics(), scores_of(tokens, "sigmoid")
        preferences, group_scores = limit_to_groups(scores, 4, 2)
        chosen = choose_experts(preferences.flatten(0, 1), PER_TOKEN)
        routing = Routing(tokens, scores, preferences, chosen[:, None], group_scores)
        with torch.no_grad():
            with_router_losses(
                torch.ones(chosen.shape),
                routing,
                settings=settings,
                axis=ExpertAxis(),
                gradient_scale=lambda: 1.0,
                statistics=found,
            )
        assert found.margin is not None
        noted.append(float(found.margin))
        of_experts = float(smallest_margin(preferences.flatten(0, 1), chosen))
        ranked = group_scores.sort(descending=True).values
        of_groups = float((ranked[..., 1] - ranked[..., 2]).min()) / 2
        expected.append((of_experts, of_groups))
    assert noted == [min(pair) for pair in expected]
    assert len({pair.index(min(pair)) for pair in expected}) == 2  # both kinds are smallest


def noted_counts(run: Callable[[RouterStatistics], None]) -> int | None:
    """Return the number of noted choices; None if nothing was noted."""
    found = RouterStatistics()
    run(found)
    return None if found.counts is None else int(found.counts.sum())


def recompute_once(found: RouterStatistics) -> None:
    """Run forward and backward, with the forward pass recomputed."""
    logits, chosen = example()
    passes = []

    def forward(logits: Tensor) -> Tensor:
        passes.append(1)
        return with_losses(logits, chosen, ExpertAxis(), found).square()

    recomputed(forward, logits.requires_grad_()).sum().backward()
    assert len(passes) == 2


CHOICES = TOKENS * SEQUENCES * PER_TOKEN


def test_recomputation_notes_nothing_twice() -> None:
    assert noted_counts(recompute_once) == CHOICES


def test_noting_in_the_forward_pass_is_noticed() -> None:
    with seeded_fault("noted in the forward pass too"):
        assert noted_counts(recompute_once) == 3 * CHOICES


def evaluate(found: RouterStatistics) -> None:
    """Run a forward pass as in an evaluation, in which no collective may run."""
    logits, chosen = example()
    axis = ExpertAxis(sequence_size=2)
    gates = torch.ones(chosen.flatten(0, 1).shape)
    with torch.no_grad(), mock.patch.object(routing_module, "dist") as collectives:
        found_gates = routing_module.with_router_losses(
            gates,
            routing_of(logits, chosen),
            settings=settings_of(),
            axis=axis,
            gradient_scale=lambda: 1.0,
            statistics=found,
        )
    assert found_gates is gates
    assert not collectives.all_reduce.called


def test_an_evaluation_notes_nothing_and_communicates_nothing() -> None:
    assert noted_counts(evaluate) is None
    assert noted_counts(lambda found: None) is None


def test_losses_that_are_computed_in_an_evaluation_are_noticed() -> None:
    def always(*given: Any, **rest: Any) -> Tensor:
        with torch.enable_grad():
            return with_router_losses(*given, **rest)

    with (
        mock.patch.object(routing_module, "with_router_losses", always),
        pytest.raises(AssertionError),
    ):
        evaluate(RouterStatistics())


def test_statistics_are_sums_over_micro_batches_until_they_are_reset() -> None:
    found, once = RouterStatistics(), RouterStatistics()
    logits, chosen = example()
    for statistic in (found, found, once):
        with_losses(
            logits.clone().requires_grad_(), chosen, ExpertAxis(), statistic
        ).sum().backward()
    assert found.counts is not None and once.counts is not None
    assert torch.equal(found.counts, 2 * once.counts)
    assert float(found.balance) == pytest.approx(2 * float(once.balance))
    assert float(found.z) == pytest.approx(2 * float(once.z))
    assert found.margin == once.margin
    found.reset()
    assert found == RouterStatistics()
