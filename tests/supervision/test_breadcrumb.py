"""Breadcrumbs: no long phase of the engine may look like a hang."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from models.attention import ModelAxes
from models.config import ModelConfig
from models.layer_specs import VocabularyTable
from models.parallel.collectives import TensorAxis
from threefold.engine.engine import Engine, StageEngine, Zero3Engine
from threefold.supervision.hang_report import Breadcrumb

MICRO_BATCHES = 3
SIZES: dict[str, Any] = {
    "layers": 1, "hidden_size": 8, "heads": 1, "kv_heads": 1, "ffn_hidden_size": 8,
    "vocab_size": 16, "sequence_length": 4, "norm": "rmsnorm", "positions": "rope",
    "rope_theta": 1e4, "activation": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip


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


def test_a_zero3_engine_notes_each_micro_batch_that_it_validates() -> None:
    crumb, seen = Recorder(), []
    module = torch.nn.ModuleList([VocabularyTable(ModelConfig(**SIZES), TensorAxis())])

    def forward(*_: object) -> torch.Tensor:
        seen.append((crumb.doing, crumb.micro_batch, crumb.patient, crumb.count))
        module[0].observe(torch.ones(2, 1, 4))
        return torch.ones(())

    wrapped = mock.Mock(side_effect=forward, module=module)
    engine = engine_of(
        Zero3Engine,
        crumb,
        wrapped=wrapped,
        axes=ModelAxes(),
        sum_over_ranks=lambda sums: sums,
    )
    assert engine.evaluate(crumb.data()) == 1.0
    activities = [("validation pass", number, False) for number in range(MICRO_BATCHES)]
    assert [each[:3] for each in seen] == activities
    assert sorted({each[3] for each in seen}) == [each[3] for each in seen]  # progress each time
    assert crumb.patience == [True] * MICRO_BATCHES and not crumb.patient


def test_a_stage_engine_waits_for_the_disk_before_it_validates() -> None:
    crumb = Recorder()
    wrapped = mock.Mock(micro_batches=MICRO_BATCHES)

    def run(_: object, micro_batches: list, *, scores: list[torch.Tensor]) -> None:
        scores += [torch.full((2, 1, 4), 1.0 + number) for number in range(len(micro_batches))]

    engine = engine_of(
        StageEngine,
        crumb,
        wrapped=wrapped,
        axes=ModelAxes(),
        sum_over_ranks=lambda sums: sums,
        _run=run,
    )
    assert engine.evaluate(crumb.data()) == 2.0  # the mean of 1, 2 and 3
    assert crumb.patience == [True] * MICRO_BATCHES and not crumb.patient


def test_replicas_are_compared_with_a_note_for_each_kind() -> None:
    crumb = Recorder()
    engine = engine_of(
        Zero3Engine,
        crumb,
        wrapped=SimpleNamespace(device="cpu"),
        _copies=lambda: [SimpleNamespace(kind=kind) for kind in ("tensor ranks", "data ranks")],
    )
    with mock.patch("threefold.engine.engine.diverged_replicas", lambda groups, _: list(groups)):
        engine.diverged_replicas()
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
    engine = engine_of(Zero3Engine, crumb, state=state, axes=ModelAxes(), average=None)
    engine.load(mock.Mock(), weights_only=weights_only)
    assert crumb.activities == ["loading weight of head", "loading weight of blocks.0"]
