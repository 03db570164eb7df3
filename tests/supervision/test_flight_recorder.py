"""Hang reports name the collective: from dumps in torch's format, and from a real hang on gloo."""

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.ranks import start_ranks
from threefold.runtime.exits import HUNG
from threefold.runtime.launchers import free_port
from threefold.supervision.hang_report import (
    HangReport,
    Launched,
    RankStatus,
    describe_waiting,
    read_dump,
)
from threefold.supervision.supervisor import within

NAMES = [f"rank {rank} (node{1 + rank // 2})" for rank in range(4)]


def entry(name: str, sequence: int, **changes: Any) -> dict[str, Any]:
    """Return an entry as FlightRecorder::dump_json writes it (version 2.10, torch 2.13)."""
    is_transfer = name.startswith(("send", "recv"))
    table = {
        "record_id": sequence,
        "pg_id": 3,
        "process_group": ["5", "undefined"],
        "thread_name": "python",
        "thread_id": "140373237418880",
        "collective_seq_id": 0 if is_transfer else sequence,
        "p2p_seq_id": sequence if is_transfer else 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1795351139445164110,
        "input_sizes": [[4, 1024]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 1024]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled",
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": is_transfer,
    }
    return table | changes


def done(name: str, sequence: int, **changes: Any) -> dict[str, Any]:
    return entry(name, sequence, state="completed", retired=True, **changes)


def launched(*entries: dict[str, Any], ranks: str = "[0, 1, 2, 3]") -> list[Launched]:
    """Return a rank's report after it has been written to a file and read again."""
    config = {"5": {"name": "5", "desc": "undefined", "ranks": ranks}}
    status = {"3": {"last_completed_collective": "1", "last_enqueued_collective": "2"}}
    dump = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries}
    found = read_dump(json.loads(json.dumps(dump)))
    return [TypeAdapter(Launched).validate_json(json.dumps(asdict(each))) for each in found]


WAITING = launched(done("all_reduce", 16), entry("all_reduce", 17, state="started"))


def test_the_ranks_that_have_not_joined_are_named() -> None:
    behind = launched(done("all_reduce", 16))
    said = describe_waiting({0: WAITING, 1: WAITING, 2: behind}, NAMES)
    assert said == (
        "rank 0 (node1), rank 1 (node1) wait in all_reduce, number 17, of [4, 1024] BFloat16, on "
        "group 5 of ranks 0 to 3; rank 2 (node2), rank 3 (node2) have not joined"
    )


def test_no_rank_is_blamed_for_a_collective_that_all_have_joined() -> None:
    said = describe_waiting(dict.fromkeys(range(4), WAITING), NAMES)
    assert said.endswith("on group 5 of ranks 0 to 3, which all of its ranks have joined")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (entry("broadcast", 17), "while rank 1 (node1) is in broadcast, number 17"),
        (
            entry("all_reduce", 17, input_sizes=[[7]]),
            "while rank 1 (node1) is in all_reduce, number 17, of [7] BFloat16",
        ),
    ],
)
def test_ranks_in_different_collectives_are_told_apart(other: dict[str, Any], said: str) -> None:
    assert said in describe_waiting({0: WAITING, 1: launched(other)}, NAMES)


def test_without_pending_operations_there_is_no_description() -> None:
    assert describe_waiting({0: launched(done("all_reduce", 3)), 1: []}, NAMES) == ""
    # gloo retires ended operations, and never marks them as completed
    assert describe_waiting({0: launched(entry("all_reduce", 3, retired=True))}, NAMES) == ""


def test_a_transfer_waits_for_its_peer() -> None:
    pair = "[1, 2]"
    receiving = launched(done("recv 1<-0", 8), entry("recv 1<-0", 9), ranks=pair)
    sending = launched(done("send 0->1", 8), ranks=pair)
    said = describe_waiting({1: sending, 2: receiving}, NAMES)
    assert said.startswith("rank 2 (node2) waits in recv 1<-0, number 9,")
    assert said.endswith("of ranks 1, 2; rank 1 (node1) has not joined")
    # In larger groups ranks count different transfers, which says nothing about the peer.
    said = describe_waiting({1: sending, 2: launched(entry("recv 1<-0", 9))}, NAMES)
    assert said.endswith("of ranks 0 to 3")


def test_collectives_with_missing_ranks_come_before_receives_posted_ahead() -> None:
    ahead = [
        launched(entry("recv 1<-0", 4, process_group=[str(group), "route"]), ranks="[0, 1]")[0]
        for group in range(10, 16)
    ]
    said = describe_waiting({0: ahead + WAITING}, NAMES)
    assert said.startswith("rank 0 (node1) waits in all_reduce, number 17")
    assert said.endswith("; and 3 more operations") and "group 10 (route)" in said


def test_members_come_from_torch_if_the_recorder_has_none() -> None:
    dump = {"entries": [entry("all_reduce", 1)], "pg_config": {"": {"ranks": "[]"}}}
    (found,) = read_dump(dump, {"5": [0, 3]})
    assert found.ranks == [0, 3]
    assert read_dump({"entries": [entry("all_reduce", 1)]})[0].ranks == []
    assert read_dump({}) == []


