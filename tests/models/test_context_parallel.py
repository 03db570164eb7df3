"""Context ranks against one rank: logits, loss and gradients; and seeded faults."""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models.attention import ModelAxes, rotary_table
from models.context_parallel.attention import Divided, ring_attention, windowed_attention
from models.context_parallel.collectives import ContextAxis, from_rank_order, to_rank_order
from models.context_parallel.division import (
    Lengths,
    divide,
    rank_work,
    reached_keys,
    received_keys,
    slice_work,
)
from models.context_parallel.tiles import Tile, TilePiece, pieces, tiles_of
from models.initialization import initialize
from models.kernels import attention_parts
from models.kernels.attention_parts import Limits, attend, attend_backward, merge, merge_sinks
from models.layer_specs import SequentialModel, layer_specs, logical_parameters, run_layers
from models.parallel import micro_batch_info
from models.parallel.micro_batch_info import MaskKey, MicroBatchInfo
from models.sharding import sharding_of
from tests.conftest import quick_and_long, selected
from tests.models.test_transformer import (
    DOCUMENTS,
    GROUPED_WITH_DROPOUT,
    LLAMA,
    RECOMPUTE,
    SHAPES,
    SPECIAL,
    WITH_DROPOUT,
    Outcome,
    example_tokens,
    labels_of,
    largest_difference,
    run_model,
)
from tests.ranks import run_ranks

KEY = MaskKey(seed=7, samples=range(40, 42))
ALL_HEADS = replace(LLAMA, heads=4, kv_heads=4)  # divisible by four context ranks
CASES: dict[str, tuple[Any, MicroBatchInfo, str]] = {  # model, information, recomputation
    **{shape: (config, MicroBatchInfo(), "none") for shape, config in SHAPES.items()},
    "all heads": (ALL_HEADS, MicroBatchInfo(), "none"),
    "documents": (LLAMA, MicroBatchInfo(documents=DOCUMENTS), "none"),
    "gpt2, documents": (SHAPES["gpt2"], MicroBatchInfo(documents=DOCUMENTS), "none"),
    "dropout": (WITH_DROPOUT, MicroBatchInfo(dropout=KEY), "none"),
    "dropout, documents": (GROUPED_WITH_DROPOUT, MicroBatchInfo(KEY, DOCUMENTS), "none"),
    "selective": (LLAMA, MicroBatchInfo(documents=DOCUMENTS), "selective"),
    "full": (LLAMA, MicroBatchInfo(), "full"),
    **{name: (config, info, "none") for name, (config, info) in SPECIAL.items()},
    "windows and sinks, selective": (*SPECIAL["windows and sinks"], "selective"),
    "full, dropout": (WITH_DROPOUT, MicroBatchInfo(dropout=KEY), "full"),
}
FAULTS = {  # seeded fault -> a case on which it must show
    "positions from the start of the slice": "llama",
    "slices swapped": "llama",
    "keys without the gradients of other ranks": "llama",
    "parts merged without rescaling": "llama",
    "documents that leak across ranks": "documents",
    "dropout by local position": "dropout",
    "windows of received keys that end a key early": "windows and sinks",
    "keys that windows do not send": "windows and sinks, documents",
    "sinks counted by both context ranks": "windows and sinks",
    "windows with the rotary base of other layers": "windows and sinks",
}
ROTARY_TABLE, STREAM_ROWS = rotary_table, micro_batch_info.stream_rows
PIECE = Tile.piece
SIZES = (2, 4)
LENGTH, WINDOWS, BYTES_OF_A_KEY = 64, (33, 9, 1, 5), 2 * 8 * 4  # a key and its value of a head
ATTENTIONS = ("gather", "ring", "ulysses")
QUICK = {  # number of ranks -> cases
    2: (
        "documents",
        "gpt2, documents",
        "full, dropout",
        "windows and sinks, documents",
    ),
    4: ("all heads", "dropout, documents", "windows and sinks, selective", "soft cap"),
}
OF_A_WORLD = [(size, case) for size in SIZES for case in CASES]
QUICK_OF_A_WORLD = [(size, case) for size in SIZES for case in QUICK[size]]


