"""A trace agrees with the allocations and the communication of a real run, at any size."""

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models.attention import Frequencies, rotary_table
from models.cost import parameter_count
from models.errors import UserError
from models.transformer import Block
from tests.conftest import GPT_SWITCHES, changed, each_in_turn, quick_and_long
from tests.ranks import join_world, run_ranks
from threefold.config.loading import REPOSITORY, load_recipe, parse_recipe
from threefold.config.recipe import Recipe
from threefold.trace import trace as trace_module
from threefold.trace.trace import Trace, measure, trace

FP32 = 4  # bytes
ALL = 10**9  # micro-batches: no fewer than there are
LLAMA = REPOSITORY / "recipes" / "llama" / "7b.toml"


def traced(table: dict[str, Any], world_size: int, rank: int = 0) -> Trace:
    return trace(parse_recipe(table, "test"), world_size, min(world_size, 8), rank)


def traced_as_on_a_cpu(recipe: Recipe, world_size: int, rank: int) -> Trace:
    """Trace all micro-batches, because real stages must agree on their number."""
    with (
        mock.patch("threefold.trace.trace.kernels_of_a_gpu", contextlib.nullcontext),
        mock.patch("threefold.trace.trace.enough_micro_batches", lambda *_: ALL),
    ):
        return trace(recipe, world_size, world_size, rank)


def real_measure(recipe: Recipe) -> Trace:
    """Return the measurement of a rank, with real tensors and real collectives."""
    world = join_world()
    return measure(recipe, recipe.parallel_dims(world), world.rank, at_most=ALL)


