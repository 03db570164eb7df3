"""16-bit matmuls on a CPU without instructions for them, computed in fp32."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from threefold.engine import build
from threefold.runtime import cpu_matmuls

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
Operation = Callable[..., Tensor]
# Each takes a summand, two batches of matrices and an output. Sums of products of the numbers of
# `eighths` are exact in fp32, but not in 16 bits.
OPERATIONS: dict[str, Operation] = {
    "mm": lambda summand, a, b, out: a[0] @ b[0],
    "mm to out": lambda summand, a, b, out: torch.mm(a[0], b[0], out=out[0]),
    "addmm": lambda summand, a, b, out: torch.addmm(summand[0], a[0], b[0], beta=3, alpha=7),
    "addmm in place": lambda summand, a, b, out: summand[0].addmm_(a[0], b[0], beta=3, alpha=7),
    "addmm to out": lambda summand, a, b, out: torch.addmm(summand[0], a[0], b[0], out=out[0]),
    "bmm": lambda summand, a, b, out: a @ b,
    "bmm to out": lambda summand, a, b, out: torch.bmm(a, b, out=out),
    "baddbmm": lambda summand, a, b, out: torch.baddbmm(summand, a, b, beta=0, alpha=7),
    "baddbmm in place": lambda summand, a, b, out: summand.baddbmm_(a, b, beta=3, alpha=7),
    "baddbmm to out": lambda summand, a, b, out: torch.baddbmm(summand, a, b, out=out),
    "linear": lambda summand, a, b, out: F.linear(a, b[0].t(), summand[0, 0]),
}


@pytest.fixture(params=SIXTEEN_BITS, ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Return a dtype that this process multiplies in fp32."""
    dtypes = mock.patch.object(
        cpu_matmuls, "dtypes_without_instructions", return_value={*SIXTEEN_BITS}
    )
    with dtypes, mock.patch.object(cpu_matmuls, "_registrations", []) as registrations:
        cpu_matmuls.replace_slow_cpu_matmuls()
        cpu_matmuls.replace_slow_cpu_matmuls()  # does nothing
        (library,) = registrations
        yield request.param
        library._destroy()


def eighths(*shape: int) -> Tensor:
    """Return fp32 numbers that 16 bits can hold."""
    return torch.randint(-8, 8, shape).float() / 8


@pytest.mark.parametrize("name", OPERATIONS)
def test_products_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    in_fp32 = eighths(2, 9, 10), eighths(2, 9, 33), eighths(2, 33, 10), eighths(2, 9, 10)
    in_16_bits = [argument.to(dtype) for argument in in_fp32]
    result, expected = OPERATIONS[name](*in_16_bits), OPERATIONS[name](*in_fp32)
    assert result.dtype == dtype
    assert torch.equal(result, expected.to(dtype))
    for argument, expected_argument in zip(in_16_bits, in_fp32, strict=True):
        # Outputs are written, and inputs are unchanged.
        assert torch.equal(argument, expected_argument.to(dtype))


def test_other_matmuls_are_those_of_torch(dtype: torch.dtype) -> None:
    """In fp32, and with few rows."""
    a, b = torch.randn(2, 9, 33), torch.randn(2, 33, 10)
    with mock.patch.object(cpu_matmuls, "_to_fp32", side_effect=AssertionError):
        product = torch.mm(a[0], b[0], out=torch.empty(9, 10))
        assert torch.allclose(product, (a[0, :, :, None] * b[0]).sum(1), atol=1e-5)
        assert torch.equal(torch.zeros(9, 10).addmm_(a[0], b[0]), product)
        assert (a[0, :1].to(dtype) @ b[0].to(dtype)).dtype == dtype


@pytest.mark.parametrize("other", [torch.float32, torch.int64, torch.complex64])
def test_different_dtypes_are_rejected_as_by_torch(dtype: torch.dtype, other: torch.dtype) -> None:
    a, b = torch.ones(9, 8, dtype=dtype), torch.ones(8, 8)
    with pytest.raises(RuntimeError, match="same dtype"):
        a @ b.to(other)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(a, b.to(dtype), out=torch.empty(9, 8, dtype=other))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.zeros(9, 8, dtype=other).addmm_(a, b.to(dtype))


def test_an_empty_output_is_resized(dtype: torch.dtype) -> None:
    a, b = torch.ones(9, 8, dtype=dtype), torch.ones(8, 10, dtype=dtype)
    out = torch.empty(0, dtype=dtype)
    assert torch.mm(a, b, out=out) is out
    assert torch.equal(out, torch.full((9, 10), 8, dtype=dtype))


def test_autograd_saves_16_bits(dtype: torch.dtype) -> None:
    x = torch.randn(8, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(9, 8, dtype=dtype, requires_grad=True)
    saved: list[Any] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        y = F.linear(x, weight)
    y.sum().backward()
    assert saved == [dtype] * 2
    assert x.grad.dtype == weight.grad.dtype == dtype


def gradients_of_attention(grad: Tensor, *qkv: Tensor) -> Sequence[Tensor]:
    aten = torch.ops.aten
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, True)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *qkv, out, logsumexp, 0.0, True
    )


def test_gradients_of_attention_are_rounded_once(dtype: torch.dtype) -> None:
    in_16_bits = [torch.randn(1, 2, 16, 8).to(dtype) for _ in range(4)]
    with mock.patch.object(cpu_matmuls, "_to_fp32", side_effect=cpu_matmuls._to_fp32) as converted:
        gradients = gradients_of_attention(*in_16_bits)
    assert converted.called
    in_fp32 = gradients_of_attention(*(tensor.float() for tensor in in_16_bits))
    for gradient, expected in zip(gradients, in_fp32, strict=True):
        assert gradient.dtype == dtype
        difference = (gradient.float() - expected).norm() / expected.norm()
        assert difference < {torch.bfloat16: 6e-3, torch.float16: 8e-4}[dtype]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_models_in_16_bits_replace_the_kernels(precision: str) -> None:
    class Built(Exception):
        pass

    with (
        mock.patch.object(build, "on_gpu", return_value=False),
        mock.patch.object(build, "replace_slow_cpu_matmuls") as replace,
        mock.patch.object(build, "layer_specs", side_effect=Built),
        pytest.raises(Built),
    ):
        config = {precision: {"enabled": True}}
        build.build_model(mock.MagicMock(), mock.MagicMock(), config=config)
    assert replace.called == (precision != "fp32")
