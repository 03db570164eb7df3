"""DeepSpeed neither synchronises the device for timers nor collects garbage for reports."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.utils.timer import NoopTimer

from tests.conftest import changed, small_recipe
from tests.ranks import run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.prove.training import many_cases, start, train_step

CONFIGS = ("zero1_fp32", "zero1_bf16", "zero2_fp32", "zero3_fp32")
STEPS = 4  # DeepSpeed's throughput timer starts with the third


def worker(corpus: str, timed: str) -> dict[str, tuple[int, str, int]]:
    """Return the number of device synchronisations, the class of the timers, and kept events."""
    found = {}
    with many_cases() as begin:
        for config in (*(f"ds_configs/{name}.json" for name in CONFIGS), timed):
            begin()
            recipe = parse_recipe(changed(small_recipe(Path(corpus)), deepspeed=config), "test")
            engine, data = start(recipe, LaunchEnvironment.from_environment(os.environ))
            accelerator = type(get_accelerator())
            with mock.patch.object(accelerator, "synchronize") as synchronize:
                for step in range(1, STEPS + 1):
                    train_step(engine, data, step)
            timers = engine.wrapped.timers
            kept = sum(len(each.event_timers) for each in timers.get_timers().values())
            found[config] = (synchronize.call_count, type(timers).__name__, kept)
    return found


@pytest.fixture(scope="module")
def found(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    config = json.loads(Path("ds_configs/zero1_fp32.json").read_text())
    file = tmp_path_factory.mktemp("configs") / "timed.json"
    file.write_text(json.dumps(config | {"wall_clock_breakdown": True}))
    (ranks, _) = run_ranks(2, worker, str(corpus), str(file), seconds=120)
    return {Path(name).stem: each for name, each in ranks.items()}


@pytest.mark.parametrize("config", [*CONFIGS, "timed"])
def test_a_step_neither_waits_for_the_device_nor_keeps_times(config: str, found: dict) -> None:
    assert found[config] == (0, NoopTimer.__name__, 0)


def reports_of_start(corpus: str) -> tuple[int, int]:
    """Return the numbers of memory reports after an engine has started, and after one more."""
    recipe = changed(small_recipe(Path(corpus)), deepspeed="ds_configs/zero1_bf16.json")
    with mock.patch.object(bf16_optimizer, "see_memory_usage") as report, many_cases() as begin:
        begin()
        start(parse_recipe(recipe, "test"), LaunchEnvironment.from_environment(os.environ))
        during = report.call_count
        bf16_optimizer.see_memory_usage("afterwards")
        return during, report.call_count


def test_no_memory_is_reported_while_an_engine_starts(corpus: Path) -> None:
    """Each report would first collect garbage, twice per bucket of gradients."""
    assert run_ranks(1, reports_of_start, str(corpus)) == [(0, 1)]
