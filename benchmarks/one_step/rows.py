"""Comparison of our step with transformers' Llama, in a row for each shape and precision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.one_step import contestants
from benchmarks.one_step.contestants import Entry
from benchmarks.one_step.shapes import Shape, can_compile, step_flops
from benchmarks.taking_turns import (
    Player,
    Turn,
    check_first_losses,
    median_seconds,
    players,
    ratio,
    take_turns,
)
from threefold.engine.build import DTYPES
from threefold.gpus.datasheet import peak_tflops
from threefold.runtime.cpu_matmuls import dtypes_without_instructions

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # relative difference of the first losses
IN_PRECISION = 0.9  # minimum share of matmul time in the row's precision
OURS, OURS_BARE = "ours", "ours_bare"
OUR_ENTRY = Entry("ours", keeps_memory=True)
OUR_BARE_ENTRY = Entry("ours", bare=True, keeps_memory=True)
EAGER, COMPILED = "transformers_eager", "transformers_compiled"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a measurement.

    rounds: number of timed rounds
    zero_stage: of all contestants under DeepSpeed
    who: "main", "bare" (bare loops too) or "all" (transformers' other way to bf16 too)
    cores: cores of the contestants; empty on a GPU
    kernels: number of kernels to list for each contestant
    memory_kept_by: processes that reuse memory, "ours" or "all"
    """

    rounds: int = 5
    warm_up: int = 2
    zero_stage: int = 1
    who: str = "main"
    cores: tuple[int, ...] = ()
    kernels: int = 0
    memory_kept_by: str = "ours"


def entries(setting: Setting, shape: Shape, precision: str) -> dict[str, Entry]:
    """Return the contestants by name, ours first; without a compiler only those that need none.

    In bf16 transformers' weights are fp32 under autocast on a CPU, where its bf16 weights would
    leave norms and losses in bf16, and as in our JSON on a GPU, where people train so. With experts
    they are bf16 everywhere, because autocast leaves the matmuls of transformers' experts in fp32.
    """
    has_experts = shape.recipe(precision).model.experts is not None
    usual = precision == "bf16" and bool(setting.cores) and not has_experts
    llama = partial(Entry, "transformers", keeps_memory=setting.memory_kept_by == "all")
    found = {
        OURS: OUR_ENTRY,
        EAGER: llama(autocast=usual),
        COMPILED: llama(autocast=usual, compiled=True),
    }
    if setting.who != "main":
        found |= {
            OURS_BARE: OUR_BARE_ENTRY,
            f"{EAGER}_bare": llama(autocast=usual, bare=True),
            f"{COMPILED}_bare": llama(autocast=usual, bare=True, compiled=True),
        }
    if setting.who == "all" and precision == "bf16":
        kind = "bf16_weights" if usual else "autocast"
        found |= {
            f"{EAGER}_{kind}": llama(autocast=not usual),
            f"{COMPILED}_{kind}": llama(autocast=not usual, compiled=True),
        }
    return {name: entry for name, entry in found.items() if can_compile() or not entry.compiled}


def matches(setting: Setting, names: Sequence[str]) -> list[list[str]]:
    """Return groups of contestants that take turns: all on a CPU, ours and one other on a GPU."""
    if setting.cores:
        return [list(names)]
    return [[OURS, name] for name in names if name != OURS]


