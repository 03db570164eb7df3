"""Failures of nodes: when they count, when they expire, and what is remembered."""

import random

import pytest

from threefold.launch.diagnosis import (
    MAX_FAILURES_WITHOUT_CHECKPOINT,
    Diagnosis,
    Failures,
    GpuErrors,
)

HOUR = 3600.0
BLAMED = Diagnosis("killed", blamed=["node2"], counts=True)


class Clock:
    """A clock that a test sets."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_node_is_left_out_after_its_last_allowed_failure(clock: Clock) -> None:
    failures = Failures(limit=2, clock=clock)
    failures.note(BLAMED, checkpoint=10)
    assert not failures.left_out("node2")
    failures.note(BLAMED, checkpoint=20)
    assert failures.left_out("node2")
    assert failures.reason("node2") == "2 failures within 24 hours"
    assert not failures.left_out("node1")
    unlimited = Failures(limit=0)
    for step in range(100):
        unlimited.note(BLAMED, checkpoint=step)
    assert not unlimited.left_out("node2")


def test_failures_expire(clock: Clock) -> None:
    failures = Failures(limit=2, hours=6, clock=clock)
    failures.note(BLAMED, checkpoint=10)
    clock.now += 5 * HOUR
    failures.note(BLAMED, checkpoint=20)
    assert failures.left_out("node2")
    clock.now += 0.9 * HOUR
    assert failures.left_out("node2")
    clock.now += 0.2 * HOUR  # the first one has expired
    assert not failures.left_out("node2")
    failures.note(BLAMED, checkpoint=30)
    assert failures.left_out("node2")


def test_a_broken_node_is_left_out_at_once_and_used_again_later(clock: Clock) -> None:
    failures = Failures(limit=0, hours=6, clock=clock)
    failures.leave_out("node2", "Xid 79")
    assert failures.reason("node2") == "Xid 79"
    clock.now += 7 * HOUR
    assert not failures.left_out("node2")


def test_a_slow_node_is_not_left_out(clock: Clock) -> None:
    failures = Failures(limit=1, hours=6, clock=clock)
    failures.count_slow(["node2"])
    assert failures.is_slow("node2") and not failures.left_out("node2")
    assert not failures.is_slow("node1")
    clock.now += 7 * HOUR
    assert not failures.is_slow("node2")


def test_a_run_that_fails_without_progress_stops() -> None:
    failures = Failures(limit=0)
    failed = Diagnosis("failed", blamed=["node1"], counts=True)
    told = [failures.note(failed, checkpoint=10) for _ in range(MAX_FAILURES_WITHOUT_CHECKPOINT)]
    assert told[:-1] == [""] * (MAX_FAILURES_WITHOUT_CHECKPOINT - 1)
    assert "failed 3 times without a new checkpoint after step 10" in told[-1]
    assert failures.note(failed, checkpoint=20) == ""


def test_lost_nodes_do_not_stop_a_run() -> None:
    failures = Failures(limit=0)
    lost = Diagnosis("lost", blamed=["node1"])
    assert [failures.note(lost, checkpoint=10) for _ in range(50)] == [""] * 50


def test_the_failures_of_earlier_starts_count(clock: Clock) -> None:
    end = {"event": "attempt_end", "blamed": ["node1"]}
    events = [
        end | {"time": clock.now - 30 * HOUR},
        end | {"time": clock.now - 2 * HOUR},
        {"event": "gpu_error", "node": "node2", "error": "Xid 79", "left_out": True,
         "time": clock.now - HOUR},
        {"event": "gpu_error", "node": "node3", "error": "Xid 94", "left_out": False,
         "time": clock.now - HOUR},
        {"event": "replace", "nodes": ["node4"], "time": clock.now - HOUR},
        end | {"time": "yesterday"},  # edited by a user
        end | {"blamed": "node5", "time": clock.now},
        {"event": "attempt_end", "time": clock.now},
        {"event": "save", "time": clock.now},
    ]  # fmt: skip
    failures = Failures(limit=2, clock=clock)
    failures.restore(events)
    assert not failures.left_out("node1")  # one of its two failures has expired
    failures.note(Diagnosis("killed", blamed=["node1"]), checkpoint=0)
    assert failures.left_out("node1")
    assert failures.reason("node2") == "Xid 79"
    assert not failures.left_out("node3") and not failures.left_out("node5")
    assert failures.is_slow("node4")
    assert failures.without_checkpoint == 0
    again = Failures(limit=2, clock=clock)
    again.restore([*events, {"event": "forget", "time": clock.now}])
    assert not any(map(again.left_out, ("node1", "node2"))) and not again.is_slow("node4")


def healthy_nodes_left_out(hours: float, *, every_days: float, seed: int) -> int:
    """Return how many of 512 nodes are left out during 90 days of random failures.

    every_days: mean time between the failures of a node
    """
    clock, chance = Clock(), random.Random(seed)
    failures = Failures(limit=2, hours=hours, clock=clock)
    end, left_out = clock.now + 90 * 24 * HOUR, set()
    while True:
        clock.now += chance.expovariate(512 / (every_days * 24 * HOUR))
        if clock.now > end:
            return len(left_out)
        host = f"node{chance.randrange(512)}"
        failures.note(Diagnosis("crashed", blamed=[host]), checkpoint=int(clock.now))
        left_out |= {host} if failures.left_out(host) else set()


def test_healthy_nodes_are_rarely_left_out() -> None:
    """Simulate 90 days on 512 nodes, each of which fails once in 200 days."""
    expiring = [healthy_nodes_left_out(24.0, every_days=200, seed=seed) for seed in range(5)]
    forever = [healthy_nodes_left_out(1e9, every_days=200, seed=seed) for seed in range(5)]
    assert max(expiring) <= 4 and sum(expiring) / 5 < 2
    assert min(forever) > 30


def test_a_bad_node_causes_few_restarts() -> None:
    """Simulate 90 days with a node that fails after an hour of training whenever it is used."""
    clock = Clock()
    failures = Failures(limit=2, clock=clock)
    restarts = 0
    for _ in range(90 * 24):
        clock.now += HOUR
        if not failures.left_out("node2"):
            restarts += 1
            failures.note(BLAMED, checkpoint=restarts)
    assert restarts <= 2 * 90


XID = ("node1", "Xid 79", True)


@pytest.mark.parametrize(
    ("action", "reported", "left_out"),
    [
        ("leave_out", [XID], {"node1"}),
        ("count", [XID], set()),
        ("leave_out", [("node1", "Xid 94", False)], set()),
        ("leave_out", [("node1", "Xid 94", False), ("node2", "Xid 48", True)], {"node2"}),
        ("leave_out", [(f"node{n}", "Xid 79", True) for n in range(8)],
         {f"node{n}" for n in range(8)}),
        ("leave_out", [(f"node{n}", "Xid 79", True) for n in range(9)], set()),
        ("leave_out", [], set()),
    ],
)  # fmt: skip
def test_severe_errors_of_few_nodes_leave_them_out(
    action: str, reported: list[tuple[str, str, bool]], left_out: set[str]
) -> None:
    failures = Failures(limit=2)
    gpus = GpuErrors(failures, action)
    found = gpus.handle(reported)
    hosts = [host for host, *_ in reported]
    assert {host for host in hosts if failures.left_out(host)} == left_out
    assert {host for host, _, out in found if out} == left_out
    assert gpus.of_hosts(hosts, severe=True).keys() == left_out
    assert gpus.of_hosts(hosts, severe=False).keys() == {host for host, _, out in found if not out}


def test_an_error_is_new_once_per_attempt() -> None:
    gpus = GpuErrors(Failures(limit=2), "leave_out")
    assert gpus.handle([XID, XID]) == [XID]
    assert gpus.handle([XID]) == []
    assert gpus.of_hosts(["node1"], severe=True) == {"node1": "Xid 79"}
    assert gpus.of_hosts(["node2"], severe=True) == {}
    gpus.begin()
    assert gpus.of_hosts(["node1"], severe=True) == {}
    assert gpus.handle([XID]) == [XID]


def test_replaced_ranks_are_remembered_until_they_are_forgotten() -> None:
    replace = {"event": "replace", "time": 1e9, "nodes": ["node2"], "ranks": [8, "x", 9]}
    failures = Failures(limit=2)
    failures.restore([replace])
    assert failures.replaced_ranks == {8, 9}
    failures.restore([{"event": "forget", "time": 1e9 + 1}])
    assert failures.replaced_ranks == set()
