"""launch.py's connections: the pipe to an agent is used by two threads."""

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from threefold.launch.connection import (
    ADVICE,
    AgentSettings,
    Connections,
    over_srun,
    over_ssh,
)


def test_a_connection_is_not_closed_while_a_heartbeat_is_written() -> None:
    settings = AgentSettings(run="", silence_seconds=10, stop_seconds=10, standby=0)
    connections = Connections(lambda host, command: ["sleep", "60"], settings, variables={})
    agent = connections.open("node1")
    assert agent.process.stdin
    closing = threading.Thread(target=connections.close, args=("node1",))
    with agent.lock:  # as the heartbeats' thread does while it writes
        closing.start()
        closing.join(0.3)
        assert closing.is_alive() and not agent.process.stdin.closed
    closing.join(10)
    assert agent.process.stdin.closed
    connections.close_all(0)


def test_a_host_is_not_an_option_of_ssh() -> None:
    words = over_ssh("-oProxyCommand=x", ["true"])
    assert words[words.index("--") + 1] == "-oProxyCommand=x"


def test_srun_does_not_pass_on_the_address_of_the_login_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.9 50000 192.0.2.1 22")
    monkeypatch.setenv("KEPT", "x")
    command = over_srun("node1", ["sh", "-c", "echo ${SSH_CONNECTION-unset} $KEPT"])
    assert subprocess.check_output(command, text=True) == "unset x\n"


def test_the_advice_in_a_slurm_job_does_not_wait_for_a_dead_node() -> None:
    assert "drops a dead node from the job, and scontrol requeue JOB" in ADVICE[over_srun]


def test_an_agent_gets_the_variables_of_a_job_submitted_without_them() -> None:
    command = over_srun("node1", ["true"])
    assert "--export=ALL" in command[: command.index("env")]


def test_the_arguments_of_an_agent_name_its_folder_of_snapshots() -> None:
    settings = AgentSettings(
        run="f00d", silence_seconds=10, stop_seconds=300.5, standby=8, snapshots="/dev/shm/x"
    )
    assert settings.arguments("node1") == ["f00d", "10", "300.5", "8", "/dev/shm/x-node1"]


def test_the_first_report_names_the_machine_and_its_address() -> None:
    settings = AgentSettings(run="", silence_seconds=10, stop_seconds=10, standby=0)
    here = '{"is": "here", "host": "gpu7", "boot": "1", "address": "10.1.2.3"}'
    ready = '{"is": "ready"}'
    agent_of = ["sh", "-c", f"echo '{here}'; read line; echo '{ready}'; exec sleep 60"]
    connections = Connections(lambda host, command: agent_of, settings, variables={})
    agent = connections.open("root@alias")
    deadline = time.monotonic() + 30
    while not agent.ready and time.monotonic() < deadline:
        list(connections.reports())
    assert (agent.machine, agent.address) == ("gpu7", "10.1.2.3")
    connections.close_all(0)


def test_an_error_that_repeats_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Each error is printed once; attempts 2, 4, 8 with the same error are one line each."""
    settings = AgentSettings(run="", silence_seconds=10, stop_seconds=10, standby=0)
    errors = ["refused"] * 5 + ["timeout"] * 2 + ["here"] + ["timeout"] * 2
    here = '{"is": "here", "host": "gpu7", "boot": "1", "address": ""}'

    def connect(host: str, command: Sequence[str]) -> list[str]:
        if errors[0] == "here":
            return ["sh", "-c", f"echo '{here}'"]
        if errors[0] == "absent":
            return ["/absent/ssh", host]
        return ["sh", "-c", f"echo a banner >&2; echo ssh: {errors[0]} >&2; exit 255"]

    connections = Connections(connect, settings, variables={})
    while errors:
        connections.open("node1")
        while not any(report.content is None for report in connections.reports()):
            pass
        connections.close("node1")
        del errors[0]
    said = capfd.readouterr()
    lines = ["a banner", "ssh: refused", "ssh: timeout", "a banner", "ssh: timeout"]
    assert said.out.splitlines() == lines
    same = "launch.py: no connection to node1: the same error, connection attempt"
    assert said.err.splitlines() == [f"{same} 2", f"{same} 4", f"{same} 2"]
    errors += ["absent"] * 3
    while errors:
        with pytest.raises(FileNotFoundError):
            connections.open("node2")
        del errors[0]
    first = "launch.py: no connection to node2: No such file or directory"
    assert capfd.readouterr().err.splitlines() == [first, same.replace("1", "2") + " 2"]
    connections.close_all(0)


def test_an_agent_is_told_that_launch_py_ends_in_order(tmp_path: Path) -> None:
    settings = AgentSettings(run="", silence_seconds=10, stop_seconds=10, standby=0)
    connections = Connections(
        lambda host, command: ["sh", "-c", f"cat >{tmp_path}/{host}"], settings, variables={}
    )
    connections.open("node1")
    connections.close_all(30)
    assert (tmp_path / "node1").read_text().endswith('{"do": "end"}\n')
