"""The split of a step on real ranks: each part receives its own time, and nothing stays changed."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from models.transformer import Block
from tests.conftest import changed, quick_and_long
from tests.ranks import join_world, run_ranks
from tests.sweep.slow_parts import SLEEP_SECONDS, VirtualClock, slowed
from threefold.config.loading import parse_recipe
from threefold.engine.engine import Engine
from threefold.pipeline.stage import replaced
from threefold.prove.training import start
from threefold.sweep.breakdown import (
    PART_OF_INSTRUCTION,
    PartClock,
    instrumented_steps,
    part_of_collective,
    split_of_rank,
)
from threefold.sweep.trial import PARTS, SPLIT_STEPS, split_of_slowest

MAX_NOISE_SECONDS = 0.15  # other processes may use the cores
LEARNING_RATE = 1e-4
BLOCK_SECONDS = 0.06  # the margin is five times as long

ZERO_2, ZERO_3 = ({"deepspeed": f"ds_configs/zero{stage}_fp32.json"} for stage in (2, 3))
TENSOR = {"layout": {"tensor": 2}}
PIPELINE = {"layout": {"pipeline": 2}}
ZERO_BUBBLE = {"layout": {"pipeline": 2, "schedule": "zb-h1"}}
TIED = PIPELINE | {"model__tie_embeddings": True}

# layout -> changes of the recipe, and in which part a sleep counts on every rank
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "tensor": (
        TENSOR,
        {
            "pass": "compute", "backward pass": "compute", "collective": "tensor",
            "background collective": "tensor", "optimizer": "optimizer", "host": "other",
        },
    ),
    "tensor, ZeRO-3": (
        TENSOR | ZERO_3,  # with one data rank, ZeRO-2 would run as ZeRO-1
        {"pass": "compute", "collective": "tensor", "optimizer": "optimizer", "host": "other"},
    ),
    "data": ({}, {"pass": "compute", "wait": "data", "optimizer": "optimizer"}),
    "data, ZeRO-2": (
        ZERO_2,
        {"pass": "compute", "backward pass": "compute", "wait": "data", "optimizer": "optimizer"},
    ),
    "data, ZeRO-3": (
        ZERO_3,
        {"pass": "compute", "wait": "data", "optimizer": "optimizer", "host": "other"},
    ),
    "pipeline": (ZERO_BUBBLE, {"weight pass": "compute", "optimizer": "optimizer"}),
    "pipeline, tied": (TIED, {"collective": "optimizer"}),
}  # fmt: skip
QUICK_LAYOUTS = ("tensor", "data, ZeRO-3", "pipeline")


def engine_of(recipe: dict[str, Any]) -> tuple[Engine, list]:
    """Return an engine after its first step, and the micro-batches of a step."""
    engine, data = start(parse_recipe(recipe, "small"), join_world())
    batch = list(data.micro_batches(1))
    engine.train_step(batch, LEARNING_RATE)
    return engine, batch


def split_with_sleeps(
    recipe: dict[str, Any], sleeps: list[tuple[str, list[int]]]
) -> list[dict[str, float]]:
    """Return this rank's split without a sleep, and with each of some sleeps."""
    engine, batch = engine_of(recipe)
    usual = [quietest(engine, batch) for _ in range(3)]  # on a busy machine, few steps are quiet
    splits = [{part: min(split[part] for split in usual) for part in PARTS}]
    for part, ranks in sleeps:
        with slowed(engine, part, ranks):
            splits.append(quietest(engine, batch))
    return splits


def split_by_virtual_clock(recipe: dict[str, Any], sleeps: list[str]) -> list[dict[str, float]]:
    """Return this rank's split without a sleep, and with each of some sleeps on all ranks."""
    engine, batch = engine_of(recipe)
    clock = VirtualClock()
    with replaced(PartClock, "_now", lambda self: clock.read()):
        splits = [quietest(engine, batch)]
        for part in sleeps:
            with slowed(engine, part, [0, 1], clock.sleep):
                splits.append(quietest(engine, batch))
    return splits


