"""Every cause of an attempt's end, and what follows from it."""

import signal
from dataclasses import replace

import pytest

from threefold.launch.diagnosis import (
    AttemptResult,
    Failures,
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
        (AttemptResult(ends=ends(0, 0)), FINISHED, [], False),
        (AttemptResult(ends=ends(5, 5), asked=True), INTERRUPTED, [], False),
        (AttemptResult(ends=ends(KILLED, KILLED), asked=True), 128 + 9, [], False),
        (AttemptResult(ends=ends(-signal.SIGTERM, 0), asked=True), INTERRUPTED, [], False),
        (AttemptResult(lost={f"node{n}": "silent" for n in range(9)}), None, [], False),
        (AttemptResult(ends=ends(HUNG), behind=[f"node{n}" for n in range(9)]), None, [], True),
        (AttemptResult(asked=True), INTERRUPTED, [], False),
        (AttemptResult(lost={"node2": "silent"}, asked=True), 1, [], False),  # nothing was saved
        (AttemptResult(lost={"node2": "silent"}, ends=ends(KILLED), asked=True), 1, [], False),
        (
            AttemptResult(lost={"node2": "silent"}, ends=ends(5, 5), asked=True),
            INTERRUPTED,
            [],
            False,
        ),
        (  # Slurm has ended the agents, too
            AttemptResult(lost={"node1": "closed"}, ends=ends(KILLED), asked=True, saved_step=72),
            INTERRUPTED,
            [],
            False,
        ),
        (AttemptResult(lost={"node1": "closed"}, saved_step=72), None, ["node1"], False),
        (AttemptResult(ends=ends(5, 5)), INTERRUPTED, [], False),  # a user has signalled a rank
        (AttemptResult(ends=ends(1, STOPPED)), STOPPED, [], False),
        (AttemptResult(ends=ends(REJECTED)), REJECTED, [], False),
        (AttemptResult(ends=ends(BUSY)), BUSY, [], False),
        (AttemptResult(ends=ends(REJECTED), several_hosts=True), None, ["node1"], True),
        (AttemptResult(ends=ends(STOPPED, 1), several_hosts=True), None, ["node1"], True),
        (AttemptResult(ends=ends(1, STOPPED), several_hosts=True), STOPPED, [], False),
        (AttemptResult(ends=ends(REJECTED, REJECTED), several_hosts=True), REJECTED, [], False),
        (AttemptResult(ends=ends(BUSY), several_hosts=True), BUSY, [], False),
        (
            AttemptResult(ends=ends(STOPPED), several_hosts=True, out_of_memory=True),
            STOPPED,
            [],
            False,
        ),
        (AttemptResult(ends=ends(5, 5), restarting="more nodes"), None, [], False),
        (AttemptResult(ends=ends(1, 5), restarting="more nodes"), None, ["node1"], True),
        (AttemptResult(lost={"node2": "silent"}, ends=ends(1)), None, ["node2"], False),
        (AttemptResult(lost={"node2": "silent"}, ends=ends(0, 0)), None, ["node2"], False),
        (AttemptResult(lost={"node2": "silent"}, ends=ends(STOPPED)), None, ["node2"], False),
        (AttemptResult(ends=ends(1, KILLED)), None, ["node2"], True),
        (AttemptResult(ends=ends(1, HUNG), behind=["node3"]), None, ["node3"], True),
        (AttemptResult(ends=ends(HUNG, HUNG)), None, [], True),
        (AttemptResult(ends=ends(0, 1, 9)), None, ["node2"], True),
        (AttemptResult(ends=ends(UNFIT, UNFIT)), UNFIT, [], False),
        (AttemptResult(ends=ends(UNFIT, UNFIT), preflight_slow={"node2": "slow"}), None, [], False),
        (AttemptResult(ends=ends(UNFIT), lost={"node2": "silent"}), None, ["node2"], False),
        (
            AttemptResult(ends=ends(UNFIT), preflight_broken={"node2": "wrong"}, asked=True),
            UNFIT,
            [],
            False,
        ),
    ],
)
def test_the_cause_decides_what_follows(
    outcome: AttemptResult, code: int | None, blamed: list[str], counts: bool
) -> None:
    found = diagnose(outcome)
    assert (found.exit_code, list(found.blamed), found.counts) == (code, blamed, counts)
    assert found.reason


