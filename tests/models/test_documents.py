"""Documents that share a sequence do not influence each other."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from models.attention import Frequencies, rotary_table
from models.config import ModelConfig
from models.initialization import initialize
from models.kernels import attention
from models.kernels.attention import (
    document_attention,
    document_kernel_name,
    varlen_kernel,
)
from models.kernels.compile import as_written
from models.kernels.elementwise import heads_first
from models.layer_specs import SequentialModel, layer_specs, logical_parameters, run_layers
from models.parallel.micro_batch_info import Documents, MaskKey, MicroBatchInfo, positions_in
from tests.models.test_transformer import GROUPED_WITH_DROPOUT, KEY, LLAMA, SHAPES, WITH_DROPOUT

SHAPES_WITH_DROPOUT = {"llama": GROUPED_WITH_DROPOUT, "gpt2": WITH_DROPOUT}
CPU = torch.device("cpu")

Seen = tuple[Tensor, dict[str, Tensor]]  # losses of tokens [n], gradients of the weights


def tokens_of(config: ModelConfig, seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=generator)


def run(
    config: ModelConfig,
    rows: list[Tensor],
    lengths: tuple[tuple[int, ...], ...] | None,
    key: MaskKey | None = None,
    *,
    row: int,
    where: slice,
) -> Seen:
    """Return the losses of the tokens of one document, each as its own label, and the gradients."""
    model = SequentialModel(layer_specs(config))
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3)
    tokens = torch.stack(rows)
    info = MicroBatchInfo(key, Documents(lengths) if lengths else None)
    logits = run_layers(model.layers, tokens, info=info)[:, row]  # [s, v]
    losses = F.cross_entropy(logits[where], tokens[row, where], reduction="none")
    losses.sum().backward()
    return losses.detach(), {name: p.grad for name, p in parameters.items()}


def same(one: Seen, other: Seen) -> bool:
    """Return True if losses and gradients are equal bit for bit."""
    assert one[1].keys() == other[1].keys()
    return torch.equal(one[0], other[0]) and all(
        torch.equal(one[1][name], other[1][name]) for name in one[1]
    )


@pytest.mark.parametrize("key", [None, KEY], ids=["", "dropout"])
@pytest.mark.parametrize("shape", SHAPES_WITH_DROPOUT)
def test_a_document_does_not_depend_on_its_neighbours(shape: str, key: MaskKey | None) -> None:
    """The neighbours of the second of three documents change, in tokens and in length."""
    config = SHAPES_WITH_DROPOUT[shape]
    rows = [tokens_of(config, seed, 24) for seed in (1, 2)]
    second = {"row": 1, "where": slice(9, 17)}
    expected = run(config, rows, ((24,), (9, 8, 7)), key, **second)
    assert float(expected[0].mean()) > 1 and expected[1]["blocks.0.attention.qkv.weight"].any()
    for name, (row, where, *lengths) in {
        "another one before it": (1, slice(9), (24,), (9, 8, 7)),
        "two shorter ones before it": (1, slice(9), (24,), (4, 5, 8, 7)),
        "another one behind it": (1, slice(17, 24), (24,), (9, 8, 7)),
        "two shorter ones behind it": (1, slice(17, 24), (24,), (9, 8, 1, 6)),
        "others beside it": (0, slice(24), (5, 19), (9, 8, 7)),
    }.items():
        changed = [tokens.clone() for tokens in rows]
        changed[row][where] = (changed[row][where] + 8) % config.vocab_size
        assert same(run(config, changed, tuple(lengths), key, **second), expected), name
        across = [run(config, each, None, key, **second) for each in (rows, changed)]
        assert torch.equal(across[0][0], across[1][0]) == ("before" not in name)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_does_not_depend_on_its_offset(shape: str) -> None:
    """Positions restart for B after A, alone, and as the second half of another row."""
    config = SHAPES[shape]
    a, b = tokens_of(config, 1, 9), tokens_of(config, 2, 8)
    rest = tokens_of(config, 3, 7)
    settings = [
        (torch.cat([a, b, rest]), (9, 8, 7), slice(9, 17)),
        (torch.cat([b, rest, a]), (8, 7, 9), slice(0, 8)),
        (torch.cat([rest, a, b]), (7, 9, 8), slice(16, 24)),
    ]
    seen = [run(config, [row], (lengths,), row=0, where=where) for row, lengths, where in settings]
    for other in seen[1:]:
        torch.testing.assert_close(other[0], seen[0][0], rtol=1e-5, atol=1e-5)
        for name, gradient in seen[0][1].items():
            torch.testing.assert_close(other[1][name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [WITH_DROPOUT, GROUPED_WITH_DROPOUT], ids=["gpt2", "llama"])
def test_attention_with_dropout_agrees_with_fused_attention(config: ModelConfig) -> None:
    """With a tiny probability nothing is dropped, and only the code path differs."""
    rows = [tokens_of(config, seed, 24) for seed in (1, 2)]
    lengths = ((9, 8, 7), (24,))
    nothing = replace(config, dropout=0.0, attention_dropout=1e-12)
    place = {"row": 0, "where": slice(0, 24)}
    fused = run(nothing, rows, lengths, **place)
    written_out = run(nothing, rows, lengths, KEY, **place)
    torch.testing.assert_close(written_out[0], fused[0], rtol=1e-5, atol=1e-5)
    across = run(nothing, rows, None, KEY, **place)
    assert not torch.allclose(across[0], fused[0], rtol=1e-2, atol=1e-2)


def test_sequences_with_equal_document_lengths_share_calls() -> None:
    lengths = ((24,), (24,), (9, 15), (9, 15), (24,))
    rows = [tokens_of(LLAMA, seed, 24) for seed in range(5)]
    attend = attention.causal_attention
    with mock.patch.object(attention, "causal_attention", side_effect=attend) as calls:
        run(LLAMA, rows, lengths, row=0, where=slice(0, 24))
    shapes = [tuple(call.args[0].shape[::2]) for call in calls.call_args_list]  # b and s
    assert shapes == LLAMA.layers * [(2, 24), (2, 9), (2, 15), (1, 24)]


# All documents in one call, as on GPUs


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Compute torch's varlen_attn document by document, and check its requirements."""
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    for ends in (cu_seq_q, cu_seq_k):
        assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(query)
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    for each in (query, key, value):
        assert each.dim() == 3 and each.stride(-1) == 1
    heads = (each.transpose(0, 1).split(lengths, 1) for each in (query, key, value))
    parts = zip(*heads, strict=True)
    attended = [
        F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=enable_gqa)
        for part in parts
    ]
    return torch.cat(attended, dim=1).transpose(0, 1).contiguous()


