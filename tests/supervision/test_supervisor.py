import contextlib
import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w
import torch
from deepspeed.constants import default_pg_timeout

from models.parallel.collectives import TensorAxis, begin_sum_of_copies, wait_for
from tests.conftest import changed
from tests.fault_injection.unread import UNREAD, Output
from tests.ranks import start_ranks
from threefold.config.loading import REPOSITORY
from threefold.config.sections import Supervision
from threefold.run_folder.folder import RunFolder
from threefold.runtime.exits import HUNG
from threefold.runtime.launchers import Process, is_launcher
from threefold.runtime.processes import collective_timeout
from threefold.supervision import hang_report, supervisor
from threefold.supervision.hang_report import (
    Breadcrumb,
    HangReport,
    RankStatus,
    collective_of,
    describe_hang,
    innermost_line,
    rank_status,
)
from threefold.supervision.supervisor import Supervisor

NAMES = [f"rank {rank} (node{1 + rank // 2})" for rank in range(4)]


def status(rank: int, *, step: int = 7, waits_in: str = "recv") -> RankStatus:
    place = f"step {step}, RecvGrad of micro-batch {rank}"
    return RankStatus(rank, step, place, waits_in, "p2p.py:81 recv")


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([status(0), status(1)],
         "rank 2 (node2), rank 3 (node2) do not answer: stopped, dead or cut off. rank 0 (node1): "
         "step 7, RecvGrad of micro-batch 0; it waits in recv, at p2p.py:81 recv"),
        ([status(0), status(1, waits_in=""), status(2), status(3)],
         "rank 1 (node1) is behind: step 7, RecvGrad of micro-batch 1; it waits in no collective"),
        ([status(0), status(1, waits_in=""), status(2, step=6), status(3)],
         "rank 2 (node2) is behind: step 6"),
        ([status(rank) for rank in range(4)], "all ranks are in step 7 and wait in a collective"),
        ([status(rank, waits_in="") for rank in range(4)],
         "all ranks are in step 7 and wait for the device, or compute"),
    ],
)  # fmt: skip
def test_ranks_that_are_behind_are_named(statuses: list[RankStatus], said: str) -> None:
    assert describe_hang({each.rank: each for each in statuses}, NAMES).startswith(said)


