"""launch.py's attempts, on this machine, with small processes in place of ranks."""

import errno
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tomli_w

from tests.conftest import changed
from threefold.checkpoint.snapshots.names import FOLDER_VARIABLE
from threefold.checkpoint.snapshots.node_memory import Client, NodeMemory
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.launch import attempt as attempt_module
from threefold.launch import connection as connection_module
from threefold.launch import hosts as hosts_module
from threefold.launch import launcher as launcher_module
from threefold.launch.attempt import Attempt, Command, forwarded, in_container
from threefold.launch.connection import Agent, AgentReport, on_this_machine
from threefold.launch.diagnosis import Failures, shown
from threefold.launch.launcher import Announcements, Launcher
from threefold.launch.replanning import Placement
from threefold.plan.memory.peak import StageMemory
from threefold.pretrain.preflight.evaluate import SPARE_NODES
from threefold.run_folder.folder import RunFolder
from threefold.runtime.exits import FINISHED, HUNG, INTERRUPTED, STOPPED, UNFIT

# A rank that ends as the file "end-RANK" says, saves and exits with 5 on a signal, and dies with
# its parent. The first rank writes the events of a run.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
lease = sys.argv[sys.argv.index("--lease") + 1]
parent = os.getppid()
def save(*_):
    if rank == 0:
        step = len(list((folder / "checkpoints").glob("step-*"))) + 1
        (folder / "checkpoints" / f"step-{step:07d}").mkdir(parents=True)
    os._exit(5)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
with (folder / "events.jsonl").open("a") as stream:
    if rank == 0:
        stream.write(json.dumps({"event": "first_step", "step": 1}) + "\\n")
fresh = folder / f"fresh-{rank}"
fresh.write_text(json.dumps(
    {"argv": sys.argv, "pid": os.getpid(), "variables": dict(os.environ)}))
fresh.rename(folder / f"started-{lease}-{rank}")
end = folder / f"end-{rank}"
while os.getppid() == parent:
    if end.exists():
        code = int(end.read_text())
        end.unlink()
        # If another rank were killed before it has read its file, the file would end a later rank.
        while (any(folder.glob("new-*")) or any(folder.glob("end-*"))) and os.getppid() == parent:
            time.sleep(0.01)
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    time.sleep(0.02)
os._exit(1)
"""


NO_MEMORY = StageMemory(
    weights=0, gradients=0, optimizer=0, activations=0, working=0, buffers=0, overhead=0
)


class Planner:
    """Layouts for up to `nodes` nodes, but not for the numbers in `without`.

    chosen: the layouts count as chosen by launch.py
    """

    def __init__(self, nodes: int, without: tuple[int, ...], *, chosen: bool):
        self.nodes, self.without, self.chosen = nodes, without, chosen
        self.excluded = 0

    def best(self, available: int, minimum: int) -> Placement | None:
        for nodes in range(min(available, self.nodes), max(minimum, 1) - 1, -1):
            if nodes not in self.without:
                name = f"data {nodes}, layout {self.excluded}"
                overrides = [f"cluster.nodes={nodes}"]
                return Placement(nodes, overrides, name, 1.0, memory=NO_MEMORY, chosen=self.chosen)
        return None

    def exclude(self, placement: Placement) -> None:
        self.excluded += 1


class Running:
    """A launcher in a thread, and the processes that it has started."""

    def __init__(self, launcher: Launcher, folder: Path):
        self.launcher, self.folder = launcher, folder
        self.codes: list[int] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(launcher.run()))
        self.thread.start()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in RunFolder(self.folder).read_events() if e["event"] == name]

    def wait_for_attempt(self, number: int, ranks: int) -> dict[int, dict[str, Any]]:
        """Wait until the ranks of an attempt have started; return what they wrote."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            files = list(self.folder.glob(f"started-*.{number}-*"))
            if len(files) == ranks:
                return {int(f.name.rpartition("-")[2]): json.loads(f.read_text()) for f in files}
            time.sleep(0.02)
        raise AssertionError(f"attempt {number} has not started")

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until the launcher has done something."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.events("attempt")
            time.sleep(0.02)

    def end_ranks(self, codes: dict[int, int]) -> None:
        """Let ranks end with these codes."""
        for rank, code in codes.items():
            (self.folder / f"new-{rank}").write_text(str(code))
        for rank in codes:
            (self.folder / f"new-{rank}").rename(self.folder / f"end-{rank}")

    def agent(self, host: str) -> int:
        """Return the process of a host's agent."""
        return self.launcher.connections.agents[host].process.pid

    def wait(self) -> int:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.codes[0]


