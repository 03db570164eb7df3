"""Threefold's own speed: steps measured on a GPU, its attention kernels, and CPUs."""

from dataclasses import replace

import pytest

from benchmarks.one_step.shapes import GPU_EXPERT_SHAPE, GPU_SHAPES, Shape, with_batch
from models.config import Window
from threefold.gpus.datasheet import load_gpu
from threefold.plan.job import Job, Machine, PlannedLayout, job_of
from threefold.plan.software import THREEFOLD, load_software
from threefold.plan.time.block import block_job, block_passes
from threefold.plan.time.step import step_time


def job_on_h100(shape: Shape, *settings: str) -> Job:
    """Return the job of a shape on one H100."""
    recipe = shape.recipe("bf16", more=("training.compile=true", *settings))
    return job_of(recipe, Machine.of(load_gpu("H100"), gpus=1, gpus_per_node=1))


LLAMA = with_batch(GPU_SHAPES["llama-1b"], 4, 4)


@pytest.mark.parametrize(
    ("shape", "measured", "error"), [(LLAMA, 1.038, 0.03), (GPU_EXPERT_SHAPE, 0.442, 0.1)]
)
def test_a_step_on_an_h100_is_predicted_as_measured(
    shape: Shape, measured: float, error: float
) -> None:
    """See the section "One GPU" of BENCHMARKS.md."""
    assert step_time(job_on_h100(shape)).total == pytest.approx(measured, rel=error)


def test_narrow_heads_and_flash_attention_are_slower() -> None:
    speed = THREEFOLD.attention_speed
    assert speed(32, limited=False) == speed(64, limited=False) == THREEFOLD.narrow_attention
    assert speed(128, limited=False) == speed(256, limited=False) == THREEFOLD.attention
    between = speed(64, limited=False) + speed(128, limited=False)
    assert speed(96, limited=False) == pytest.approx(between / 2)
    assert speed(64, limited=True) == speed(128, limited=True) == THREEFOLD.limited_attention
    other = load_software("torchtitan")
    assert other.attention_speed(64, limited=True) == other.attention


def test_the_kernel_of_attention_depends_on_what_it_computes() -> None:
    """A window of one key less than the sequence computes as much as none."""
    job = job_on_h100(LLAMA)

    def seconds(job: Job) -> float:
        return block_passes(block_job(job)).forward.compute

    def in_parts(attention: str) -> Job:
        layout = PlannedLayout(micro_sequences=4, context=2, context_attention=attention)
        return replace(job, layout=layout)

    documents = replace(job, separate_documents=True)
    size = job.model.sequence_length - 1
    pattern = replace(job.model, attention_pattern=("window",), window=Window(size=size))
    window = replace(job, model=pattern)
    sinks = replace(job, model=replace(job.model, attention_sinks=True))
    assert seconds(documents) == pytest.approx(seconds(window), rel=1e-3)
    assert seconds(sinks) > seconds(documents) > 1.02 * seconds(job)
    assert seconds(in_parts("ring")) == seconds(in_parts("gather"))
    assert seconds(in_parts("ring")) > 1.02 * seconds(in_parts("ulysses"))


def test_a_cpu_keeps_the_datasheets_efficiencies() -> None:
    own, cpu, gpu = THREEFOLD.on_device("cpu"), load_gpu("cpu"), load_gpu("H100")
    assert own is THREEFOLD.on_cpu and THREEFOLD.on_device("cuda") is THREEFOLD
    for kernels in (own.kernels_on(cpu), THREEFOLD.kernels_on(cpu)):
        assert kernels.matmul_depth_cost == cpu.matmul_depth_cost
        assert kernels.memory_efficiency == cpu.memory_efficiency
    assert THREEFOLD.kernels_on(gpu).memory_efficiency == THREEFOLD.memory_efficiency
    other = load_software("torchtitan")
    assert other.on_device("cpu") is other
    assert other.kernels_on(gpu).matmul_depth_cost == gpu.matmul_depth_cost


def test_the_host_adds_its_time_to_that_of_the_kernels_only_on_a_cpu() -> None:
    longer = 1e-3  # of the forward pass of a block; the backward pass takes twice as long
    added = {}
    for name in ("cpu", "H100"):
        recipe = LLAMA.recipe("fp32" if name == "cpu" else "bf16")
        job = job_of(recipe, Machine.of(load_gpu(name), gpus=1, gpus_per_node=1))
        slower = replace(job.software, block_seconds=job.software.block_seconds + longer)
        before, after = (
            block_passes(block_job(each)).total for each in (job, replace(job, software=slower))
        )
        added[name] = after - before
    assert added == {"cpu": pytest.approx(3 * longer), "H100": 0.0}


@pytest.mark.parametrize(("recompute", "waits"), [("none", 1), ("selective", 1), ("full", 2)])
def test_only_full_recomputation_routes_tokens_again(recompute: str, waits: int) -> None:
    job = job_on_h100(GPU_EXPERT_SHAPE)
    job = replace(job, layout=replace(job.layout, recompute=recompute))
    longer = 1e-3
    slower = replace(job.software, routing_seconds=job.software.routing_seconds + longer)
    before, after = (block_passes(block_job(each)) for each in (job, replace(job, software=slower)))
    assert after.forward.compute - before.forward.compute == pytest.approx(longer)
    assert after.total - before.total == pytest.approx(waits * longer)
