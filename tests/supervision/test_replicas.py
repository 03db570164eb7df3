"""Fingerprints distinguish tensors of any shape, type and size."""

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


def test_swapped_values_change_the_fingerprint() -> None:
    values = torch.arange(12.0).view(3, 4)
    for other in (values.flip(0), values.flip(1), values.roll(1, 0), values.roll(1, 1)):
        assert not torch.equal(fingerprint(other), fingerprint(values))


def test_sums_of_a_few_rows_at_a_time_are_the_same() -> None:
    values = torch.randn(100, 30)
    with mock.patch.object(rank_comparison, "MAX_ELEMENTS_AT_ONCE", 64):
        assert torch.equal(fingerprint(values), fingerprint(values.clone()))
        few = fingerprint(values)
    assert torch.equal(few, fingerprint(values))


def test_an_empty_tensor_has_a_fingerprint() -> None:
    assert fingerprint(torch.empty(0)).tolist() == [0, 0, 0]
