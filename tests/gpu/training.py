"""Checks of losses: against the CPU, in every precision and layout, and after a killed run."""

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.gpu.runs import (
    Failure,
    Run,
    batched,
    cores,
    largest_difference,
    losses,
    overrides,
    rank_environment,
    start,
)
from tests.gpu.setting import Result, Setting
from threefold.runtime.launchers import free_port
from threefold.runtime.ranks import killed_with_parent

SAME = 1e-4  # relative, of losses in fp32
NEAR = {"bf16": 0.03, "fp16": 0.1}  # of losses in fp32; fp16 may skip its first steps
PRECISIONS = {  # run -> file of ds_configs/
    "bf16, ZeRO-1": "zero1_bf16",
    "bf16, ZeRO-2": "zero2_bf16",
    "bf16, ZeRO-3": "zero3_bf16",
    "fp16, ZeRO-1": "zero1_fp16",
    "fp32, ZeRO-3": "zero3_fp32",
}
RECIPES = ("tiny-moe", "tiny-mtp", "tiny-muon", "tiny-window", "tiny-postnorm", "tiny-mla",
           "tiny-moe-bias", "tiny-mup-256")  # fmt: skip
SMALL_RECIPES = ("tiny-postnorm", "tiny-muon")
CORES_PER_RECIPE = 5  # its three runs
# Rounding differs between devices. Routers and norms of outputs amplify the difference from 1e-7 in
# the first steps to 1e-3 after 20 steps, so that fewer steps are compared.
COMPARED_STEPS = dict.fromkeys(
    ("tiny-moe", "tiny-moe-bias", "tiny-mla", "tiny-mtp", "tiny-postnorm"), 5
)
RESUME = 60, 10, 25  # steps, steps between saves, and steps before the kill
# Eight blocks: two chunks on each of four stages. Nothing is compiled, which would take most of the
# time of a run of few steps.
LAYOUT_SIZES = {"model__layers": 8, "training__steps": 5, "batch__micro_sequences": 1,
                "training__compile": False}  # fmt: skip
