"""Fingerprints distinguish tensors of any shape, type and size."""

from random import Random
from unittest import mock

import pytest
import torch

from threefold.supervision import rank_comparison
from threefold.supervision.rank_comparison import fingerprint


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