def test_reasons_name_the_rank_and_the_host() -> None:
    assert (
        diagnose(AttemptResult(ends=ends(1, KILLED))).reason
        == "rank 1 (node2) was killed by SIGKILL"
    )
    assert diagnose(AttemptResult(ends=ends(9))).reason == "rank 0 (node1) exited with 9"
    real_time = diagnose(AttemptResult(ends=ends(-(signal.SIGRTMIN + 1)))).reason
    assert real_time == f"rank 0 (node1) was killed by signal {signal.SIGRTMIN + 1}"
    assert diagnose(AttemptResult(lost={"node2": "silent"})).reason == "node2: silent"


def test_ranks_killed_by_a_second_request_have_not_saved() -> None:
    outcome = AttemptResult(ends=ends(KILLED, KILLED), asked=True, asked_again=True)
    said = "launch.py was asked to stop twice, so the ranks were killed before they had saved; a "
    assert diagnose(outcome).reason == f"{said}rerun starts again"
    assert diagnose(replace(outcome, checkpoint=30)).reason == f"{said}rerun resumes after step 30"
    saved = replace(outcome, ends=ends(INTERRUPTED, KILLED))
    assert diagnose(saved).reason == "launch.py was asked to stop"
    killed = diagnose(replace(outcome, asked_again=False)).reason
    assert killed == "launch.py was asked to stop, but rank 0 (node1) was killed by SIGKILL"


def test_the_step_that_was_saved_on_request_is_named() -> None:
    found = diagnose(AttemptResult(lost={"node2": "closed"}, asked=True, saved_step=72))
    assert found.reason == "launch.py was asked to stop, and the ranks saved at step 72"


def test_a_broken_gpu_takes_precedence_over_every_other_error() -> None:
    text = {"node3": "Xid 79 on GPU 0000:3b:00: GPU has fallen off the bus"}
    for codes in ((1, KILLED), (HUNG, HUNG), (STOPPED, 1), (REJECTED,), (9,)):
        found = diagnose(
            AttemptResult(ends=ends(*codes), gpu_broken=text, gpu_suspects={"node1": "NVLink"})
        )
        assert (found.exit_code, list(found.blamed), found.counts) == (None, ["node3"], False)
        assert found.reason == f"node3: {text['node3']}"
    both = diagnose(AttemptResult(lost={"node2": "silent"}, ends=ends(1), gpu_broken=text))
    assert both.blamed == ["node3", "node2"]
    assert diagnose(AttemptResult(ends=ends(0, 0), gpu_broken=text)).exit_code == FINISHED
    assert (
        diagnose(AttemptResult(ends=ends(5, 5), gpu_broken=text, asked=True)).exit_code
        == INTERRUPTED
    )


def test_the_preflight_names_hosts_that_are_left_out_or_used_last() -> None:
    found = diagnose(
        AttemptResult(
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
    found = diagnose(AttemptResult(ends=ends(code), behind=["node1"], gpu_suspects=suspects))
    assert (found.exit_code, list(found.blamed), found.counts) == (None, ["node3"], True)
    assert found.reason.endswith(f"(node3: {suspects['node3']})")
    many = {f"node{n}": "NVLink error" for n in range(9)}
    found = diagnose(AttemptResult(ends=ends(code), behind=["node1"], gpu_suspects=many))
    assert list(found.blamed) == ["node1"]


@pytest.mark.parametrize("code", [STOPPED, REJECTED, BUSY, INTERRUPTED])
def test_a_suspect_gpu_does_not_restart_a_run_that_has_ended(code: int) -> None:
    suspects = {"node3": "NVLink error"}
    assert diagnose(AttemptResult(ends=ends(code), gpu_suspects=suspects)).exit_code == code


def test_memory_that_ran_out_in_a_layout_of_launch_py_is_no_reason_to_stop() -> None:
    found = diagnose(AttemptResult(ends=ends(1, STOPPED), other_layout=True))
    assert (found.exit_code, found.blamed, found.counts) == (None, (), False)
    assert found.reason.startswith("memory ran out in a layout that launch.py had chosen: rank 1")
    rejected = diagnose(AttemptResult(ends=ends(REJECTED), other_layout=True))
    assert rejected.exit_code == REJECTED
