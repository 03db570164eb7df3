"""Speed of a step of llama/1b, compared with the planner's prediction and with transformers."""

import re
import shutil
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity, profile

from benchmarks.one_step.probes import top_kernels
from benchmarks.one_step.shapes import (
    GPU_EXPERT_SHAPE,
    GPU_SHAPES,
    Shape,
    can_compile,
    cpu_shape,
    step_flops,
    with_batch,
)
from benchmarks.taking_turns import Player, cores_at_hand, players
from models.parallel.micro_batch_info import MicroBatchInfo
from tests.gpu.environment import device_name, synchronize
from tests.gpu.setting import Result, Setting
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.data.dataset import MicroBatch
from threefold.engine.build import build_from_recipe
from threefold.gpus import datasheet
from threefold.gpus.datasheet import FOLDER, Gpu, gpus, peak_tflops
from threefold.plan.job import Machine, job_of
from threefold.plan.memory.peak import stage_memory
from threefold.plan.time.step import step_time
from threefold.runtime.processes import compiler, start_processes

WARM_UP_STEPS, TIMED_STEPS = 2, 8
KERNELS = 15  # the trace has all of them
KERNEL_NAME = 70  # characters
ROUNDS = 3  # of the comparison with transformers
SMALL_EXPERTS = "{ count = 4, per_token = 2, ffn_hidden_size = 64, balance_loss = 0.01 }"
FALLBACK = "H100"  # whose file a GPU without one begins as


def shape_of(setting: Setting, micro_sequences: int, micro_batches: int) -> Shape:
    """Return the model and batch that are measured."""
    if setting.small:
        return cpu_shape(64, 2, 256, micro_sequences=micro_sequences, micro_batches=2)
    return with_batch(GPU_SHAPES["llama-1b"], micro_sequences, micro_batches)


def step(setting: Setting, batch_shape: str) -> Result:
    """Measure step time, MFU, peak memory, synchronizations and the longest kernels of our engine.

    batch_shape: sequences of a micro-batch and number of micro-batches, such as "2x8"
    """
    return measured_step(setting, shape_of(setting, *map(int, batch_shape.split("x"))), batch_shape)


def step_with_experts(setting: Setting) -> Result:
    """Measure a step of a model with experts in the same way."""
    shape = GPU_EXPERT_SHAPE
    if setting.small:
        dense = shape_of(setting, 2, 2)
        shape = replace(dense, sizes=(*dense.sizes, ("experts", SMALL_EXPERTS)))
    return measured_step(setting, shape, "experts")


def measured_step(setting: Setting, shape: Shape, name: str) -> Result:
    """Measure a step as described at `step`; `name` becomes part of the name of the trace."""
    precision = "bf16" if setting.device == "cuda" else "fp32"
    compile = "false" if setting.small else "auto"  # auto: not without a compiler
    recipe = shape.recipe(precision, more=(f"training.compile={compile}",))
    start_processes(LaunchEnvironment())
    dims = recipe.parallel_dims(LaunchEnvironment())
    result = Result()
    result.say(f"{shape.name}, {precision}, {recipe.micro_batches(1)} micro-batches of "
               f"{recipe.batch.micro_sequences}, one GPU, ZeRO-1.")  # fmt: skip
    started = time.perf_counter()
    engine = build_from_recipe(recipe, dims, build_deepspeed_config(recipe, dims))
    built = time.perf_counter() - started
    batch = draw_batch(recipe)

    def run() -> float:
        return engine.train_step(batch, 1e-4).loss

    started = time.perf_counter()
    first = run()
    result.say(f"Building the engine took {built:.1f} s, the first step, which compiles the "
               f"kernels, {time.perf_counter() - started:.1f} s.")  # fmt: skip
    setting.save(result)
    seconds = []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        synchronize(setting.device)
        started = time.perf_counter()
        last = run()
        synchronize(setting.device)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[WARM_UP_STEPS:])
    result.table(["", "measured", "predicted"], rows(setting, recipe, shape, median))
    result.check(last < first, f"the loss falls from {first:.4f} to {last:.4f}")
    setting.save(result)
    kernels = top_kernels(run, torch.device(setting.device), KERNELS)
    table = [
        [f"{each['share']:.1%}", f"{1e3 * each['seconds']:.2f}", str(each["calls"]),
         f"`{each['name'][:KERNEL_NAME].replace('|', '/')}`"]
        for each in kernels
    ]  # fmt: skip
    busy = sum(each["seconds"] / each["share"] for each in kernels[:1])
    result.say(f"The longest kernels of a step; all of them together take {1e3 * busy:.1f} ms, "
               f"{busy / median:.1%} of the step:")  # fmt: skip
    result.table(["share", "ms", "calls", "kernel"], table)
    if setting.device == "cuda":
        setting.save(result)
        found = synchronizations(run)
        result.say(f"The host waits for the GPU {sum(found.values())} times in a step:")
        result.table(["times", "line"], [[str(n), f"`{line}`"] for line, n in found.most_common()])
        setting.save(result)
        write_trace(run, setting.results.with_name(f"trace-{name}.json.gz"))
    return result