@pytest.fixture
def start(tmp_path: Path, small: dict, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that starts a launcher on three hosts, two of which have ranks."""
    monkeypatch.setattr(connection_module, "SECONDS_PER_POLL", 0.02)
    monkeypatch.setattr(hosts_module, "SECONDS_BETWEEN_CONNECTS", 1.0)
    monkeypatch.setattr(attempt_module, "SECONDS_FOR_MESSAGES", 0.2)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    started = []

    def begin(
        *, hosts: list[str] | None = None, nodes: int = 2, without: tuple[int, ...] = (),
        chosen: bool = False, supervision: Any = MappingProxyType({}),
        variables: Any = MappingProxyType({"GREETING": "hello"}), connect: Any = on_this_machine,
        shares_machine: bool = True, python: Any = (sys.executable,),
        checkpoint: Any = MappingProxyType({}), **cluster: Any,
    ) -> Running:  # fmt: skip
        names = hosts if hosts is not None else ["node1", "node2", "node3"]
        table = changed(
            small,
            supervision={"node_seconds": 2} | supervision,
            checkpoint={"every": 100} | checkpoint,
            cluster={"nodes": nodes, "gpus_per_node": 1, "gpu": "cpu", "standby": False} | cluster,
        )
        folder = RunFolder(tmp_path / "run")
        folder.hold()
        words = [python[-1], str(script), str(folder.path)]
        command = Command(
            words=words,
            variables=variables,
            ranks_per_node=1,
            shares_machine=shares_machine,
            python=python,
        )
        launcher = Launcher(
            parse_recipe(table, "small"),
            folder,
            command,
            replanner=Planner(nodes, without, chosen=chosen),  # type: ignore[arg-type]
            list_hosts=lambda: list(names),
            connect=connect,
        )
        started.append(Running(launcher, folder.path))
        return started[-1]

    yield begin
    for running in started:
        running.launcher.stop_requests = 2
        running.thread.join(30)


def test_a_run_that_finishes(start: Any, capfd: pytest.CaptureFixture) -> None:
    running = start()
    ranks = running.wait_for_attempt(1, ranks=2)
    assert {r["variables"]["RANK"] for r in ranks.values()} == {"0", "1"}
    assert ranks[1]["variables"]["WORLD_SIZE"] == "2"
    assert ranks[1]["variables"]["LOCAL_RANK"] == "0"
    assert ranks[0]["variables"]["MASTER_PORT"] == ranks[1]["variables"]["MASTER_PORT"]
    assert ranks[0]["variables"]["GREETING"] == "hello"
    assert ranks[0]["argv"][2:4] == ["--set", "cluster.nodes=2"]
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    (event,) = running.events("attempt")
    assert event["nodes"] == ["node1", "node2"]
    assert event["unused"] == {"node3": "spare"}
    assert (
        "attempt 1 on node1, node2: data 2, layout 0; not used: node3 (spare)"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("first", "reported", "address"),
    [("root@node1", "10.1.2.3", "10.1.2.3"), ("alias", "10.1.2.3", "10.1.2.3"),
     ("node1", "10.1.2.3", "node1"), ("node1", "", "node1"), ("alias", "", "alias"),
     ("root@node1", "", "node1"), ("root@localhost", "", "machine1"),
     ("127.0.0.1", "", "machine1")],
)  # fmt: skip
def test_the_ranks_meet_at_the_address_of_the_first_host(
    first: str, reported: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ("node1", "node2", "localhost", "127.0.0.1")
    monkeypatch.setattr(attempt_module, "has_address", lambda name: name in known)
    sent: list[tuple[str, dict[str, Any]]] = []
    agents = {}
    for host, own in ((first, reported), ("node2", "10.1.2.4")):
        agents[host] = agent = Agent(host, mock.Mock(), address=own, machine="machine1", ready=True)
        agent.server = {"port": 5, "secret": "x"}
        agent.send = lambda command, host=host: sent.append((host, command))  # type: ignore[method-assign,misc]
    port = AgentReport(first, {"is": "port", "port": 29501})
    connections = SimpleNamespace(agents=agents, reports=lambda: [port])
    nodes = SimpleNamespace(agent=agents.get, connections=connections, spares=lambda hosts: 0)
    placement = Planner(2, (), chosen=False).best(2, 2)
    attempt = attempt_module.Attempt(
        1,
        "x.1",
        nodes=nodes,
        hosts=[first, "node2"],
        placement=placement,  # type: ignore[arg-type]
    )
    attempt.start(Command(words=["rank"], variables={}, ranks_per_node=1))
    starts = [command for _, command in sent if command["do"] == "start"]
    assert [start["variables"]["MASTER_ADDR"] for start in starts] == [address] * 2
    assert {server["address"] for server in starts[0]["servers"]} == {address, "node2"}


def test_a_name_of_ssh_alone_has_no_address() -> None:
    assert attempt_module.has_address("localhost") and attempt_module.has_address("127.0.0.1")
    assert not attempt_module.has_address("alias.invalid")
    assert not attempt_module.has_address("x" * 70)


def test_ranks_on_one_host_meet_at_the_loopback_address(start: Any) -> None:
    running = start(hosts=["root@localhost"], nodes=1, shares_machine=False)
    ranks = running.wait_for_attempt(1, ranks=1)
    assert ranks[0]["variables"]["MASTER_ADDR"] == "127.0.0.1"
    running.end_ranks({0: FINISHED})
    assert running.wait() == FINISHED


def test_many_large_variables_reach_every_rank(start: Any) -> None:
    """More than the pipe to an agent holds."""
    large = {f"NCCL_{number}": "x" * 50_000 for number in range(4)}
    running = start(variables=large)
    ranks = running.wait_for_attempt(1, ranks=2)
    assert all(ranks[1]["variables"][name] == value for name, value in large.items())
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_a_rank_that_hangs_at_its_end_does_not_hold_the_run(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "SECONDS_FOR_ORDERLY_END", 0.3)
    running = start()
    running.wait_for_attempt(1, ranks=2)
    running.end_ranks({0: FINISHED})
    assert running.wait() == FINISHED


def test_the_second_signal_does_not_reach_ranks_that_save(start: Any) -> None:
    """A user stops the run while it saves in order to use more nodes."""
    running = start()
    running.wait_for_attempt(1, ranks=2)
    for agent in running.launcher.connections.agents.values():
        agent.send({"do": "signal", "number": int(signal.SIGUSR1)})
    running.launcher.request_stop()
    running.launcher.request_stop()  # an echo within two seconds is the same request
    assert running.launcher.stop_requests == 1
    assert running.wait() == INTERRUPTED
    assert len(list((running.folder / "checkpoints").iterdir())) == 1


def test_ranks_that_have_saved_before_their_agents_were_ended_are_believed(
    start: Any, capfd: pytest.CaptureFixture
) -> None:
    """After scancel, Slurm signals launch.py and the agents at the same time."""
    running = start()
    running.wait_for_attempt(1, ranks=2)
    RunFolder(running.folder).event("stop", 72, reason="saved at step 72", exit_code=INTERRUPTED)
    running.launcher.request_stop()
    for agent in list(running.launcher.connections.agents.values()):
        agent.process.send_signal(signal.SIGTERM)
    assert running.wait() == INTERRUPTED
    assert "asked to stop, and the ranks saved at step 72" in capfd.readouterr().err


def test_a_program_that_cannot_be_started_is_not_the_end(
    start: Any, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only in this test: in those where node3 answers, a loaded machine may need more time.
    monkeypatch.setattr(launcher_module, "SECONDS_FOR_SPARE_NODES", 0.3)

    def connect(host: str, command: Any) -> list[str]:
        return ["/absent/ssh", host] if host == "node3" else list(command)

    running = start(connect=connect)
    running.wait_for_attempt(1, ranks=2)
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    assert "no connection to node3: No such file or directory" in capfd.readouterr().err


def test_a_first_node_that_names_no_port_is_replaced(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent sends heartbeats, but its answers with a port are lost."""
    monkeypatch.setattr(hosts_module, "SECONDS_BETWEEN_CONNECTS", 60.0)
    monkeypatch.setattr(attempt_module, "SECONDS_TO_ANSWER", 1.0)

    def connect(host: str, command: Any) -> list[str]:
        agent = shlex.join(command)
        return (
            ["sh", "-c", f"{agent} | grep --line-buffered -v port"]
            if host == "node1"
            else list(command)
        )

    running = start(connect=connect)
    ranks = running.wait_for_attempt(2, ranks=2)
    first, second = running.events("attempt")
    assert (first["nodes"], second["nodes"]) == (["node1", "node2"], ["node2", "node3"])
    assert second["reason"] == "node1: no answer for 1 s"
    assert second["time"] - first["time"] < attempt_module.SECONDS_TO_KILL
    assert not list(running.folder.glob("started-*.1-*"))  # no rank without a port
    assert int(ranks[0]["variables"]["MASTER_PORT"]) > 0
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_a_lost_node_is_replaced_by_a_spare_one(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SECONDS_BETWEEN_CONNECTS", 60.0)
    running = start()
    running.wait_for_attempt(1, ranks=2)
    os.kill(running.agent("node2"), signal.SIGKILL)
    running.wait_for_attempt(2, ranks=2)
    _, second = running.events("attempt")
    assert second["nodes"] == ["node1", "node3"]
    assert second["reason"] == "node2: connection closed"
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_a_suspended_node_is_left_out_and_used_again_when_it_returns(start: Any) -> None:
    running = start(hosts=["node1", "node2"])
    running.wait_for_attempt(1, ranks=2)
    suspended = running.agent("node2")
    os.kill(suspended, signal.SIGSTOP)
    running.wait_for_attempt(2, ranks=1)
    assert running.events("attempt")[1]["reason"].startswith("node2: no sign of life for 2")
    # Here, a new agent is started at once, as on a node that has been rebooted.
    running.wait_for_attempt(3, ranks=2)
    assert running.events("attempt")[2]["reason"] == "more nodes are available"
    assert running.events("attempt")[2]["step"] == 1  # saved before the restart
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_a_node_whose_time_ends_between_two_looks_is_lost(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(hosts=["node1", "node2"])
    running.wait_for_attempt(1, ranks=2)
    suspended, looks = running.agent("node2"), itertools.count()
    is_silent = hosts_module.Nodes.is_silent

    def silent_at_every_second_look(nodes: Any, host: str) -> bool:
        agent = nodes.agent(host)
        if agent is None or agent.process.pid != suspended:
            return is_silent(nodes, host)
        return next(looks) % 2 == 1

    monkeypatch.setattr(hosts_module.Nodes, "is_silent", silent_at_every_second_look)
    running.wait_until(lambda: len(running.events("attempt")) == 2)
    assert running.events("attempt")[1]["reason"].startswith("node2: no sign of life for 2")


def test_a_killed_rank_restarts_the_run_and_is_blamed(start: Any) -> None:
    running = start()
    for number in (1, 2):
        running.wait_for_attempt(number, ranks=2)
        assert running.events("attempt")[-1]["nodes"] == ["node1", "node2"]
        running.end_ranks({0: 1, 1: -signal.SIGKILL})
    running.wait_for_attempt(3, ranks=2)
    last = running.events("attempt")[-1]
    assert last["nodes"] == ["node1", "node3"]
    assert last["reason"] == "rank 1 (node2) was killed by SIGKILL"
    assert last["unused"] == {"node2": "left out: 2 failures within 24 hours"}
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_a_hang_is_blamed_on_the_rank_that_is_behind(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    running.wait_for_attempt(1, ranks=2)
    folder, stat, read = (
        RunFolder(running.folder),
        Path.stat,
        mock.Mock(wraps=launcher_module.events_of),
    )
    monkeypatch.setattr(launcher_module, "events_of", read)
    folder.event("warning", 0, message="")
    running.wait_until(lambda: read.called)
    cached = folder.events.stat()  # NFS answers from its cache until the file is opened again
    monkeypatch.setattr(
        Path, "stat", lambda path, **how: cached if path == folder.events else stat(path, **how)
    )
    folder.event("stop", 1, exit_code=HUNG, behind=[1])
    running.end_ranks({0: HUNG, 1: HUNG})
    running.wait_for_attempt(2, ranks=2)
    assert running.events("attempt_end")[0]["blamed"] == ["node2"]
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def find_unfit(running: Running, *, broken: bool) -> None:
    """Let the preflight of the running attempt name its second node."""
    node = {"rank": 1, "reason": "rank 1 (vm): the reason", "broken": broken}
    RunFolder(running.folder).event("preflight", 0, left_out=[node])
    running.end_ranks({0: UNFIT, 1: UNFIT})


def test_a_slow_node_is_replaced_by_a_spare_one_and_used_last(
    start: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(hosts_module, "SECONDS_BETWEEN_CONNECTS", 60.0)
    running = start(node_failures=1)
    ranks = running.wait_for_attempt(1, ranks=2)
    assert ranks[0]["variables"][SPARE_NODES] == "1"
    find_unfit(running, broken=False)
    ranks = running.wait_for_attempt(2, ranks=2)
    assert ranks[0]["variables"][SPARE_NODES] == "0"  # a slow node does not count
    _, second = running.events("attempt")
    assert second["nodes"] == ["node1", "node3"]
    assert second["unused"] == {"node2": "spare, because it was slow"}
    assert second["reason"] == "preflight: node2: rank 1 (vm): the reason"
    assert running.events("attempt_end")[0]["slow"] == ["node2"]
    os.kill(running.agent("node1"), signal.SIGKILL)
    running.wait_for_attempt(3, ranks=2)
    assert running.events("attempt")[2]["nodes"] == ["node3", "node2"]
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    assert "node2 will be used only if no other node is left" in capfd.readouterr().err


def test_a_broken_node_is_never_used_again(start: Any, capfd: pytest.CaptureFixture) -> None:
    running = start(hosts=["node1", "node2"], node_failures=0)
    assert running.wait_for_attempt(1, ranks=2)[0]["variables"][SPARE_NODES] == "0"
    find_unfit(running, broken=True)
    running.wait_for_attempt(2, ranks=1)
    _, second = running.events("attempt")
    assert second["nodes"] == ["node1"]
    assert second["unused"] == {"node2": "left out: the preflight has found it broken"}
    running.end_ranks({0: FINISHED})
    assert running.wait() == FINISHED
    assert "node2 will not be used again for now; restarting\n" in capfd.readouterr().err


def test_too_few_nodes_are_left_after_a_preflight(
    start: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(launcher_module, "SECONDS_FOR_NODES", 0.5)
    running = start(hosts=["node1", "node2"], minimum_nodes=2)
    running.wait_for_attempt(1, ranks=2)
    find_unfit(running, broken=True)
    assert running.wait() == 1
    said = capfd.readouterr().err
    assert "1 of 2 nodes can be used, and the run needs cluster.minimum_nodes = 2" in said
    assert "(the last attempt: preflight: node2: rank 1 (vm): the reason)" in said


def test_a_preflight_that_names_no_node_stops_the_run(start: Any) -> None:
    running = start()
    running.wait_for_attempt(1, ranks=2)
    RunFolder(running.folder).event("preflight", 0)
    running.end_ranks({0: UNFIT, 1: UNFIT})
    assert running.wait() == UNFIT


# launch.py, whose rank ends as a preflight with wrong results in the first attempt.
FAULTY_LAUNCH = """
import sys
from pathlib import Path
from threefold.commands import launch
from threefold.launch import attempt
attempt.PRETRAIN = Path(sys.argv.pop(1))
launch.main()
"""
FAULTY_PRETRAIN = """
import os, sys
sys.path[0] = {repository!r}
from pathlib import Path
if sys.argv[sys.argv.index("--lease") + 1].endswith(".1"):
    from threefold.run_folder.folder import RunFolder
    node = {{"rank": 0, "reason": "rank 0: wrong results", "broken": True}}
    folder = RunFolder(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
    folder.event("preflight", 0, left_out=[node])
    os._exit({unfit})
from recipes import pretrain
from threefold.pretrain.preflight import run
run.matmul_tflops = lambda *_, **__: 1.0
pretrain.main()
"""


@pytest.mark.long
def test_a_run_of_launch_py_replaces_a_node_with_wrong_results(small: dict, tmp_path: Path) -> None:
    table = changed(
        small,
        training={"steps": 2, "evaluate_every": 0},
        supervision={"preflight": True, "preflight_ratio": 1000.0},
        cluster={"nodes": 1, "gpus_per_node": 1, "gpu": "cpu", "standby": False},
    )
    files = {
        "small.toml": tomli_w.dumps(table),
        "hosts": "node1 slots=1\nnode2 slots=1\n",
        "pretrain.py": FAULTY_PRETRAIN.format(repository=str(REPOSITORY), unfit=UNFIT),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", FAULTY_LAUNCH, tmp_path / "pretrain.py", "--launcher", "local",
         "--hostfile", tmp_path / "hosts", tmp_path / "small.toml", "--run-dir", tmp_path / "run"],
        cwd=REPOSITORY,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == FINISHED, done.stderr
    events = RunFolder(tmp_path / "run").read_events()
    nodes = [event["nodes"] for event in events if event["event"] == "attempt"]
    assert nodes == [["node1"], ["node2"]]
    (end, _) = [event for event in events if event["event"] == "attempt_end"]
    assert end["broken"] == ["node1"] and "rank 0: wrong results" in end["reason"]
    found = [event for event in events if event["event"] == "preflight"]
    assert ["left_out" in event for event in found] == [True, False]


def test_ranks_in_a_container(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A script takes the place of Apptainer and gives its processes another PATH."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    apptainer = tmp_path / "apptainer"
    apptainer.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3" = "exec --nv a.sif" ] || exit 1\nshift 3\n'
        f'export PATH={programs} IMAGE=a.sif\nexec "$@"\n'
    )
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    variables = forwarded({"PATH": "/host", "NCCL_X": "1"}, container=True)
    running = start(python=in_container("a.sif"), variables=variables)
    ranks = running.wait_for_attempt(1, ranks=2)
    assert ranks[0]["variables"]["IMAGE"] == "a.sif"
    assert ranks[0]["variables"]["PATH"] == str(programs)
    assert ranks[0]["variables"]["NCCL_X"] == "1"
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_a_container_has_its_own_programs_and_libraries() -> None:
    host = {"PATH": "/host", "LD_LIBRARY_PATH": "/lib", "CC": "gcc", "NCCL_X": "1", "HOME": "/h"}
    host |= {"SSL_CERT_FILE": "/pem", "HTTPS_PROXY": "proxy"}
    host |= {"NETRC": "/h/netrc"}  # the file of `wandb login`
    assert forwarded(host, container=True) == {
        "NCCL_X": "1", "NETRC": "/h/netrc", "HTTPS_PROXY": "proxy"
    }  # fmt: skip
    assert forwarded(host) == {name: host[name] for name in host if name != "HOME"}


def report_gpus(running: Running, host: str, *errors: tuple[str, bool]) -> None:
    """Let errors of GPUs arrive, as if the agent of a host had reported them."""
    running.launcher.nodes.note_gpus(host, {"errors": errors})


def test_a_broken_gpu_moves_the_run_to_another_node(
    start: Any, capfd: pytest.CaptureFixture
) -> None:
    running = start()
    running.wait_for_attempt(1, ranks=2)
    report_gpus(running, "node2", ("Xid 79", True), ("Xid 94", False))
    running.wait_for_attempt(2, ranks=2)
    last = running.events("attempt")[-1]
    assert last["nodes"] == ["node1", "node3"]
    assert last["reason"] == "node2: Xid 79"
    assert last["step"] == 1  # saved before the restart
    assert last["unused"] == {"node2": "left out: Xid 79"}
    told = [(e["node"], e["error"], e["left_out"]) for e in running.events("gpu_error")]
    assert told == [("node2", "Xid 79", True), ("node2", "Xid 94", False)]
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    assert "node2: Xid 79; the node is left out from the next attempt" in capfd.readouterr().err


def test_a_gpu_error_that_is_only_counted_does_not_move_the_run(start: Any) -> None:
    running = start(on_gpu_error="count")
    running.wait_for_attempt(1, ranks=2)
    report_gpus(running, "node2", ("Xid 79", True))
    running.end_ranks({0: 1, 1: 1})  # rank 0 is the first to report
    running.wait_for_attempt(2, ranks=2)
    assert running.events("attempt")[-1]["nodes"] == ["node1", "node2"]
    (end,) = running.events("attempt_end")
    assert end["blamed"] == ["node2"] and end["reason"].endswith("(node2: Xid 79)")
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_a_run_stays_on_a_broken_node_if_no_layout_fits_without_it(start: Any) -> None:
    running = start(hosts=["node1", "node2"], minimum_nodes=2)
    running.wait_for_attempt(1, ranks=2)
    report_gpus(running, "node2", ("Xid 79", True))
    running.wait_until(lambda: running.events("gpu_error"))
    time.sleep(0.1)  # a signal to the ranks would follow at once
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    assert len(running.events("attempt")) == 1


def test_gpus_are_looked_at_after_a_failure(start: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The agents find a program in place of nvidia-smi, whose GPU disappears with the failure."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat {tmp_path}/gpus && touch {tmp_path}/looked\n")
    smi.chmod(0o755)
    (tmp_path / "gpus").write_text("00000000:3B:00.0, 0\n00000000:AF:00.0, 0\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    running = start(hosts=["node1"], nodes=1)
    running.wait_for_attempt(1, ranks=1)
    running.wait_until((tmp_path / "looked").exists)
    time.sleep(0.2)  # until the agent has read the list
    (tmp_path / "gpus").write_text("00000000:3B:00.0, 0\n")
    running.end_ranks({0: STOPPED})
    running.wait_until(lambda: running.events("attempt_end"))
    (end,) = running.events("attempt_end")
    assert end["reason"] == "node1: nvidia-smi no longer lists GPU 0000:af:00"
    assert end["blamed"] == ["node1"]


def slow(running: Running, step: int, ranks: list[int]) -> None:
    RunFolder(running.folder).event("slow", step, ranks=ranks, nodes=["x"], ratio=2.0)


def test_a_slow_node_is_replaced_once(start: Any, capfd: pytest.CaptureFixture) -> None:
    running = start(hosts=["node1", "node2", "node3", "node4"])
    running.wait_for_attempt(1, ranks=2)
    slow(running, 300, [1])
    running.wait_for_attempt(2, ranks=2)
    last = running.events("attempt")[-1]
    assert last["nodes"] == ["node1", "node3"]
    assert last["reason"] == "node2: slow in 3 successive comparisons"
    assert last["unused"] == {"node2": "spare, because it was slow", "node4": "spare"}
    slow(running, 600, [1])  # the same rank: the node was not the cause
    running.wait_until(lambda: running.launcher._slow_seen == (2, 600))
    time.sleep(0.1)  # a signal to the ranks would follow at once
    assert "the same ranks were slow on other nodes" in capfd.readouterr().err
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    assert len(running.events("attempt")) == 2
    (event,) = running.events("replace")
    assert (event["nodes"], event["ranks"]) == (["node2"], [1])
    assert running.events("attempt_end")[0]["blamed"] == []


@pytest.mark.parametrize("options", [{"hosts": ["node1", "node2"]}, {"on_slow_rank": "warn"}])
def test_a_slow_node_stays_without_spare_nodes_or_on_request(start: Any, options: Any) -> None:
    running = start(**options)
    running.wait_for_attempt(1, ranks=2)
    slow(running, 300, [1])
    running.wait_until(lambda: running.launcher._slow_seen == (1, 300))
    time.sleep(0.1)  # a signal to the ranks would follow at once
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    assert len(running.events("attempt")) == 1


def end_out_of_memory(running: Running, attempt: int) -> None:
    running.wait_for_attempt(attempt, ranks=2)
    RunFolder(running.folder).event("stop", 1, exit_code=STOPPED, out_of_memory=True)
    running.end_ranks({0: STOPPED, 1: STOPPED})


def test_out_of_memory_in_a_layout_of_launch_py_leads_to_the_next_one(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "MAX_EXCLUDED_LAYOUTS", 1)
    running = start(chosen=True)
    end_out_of_memory(running, 1)
    end_out_of_memory(running, 2)
    assert running.wait() == STOPPED  # a layout was excluded before
    layouts = [event["layout"] for event in running.events("attempt")]
    assert layouts == ["data 2, layout 0", "data 2, layout 1"]
    assert running.events("attempt")[1]["reason"].startswith("memory ran out in a layout")


def test_out_of_memory_in_the_layout_of_the_recipe_stops_the_run(start: Any) -> None:
    running = start()
    end_out_of_memory(running, 1)
    assert running.wait() == STOPPED


def test_other_stops_in_a_layout_of_launch_py_stop_the_run(start: Any) -> None:
    running = start(chosen=True)
    running.wait_for_attempt(1, ranks=2)
    running.end_ranks({0: STOPPED, 1: STOPPED})
    assert running.wait() == STOPPED


def test_failures_of_earlier_starts_are_remembered(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "SECONDS_FOR_SPARE_NODES", 1000.0)  # not for node1
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for _ in range(2):
        folder.event("attempt_end", 1, blamed=["node1"])
    running = start()
    running.wait_for_attempt(1, ranks=2)
    assert running.events("attempt")[0]["nodes"] == ["node2", "node3"]
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_the_list_of_hosts_is_read_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [["node1"], ["node1", "node2"]]
    connections, failures = SimpleNamespace(agents={}), Failures(limit=0)
    nodes = hosts_module.Nodes(
        lambda: lists.pop(0),
        connections,
        failures,
        node_seconds=2,  # type: ignore[arg-type]
    )
    for _ in range(3):
        assert nodes.refresh() == ""
    assert nodes.hosts == ["node1"]
    monkeypatch.setattr(hosts_module, "SECONDS_BETWEEN_LISTS", 0.0)
    nodes.refresh()
    assert nodes.hosts == ["node1", "node2"]


def test_waiting_reports_are_read_before_a_host_counts_as_silent() -> None:
    silence = [99.0]  # seconds, while launch.py was busy
    agent = SimpleNamespace(ready=True, silent_seconds=lambda: silence[0])

    def reports() -> Iterator[Any]:
        silence[0] = 0.0
        yield from ()

    connections: Any = SimpleNamespace(agents={"node1": agent}, reports=reports)
    nodes = hosts_module.Nodes(lambda: ["node1"], connections, Failures(limit=0), node_seconds=2)
    nodes.wait_for(2, seconds=0.01, stop=lambda: False)
    assert nodes.usable() == ["node1"]


def test_the_newest_checkpoint_is_remembered_if_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "step-0000007").mkdir(parents=True)
    told = Announcements(RunFolder(tmp_path), None, 1)  # type: ignore[arg-type]
    assert told.newest_checkpoint() == 7

    def fail(folder: Path) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(launcher_module, "newest_step", fail)
    assert told.newest_checkpoint() == 7


def test_two_names_of_one_machine(
    start: Any, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents of this machine are told apart by the launcher "local", but not here."""
    monkeypatch.setattr(hosts_module, "SECONDS_BETWEEN_CONNECTS", 0.1)
    running = start(shares_machine=False, hosts=["node1", "alias"], nodes=1)
    running.wait_for_attempt(1, ranks=1)
    (used,) = running.events("attempt")[0]["nodes"]  # the first one to answer
    (other,) = {"node1", "alias"} - {used}
    assert running.events("attempt")[0]["unused"] == {other: f"the same machine as {used}"}
    time.sleep(0.3)  # the agent of the second name must not end the rank
    running.end_ranks({0: FINISHED})
    assert running.wait() == FINISHED
    assert len(running.events("attempt")) == 1
    assert capfd.readouterr().err.count("are the same machine") == 1


@pytest.mark.parametrize(
    ("machine", "machines", "hosts", "found"),
    [
        ("m1", {}, ["a", "b"], ""),
        ("m1", {"a": "m1"}, ["a", "b"], "a"),
        ("m1", {"b": "m1"}, ["a", "b"], "b"),
        ("m2", {"a": "m1", "b": "m2"}, ["a", "b"], "b"),
        ("m1", {"a": "m1"}, ["b"], ""),  # a was removed from the list
        ("m3", {"a": "m1"}, ["a", "b"], ""),
        ("", {"a": ""}, ["a", "b"], ""),  # unknown
    ],
)
def test_the_first_host_of_a_machine_owns_it(
    machine: str, machines: dict[str, str], hosts: list[str], found: str
) -> None:
    assert hosts_module.owner(machine, machines, hosts) == found


def test_a_run_that_fails_again_and_again_stops(start: Any, capfd: pytest.CaptureFixture) -> None:
    running = start(node_failures=0)
    for number in (1, 2, 3):
        running.wait_for_attempt(number, ranks=2)
        running.end_ranks({0: 9, 1: 9})
    assert running.wait() == 9
    assert "failed 3 times without a new checkpoint in the run folder" in capfd.readouterr().err


def test_bad_numbers_stop_the_run(start: Any) -> None:
    running = start()
    running.wait_for_attempt(1, ranks=2)
    running.end_ranks({0: STOPPED, 1: STOPPED})
    assert running.wait() == STOPPED


def test_a_user_stops_the_run(start: Any) -> None:
    running = start()
    running.wait_for_attempt(1, ranks=2)
    running.launcher.request_stop()
    assert running.wait() == INTERRUPTED
    assert (running.folder / "checkpoints" / "step-0000001").exists()


def test_a_second_request_kills_the_ranks_and_names_the_step_of_a_rerun(
    start: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(Attempt, "_signal", lambda *_: None)  # the ranks do not save in time
    running = start()
    running.wait_for_attempt(1, ranks=2)
    (running.folder / "checkpoints" / "step-0000007").mkdir(parents=True)
    running.launcher.stop_requests = 2
    assert running.wait() == 128 + signal.SIGKILL
    assert "killed before they had saved; a rerun resumes after step 7" in capfd.readouterr().err


def test_too_few_nodes(
    start: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(launcher_module, "SECONDS_FOR_NODES", 0.5)
    running = start(minimum_nodes=2, hosts=["node1", "node2"], without=(1, 2))
    assert running.wait() == 1
    said = capfd.readouterr().err
    assert "2 of 2 nodes can be used, and no layout fits on them" in said
    assert "then rerun the same command\n" in said


def does_not_answer(host: str, command: Any) -> list[str]:
    return ["false"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGUSR1, INTERRUPTED)]
)
def test_a_wait_for_hosts_is_announced_at_once_and_can_be_stopped(
    number: signal.Signals, code: int, start: Any, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    advice = {does_not_answer: "check the names"}
    monkeypatch.setattr(launcher_module, "ADVICE", advice)
    running = start(hosts=["node1", "node2"], connect=does_not_answer)
    said, deadline = "", time.monotonic() + 30
    while "check the names\n" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        time.sleep(0.02)
    running.launcher.request_stop(number)
    assert running.wait() == code
    said += capfd.readouterr().err
    assert said == (
        "launch.py: no answer from node1, node2: the run needs at least cluster.minimum_nodes "
        "= 1 of the 2 listed nodes; waiting up to 600 s; check the names\n"
        f"launch.py: interrupted by {number.name} before any ranks were started\n"
    )


def test_a_run_that_can_start_without_a_host_says_how_long_it_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    nodes: Any = SimpleNamespace(
        hosts=["node1", "node2"],
        connections=SimpleNamespace(connect=on_this_machine),
        missing=lambda: ["node2"],
        usable=lambda: ["node1"],
        wait_for_answers=mock.Mock(),
        wait_for_all=mock.Mock(),
    )
    launcher: Any = SimpleNamespace(
        nodes=nodes,
        cluster=SimpleNamespace(nodes=2, minimum_nodes=1),
        stop_requests=0,
        announcements=Announcements(RunFolder(tmp_path), nodes, 1),
        _is_asked=lambda: False,
    )
    Launcher._wait_at_the_start(launcher)
    assert capsys.readouterr().err == (
        "launch.py: no answer from node2: waiting up to 70 s before the run starts on the others\n"
    )
    launcher.cluster.nodes = 1  # node2 is spare
    Launcher._wait_at_the_start(launcher)
    assert capsys.readouterr().err == ""


def test_a_user_stops_a_run_that_waits_for_a_node(start: Any, capfd: pytest.CaptureFixture) -> None:
    running = start(hosts=["node1", "node2"], minimum_nodes=2)
    running.wait_for_attempt(1, ranks=2)
    find_unfit(running, broken=True)
    said, deadline = "", time.monotonic() + 30
    while "waiting up to" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        time.sleep(0.02)
    running.launcher.request_stop(signal.SIGINT)
    assert running.wait() == INTERRUPTED
    assert capfd.readouterr().err == (
        "launch.py: interrupted by SIGINT while no ranks were running; rerun the same command to "
        "resume (the last attempt: preflight: node2: rank 1 (vm): the reason)\n"
    )


def test_a_layout_may_need_fewer_nodes_than_there_are(start: Any) -> None:
    running = start(nodes=3, without=(3,))
    running.wait_for_attempt(1, ranks=2)
    assert running.events("attempt")[0]["unused"] == {"node3": "spare"}
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_progress_in_memory_counts_like_a_checkpoint(start: Any) -> None:
    running = start(node_failures=0)
    for number in range(1, 4):
        running.wait_for_attempt(number, ranks=2)
        RunFolder(running.folder).event("resume", 10 * number, from_memory=True)
        running.end_ranks({0: 9, 1: 9})
    running.wait_for_attempt(4, ranks=2)
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED


def test_ranks_learn_the_servers_of_all_snapshots(start: Any, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    snapshots = {"snapshot_every": 5, "snapshot_folder": str(memory)}
    running = start(checkpoint=snapshots)
    ranks = running.wait_for_attempt(1, ranks=2)
    folders = [NodeMemory(Path(r["variables"][FOLDER_VARIABLE])) for r in ranks.values()]
    assert {each.folder.parent for each in folders} == {memory} and len(set(folders)) == 2
    running.launcher.nodes.wait_for(3, seconds=10, stop=lambda: False)
    for each in folders:
        servers = each.servers()
        assert {server.node for server in servers} >= {"node1", "node2"}
        assert all(Client(server).listing() == {} for server in servers)
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    assert not list(memory.iterdir())


def test_a_node_without_memory_for_snapshots_still_trains(
    start: Any, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    snapshots = {"snapshot_every": 5, "snapshot_folder": str(tmp_path / "absent")}
    running = start(checkpoint=snapshots)
    ranks = running.wait_for_attempt(1, ranks=2)
    assert all(FOLDER_VARIABLE not in rank["variables"] for rank in ranks.values())
    running.end_ranks({0: FINISHED, 1: FINISHED})
    assert running.wait() == FINISHED
    assert "no snapshots in memory: " in capfd.readouterr().out


def test_long_lists_of_hosts_are_shortened() -> None:
    names = [f"node{number}" for number in range(1024)]
    assert shown(names[:2]) == "node0, node1"
    assert shown(names).endswith("node7 and 1016 more")
