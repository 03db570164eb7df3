"""Gradients that sum over many tokens in 16 bits, compared with fp64.

The limit is one rounding to bf16: each sum must be in fp32, and only its result is rounded.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.config import ModelConfig
from models.kernels import elementwise, norms
from models.kernels import elementwise as elementwise_module
from models.kernels.compile import as_written
from models.kernels.elementwise import look_up, table_gradient
from models.kernels.norms import ResidualBranch
from models.layer_specs import LearnedPositions, TokenEmbedding
from models.parallel.collectives import TensorAxis, copy_to_tensor_axis
from models.parallel.layers import Deferral, matmul
from models.parallel.micro_batch_info import Documents, MicroBatchInfo
from tests.models.test_transformer import SHAPES
from tests.ranks import join_world, run_ranks
from threefold.trace.trace import AllocationCounter

REPEATS = (1024, 16384)
ROUNDING = 2**-8  # largest relative error of a rounding to bf16
HIDDEN = 16
FREQUENT, RARE = 5, 140  # tokens; with two tensor ranks, one on each

Layer = Callable[..., Tensor]


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return norms.norm(x, weight, bias, 1e-5, as_written)


def residual_bias(x: Tensor, bias: Tensor) -> Tensor:
    return norms.add(x, ResidualBranch(x, bias), as_written)


def gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    return elementwise.gelu(x + bias.detach(), bias, as_written)


LAYERS: dict[str, tuple[Layer, int]] = {  # -> number of [h] vectors whose gradients sum over tokens
    "weight of RMSNorm": (norm, 1),
    "weight and bias of LayerNorm": (norm, 2),
    "bias in the residual stream": (residual_bias, 1),
    "bias before GELU": (gelu_bias, 1),
    "bias of a product": (lambda x, b: matmul(x, torch.eye(HIDDEN).to(x), b, None), 1),
    "bias of a product with deferred weight gradients": (
        lambda x, b: matmul(x, torch.eye(HIDDEN).to(x), b, Deferral()), 1,
    ),
}  # fmt: skip


def error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected tensor."""
    return float((found.double() - expected).norm() / expected.norm())


def upstream(*shape: int) -> Tensor:
    """Return bf16 gradients of one sign, whose sum grows with each addition."""
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(shape, generator=generator) + 0.5).bfloat16()