def test_the_first_rank_at_its_limit_describes_the_hang(tmp_path: Path) -> None:
    ranks = [HangReport(tmp_path / "hang", NAMES) for _ in range(3)]
    places = []
    for rank, report in enumerate(ranks):
        crumb = Breadcrumb()
        crumb.note("ForwardPass", micro_batch=rank, step=5)
        places.append(rank_status(rank, crumb))
        report.write(places[rank])
    ranks[0].take_back(0)  # the rank has made progress
    said, behind = ranks[2].verdict(places[2][0])
    assert ranks[1].verdict(places[1][0]) == ("", [])
    assert behind == [0, 3]
    assert said.startswith("rank 0 (node1), rank 3 (node2) do not answer")
    assert "rank 1 (node1): step 5, ForwardPass of micro-batch 1" in said
    stack = (tmp_path / "hang" / "rank-00002.txt").read_text()
    assert "test_the_first_rank_at_its_limit_describes_the_hang" in stack


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -u -m deepspeed.launcher.launch --world_info=x train.py", True),
        ("/usr/bin/python /opt/bin/deepspeed --num_gpus 2 train.py", True),
        ("/opt/bin/torchrun --nproc-per-node 2 train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("bash /home/me/deepspeed-env/job.sh", False),
        ("bash -c 'deepspeed train.py'", False),
        ("vim deepspeed.json", False),
    ],
)
def test_launchers_are_recognized(command: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cmdline").write_text("\0".join(shlex.split(command)) + "\0")
    assert is_launcher(tmp_path / "cmdline") is expected


# Each of several processes is the only rank of a run of its own.
SUPERVISED = """
import os, pathlib, signal, sys, time
import torch
from threefold.supervision import supervisor
from threefold.runtime import exits
from threefold.runtime.processes import start_processes
from threefold.runtime.output import use_nonblocking_output
from threefold.supervision.hang_report import Breadcrumb
from threefold.supervision.step_watch import Severity
from threefold.supervision.supervisor import Supervisor
from threefold.run_folder.folder import RunFolder
from threefold.config.parallel_dims import LaunchEnvironment
from pathlib import Path

def supervise(path, what):
    use_nonblocking_output()
    supervisor.SECONDS_BEFORE_WATCHDOG = 3
    supervisor.REPORT_SECONDS = 100 if what == "hang" else 2  # a busy machine may take a second
    supervisor.SECONDS_OF_TICK, exits.ECHO_SECONDS = 0.4, 0.8
    os.environ.pop("MASTER_PORT", None)  # another process of the test uses it
    os.environ["THREEFOLD_FIRST_FAILURE"] = f"{path}.failure"
    start_processes(LaunchEnvironment())
    path.mkdir()
    crumb, folder = Breadcrumb(), RunFolder(path)
    if what == "hang, and no folder":
        folder = RunFolder(path / "absent")
    if what == "hang, and so does the disk":
        os.mkfifo(folder.events)
        pathlib.Path.mkdir = pathlib.Path.glob = lambda *_, **__: time.sleep(1000)
    asked = dict.fromkeys(("once", "echo", "twice", "other"), 9)
    hang_seconds = ({"hang": 1, "patient": 3} | asked).get(what, 2)
    startup_seconds = 4 if what == "hang at start" else 20
    own = Supervisor(
        folder, crumb, hang_seconds=hang_seconds, startup_seconds=startup_seconds
    ).start()

    def agree(severity):
        reason, worst, _ = own.agree(Severity(severity), torch.device("cpu"))
        print((reason, int(worst)), flush=True)

    if what == "hang at start":
        crumb.note("building the engine")
        time.sleep(60)
    if what == "slow start":
        time.sleep(1.5)
    own.name_hosts(["here"])
    with own:
        own.expect_steps()
        agree(2)
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what.startswith("hang"):
            time.sleep(60)
        if what == "patient":
            with crumb.waiting_for_disk("saving"):
                time.sleep(2)
        if what == "other":
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(1.5)
        for _ in range({"twice": 2, "echo": 2, "once": 1, "other": 1}.get(what, 0)):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.5 if what in ("twice", "other") else 0.2)
        agree(0)
    print("the end of the run", flush=True)
    sys.stdout.finish(5)
    os._exit(0)
"""
RANKS = """
what = sys.argv[2 + int(os.environ["RANK"])]
supervise(Path(sys.argv[1]) / what, what)
"""
CASES = {
    "once": (0, "('SIGTERM to rank 0 on here', 0)"),
    "echo": (0, "('SIGTERM to rank 0 on here', 0)"),
    "twice": (128 + signal.SIGTERM, "rank 0 (here): received SIGTERM again; exiting at once"),
    "other": (0, "rank 0 (here): received SIGTERM; still stopping"),
    "hang": (HUNG, "no progress for 1 s: all ranks are in start-up and wait for the device"),
    "hang, and no folder": (HUNG, "no progress for 2 s: rank 0 (here): start-up, starting to"),
    "hang, and so does the disk": (HUNG, "the run folder does not answer"),
    "hang at start": (HUNG, "no progress for 4 s: all ranks are in start-up"),
    "slow start": (0, "('', 0)"),
    "patient": (0, "('', 0)"),
}


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, Path]]:
    """Return the exit code, the output and the run folder of each case."""
    folder = tmp_path_factory.mktemp("supervised")
    words = ["-c", SUPERVISED + RANKS, str(folder), *CASES]
    codes, outputs = start_ranks(len(CASES), words, folder=folder, seconds=60)
    folders = [folder / what for what in CASES]
    return dict(zip(CASES, zip(codes, outputs, folders, strict=True), strict=True))


