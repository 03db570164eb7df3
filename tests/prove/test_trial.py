"""A proof trains many models in one process; none of them slows the next one down."""

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.pipeline import gradients
from threefold.prove.training import many_cases, start, train_step

STAGES = {stage: {"deepspeed": f"ds_configs/zero{stage}_fp32.json"} for stage in (1, 2, 3)}
FAULTS: dict[str, contextlib.AbstractContextManager] = {
    "hooks keep the engine": mock.patch.object(gradients, "ref", lambda object: lambda: object),
    "nothing is skipped": mock.patch.object(gc, "freeze"),
}
MAX_OBJECTS = 1_000  # that a garbage collection visits before a case; a model has more


def freeing_worker(corpus: str) -> dict[Any, tuple[bool, int]]:
    """Run two cases each, with every ZeRO stage and with faults.

    Returns:
        Whether the model of the last case is freed, and the number of objects that the next garbage
        collection would visit.
    """
    world = join_world()

    def two_cases(changes: dict[str, Any]) -> tuple[bool, int]:
        with many_cases() as begin:
            for _ in range(2):
                begin()
                recipe = parse_recipe(
                    changed(small_recipe(Path(corpus)), model__layers=1, **changes), "test"
                )
                engine, data = start(recipe, world)
                train_step(engine, data, 1)
                module = weakref.ref(engine.wrapped.module)
                del engine, data
            begin()
        return module() is None, len(gc.get_objects())

    found: dict[Any, tuple[bool, int]] = {n: two_cases(changes) for n, changes in STAGES.items()}
    for name, fault in FAULTS.items():
        gc.unfreeze()
        with fault:
            found[name] = two_cases(STAGES[1])
    return found


@pytest.fixture(scope="module")
def left(corpus: Path) -> dict[Any, tuple[bool, int]]:
    return run_ranks(2, freeing_worker, str(corpus))[0]


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_cases_leave_nothing_to_the_garbage_collector(
    stage: int, left: dict[Any, tuple[bool, int]]
) -> None:
    is_freed, objects = left[stage]
    assert objects < MAX_OBJECTS
    assert is_freed == (stage < 3)  # DeepSpeed's ZeRO-3 keeps its models


@pytest.mark.long
def test_leaks_are_noticed(left: dict[Any, tuple[bool, int]]) -> None:
    assert not left["hooks keep the engine"][0]
    assert left["nothing is skipped"][1] > MAX_OBJECTS