def quietest(engine: Engine, batch: list) -> dict[str, float]:
    """Return the shortest time of each part in a few steps.

    The first one is left out: a stage waits for the other stages' update in the next step.
    """
    steps = instrumented_steps(engine, batch, LEARNING_RATE)[1:]
    return {part: min(step[part] for step in steps) for part in PARTS}


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the parts that have grown by more than noise."""
    grown = {part: after[part] - before[part] for part in PARTS}
    return {part: seconds for part, seconds in grown.items() if seconds > MAX_NOISE_SECONDS}


@pytest.mark.parametrize("layout", quick_and_long(QUICK_LAYOUTS, LAYOUTS))
def test_a_sleep_counts_to_its_part(layout: str, small: dict[str, Any]) -> None:
    changes, parts = LAYOUTS[layout]
    stages = changes.get("layout", {}).get("pipeline", 1)
    changes = changes | {"batch": {"global_sequences": 4, "micro_sequences": 2}}
    changes |= {"model__layers": stages}
    for splits in run_ranks(2, split_by_virtual_clock, changed(small, **changes), list(parts)):
        for (name, part), split in zip(parts.items(), splits[1:], strict=True):
            grown = growth(splits[0], split)
            assert grown == {part: pytest.approx(SLEEP_SECONDS, abs=0.01)}, name
        axis = layout.partition(",")[0]
        used = {"tensor": {"tensor"}, "data": {"data"}, "pipeline": {"pipeline", "bubble"}}
        for part in ("tensor", "data", "pipeline", "bubble"):
            assert (splits[0][part] > 0) == (part in used[axis]), (part, splits[0])


def test_a_slow_stage_makes_the_other_stage_wait(small: dict[str, Any]) -> None:
    sleeps = [("pass", [1]), ("send", [1]), ("optimizer", [1])]
    first, second = run_ranks(2, split_with_sleeps, changed(small, **PIPELINE), sleeps)
    own = ["compute", "pipeline", "optimizer"]
    # Under load, other parts may grow, too; the test above shows that a sleep counts to one part.
    for part, after in zip(own, second[1:], strict=True):
        assert part in growth(second[0], after)
    for after in first[1:]:
        assert "bubble" in growth(first[0], after)


def splits_with_slow_blocks(recipes: list[dict[str, Any]]) -> list[dict[str, float]]:
    splits = []
    for recipe in recipes:
        engine, batch = engine_of(recipe)
        for module in engine.wrapped.module.modules():
            if isinstance(module, Block):
                module.register_forward_pre_hook(lambda *_: time.sleep(BLOCK_SECONDS))
        splits.append(quietest(engine, batch))
    return splits


def test_the_stage_with_fewer_layers_waits_longer(small: dict[str, Any]) -> None:
    layouts = [{"pipeline": 2, "layers_per_stage": blocks} for blocks in ([2, 2], [1, 3])]
    recipes = [changed(small, model__layers=4, layout=layout) for layout in layouts]
    (even, light), (_, heavy) = run_ranks(2, splits_with_slow_blocks, recipes)
    micro_batches = 4
    assert light["bubble"] > even["bubble"] + (micro_batches - 1) * BLOCK_SECONDS
    assert light["bubble"] > heavy["bubble"] + micro_batches * BLOCK_SECONDS
    assert split_of_slowest([light, heavy], 1.0).rank == 1


def changed_objects_of(recipes: list[dict[str, Any]]) -> list[list[str]]:
    """Return the attributes that instrumented steps of each recipe leave changed."""
    return [changed_objects(*engine_of(recipe)) for recipe in recipes]


def changed_objects(engine: Engine, batch: list) -> list[str]:
    """Return the attributes that instrumented steps leave changed, the last of which fails."""
    objects = {
        "process groups": dist.ProcessGroup, "works": dist.Work, "torch.distributed": dist,
        "engine": engine.wrapped, "optimizer": engine.wrapped.optimizer,
        "ZeRO-3": PartitionedParameterCoordinator,
    }  # fmt: skip
    names = {name: set(vars(value)) for name, value in objects.items()}
    functions = {
        (name, key): each
        for name, value in objects.items()
        for key, each in vars(value).items()
        if callable(each)
    }
    observers = list(getattr(engine.wrapped, "observers", ()))
    wrong = []
    for fails in (False, True):
        if fails:
            with pytest.raises(RuntimeError, match="as injected"):
                split_of_rank(engine, UnreadableBatch(batch), LEARNING_RATE)
        else:
            split_of_rank(engine, batch, LEARNING_RATE)
        wrong += [name for name, value in objects.items() if set(vars(value)) - names[name]]
        wrong += [
            f"{name}: {key}"
            for (name, key), each in functions.items()
            if vars(objects[name]).get(key) is not each
        ]
        if list(getattr(engine.wrapped, "observers", ())) != observers:
            wrong.append("observers")
    return wrong


class UnreadableBatch(list):
    """Micro-batches whose reading fails."""

    def __iter__(self) -> Any:
        raise RuntimeError("as injected")


def test_nothing_stays_replaced(small: dict[str, Any]) -> None:
    recipes = [changed(small, **changes) for changes in ({}, ZERO_2, ZERO_3)]
    assert run_ranks(2, changed_objects_of, recipes) == [[[]] * 3] * 2


def uncounted_seconds(recipe: dict[str, Any]) -> list[float]:
    """Return the sum of the parts minus the duration of each instrumented step."""
    engine, batch = engine_of(recipe)
    train, durations = engine.train_step, []

    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        train(*arguments)
        durations.append(time.perf_counter() - began)

    engine.train_step = timed  # type: ignore[method-assign, assignment]
    steps = instrumented_steps(engine, batch, LEARNING_RATE)
    assert len(steps) == len(durations) == SPLIT_STEPS
    return [sum(step.values()) - each for step, each in zip(steps, durations, strict=True)]


def test_the_parts_cover_the_step(small: dict[str, Any]) -> None:
    for differences in run_ranks(2, uncounted_seconds, small):
        assert min(differences) == pytest.approx(0.0, abs=0.001)
        assert min(differences) >= 0


def test_the_clock_counts_every_moment_once() -> None:
    clock = PartClock(torch.device("cpu"))
    before = time.perf_counter()
    clock.begin_step()
    began = time.perf_counter()
    with clock.part("compute"):
        time.sleep(0.03)
        with clock.part("tensor"):
            time.sleep(0.05)
            assert clock.current == "tensor"
        time.sleep(0.01)
    time.sleep(0.02)
    ended = time.perf_counter()
    seconds = clock.end_step()
    after = time.perf_counter()
    assert ended - began - 1e-6 <= sum(seconds.values()) <= after - before + 1e-6
    expected = {"compute": 0.04, "tensor": 0.05, "other": 0.02}
    assert all(seconds[part] >= each for part, each in expected.items())
    assert {part for part, each in seconds.items() if each} == set(expected)


@pytest.mark.parametrize(
    ("kind", "current", "part"),
    [
        ("tensor", "compute", "tensor"),
        ("tensor", "bubble", "pipeline"),  # a message that arrives in parts
        ("tensor", "optimizer", "optimizer"),
        ("data", "compute", "data"),
        ("data", "optimizer", "data"),
        ("stages", "data", "optimizer"),  # tied gradients
        ("stages", "other", "other"),
        ("other", "compute", "compute"),
    ],
)  # fmt: skip
def test_collectives_count_as_in_the_plan(kind: Any, current: str, part: str) -> None:
    assert part_of_collective(kind, current) == part


def test_every_instruction_but_the_reading_of_data_has_a_part() -> None:
    from threefold.pipeline.engine import ScheduledEngine

    instructions = {each.__name__ for each in ScheduledEngine._INSTRUCTION_MAP}
    named = {each.__name__ for each in PART_OF_INSTRUCTION}
    assert instructions - named == {"LoadMicroBatch"}
    assert set(PART_OF_INSTRUCTION.values()) <= set(PARTS)
