"""16-bit matmuls on a CPU without instructions for them, computed in fp32."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.kernels import matmul
from threefold.engine import build

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
Operation = Callable[..., Tensor]
# Operations of a total, two batches of matrices and tensors that are overwritten. The sums of the
# products of their numbers are exact in fp32, but not in 16 bits.
OPERATIONS: dict[str, Operation] = {
    "mm": lambda total, a, b, out: a[0] @ b[0],
    "mm to out": lambda total, a, b, out: torch.mm(a[0], b[0], out=out[0]),
    "addmm": lambda total, a, b, out: torch.addmm(total[0], a[0], b[0], beta=3, alpha=7),
    "addmm in place": lambda total, a, b, out: total[0].addmm_(a[0], b[0], beta=3, alpha=7),
    "addmm to out": lambda total, a, b, out: torch.addmm(total[0], a[0], b[0], out=out[0]),
    "bmm": lambda total, a, b, out: a @ b,
    "bmm to out": lambda total, a, b, out: torch.bmm(a, b, out=out),
    "baddbmm": lambda total, a, b, out: torch.baddbmm(total, a, b, beta=0, alpha=7),
    "baddbmm in place": lambda total, a, b, out: total.baddbmm_(a, b, beta=3, alpha=7),
    "baddbmm to out": lambda total, a, b, out: torch.baddbmm(total, a, b, out=out),
    "linear": lambda total, a, b, out: F.linear(a, b[0].t(), total[0, 0]),
}


@pytest.fixture(params=SIXTEEN_BITS, ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A type that this process multiplies in fp32."""
    slow = mock.patch.object(matmul, "types_without_instructions", return_value={*SIXTEEN_BITS})
    with slow, mock.patch.object(matmul, "_fp32_kernels", []) as kernels:
        matmul.multiply_in_fp32()
        matmul.multiply_in_fp32()  # does nothing
        (library,) = kernels
        yield request.param
        library._destroy()


def numbers(*shape: int) -> Tensor:
    """Return fp32 numbers that 16 bits can hold."""
    return torch.randint(-8, 8, shape).float() / 8


@pytest.mark.parametrize("name", OPERATIONS)
def test_products_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    operation = OPERATIONS[name]
    total, a, b, out = numbers(2, 5, 9), numbers(2, 5, 33), numbers(2, 33, 9), numbers(2, 5, 9)
    narrow = [each.to(dtype) for each in (total, a, b, out)]
    got, expected = operation(*narrow), operation(total, a, b, out)
    assert got.dtype == dtype
    assert torch.equal(got, expected.to(dtype))
    for place, wide in zip(narrow, (total, a, b, out), strict=True):
        assert torch.equal(place, wide.to(dtype))  # what is written, and that nothing else is


def test_products_in_fp32_do_not_change(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 5, 33), torch.randn(2, 33, 9)
    with mock.patch.object(matmul, "_wide", side_effect=AssertionError):
        assert torch.allclose(a[0] @ b[0], (a[0, :, :, None] * b[0]).sum(1), atol=1e-5)
        total = torch.zeros(5, 9).addmm_(a[0], b[0])
        assert torch.equal(total, torch.mm(a[0], b[0], out=torch.empty(5, 9)))


def test_autograd_keeps_16_bits(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    kept: list[Any] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = F.linear(x, weight)
    y.sum().backward()
    assert kept == [dtype] * 2
    assert x.grad.dtype == weight.grad.dtype == dtype


def test_gradients_of_attention_are_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 16, 8).to(dtype).requires_grad_() for _ in range(3))
    wide = [each.detach().float().requires_grad_() for each in (q, k, v)]
    grad = torch.randn(1, 2, 16, 8).to(dtype)
    F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)
    F.scaled_dot_product_attention(*wide, is_causal=True).backward(grad.float())
    for narrow, expected in zip((q, k, v), wide, strict=True):
        difference = (narrow.grad.float() - expected.grad).norm() / expected.grad.norm()
        assert narrow.grad.dtype == dtype
        assert difference < {torch.bfloat16: 6e-3, torch.float16: 8e-4}[dtype]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_engines_in_16_bits_multiply_in_fp32(precision: str) -> None:
    class Built(Exception):
        pass

    config = {precision: {"enabled": True}}
    with (
        mock.patch.object(build, "multiply_in_fp32") as multiply,
        mock.patch.object(build, "layer_specs", side_effect=Built),
        pytest.raises(Built),
    ):
        build.build_model(mock.MagicMock(), mock.MagicMock(), config=config)
    assert multiply.called == (precision != "fp32")
