"""The agent's look at the GPUs, with a program in place of nvidia-smi."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.launch.test_node_agent import Agent, agents  # noqa: F401 (a fixture)
from threefold.launch import gpu_watch
from threefold.launch.gpu_watch import NO_ANSWER, GpuError, GpuWatch

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) cat {folder}/ecc ;;
  --query-remapped-rows=*) cat {folder}/rows ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with nvidia-smi, which prints the files `ecc` and `rows`, and dmesg."""
    for name, text in (
        ("nvidia-smi", SMI.format(folder=tmp_path)),
        ("dmesg", f"#!/bin/sh\ncat {tmp_path}/log\n"),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ecc").write_text("00000000:3B:00.0, 0\n")
    (tmp_path / "rows").write_text("00000000:3B:00.0, 0, 0\n")
    (tmp_path / "log").write_text("[1.0] booted\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def look(watch: GpuWatch, *, training: bool = False) -> tuple[bool, list[GpuError]]:
    """Return the result of the next look."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if found := watch.poll(training=training):
            return found
        time.sleep(0.01)
    raise AssertionError("no look")


def hang(folder: Path) -> None:
    (folder / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")


def test_errors_are_reported_once(smi: Path) -> None:
    watch = GpuWatch()
    assert watch.present
    assert look(watch) == (False, [])
    (smi / "log").write_text("[1.0] booted\n[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, lost\n")
    (smi / "ecc").write_text("00000000:3B:00.0, 1\n")
    watch.ask()
    answer, errors = look(watch)
    assert answer
    assert [error.text.partition(":")[0] for error in errors] == [
        "Xid 79 on GPU 0000",
        "1 new uncorrectable ECC errors on GPU 0000",
    ]
    watch.ask()
    assert look(watch) == (True, [])
    assert watch.poll(training=False) is None
    assert watch._child is None  # the request has been answered


def test_a_node_that_trains_is_looked_at_again_after_a_while(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_watch, "SECONDS_BETWEEN_LOOKS", 0.2)
    watch = GpuWatch()
    assert look(watch) == (False, [])
    (smi / "rows").write_text("00000000:3B:00.0, 0, 1\n")
    time.sleep(0.5)
    assert watch.poll(training=False) is None
    assert watch._child is None  # the node has no ranks, so its GPUs are not watched
    answer, errors = look(watch, training=True)
    assert not answer and errors[0].severe


def test_a_request_during_a_look_gets_a_look_of_its_own(smi: Path) -> None:
    watch = GpuWatch()
    assert watch.poll(training=True) is None  # starts the first look
    watch.ask()
    assert look(watch) == (False, [])
    assert look(watch) == (True, [])


def test_a_look_that_cannot_be_started_is_tried_again(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = GpuWatch()
    watch.ask()

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(gpu_watch.subprocess, "Popen", fail)
        assert watch.poll(training=True) is None and watch._child is None
    assert look(watch) == (True, [])


def test_a_hanging_nvidia_smi_is_reported_and_does_not_block(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang(smi)
    monkeypatch.setattr(gpu_watch, "SECONDS_FOR_CHILD", 0.5)
    watch = GpuWatch()
    started = time.monotonic()
    watch.poll(training=True)
    assert time.monotonic() - started < 0.3
    assert look(watch) == (False, [GpuError(NO_ANSWER, severe=False)])
    assert watch._next_look > time.monotonic() + gpu_watch.SECONDS_BETWEEN_LOOKS
    assert watch.poll(training=True) is None and watch._child is None


def test_the_child_process_does_not_wait_for_nvidia_smi(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang(smi)
    monkeypatch.setattr(gpu_watch, "SECONDS_FOR_NVIDIA_SMI", 0.2)
    assert gpu_watch.look()["answers"] is False


def test_counters_survive_a_look_without_an_answer(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = GpuWatch()
    look(watch)
    program = (smi / "nvidia-smi").read_text()
    hang(smi)
    monkeypatch.setattr(gpu_watch, "SECONDS_FOR_CHILD", 0.5)
    watch.ask()
    assert look(watch) == (True, [GpuError(NO_ANSWER, severe=False)])
    monkeypatch.setattr(gpu_watch, "SECONDS_FOR_CHILD", 30.0)
    (smi / "nvidia-smi").write_text(program)
    (smi / "ecc").write_text("00000000:3B:00.0, 3\n")
    watch.ask()
    assert "3 new uncorrectable ECC errors" in look(watch)[1][0].text


def test_without_nvidia_smi_a_request_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/absent")
    watch = GpuWatch()
    assert watch.poll(training=True) is None
    watch.ask()
    assert watch.poll(training=True) == (True, [])
    assert watch.poll(training=True) is None


def test_the_agent_answers_heartbeats_while_nvidia_smi_hangs(
    smi: Path,
    agents: list[Agent],  # noqa: F811
) -> None:
    hang(smi)
    agents.append(agent := Agent())
    agent.send({"do": "look"})
    started = time.monotonic()
    for _ in range(10):
        agent.send({"do": "beat"})
        assert agent.read() == {"is": "beat"}
    assert time.monotonic() - started < 1.0


def test_the_agent_reports_the_errors_of_its_gpus(
    smi: Path,
    agents: list[Agent],  # noqa: F811
) -> None:
    agents.append(agent := Agent())
    agent.send({"do": "look"})
    assert agent.read() == {"is": "gpus", "answer": True, "errors": []}
    (smi / "log").write_text("[2.0] NVRM: Xid (PCI:0000:3b:00): 95, pid=1, Uncontained\n")
    agent.send({"do": "look"})
    text = "Xid 95 on GPU 0000:3b:00: uncontained memory error"
    assert agent.read() == {"is": "gpus", "answer": True, "errors": [[text, True]]}


def test_the_script_prints_one_line_of_json(smi: Path) -> None:
    lines = gpu_watch.run((sys.executable, gpu_watch.__file__), 30.0)
    assert lines and json.loads(lines[0])["uncorrected"] == {"0000:3b:00": 0}