EXPERTS = {
    "model__experts": '{count = 4, per_token = 2, ffn_hidden_size = 128, router = "softmax", '
    "normalize = true, balance_loss = 0.01}"
}
MAX_LAYOUT_DIFFERENCE = 1e-5  # relative, of losses in fp32
SMALL_LAYOUTS = {2: ("pipeline 2, 1f1b", "tensor 2", "experts on 2"), 4: ("pipeline 2 x tensor 2",)}
MAX_LAYOUTS_AT_A_TIME = 5  # on a shared GPU, which its processes use in turn
PROBE_SECONDS = 18  # most of it to import torch
NCCL_PROBE = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
number = torch.ones(1, device="cuda")
dist.all_reduce(number)
assert number.item() == 2
dist.destroy_process_group()
"""
VARIANT_SECONDS = 120  # after which one of the compared runs is ended
SMALL_RESUME = 12, 4, 9  # the save of step 8 waits for that of step 4


def fp32_losses(setting: Setting) -> Result:
    """Compare the GPU's losses with the CPU's over 20 steps."""
    settings = overrides(setting)
    here = start(setting, "fp32", settings)
    there = start(setting, "fp32-cpu", settings, device="cpu")
    found, expected = losses(here.finish()), losses(there.finish())
    result = Result()
    result.say(f"Loss of step 1: {found[0]:.6f}, of step {len(found)}: {found[-1]:.6f}.")
    difference = largest_difference(found, expected)
    result.check(
        difference <= SAME,
        f"fp32 losses equal those of the CPU: difference {difference:.1e}, at most {SAME:.0e}",
    )
    result.check(found[-1] < found[0], "the loss falls")
    return result


def precisions(setting: Setting) -> Result:
    """Check in bf16 and fp16 and with ZeRO-1 to 3 that losses fall and stay near those of fp32."""
    files = dict(PRECISIONS)
    if setting.device == "cpu":
        files.pop("fp16, ZeRO-1")  # not supported on CPUs
    if setting.small:
        files = {name: files[name] for name in ("bf16, ZeRO-1", "fp32, ZeRO-3")}
    runs = {"fp32, ZeRO-1": start(setting, "precision-fp32", overrides(setting))}
    for name, file in files.items():
        settings = overrides(setting, deepspeed=f"ds_configs/{file}.json")
        runs[name] = start(setting, f"precision-{file}", settings)
    expected = losses(runs.pop("fp32, ZeRO-1").finish())
    result = Result()
    result.table(["precision", "first loss", "last loss", "to fp32", "limit", "same"], [])
    for name, run in runs.items():
        compare(result, name, run, expected, limit=NEAR.get(name[:4], SAME))
        setting.save(result)
    return result


def recipes(setting: Setting) -> Result:
    """Train recipes of models that differ from Llama, in fp32 as on the CPU, and in bf16."""
    result = Result()
    result.table(["recipe", "first loss", "last loss", "to the reference", "limit", "same"], [])
    names = SMALL_RECIPES if setting.small else RECIPES
    for group in batched(names, max(1, cores() // CORES_PER_RECIPE)):
        runs = {}
        for name in group:
            settings = overrides(setting, layout__expert=1)
            bf16 = [*settings, "deepspeed=ds_configs/zero1_bf16.json"]
            recipe = f"recipes/{name}.toml"
            runs[name] = (
                start(setting, f"{name}-cpu", settings, device="cpu", recipe=recipe),
                start(setting, name, settings, recipe=recipe),
                start(setting, f"{name}-bf16", bf16, recipe=recipe),
            )
        for name, (on_cpu, here, in_bf16) in runs.items():
            fp32 = f"{name}, fp32; the CPU"
            compare(result, fp32, here, on_cpu, limit=SAME, steps=COMPARED_STEPS.get(name))
            compare(result, f"{name}, bf16; the CPU in fp32", in_bf16, on_cpu, limit=NEAR["bf16"])
            setting.save(result)
    return result


def compare(
    result: Result,
    name: str,
    run: Run,
    expected: Sequence[float] | Run,
    *,
    limit: float,
    steps: int | None = None,
) -> None:
    """Wait for a variant and add its row; a variant that fails leaves the others alone.

    Args:
        result: its last table has the columns variant, first loss, last loss, difference, limit
            and verdict
        name: of the variant
        run: the variant
        expected: the run that the variant is compared with, or its losses
        limit: of the relative difference
        steps: number of first steps whose losses are compared; None: all
    """
    try:
        found = losses(run.finish(VARIANT_SECONDS))
        reference = losses(expected.finish()) if isinstance(expected, Run) else expected
        difference = largest_difference(found[:steps], reference[:steps])
    except Failure as failure:
        print(failure)  # into the log of the part
        result.row([name, "failed", "", "", ""], failure=f"{name}: {failure}")
        return
    holds = found[-1] < found[0] and difference <= limit
    claim = f"{name}: the losses fall and differ by {limit:.0e} at most ({difference:.1e})"
    row = [name, f"{found[0]:.4f}", f"{found[-1]:.4f}", f"{difference:.1e}", f"{limit:.0e}"]
    result.row(row, failure="" if holds else claim)


def deterministic(setting: Setting) -> Result:
    """Check that two runs with `training.deterministic` have the same losses bit for bit."""
    pairs = {}
    for precision in ("bf16",) if setting.small else ("fp32", "bf16"):
        settings = overrides(
            setting,
            training__deterministic=True,
            training__steps=10,
            deepspeed=f"ds_configs/zero1_{precision}.json",
        )
        names = [f"deterministic-{precision}-{number}" for number in (1, 2)]
        pairs[precision] = [start(setting, name, settings) for name in names]
    result = Result()
    for precision, runs in pairs.items():
        one, other = ([(line["loss"], line["grad_norm"]) for line in run.finish()] for run in runs)
        result.check(one == other, f"{precision}: losses and gradient norms repeat bit for bit")
    return result


def resume(setting: Setting) -> Result:
    """Check that a run that is killed and resumed has the losses of an undisturbed run."""
    steps, every, kill_after = SMALL_RESUME if setting.small else RESUME
    settings = overrides(setting, training__steps=steps, checkpoint__every=every)
    undisturbed = start(setting, "undisturbed", settings)
    killed = start(setting, "killed", settings)
    done = killed.kill_after(kill_after)
    expected = undisturbed.finish()
    resumed = start(setting, "killed", settings)
    found = resumed.finish()
    result = Result()
    resumes = _resumed_steps(resumed)
    result.check(
        bool(resumes) and 0 < resumes[-1] <= done,
        f"killed after step {done}, the run resumes from the checkpoint of step {resumes[-1:]}",
    )
    steps_match = [line["step"] for line in found] == list(range(1, steps + 1))
    result.check(steps_match, f"each of the {steps} steps is recorded once")
    difference = largest_difference(losses(found), losses(expected))
    result.check(
        difference <= SAME,
        f"its losses equal those of an undisturbed run: difference {difference:.1e}",
    )
    return result


def _resumed_steps(run: Run) -> list[int]:
    """Return the steps from whose checkpoints the run was resumed, as its log says."""
    marker = "resumed after step "
    lines = run.logs[0].read_text(errors="replace").splitlines()
    return [int(line.split(marker)[1].split()[0].strip(",")) for line in lines if marker in line]


def layout_variants(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the layouts to compare with one rank: name -> changes of the recipe.

    A name that begins with "experts" is that of a model with experts.
    """
    two = {"layout__pipeline": 2}
    if ranks == 4:
        return {
            "pipeline 2 x tensor 2": two | {"layout__tensor": 2},
            "pipeline 2, ZeRO-2": two | {"deepspeed": "ds_configs/zero2_fp32.json"},
            "pipeline 4, zb-v": {"layout__pipeline": 4, "layout__schedule": "zb-v"},
            "tensor 2 x context 2": {"layout__tensor": 2, "layout__context": 2},
            "experts on 4": EXPERTS | {"layout__expert": 4},
        }
    context = {"layout__context": 2}
    return {
        "pipeline 2, 1f1b": two,
        "pipeline 2, interleaved": two | {"layout__schedule": "interleaved"},
        "pipeline 2, zb-h1": two | {"layout__schedule": "zb-h1"},
        "pipeline 2, zb-v": two | {"layout__schedule": "zb-v"},
        "pipeline 2, dualpipev": two | {"layout__schedule": "dualpipev"},
        "pipeline 2, gpipe": two | {"layout__schedule": "gpipe"},
        "tensor 2": {"layout__tensor": 2},
        "tensor 2, sequence parallel": {"layout__tensor": 2, "layout__sequence_parallel": True},
        "data": {},
        "data, ZeRO-2": {"deepspeed": "ds_configs/zero2_fp32.json"},
        "data, ZeRO-3": {"deepspeed": "ds_configs/zero3_fp32.json"},
        "context 2, gather": context,
        "context 2, ring": context | {"layout__context_attention": "ring"},
        "context 2, ulysses": context | {"layout__context_attention": "ulysses"},
        "experts on 2": EXPERTS | {"layout__expert": 2},
    }


