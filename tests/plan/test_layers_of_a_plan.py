"""Layers that differ in the planner: windows, layers without positions, norms of outputs."""

from dataclasses import replace

import pytest

from models.config import Window
from models.context_parallel.division import received_keys
from models.cost import flops_per_token, kinds_of_layers, recomputed_flops_per_token
from tests.conftest import changed, each_in_turn, small_recipe
from threefold.config.loading import REPOSITORY, load_recipe, parse_recipe
from threefold.plan.job import Job, Machine, job_of
from threefold.plan.memory.peak import memory_of_stage
from threefold.plan.memory.working import context_bytes
from threefold.plan.stage_contents import blocks_by_kind, stage_parameters
from threefold.plan.time.block import block_job, block_passes, context_seconds
from threefold.plan.time.step import step_time
from threefold.trace.trace import trace

LLAMA_8B = REPOSITORY / "recipes" / "llama" / "8b.toml"
PATTERN = 'model.attention_pattern=["window", "window", "window", "full"]'


def planned(*overrides: str) -> Job:
    recipe = load_recipe(LLAMA_8B, overrides)
    assert recipe.cluster is not None
    return job_of(recipe, Machine.of_cluster(recipe.cluster))


def with_window(job: Job, size: int, *pattern: str) -> Job:
    """Return the job with a sliding window in the layers of the pattern."""
    model = replace(job.model, attention_pattern=pattern or ("window",), window=Window(size=size))
    return replace(job, model=model)


def test_a_mixed_model_lies_between_the_uniform_ones() -> None:
    """A model of three windowed layers and a full one, like OLMo 3."""
    full = planned("layout.tensor=1", "layout.context=2", "model.sequence_length=32768")
    windowed = with_window(full, 512)
    mixed = with_window(full, 512, "window", "window", "window", "full")
    assert list(kinds_of_layers(mixed.model).values()) == [8, 24]
    for value in (
        lambda job: step_time(job).compute,
        lambda job: memory_of_stage(job, 0).activations,
        lambda job: context_seconds(job),
        lambda job: flops_per_token(job.model),
        lambda job: recomputed_flops_per_token(job.model, "selective"),
        lambda job: recomputed_flops_per_token(job.model, "full"),
    ):
        expected = (3 * value(windowed) + value(full)) / 4
        assert value(mixed) == pytest.approx(expected, rel=1e-6)
    assert step_time(windowed).compute < 0.9 * step_time(full).compute
    assert context_bytes(mixed, backward=True) == context_bytes(full, backward=True)


def test_windows_shorten_steps_and_windows_of_whole_sequences_do_not() -> None:
    full = planned("model.sequence_length=32768")
    seconds = [step_time(with_window(full, size)).compute for size in (128, 1024, 8192, 32768)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[1] < seconds[2] < seconds[3]
    assert seconds[3] == step_time(full).compute


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_attention_to_documents_keeps_as_much_as_to_windows(recompute: str) -> None:
    """Only several sequences of a micro-batch are copied for the next linear layer."""
    settings = ("batch.global_sequences=1024", f"layout.recompute={recompute}")
    for sequences in (1, 2):
        full = planned(*settings, f"batch.micro_sequences={sequences}")
        window = with_window(full, full.model.sequence_length - 1)
        documents = replace(full, separate_documents=True)
        kept, of_windows, of_documents = (
            memory.activations + memory.working
            for memory in (memory_of_stage(job, 0) for job in (full, window, documents))
        )
        assert of_documents == of_windows
        assert (of_documents > kept) == (sequences == 2 and recompute != "selective")


def test_the_blocks_of_each_kind_add_up_to_the_stages() -> None:
    settings = ("layout.pipeline=4", "layout.schedule=interleaved", "layout.virtual_stages=2")
    job = planned(
        *settings, PATTERN, "model.window={size=512}", "deepspeed=ds_configs/zero1_bf16.json"
    )
    full, windowed = blocks_by_kind(job).values()
    assert sum(map(sum, full)) == 8 and sum(map(sum, windowed)) == 24
    counts = [tuple(map(sum, zip(*both, strict=True))) for both in zip(full, windowed, strict=True)]
    blocks = job.blocks_of_virtual_stages
    assert counts == [(blocks[stage], blocks[4 + stage]) for stage in range(4)]
    plain = planned(*settings, "deepspeed=ds_configs/zero1_bf16.json")
    assert sum(stage_parameters(job)) == sum(stage_parameters(plain))


def test_norms_of_outputs_take_time_and_memory() -> None:
    before, after, both = (
        planned(f"model.norm_placement={place}") for place in ("before", "after", "both")
    )
    assert (
        step_time(before) == step_time(after) and step_time(after).compute < step_time(both).compute
    )
    kept = [memory_of_stage(job, 0).activations for job in (before, after, both)]
    assert kept[0] == kept[1] < kept[2]


@pytest.mark.parametrize("attention", each_in_turn(["ring", "gather"], ["ring"]))
def test_exchanged_bytes_fall_with_the_window_as_planned(attention: str) -> None:
    """Traced bytes of both context ranks: forward and backward keys in bf16, fp32 gradients."""
    corpus = small_recipe(REPOSITORY)
    layout = {"context": 2, "context_attention": attention}
    table = changed(
        corpus, layout=layout, deepspeed="ds_configs/zero1_bf16.json",
        model__layers=1, model__sequence_length=64, model__attention_pattern=["window"],
        batch={"global_sequences": 1, "micro_sequences": 1},
    )  # fmt: skip
    for window in (4, 16):
        recipe = parse_recipe(changed(table, model__window={"size": window}), "test")
        sent = 0
        for rank in range(2):
            traffic = trace(recipe, 2, 2, rank).traffic
            assert {each.kind for each in traffic if each.axis == "context"} == {"all_to_all"}
            sent += sum(each.memory_bytes for each in traffic if each.axis == "context")
        keys = 2 * recipe.model.key_value_size
        assert sent == sum(received_keys(64, 2, window)) * keys * (2 + 2 + 4)


def test_selective_recomputation_expands_latents_again() -> None:
    """The rank of the latents changes nothing else that is recomputed."""
    again = {}
    for rank in (512, 2048):
        latent = f"{{query_rank=1536, key_value_rank={rank}, rotary_size=64, value_size=128}}"
        job = planned("model.kv_heads=32", "model.head_size=128", f"model.latent={latent}")
        selective = replace(job, layout=replace(job.layout, recompute="selective"))
        plain, longer = (block_passes(block_job(each)).total for each in (job, selective))
        again[rank] = longer - plain
    assert again[2048] > 1.1 * again[512]