def traffic(found: Trace) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (calls, bytes) by (axis, kind)."""
    return {(each.axis, each.kind): (each.count, each.memory_bytes) for each in found.traffic}


WAYS = {
    "fp32": (1, {}),
    "bf16": (1, {"deepspeed": "ds_configs/zero1_bf16.json"}),
    "zero2": (2, {"deepspeed": "ds_configs/zero2_bf16.json", "model__dropout": 0.1}),
    "zero3": (1, {"deepspeed": "ds_configs/zero3_bf16.json"}),
    "muon": (
        4,
        {
            "deepspeed": "ds_configs/zero1_bf16.json",
            "layout__tensor": 2,
            "optimizer__kind": "muon",
        },
    ),
    "muon with zero3": (
        2,
        {"deepspeed": "ds_configs/zero3_fp32.json", "optimizer__kind": "muon"},
    ),
    "stages": (
        4,
        {"layout__pipeline": 2, "layout__tensor": 2, "model__layers": 8} | GPT_SWITCHES,
    ),
    "sequence parallel": (
        4,
        {
            "deepspeed": "ds_configs/zero1_bf16.json",
            "layout": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
            "model__layers": 8,  # gloo's threads keep sent tensors a moment longer
        },
    ),
    "prediction": (
        4,
        {
            "deepspeed": "ds_configs/zero1_bf16.json",
            "layout": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
            "model__layers": 8,
            "model__prediction": {"depth": 2},
        },
    ),
    "prediction with zero3": (
        2,
        {"deepspeed": "ds_configs/zero3_fp32.json", "model__prediction": {"depth": 1}},
    ),
    "folded": (2, {"layout": {"pipeline": 2, "schedule": "dualpipev"}, "model__layers": 4}),
    "interleaved": (
        2,
        {
            "deepspeed": "ds_configs/zero1_bf16.json",
            "layout": {"pipeline": 2, "schedule": "interleaved"},
            "model__layers": 4,
        },
    ),
    "weights later": (
        4,
        {
            "deepspeed": "ds_configs/zero1_bf16.json",
            "layout": {"pipeline": 2, "tensor": 2, "schedule": "zb-h1"},
            "model__layers": 8,
        },
    ),
    "folded, weights later": (
        2,
        {"layout": {"pipeline": 2, "schedule": "zb-v"}, "model__layers": 4},
    ),
}


@pytest.mark.parametrize("way", each_in_turn(WAYS))
def test_a_trace_agrees_with_a_real_run(way: str, small: dict[str, Any]) -> None:
    world_size, changes = WAYS[way]
    recipe = parse_recipe(changed(small, **changes), "test")
    reals = run_ranks(world_size, real_measure, recipe)
    for rank, real in enumerate(reals):
        found = traced_as_on_a_cpu(recipe, world_size, rank)
        for category in ("weights", "gradients", "optimizer", "buffers"):
            for moment in ("between_steps", "at_peak"):
                expected = getattr(getattr(real, moment), category)
                assert getattr(getattr(found, moment), category) == expected, (rank, category)
        assert found.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
        assert found.traffic == real.traffic


def test_the_communication_of_tensor_ranks_and_stages(small: dict[str, Any]) -> None:
    layout = {"pipeline": 2, "tensor": 2}
    table = changed(small, layout=layout, batch__global_sequences=40)
    first, last = traced(table, 8, rank=0), traced(table, 8, rank=7)
    m, s, b, h = 10, 32, 2, 64
    activations, tokens = s * b * h * FP32, s * b * FP32
    assert (first.micro_batches, first.traced) == (10, 3)
    # A block on each stage; forward and backward 2 each, the embedding forward, the head backward
    assert traffic(first)["tensor", "all_reduce"] == (m * 5, m * 5 * activations)
    # and the loss: the largest logit, and two sums
    assert traffic(last)["tensor", "all_reduce"] == (m * 7, m * (5 * activations + 3 * tokens))
    # Each tensor rank sends its part; who receives gathers the whole: the first stage the gradient,
    # the last one its input.
    sent = (m, m * activations // 2)
    for found in (first, last):
        assert traffic(found)["pipeline", "send"] == sent
        assert traffic(found)["pipeline", "recv"] == sent
        assert traffic(found)["tensor", "all_gather"] == (m, m * activations)
    # ZeRO-1 in fp32: gradients reduced, weights gathered, both once; one norm.
    weights = first.between_steps.weights
    for kind in ("reduce_scatter", "all_gather"):
        assert traffic(first)["data", kind][1] == pytest.approx(weights, rel=0.01)
    assert traffic(first)["data", "all_reduce"] == (1, FP32)


def test_sequence_parallelism_sends_parts(small: dict[str, Any]) -> None:
    layout = {"tensor": 2, "pipeline": 2, "sequence_parallel": True}
    found = traffic(traced(changed(small, layout=layout), 4))
    m, activations = 4, 32 * 2 * 64 * FP32
    # A block: gathered before each of 2 products forward, backward for the weight's gradient and
    # after the row-parallel one; scattered after it, and backward before it. And the embedding.
    assert found["tensor", "all_gather"] == (m * 7, m * 7 * activations)
    assert found["tensor", "reduce_scatter"] == (m * 5, m * 5 * activations)
    assert found["pipeline", "send"] == (m, m * activations // 2)


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages(
    small: dict[str, Any],
) -> None:
    table = changed(small, layout={"pipeline": 3}, model__layers=3)
    held = {}
    for m in (1, 2, 3, 4):
        recipe = parse_recipe(changed(table, batch__global_sequences=2 * m), "test")
        with mock.patch("threefold.trace.trace.enough_micro_batches", lambda *_: ALL):
            found = trace(recipe, 3, 3, 0)
        assert found.traced == m
        held[m] = dict(found.phase_bytes)["ForwardPass"]
    # The memory of one micro-batch; from the second one on also the output that was sent before.
    assert held[3] - held[2] == held[2] - held[1] - 32 * 2 * 64 * FP32
    assert held[3] == held[4]
    enough = trace(parse_recipe(changed(table, batch__global_sequences=12), "test"), 3, 3, 0)
    assert (enough.traced, dict(enough.phase_bytes)["ForwardPass"]) == (4, held[4])


@pytest.mark.parametrize("stage", quick_and_long([1, 3], range(4)))
def test_the_traced_micro_batches_reach_the_peak(stage: int, small: dict[str, Any]) -> None:
    table = changed(small, layout={"pipeline": 4}, model__layers=4, batch__global_sequences=12)
    enough = traced(table, 4, rank=stage)
    with mock.patch("threefold.trace.trace.enough_micro_batches", lambda *_: ALL):
        every = traced(table, 4, rank=stage)
    assert (enough.traced, every.traced) == (5 - stage, 6)
    assert enough.traffic == every.traffic
    last = stage == 3
    losses = 512 * (every.traced - enough.traced) if last else 0
    for few, all_of_them in (
        (enough.at_peak, every.at_peak),
        (enough.between_steps, every.between_steps),
    ):
        more = all_of_them.activations - few.activations
        assert losses <= more <= losses + 512 * last  # the losses' sum may come before the peak
        assert all_of_them == replace(few, activations=few.activations + more)


@pytest.mark.parametrize("schedule", each_in_turn(["zb-h1", "zb-v", "interleaved", "dualpipev"]))
def test_the_traced_micro_batches_reach_the_peak_in_every_schedule(
    schedule: str, small: dict[str, Any]
) -> None:
    layout = {"pipeline": 2, "schedule": schedule, "recompute": "full"}
    table = changed(small, layout=layout, model__layers=4, batch__global_sequences=24)
    for stage in range(2):
        enough = traced(table, 2, rank=stage)
        with mock.patch("threefold.trace.trace.enough_micro_batches", lambda *_: ALL):
            every = traced(table, 2, rank=stage)
        assert enough.traced < every.traced == 12
        assert enough.traffic == every.traffic
        losses = 512 * (every.traced - enough.traced)
        assert 0 <= every.peak_bytes - enough.peak_bytes <= losses
        assert every.between_steps.state == enough.between_steps.state


def test_a_tensor_that_blocks_keep_is_counted(small: dict[str, Any]) -> None:
    table = changed(
        small,
        batch={"global_sequences": 16, "micro_sequences": 8},
        deepspeed="ds_configs/zero2_fp32.json",
    )
    forward = Block.forward

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.clone())
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            (extra,) = ctx.saved_tensors
            return grad + 0 * extra

    def wasteful(block, x, info):
        return Kept.apply(forward(block, x, info))

    plain = traced(table, 2)
    with mock.patch.object(Block, "forward", wasteful):
        mutant = traced(table, 2)
    most, wasted = (dict(each.phase_bytes)["ForwardPass"] for each in (plain, mutant))
    assert wasted - most == 2 * 32 * 8 * 64 * FP32  # two blocks
    assert (mutant.between_steps, mutant.traffic) == (plain.between_steps, plain.traffic)


@pytest.mark.long
def test_another_layer_costs_as_much_as_the_others(small: dict[str, Any]) -> None:
    batch = {"global_sequences": 2, "micro_sequences": 2}
    peaks = [
        dict(traced(changed(small, model__layers=n, batch=batch), 1).phase_bytes)["ForwardPass"]
        for n in (1, 2, 3)
    ]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0]


@pytest.mark.long
def test_kernels_that_are_not_compiled_hold_more(small: dict[str, Any]) -> None:
    """They hold fp32 copies of the inputs and outputs of SwiGLU's backward pass, and more."""
    table = changed(small, deepspeed="ds_configs/zero1_bf16.json", model__ffn_hidden_size=1024)
    s, b, f = 32, 2, 1024
    written = traced(changed(table, training__compile=False), 1)
    assert written.peak_bytes - traced(table, 1).peak_bytes > s * b * 2 * f * FP32
    assert written.between_steps == traced(table, 1).between_steps