@pytest.mark.parametrize("what", CASES)
def test_a_supervisor(what: str, supervised: dict[str, tuple[int, str, Path]]) -> None:
    code, output, folder = supervised[what]
    expected, said = CASES[what]
    assert code == expected, output
    assert said in output
    assert what == "hang at start" or "('', 2)" in output
    # Before the hosts are named, the folder may be another run's.
    assert (folder / "events.jsonl").is_file() == (what == "hang")
    failure = folder.with_name(f"{what}.failure")
    assert (failure.read_text().split()[0] if failure.exists() else "0") == str(code)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(n, marks=[] if n == "full pipe" else pytest.mark.long) for n in UNREAD],
)
def test_a_supervisor_ends_its_rank_even_if_output_is_unread(kind: str, tmp_path: Path) -> None:
    codes = {"once": 0, "twice": 128 + signal.SIGTERM, "hang": HUNG, "stopped": -signal.SIGKILL,
             "hang, and so does the disk": HUNG}  # fmt: skip
    with Output(kind) as output:
        output.spoil()
        processes = {what: fork(what, tmp_path / what, output.descriptor) for what in codes}
        found = {pid: os.waitpid(pid, 0)[1] for pid in processes.values()}
        assert {
            what: os.waitstatus_to_exitcode(found[pid]) for what, pid in processes.items()
        } == codes
        if kind == "full pipe":
            expected = {"no progress for 1 s", "has not answered for 5 s"}
            deadline = time.monotonic() + 30  # the watchdog speaks after it has killed the rank
            while not all(line in (text := output.text()) for line in expected):
                assert time.monotonic() < deadline, text
                time.sleep(0.02)


def fork(what: str, folder: Path, output: int) -> int:
    """Fork a process that runs a case and is killed after a minute; return its process ID."""
    if pid := os.fork():
        return pid
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.alarm(60)
        exec(SUPERVISED + "supervise(folder, what)", {"folder": folder, "what": what})
    finally:
        os._exit(1)