def ungrouped_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Compute torch 2.11's varlen_attn, which has no `enable_gqa`."""
    settings = {"window_size": window_size, "enable_gqa": False}
    return plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **settings)


def test_a_kernel_without_grouped_heads_gets_repeated_ones() -> None:
    lengths, gpu = ((9, 15), (24,)), torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, 24, 8, generator=generator) for n in (4, 2, 2)]
    inputs = [each.requires_grad_() for each in inputs]
    with (
        mock.patch("torch.nn.attention.varlen.varlen_attn", ungrouped_varlen),
        mock.patch.object(attention, "has_flash_attention", return_value=True),
    ):
        attention._varlen_attention.cache_clear()
        kernel = varlen_kernel(gpu, torch.bfloat16, 8)
        attention._varlen_attention.cache_clear()
    assert kernel is not None
    results = []
    for varlen in (kernel, None):
        y = document_attention(*inputs, lengths, varlen=varlen)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("shape", SHAPES)
def test_documents_in_one_call_do_not_see_each_other(shape: str) -> None:
    config = SHAPES[shape]
    rows = [tokens_of(config, seed, 24) for seed in (1, 2, 3)]
    lengths = ((9, 8, 7), (24,), (1, 23))
    place = {"row": 0, "where": slice(0, 24)}
    expected = run(config, rows, lengths, **place)
    with (
        mock.patch("models.attention.varlen_kernel", return_value=plain_varlen),
        mock.patch.object(attention, "MAX_KEPT_LENGTH", 0),  # else heads would have the CPU's order
    ):
        found = run(config, rows, lengths, **place)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-4)
    across = run(config, rows, None, **place)
    assert not torch.allclose(across[0], found[0], rtol=1e-2, atol=1e-2)


def test_documents_are_packed_without_a_copy() -> None:
    """The memory order of the heads is the one that the kernel reads."""
    qkv, seen = torch.randn(6, 2, 8, 4), []

    def varlen(*tensors: Tensor, **settings: object) -> Tensor:
        seen.extend(each.data_ptr() for each in tensors[:3])
        return torch.empty_like(tensors[0])

    heads = heads_first(qkv, None, heads=4, kv_heads=2, order="bsad", fuse=as_written)
    document_attention(*heads, ((2, 4), (6,)), varlen=varlen)
    assert seen == [each.data_ptr() for each in heads]
    for order in ("basd", "sbad"):
        others = heads_first(qkv, None, heads=4, kv_heads=2, order=order, fuse=as_written)
        assert all(map(torch.equal, others, heads))


