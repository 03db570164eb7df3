"""The wall time of a run by cause."""

from pathlib import Path
from typing import Any

import pytest

from threefold.config.loading import parse_recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress, WallTime, shares_text
from threefold.tracking.messages import goodput_line

EVENTS: list[dict[str, Any]] = [
    {"event": "attempt", "step": 0, "time": 1000.0},
    {"event": "start", "step": 0, "time": 1008.0},
    {"event": "first_step", "step": 1, "time": 1012.0,
     "seconds": {"imports": 6.0, "joining": 4.0, "first step": 2.0}},
    {"event": "repeat", "step": 10, "time": 1050.0, "steps": 4, "seconds": 8.0},
    {"event": "resume", "step": 10, "time": 1050.0},
    {"event": "first_step", "step": 11, "time": 1055.0, "seconds": {"joining": 5.0}},
    {"event": "end", "step": 20, "time": 1100.0},
]  # fmt: skip
LINES = [
    {"step": step, "step_seconds": 2.0, "between_seconds": 0.5, "validation_seconds": 0.25}
    for step in range(1, 21)
]


def test_the_shares_add_up() -> None:
    shares = WallTime(EVENTS, LINES).shares(1100.0)
    assert shares == pytest.approx({
        "kept": 0.3, "between": 0.1, "validating": 0.05, "starting": 0.15, "repeated": 0.08,
        "waiting": 0.32,
    })  # fmt: skip
    assert sum(shares.values()) == pytest.approx(1)


def test_the_shares_grow_with_the_run() -> None:
    wall_time = WallTime(EVENTS[:2])
    wall_time.started({"imports": 10.0, "first step": 2.0})
    for line in LINES:
        wall_time.add(line)
    assert wall_time.shares(1100.0)["kept"] == pytest.approx(0.3)
    assert wall_time.shares(1100.0)["starting"] == pytest.approx(0.1)


def test_the_first_start_up_belongs_to_the_run_without_an_attempt() -> None:
    wall_time = WallTime(EVENTS[1:], LINES)
    assert wall_time.seconds(1100.0) == 1100.0 - (1008.0 - 10.0)
    assert wall_time.shares(1100.0)["waiting"] == pytest.approx(34 / 102)
    killed = WallTime([EVENTS[1], *EVENTS[4:]], LINES)  # before the first step
    assert killed.seconds(1100.0) == 92.0
    running = WallTime(EVENTS[1:2])
    running.started({"imports": 10.0, "first step": 2.0})
    assert running.seconds(1100.0) == 102.0


def test_an_edited_file_is_no_reason_to_stop() -> None:
    events = [{"event": "start"}, {"event": "first_step", "seconds": None}, {"event": "repeat"}]
    wall_time = WallTime(events, [{"step": 1, "step_seconds": "much"}])
    assert wall_time.shares(5.0)["kept"] == 0


def test_a_restarted_run_prints_its_goodput() -> None:
    line = goodput_line(EVENTS, LINES)
    assert line == (
        "  goodput     30.0% of 100 s in kept steps, after 2 starts; lost: waiting 32.0%, starts "
        "15.0%, between steps 10.0%, repeated steps 8.0%, validation 5.0%"
    )
    once = [event for event in EVENTS if event["event"] != "resume"]
    assert goodput_line(once, LINES) == ""
    given_up = {"event": "resume", "step": 4, "time": 1200.0}  # a branch, after a pause
    assert goodput_line([*EVENTS, given_up], LINES) == line
    assert "validation" not in shares_text({"kept": 0.9996, "validating": 0.0004})


def test_steps_that_are_repeated_are_recorded(small: dict, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for line in LINES[:7]:
        folder.metric(line)
    recipe = parse_recipe(small, "small")
    folder.prepare(recipe, Progress(5, 40))
    (event,) = folder.read_events()
    assert (event["event"], event["step"], event["steps"]) == ("repeat", 5, 2)
    assert event["seconds"] == pytest.approx(2 * (2.0 + 0.25))
    folder.prepare(recipe, Progress(5, 40))  # nothing more is lost
    assert len(folder.read_events()) == 1


def resumed(*between: dict[str, Any], joining: float = 5.0) -> list[dict[str, Any]]:
    """Return the events of a run that ends at 1050 and is resumed an hour later."""
    return [
        *EVENTS[:3],
        *between,
        {"event": "resume", "step": 10, "time": 4650.0},
        {"event": "first_step", "step": 11, "time": 4655.0, "seconds": {"joining": joining}},
        {"event": "end", "step": 20, "time": 4700.0},
    ]


INTERRUPTION = {"event": "stop", "step": 10, "time": 1050.0, "exit_code": 5}


@pytest.mark.parametrize(
    ("events", "paused"),
    [
        (resumed(INTERRUPTION), 3595.0),  # the start-up of 5 s belongs to the run
        (resumed({"event": "end", "step": 10, "time": 1050.0}), 3595.0),
        (resumed(INTERRUPTION, {"event": "attempt", "number": 1, "time": 4640.0}), 3590.0),
        (resumed(INTERRUPTION, {"event": "attempt", "number": 2, "time": 4640.0}), 0.0),
        (resumed(INTERRUPTION | {"exit_code": 4}), 0.0),  # a hang
        (resumed(), 0.0),  # a run that was killed
        (resumed(INTERRUPTION, {"event": "resume", "step": 10, "time": 2050.0}), 1000.0),
        (resumed(INTERRUPTION, joining=9999.0), 0.0),
        (resumed(INTERRUPTION | {"time": "soon"}), 0.0),
    ],
)
def test_the_time_between_two_commands_is_not_waiting(
    events: list[dict[str, Any]], paused: float
) -> None:
    wall_time = WallTime(events, LINES)
    assert wall_time.paused == paused
    assert wall_time.hours(4700.0) == pytest.approx((3700.0 - paused) / 3600)
    shares = wall_time.shares(4700.0)
    assert sum(shares.values()) == pytest.approx(1)
    spent = 20 * 2.25 + 10.0 + events[-2]["seconds"]["joining"]
    waiting = max(0.0, 3700.0 - paused - spent)
    assert shares["waiting"] == pytest.approx(waiting / max(3700.0 - paused, spent))
    line = goodput_line(events, LINES)
    counted = f"; not counted: {paused / 3600:.2f} h in which the run was stopped"
    assert line.endswith(counted) == (paused > 0)


def test_a_running_process_counts_its_pause_once_it_has_started() -> None:
    *events, _, _ = resumed(INTERRUPTION)
    wall_time = WallTime(events)
    wall_time.started({"joining": 5.0, "first step": 2.0})
    assert wall_time.paused == 3595.0