def test_a_supervisor_leaves_without_another_look(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threefold.supervision.supervisor.SECONDS_OF_TICK", 30)
    own = Supervisor(RunFolder(tmp_path), Breadcrumb(), hang_seconds=0, startup_seconds=0)
    with mock.patch.object(own, "_look_at_progress") as look, own.start():
        pass
    assert not look.called


STARTING = """
import os, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from threefold.runtime.launchers import Process
from threefold.runtime.processes import start_processes
from threefold.run_folder.folder import RunFolder
from threefold.supervision.hang_report import Breadcrumb
from threefold.supervision import supervisor
from threefold.supervision.supervisor import Supervisor
from threefold.config.parallel_dims import LaunchEnvironment

supervisor.SECONDS_OF_TICK = 0.4
world = LaunchEnvironment.from_environment(os.environ)
start_processes(world, patience_seconds=5000)
for group in (dist.group.WORLD, dist.new_group()):
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout > timedelta(seconds=5000), backend.options._timeout
crumb = Breadcrumb()
Supervisor(RunFolder(Path(sys.argv[1])), crumb, hang_seconds=9, startup_seconds=4).start()
pid = [os.getpid()]
dist.broadcast_object_list(pid)
if world.rank == 1:
    peer = Process(pid[0])
    with crumb.waiting_for_disk("waiting for data"):
        while peer.state() not in ("", "Z"):
            time.sleep(0.2)
    os._exit(7)
for _ in range(23):  # longer than rank 1's first report is recent
    crumb.note("building the engine")
    time.sleep(0.2)
dist.barrier()
"""


def test_the_rank_that_waits_for_a_disk_is_named_by_those_that_wait_for_it(tmp_path: Path) -> None:
    script = tmp_path / "starting.py"
    script.write_text(STARTING)
    arguments = ["-c", f"exec(open({str(script)!r}).read())", str(tmp_path)]
    codes, outputs = start_ranks(2, arguments, folder=tmp_path, seconds=120)
    said = "".join(outputs)
    assert codes == [HUNG, 7], said
    assert re.search(
        r"no progress for 4 s: rank 1 is behind: start-up, waiting for data; it waits in no "
        r"collective, .*rank 0 \(.*\): start-up, building the engine; it waits in barrier", said
    ), said  # fmt: skip


@pytest.mark.parametrize(
    ("package", "module", "name", "doing"),
    [
        ("engine", "build", "build_engine", "building the engine"),
        pytest.param(
            "checkpoint", "resume", "find", "verifying checkpoints", marks=pytest.mark.long
        ),
    ],
)
def test_a_run_is_supervised_while_it_starts(
    package: str, module: str, name: str, doing: str, small: dict, tmp_path: Path
) -> None:
    recipe, script = tmp_path / "recipe.toml", tmp_path / "stuck.py"
    recipe.write_text(
        tomli_w.dumps(changed(small, layout__tensor=2, supervision={"startup_seconds": 4}))
    )
    script.write_text(
        "import sys, time\n"
        "from recipes import pretrain\n"
        f"from threefold.{package} import {module}\n"
        "import torch.distributed as dist\n"
        f"function = {module}.{name}\n"
        "def stuck(*arguments, **options):\n"
        "    time.sleep(600 if dist.get_rank() == 1 else 0)\n"
        "    return function(*arguments, **options)\n"
        f"{module}.{name} = stuck\n"
        f"sys.argv = ['pretrain.py', {str(recipe)!r}, '--run-dir', {str(tmp_path / 'run')!r}]\n"
        "pretrain.main()\n"
    )
    arguments = ["-c", f"exec(open({str(script)!r}).read())"]
    codes, outputs = start_ranks(2, arguments, folder=tmp_path, seconds=240)
    said = "".join(outputs)
    assert HUNG in codes, said
    assert re.search(rf"rank 1 \(.*\) is behind: start-up, {doing}", said), said


def test_a_hang_is_described_when_the_report_cannot_be_written(tmp_path: Path) -> None:
    report = HangReport(tmp_path / "absent", NAMES)
    with pytest.raises(OSError, match="no rank could write there"):
        report.verdict(status(1))
    other = HangReport(tmp_path, NAMES)
    other.write((status(2), "the stack"))
    said, _ = HangReport(tmp_path, NAMES).verdict(status(1))  # could not write its own
    assert said.startswith("rank 0 (node1), rank 3 (node2) do not answer")
    assert said.endswith(f"{tmp_path} has the stacks of 1 of the 4 ranks")


def test_files_of_an_earlier_hang_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "described").touch()
    report = HangReport(tmp_path, NAMES[:2], fresh_seconds=10)
    for rank in (0, 1):
        report.write((status(rank), "the stack"))
    before = time.time() - 60
    os.utime(tmp_path / "rank-00000.txt", (before, before))
    assert report.verdict(status(1))[0].startswith("rank 0 (node1) does not answer")
    assert report.verdict(status(1)) == ("", [])


def test_waiting_for_a_disk_ends_with_an_error_too() -> None:
    crumb = Breadcrumb()
    with pytest.raises(OSError), crumb.waiting_for_disk("saving"):
        with crumb.waiting_for_disk("reading"):
            pass
        assert crumb.patient
        raise OSError
    assert not crumb.patient


@pytest.mark.parametrize(("waits_for_room", "reports"), [(False, 10), (True, 0)])
def test_a_wait_for_room_on_a_full_disk_is_not_reported_as_a_hang(
    waits_for_room: bool, reports: int
) -> None:
    supervisor = Supervisor.__new__(Supervisor)
    supervisor.crumb, supervisor.limit, supervisor._disk = Breadcrumb(), 4, mock.Mock()
    supervisor._report, supervisor._seen, supervisor.names = mock.Mock(), -1, NAMES
    supervisor._still = supervisor._idle = 0
    supervisor._reported = supervisor._ending = False
    with supervisor.crumb.waiting_for_disk("saving"):
        supervisor.crumb.wait_for_room(waits_for_room)
        for _ in range(21):  # seconds
            supervisor._look_at_progress()
    assert supervisor._disk.run.call_count == reports and not supervisor._ending


