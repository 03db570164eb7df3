"""Every cause of an attempt's end, and what follows from it."""

import signal

import pytest

from threefold.launch.diagnosis import (
    Failures,
    Outcome,
    RankEnd,
    diagnose,
)
from threefold.runtime.exits import (
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
        (Outcome(lost={"node2": "silent"}, asked=True), 1, [], False),  # nothing was saved
        (Outcome(lost={"node2": "silent"}, ends=ends(KILLED), asked=True), 1, [], False),
        (Outcome(lost={"node2": "silent"}, ends=ends(5, 5), asked=True), INTERRUPTED, [], False),
        (Outcome(ends=ends(5, 5)), INTERRUPTED, [], False),  # a user has signalled a rank
        (Outcome(ends=ends(1, STOPPED)), STOPPED, [], False),
        (Outcome(ends=ends(REJECTED)), REJECTED, [], False),
        (Outcome(ends=ends(BUSY)), BUSY, [], False),
        (Outcome(ends=ends(5, 5), restarting="more nodes"), None, [], False),
        (Outcome(ends=ends(1, 5), restarting="more nodes"), None, ["node1"], True),
        (Outcome(lost={"node2": "silent"}, ends=ends(1)), None, ["node2"], False),
        (Outcome(lost={"node2": "silent"}, ends=ends(0, 0)), None, ["node2"], False),
        (Outcome(lost={"node2": "silent"}, ends=ends(STOPPED)), None, ["node2"], False),
        (Outcome(ends=ends(1, KILLED)), None, ["node2"], True),
        (Outcome(ends=ends(1, HUNG), behind=["node3"]), None, ["node3"], True),
        (Outcome(ends=ends(HUNG, HUNG)), None, [], True),
        (Outcome(ends=ends(0, 1, 9)), None, ["node2"], True),
        (Outcome(ends=ends(UNFIT, UNFIT)), UNFIT, [], False),
        (Outcome(ends=ends(UNFIT, UNFIT), preflight_slow={"node2": "slow"}), None, [], False),
        (Outcome(ends=ends(UNFIT), lost={"node2": "silent"}), None, ["node2"], False),
        (
            Outcome(ends=ends(UNFIT), preflight_broken={"node2": "wrong"}, asked=True),
            UNFIT,
            [],
            False,
        ),
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
    real_time = diagnose(Outcome(ends=ends(-(signal.SIGRTMIN + 1)))).reason
    assert real_time == f"rank 0 (node1) was killed by signal {signal.SIGRTMIN + 1}"
    assert diagnose(Outcome(lost={"node2": "silent"})).reason == "node2: silent"


def test_a_broken_gpu_takes_precedence_over_every_other_error() -> None:
    text = {"node3": "Xid 79 on GPU 0000:3b:00: GPU has fallen off the bus"}
    for codes in ((1, KILLED), (HUNG, HUNG), (STOPPED, 1), (REJECTED,), (9,)):
        found = diagnose(
            Outcome(ends=ends(*codes), gpu_broken=text, gpu_suspects={"node1": "NVLink"})
        )
        assert (found.exit_code, list(found.blamed), found.counts) == (None, ["node3"], False)
        assert found.reason == f"node3: {text['node3']}"
    both = diagnose(Outcome(lost={"node2": "silent"}, ends=ends(1), gpu_broken=text))
    assert both.blamed == ["node3", "node2"]
    assert diagnose(Outcome(ends=ends(0, 0), gpu_broken=text)).exit_code == FINISHED
    assert diagnose(Outcome(ends=ends(5, 5), gpu_broken=text, asked=True)).exit_code == INTERRUPTED


def test_the_preflight_names_hosts_that_are_left_out_or_used_last() -> None:
    found = diagnose(
        Outcome(
            ends=ends(UNFIT), preflight_broken={"node2": "wrong"}, preflight_slow={"node3": "slow"}
        )
    )
    assert found.reason == "preflight: wrong; slow"
    assert (found.preflight_broken, found.preflight_slow, found.counts) == (
        ["node2"],
        ["node3"],
        False,
    )
    failures = Failures(limit=0)
    assert failures.note(found, checkpoint=0) == ""
    assert failures.left_out("node2") and not failures.left_out("node3")
    assert failures.is_slow("node3") and not failures.of_nodes


@pytest.mark.parametrize("code", [KILLED, HUNG, 1, 9])
def test_a_suspect_gpu_decides_which_node_is_blamed(code: int) -> None:
    suspects = {"node3": "Xid 94 on GPU 0000:3b:00: contained memory error"}
    found = diagnose(Outcome(ends=ends(code), behind=["node1"], gpu_suspects=suspects))
    assert (found.exit_code, list(found.blamed), found.counts) == (None, ["node3"], True)
    assert found.reason.endswith(f"(node3: {suspects['node3']})")
    many = {f"node{n}": "NVLink error" for n in range(9)}
    found = diagnose(Outcome(ends=ends(code), behind=["node1"], gpu_suspects=many))
    assert list(found.blamed) == ["node1"]


@pytest.mark.parametrize("code", [STOPPED, REJECTED, BUSY, INTERRUPTED])
def test_a_suspect_gpu_does_not_restart_a_run_that_has_ended(code: int) -> None:
    suspects = {"node3": "NVLink error"}
    assert diagnose(Outcome(ends=ends(code), gpu_suspects=suspects)).exit_code == code


def test_memory_that_ran_out_in_a_layout_of_launch_py_is_no_reason_to_stop() -> None:
    found = diagnose(Outcome(ends=ends(1, STOPPED), other_layout=True))
    assert (found.exit_code, found.blamed, found.counts) == (None, (), False)
    assert found.reason.startswith("memory ran out in a layout that launch.py had chosen: rank 1")
    rejected = diagnose(Outcome(ends=ends(REJECTED), other_layout=True))
    assert rejected.exit_code == REJECTED
