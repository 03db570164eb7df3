"""Reading the events of an attempt, and the decision about slow nodes."""

from itertools import product

import pytest

from threefold.launch.diagnosis import (
    Replacement,
    events_of,
    hosts_of,
    ran_out_of_memory,
    ranks_behind,
    replacement,
    saved_on_request,
    slow_ranks,
    trains,
)


def test_only_the_events_of_the_attempt_count() -> None:
    events = [
        {"event": "attempt", "attempt": "a.1"},
        {"event": "first_step"},
        {"event": "attempt_end", "attempt": "a.1"},
        {"event": "attempt", "attempt": "a.2"},
        {"event": "start"},
    ]
    assert events_of(events, "a.2") == events[3:]
    assert trains(events_of(events, "a.1")) and not trains(events_of(events, "a.2"))
    assert events_of(events, "a.3") == []


def test_memory_ran_out_only_if_an_event_says_so() -> None:
    stop = {"event": "stop", "exit_code": 3}
    assert not ran_out_of_memory([stop, {"event": "start", "out_of_memory": True}])
    assert ran_out_of_memory([stop | {"out_of_memory": True}])


def test_a_step_was_saved_on_request_if_the_newest_stop_says_so() -> None:
    saved, hung = ({"event": "stop", "step": 72, "exit_code": code} for code in (5, 4))
    assert saved_on_request([saved, {"event": "save", "step": 72}]) == 72
    assert saved_on_request([saved, hung]) is None
    assert saved_on_request([]) is None


def test_the_newest_hang_report_counts() -> None:
    stops = [{"event": "stop", "behind": [1]}, {"event": "stop", "behind": [2, "x", 3]}]
    assert ranks_behind(stops) == [2, 3]
    assert ranks_behind([{"event": "stop", "behind": "all"}]) == []
    assert ranks_behind([{"event": "stop"}]) == []


def test_the_newest_comparison_of_speeds_counts() -> None:
    slow = [
        {"event": "slow", "step": 300, "ranks": [0, 1]},
        {"event": "slow", "step": 600, "ranks": [4, 5]},
        {"event": "slow", "step": 600, "ranks": [8, None]},
    ]
    assert slow_ranks(slow) == [4, 5, 8]
    assert slow_ranks(slow[:1]) == [0, 1]
    assert slow_ranks([]) == []


def test_ranks_are_found_on_their_hosts() -> None:
    assert hosts_of([7, 2, 3], ["a", "b", "c", "d"], 2) == ["b", "d"]
    assert hosts_of([], ["a"], 2) == []
    assert hosts_of([99], ["a"], 2) == []


@pytest.mark.parametrize(
    ("slow", "spare", "action", "replaced"),
    list(product([[], ["a"], ["a", "b"]], range(3), ["replace", "warn"], [set(), {0}, {9}])),
)
def test_slow_hosts_are_replaced_if_that_can_help(
    slow: list[str], spare: int, action: str, replaced: set[int]
) -> None:
    found = replacement(slow, spare, action=action, replaced=replaced, ranks=[0, 1] if slow else [])
    wanted = bool(slow) and action == "replace"
    helps = spare >= len(slow) and 0 not in replaced
    if wanted and helps:
        assert found == Replacement(slow)
    else:
        assert not found.hosts
        assert bool(found.problem) == wanted