def test_the_time_limit_of_collectives_exceeds_the_patience_of_supervision() -> None:
    with mock.patch.dict(os.environ):
        os.environ.pop("DEEPSPEED_TIMEOUT", None)
        assert collective_timeout(0) == default_pg_timeout
        assert collective_timeout(1800) > timedelta(seconds=1800)
        assert collective_timeout(None) > timedelta(days=30)
        os.environ["DEEPSPEED_TIMEOUT"] = "1"
        assert collective_timeout(1800) == default_pg_timeout
    assert Supervision(hang_seconds=7, startup_seconds=5).patience_seconds == 7
    assert Supervision(hang_seconds=0).patience_seconds is None
    assert Supervision(startup_seconds=0).patience_seconds is None


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_only_the_right_process_is_killed(has_pidfds: bool) -> None:
    process = subprocess.Popen(["sleep", "60"])
    no_pidfds = mock.patch("os.pidfd_open", side_effect=OSError(errno.ENOSYS, ""))
    with contextlib.nullcontext() if has_pidfds else no_pidfds:
        handle = Process(process.pid)
        assert handle.state() in "RSD"  # D: it still reads its program from the disk
        with mock.patch.object(handle, "_started", "1"):  # another one had this number before
            assert handle.state() == "" and not handle.kill()
        assert process.poll() is None
        assert handle.kill() and process.wait(timeout=10) == -signal.SIGKILL
        assert handle.state() == "" and not handle.kill()
    with pytest.raises(OSError):
        Process(process.pid)


def test_a_breadcrumb_describes_the_activity() -> None:
    crumb = Breadcrumb()
    assert str(crumb) == "start-up, starting"
    crumb.note("waiting for data", step=3)
    crumb.note("ForwardPass", micro_batch=2)
    assert str(crumb) == "step 3, ForwardPass of micro-batch 2" and crumb.count == 2


def test_the_collective_of_a_stack_is_found() -> None:
    code = compile("def all_reduce():\n    return inner()\n", hang_report.TORCH_COLLECTIVES, "exec")
    space = {"inner": lambda: sys._getframe()}
    exec(code, space)
    assert collective_of(space["all_reduce"]()) == "all_reduce"
    assert collective_of(sys._getframe()) == ""


def test_a_stage_that_waits_for_another_is_in_a_collective() -> None:
    class Receiving:
        def wait(self) -> None:
            self.seen = collective_of(sys._getframe())

    def receive(receiving: Receiving) -> str:
        wait_for(receiving)
        return receiving.seen

    assert receive(Receiving()) == "receive"


def test_a_rank_that_waits_for_its_tensor_peers_is_in_a_collective() -> None:
    running = mock.Mock()
    running.wait = lambda: setattr(running, "seen", collective_of(sys._getframe()))
    with mock.patch("torch.distributed.all_reduce", return_value=running):
        begin_sum_of_copies(torch.ones(1), TensorAxis(size=2))()
    assert running.seen == "all_reduced"


# A process with a watchdog that ticks five times per second and lets it be silent for a second.
WATCHED = """
import os, subprocess, sys, time
FAST = (
    "import os; from threefold.supervision import watchdog; "
    "watchdog.SECONDS_OF_TICK = 0.2; watchdog.main(); os._exit(0)"
)
command = [sys.executable, "-c", FAST, str(os.getpid()), "rank 5 (node1)"]
watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
def beat():
    watchdog.stdin.write(b"5\\n")
    watchdog.stdin.flush()
"""


