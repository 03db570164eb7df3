"""Garbage is not collected during imports or within a step."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from threefold.runtime.exits import (
    STEPS_BETWEEN_FULL_COLLECTIONS,
    collect_garbage,
    hold_garbage,
    pause_collection,
    resume_collection,
)


class Knot:
    """An object in a reference cycle, which only the collector can free."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_is_off_during_imports() -> None:
    pause_collection()
    assert not gc.isenabled()
    resume_collection()
    assert gc.isenabled() and gc.get_freeze_count() > 10_000


def test_garbage_is_collected_between_steps_only() -> None:
    hold_garbage()
    left = weakref.ref(Knot())
    for _ in range(10 * gc.get_threshold()[0]):  # far above the threshold of a collection
        Knot()
    assert left() is not None
    collect_garbage(STEPS_BETWEEN_FULL_COLLECTIONS + 1)
    assert left() is None
    assert len(gc.get_objects()) < 10_000  # existing objects are not scanned


def test_garbage_of_earlier_steps_is_left_to_a_full_collection() -> None:
    hold_garbage()
    knot = Knot()
    left = weakref.ref(knot)
    collect_garbage(1)  # the knot is still in use
    del knot
    collect_garbage(2)
    assert left() is not None
    collect_garbage(STEPS_BETWEEN_FULL_COLLECTIONS)
    assert left() is None
