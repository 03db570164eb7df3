"""Kernels with explicit backward passes, compared with autograd on the plain formula."""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models import cost
from models.attention import Frequencies, _QueryKeyNorm, rotary_table
from models.config import ModelConfig
from models.kernels import attention, elementwise, norms
from models.kernels.compile import (
    Function,
    _compiled,
    are_compiled,
    as_written,
    compile_kernels,
    compiled,
    for_any_rows,
    native_on_cpu,
)
from models.kernels.elementwise import GOLDEN_64, drop_out, keep_mask
from models.kernels.matmul import Fp8
from models.kernels.norms import ResidualBranch
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.parallel import cross_entropy
from models.parallel.collectives import TensorAxis
from models.parallel.micro_batch_info import MaskKey, MicroBatchInfo, dropout
from tests.conftest import each_in_turn
from tests.models.test_transformer import KEY, SHAPES, SPECIAL, WITH_DROPOUT
from threefold.runtime.processes import compiler, has_compiler, should_compile
from threefold.trace.fake_cluster import one_kernel
from threefold.trace.trace import AllocationCounter

EPSILON, HEADS, KV_HEADS, D = 1e-5, 4, 2, 8
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # of the largest value


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def dropped(x: Tensor) -> Tensor:
    return x * keep_mask(ROWS, x.shape[-1], 0.3) / 0.7