def run_on_context_ranks(case: str, attention: str) -> Outcome:
    """Run forward and backward on the ranks of the world, each with its slices."""
    config, info, recompute = CASES[case]
    rank, size = dist.get_rank(), dist.get_world_size()
    context = ContextAxis(dist.group.WORLD, rank, size, attention)
    documents = info.documents.lengths if info.documents else None
    division = divide(config.sequence_length, rank, size, documents)
    cores, interval = RECOMPUTE[recompute]
    model = SequentialModel(
        layer_specs(config, ModelAxes(context=context), recompute_core=cores),
        recompute_interval=interval,
    )
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3)
    tokens = example_tokens(config)
    mine, labels = (
        torch.cat([x[:, each.start : each.stop] for each in division.slices], dim=1)
        for x in (tokens, labels_of(tokens))
    )
    here = replace(info, division=division)
    loss = model(mine, labels, here)
    loss.backward()
    with torch.no_grad():
        logits = run_layers(model.layers, mine, info=here)  # [s/c, b, v]
    parts = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(parts, logits.contiguous())
    whole = from_rank_order(torch.stack(parts).transpose(1, 2), division.order)  # [b, s, v]
    gradients = {}
    for name, parameter in parameters.items():
        dist.all_reduce(parameter.grad)
        gradients[name] = sharding_of(parameter).logical_tensor([parameter.grad / size])
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return whole[..., : config.vocab_size], mean / size, gradients


