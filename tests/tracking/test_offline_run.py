"""What an offline run of Weights & Biases holds, read from its file."""

import base64
import hashlib
import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from wandb.proto import wandb_internal_pb2

from tests.conftest import changed, small_recipe
from threefold.config.loading import parse_recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress
from threefold.tracking.tracker import Tracker, open_tracker
from threefold.tracking.weights_and_biases import TaskTable, WandbThread

PLANS = {41: {"step_seconds": 0.25, "mfu": 0.5}, 42: {"step_seconds": 0.5, "mfu": 0.25}}
BLOCK, HEADER, FILE_HEADER = 32768, 7, 7  # bytes, of LevelDB's log format


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: LevelDB's log format after a header."""
    data, position, parts = file.read_bytes(), FILE_HEADER, b""
    while position + HEADER <= len(data):
        if (rest := BLOCK - position % BLOCK) < HEADER:
            position += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        position += HEADER
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def values(items: Any) -> dict[str, Any]:
    """Return the values of a history record or of a configuration."""
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 2.0, "learning_rate": 1e-3, "step_seconds": 0.5,
        "tokens_per_second": 1000.0, "tflops_per_gpu": 0.01, "mfu": None, **more,
    }  # fmt: skip


def train(tracker: Tracker, folder: RunFolder) -> None:
    """Report two steps, with evaluations, a picture, a text, a checkpoint and an event."""
    scores = {"tasks/next_line/accuracy": 0.25, "tasks/next_line/accuracy_per_byte": 0.5}
    validation = {"validation/code/loss": 2.1, "validation/code/bits_per_byte": 1.1}
    tracker.step(line(41, **validation, **scores))
    tracker.step(line(42, **{"tasks/next_line/accuracy": 0.75, "tasks/cloze/accuracy": 1.0}))
    (folder.path / "timeline.svg").write_text("<svg><text>passes</text></svg>")
    tracker.show(42, "timeline", folder.path / "timeline.svg")
    (folder.path / "table.txt").write_text("aten::mm <0.5>")
    tracker.show(42, "profile", folder.path / "table.txt")
    tracker.show(42, "absent", folder.path / "absent.svg")
    checkpoint = folder.checkpoints / "step-0000042"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights-00000.safetensors").write_bytes(b"weights")
    tracker.saved(42, checkpoint)
    tracker.skip(43, "the loss is nan", range(8, 16))


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[Any]]:
    """Return the folder of a resumed run, and the records of its offline run."""
    folder = RunFolder(tmp_path_factory.mktemp("offline") / "run")
    folder.hold()
    table = changed(small_recipe(corpus), tracking__mode="offline", tracking__artifacts=True)
    earlier = [line(step, **{"tasks/next_line/accuracy": 0.0}) for step in (38, 39, 40)]
    # W&B writes tables into temporary folders, which only the orderly end of a process removes.
    temporary = mock.patch.object(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    with mock.patch.object(WandbThread, "SECONDS_TO_FINISH", 600), temporary, open_tracker(
        parse_recipe(table, "test"), folder, 0, start=Progress(40, 320), changed={},
        metrics=earlier, predicted=PLANS.__getitem__,
    ) as tracker:  # fmt: skip
        train(tracker, folder)
    (log,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    return folder, list(records(log))


def history(found: list[Any]) -> list[dict[str, Any]]:
    return [values(r.history.item) for r in found if r.WhichOneof("record_type") == "history"]


def files(folder: RunFolder, found: list[Any], name: str) -> list[Path]:
    """Return the files that the history has under a name."""
    (home,) = (folder.path / "wandb").glob("offline-run-*")
    key = f"{name}/path"
    return [home / "files" / each[key] for each in history(found) if key in each]


def test_the_predictions_are_configuration_and_a_line_beside_each_metric(run: Any) -> None:
    folder, found = run
    updates = [values(r.config.update) for r in found if r.HasField("config")]
    assert [each["plan"] for each in updates if "plan" in each] == list(PLANS.values())
    steps = [each for each in history(found) if "loss" in each]
    assert [each["step"] for each in steps] == [41, 42]
    for each in steps:
        assert PLANS[each["step"]] == {key: each[f"planned/{key}"] for key in PLANS[41]}
    assert folder.read_events()[0]["plan"] == PLANS[41]


def test_validation_sets_and_tasks_have_their_names(run: Any) -> None:
    first = next(each for each in history(run[1]) if each["step"] == 41)
    assert first["validation/code/loss"] == 2.1
    assert first["validation/code/bits_per_byte"] == 1.1
    assert first["tasks/next_line/accuracy_per_byte"] == 0.5


def test_the_table_of_scores_has_a_row_for_each_evaluation(run: Any) -> None:
    folder, found = run
    (_, newest) = files(folder, found, "task_scores")
    # The rows have not doubled in step 42, so its scores are in the table of the end.
    with_table = [each for each in history(found) if "task_scores/path" in each]
    assert [("loss" in each, each["step"]) for each in with_table] == [(True, 41), (False, 42)]
    table = json.loads(newest.read_text())
    assert table["columns"] == ["step", "task", "accuracy", "accuracy_per_byte"]
    assert table["data"] == [
        *([step, "next_line", 0.0, None] for step in (38, 39, 40)),
        [41, "next_line", 0.25, 0.5],
        [42, "next_line", 0.75, None],
        [42, "cloze", 1.0, None],
    ]


def test_pictures_and_texts_are_media(run: Any) -> None:
    folder, found = run
    (picture,), (text,) = (files(folder, found, name) for name in ("timeline", "profile"))
    assert "<svg><text>passes</text></svg>" in picture.read_text()
    assert "aten::mm &lt;0.5&gt;" in text.read_text()
    assert not files(folder, found, "absent")


def test_a_checkpoint_is_an_artifact_that_refers_to_its_folder(run: Any) -> None:
    folder, found = run
    (artifact,) = [r.artifact for r in found if r.artifact.type == "model"]
    assert artifact.name.startswith("checkpoint-") and "step-42" in artifact.aliases
    (entry,) = artifact.manifest.contents
    file = folder.checkpoints / "step-0000042" / "weights-00000.safetensors"
    assert entry.ref == file.absolute().as_uri() and not entry.local_path
    # W&B has not read the file.
    assert entry.digest != base64.b64encode(hashlib.md5(file.read_bytes()).digest()).decode()


def test_events_are_alerts(run: Any) -> None:
    alerts = [r.alert for r in run[1] if r.HasField("alert")]
    assert [alert.title for alert in alerts] == ["step skipped"]


def test_a_rollback_drops_later_scores() -> None:
    table = TaskTable([{"step": step, "tasks/a/accuracy": 0.1 * step} for step in (10, 20, 30)])
    assert not table.add({"step": 15, "loss": 1.0})
    assert table.add({"step": 20, "tasks/a/accuracy": 0.9})
    assert table.rows == [
        {"step": 10, "task": "a", "accuracy": 1.0},
        {"step": 20, "task": "a", "accuracy": 0.9},
    ]
