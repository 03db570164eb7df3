"""Alerts about a run, in offline runs of Weights & Biases."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.conftest import changed
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress
from threefold.run_folder.lock import grant
from threefold.runtime.exits import HUNG, STOPPED
from threefold.tracking import weights_and_biases
from threefold.tracking.tracker import open_tracker
from threefold.tracking.wandb_connection import WandbStatus
from threefold.tracking.weights_and_biases import (
    ERROR,
    INFO,
    MAX_ALERTS_AT_START,
    WARN,
    Alert,
    WandbThread,
    alert_of,
    alerts_at_start,
    launch_facts,
)

OFFLINE = WandbStatus("offline", "folder/offline-run-*", "a reason")
START = {"event": "start", "step": 0}
ATTEMPT = {
    "event": "attempt", "step": 40, "attempt": "t.1.2", "number": 2, "reason": "node2: silent",
    "nodes": ["node1", "node3"], "unused": {"node2": "no answer"}, "layout": "data 2 x tensor 8",
}  # fmt: skip
END = {"event": "attempt_end", "step": 40, "number": 1, "reason": "node2: silent",
       "blamed": ["node2"]}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "title", "text", "level"),
    [
        (ATTEMPT, "attempt 2 started", "node2: silent; after step 40, on node1, node3; layout: "
         "data 2 x tensor 8; not used: node2 (no answer)", INFO),
        (END, "attempt 1 ended", "node2: silent; blamed: node2", WARN),
        ({"event": "gpu_error", "node": "node2", "error": "Xid 79", "left_out": True},
         "GPU error on node2", "Xid 79; the node is left out", ERROR),
        ({"event": "gpu_error", "node": "node2", "error": "Xid 94"},
         "GPU error on node2", "Xid 94", ERROR),
        ({"event": "slow", "step": 300, "ranks": [4, 5], "nodes": ["node2"], "ratio": 2.0},
         "slow ranks", "step 300: ranks [4, 5] on node2 take 2.0 times as long as similar ranks",
         WARN),
        ({"event": "rollback", "step": 9, "reason": "a spike", "to": 5},
         "rolled back", "step 9: a spike; continues after step 5", WARN),
        ({"event": "skip", "step": 9, "reason": "nan", "samples": [1, 2]},
         "step skipped", "step 9: nan", WARN),
        ({"event": "skip", "step": 9, "reason": "torn", "checkpoint": "step-9"},
         "damaged checkpoint", "step-9: torn", WARN),
        ({"event": "stop", "step": 9, "reason": "nan", "exit_code": STOPPED}, "stopped", "nan",
         ERROR),
        ({"event": "stop", "step": 9, "reason": "rank 1", "exit_code": HUNG}, "no progress",
         "rank 1", ERROR),
        ({"event": "stop", "step": 9, "reason": "512 MiB", "exit_code": STOPPED,
          "out_of_memory": True}, "out of memory", "512 MiB", ERROR),
    ],
)  # fmt: skip
def test_every_event_that_needs_attention_has_an_alert(
    event: dict[str, Any], title: str, text: str, level: str
) -> None:
    assert alert_of(event) == Alert(title, text, level)


def test_ordinary_and_edited_events() -> None:
    for kind in ("start", "resume", "save", "end", "first_step", "warning", "repeat", "forget"):
        assert alert_of({"event": kind, "step": 1}) is None
    for kind in ("attempt", "attempt_end", "gpu_error", "slow", "rollback", "skip", "stop"):
        assert isinstance(alert_of({"event": kind}), Alert)
        edited = dict.fromkeys(("nodes", "unused", "blamed", "ranks", "ratio", "number"), 7)
        assert isinstance(alert_of({"event": kind} | edited), Alert)
    long = alert_of({"event": "gpu_error", "node": "n" * 100, "error": "x" * 9999})
    assert long is not None and len(long.title) < 64 and len(long.text) <= 2000


def titles(events: list[dict[str, Any]]) -> list[str]:
    return [alert.title for alert in alerts_at_start(events)]


def test_only_news_since_the_previous_start_is_sent() -> None:
    first = ATTEMPT | {"number": 1}
    hang = {"event": "stop", "step": 40, "reason": "rank 1", "exit_code": HUNG}
    assert titles([]) == []
    assert titles([first]) == []  # the first attempt of a run
    assert titles([first, START]) == []
    assert titles([first, START, END, ATTEMPT]) == ["attempt 1 ended", "attempt 2 started"]
    assert titles([first, END, ATTEMPT]) == ["attempt 1 started", "attempt 1 ended",
                                             "attempt 2 started"]  # fmt: skip
    again = [first, START, END, ATTEMPT, {"event": "resume", "step": 40}]
    assert titles(again) == []
    assert titles([*again, hang]) == ["no progress"]
    ends = [END | {"number": number} for number in range(31)]
    assert titles([first, START, *ends]) == [f"attempt {number} ended" for number in range(11, 31)]
    assert len(titles([START, *[END] * 100])) == MAX_ALERTS_AT_START


def test_what_rank_0_has_sent_is_not_sent_again() -> None:
    sent = [
        {"event": "rollback", "step": 9, "to": 5},
        {"event": "skip", "step": 9, "samples": [1, 2]},
        {"event": "slow", "step": 9},
        {"event": "stop", "step": 9, "exit_code": STOPPED, "wall_time": {}},
    ]
    assert titles([START, *sent]) == []


def test_the_facts_are_those_of_the_current_attempt() -> None:
    events = [ATTEMPT | {"attempt": "t.1.1", "number": 1}, ATTEMPT]
    assert launch_facts(events, "t.1.2") == {
        "attempt": 2, "nodes": ["node1", "node3"], "layout": "data 2 x tensor 8",
        "reason": "node2: silent",
    }  # fmt: skip
    assert launch_facts(events, "") == launch_facts(events, "t.1.3") == {}
    assert launch_facts([{"event": "attempt", "attempt": "a"}], "a") == {}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return the folder of a run whose first attempt has ended and whose second one starts."""
    before = RunFolder(tmp_path / "run")
    before.path.mkdir()
    for event in (ATTEMPT | {"attempt": "t.1.1", "number": 1}, START, END, ATTEMPT):
        facts = {key: value for key, value in event.items() if key not in ("event", "step")}
        before.event(event["event"], event["step"], **facts)
    grant(before.path, "t.1.2")
    folder = RunFolder(before.path, "t.1.2")
    folder.hold()
    return folder


