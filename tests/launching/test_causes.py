"""Every cause of an attempt's end, and what follows from it."""

import signal

import pytest

from recipes.launching.causes import (
    MAX_FAILURES_WITHOUT_CHECKPOINT,
    Diagnosis,
    Failures,
    Outcome,
    RankEnd,
    diagnose,
)
from recipes.training.runtime.exits import (
    BUSY,
    FINISHED,
    HUNG,
    INTERRUPTED,
    REJECTED,
    STOPPED,
    UNFIT,
)

KILLED = -signal.SIGKILL


def ends(*codes: int) -> list[RankEnd]:
    """Return the ends of ranks 0, 1, ... on hosts node1, node2, ..."""
    return [RankEnd(rank, f"node{rank + 1}", code) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("outcome", "code", "blamed", "counts"),
    [
        (Outcome(ends=ends(0, 0)), FINISHED, [], False),
        (Outcome(ends=ends(5, 5), asked=True), INTERRUPTED, [], False),
        (Outcome(ends=ends(KILLED, KILLED), asked=True), 128 + 9, [], False),
        (Outcome(ends=ends(-signal.SIGTERM, 0), asked=True), INTERRUPTED, [], False),
        (Outcome(lost={f"node{n}": "silent" for n in range(9)}), None, [], False),
        (Outcome(ends=ends(HUNG), behind=[f"node{n}" for n in range(9)]), None, [], True),
        (Outcome(asked=True), INTERRUPTED, [], False),
        (Outcome(ends=ends(5, 5)), INTERRUPTED, [], False),  # a user has signalled a rank
        (Outcome(ends=ends(1, STOPPED)), STOPPED, [], False),
        (Outcome(ends=ends(REJECTED)), REJECTED, [], False),
        (Outcome(ends=ends(BUSY)), BUSY, [], False),
        (Outcome(ends=ends(5, 5), growing=True), None, [], False),
        (Outcome(ends=ends(1, 5), growing=True), None, ["node1"], True),
        (Outcome(lost={"node2": "silent"}, ends=ends(1)), None, ["node2"], False),
        (Outcome(lost={"node2": "silent"}, ends=ends(0, 0)), None, ["node2"], False),
        (Outcome(lost={"node2": "silent"}, ends=ends(STOPPED)), None, ["node2"], False),
        (Outcome(ends=ends(1, KILLED)), None, ["node2"], True),
        (Outcome(ends=ends(1, HUNG), behind=["node3"]), None, ["node3"], True),
        (Outcome(ends=ends(HUNG, HUNG)), None, [], True),
        (Outcome(ends=ends(0, 1, 9)), None, ["node2"], True),
        (Outcome(ends=ends(UNFIT, UNFIT)), UNFIT, [], False),
        (Outcome(ends=ends(UNFIT, UNFIT), slow={"node2": "slow"}), None, [], False),
        (Outcome(ends=ends(UNFIT), lost={"node2": "silent"}), None, ["node2"], False),
        (Outcome(ends=ends(UNFIT), broken={"node2": "wrong"}, asked=True), UNFIT, [], False),
    ],
)
def test_the_cause_decides_what_follows(
    outcome: Outcome, code: int | None, blamed: list[str], counts: bool
) -> None:
    found = diagnose(outcome)
    assert (found.exit_code, list(found.blamed), found.counts) == (code, blamed, counts)
    assert found.reason


def test_reasons_name_the_rank_and_the_host() -> None:
    assert diagnose(Outcome(ends=ends(1, KILLED))).reason == "rank 1 (node2) was killed by SIGKILL"
    assert diagnose(Outcome(ends=ends(9))).reason == "rank 0 (node1) exited with 9"
    assert diagnose(Outcome(lost={"node2": "silent"})).reason == "node2: silent"


def test_a_node_is_left_out_after_its_last_allowed_failure() -> None:
    failures = Failures(limit=2)
    blamed = Diagnosis("killed", blamed=["node2"], counts=True)
    failures.note(blamed, checkpoint=10)
    assert not failures.left_out("node2")
    failures.note(blamed, checkpoint=20)
    assert failures.left_out("node2")
    assert not failures.left_out("node1")
    unlimited = Failures(limit=0)
    for step in range(100):
        unlimited.note(blamed, checkpoint=step)
    assert not unlimited.left_out("node2")


def test_the_preflight_names_hosts_that_are_left_out_or_used_last() -> None:
    found = diagnose(Outcome(ends=ends(UNFIT), broken={"node2": "wrong"}, slow={"node3": "slow"}))
    assert found.reason == "preflight: wrong; slow"
    assert (found.broken, found.slow, found.counts) == (["node2"], ["node3"], False)
    failures = Failures(limit=0)
    assert failures.note(found, checkpoint=0) == ""
    assert failures.left_out("node2") and not failures.left_out("node3")
    assert failures.slow == {"node3"} and not failures.of_nodes


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
