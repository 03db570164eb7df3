"""Breadcrumbs: no long phase of the engine may look like a hang."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from recipes.training.engine.engine import Engine, PipelinedEngine, SequentialEngine
from recipes.training.supervision.breadcrumb import Breadcrumb

MICRO_BATCHES = 3


class Recorder(Breadcrumb):
    """Breadcrumb that records activities, and the rank's patience while data are read."""

    def __init__(self):
        super().__init__()
        self.activities: list[str] = []
        self.patience: list[bool] = []

    def note(self, doing: str, **details: int | None) -> None:
        super().note(doing, **details)
        self.activities.append(doing)

    def data(self):
        for _ in range(MICRO_BATCHES):
            self.patience.append(self.patient)
            yield mock.Mock()


def engine_of(kind: type[Engine], crumb: Breadcrumb, **parts: object) -> Engine:
    engine = kind.__new__(kind)
    engine.crumb = crumb
    vars(engine).update(parts)
    return engine


def test_a_sequential_engine_notes_each_micro_batch_that_it_validates() -> None:
    crumb, seen = Recorder(), []

    def forward(*_: object) -> torch.Tensor:
        seen.append((crumb.doing, crumb.micro_batch, crumb.patient, crumb.count))
        return torch.ones(())

    engine = engine_of(
        SequentialEngine, crumb, wrapped=mock.Mock(side_effect=forward), _mean=lambda losses: 2.0
    )
    assert engine.evaluate(crumb.data()) == 2.0
    activities = [("validation pass", number, False) for number in range(MICRO_BATCHES)]
    assert [each[:3] for each in seen] == activities
    assert sorted({each[3] for each in seen}) == [each[3] for each in seen]  # progress each time
    assert crumb.patience == [True] * MICRO_BATCHES and not crumb.patient


def test_a_pipelined_engine_waits_for_the_disk_before_it_validates() -> None:
    crumb = Recorder()
    wrapped = SimpleNamespace(micro_batches=MICRO_BATCHES, eval_batch=None)
    engine = engine_of(PipelinedEngine, crumb, wrapped=wrapped, _run=lambda *_: torch.ones(()))
    assert engine.evaluate(crumb.data()) == 1.0
    assert crumb.patience == [True] * MICRO_BATCHES and not crumb.patient


def test_replicas_are_compared_with_a_note_for_each_kind() -> None:
    crumb = Recorder()
    engine = engine_of(
        SequentialEngine,
        crumb,
        wrapped=SimpleNamespace(device="cpu"),
        _copies=lambda: [SimpleNamespace(kind=kind) for kind in ("tensor ranks", "data ranks")],
    )
    with mock.patch(
        "recipes.training.engine.engine.differing_replicas", lambda groups, _: list(groups)
    ):
        engine.differing_replicas()
    assert crumb.activities == [
        "comparing replicas of tensor ranks",
        "comparing replicas of data ranks",
    ]


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_is_loaded_with_a_note_for_each_tensor(weights_only: bool) -> None:
    crumb = Recorder()
    sharding = SimpleNamespace(local_elements=lambda *_, **__: "elements")
    fragments = [SimpleNamespace(name=name, elements=range(2)) for name in ("head", "blocks.0")]

    def restore(read, **_: object) -> None:
        assert [read("weight", fragment) for fragment in fragments] == ["elements"] * 2

    state = SimpleNamespace(
        restore=restore,
        parameters={each.name: SimpleNamespace(sharding=sharding) for each in fragments},
    )
    axis = SimpleNamespace(rank=0, size=1)
    engine = engine_of(SequentialEngine, crumb, state=state, axis=axis)
    engine.load(mock.Mock(), weights_only=weights_only)
    assert crumb.activities == ["loading weight of head", "loading weight of blocks.0"]