def offline(small: dict) -> Recipe:
    return parse_recipe(changed(small, tracking__mode="offline"), "test")


def test_an_offline_run_has_the_alerts_and_the_facts(small: dict, folder: RunFolder) -> None:
    with (
        mock.patch.object(WandbThread, "SECONDS_TO_FINISH", 600),
        open_tracker(offline(small), folder, 0, start=Progress(40, 320), changed={}) as tracker,
    ):
        tracker.skip(41, "the loss is nan", range(8, 16))
        tracker.roll_back(42, Progress(40, 336), "a loss spike of 5 nats")
        tracker.slow(43, [4, 5], ["node2"], 2.5)
        tracker.stop("replicas diverged", STOPPED)
    (log,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    content = log.read_bytes()
    for expected in (
        b"attempt 1 ended", b"attempt 2 started", b"not used: node2 (no answer)",
        b"step skipped", b"step 41: the loss is nan", b"rolled back", b"a loss spike of 5 nats",
        b"slow ranks", b"replicas diverged", b"launch/layout", b"data 2 x tensor 8",
    ):  # fmt: skip
        assert expected in content, expected
    assert b"attempt 1 started" not in content


def test_alerts_neither_delay_nor_stop_a_run(small: dict, folder: RunFolder) -> None:
    failing = mock.Mock()
    failing.alert.side_effect = RuntimeError("no connection")
    with (
        mock.patch.object(weights_and_biases, "start_wandb", return_value=(failing, OFFLINE)),
        mock.patch.object(weights_and_biases, "restart_offline", return_value=(failing, OFFLINE)),
        open_tracker(offline(small), folder, 0, start=Progress(40, 320), changed={}) as tracker,
    ):
        started = time.monotonic()
        for _ in range(1000):
            tracker.wandb.send(Alert("title", "text", INFO))  # type: ignore[attr-defined]
        assert time.monotonic() - started < 1.0
        tracker.stop("asked", 5)
    assert failing.alert.call_count == 2  # of the run, and of the run that replaces it
    (warning,) = [e for e in folder.read_events() if e["event"] == "warning"]
    assert "Weights & Biases failed (no connection)" in warning["message"]


def test_without_weights_and_biases_nothing_is_queued(small: dict, folder: RunFolder) -> None:
    recipe = parse_recipe(changed(small, tracking__mode="disabled"), "test")
    with open_tracker(recipe, folder, 0, start=Progress(40, 320), changed={}) as tracker:
        tracker.skip(41, "nan", range(8))
        assert tracker.wandb._queue.empty()  # type: ignore[attr-defined]