def write_trace(run: Callable[[], object], file: Path) -> None:
    """Run a step; write a trace of it for ui.perfetto.dev."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    profiler.export_chrome_trace(str(file))


def synchronizations(run: Callable[[], object]) -> Counter[str]:
    """Run a step; return the lines that made the host wait for the GPU, and how often each did."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}"
        for each in caught
        if "synchronizing CUDA operation" in str(each.message)
    )


def rows(setting: Setting, recipe: Recipe, shape: Shape, seconds: float) -> list[list[str]]:
    """Return the rows of the table: measured values, and the planner's predictions."""
    name = device_name(setting.device)
    gpu = known_gpu(name)
    found = []
    job = job_of(recipe, Machine.of(gpu, gpus=1, gpus_per_node=1)) if gpu else None
    predicted = step_time(job).total if job else None
    ratio = f"{predicted:.3f} s ({predicted / seconds - 1:+.0%})" if predicted else "unknown GPU"
    found.append(["step", f"{seconds:.3f} s", ratio])
    found.append(["tokens/s", f"{shape.tokens / seconds:,.0f}", ""])
    peak = peak_tflops(name, "bf16")
    for count, flops in step_flops(recipe.model, shape.tokens).items():
        rate = flops / seconds / 1e12
        mfu = f", MFU {rate / peak:.1%}" if peak else ""
        counted = "in full" if count == "full" else "as half"
        found.append([f"TFLOP/s, attention counted {counted}", f"{rate:,.3g}{mfu}", ""])
    if setting.device == "cuda":
        allocated = torch.cuda.max_memory_allocated() / 2**30
        reserved = torch.cuda.max_memory_reserved() / 2**30
        counted = stage_memory(job)[0].counted / 2**30 if job else 0.0
        text = f"{counted:.1f} GiB ({counted / allocated - 1:+.0%})" if job else "unknown GPU"
        found.append(["most memory allocated", f"{allocated:.1f} GiB", text])
        found.append(["most memory reserved", f"{reserved:.1f} GiB", ""])
    return found


def known_gpu(name: str) -> Gpu | None:
    """Return the planner's description of a device, or None if it has none."""
    if name == "cpu":
        return datasheet.load_gpu("cpu")
    return next((gpu for gpu in gpus() if any(each in name for each in gpu.device_names)), None)


def draw_batch(recipe: Recipe) -> list[MicroBatch]:
    """Return the micro-batches of a step, on the device; tokens and labels [b, s]."""
    generator = torch.Generator().manual_seed(0)
    device = get_accelerator().current_device_name()
    found = []
    for _ in range(recipe.micro_batches(1)):
        size = (recipe.batch.micro_sequences, recipe.model.sequence_length + 1)
        drawn = torch.randint(recipe.model.vocab_size, size, generator=generator).to(device)
        tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        found.append(MicroBatch(tokens, labels, MicroBatchInfo()))
    return found


