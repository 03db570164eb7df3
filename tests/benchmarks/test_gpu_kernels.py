"""The benchmark of single GPU kernels rejects machines without a GPU."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks import gpu_kernels
from benchmarks.gpu_kernels import block_reals, quantized_blocks, quantized_rows, reals
from tests.commands import run_here


def test_a_machine_without_a_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_here(gpu_kernels.main, "--json")
    assert done.returncode == 2 and done.stdout == ""
    assert "this benchmark needs an NVIDIA GPU" in done.stderr


def test_every_call_has_valid_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's meta device, which checks shapes, types and strides without computing."""
    monkeypatch.setattr(gpu_kernels, "DEVICE", "meta")
    monkeypatch.setattr(gpu_kernels, "relative_error", lambda result, exact: 0.0)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    kernels = 0
    for group in gpu_kernels.GROUPS.values():
        for kernel in group():
            kernel.call()
            assert (kernel.flops > 0) != (kernel.moved_bytes > 0), kernel.name
            kernels += 1
    assert kernels > 70


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError])
def test_an_error_of_torch_is_a_row(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels() -> Iterator[gpu_kernels.Kernel]:
        raise error("scale_b must have shape 4 x 32\nmore")
        yield

    monkeypatch.setitem(gpu_kernels.GROUPS, "fp8", kernels)
    rows = list(gpu_kernels.measure("fp8"))
    assert rows == [{"kernel": "not supported: scale_b must have shape 4 x 32"}]


def test_a_row_shows_rate_and_error() -> None:
    row = {"kernel": "matmul", "milliseconds": 1.5, "tflops": 700.0, "error": 1.3e-4}
    assert gpu_kernels.line(row) == "| matmul | 1.500 | 700 TFLOP/s | 1.3e-04 |"
    assert gpu_kernels.line({"kernel": "not supported: x"}) == "| not supported: x | | | |"


def test_quantized_numbers_are_near_the_exact_ones() -> None:
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).double()
    for quantize, restore in ((quantized_rows, reals), (quantized_blocks, block_reals)):
        rounded = restore(*quantize(x))
        assert rounded.shape == x.shape
        # half of the last of three bits; numbers below 2^-6 of the scale are rounded more coarsely
        assert (rounded - x).norm() / x.norm() < 2**-4