@pytest.mark.parametrize("tokens", REPEATS)
@pytest.mark.parametrize("name", LAYERS)
def test_vectors_shared_by_all_tokens(name: str, tokens: int) -> None:
    layer, vectors = LAYERS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(tokens, 1, HIDDEN)] + [torch.rand(HIDDEN) for _ in range(vectors)]
    found = gradients(layer, [each.bfloat16() for each in inputs], upstream(*inputs[0].shape))
    wide = [each.bfloat16().double() for each in inputs]
    expected = gradients(layer, wide, upstream(*inputs[0].shape).double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert error(one, other) < ROUNDING


def gradients(layer: Layer, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the gradients of all inputs but the first."""
    x, *vectors = (each.clone().requires_grad_() for each in inputs)
    layer(x, *vectors).backward(grad)
    return [each.grad for each in vectors]


@pytest.mark.parametrize("tokens", REPEATS)
def test_rows_of_learned_positions(tokens: int) -> None:
    """Documents of one token each: all are at position 0."""
    config = ModelConfig(**(vars(SHAPES["gpt2"]) | {"sequence_length": tokens}))
    positions = LearnedPositions(config, TensorAxis()).bfloat16()
    info = MicroBatchInfo(documents=Documents(((1,) * tokens,)))
    grad = upstream(tokens, 1, config.hidden_size)
    positions(torch.zeros_like(grad), info).backward(grad)
    assert error(positions.weight.grad[0], grad.double().sum((0, 1))) < ROUNDING
    assert not positions.weight.grad[1:].any()


def table_errors(axis: TensorAxis, tokens: int, tied: bool) -> list[float]:
    """Return the error of the gradient of a rank's part of the table, and that of frequent rows.

    Three in four tokens are FREQUENT and one in four is RARE.

    tied: the table also projects, and its gradient is the sum of both uses
    """
    config = SHAPES["llama-tied"]
    table = TokenEmbedding(config, axis).bfloat16()
    torch.nn.init.ones_(table.weight)
    ids = torch.full((1, tokens), FREQUENT)
    ids[:, ::4] = RARE
    parts = axis.size if axis.sequence_parallel else 1
    grad = upstream(tokens, 1, config.hidden_size)
    table(ids, MicroBatchInfo()).backward(grad.chunk(parts)[axis.rank if parts > 1 else 0])
    expected = torch.zeros(config.padded_vocab_size(axis.size), config.hidden_size).double()
    expected.index_add_(0, ids[0], grad[:, 0].double())
    if tied:
        x = upstream(tokens, 1, config.hidden_size)
        logit_gradients = upstream(tokens, 1, len(expected))
        own = logit_gradients.chunk(axis.size, dim=-1)[axis.rank]
        table.logits(x.chunk(parts)[axis.rank if parts > 1 else 0]).backward(own)
        expected += logit_gradients[:, 0].double().t() @ x[:, 0].double()
    expected = expected.chunk(axis.size)[axis.rank]
    rows = expected.norm(dim=1) > 0
    worst = max(map(error, table.weight.grad[rows], expected[rows]))
    assert torch.equal(table.weight.grad.norm(dim=1) > 0, rows)
    return [error(table.weight.grad, expected), worst]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tokens", REPEATS)
def test_rows_of_the_embedding(tokens: int, tied: bool) -> None:
    assert max(table_errors(TensorAxis(), tokens * 4 // 3, tied)) < ROUNDING


def table_worker() -> list[float]:
    """Return the errors in all layouts of a tensor axis."""
    world = join_world()
    errors = []
    for split in (False, True):
        axis = TensorAxis(dist.group.WORLD, world.rank, world.size, sequence_parallel=split)
        for tokens in REPEATS:
            for tied in (False, True):
                errors += table_errors(axis, tokens * 4 // 3 // 2 * 2, tied)
    return errors


def test_rows_of_the_embedding_on_two_tensor_ranks() -> None:
    for errors in run_ranks(2, table_worker):
        assert len(errors) == 16
        assert max(errors) < ROUNDING


def replicated_worker() -> list[float]:
    """Return the gradient of a replicated weight: 256 on the first rank, 1 on the others."""
    world = join_world()
    axis = TensorAxis(dist.group.WORLD, world.rank, world.size)
    weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    grad = torch.full_like(weight, 256.0 if world.rank == 0 else 1.0)
    copy_to_tensor_axis(weight, axis).backward(grad)
    assert weight.grad.dtype == torch.bfloat16
    return weight.grad.tolist()


def test_replicated_weights_over_tensor_ranks() -> None:
    """In bf16, 256 + 1 is 256."""
    assert run_ranks(4, replicated_worker) == [[260.0] * 8] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_table_gradient_matches_autograd(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        elementwise_module, "MAX_WIDE_ELEMENTS", 40 * 5
    )  # parts of 5, 5 and 1 columns
    torch.manual_seed(0)
    rows, table = torch.randint(9, (10, 4)), torch.randn(70, 11).to(dtype)
    grad = torch.randn(10, 4, 11).to(dtype)
    found, expected = (each.clone().requires_grad_() for each in (table, table.double()))
    result = look_up(rows, found)
    assert torch.equal(result, table[rows])
    result.backward(grad)
    torch.nn.functional.embedding(rows, expected).backward(grad.double())
    assert found.grad.dtype == dtype
    assert error(found.grad, expected.grad) < torch.finfo(dtype).eps


def test_the_gradient_of_a_table_takes_no_fp32_copy_of_it() -> None:
    rows, grad = torch.randint(5000, (30,)), torch.randn(30, 64).bfloat16()
    with AllocationCounter() as counter:
        table_gradient(grad, rows, 5000)
    gradient, copies = 5000 * 64 * 2, 3 * 30 * 64 * 4
    assert counter.peak < gradient + copies + 5000 * 8 + 4096