def layouts(setting: Setting, ranks: str) -> Result:
    """Check that all schedules and axes have the losses of one rank.

    With fewer GPUs than ranks, all ranks share the first GPU. NCCL accepts this if each rank
    reports a host of its own, and then communicates through sockets.

    Args:
        setting: the machine and the sizes
        ranks: number of ranks, "2" or "4"
    """
    size, result = int(ranks), Result()
    share_gpu = size > setting.gpus
    if share_gpu and setting.device == "cuda" and (refusal := refused_by_nccl(setting)):
        return Result(skipped=f"NCCL accepts only one rank per GPU here: {refusal}")
    backend = "NCCL" if setting.device == "cuda" else "gloo"
    shared = ", all on the first GPU" if share_gpu and setting.device == "cuda" else ""
    result.say(f"{backend}, fp32, {size} ranks{shared}.")
    result.table(["layout", "first loss", "last loss", "to one rank", "limit", "same"], [])
    references = {
        name: start(setting, f"one-{name}", overrides(setting, **LAYOUT_SIZES | changes))
        for name, changes in (("dense", {}), ("experts", EXPERTS))
    }
    variants = layout_variants(size)
    if setting.small:
        variants = {name: variants[name] for name in SMALL_LAYOUTS[size]}
    at_a_time = max(1, min(MAX_LAYOUTS_AT_A_TIME, cores() // size))
    for group in batched(variants.items(), at_a_time):
        runs = {}
        for name, changes in group:
            settings = overrides(setting, **LAYOUT_SIZES | changes)
            folder = name.replace(", ", "-").replace(" ", "-")
            runs[name] = start(setting, folder, settings, ranks=size, share_gpu=share_gpu)
        for name, run in runs.items():
            reference = references["experts" if name.startswith("experts") else "dense"]
            compare(result, name, run, reference, limit=MAX_LAYOUT_DIFFERENCE)
            setting.save(result)
    return result


def refused_by_nccl(setting: Setting) -> str:
    """Let two ranks on one GPU add two numbers with NCCL; return the error, "" if it works."""
    port = free_port()
    probes = [
        subprocess.Popen(
            killed_with_parent([sys.executable, "-c", NCCL_PROBE]),
            env=rank_environment(setting, rank, 2, port, share_gpu=True),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    deadline, errors = time.monotonic() + PROBE_SECONDS, []
    for probe in probes:
        try:
            _, error = probe.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.wait()
            error = f"no answer within {PROBE_SECONDS} seconds"
        if probe.returncode != 0:
            lines = error.strip().splitlines() or ["no message"]
            errors.append(next((line for line in lines[::-1] if "NCCL" in line), lines[-1]))
    return errors[0] if errors else ""