def received_bytes(window: int | None) -> int:
    """Return the bytes that all ranks receive in ring attention, forward and backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis, division = ContextAxis(dist.group.WORLD, rank, size, "ring"), divide(LENGTH, rank, size)
    tiles = tiles_of(division.slices, None, Limits(window) if window else None)
    function = windowed_attention if window else ring_attention
    q, k, v = (torch.randn(1, 1, LENGTH // size, 8, requires_grad=True) for _ in range(3))
    exchange, received = dist.all_to_all_single, torch.zeros(1, dtype=torch.long)

    def counted(output: torch.Tensor, *rest: Any, **settings: Any) -> Any:
        received.add_(output.nbytes)
        return exchange(output, *rest, **settings)

    with mock.patch.object(dist, "all_to_all_single", counted):
        function(q, k, v, Divided(axis, division, tiles)).sum().backward()
    dist.all_reduce(received)
    return int(received)


def is_valid(case: str, attention: str, size: int) -> bool:
    return attention != "ulysses" or CASES[case][0].kv_heads % size == 0


def worker(cases: list[str], faults: list[str]) -> dict[Any, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    outcomes: dict[Any, Any] = {}
    size = dist.get_world_size()
    for attention in ATTENTIONS:
        for case in cases:
            if is_valid(case, attention, size):
                outcomes[case, attention] = run_on_context_ranks(case, attention)
    for fault in faults:
        with seeded_fault(fault):
            outcomes["fault", fault] = run_on_context_ranks(FAULTS[fault], "gather")
    outcomes["received"] = {window: received_bytes(window) for window in (None, *WINDOWS)}
    dist.barrier()
    return outcomes if os.environ["RANK"] == "0" else {}


def shorter_piece(tile: Tile, number: int, keys: range, first_key: int) -> TilePiece:
    """Return a piece whose windows have a key less."""
    limits = tile.limits and replace(tile.limits, window=(tile.limits.window or 2) - 1)
    return PIECE(replace(tile, limits=limits), number, keys, first_key)


@contextlib.contextmanager
def seeded_fault(fault: str) -> Iterator[None]:
    """Break the context axis in one way."""
    tiles = tiles_of
    faults: dict[str, dict[str, Any]] = {
        "positions from the start of the slice": {
            "models.attention.rotary_table": lambda slices, *rest: ROTARY_TABLE(
                (range(sum(map(len, slices))),), *rest
            )
        },
        "slices swapped": {
            "models.context_parallel.collectives.from_rank_order": (
                lambda x, order: from_rank_order(x, tuple(range(len(order))))
            )
        },
        "keys without the gradients of other ranks": {
            "models.context_parallel.attention.reduce_scatter": (
                lambda x, axis, order: torch.zeros_like(x.chunk(axis.size, dim=-2)[0])
            )
        },
        "parts merged without rescaling": {
            "models.context_parallel.tiles.merge": lambda one, other: (
                (one[0] + other[0]) / 2, merge(one, other)[1]
            )
        },
        "documents that leak across ranks": {
            "models.attention.tiles_of": (
                lambda slices, lengths, limits: tiles(slices, None, limits)
            )
        },
        "dropout by local position": {
            "models.transformer.stream_rows": lambda y, **rest: STREAM_ROWS(
                y, **(rest | {"slices": None})
            )
        },
        "windows of received keys that end a key early": {
            "models.context_parallel.tiles.Tile.piece": shorter_piece
        },
        "keys that windows do not send": {
            "models.context_parallel.collectives.reached_keys": (
                lambda division, window: reached_keys(division, window - 1)
            )
        },
        "sinks counted by both context ranks": {
            "models.context_parallel.tiles.merge_sinks": (
                lambda part, sinks: merge_sinks(merge_sinks(part, sinks), sinks)
            )
        },
        "windows with the rotary base of other layers": {
            "models.attention.rotary_table_of_windows": lambda slices, frequencies, *rest: (
                ROTARY_TABLE(slices, replace(frequencies, theta=10_000.0), *rest)
            )
        },
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for target, broken in faults[fault].items():
            stack.enter_context(mock.patch(target, broken))
        yield


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[int, dict[Any, Outcome]]:
    """Return the outcomes of the selected cases by the number of ranks."""
    chosen = selected(request, test_context_ranks_agree_with_one_rank, "of_a_world")
    faults = selected(request, test_a_seeded_fault_is_noticed, "fault")
    found = {}
    for size in SIZES:
        cases = [case for number, case in chosen if number == size]
        found[size] = run_ranks(size, worker, cases, faults if size == 2 else [])[0]
    return found


@functools.cache
def alone(case: str) -> Outcome:
    config, info, _ = CASES[case]
    return run_model(config, info=info)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("of_a_world", quick_and_long(QUICK_OF_A_WORLD, OF_A_WORLD), ids=str)
def test_context_ranks_agree_with_one_rank(
    of_a_world: tuple[int, str], attention: str, outcomes: dict[int, dict[Any, Outcome]]
) -> None:
    size, case = of_a_world
    if not is_valid(case, attention, size):
        assert (case, attention) not in outcomes[size]
        return
    assert largest_difference(outcomes[size][case, attention], alone(case)) < 1e-5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_noticed(fault: str, outcomes: dict[int, dict[Any, Outcome]]) -> None:
    assert not largest_difference(outcomes[2]["fault", fault], alone(FAULTS[fault])) < 1e-3


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_slices_have_equal_causal_work(size: int) -> None:
    length = 48
    slices = [divide(length, rank, size).slices for rank in range(size)]
    positions = sorted(p for each in slices for one in each for p in one)
    assert positions == list(range(length))
    assert len({sum(p for one in each for p in one) for each in slices}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rank_order_is_reversible(size: int) -> None:
    length = 4 * size
    x = torch.arange(3 * length * 2).view(3, length, 2)
    division = divide(length, 0, size, ((3, length - 3),))
    held = [
        torch.cat([x[:, each.start : each.stop] for each in division.slices_of(rank)], dim=1)
        for rank in range(size)
    ]
    assert torch.equal(from_rank_order(torch.stack(held), division.order), x)
    assert torch.equal(to_rank_order(x, division.order), torch.stack(held))


def visible_pairs(lengths: Lengths, positions: range) -> int:
    """Count the pairs of query and key of some queries, one by one."""
    pairs = 0
    for each in lengths:
        within = [p for n in each for p in range(n)]
        pairs += sum(within[p] + 1 for p in positions)
    return pairs


@pytest.mark.parametrize("lengths", [((24,),), ((9, 15), (4, 1, 7, 12)), ((1,) * 24,), ((3, 21),)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_work_of_a_rank_is_its_pairs_of_query_and_key(size: int, lengths: Lengths) -> None:
    division = divide(24, 0, size, lengths)
    n = 24 // (2 * size)
    slices = [range(i * n, (i + 1) * n) for i in range(2 * size)]
    assert slice_work(24, 2 * size, lengths) == tuple(visible_pairs(lengths, s) for s in slices)
    assert rank_work(24, size, lengths) == tuple(
        sum(visible_pairs(lengths, each) for each in division.slices_of(rank))
        for rank in range(size)
    )


def test_documents_are_divided_more_evenly_than_the_first_slice_with_the_last() -> None:
    generator = torch.Generator().manual_seed(0)
    length, size, ours, first_and_last = 4096, 8, [], []
    for _ in range(100):
        cuts = torch.randperm(length - 1, generator=generator)[:6].sort().values + 1
        ends = [0, *cuts.tolist(), length]
        lengths = (tuple(b - a for a, b in pairwise(ends)),)
        work = slice_work(length, 2 * size, lengths)
        mean = sum(work) / size
        ours.append(max(rank_work(length, size, lengths)) / mean - 1)
        first_and_last.append(max(work[i] + work[-1 - i] for i in range(size)) / mean - 1)
    assert sum(ours) < 0.7 * sum(first_and_last)


@pytest.mark.parametrize("lengths", [None, ((24,), (24,)), ((9, 15), (4, 1, 7, 12))])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tiles_cover_each_visible_pair_once(
    size: int, lengths: tuple[tuple[int, ...], ...] | None
) -> None:
    documents = lengths or ((24,), (24,))
    of_token = [
        torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in documents
    ]
    for rank in range(size):
        slices = divide(24, rank, size, lengths).slices
        positions = [p for each in slices for p in each]
        seen = torch.zeros(2, 24, 24, dtype=torch.long)  # sequence, query, key
        for tile in tiles_of(slices, lengths):
            rows = positions[tile.rows]
            for query in rows:
                for key in [*tile.before, *(own for own in rows if own <= query)]:
                    seen[tile.sequences, query, key] += 1
        for sequence, documents_of_token in enumerate(of_token):
            expected = torch.tril(documents_of_token[:, None] == documents_of_token[None, :])
            for query in range(24):
                wanted = expected[query].long() * (query in positions)
                assert torch.equal(seen[sequence, query], wanted)


@pytest.mark.parametrize("lengths", [None, ((24,), (24,)), ((9, 15), (4, 1, 7, 12))])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_cover_each_pair_in_a_window_once(
    size: int, lengths: tuple[tuple[int, ...], ...] | None
) -> None:
    """A rank's own keys and those that it receives are all that its windows reach, and no more."""
    starts = [
        torch.cat([torch.full((n,), sum(each[:i])) for i, n in enumerate(each)])
        for each in lengths or ((24,), (24,))
    ]
    for rank, window in itertools.product(range(size), (1, 2, 3, 5, 12, 23)):
        division = divide(24, rank, size, lengths)
        positions = [p for each in division.slices for p in each]
        received = tuple(itertools.chain(*reached_keys(division, window)))
        seen = torch.zeros(2, 24, 24, dtype=torch.long)  # sequence, query, key
        tiles = tiles_of(division.slices, lengths, Limits(window))
        for tile in tiles:
            for query, key in itertools.product(positions[tile.rows], repeat=2):
                seen[tile.sequences, query, key] += 0 <= query - key < window
        for held in (division.slices, received):
            places = [p for each in held for p in each]
            for piece in pieces(tiles, held):
                queries, keys = positions[piece.queries[2]], places[piece.keys[2]]
                cut = piece.limits.window if piece.limits else None
                for query, key in itertools.product(queries, keys):
                    seen[piece.queries[0], query, key] += cut is None or query - key < cut
                if piece.limits:
                    assert piece.limits.distance == queries[0] - keys[0]
                assert queries[-1] - keys[-1] < window  # each query sees a key
        for sequence, first in enumerate(starts):
            for query in range(24):
                keys = range(max(int(first[query]), query - window + 1), query + 1)
                wanted = torch.tensor([key in keys for key in range(24)])
                wanted &= torch.tensor(query in positions)
                assert torch.equal(seen[sequence, query], wanted.long())


