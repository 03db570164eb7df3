"""Fingerprints distinguish tensors of any shape, type and size."""

import pickle
from random import Random
from unittest import mock

import pytest
import torch

from threefold.supervision import rank_comparison
from threefold.supervision.rank_comparison import ReplicaGroup, diverged_replicas, fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48,), (7, 5), (300, 40), (3, 4, 5)])
def test_any_flipped_bit_changes_the_fingerprint(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.randn(shape).to(dtype)
    before = fingerprint(values)
    assert torch.equal(before, fingerprint(values.clone()))
    for index in (0, values.numel() // 2, values.numel() - 1):
        changed = values.clone()
        bits = changed.view(rank_comparison.INTEGERS_BY_BYTES[changed.element_size()]).view(-1)
        bits[index] ^= 1
        assert not torch.equal(fingerprint(changed), before)


def with_changes(values: torch.Tensor, changes: dict[int, int]) -> torch.Tensor:
    """Return a copy, in which the bits at some positions have been increased as integers."""
    changed = values.clone()
    bits = changed.view(rank_comparison.INTEGERS_BY_BYTES[changed.element_size()]).view(-1)
    for position, change in changes.items():
        bits[position] += change
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100, 2 * rank_comparison.ROW])
def test_regular_changes_do_not_cancel(width: int, dtype: torch.dtype) -> None:
    values = torch.randn(20, width).to(dtype)
    before = fingerprint(values)
    for first in (0, 3, 5 * width + 20):
        for distance in (1, 2, width):  # along a row and a column
            line = {first: 1, first + distance: -2, first + 2 * distance: 1}
            assert fingerprint(with_changes(values, line)) != before
        for right, down in ((1, width), (7, 5 * width), (32, 2 * width)):
            corners = {first: 1, first + right: -1, first + down: -1, first + right + down: 1}
            assert fingerprint(with_changes(values, corners)) != before


def test_a_transposed_matrix_has_another_fingerprint() -> None:
    values = torch.randn(rank_comparison.ROW, rank_comparison.ROW).to(torch.bfloat16)
    assert fingerprint(values.T) != fingerprint(values)


def test_small_random_changes_have_different_fingerprints() -> None:
    values, random = torch.randn(100, 96), Random(0)
    fingerprints = {int(fingerprint(values))}
    for _ in range(1000):
        positions = random.sample(range(values.numel()), random.randint(1, 6))
        changes = {position: random.choice((-2, -1, 1, 2)) for position in positions}
        fingerprints.add(int(fingerprint(with_changes(values, changes))))
    assert len(fingerprints) == 1001


def test_swapped_values_change_the_fingerprint() -> None:
    values = torch.arange(12.0).view(3, 4)
    for other in (values.flip(0), values.flip(1), values.roll(1, 0), values.roll(1, 1)):
        assert not torch.equal(fingerprint(other), fingerprint(values))


def test_sums_of_a_few_rows_at_a_time_are_the_same() -> None:
    values = torch.randn(100, 3 * rank_comparison.ROW // 10)
    with mock.patch.object(rank_comparison, "MAX_ELEMENTS_AT_ONCE", {"cpu": 64}):
        assert torch.equal(fingerprint(values), fingerprint(values.clone()))
        few = fingerprint(values)
    assert torch.equal(few, fingerprint(values))


def test_an_empty_tensor_has_a_fingerprint() -> None:
    assert fingerprint(torch.empty(0)) == 0


def compare(rank: int, size: int, *, names: list[str], wrong: set[int]) -> tuple[list[str], int]:
    """Compare tensors on one of many simulated data ranks, some of which hold wrong values.

    Returns:
        The sentences, and the bytes that this rank contributes to their gathering.
    """
    contributed = 0

    def gathered(own: list[str]) -> list[list[str]]:
        nonlocal contributed
        contributed = len(pickle.dumps(own))
        return [own, *([] for _ in range(size - 1))]

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        for other, part in enumerate(parts):
            part.copy_(own + (other if other in wrong else 0))

    group = ReplicaGroup("data ranks", mock.Mock(), [(name, torch.ones(2)) for name in names])
    with (
        mock.patch.object(rank_comparison, "dist") as dist,
        mock.patch.object(rank_comparison, "gathered", gathered),
    ):
        dist.get_rank.return_value = rank
        dist.get_process_group_ranks.return_value = range(size)
        dist.all_gather = all_gather
        return diverged_replicas([group], torch.device("cpu")), contributed


@pytest.mark.parametrize(
    ("wrong", "sides"),
    [
        ({517}, "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1015 more against rank 517"),
        (set(range(1024)), "rank 0 against rank 1 against rank 2 against rank 3 against 1020 more "
                           "ranks"),
    ],
)  # fmt: skip
def test_differences_of_many_ranks_and_tensors_are_cut_short(wrong: set[int], sides: str) -> None:
    names = [f"blocks.{block:03d}.mlp.up.weight" for block in reversed(range(400))]
    sentences, contributed = compare(0, 1024, names=names, wrong=wrong)
    expected = [f"{name} differs between data ranks: {sides}" for name in names[:-9:-1]]
    expected[-1] += " (and 392 more)"
    assert sentences == expected
    assert contributed < 20_000
    assert compare(5, 1024, names=names, wrong=wrong) == ([], 0)


def test_few_ranks_are_all_named() -> None:
    sentences, _ = compare(0, 8, names=["b", "a"], wrong={5, 6})
    sides = "ranks 0, 1, 2, 3, 4, 7 against rank 5 against rank 6"
    assert sentences == [f"{name} differs between data ranks: {sides}" for name in "ab"]