def compare(
    setting: Setting, shape: Shape, precision: str, matmul: Mapping[str, float]
) -> dict[str, Any]:
    """Measure a row.

    matmul: measured TFLOP/s of large matrix products in this precision, by library

    Raises:
        AssertionError: the contestants have not computed the same, or not in this precision.
    """
    found = entries(setting, shape, precision)
    turns: dict[str, list[Turn]] = {}
    facts: dict[str, dict[str, Any]] = {}
    over: dict[str, float] = {}
    for names in matches(setting, list(found)):
        starts = {name: partial(start, setting, found[name], shape, precision) for name in names}
        with players(starts) as playing:
            taken = take_turns(playing, warm_up=setting.warm_up, rounds=setting.rounds)
            check_first_losses(taken, TOLERANCE[precision])
            timed = {name: each[setting.warm_up :] for name, each in taken.items()}
            over |= {
                name: ratio(timed[name], timed[OURS_BARE if name.endswith("_bare") else OURS])
                for name in names
                if name != OURS and (OURS_BARE in timed or not name.endswith("_bare"))
            }
            if OURS_BARE in timed:
                over[OURS] = ratio(timed[OURS], timed[OURS_BARE])
            for name in names:
                if name not in turns:
                    turns[name] = timed[name]
                    facts[name] = about(setting, playing[name], precision)
    rates = partial(speed, shape, precision, matmul)
    contestants = {name: rates(turns[name], facts[name]) for name in turns}
    more = {"matmul_tflops": dict(matmul), "memory_kept_by": setting.memory_kept_by}
    return row(shape, precision, over, contestants) | more


def start(setting: Setting, entry: Entry, shape: Shape, precision: str) -> Player:
    """Start a contestant in its own process."""
    more = {"zero_stage": setting.zero_stage}
    return Player(contestants.play, entry, shape, precision, more, cores=setting.cores)


def about(setting: Setting, player: Player, precision: str) -> dict[str, Any]:
    """Return a contestant's memory, device, matmul libraries and kernels after its steps.

    Raises:
        AssertionError: its matrix products are not in the row's precision, or in fp32 on a CPU
            without instructions for it.
    """
    (memory,), (device,) = player.ask("memory"), player.ask("device_name")
    (libraries,) = player.ask("gemm_libraries")
    if setting.cores:
        in_fp32 = DTYPES[precision] in dtypes_without_instructions()
        suffix = "fp32" if in_fp32 else precision
        named = sum(part for name, part in libraries.items() if name.endswith(suffix))
        assert named > IN_PRECISION, libraries
    found = {"memory_gb": memory / 1e9, "device": device, "gemm": libraries}
    if setting.kernels:
        (found["kernels"],) = player.ask("top_kernels", setting.kernels)
    return found


def speed(
    shape: Shape,
    precision: str,
    matmul: Mapping[str, float],
    turns: Sequence[Turn],
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Return a contestant's figures; `full` counts masked attention too, as published tables do."""
    seconds = median_seconds(turns)
    datasheet = peak_tflops(facts["device"], precision)
    found = {"seconds": seconds, "tokens_per_second": shape.tokens / seconds} | facts
    for count, flops in step_flops(shape.recipe(precision).model, shape.tokens).items():
        rate, suffix = flops / seconds / 1e12, "" if count == "causal" else "_full"
        found[f"tflops{suffix}"] = rate
        found[f"mfu_measured{suffix}"] = rate / max(matmul.values())
        found[f"mfu_datasheet{suffix}"] = rate / datasheet if datasheet else None
    return found


def row(
    shape: Shape,
    precision: str,
    over: Mapping[str, float],
    contestants: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the ratios of a row and the figures of its contestants.

    over: seconds of each by those of ours, both bare or both not; ours by its bare loop
    memory_over_transformers: ours by the lesser of theirs; the compiled one is missing without a
        compiler
    """
    memory = {name: each["memory_gb"] for name, each in contestants.items()}
    rivals = [name for name in over if name not in (OURS, OURS_BARE)]
    return {
        "shape": shape.name,
        "precision": precision,
        "over_transformers_eager": over[EAGER],
        "over_transformers_compiled": over.get(COMPILED),
        "memory_over_transformers": memory[OURS]
        / min(memory[name] for name in (EAGER, COMPILED) if name in memory),
        "engine_overhead": over[OURS] - 1 if OURS in over else None,
        **{f"over_{name}": over[name] for name in rivals},
        "contestants": dict(contestants),
    }
