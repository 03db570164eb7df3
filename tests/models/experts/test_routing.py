"""The choice of experts and the weights of their outputs, against plain Python; seeded faults."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from models.experts import routing
from models.experts.routing import (
    choose_experts,
    gates_of,
    limit_to_groups,
    probabilities_of,
    scores_of,
    smallest_margin,
    smallest_margin_of_groups,
)

TIES = {
    "two equal": [[1.0, 3.0, 3.0, 2.0]],
    "all equal": [[0.5] * 8],
    "zeros of both signs": [[0.0, -0.0, 0.0, -0.0]],
    "the last chosen and the first unchosen": [[4.0, 1.0, 1.0, 1.0, 5.0]],
    "infinite": [[-math.inf, 2.0, -math.inf, 2.0]],
    "few values, many experts": torch.randint(
        3, (64, 128), generator=torch.Generator().manual_seed(1)
    ).tolist(),
}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"router": "softmax", "sum_is_one": False},
    "softmax, normalized": {"router": "softmax", "sum_is_one": True},
    "sigmoid": {"router": "sigmoid", "sum_is_one": False},
    "sigmoid, normalized and scaled": {"router": "sigmoid", "sum_is_one": True, "scale": 2.5},
}


def ranked(logits: list[float]) -> list[int]:
    """Return the numbers of the experts, largest logit first, then smallest number first."""
    return sorted(range(len(logits)), key=lambda number: (-logits[number], number))


def chooses_in_order(rows: list[list[float]]) -> bool:
    """Return True if `choose_experts` agrees with `ranked` for every number of experts."""
    logits = torch.tensor(rows)
    return all(
        routing.choose_experts(logits, k).tolist() == [ranked(row)[:k] for row in rows]
        for k in range(1, logits.shape[1] + 1)
    )


def gates_by_hand(
    row: list[float], chosen: list[int], router: str, sum_is_one: bool, scale: float = 1.0
) -> list[float]:
    if router == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in row]
    else:
        scores = [math.exp(logit) / sum(map(math.exp, row)) for logit in row]
    total = sum(scores[number] for number in chosen) if sum_is_one else 1.0
    return [scale * scores[number] / total for number in chosen]


def gates(logits: Tensor, chosen: Tensor, *, router: Any, **settings: Any) -> Tensor:
    return routing.gates_of(scores_of(logits, router), chosen, **settings)


def largest_error_of_gates(settings: dict[str, Any]) -> float:
    """Return the largest difference between `gates_of` and `gates_by_hand`."""
    logits = example_logits()
    chosen = choose_experts(logits, 3)
    found = gates(logits, chosen, **settings)
    expected = [
        gates_by_hand(row, numbers, **settings)
        for row, numbers in zip(logits.tolist(), chosen.tolist(), strict=True)
    ]
    return float((found.double() - torch.tensor(expected).double()).abs().max())


def example_logits(tokens: int = 32, experts: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return 2 * torch.randn(tokens, experts, generator=generator)


def margin_is_exact(k: int) -> bool:
    """Return True if the margin is the distance to the nearest logits with another choice.

    Two logits differ by the margin, so a change of each by half of it may exchange them.
    """
    logits = example_logits().double()
    chosen = choose_experts(logits, k)
    margin = routing.smallest_margin(logits, chosen)
    signs = torch.ones_like(logits).scatter(1, chosen, -1.0)  # against every chosen expert

    def moved(share: float) -> bool:
        others = choose_experts(logits + share * margin / 2 * signs, k)
        return not torch.equal(others.sort().values, chosen.sort().values)

    return not moved(0.999) and moved(1.001)


@pytest.mark.parametrize("name", TIES)
def test_ties_are_broken_by_the_smaller_number(name: str) -> None:
    assert chooses_in_order(TIES[name])


def test_experts_are_in_descending_order_of_their_logits() -> None:
    logits = example_logits()
    values = logits.gather(1, choose_experts(logits, 5))
    assert torch.equal(values, logits.topk(5).values)


LARGER_NUMBER_FIRST: dict[str, Callable[[Tensor, int], Tensor]] = {
    "larger number first": lambda x, k: (
        x.shape[1] - 1 - x.flip(1).sort(descending=True, stable=True).indices[:, :k]
    ),
    "torch.topk": lambda x, k: x.topk(k).indices,
    "ascending": lambda x, k: x.sort(stable=True).indices[:, :k],
}


@pytest.mark.parametrize("fault", LARGER_NUMBER_FIRST)
def test_another_order_is_noticed(fault: str) -> None:
    with mock.patch.object(routing, "choose_experts", LARGER_NUMBER_FIRST[fault]):
        assert not all(chooses_in_order(rows) for rows in TIES.values())


@pytest.mark.parametrize("name", ROUTERS)
def test_gates_are_those_computed_by_hand(name: str) -> None:
    assert largest_error_of_gates(ROUTERS[name]) < 1e-6


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_of_gates_are_exact(name: str) -> None:
    logits = example_logits(4).double().requires_grad_()
    chosen = choose_experts(logits.detach(), 3)
    assert torch.autograd.gradcheck(lambda x: gates(x, chosen, **ROUTERS[name]), [logits])


def test_normalized_gates_are_those_of_softmax_over_the_chosen_experts() -> None:
    logits = example_logits()
    chosen = choose_experts(logits, 3)
    plain, normalized = (gates(logits, chosen, **ROUTERS[name]) for name in list(ROUTERS)[:2])
    assert torch.allclose(normalized, logits.gather(1, chosen).softmax(1), rtol=1e-5)
    assert bool((plain.sum(1) < 0.999).all())


@pytest.mark.parametrize("name", ["softmax, normalized", "sigmoid, normalized and scaled"])
def test_gates_are_finite_for_extreme_logits(name: str) -> None:
    logits = torch.tensor([[-200.0, -300.0, -250.0, -400.0], [1e4, -1e4, 5.0, 3.0]])
    found = gates(logits, choose_experts(logits, 2), **ROUTERS[name])
    assert bool(found.isfinite().all())


def test_probabilities_have_the_sum_one_and_the_order_of_the_scores() -> None:
    logits = example_logits()
    for router in ("softmax", "softmax-after-topk", "sigmoid"):
        scores = scores_of(logits, router)
        found = probabilities_of(scores, router)
        assert torch.allclose(found.sum(1), torch.ones(len(logits)))
        assert torch.allclose(found * scores.sum(1, keepdim=True), scores, rtol=1e-5)
    assert not torch.allclose(scores.sum(1), torch.ones(len(logits)))  # of the sigmoid


FAULTS_OF_GATES: dict[str, tuple[str, Callable[..., Tensor]]] = {  # fault -> router, replacement
    "not normalized": (
        "softmax, normalized",
        lambda scores, chosen, **_: gates_of(scores, chosen, sum_is_one=False),
    ),
    "normalized always": (
        "softmax",
        lambda scores, chosen, **_: gates_of(scores, chosen, sum_is_one=True),
    ),
    "not scaled": (
        "sigmoid, normalized and scaled",
        lambda scores, chosen, **_: gates_of(scores, chosen, sum_is_one=True),
    ),
    "of the experts in the order of their numbers": (
        "softmax",
        lambda scores, chosen, **rest: gates_of(scores, chosen.sort().values, **rest),
    ),
}


@pytest.mark.parametrize("fault", FAULTS_OF_GATES)
def test_other_gates_are_noticed(fault: str) -> None:
    router, replacement = FAULTS_OF_GATES[fault]
    with mock.patch.object(routing, "gates_of", replacement):
        assert largest_error_of_gates(ROUTERS[router]) > 1e-3


@pytest.mark.parametrize("k", [1, 2, 7])
def test_the_margin_is_the_smallest_change_of_a_choice(k: int) -> None:
    assert margin_is_exact(k)


def test_the_margin_of_a_tie_is_zero_and_without_a_choice_infinite() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0], [3.0, 0.0, 3.0]])
    margins = [float(smallest_margin(logits, choose_experts(logits, k))) for k in (1, 2, 3)]
    assert margins == [0.0, 1.0, math.inf]


@pytest.mark.parametrize(
    "fault",
    [
        lambda logits, chosen: (logits.amax(1) - logits.amin(1)).min(),
        lambda logits, chosen: smallest_margin(logits, chosen[:, :-1]),
        lambda logits, chosen: smallest_margin(logits[:1], chosen[:1]),
    ],
    ids=["of the extremes", "of one expert less", "of the first token"],
)
def test_another_margin_is_noticed(fault: Callable[..., Tensor]) -> None:
    with mock.patch.object(routing, "smallest_margin", fault):
        assert not margin_is_exact(2)


# Choices that are limited to the best groups of a token.

GROUPED = {  # experts, groups, groups per token, experts per token
    "DeepSeek-V3": (256, 8, 4, 8),
    "groups of two": (16, 8, 3, 4),
    "one group per token": (24, 3, 1, 5),
    "all experts of the groups": (12, 4, 2, 6),
    "all groups but one": (9, 3, 2, 2),
}


def groups_by_hand(row: list[float], groups: int, most: int) -> list[int]:
    """Return the best groups: by the sum of their two largest numbers, then by their number."""
    size = len(row) // groups
    sums = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    return ranked(sums)[:most]


@pytest.mark.parametrize("name", GROUPED)
def test_groups_experts_and_weights_are_those_of_transformers(name: str) -> None:
    """Preferences are negative for many experts, because their biases are."""
    experts, groups, most, k = GROUPED[name]
    torch.manual_seed(3)
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            n_routed_experts=experts, n_group=groups, topk_group=most, num_experts_per_tok=k,
            hidden_size=16, norm_topk_prob=True, routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.uniform_(-1, 0)
    logits, weights, numbers = router(torch.randn(400, 16))
    scores = scores_of(logits, "sigmoid")
    preferences = scores + router.e_score_correction_bias
    chosen = choose_experts(limit_to_groups(preferences, groups, most)[0], k)
    found = gates_of(scores, chosen, sum_is_one=True, scale=2.5)
    theirs, ours = numbers.sort(1), chosen.sort(1)
    assert torch.equal(ours.values, theirs.values)
    assert torch.allclose(found.gather(1, ours.indices), weights.gather(1, theirs.indices))
    unlimited = choose_experts(preferences, k).sort(1).values
    assert int((unlimited != ours.values).any(1).sum()) >= 40  # tokens


def test_ties_of_groups_are_broken_by_the_smaller_number() -> None:
    """Sums of multiples of 1/4 are exact, so plain Python has the same ties."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-2, 3, (200, 24), generator=generator) / 4
    ties = 0
    for groups, most in ((4, 1), (4, 2), (8, 3), (12, 11)):
        limited, scores = limit_to_groups(rows, groups, most)
        size = rows.shape[1] // groups
        for row, allowed, of_groups in zip(rows, limited, scores.tolist(), strict=True):
            best = groups_by_hand(row.tolist(), groups, most)
            ties += sum(score == of_groups[best[-1]] for score in of_groups) > 1
            of_group = allowed.view(groups, size)
            expected = torch.full_like(of_group, -torch.inf)
            expected[best] = row.view(groups, size)[best]
            assert torch.equal(of_group, expected)
    assert ties > 100


def test_leading_dimensions_do_not_matter() -> None:
    x = example_logits(12, 8)
    flat = limit_to_groups(x, 4, 2)
    for one, other in zip(limit_to_groups(x.view(3, 4, 8), 4, 2), flat, strict=True):
        assert torch.equal(one.flatten(0, 1), other)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_margin_of_groups_is_the_smallest_change_of_their_choice(most: int) -> None:
    """Two preferences of each group change by half of the margin, in the worst direction."""
    preferences = example_logits(64, 16).double()
    limited, scores = limit_to_groups(preferences, 4, most)
    margin = smallest_margin_of_groups(scores, most)
    signs = torch.where(limited.isinf(), 1.0, -1.0)  # against every chosen group

    def moved(share: float) -> bool:
        others, _ = limit_to_groups(preferences + share * margin / 2 * signs, 4, most)
        return not torch.equal(others.isinf(), limited.isinf())

    assert not moved(0.999) and moved(1.001)
