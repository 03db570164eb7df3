"""Matmuls of groups against a loop: products, gradients, deferral, stacked weights."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.experts import layer as layer_module
from models.parallel import layers
from models.parallel.layers import Deferral

IN, OUT = 6, 5
ROWS = {
    "all groups": [3, 1, 4, 2],
    "empty groups": [0, 3, 0, 5, 0],
    "one group": [7],
    "one group has all rows": [0, 0, 9],
    "no rows": [0, 0, 0],
}


def example(rows: Sequence[int]) -> tuple[Tensor, list[nn.Parameter], Tensor]:
    """Return rows [n, in], a weight of each group, and a gradient of the product."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = draw(sum(rows), IN).requires_grad_()
    return x, [nn.Parameter(draw(OUT, IN)) for _ in rows], draw(sum(rows), OUT)


def run(rows: Sequence[int], deferral: Deferral | None = None) -> list[Tensor | None]:
    """Return the product, the gradient of x, and the gradient of each weight."""
    x, weights, grad = example(rows)
    y = layer_module.grouped_matmul(x, weights, rows, deferral)
    y.backward(grad)
    if deferral is not None:
        assert all(weight.grad is None for weight in weights)
        deferred = deferral.take()
        assert [id(weight) for weight, _ in deferred] == [id(weight) for weight in weights]
        for weight, gradient in deferred:
            weight.grad = gradient()
    return [y.detach(), x.grad, *(weight.grad for weight in weights)]


def run_loop(rows: Sequence[int]) -> list[Tensor | None]:
    """Return the same as `run`, from one matmul per group and autograd."""
    x, weights, grad = example(rows)
    parts = [part @ weight.t() for part, weight in zip(x.split(rows), weights, strict=True)]
    y = torch.cat(parts)
    y.backward(grad)
    return [y.detach(), x.grad, *(weight.grad for weight in weights)]