@pytest.mark.parametrize(
    ("ranks", "runs", "said"),
    [
        (list(range(8192)), 1, "0 to 8191"),
        (list(range(3, 8192, 8)), 1, "3 to 8187 in steps of 8"),
        ([0, 1, 2, 3, 64, 65, 66, 67], 2, "0 to 3, 64 to 67"),
        ([0, 5, 6, 9], 2, "0, 5, 6, 9"),
        ([7], 1, "7"),
        ([r + 64 * n for n in range(9) for r in range(8)], 9,
         "0 to 7, 64 to 71, 128 to 135, 192 to 199 and 5 more"),
    ],
)  # fmt: skip
def test_the_members_of_a_group_are_written_as_progressions(
    ranks: list[int], runs: int, said: str
) -> None:
    (group,) = launched(entry("recv 1<-0", 9), ranks=str(ranks))
    assert group.ranks == ranks and len(group.runs) == runs
    names = [f"rank {rank}" for rank in range(8192)]
    assert f" of ranks {said}" in describe_waiting({ranks[-1]: [group]}, names)


def test_the_verdict_names_the_collective(tmp_path: Path) -> None:
    ranks = [HangReport(tmp_path / "hang", NAMES) for _ in range(4)]
    places = []
    for rank, report in enumerate(ranks):
        own = WAITING if rank < 3 else launched(done("all_reduce", 16))
        place = RankStatus(rank, 7, "step 7, ForwardPass", "", "models/x.py:1 f", own)
        places.append(place)
        report.write((place, "the stack"))
    verdict, _ = ranks[0].verdict(places[0])
    assert "all ranks are in step 7 and wait for the device, or compute" in verdict
    assert "by torch's flight recorder rank 0 (node1), rank 1 (node1), rank 2 (node2)" in verdict
    assert "rank 3 (node2) has not joined; " in verdict
    assert verdict.endswith(" has the stacks of 4 of the 4 ranks")


def test_a_recorder_that_fails_or_hangs_is_ignored(capsys: pytest.CaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    assert within(5, fail) is None
    assert "reading the flight recorder failed: CUDA error" in capsys.readouterr().out
    released = threading.Event()
    assert within(0.2, lambda: released.wait(60)) is None  # not False, after a minute
    released.set()
    assert within(5, lambda: "a dump") == "a dump"


# Each pair of ranks is a world of its own, with another recorder.
HANGING = """
import os, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from threefold.runtime.processes import start_processes
from threefold.run_folder.folder import RunFolder
from threefold.supervision import supervisor
from threefold.supervision.hang_report import Breadcrumb
from threefold.supervision.supervisor import Supervisor
from threefold.config.parallel_dims import LaunchEnvironment

folder, *cases = sys.argv[1:]
pair_number, rank = divmod(int(os.environ["RANK"]), 2)
recorder, port = cases[pair_number].split(":")
world = LaunchEnvironment(rank=rank, size=2, local_rank=rank, local_size=2)
os.environ["MASTER_PORT"] = port
if recorder != "off":
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
start_processes(world)
pair = dist.new_group([0, 1], group_desc="tensor")
dist.all_reduce(torch.ones(2), group=pair)
supervisor.SECONDS_OF_TICK = 0.5
if recorder == "broken":
    supervisor.launched_collectives = lambda: time.sleep(60)
hosts = ["here", "there"]
own = Supervisor(
    RunFolder(Path(folder) / recorder), Breadcrumb(), hang_seconds=4, startup_seconds=60
).start()
own.name_hosts(hosts)
with own:
    own.expect_steps()
    if world.rank == 0:
        dist.all_reduce(torch.ones(7), group=pair)
    time.sleep(60)
"""


RECORDERS = ("works", "broken", "off")


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], str]]:
    """Return the exit codes and the output of a hanging world with each recorder."""
    folder = tmp_path_factory.mktemp("hanging")
    for recorder in RECORDERS:
        (folder / recorder).mkdir()
    cases = [f"{recorder}:{free_port()}" for recorder in RECORDERS]
    words = ["-c", HANGING, str(folder), *cases]
    codes, outputs = start_ranks(2 * len(cases), words, folder=folder, seconds=60)
    pairs = [slice(2 * number, 2 * number + 2) for number in range(len(RECORDERS))]
    ends = [(codes[pair], "".join(outputs[pair])) for pair in pairs]
    return dict(zip(RECORDERS, ends, strict=True))


@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_hang_on_gloo_names_the_collective(
    recorder: str, hangs: dict[str, tuple[list[int], str]]
) -> None:
    codes, output = hangs[recorder]
    assert HUNG in codes, output
    waiting = (
        "rank 0 (here) waits in all_reduce, number 2, of [7] Float, on group 1 (tensor) of ranks "
        "0, 1; rank 1 (there) has not joined"
    )
    assert (waiting in output) == (recorder == "works"), output
    assert "no progress for 4 s: rank 1 (there) is behind" in output
    assert "rank 0 (here): start-up, starting to train; it waits in all_reduce" in output
