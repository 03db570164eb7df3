"""Matmuls in FP8: the values of tiles and blocks, their products, and the gradients of a layer."""

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.config import ModelConfig
from models.experts import layer as experts
from models.experts.layer import grouped_matmul
from models.kernels import matmul as kernels
from models.kernels.compile import compiled
from models.kernels.matmul import E4M3, TILE, Fp8, power_of_two_scales, product
from models.layer_specs import SequentialModel, compute_in_fp8, layer_specs
from models.parallel.collectives import TensorAxis
from models.parallel.layers import (
    ColumnParallelLinear,
    Deferral,
    Deferring,
    QuantizedGradient,
    matmul,
)
from tests.models.test_latent_attention import MODEL as LATENT
from tests.models.test_transformer import SHAPES

LARGEST = 448.0  # of E4M3
PARTS = (64, 192, 128)  # of a joined weight
SCALED_MM = F.scaled_mm


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers whose sizes differ between rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    for dimension, size in enumerate(shape):
        sizes = torch.linspace(-6, 6, size).exp2().roll(size // 3)
        x = x * sizes.view(-1, *[1] * (len(shape) - 1 - dimension))
    return x.to(dtype)


def test_scales_are_the_smallest_powers_of_two() -> None:
    edges = [power * 2.0**n for n in range(-100, 100, 7) for power in (1.0, 1.75, 1.7500001, 1.99)]
    largest = torch.tensor([*edges, *drawn(1000).abs().tolist()])
    scales, inverse = power_of_two_scales(largest)
    assert torch.equal(scales.log2(), scales.log2().round()) and torch.equal(1 / scales, inverse)
    assert (largest / scales).max() == LARGEST and (largest / scales).min() > LARGEST / 2
    zero, _ = power_of_two_scales(torch.zeros(1))
    assert zero > 0 and zero.isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_those_of_torchs_cast(dtype: torch.dtype) -> None:
    """A tile is x / scale in torch's E4M3, whose product with the scale is exact in bf16."""
    x = drawn(3, 5, sum(PARTS), dtype=dtype)
    quantized = Fp8(PARTS).outputs_of(x)
    starts = [0, 64, 64 + TILE, 256]  # the parts begin at 0, 64 and 256
    bounds = zip(starts, [*starts[1:], sum(PARTS)], strict=True)
    for number, (start, stop) in enumerate(bounds):
        part = x[..., start:stop].float()
        scales, _ = power_of_two_scales(part.abs().amax(-1))
        expected = (part / scales[..., None]).to(E4M3)
        assert torch.equal(quantized.scales[..., number], scales)
        assert torch.equal(quantized.values[..., start:stop].float(), expected.float())
        exact = expected.float() * scales[..., None]
        for wide in (torch.bfloat16, torch.float32):
            assert torch.equal(quantized.dequantized(wide)[..., start:stop].float(), exact)
        torch.testing.assert_close(exact, part, rtol=2**-4, atol=float(part.abs().max()) / 2**15)


def test_blocks_are_those_of_each_logical_weight() -> None:
    """q, k and v of a joined weight are quantized as if each were a weight of its own."""
    weight = drawn(sum(PARTS), 200)
    joined = Fp8(PARTS).weight(weight)
    apart = [Fp8((len(part),)).weight(part) for part in weight.split(PARTS)]
    assert torch.equal(joined.scales, torch.cat([part.scales for part in apart]))
    assert torch.equal(
        joined.dequantized(torch.float32), torch.cat([x.dequantized(torch.float32) for x in apart])
    )
    corner = weight[64 : 64 + TILE, TILE:]  # the first rows of the second part
    assert joined.scales[1, 1] == power_of_two_scales(corner.abs().max())[0]
    transposed = joined.transposed().dequantized(torch.float32)
    assert torch.equal(transposed, joined.dequantized(torch.float32).t())


def test_tiles_of_tokens_lie_within_a_sequence() -> None:
    """Neither the other sequences of a micro-batch nor other parts of a sequence change them."""
    x = drawn(2 * TILE, 3, 40, dtype=torch.bfloat16)
    together = Fp8(()).tokens(x)
    values = together.values.unflatten(1, (3, -1)).float()  # [k, b, s]
    scales = together.scales.unflatten(1, (3, -1))
    for sequence, half in itertools.product(range(3), range(2)):
        part = x[half * TILE : (half + 1) * TILE, sequence : sequence + 1]
        alone = Fp8(()).tokens(part.contiguous())
        assert torch.equal(values[:, sequence].split(TILE, 1)[half], alone.values.float())
        assert torch.equal(scales[:, sequence, half : half + 1], alone.scales)
    exact = together.dequantized(torch.float32).unflatten(1, (3, -1)).permute(2, 1, 0)
    assert (exact - x.float()).norm() < 0.04 * x.float().norm()


def test_products_are_sums_of_torchs_products_of_tiles() -> None:
    """torch's own matmul in FP8 on CPUs has one scale per matrix, so that it multiplies tiles."""
    x, weight = drawn(32, 3 * TILE), drawn(2 * TILE, 3 * TILE, seed=1)
    fp8 = Fp8((2 * TILE,))
    a, b = fp8.rows(x), fp8.weight(weight)
    expected = torch.zeros(32, 2 * TILE, dtype=torch.float64)
    for row, block, tile in itertools.product(range(32), range(2), range(3)):
        columns, rows = (slice(n * TILE, (n + 1) * TILE) for n in (tile, block))
        expected[row, rows] += torch._scaled_mm(
            a.values[row : row + 1, columns].contiguous(),
            b.values[rows, columns].contiguous().t(),
            scale_a=a.scales[row, tile],
            scale_b=b.scales[block, tile],
            out_dtype=torch.float32,
        ).double()[0]
    size = float(expected.abs().max())
    torch.testing.assert_close(
        product(a, b, torch.float32).double(), expected, rtol=1e-5, atol=1e-7 * size
    )
    near = product(a, b, torch.bfloat16).double()
    torch.testing.assert_close(near, expected, rtol=2**-8, atol=1e-6 * size)


def test_a_number_that_is_not_finite_remains_so() -> None:
    for number in (float("nan"), float("inf")):
        x = drawn(4, TILE)
        x[1, 5] = number
        wrong = Fp8(()).rows(x).dequantized(torch.float32)
        assert not wrong[1, 5].isfinite() and wrong[0].isfinite().all()


def layer_of(dtype: torch.dtype, bias: bool = True) -> ColumnParallelLinear:
    """Return a layer in FP8 with a joined weight."""
    layer = ColumnParallelLinear(TILE, PARTS, bias=bias, tensor=TensorAxis())
    layer.fp8 = True
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(drawn(*parameter.shape))
    return layer.to(dtype)


def scaled_mm_of_a_hopper_gpu(
    a: Tensor, b: Tensor, a_scales: Tensor, a_type: object, b_scales: Tensor, b_type: object,
    *, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Check the inputs as torch does for a GPU, then multiply the dequantized matrices."""
    on_gpu = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
              for x in (a, b, a_scales, b_scales))  # fmt: skip
    meta_a, meta_b, meta_a_scales, meta_b_scales = on_gpu
    SCALED_MM(
        meta_a, meta_b, meta_a_scales, a_type, meta_b_scales, b_type, output_dtype=output_dtype
    )
    of_a = a_scales.repeat_interleave(TILE, 1)
    if b_type == F.ScalingType.BlockWise128x128:
        assert b_scales[b.shape[0] // TILE :].count_nonzero() == 0
        of_b = b_scales.repeat_interleave(TILE, 0)[: len(b)].repeat_interleave(TILE, 1)
    else:
        of_b = b_scales.repeat_interleave(TILE, 1).t()
    return ((a.float() * of_a) @ (b.float() * of_b)).to(output_dtype)


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 86])  # 86: llama/7b
def test_a_hopper_gpu_takes_the_scales_of_any_number_of_tiles(
    tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output and the gradients of input and weight, for 1 to 86 tiles of the summed columns."""
    for parts in ((TILE,), (TILE, 2 * TILE)):
        x = drawn(TILE, 2, tiles * TILE, dtype=torch.bfloat16)
        weight = drawn(sum(parts), tiles * TILE, seed=1, dtype=torch.bfloat16)
        grad = drawn(TILE, 2, sum(parts), seed=2, dtype=torch.bfloat16)
        results = []
        for on_hopper in (False, True):
            multiply = mock.Mock(side_effect=scaled_mm_of_a_hopper_gpu)
            monkeypatch.setattr(kernels, "multiplies_tiles", lambda _, answer=on_hopper: answer)
            monkeypatch.setattr(F, "scaled_mm", multiply)
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = matmul(*leaves, None, None, Fp8(parts))
            y.backward(grad)
            results.append([y.detach(), *(leaf.grad for leaf in leaves)])
            assert multiply.call_count == (3 if on_hopper else 0)
        for emulated, found in zip(*results, strict=True):
            near = float(emulated.abs().max()) * 1e-4
            torch.testing.assert_close(found, emulated, rtol=2**-7, atol=near)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_three_products_of_a_layer_are_in_fp8(dtype: torch.dtype, deferred: bool) -> None:
    layer, fp8, deferral = layer_of(dtype), Fp8(PARTS), Deferral()
    if deferred:
        layer.deferral = deferral
    x = drawn(2 * TILE, 2, TILE, dtype=dtype).requires_grad_()
    grad = drawn(2 * TILE, 2, sum(PARTS), seed=2, dtype=dtype)
    y = layer(x)
    y.backward(grad)
    weight = layer.weight.detach()
    quantized = fp8.weight(weight)
    torch.testing.assert_close(
        y, product(fp8.rows(x.detach()), quantized, dtype) + layer.bias, rtol=0, atol=0
    )
    torch.testing.assert_close(
        x.grad, product(fp8.outputs_of(grad), quantized.transposed(), dtype), rtol=0, atol=0
    )
    again = fp8.rows(x.detach()).dequantized(dtype)
    expected = product(fp8.tokens(grad), fp8.tokens(again), dtype)
    if deferred:
        ((_, gradient),) = deferral.take()
        assert layer.weight.grad is None and isinstance(gradient, QuantizedGradient)
        total = torch.full_like(weight, 2.0)
        gradient.add_to(total, replace=False)
        torch.testing.assert_close(total, 2 + expected, rtol=0, atol=0)
        gradient.add_to(total, replace=True)
        torch.testing.assert_close(total, expected, rtol=0, atol=0)
        return
    torch.testing.assert_close(layer.weight.grad, expected, rtol=0, atol=0)
    torch.testing.assert_close(layer.bias.grad, grad.flatten(0, 1).sum(0), rtol=0, atol=0)
    exact = grad.float().flatten(0, 1).t() @ x.detach().float().flatten(0, 1)
    assert (expected.float() - exact).norm() < 0.05 * exact.norm()


def test_a_layer_keeps_its_input_in_fp8() -> None:
    layer, kept = layer_of(torch.bfloat16, bias=False), []
    x = drawn(TILE, 1, TILE, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert [(each.dtype, each.numel()) for each in kept] == [
        (E4M3, TILE * TILE),
        (torch.float32, TILE),
    ]


def test_groups_of_experts_multiply_quantized_rows_and_weights() -> None:
    rows, fp8 = (3, 0, 5), Fp8((2 * TILE,))
    x = drawn(8, TILE, dtype=torch.bfloat16).requires_grad_()
    weights = [
        torch.nn.Parameter(drawn(2 * TILE, TILE, seed=n, dtype=torch.bfloat16)) for n in range(3)
    ]
    grad = drawn(8, 2 * TILE, seed=7, dtype=torch.bfloat16)
    y = grouped_matmul(x, weights, rows, None, fp8)
    y.backward(grad)
    first = 0
    for size, weight in zip(rows, weights, strict=True):
        part = slice(first, first + size)
        first += size
        if not size:
            assert weight.grad.count_nonzero() == 0
            continue
        quantized, inputs = fp8.weight(weight), fp8.rows(x.detach()[part])
        near = {"rtol": 2**-7, "atol": float(y.detach().abs().max()) * 1e-4}
        torch.testing.assert_close(y[part], product(inputs, quantized, torch.bfloat16), **near)
        expected = product(fp8.outputs_of(grad[part]), quantized.transposed(), torch.bfloat16)
        near["atol"] = float(expected.abs().max()) * 1e-4
        torch.testing.assert_close(x.grad[part], expected, **near)
        # The gradient of the outputs is not quantized for the weights.
        expected = grad[part].t() @ inputs.dequantized(torch.bfloat16)
        torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("parts", [(TILE, TILE), PARTS], ids=["whole tiles", "smaller tiles"])
def test_the_weights_of_all_groups_are_quantized_at_once(
    parts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those of each weight alone, bit for bit: no block has rows of two experts."""
    flat, rows, out = drawn(3 * sum(parts) * TILE, dtype=torch.bfloat16), (3, 0, 5), sum(parts)
    weights = [torch.nn.Parameter(part) for part in flat.view(3, out, TILE)]
    fp8, quantize = Fp8(parts), mock.Mock(side_effect=kernels.quantize_blocks)
    alone = [fp8.weight(weight).dequantized(torch.bfloat16) for weight in weights]
    monkeypatch.setattr(kernels, "quantize_blocks", quantize)
    multiply = mock.Mock(side_effect=experts._multiply)
    monkeypatch.setattr(experts, "_multiply", multiply)
    x = drawn(8, TILE, seed=7, dtype=torch.bfloat16).requires_grad_()
    grouped_matmul(x, weights, rows, None, fp8).sum().backward()
    assert quantize.call_count == multiply.call_count == 2  # forward and backward
    for call in multiply.call_args_list:
        multiplied = call.args[1]
        assert all(map(torch.equal, multiplied, alone))
        assert experts.stack(multiplied).data_ptr() == multiplied[0].data_ptr()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SHAPES["qwen3"], {"attention.qkv", "attention.output", "mlp.up", "mlp.down"}),
        (LATENT, {*(f"attention.{name}" for name in ("q_down", "q_up", "kv_down", "output")),
                  "mlp.up", "mlp.down"}),
    ],
)  # fmt: skip
def test_the_matmuls_in_fp8_are_those_of_the_blocks(
    config: ModelConfig, expected: set[str]
) -> None:
    """The embedding, the head, the router and the expansion of latents stay in 16 bits."""
    model = SequentialModel(layer_specs(config))
    compute_in_fp8(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Deferring) and m.fp8}
    assert {name.split(".", 1)[1] for name in layers} == expected


@pytest.mark.long
@pytest.mark.parametrize("parts", [(TILE, 2 * TILE), PARTS], ids=["whole tiles", "smaller tiles"])
def test_compiled_quantization_is_the_same(parts: tuple[int, ...]) -> None:
    x, weight = drawn(TILE, 2, sum(parts), dtype=torch.bfloat16), drawn(sum(parts), 2 * TILE)
    for name, tensor in {"outputs_of": x, "tokens": x, "weight": weight}.items():
        eager, fused = (getattr(Fp8(parts, *fuse), name)(tensor) for fuse in ((), (compiled,)))
        assert torch.equal(eager.scales, fused.scales)
        assert torch.equal(eager.values.float(), fused.values.float())
