"""The agent of a node: its protocol, and the end of its ranks in every case."""

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from threefold.launch import node_agent

AGENT = Path(node_agent.__file__)
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
]


class Agent:
    """An agent, started as launch.py does."""

    def __init__(
        self,
        *,
        run: str = "",
        silence: float = 30,
        stop: float = 5,
        standby: int = 0,
        script: Path = AGENT,
        begin: bool = True,
        environment: dict[str, str] | None = None,
    ):
        self.process = subprocess.Popen(
            [sys.executable, str(script), run, str(silence), str(stop), str(standby), ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | (environment or {}),
        )
        self.ranks: list[psutil.Process] = []
        self.early: list[dict[str, Any]] = []  # reports of ranks that ended while others started
        self.here = self.read()
        if begin:
            self.send({"do": "begin"})
            assert self.read() == {"is": "ready"}

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def read(self, seconds: float = 30) -> dict[str, Any]:
        if self.early:
            return self.early.pop(0)
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], seconds)[0], "no report"
        return json.loads(self.process.stdout.readline())

    def start(self, *commands: list[str], lease: str = "run.1") -> list[int]:
        """Start a rank per command; return their processes."""
        for rank, command in enumerate(commands):
            self.send(
                {
                    "do": "start",
                    "attempt": 1,
                    "command": [*command, "--lease", lease],
                    "variables": {"WORLD_SIZE": "9"},
                    "standby": True,
                    "ranks": [{"RANK": str(rank)}],
                }
            )
        self.send({"do": "beat"})
        reports = [self.read()]
        while reports[-1] != {"is": "beat"}:
            reports.append(self.read())
        self.early = reports[:-1]
        self.ranks = psutil.Process(self.process.pid).children()
        return [rank.pid for rank in self.ranks]


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Return a list of agents that are ended after the test, with the ranks that they have left."""
    started: list[Agent] = []
    yield started
    for agent in started:
        agent.process.kill()
        agent.process.wait()
        for rank in agent.ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
                rank.wait(30)


def is_alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def wait_for_end(processes: list[int], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while alive := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, f"{alive} are still alive"
        time.sleep(0.02)


def test_the_ends_of_ranks_are_reported(agents: list[Agent]) -> None:
    agents.append(agent := Agent())
    assert agent.here["is"] == "here" and agent.here["host"] == socket.gethostname()
    assert agent.here["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    agent.start([sys.executable, "-c", "import os; os._exit(7)"], SLEEP)
    assert agent.read() == {"is": "exit", "attempt": 1, "rank": 0, "code": 7}
    agent.send({"do": "signal", "number": int(signal.SIGTERM)})
    assert agent.read() == {"is": "exit", "attempt": 1, "rank": 1, "code": -signal.SIGTERM}


def test_an_agent_reports_beats_while_the_file_server_does_not_answer(
    agents: list[Agent], tmp_path: Path
) -> None:
    agents.append(agent := Agent())
    shutil.copy(shutil.which("true") or "", program := tmp_path / "program")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # tells that another process opens it
    with program.open("rb") as held:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # a process that opens it now waits
        start = {"do": "start", "attempt": 1, "command": [str(program)], "variables": {}}
        agent.send(start | {"standby": False, "ranks": [{"RANK": "0"}]})
        assert [agent.read() for _ in range(2)] == [{"is": "beat"}] * 2
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    signal.signal(signal.SIGIO, before)
    while (report := agent.read()) == {"is": "beat"}:
        pass
    assert report["is"] == "exit"


def test_a_program_that_cannot_be_started_is_reported(agents: list[Agent]) -> None:
    agents.append(agent := Agent())
    start = {"do": "start", "attempt": 3, "command": ["/absent/x.py"], "variables": {}}
    agent.send(start | {"standby": False, "ranks": [{"RANK": "4"}]})
    assert agent.read() == {"is": "exit", "attempt": 3, "rank": 4, "code": 127}


def test_children_of_a_rank_end_with_it(agents: list[Agent], tmp_path: Path) -> None:
    agents.append(agent := Agent())
    child = tmp_path / "child"
    fork = (
        "import os, time\nchild = os.fork()\n"
        f"if child:\n    open({str(child)!r}, 'w').write(str(child))\n    os._exit(0)\n"
        "time.sleep(600)"
    )
    agent.start([sys.executable, "-c", fork])
    assert agent.read()["code"] == 0
    wait_for_end([int(child.read_text())])


def test_a_torn_command_is_ignored(agents: list[Agent]) -> None:
    agents.append(agent := Agent())
    assert agent.process.stdin
    agent.process.stdin.write(b'{"do": "sta{"do": "beat"}\n')
    agent.send({"do": "beat"})
    assert agent.read() == {"is": "beat"}


STANDBY = """
import fcntl, json, os, sys, termios, time
report = os.dup(1)
os.dup2(2, 1)
print("a library prints during its import")
os.write(report, b"ready\\n")
while any(fcntl.ioctl(report, termios.FIONREAD, bytes(4))):  # until the agent has read it
    time.sleep(0.01)