def test_a_rank_receives_the_keys_that_its_windows_reach() -> None:
    assert received_keys(32, 2, 3) == (2, 2)  # slices 0 and 3, 1 and 2: rank 1 holds slice 1
    assert received_keys(4096, 4, 257) == (256, 512, 512, 256)
    assert received_keys(4096, 4, 4096) == (3072, 2560, 2048, 1536)  # all earlier keys
    assert received_keys(4096, 2, 1) == (0, 0)


@pytest.mark.parametrize("size", SIZES)
def test_the_exchanged_bytes_are_those_of_the_window(
    size: int, outcomes: dict[int, dict[Any, Any]]
) -> None:
    measured = outcomes[size]["received"]
    for window in WINDOWS:
        keys = sum(received_keys(LENGTH, size, window))
        assert measured[window] == 3 * keys * BYTES_OF_A_KEY  # forward, backward, gradients
    ring = (3 * size - 2) * LENGTH * BYTES_OF_A_KEY  # passes of all keys
    assert measured[None] == ring
    assert 3 * measured[WINDOWS[-1]] < ring


@pytest.mark.parametrize("kernel", [attention_parts.CPU_FLASH, attention_parts.REFERENCE])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_merged_parts_are_the_whole(kernel: attention_parts.Kernel, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    a, g = heads
    q, grad = torch.randn(2, 2, a, 6, 8)
    k, v = torch.randn(2, 2, g, 10, 8)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    mask = torch.ones(6, 10, dtype=torch.bool).tril(4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs, attn_mask=mask, enable_gqa=True
    )
    expected.backward(grad.double())
    with mock.patch.object(attention_parts, "kernel_for", lambda q, limits: kernel):
        own, before = (k[:, :, 4:], v[:, :, 4:]), (k[:, :, :4], v[:, :, :4])
        whole = merge(attend(q, *own, causal=True), attend(q, *before, causal=False))
        first = attend_backward(grad, q, *own, whole, causal=True)
        second = attend_backward(grad, q, *before, whole, causal=False)
    found = [
        first[0] + second[0],
        *(torch.cat([b, a], dim=2) for a, b in zip(first[1:], second[1:], strict=True)),
    ]
    assert torch.allclose(whole[0].double(), expected, atol=1e-6)
    for ours, tensor in zip(found, inputs, strict=True):
        assert torch.allclose(ours.double(), tensor.grad, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, attention_parts.EFFICIENT), (torch.bfloat16, attention_parts.FLASH)],
)
def test_kernels_of_a_gpu_take_these_arguments(
    dtype: torch.dtype, kernel: attention_parts.Kernel
) -> None:
    with mock.patch.object(attention_parts, "kernel_for", lambda q, limits: kernel):
        q, grad = (torch.empty(2, 4, 6, 16, device="meta", dtype=dtype) for _ in range(2))
        k, v = (torch.empty(2, 2, 6, 16, device="meta", dtype=dtype) for _ in range(2))
        whole = attend(q, k, v, causal=True)
        assert [part.shape for part in whole] == [(2, 4, 6, 16), (2, 4, 6)]
        grads = attend_backward(grad, q, k, v, whole, causal=True)
        assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]


def test_the_kernel_fits_the_device() -> None:
    def chosen(device: str, dtype: torch.dtype, head_size: int = 64) -> attention_parts.Kernel:
        q = mock.Mock(device=torch.device(device), dtype=dtype, shape=(1, 1, 1, head_size))
        with mock.patch.object(attention_parts, "has_flash_attention", lambda device: recent):
            return attention_parts.kernel_for(q)

    recent = True

    assert chosen("cpu", torch.bfloat16) == attention_parts.CPU_FLASH
    assert chosen("cuda", torch.bfloat16) == attention_parts.FLASH
    assert chosen("cuda", torch.float32) == attention_parts.EFFICIENT
    assert chosen("cuda", torch.bfloat16, head_size=12) == attention_parts.REFERENCE
    assert chosen("cpu", torch.float64) == attention_parts.REFERENCE
    recent = False
    assert chosen("cuda", torch.bfloat16) == attention_parts.REFERENCE
    assert chosen("cuda", torch.float32) == attention_parts.EFFICIENT