def agree(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Return True if no gradient is missing and all tensors are equal up to rounding."""
    return all(
        one is not None and other is not None and torch.allclose(one, other, rtol=1e-12)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", ROWS)
def test_products_and_gradients_are_those_of_a_loop(name: str) -> None:
    assert agree(run(ROWS[name]), run_loop(ROWS[name]))


@pytest.mark.parametrize("name", ROWS)
def test_deferred_weight_gradients_are_the_immediate_ones(name: str) -> None:
    immediate, deferred = run(ROWS[name]), run(ROWS[name], Deferral())
    for one, other in zip(immediate, deferred, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_a_weight_without_rows_has_a_gradient_of_zeros() -> None:
    gradients = run(ROWS["empty groups"])[2:]
    for rows, gradient in zip(ROWS["empty groups"], gradients, strict=True):
        assert gradient is not None and gradient.shape == (OUT, IN)
        assert bool(gradient.any()) == (rows > 0)


def test_a_gradient_that_is_not_contiguous_is_accepted() -> None:
    rows = ROWS["all groups"]
    x, weights, grad = example(rows)
    layer_module.grouped_matmul(x, weights, rows, None).t().contiguous().backward(
        grad.t().contiguous()
    )
    assert agree([x.grad, *(weight.grad for weight in weights)], run_loop(rows)[1:])


MULTIPLY, WEIGHT_GRADIENT = layer_module._multiply, layers.weight_gradient
FAULTS: dict[str, dict[str, Any]] = {
    "the weight of the first group for all": {
        "_multiply": lambda x, weights, rows, transposed: MULTIPLY(
            x, [weights[0]] * len(weights), rows, transposed
        )
    },
    "groups in reverse order": {
        "_multiply": lambda x, weights, rows, transposed: MULTIPLY(
            x, weights[::-1], rows, transposed
        )
    },
    "no gradient without rows": {
        "weight_gradient": lambda grad, x: WEIGHT_GRADIENT(grad, x) if len(x) else None
    },
    "gradient averaged over rows": {
        "weight_gradient": lambda grad, x: WEIGHT_GRADIENT(grad, x) / max(1, len(x))
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_noticed(fault: str) -> None:
    with mock.patch.multiple(layer_module, **FAULTS[fault]):
        assert not agree(run(ROWS["empty groups"]), run_loop(ROWS["empty groups"]))


def test_a_fault_in_deferral_is_noticed() -> None:
    immediate = run(ROWS["all groups"])
    with mock.patch.object(
        layer_module, "ProductGradient", lambda *pair: lambda: 0 * WEIGHT_GRADIENT(*pair)
    ):
        assert not agree(run(ROWS["all groups"], Deferral()), immediate)


class _OnGpu(Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "in_one_kernel"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((10, 3), True),
     ((12, 0), False)],
)  # fmt: skip
def test_one_kernel_multiplies_groups_only_where_torch_has_it(
    capability: tuple[int, int], in_one_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other GPUs `grouped_mm` waits for the ends of the groups to arrive on the host."""
    called = mock.Mock(return_value=torch.zeros(()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(F, "grouped_mm", called)
    monkeypatch.setattr(Tensor, "to", lambda x, *_, **__: x)
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(8, 8, generator=generator).bfloat16() for _ in range(3))
    y = MULTIPLY(x.as_subclass(_OnGpu), weights, [3, 5], transposed=True)
    assert called.call_count == in_one_kernel
    if not in_one_kernel:
        assert torch.equal(y[3:].as_subclass(Tensor), x[3:] @ weights[1].t())


def views(count: int = 4, gap: int = 0) -> tuple[Tensor, list[nn.Parameter]]:
    """Return one tensor and the weights that are parts of it, as ZeRO keeps them."""
    size = OUT * IN
    flat = torch.arange(7.0 + count * (size + gap))
    starts = range(7, 7 + count * (size + gap), size + gap)
    return flat, [nn.Parameter(flat[start : start + size].view(OUT, IN)) for start in starts]


def stacks_without_copy() -> bool:
    """Return True if adjacent weights are stacked in place, with the right values."""
    flat, weights = views()
    stacked = layer_module.stack(weights)
    expected = torch.stack([weight.detach() for weight in weights])
    in_place = stacked.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    return torch.equal(stacked, expected) and in_place


def apart(name: str) -> list[Tensor]:
    """Return weights that are not adjacent."""
    flat, weights = views()
    return {
        "tensors of their own": [nn.Parameter(each.detach().clone()) for each in weights],
        "swapped": [weights[1], weights[0], *weights[2:]],
        "every second one": weights[::2],
        "with gaps": views(gap=3)[1],
        "repeated": [weights[0]] * 4,
        "transposed": list(flat[: 4 * 30].view(4, IN, OUT).transpose(1, 2)),
        "of two tensors": [*weights[:2], *views()[1][2:]],
    }[name]


APART = (
    *("tensors of their own", "swapped", "every second one", "with gaps", "repeated"),
    *("transposed", "of two tensors"),
)


def copies_correctly(name: str) -> bool:
    """Return True if weights that are not adjacent are copied, with the right values."""
    weights = apart(name)
    stacked = layer_module.stack(weights)
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    expected = torch.stack([weight.detach() for weight in weights])
    copied = stacked.untyped_storage().data_ptr() not in storages
    return torch.equal(stacked, expected) and copied


def test_adjacent_weights_are_stacked_without_a_copy() -> None:
    assert stacks_without_copy()
    assert not layer_module.stack(views()[1]).requires_grad
    assert (
        layer_module.stack(views()[1][1:3]).tolist() == layer_module.stack(views()[1])[1:3].tolist()
    )


@pytest.mark.parametrize("name", APART)
def test_other_weights_are_copied(name: str) -> None:
    assert copies_correctly(name)


def test_a_wrong_stack_is_noticed() -> None:
    def always_copied(weights: Sequence[Tensor]) -> Tensor:
        return torch.stack([weight.detach() for weight in weights])

    def never_copied(weights: Sequence[Tensor]) -> Tensor:
        first = weights[0].detach()
        strides = (first.numel(), *first.stride())
        return first.as_strided((2, *first.shape), strides, first.storage_offset())

    with mock.patch.object(layer_module, "stack", always_copied):
        assert not stacks_without_copy()
    with mock.patch.object(layer_module, "stack", never_copied):
        assert not copies_correctly("every second one") and not copies_correctly("with gaps")