def compared_shape(setting: Setting) -> Shape:
    """Return the model and batch that are compared with transformers.

    All models are in the memory of the GPU at the same time. With the 16 layers of llama/1b, they
    would need 78 GiB, so 8 layers are used.
    """
    shape = shape_of(setting, 2, 2)
    return shape if setting.small else replace(shape, sizes=(*shape.sizes, ("layers", 8)))


def compared_with_transformers(setting: Setting) -> Result:
    """Measure our step and that of transformers' Llama under DeepSpeed, in turns."""
    # Imported here because they import transformers, which most parts do not need.
    from benchmarks.device import rates
    from benchmarks.one_step import rows

    precision = "bf16" if setting.device == "cuda" else "fp32"
    cores = () if setting.device == "cuda" else tuple(cores_at_hand())
    with players({"": lambda: Player(rates.play, cores=cores)}) as playing:
        (matmul,) = playing[""].ask("large_matmul", precision)
    row = rows.compare(
        rows.Setting(rounds=ROUNDS, warm_up=2, cores=cores),
        compared_shape(setting),
        precision,
        matmul,
    )
    result = Result()
    result.say(f"{row['shape']}, {row['precision']}, two micro-batches, ZeRO-1.")
    table = [
        [name, f"{each['seconds']:.3f}", f"{each['tokens_per_second']:,.0f}",
         f"{each['tflops_full']:,.3g}", f"{each['memory_gb']:.1f}"]
        for name, each in row["contestants"].items()
    ]  # fmt: skip
    result.table(["", "seconds", "tokens/s", "TFLOP/s, in full", "GB"], table)
    eager, compiled = row["over_transformers_eager"], row["over_transformers_compiled"]
    memory = row["memory_over_transformers"]
    than_compiled = f" and {compiled:.2f} times as fast as compiled" if compiled else ""
    result.say(f"Ours is {eager:.2f} times as fast as transformers eager{than_compiled}, with "
               f"{memory:.2f} of the memory.")  # fmt: skip
    say_if_not_compiled(result)
    return result


def say_if_not_compiled(result: Result) -> None:
    """Say that no contestant is compiled, on a machine without a compiler."""
    if not can_compile():
        result.say(f"Nothing is compiled: `{compiler()}` or Python's headers are missing on this "
                   f"machine, and torch.compile needs them.")  # fmt: skip


def device_file(setting: Setting) -> Result:
    """Write the planner's file of this GPU into the output folder."""
    from benchmarks.device import device_file as files  # imports transformers, as above
    from benchmarks.one_step import rows

    name = device_name(setting.device)
    gpu = known_gpu(name)
    key = (
        gpu.name if gpu else re.sub(r"[^A-Za-z0-9]+", "-", name.removeprefix("NVIDIA ")).strip("-")
    )
    folder = setting.results.parent / "gpus"
    folder.mkdir(exist_ok=True)
    for source in FOLDER.glob("*.toml"):
        shutil.copy(source, folder)
    cores = () if setting.device == "cuda" else tuple(cores_at_hand())
    found = files.calibrate(
        key,
        None if gpu else FALLBACK,
        rows.Setting(rounds=ROUNDS, cores=cores),
        folder,
        shapes=(shape_of(setting, 2, 2),) if setting.small else (),
    )
    for other in folder.glob("*.toml"):
        if other.name != Path(found["file"]).name:
            other.unlink()  # only the measured one is to be copied into the repository
    result = Result()
    result.say(f"`{found['file']}`: {found['products']} matrix products, predicted with a mean "
               f"error of {found['mean_error']:.1%}.")  # fmt: skip
    table = [
        [each["shape"], f"{each['predicted_seconds']:.3f}", f"{each['measured_seconds']:.3f}",
         f"{each['error']:+.1%}"]
        for each in found["steps"]
    ]  # fmt: skip
    result.table(["step", "predicted, s", "measured, s", "error"], table)
    say_if_not_compiled(result)
    if not gpu:
        result.say(f"The planner has no datasheet of {name}, so its file has that of {FALLBACK}: "
                   f"replace the datasheet's numbers in the file.")  # fmt: skip
    return result