def forget_kernels() -> None:
    """Clear the caches of what a GPU supports."""
    attention._varlen_attention.cache_clear()
    attention.has_flash_attention.cache_clear()


def test_the_kernel_for_documents_is_flash_attention_on_recent_gpus() -> None:
    gpu, bf16 = torch.device("cuda"), torch.bfloat16
    with (
        mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)) as capability,
    ):
        forget_kernels()
        assert varlen_kernel(CPU, bf16, 64) is None
        assert varlen_kernel(gpu, torch.float32, 64) is None
        assert varlen_kernel(gpu, bf16, 60) is None and varlen_kernel(gpu, bf16, 512) is None
        assert varlen_kernel(gpu, bf16, 128) is varlen_attn
        assert varlen_kernel(gpu, torch.float16, 256) is varlen_attn
        assert "one call of flash attention" in document_kernel_name(gpu, bf16, 128)
        assert document_kernel_name(gpu, torch.float32, 128) == "one call per document"
        forget_kernels()
        with mock.patch("torch.nn.attention.varlen.varlen_attn", lambda query, is_causal: query):
            assert varlen_kernel(gpu, bf16, 128) is None  # as in earlier versions of torch
        forget_kernels()
        capability.return_value = (7, 5)
        assert varlen_kernel(gpu, bf16, 128) is None
    forget_kernels()


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_torchs_kernel_accepts_our_arguments(kv_heads: int) -> None:
    """Only shapes are checked, on fake tensors."""
    attention.cumulative_lengths.cache_clear()
    with FakeTensorMode(), mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor):
        q, k = (torch.empty(2, n, 24, 64, device="cuda", dtype=torch.half) for n in (4, kv_heads))
        y = document_attention(q, k, k, ((9, 15), (24,)), varlen=varlen_attn)
        assert y.shape == q.shape and y.device == q.device
    attention.cumulative_lengths.cache_clear()


def test_lengths_reach_the_device_without_waiting_for_it() -> None:
    """They are copied from pinned memory, asynchronously, once for all layers."""
    copies, lengths = [], ((2, 3), (5,))
    to, pinned = Tensor.to, []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor

    def note(tensor: Tensor, device: torch.device, **settings: bool) -> Tensor:
        in_pinned = tensor.untyped_storage().data_ptr() == pinned[-1].untyped_storage().data_ptr()
        copies.append((in_pinned, settings))
        return to(tensor, "cpu")

    attention.cumulative_lengths.cache_clear()
    with mock.patch.object(Tensor, "pin_memory", pin), mock.patch.object(Tensor, "to", note):
        found = [attention.cumulative_lengths(lengths, torch.device("cuda")) for _ in range(3)]
    assert copies == [(True, {"non_blocking": True})]
    assert found[0].tolist() == [0, 2, 5, 10] and found[0].dtype == torch.int32
    assert len(pinned[0]) == attention.MIN_PINNED_ELEMENTS  # the same size for any lengths
    attention.cumulative_lengths.cache_clear()


def test_documents_do_not_use_cudnn() -> None:
    enabled = []

    def note(q: Tensor, *others: object) -> Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    with FakeTensorMode(), mock.patch.object(attention, "_attention_by_document", note):
        q = torch.empty(1, 2, 8, 4, device="cuda")
        document_attention(q, q, q, ((8,),), varlen=None)
    assert enabled == [False] and torch.backends.cuda.cudnn_sdp_enabled()


def test_rotary_angles_restart_in_each_document() -> None:
    """Attention would differ only by rounding, so the table itself is tested."""
    documents = Documents(((2, 3), (4, 1)))
    whole = rotary_table((range(5),), Frequencies(8), CPU, None)
    for table, places in zip(
        rotary_table((range(5),), Frequencies(8), CPU, documents), whole, strict=True
    ):
        for sequence, lengths in enumerate(documents.lengths):
            expected = torch.cat([places[:length] for length in lengths])  # [s, 1, 1, d]
            assert torch.equal(table[:, sequence : sequence + 1], expected)


def test_positions_restart_and_are_computed_once() -> None:
    documents = Documents(((2, 3), (5,), (1, 1, 3)))
    positions = positions_in(documents, CPU)
    assert positions.t().tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]
    assert positions_in(Documents(((2, 3), (5,), (1, 1, 3))), CPU) is positions