@pytest.mark.long
def test_a_job_of_4096_gpus_without_its_memory() -> None:
    model = {
        "layers": 32,  # two on each stage
        "hidden_size": 16384,
        "heads": 128,
        "kv_heads": 8,
        "ffn_hidden_size": 53248,
        "vocab_size": 128256,
        "sequence_length": 8192,
    }
    layout = ["layout.tensor=8", "layout.pipeline=16", "layout.recompute=full"]
    cluster = ["batch.global_sequences=2048", "cluster.nodes=512"]
    overrides = [f"model.{key}={value}" for key, value in model.items()] + layout + cluster
    recipe = load_recipe(LLAMA, overrides)
    found = trace(recipe, 4096, 8, 4095)
    assert (found.coordinates.pipeline, found.coordinates.data, found.coordinates.tensor) == (
        15,
        31,
        7,
    )
    assert 8 * 2**30 < found.peak_bytes < 80 * 2**30


@pytest.fixture(scope="module")
def gpt() -> Recipe:
    """Return a GPT model of one layer."""
    return load_recipe(REPOSITORY / "recipes" / "gpt" / "125m.toml", ["model.layers=1"])


@pytest.fixture(scope="module")
def trace_of_gpt(gpt: Recipe) -> Trace:
    """Return the trace of rank 3 of 8."""
    return trace(gpt, 8, 8, 3)


def test_states_are_shared_by_the_data_ranks(gpt: Recipe, trace_of_gpt: Trace) -> None:
    padded = replace(gpt.model, vocab_size=gpt.model.padded_vocab_size(1))
    count = parameter_count(padded)
    state = trace_of_gpt.between_steps
    assert state.weights == pytest.approx(2 * count, rel=1e-3)
    assert state.gradients == pytest.approx(4 * count, rel=1e-3)
    assert state.optimizer == pytest.approx(12 * count / 8, rel=1e-3)


def test_a_trace_is_reported(trace_of_gpt: Trace) -> None:
    assert "rank 3 of 8" in trace_module.text(trace_of_gpt)
    table = trace_module.table(trace_of_gpt)
    assert table["peak_bytes"] == sum(table["at_peak_bytes"].values())
    assert max(table["phase_bytes"].values()) == table["peak_bytes"]


@pytest.mark.long
def test_a_trace_neither_leaves_nor_uses_state(small: dict[str, Any]) -> None:
    table = changed(small, deepspeed="ds_configs/zero3_fp32.json", model__layers=1)
    once = traced(table, 4)
    assert not dist.is_initialized()
    assert rotary_table.cache_info().currsize == 0
    assert torch.zeros(2).add(1).tolist() == [1, 1]
    model = parse_recipe(table, "test").model
    frequencies = Frequencies(model.attention_head_size, model.rope_theta)
    rotary_table((range(model.sequence_length),), frequencies, torch.device("cpu"), None)
    assert traced(table, 4) == once  # although a real table is in the cache


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_rejected(rank: int, small: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"rank -?\d is not in 0 \.\. 3; use 0"):
        traced(small, 4, rank=rank)
