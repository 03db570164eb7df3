"""Garbage waits for imports and for the ends of steps."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from recipes.training.runtime.garbage import (
    collect_garbage,
    hold_garbage,
    pause_collection,
    resume_collection,
)


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_waits_for_the_imports() -> None:
    pause_collection()
    assert not gc.isenabled()
    resume_collection()
    assert gc.isenabled() and gc.get_freeze_count() > 10_000


def test_within_a_step_nothing_is_collected_and_between_steps_what_has_come() -> None:
    hold_garbage()
    left = weakref.ref(Knot())
    for _ in range(10 * gc.get_threshold()[0]):  # many times what would begin a collection
        Knot()
    assert left() is not None
    collect_garbage()
    assert left() is None
    assert len(gc.get_objects()) < 10_000  # what is looked at each time