open(os.environ["FILE"], "x").close()
rank = json.loads(sys.stdin.readline())
os.environ.update(rank["variables"])
open(os.environ["FILE"], "w").write(json.dumps([rank["words"], os.environ["RANK"], os.getpid()]))
"""


def test_a_standby_process_becomes_a_rank(agents: list[Agent], tmp_path: Path) -> None:
    """The agent is started from a copy of the code, with a standby.py that imports nothing."""
    shutil.copytree(AGENT.parents[1], tmp_path / "threefold")
    folder = tmp_path / "threefold" / "launch"
    (folder / "standby.py").write_text(STANDBY)
    agents.append(agent := Agent(standby=1, script=folder / "node_agent.py"))
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")
    agent.send({"do": "beat"})
    assert agent.read() == {"is": "beat"}
    assert not children.read_text()  # no standby process before its environment is known
    output = tmp_path / "out"
    agent.send({"do": "prepare", "variables": {"FILE": str(output)}})
    deadline = time.monotonic() + 30
    while not output.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    standby = int(children.read_text())
    agent.start(["python", "-u", "pretrain.py", "recipe.toml"])
    assert agent.read() == {"is": "exit", "attempt": 1, "rank": 0, "code": 0}
    words, rank, process = json.loads(output.read_text())
    assert words == ["pretrain.py", "recipe.toml", "--lease", "run.1"]
    assert (rank, process) == ("0", standby)


def test_the_address_that_ssh_has_reached_is_reported(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the system chooses the own address
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    monkeypatch.setenv("SSH_CONNECTION", f"192.0.2.9 50000 {own} 22")
    agents.append(agent := Agent())
    assert agent.here["address"] == own


@pytest.mark.parametrize(
    "connection",
    ["", "192.0.2.9 50000", "127.0.0.1 50000 127.0.0.1 22", "::1 50000 ::1 22",
     "192.0.2.9 50000 192.0.2.1 22", "192.0.2.9 50000 not-an-address.invalid 22"],
)  # fmt: skip
def test_an_address_that_other_nodes_cannot_use_is_not_reported(connection: str) -> None:
    """A loopback address, one of another machine, and one of IPv6."""
    assert node_agent.ssh_address({"SSH_CONNECTION": connection}) == ""
    assert node_agent.ssh_address({}) == ""


def test_a_free_port_is_returned(agents: list[Agent]) -> None:
    agents.append(agent := Agent())
    agent.send({"do": "port"})
    assert 1024 <= agent.read()["port"] < 2**16


@pytest.mark.parametrize("how", ["input ends", "silence", "SIGTERM"])
def test_the_ranks_end_with_launch_py(how: str, agents: list[Agent]) -> None:
    agents.append(agent := Agent(silence=1 if how == "silence" else 30, stop=1))
    ranks = agent.start(SLEEP, STUBBORN)
    assert len(ranks) == 2
    if how == "input ends":
        assert agent.process.stdin
        agent.process.stdin.close()
    elif how == "SIGTERM":
        agent.process.terminate()
    assert agent.process.wait(30) == 0
    wait_for_end(ranks)


def test_kill_ends_ranks_that_ignore_signals(agents: list[Agent]) -> None:
    agents.append(agent := Agent())
    agent.start(STUBBORN)
    agent.send({"do": "kill"})
    assert agent.read()["code"] == -signal.SIGKILL


def test_a_new_agent_ends_what_an_earlier_one_has_left(agents: list[Agent]) -> None:
    agents.append(earlier := Agent(run="f00d"))
    ranks = earlier.start(SLEEP, lease="f00d.1")
    agents.append(other := Agent(run="beef"))  # another run on the same node
    others = other.start(SLEEP, lease="beef.1")
    os.kill(earlier.process.pid, signal.SIGSTOP)  # as on a node that was suspended
    agents.append(new := Agent(run="f00d", begin=False))
    time.sleep(0.3)
    assert all(map(is_alive, [*ranks, earlier.process.pid]))  # until launch.py lets it begin
    new.send({"do": "begin"})
    wait_for_end([*ranks, earlier.process.pid])
    assert is_alive(others[0])
    assert is_alive(other.process.pid)


@pytest.mark.parametrize(
    ("first", "last", "variables", "requeued"),
    [
        ("dead", "lost", {}, True),
        ("alive", "lost", {}, False),  # the batch script decides
        ("dead", "lost", {"REQUEUE": "no"}, False),
        ("dead", "lost", {"ELASTIC": "no"}, False),
        ("dead", "end", {}, False),
        ("dead", "stop", {}, False),
        ("dead", "SIGTERM", {}, False),  # from Slurm, which ends the job
    ],
)
def test_an_elastic_job_whose_first_node_has_died_is_requeued(
    first: str,
    last: str,
    variables: dict[str, str],
    requeued: bool,
    agents: list[Agent],
    tmp_path: Path,
) -> None:
    on_first = ":" if first == "dead" else "echo 7"
    (tmp_path / "squeue").write_text(
        f'#!/bin/sh\necho "$*" >>"{tmp_path}/asked"\n'
        f'case "$*" in *=%B) echo node1;; *) {on_first} ;; esac\n'
    )
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$*" >>"{tmp_path}/requeued"\n')
    for stub in ("squeue", "scontrol"):
        (tmp_path / stub).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = {"ELASTIC": "yes", "SLURM_JOB_ID": "7"}
    agents.append(agent := Agent(environment=path | job | variables))
    ranks = agent.start(SLEEP)
    if last == "end":
        agent.send({"do": "end"})
    elif last == "stop":
        agent.send({"do": "signal", "number": int(signal.SIGTERM)})
    elif last == "SIGTERM":
        agent.process.terminate()
        agent.process.wait(30)
    assert agent.process.stdin
    agent.process.stdin.close()
    wait_for_end(ranks)
    if first == "alive":
        deadline = time.monotonic() + 30
        while (
            not (tmp_path / "asked").exists()
            or "nodelist=node1" not in (tmp_path / "asked").read_text()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        agent.process.terminate()  # as Slurm does at the end of the job
    agent.process.wait(30)
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