@pytest.fixture
def watched() -> subprocess.Popen:
    """Return a process with a watchdog, which sends heartbeats as long as it runs."""
    beating = "print(watchdog.pid, flush=True)\nwhile True:\n    beat(); time.sleep(0.3)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED + beating],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_a_watchdog_ends_a_stopped_rank_and_nothing_else(watched: subprocess.Popen) -> None:
    assert watched.stdout.readline()
    time.sleep(1.5)
    assert watched.poll() is None  # it sends heartbeats
    os.killpg(watched.pid, signal.SIGSTOP)  # all of the job, watchdog included, as Ctrl-Z does
    time.sleep(1.5)
    os.killpg(watched.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert watched.poll() is None
    os.kill(watched.pid, signal.SIGSTOP)
    assert watched.wait(timeout=10) == -signal.SIGKILL
    words = watched.communicate(timeout=10)[1]  # read until the watchdog has ended, too
    assert "rank 5 (node1) has not answered for 5 s and was killed" in words


def test_a_watchdog_leaves_a_rank_alone_that_has_ended_by_itself() -> None:
    ending = (
        "beat()\ntime.sleep(0.5)\n"
        "if os.fork() == 0:\n"  # keeps the pipe to the watchdog open
        "    os.close(1); os.close(2); time.sleep(3)\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", WATCHED + ending]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")  # read until the watchdog has ended, too


def test_a_watchdog_ends_with_its_rank(watched: subprocess.Popen) -> None:
    assert watched.stdout.readline()
    watched.kill()
    assert watched.communicate(timeout=10)[1] == ""  # read until the watchdog has ended, too


def test_a_request_to_stop_names_the_lowest_rank_that_received_one(
    world: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C, `deepspeed` sends SIGTERM, which one rank may see first and another later.

    Of the ranks that receive the same signal, one of the run or of each node prints a message.
    """
    ranks = []
    for rank in range(4):
        own = Supervisor(RunFolder(tmp_path), Breadcrumb(), hang_seconds=0, startup_seconds=0)
        own.names, own.rank = [""] * 4, rank
        own.name_hosts(["node1", "node1", "node2", "node2"])
        ranks.append(own)
    assert ranks[0]._decoded_request(max(own._encoded_request() for own in ranks)) == ""
    for own in ranks[2:]:  # on one node only
        own._launchers, own._stopped = [mock.Mock(pid=47, state=lambda: "")], Counter()
        own._look_at_launchers()
    said = "rank 2 (node2): its launcher (process 47) has exited; stopping after this step\n"
    assert capsys.readouterr().err == said
    reason = ranks[0]._decoded_request(max(own._encoded_request() for own in ranks))
    assert reason == "the launcher of rank 2 on node2 has exited"
    for own in ranks[:2]:
        own._on_signal(signal.SIGINT if own.rank else signal.SIGTERM)
    assert capsys.readouterr().err == "rank 0 (node1): SIGTERM; stopping after this step\n"
    reasons = {
        own._decoded_request(max(other._encoded_request() for other in ranks)) for own in ranks
    }
    assert reasons == {"SIGTERM to rank 0 on node1"}
    for own in ranks:
        own._signals, own._before = mock.Mock(note=lambda _: "other"), {signal.SIGTERM: None}
        own._on_signal(signal.SIGTERM)
    assert capsys.readouterr().err == "rank 0 (node1): received SIGTERM; still stopping\n"
    with mock.patch.object(supervisor, "end_rank") as end:
        for own in ranks:
            own._signals = mock.Mock(note=lambda _: "repeated")
            own._on_signal(signal.SIGTERM)
    assert end.mock_calls == [mock.call(128 + signal.SIGTERM)] * 4
    said = [f"{ranks[n].names[n]}: received SIGTERM again; exiting at once\n" for n in (0, 2)]
    assert capsys.readouterr().err == "".join(said)  # nodes may be signalled one by one


@pytest.mark.parametrize("folder", ["models", "recipes", "threefold/pipeline", ".venv/lib"])
def test_a_report_names_the_innermost_line_of_this_project(folder: str) -> None:
    """The line of the test's own call is in no folder of the project's code."""
    names: dict[str, Any] = {"line_of": lambda: innermost_line(sys._getframe())}
    code = compile("def wait():\n    return line_of()", str(REPOSITORY / folder / "x.py"), "exec")
    exec(code, names)
    expected = f"{folder}/x.py:2 wait" if folder != ".venv/lib" else "an unknown line"
    assert names["wait"]() == expected