def add_and_layer_norm(
    x: Tensor, y: Tensor, y_bias: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + dropped(y + y_bias)
    return total, F.layer_norm(total, (16,), weight, bias, EPSILON)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu(x: Tensor) -> Tensor:
    gate, up = (3 * x).chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def query_key_norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
    q, k, v = qkv.split([8, 4, 4], dim=-1)
    return torch.cat([rms_norm(q, q_weight), rms_norm(k, k_weight), v], dim=-1)


def head_norms(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    return torch.cat([rms_norm(q, q_weight), rms_norm(k, k_weight), v], dim=2)


def heads_first(qkv: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """Compute heads_first with complex numbers, in which a rotation is a multiplication."""
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    if rotation:
        turn = torch.complex(*rotation)
        columns = 2 * turn.shape[-1]
        rest = [x[..., columns:] for x in (q, k)]
        q, k = (turn * torch.complex(*x[..., :columns].chunk(2, dim=-1)) for x in (q, k))
        q, k = (
            torch.cat([x.real, x.imag, others], dim=-1)
            for x, others in zip((q, k), rest, strict=True)
        )
    return tuple(x.permute(1, 2, 0, 3) for x in (q, k, v))


def rotation(columns: int = D) -> tuple[Tensor, Tensor]:
    return rotary_table((range(6),), Frequencies(columns, 100.0), torch.device("cpu"), None)


STREAM = (5, 3, 16)
ROWS = torch.arange(15).view(5, 3) * GOLDEN_64
QKV = (6, 2, HEADS + 2 * KV_HEADS, D)
KERNELS: dict[str, tuple[Callable, Callable, Sequence[tuple[int, ...]]]] = {
    "rms_norm": (
        lambda x, w: norms.norm(x, w, None, EPSILON, as_written),
        rms_norm,
        [STREAM, (16,)],
    ),
    "layer_norm": (
        lambda x, w, b: norms.norm(x, w, b, EPSILON, as_written),
        lambda x, w, b: F.layer_norm(x, (16,), w, b, EPSILON),
        [STREAM, (16,), (16,)],
    ),
    "add": (
        lambda x, y: norms.add(x, ResidualBranch(y), as_written),
        torch.add,
        [STREAM, STREAM],
    ),
    "add bias": (
        lambda x, y, b: norms.add(x, ResidualBranch(y, b), as_written),
        lambda x, y, b: x + y + b,
        [STREAM, STREAM, (16,)],
    ),
    "add bias and dropout": (
        lambda x, y, b: norms.add(x, ResidualBranch(y, b, ROWS, 0.3), as_written),
        lambda x, y, b: x + dropped(y + b),
        [STREAM, STREAM, (16,)],
    ),
    "add dropout": (
        lambda x, y: norms.add(x, ResidualBranch(y, None, ROWS, 0.3), as_written),
        lambda x, y: x + dropped(y),
        [STREAM, STREAM],
    ),
    "add with a multiplier": (
        lambda x, y: norms.add(x, ResidualBranch(y, multiplier=0.3), as_written),
        lambda x, y: x + 0.3 * y,
        [STREAM, STREAM],
    ),
    "add bias and dropout with a multiplier": (
        lambda x, y, b: norms.add(x, ResidualBranch(y, b, ROWS, 0.3, 0.7), as_written),
        lambda x, y, b: x + 0.7 * dropped(y + b),
        [STREAM, STREAM, (16,)],
    ),
    "add bias with a multiplier, and rms_norm": (
        lambda x, y, b, w: norms.add_and_norm(
            x, ResidualBranch(y, b, multiplier=0.3), w, None, epsilon=EPSILON, fuse=as_written
        ),
        lambda x, y, b, w: (x + 0.3 * (y + b), rms_norm(x + 0.3 * (y + b), w)),
        [STREAM, STREAM, (16,), (16,)],
    ),
    "add and rms_norm": (
        lambda x, y, w: norms.add_and_norm(
            x, ResidualBranch(y), w, None, epsilon=EPSILON, fuse=as_written
        ),
        lambda x, y, w: (x + y, rms_norm(x + y, w)),
        [STREAM, STREAM, (16,)],
    ),
    "add bias and dropout, and layer_norm": (
        lambda x, y, yb, w, b: norms.add_and_norm(
            x, ResidualBranch(y, yb, ROWS, 0.3), w, b, epsilon=EPSILON, fuse=as_written
        ),
        add_and_layer_norm,
        [STREAM, STREAM, (16,), (16,), (16,)],
    ),
    "dropout": (
        lambda x: drop_out(x, ROWS, 0.3, as_written),
        lambda x: dropped(x),
        [STREAM],
    ),
    "gelu": (
        lambda x, b: elementwise.gelu(x + b.detach(), b, as_written),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        [STREAM, (16,)],
    ),
    "gelu without bias": (
        lambda x: elementwise.gelu(x, None, as_written),
        lambda x: F.gelu(x, approximate="tanh"),
        [STREAM],
    ),
    "exact gelu": (
        lambda x, b: elementwise.gelu(x + b.detach(), b, as_written, exact=True),
        lambda x, b: F.gelu(x + b),
        [STREAM, (16,)],
    ),
    "swiglu": (lambda x: elementwise.swiglu(x, as_written), swiglu, [(5, 3, 16)]),
    "geglu": (
        lambda x: elementwise.geglu(x, as_written),
        lambda x: F.gelu(x[..., :8], approximate="tanh") * x[..., 8:],
        [STREAM],
    ),
    "clamped swiglu": (
        lambda x: elementwise.clamped_swiglu(3 * x, as_written),  # some are above the limit
        clamped_swiglu,
        [STREAM],
    ),
    "squared relu": (
        lambda x: elementwise.squared_relu(x, as_written),
        lambda x: F.relu(x) ** 2,
        [STREAM],
    ),
    "query and key norm": (
        lambda x, q, k: _QueryKeyNorm.apply(x, q, k, (8, 4), EPSILON, TensorAxis(), as_written),
        query_key_norm,
        [STREAM, (8,), (4,)],
    ),
    "norms of heads": (
        lambda x, q, k: norms.norm_heads(
            x, q, k, heads=(HEADS, KV_HEADS), epsilon=EPSILON, fuse=as_written
        ),
        head_norms,
        [QKV, (D,), (D,)],
    ),
    "rotated heads": (
        lambda x: elementwise.heads_first(
            x, rotation(), heads=HEADS, kv_heads=KV_HEADS, order="basd", fuse=as_written
        ),
        lambda x: heads_first(x, rotation()),
        [QKV],
    ),
    "partly rotated heads": (
        lambda x: elementwise.heads_first(
            x, rotation(4), heads=HEADS, kv_heads=KV_HEADS, order="basd", fuse=as_written
        ),
        lambda x: heads_first(x, rotation(4)),
        [QKV],
    ),
    "heads": (
        lambda x: elementwise.heads_first(
            x, None, heads=HEADS, kv_heads=KV_HEADS, order="basd", fuse=as_written
        ),
        lambda x: heads_first(x, None),
        [QKV],
    ),
    "attention": (
        attention.causal_attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(2, 4, 11, 8), (2, 2, 11, 8), (2, 2, 11, 8)],
    ),
}


def outcome(function: Callable, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, and gradients of a weighted sum of all output elements."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weights = [torch.linspace(-1, 2, x.numel()).view(x.shape).to(x.dtype) for x in outputs]
    sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    return [x.detach() for x in outputs] + [x.grad for x in inputs]


def difference(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of each tensor."""
    pairs = list(zip(ours, expected, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a.float() - b.float()).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_its_formula(kernel: str, dtype: torch.dtype) -> None:
    ours, formula, shapes = KERNELS[kernel]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    expected = outcome(formula, [x.float() for x in inputs])
    for rows in (4, 11):  # blocks of 4, 4 and 3 queries, and one block
        with mock.patch.multiple(attention, ROWS=rows, MAX_FUSED_LENGTH=0):
            found = outcome(ours, inputs)
        assert all(x.dtype == dtype for x in found)
        assert difference(found, expected) < TOLERANCE[dtype]


def test_attention_to_later_keys_would_be_noticed() -> None:
    ours, formula, shapes = KERNELS["attention"]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    blind = mock.patch.object(Tensor, "triu_", lambda x, diagonal: x.zero_())
    with mock.patch.multiple(attention, ROWS=4, MAX_FUSED_LENGTH=0), blind:
        found = outcome(ours, inputs)
    assert difference(found, outcome(formula, inputs)) > 0.1


def test_long_sequences_keep_no_probabilities() -> None:
    x = torch.randn(1, 1, attention.MAX_KEPT_LENGTH + 1, 8, requires_grad=True)
    assert "Blocked" not in type(attention.causal_attention(x, x, x).grad_fn).__name__
    x = x[:, :, 1:]
    assert "Blocked" in type(attention.causal_attention(x, x, x).grad_fn).__name__


def test_the_kernel_of_a_document_depends_on_its_sequence() -> None:
    for dtype, length, sequence, blocked in (
        (torch.float32, 64, 0, False),
        (torch.float32, 65, 0, True),
        (torch.float32, 16, 65, True),
        (torch.bfloat16, 16, 0, True),
    ):
        x = torch.randn(1, 1, length, 8, dtype=dtype, requires_grad=True)
        y = attention.causal_attention(x, x, x, sequence=sequence)
        assert ("Blocked" in type(y.grad_fn).__name__) == blocked


# The loss over the vocabulary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("most", [1, 40, 2**26])  # logits at a time: of 1, 2, all 12 tokens
def test_the_loss_in_chunks_is_cross_entropy(most: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, table = torch.randn(4, 3, 8).to(dtype), torch.randn(20, 8).to(dtype)
    labels = torch.randint(17, (3, 4))

    def ours(x: Tensor, table: Tensor) -> Tensor:
        return cross_entropy.vocab_parallel_loss(
            x, table, labels, vocab_size=17, tensor=TensorAxis(), fuse=as_written
        )

    def formula(x: Tensor, table: Tensor) -> Tensor:
        return F.cross_entropy((x @ table[:17].t()).flatten(0, 1), labels.t().flatten())

    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    with mock.patch.dict(cost.MAX_LOGITS, cpu=most):
        expected = outcome(formula, (x.float(), table.float()))
        assert difference(outcome(ours, (x, table)), expected) < tolerance
        with torch.no_grad():
            assert float(ours(x, table)) == pytest.approx(float(expected[0]), rel=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("soft_cap", "z_loss"), [(None, 0.1), (1.5, 0.0), (1.5, 0.1)])
def test_soft_cap_and_z_loss_are_their_formulas(
    soft_cap: float | None, z_loss: float, dtype: torch.dtype
) -> None:
    """The z-loss changes only the gradients; padding, as on a GPU, takes part in neither."""
    torch.manual_seed(0)
    x, table = torch.randn(4, 3, 8).to(dtype), torch.randn(20, 8).to(dtype)
    labels = torch.randint(17, (3, 4))

    def ours(x: Tensor, table: Tensor) -> Tensor:
        return cross_entropy.vocab_parallel_loss(
            x, table, labels, vocab_size=17, tensor=TensorAxis(), fuse=as_written,
            gradient_scale=0.5, soft_cap=soft_cap, z_loss=z_loss,
        )  # fmt: skip

    def formula(x: Tensor, table: Tensor) -> Tensor:
        logits = x @ table[:17].t()
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        z = z_loss * logits.logsumexp(-1).square().mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.t().flatten()) + z - z.detach()

    expected = outcome(formula, (x.float(), table.float()))
    whole_table = mock.patch.object(cross_entropy, "_computed_rows", lambda rows, *_: rows)
    with mock.patch.dict(cost.MAX_LOGITS, cpu=40), whole_table:
        assert difference(outcome(ours, (x, table)), expected) < TOLERANCE[dtype]
        with torch.no_grad():
            assert float(ours(x, table)) == pytest.approx(float(expected[0]), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_pass_over_the_logits_computes_the_same_as_two(dtype: torch.dtype) -> None:
    """Also if a tile of the logits, here of four columns, is padding."""
    torch.manual_seed(0)
    logits, labels = 9 * torch.randn(6, 20).to(dtype), torch.randint(15, (6,))
    logits[:, 15:] = float("-inf")
    largest = cross_entropy._largest(logits)
    total, label_logits = cross_entropy._sums(logits, labels, largest)
    with mock.patch.object(cross_entropy, "MAX_TILE", 4):
        once = cross_entropy._largest_and_sums(logits, labels)
    torch.testing.assert_close(once, (largest, total, label_logits))


def test_a_nearly_certain_token_keeps_its_gradient_in_bf16() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0]])  # x W^T of x = 1
    x, table = torch.ones(1, 1, 1, dtype=torch.bfloat16), logits.t().bfloat16()

    table.requires_grad_()
    labels = torch.zeros(1, 1, dtype=torch.long)
    cross_entropy.vocab_parallel_loss(
        x, table, labels, vocab_size=3, tensor=TensorAxis(), fuse=as_written
    ).backward()
    expected = float(logits.softmax(-1)[0, 0]) - 1  # -2.5e-4: the softmax in bf16 would be 1
    assert float(table.grad[0, 0]) == pytest.approx(expected, rel=1e-2)


def test_the_gradient_of_many_parts_does_not_saturate_in_bf16() -> None:
    torch.manual_seed(0)
    x, table = 1 + 0.1 * torch.randn(1024, 1, 8), 0.1 * torch.randn(4, 8)
    labels = torch.randint(3, (1, 1024))

    def gradient(dtype: torch.dtype) -> Tensor:
        weight = table.to(dtype).requires_grad_()
        cross_entropy.vocab_parallel_loss(
            x.to(dtype), weight, labels, vocab_size=4, tensor=TensorAxis(), fuse=as_written
        ).backward()
        return weight.grad

    with mock.patch.dict(cost.MAX_LOGITS, cpu=4):  # a token at a time
        found, expected = gradient(torch.bfloat16), gradient(torch.float32)
    assert found.dtype == torch.bfloat16
    assert difference([found[3].float()], [expected[3]]) < 1e-2  # a token that is never a label


@pytest.mark.parametrize(("scale", "is_exact"), [(2.0**16, True), (1.0, False)])
def test_gradients_of_rare_tokens_survive_in_fp16(scale: float, is_exact: bool) -> None:
    """The probability of a token divided by the number of tokens is too small for fp16."""
    torch.manual_seed(0)
    tokens, columns = 2048, 4096
    x, table = 0.1 * torch.randn(tokens, 1, 8), 0.1 * torch.randn(columns, 8)
    labels = torch.randint(8, (1, tokens))

    def gradients(dtype: torch.dtype, scale: float) -> list[Tensor]:
        inputs = [each.to(dtype).requires_grad_() for each in (x, table)]
        loss = cross_entropy.vocab_parallel_loss(
            *inputs,
            labels,
            vocab_size=columns,
            tensor=TensorAxis(),
            fuse=as_written,
            gradient_scale=scale,
        )
        (loss * scale).backward()
        return [each.grad.float() / scale for each in inputs]

    (_, found), (_, expected) = gradients(torch.float16, scale), gradients(torch.float32, 1)
    rare = slice(8, None)
    assert (difference([found[rare]], [expected[rare]]) < 1e-2) == is_exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_only_the_logits_of_one_part_exist_at_a_time(dtype: torch.dtype) -> None:
    tokens, columns, h = 64, 256, 8
    x = torch.randn(tokens, 1, h, dtype=dtype, requires_grad=True)
    table = torch.randn(columns, h, dtype=dtype)
    labels = torch.zeros(1, tokens, dtype=torch.long)
    peaks = []
    for parts in (1, 4):
        with (
            mock.patch.dict(cost.MAX_LOGITS, cpu=tokens * columns // parts),
            AllocationCounter() as counter,
        ):
            cross_entropy.vocab_parallel_loss(
                x, table, labels, vocab_size=columns, tensor=TensorAxis(), fuse=one_kernel
            )
        peaks.append(counter.peak)
    logits = dtype.itemsize * tokens * columns
    assert peaks[0] - peaks[1] == pytest.approx(3 / 4 * logits, rel=0.05)


# Compiled


VARIANT = replace(
    SHAPES["qwen3"], activation="geglu", norm_placement="after", qk_norm_over="projection",
    logit_soft_cap=2.0, z_loss=0.1,
)  # fmt: skip
COMPILED = {
    "qwen3": (SHAPES["qwen3"], MicroBatchInfo()),
    "gpt2 with dropout": (WITH_DROPOUT, MicroBatchInfo(dropout=KEY)),
    "variant": (VARIANT, MicroBatchInfo()),
    "clamped": (replace(VARIANT, activation="clamped_swiglu", bias=True), MicroBatchInfo()),
    "squared": (replace(VARIANT, activation="squared_relu"), MicroBatchInfo()),
    "windows and sinks, dropout": SPECIAL["windows and sinks, dropout"],
}


def model_outcome(config: ModelConfig, info: MicroBatchInfo, *, compile: bool) -> list[Tensor]:
    config = replace(config, vocab_size=96)
    torch.manual_seed(0)
    model = SequentialModel(layer_specs(config))
    for _, parameter in logical_parameters(model, config):
        torch.nn.init.normal_(parameter, std=0.3)
    if compile:
        assert not are_compiled(model)
        compile_kernels(model)
        assert are_compiled(model)
    tokens = torch.randint(96, (2, config.sequence_length))
    loss = model(tokens, tokens.roll(-1, 1), info)
    loss.backward()
    return [loss.detach()] + [each.grad for each in model.parameters()]


def graphs() -> int:
    """Return the number of functions that were compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def compiled_everywhere() -> Iterator[None]:
    """Compile also the functions that a CPU otherwise runs eagerly."""
    natives = (elementwise._gelu, elementwise._gelu_backward, elementwise._drop_out)
    with contextlib.ExitStack() as stack:
        for function in natives:
            stack.enter_context(mock.patch.object(function, "native_on_cpu", False))
        yield


needs_compiler = pytest.mark.skipif(
    shutil.which(compiler()) is None, reason="there is no C++ compiler"
)


@needs_compiler
@pytest.mark.parametrize("name", each_in_turn(COMPILED))
def test_compiled_kernels_compute_the_same(name: str, compiled_everywhere: None) -> None:
    expected = model_outcome(*COMPILED[name], compile=False)
    assert difference(model_outcome(*COMPILED[name], compile=True), expected) < 1e-5


@needs_compiler
@pytest.mark.long
def test_compiled_masks_are_the_same_bit_for_bit(compiled_everywhere: None) -> None:
    """Eager and compiled kernels drop the same elements, so that a job can mix them.

    Samples change in every step, and each layer has its own name; neither compiles another kernel.
    """
    x = torch.ones(7, 2, 33)  # whole vectors and a remainder
    axis = TensorAxis(rank=1, size=2, sequence_parallel=True)
    before, compiled_in = graphs(), []
    for step in range(4):
        key = MaskKey(1, range(2 * step, 2 * step + 2))
        kept = [
            dropout(x, 0.3, key=key, layer=f"blocks.{step}.mlp", tensor=axis, fuse=fuse) != 0
            for fuse in (as_written, compiled)
        ]
        assert torch.equal(*kept) and 0.6 < float(kept[0].float().mean()) < 0.8
        compiled_in.append(graphs() - before)
    assert compiled_in[0] > 0 and len(set(compiled_in)) == 1


def test_a_cpu_runs_marked_functions_eagerly() -> None:
    """The compiler is not called for a marked function, but it is called for another one."""

    def double(x: Tensor) -> Tensor:
        return 2 * x

    x = torch.randn(3, 4)
    with mock.patch.object(torch, "compile", lambda function, **settings: torch.zeros_like):
        run = compiled(double)
        assert not run(x).any()
        native_on_cpu(double)
        assert torch.equal(run(x), 2 * x)


def test_auto_compiles_on_gpus_only() -> None:
    with mock.patch("threefold.runtime.processes.on_gpu", return_value=False):
        assert not should_compile("auto") and should_compile(True)
    with mock.patch("threefold.runtime.processes.on_gpu", return_value=True):
        assert not should_compile(False)
        with mock.patch.dict("os.environ", CC="no-such-compiler"):
            assert not has_compiler()
        for others in (True, False):  # this rank has a compiler, and the other one may not
            with mock.patch("threefold.runtime.processes.gathered", return_value=[True, others]):
                assert should_compile("auto") == others


@pytest.fixture
def traced_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """The inputs of each graph for which torch's compiler is called; the graphs run eagerly."""
    traced, compile_function = [], torch.compile

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        nodes = graph.graph.find_nodes(op="placeholder")
        traced.append([node.meta["example_value"] for node in nodes])
        return graph.forward

    def compile_eagerly(function: Function, *, options: object, **settings: Any) -> Function:
        return compile_function(function, backend=backend, **settings)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    torch._dynamo.reset()
    _compiled.cache_clear()
    yield traced
    torch._dynamo.reset()
    _compiled.cache_clear()


MANY_SHAPES = 12  # more than torch's default of 8


def test_functions_are_compiled_for_many_shapes_in_every_thread(
    traced_graphs: list[list[Any]],
) -> None:
    """torch would run later shapes as written, with other kernels than a resumed run.

    A GPU's backward passes and the helper of paired passes run in threads of their own.
    """

    def run() -> None:
        for rows in range(2, 2 + MANY_SHAPES):
            compiled(elementwise._swiglu)(torch.randn(rows, 8))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(traced_graphs) == MANY_SHAPES
    run()
    assert len(traced_graphs) == MANY_SHAPES  # the threads share the compiled functions


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "clamped_swiglu", "squared_relu"])
def test_a_function_is_compiled_once_for_any_rows(
    activation: str, traced_graphs: list[list[Any]]
) -> None:
    """Only the number of rows is a variable of the kernels, so that they read vectors of elements.

    Other widths are compiled separately, and fewer than two rows are not compiled.
    """
    fuse = for_any_rows(compiled)
    for width in (8, 24):
        traced_graphs.clear()
        for rows in (0, 1, 3, 2, 1, 64, 5, 0):
            both = []
            for setting in (as_written, fuse):
                x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
                x.requires_grad_()
                y = elementwise.ACTIVATIONS[activation](x, setting)
                y.backward(torch.ones_like(y))
                both.append((y.detach(), x.grad))
            for expected, found in zip(*both, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert len(traced_graphs) == 2  # forward and backward
        tensors = [x for inputs in traced_graphs for x in inputs if isinstance(x, Tensor)]
        for x in tensors:
            assert all(is_constant(size) for size in (*x.shape[1:], *x.stride()))
            assert not is_constant(x.shape[0])


def is_constant(size: int | torch.SymInt) -> bool:
    """Return True for a size that torch's compiler writes into a kernel."""
    return isinstance(size, int) or size.node.expr.is_number


def test_rows_in_fp8_are_quantized_by_one_kernel(traced_graphs: list[list[Any]]) -> None:
    fp8 = Fp8((256,), for_any_rows(compiled))
    for rows in (0, 1, 3, 2, 64):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        expected, found = Fp8((256,)).rows(x), fp8.rows(x)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.values.float(), expected.values.float())
    assert len(traced_graphs) == 1


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
def test_kernels_for_any_rows_compute_the_same(activation: str) -> None:
    function = elementwise.ACTIVATIONS[activation]
    before, compiled_in = graphs(), []
    for rows in (0, 1, 2, 37):
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).requires_grad_()
        y, again = function(x, as_written), function(x, for_any_rows(compiled))
        torch.testing.assert_close(again, y)
        grad = torch.randn(y.shape)
        expected, found = (torch.autograd.grad(each, x, grad)[0] for each in (y, again))
        torch.testing.assert_close(found, expected)
        compiled_in.append(graphs() - before)
    assert compiled_in == [0, 0, 2, 2]
