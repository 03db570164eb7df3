"""The engine keeps as many micro-batches in flight as the order says, and records its passes."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import changed, quick_and_long, selected, small_recipe
from tests.pipeline.test_order import most_in_flight
from tests.ranks import run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.engine.engine import Engine
from threefold.pipeline.engine import COMPUTE, ScheduledEngine
from threefold.prove.layouts import SCHEDULES
from threefold.prove.training import many_cases, start, train_step
from threefold.run_folder.folder import RunFolder
from threefold.tracking.profiler import TimelineRecorder

STAGES, MICRO_BATCHES = 4, 8
QUICK = ("interleaved x 2", "zb-v")
aten = torch.ops.aten
NEEDS_THE_VALUES = {  # on the host: a GPU is waited for
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
}


class Waiting(TorchDispatchMode):
    """Note the engine's activity whenever the host needs a value that the device computes."""

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine, self.found = engine, set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function in NEEDS_THE_VALUES:
            self.found.add(self.engine.crumb.doing)
        return function(*arguments, **(keywords or {}))


def count_in_flight(engine: ScheduledEngine) -> list[int]:
    """Record the number of micro-batches in flight in all chunks after each pass."""
    held = []

    @contextmanager
    def observe(instruction: PipeInstruction) -> Iterator[None]:
        yield
        if type(instruction) in COMPUTE.values():
            held.append(len(engine.in_flight) + len(engine.deferred))

    engine.observers.append(observe)
    return held


def chunks_of(schedule: str) -> int:
    """Return the number of virtual stages of a stage."""
    default = 1 if schedule in ("1f1b", "zb-h1", "gpipe") else 2
    return SCHEDULES[schedule].get("virtual_stages", default)


def schedules_worker(corpus: str, folder: str, schedules: list[str]) -> dict[str, dict[str, Any]]:
    """Return the maximum in flight, measured and according to the order, for each schedule."""
    world, found = LaunchEnvironment.from_environment(os.environ), {}
    with many_cases() as begin:
        for name in schedules:
            begin()
            layout = SCHEDULES[name]
            table = changed(
                small_recipe(Path(corpus)),
                model__layers=STAGES * chunks_of(name),
                layout={"pipeline": STAGES, **layout},
                batch={"global_sequences": MICRO_BATCHES, "micro_sequences": 1},
                tracking__timeline_step=1,
                tracking__timeline_steps=2,
            )
            recipe = parse_recipe(table, "test")
            engine, data = start(recipe, world)
            held = count_in_flight(engine.wrapped)
            run = RunFolder(Path(folder) / name)
            if world.rank == 0:
                run.path.mkdir()
            shown: list[tuple[int, str, Path]] = []

            def show(*each: Any, shown: list[Any] = shown) -> None:
                shown.append(each)

            recorder = TimelineRecorder(engine, recipe, recipe.parallel_dims(world), run, show=show)
            waiting = Waiting(engine)
            for step, mode in ((1, nullcontext()), (2, waiting)):
                with recorder.recorded(step), mode:
                    train_step(engine, data, step)
                recorder.write_after(step)
            assert shown == (
                [(2, "timeline", run.path / "timeline.svg")] if world.rank == 0 else []
            )
            pipeline = engine.wrapped.pipeline
            found[name] = {
                "held": max(held),
                "ordered": most_in_flight(pipeline.orders[world.rank]),
                "waited in": waiting.found,
            }
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(
    corpus: Path, runs: Path, request: pytest.FixtureRequest
) -> list[dict[str, dict[str, Any]]]:
    test = test_the_engine_keeps_as_many_in_flight_as_the_order_says
    return run_ranks(
        STAGES, schedules_worker, str(corpus), str(runs), selected(request, test, "name")
    )


MOST = {  # chunks in flight on each stage, as the papers count them
    "1f1b": [4, 3, 2, 1],
    "interleaved x 2": [11, 9, 7, 5],
    "interleaved x 3": [15, 13, 11, 9],
    "zb-h1": [4, 4, 4, 4],
    "zb-v": [8, 8, 8, 8],
    "dualpipev": [9, 9, 9, 9],
    "gpipe": [8, 8, 8, 8],
}


@pytest.mark.parametrize("name", quick_and_long(QUICK, SCHEDULES))
def test_the_engine_keeps_as_many_in_flight_as_the_order_says(
    name: str, found: list[dict[str, dict[str, Any]]]
) -> None:
    assert [stage[name]["held"] for stage in found] == MOST[name]
    assert [stage[name]["ordered"] for stage in found] == MOST[name]


@pytest.mark.parametrize("name", quick_and_long(QUICK, SCHEDULES))
def test_the_host_waits_for_no_device_before_the_update(
    name: str, found: list[dict[str, dict[str, Any]]]
) -> None:
    assert [stage[name]["waited in"] for stage in found] == STAGES * [{"OptimizerStep"}]


@pytest.mark.parametrize("name", quick_and_long(QUICK, SCHEDULES))
def test_the_measured_timeline_has_every_pass_of_every_rank(
    name: str, found: list[dict[str, dict[str, Any]]], runs: Path
) -> None:
    assert (runs / name / "timeline.svg").read_text().count("<path") > 2 * len(found)
    assert not (runs / name / "events.jsonl").exists()  # no warning
    events = json.loads((runs / name / "timeline.json").read_text())["traceEvents"]
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert ranks == {rank: f"rank {rank}: pipeline {rank}, data 0, tensor 0" for rank in range(4)}
    passes = Counter((e["pid"], e["cat"], e["args"]["step"]) for e in events if e["ph"] == "X")
    each = MICRO_BATCHES * chunks_of(name)
    for rank in range(STAGES):
        for step in (1, 2):
            assert passes[rank, "forward", step] == passes[rank, "backward", step] == each
            assert passes[rank, "weight", step] == (each if name.startswith("zb") else 0)
    of_rank = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(of_rank))
