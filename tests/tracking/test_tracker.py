import contextlib
import errno
import glob
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import wandb
from click.testing import CliRunner
from wandb.cli.cli import cli

from models.errors import UserError
from tests.conftest import changed
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress
from threefold.run_folder.json_lines import LineFile
from threefold.runtime.exits import INTERRUPTED, STOPPED, interrupt_advice
from threefold.runtime.launchers import free_port
from threefold.tracking import wandb_connection, weights_and_biases
from threefold.tracking.tracker import Display, Meter, open_tracker
from threefold.tracking.wandb_connection import WandbStatus
from threefold.tracking.weights_and_biases import WandbThread

OFFLINE = WandbStatus("offline", "folder/offline-run-*", "a reason")
LINE = {
    "step": 1,
    "loss": 2.5,
    "learning_rate": 1e-3,
    "step_seconds": 0.5,
    "tokens_per_second": 1000.0,
    "tflops_per_gpu": 0.01,
    "mfu": None,
}
NUMBERS = {key: value for key, value in LINE.items() if value is not None}


def recipe_with(table: dict[str, Any], mode: str):
    return parse_recipe(changed(table, tracking__mode=mode), "test")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    return folder


def test_a_resumed_folder_keeps_the_id_of_its_run(small, folder: RunFolder) -> None:
    auto = recipe_with(small, "auto")
    first = wandb_connection.wandb_arguments(auto, folder.path)
    again = wandb_connection.wandb_arguments(auto, folder.path)
    assert first["id"] == again["id"] and first["name"] == "tiny" and first["tags"] == ["tiny"]
    assert first["config"]["model"]["layers"] == 2 and "code_version" in first["config"]


def test_an_unreachable_server_neither_stops_nor_slows_the_run(
    small, folder: RunFolder, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")  # no server listens
    monkeypatch.setattr(WandbThread, "SECONDS_TO_FINISH", 0.3)
    monkeypatch.setenv("TMPDIR", str(folder.path))  # of files that a killed service leaves
    check_a_run_continues(recipe_with(small, "online"), folder)


def test_a_server_that_never_answers_neither_stops_nor_slows_the_run(
    small, folder: RunFolder, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(WandbThread, "SECONDS_TO_FINISH", 0.3)
    monkeypatch.setenv("TMPDIR", str(folder.path))  # of files that a killed service leaves
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        check_a_run_continues(recipe_with(small, "online"), folder)


def check_a_run_continues(recipe, folder: RunFolder) -> None:
    thread = WandbThread(recipe, folder)
    started = time.monotonic()
    for step in range(1000):
        thread.send(LINE | {"step": step})
    assert time.monotonic() - started < 1.0  # only queued
    with mock.patch("atexit.register") as left_behind:
        problem = thread.finish()
    assert time.monotonic() - started < 10.0
    if problem is not None:  # W&B is still switching to offline mode: the process will not wait
        assert problem.startswith("Weights & Biases did not finish in time")
        assert left_behind.called
    # The thread ends W&B's service process in its last call. If it still waited for the server, it
    # would end the process of a later test. Without a service process, the thread ends at once.
    assert thread._thread
    while thread._thread.is_alive():
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "wandb-core" in child.name():
                    child.kill()
        thread._thread.join(0.2)


def test_weights_and_biases_that_raises_is_reported_once(small, folder: RunFolder) -> None:
    with (
        mock.patch.object(weights_and_biases, "start_wandb", side_effect=RuntimeError("no disk")),
        mock.patch.object(
            weights_and_biases, "restart_offline", side_effect=RuntimeError("no disk")
        ),
        mock.patch.object(weights_and_biases, "tear_down"),  # would wait for runs of other tests
    ):
        thread = WandbThread(recipe_with(small, "offline"), folder)
        thread.send(LINE)
        assert thread.finish() == "Weights & Biases failed (no disk)"


@pytest.mark.parametrize("state", ["no step", "written", "full disk"])
def test_metrics_are_said_to_be_complete_only_if_they_are(
    state: str, small, folder: RunFolder, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_nothing(self: LineFile, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        mock.patch.object(weights_and_biases, "start_wandb", side_effect=RuntimeError("no disk")),
        mock.patch.object(
            weights_and_biases, "restart_offline", side_effect=RuntimeError("no disk")
        ),
        open_tracker(
            recipe_with(small, "offline"), folder, 0, start=Progress(), changed={}
        ) as tracker,
    ):
        if state != "no step":
            tracker.step(LINE)
        if state == "full disk":
            monkeypatch.setattr(LineFile, "_write", write_nothing)
            tracker.step(LINE | {"step": 2})
    (warning,) = [event for event in folder.read_events() if event["event"] == "warning"]
    assert warning["message"].startswith("Weights & Biases failed (no disk)")
    assert ("; metrics.jsonl has every step" in warning["message"]) == (state == "written")
    printed = capsys.readouterr()
    missing = [line for line in printed.err.splitlines() if " lacks " in line]
    if state == "full disk":
        begin = f"warning: {folder.metrics} lacks the metrics of 1 step, from step 2 on, which"
        assert missing[0].startswith(begin)
        assert missing[1] == f"warning: {folder.events} lacks 1 event, which could not be written"
    else:
        assert not missing
    lines = [line for line in (printed.out + printed.err).splitlines() if "step" not in line]
    failed = "W&B: failed, because of an error (no disk); training is not affected"
    assert lines.count(failed) == 1
    assert not [line for line in lines if "Weights & Biases" in line or "waiting" in line]


@pytest.mark.parametrize(
    ("interrupted", "awaits_server"), [(False, False), (False, True), (True, True)]
)
def test_a_wait_at_the_end_is_announced(
    small, folder: RunFolder, interrupted: bool, awaits_server: bool, monkeypatch
) -> None:
    told: list[str] = []
    release, starting = threading.Event(), threading.Event()

    def start(*arguments: Any, tell: Callable[[WandbStatus], None]) -> None:
        if awaits_server:
            tell(WandbStatus("waiting", reason="for the server to answer"))
        starting.set()
        release.wait()

    with (
        mock.patch.object(weights_and_biases, "start_wandb", side_effect=start),
        mock.patch.object(weights_and_biases, "tear_down"),
        mock.patch.multiple(WandbThread, SECONDS_BEFORE_NOTICE=0.01, SECONDS_TO_FINISH=0.05),
        mock.patch.object(WandbThread, "SECONDS_TO_KEEP", 0.2),
        mock.patch("atexit.register"),
    ):
        thread = WandbThread(
            recipe_with(small, "offline"), folder, tell=lambda status: told.append(str(status))
        )
        assert thread._thread and starting.wait(60)
        waits = [False, KeyboardInterrupt, False] if interrupted else [False, False]
        monkeypatch.setattr(weights_and_biases, "end_service", lambda: True)
        with mock.patch.object(thread, "_ends_within", side_effect=waits):
            problem = thread.finish()
        release.set()
        thread._thread.join()
    ended = "was interrupted while it sent its data" if interrupted else "did not finish in time"
    assert problem == f"Weights & Biases {ended}"
    data = "an answer, and then for the run's data to be sent or written to files"
    subject = data if awaits_server else "W&B to start"
    assert told[awaits_server:][:2] == [
        f"waiting for {subject}, for at most 0.04 s in all; {interrupt_advice()} to end this wait",
        f"off, because W&B {ended}"
        if interrupted
        else f"failed, because W&B {ended}; training is not affected",
    ]


def test_the_end_of_a_run_does_not_wait_for_the_next_sending(small, folder: RunFolder) -> None:
    with (
        mock.patch.object(
            weights_and_biases, "start_wandb", return_value=(mock.Mock(), OFFLINE)
        ) as start,
        mock.patch.multiple(WandbThread, SECONDS_BETWEEN_SENDS=3600.0, SECONDS_TO_FINISH=10.0),
    ):
        thread = WandbThread(recipe_with(small, "offline"), folder)
        thread.send(LINE | {"step": 0})
        log = start.return_value[0].log
        while not log.called:
            time.sleep(0.01)
        time.sleep(0.1)  # the thread finds its queue empty
        for step in (1, 2):
            thread.send(LINE | {"step": step})
        assert thread.finish() is None
    sent = [call.args[0]["step"] for call in log.call_args_list]
    assert sent == [0, 1, 2]


def test_weights_and_biases_gets_the_newest_preflight(small, folder: RunFolder) -> None:
    for rate in (1.0, 2.0):
        measures = {"network link": {"median": rate, "lowest": rate / 2, "rank": 3, "host": "a"}}
        folder.event("preflight", 10, seconds=1.0, measures=measures)
    with mock.patch.object(
        weights_and_biases, "start_wandb", return_value=(mock.Mock(), OFFLINE)
    ) as start:
        thread = WandbThread(recipe_with(small, "offline"), folder)
        thread.send(LINE)
        assert thread.finish() is None
    first, second = (call.args[0] for call in start.return_value[0].log.call_args_list)
    assert first == {
        "step": 10, "preflight/network_link_median": 2.0, "preflight/network_link_lowest": 1.0,
    }  # fmt: skip
    assert second == LINE


STUCK = """
import sys, time
sys.path[0] = "."
import atexit, errno, fcntl, pathlib
from threefold.tracking import weights_and_biases as wandb_thread
from threefold.tracking.wandb_connection import WandbStatus
from threefold.tracking.weights_and_biases import WandbThread
from threefold.runtime.exits import exit_now
from threefold.config.loading import load_recipe
from threefold.run_folder.folder import RunFolder
from threefold.runtime.output import use_nonblocking_output

def refuse(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

use_nonblocking_output()
fcntl.flock = refuse
RECIPE = pathlib.Path("recipes/tiny.toml")
folder = RunFolder(pathlib.Path(sys.argv[1]))
folder.hold()
atexit.register(time.sleep, 30)  # as W&B's handler does
wandb_thread.start_wandb = lambda *_, **__: time.sleep(600)
WandbThread.SECONDS_TO_FINISH = 0.1
thread = WandbThread(load_recipe(RECIPE, ["tracking.mode=offline"]), folder)
thread.exit_code = int(sys.argv[2])
print(thread.finish())
print("the summary" * 200_000)  # more than a pipe holds
exit_now(thread.exit_code)
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_leaves_wandb_behind_releases_its_folder_and_is_read(
    code: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STUCK, str(tmp_path / "run"), str(code)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)
    with process:
        exclusive = tmp_path / "run" / "lock.exclusive"
        assert process.stdout.readline().startswith(b"Weights & Biases did not finish in time")
        while exclusive.exists():  # released before the reader is waited for
            assert process.poll() is None
        time.sleep(1.3)  # a reader that is slower than 1 s, and faster than the 2 s of a failure
        output = process.stdout.read()
    assert process.returncode == code
    assert output.count(b"the summary") == 200_000


def test_settings_of_wandb_are_checked_before_the_engine_is_built(
    small, folder: RunFolder, monkeypatch
) -> None:
    def check(mode: str = "auto", *, keeps_id: bool = True) -> None:
        wandb_connection.check_wandb(recipe_with(small, mode), folder.path, keeps_id=keeps_id)

    check()  # there is no id yet
    (folder.path / "wandb").mkdir()
    (folder.path / "wandb" / "run_id").write_bytes(bytes(8))
    for mode in ("auto", "online", "offline"):
        with pytest.raises(UserError, match="instead of the id of a W&B run"):
            check(mode)
    check("disabled")
    check(keeps_id=False)  # the folder is about to be moved aside
    (folder.path / "wandb" / "run_id").unlink()
    (folder.path / "wandb" / "run_id").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        check()
    for name, value in (
        ("WANDB_BASE_URL", "http://[::1"),
        ("WANDB_BASE_URL", "localhost:8080"),
        ("WANDB_MODE", "onlin"),
    ):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            with pytest.raises(UserError, match=f"{name} = ") as rejected:
                check("offline", keeps_id=False)  # W&B reads them in every mode
            assert value in str(rejected.value)


def test_only_rank_0_tracks(small, folder: RunFolder) -> None:
    recipe = recipe_with(small, "disabled")
    with open_tracker(recipe, folder, 1, start=Progress(), changed={}) as silent:
        silent.step(LINE)
        silent.end()
    assert not folder.metrics.exists() and not folder.events.exists()
    with open_tracker(recipe, folder, 0, start=Progress(), changed={}) as tracking:
        tracking.step(LINE)
        tracking.end()
    assert folder.read_metrics() == [NUMBERS]


def test_lines_show_loss_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(steps=100, done=0)
    display.step(LINE)
    display.step(LINE | {"step": 2})  # within ten seconds: no line
    display.step(LINE | {"step": 3, "validation_loss": 2.25, "mfu": 0.5, "epoch": 1.5})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step   1/100  loss 2.5000  lr 1.00e-03  1,000 tokens/s")
    assert lines[0].endswith("00:49 left")
    assert "validation 2.2500" in lines[1] and "MFU 50.0%  epoch 1.50" in lines[1]


@pytest.mark.parametrize("columns", [80, 0])
def test_a_terminal_with_a_width_gets_a_progress_bar(
    columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        mock.patch("sys.stdout.isatty", return_value=True),
        mock.patch("sys.stderr.fileno", return_value=2),
        mock.patch("os.get_terminal_size", return_value=os.terminal_size((columns, 24))),
    ):
        shown_on = Display(steps=100, done=0)
    shown_on.step(LINE)
    shown_on.close()
    shown = capsys.readouterr()
    with_bar, without = (shown.err, shown.out) if columns else (shown.out, shown.err)
    assert "1/100" in with_bar and "loss 2.5000" in with_bar and without == ""


def test_the_meter_counts_flops_of_the_whole_world(small) -> None:
    recipe = recipe_with(small, "disabled")
    one, two = (
        Meter(recipe, size, precision="fp32", device_name="cpu").line(
            Progress(3, 24), loss=1.0, grad_norm=2.0, learning_rate=0.1, seconds=0.5
        )
        for size in (1, 2)
    )
    assert one["tflops_per_gpu"] == 2 * two["tflops_per_gpu"] > 0
    assert one["tokens"] == 3 * 256 and one["tokens_per_second"] == 512
    assert one["mfu"] is None
    gpu = Meter(recipe, 1, precision="bf16", device_name="NVIDIA A100-SXM4-80GB")
    assert gpu.peak_tflops == 312.0
    training = recipe.training.model_copy(update={"matmul_precision": "fp8"})
    in_fp8 = recipe.model_copy(update={"training": training})
    gpu = Meter(in_fp8, 1, precision="bf16", device_name="NVIDIA A100-SXM4-80GB")
    assert gpu.peak_tflops is None, "an A100 has no FP8"
    assert one["memory_gb"] > 0.05


@pytest.mark.parametrize(
    ("code", "reason", "line"),
    [
        (INTERRUPTED, "saved at step 3 (SIGINT to rank 1 on vm); rerun the same command", " and "),
        (STOPPED, "step 3 is not saved: the disk is full", ": "),
    ],
)
def test_the_end_of_an_interrupted_run_says_that_it_is_saved(
    code: int, reason: str, line: str, small, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_tracker(
        recipe_with(small, "disabled"), folder, 0, start=Progress(), changed={}
    ) as tracker:
        tracker.stop(reason, code)
    assert f"stopped{line}{reason}\n" == capsys.readouterr().err
    (stop,) = [event for event in folder.read_events() if event["event"] == "stop"]
    assert stop["reason"] == reason


def test_a_run_that_stops_prints_how_to_upload_all_its_parts(
    small, folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wandb.cli.cli._setup_logger", lambda: None)  # leaves a file in /tmp
    for first in (1, 4):  # wandb distinguishes runs by the second of their start
        (folder.path / f"wandb/run-20260101_00000{first}-mine").mkdir(parents=True)
        (folder.path / f"wandb/run-20260101_00000{first}-mine/run-mine.wandb").touch()
    (folder.path / "wandb/offline-run-20260101_000002-mine").mkdir()
    (folder.path / "wandb/offline-run-20260101_000002-mine/run-mine.wandb").touch()
    commands = []
    for mode, files in (("offline", "offline-run-*"), ("incomplete", "*run-*"), ("online", "")):
        with open_tracker(
            recipe_with(small, "disabled"), folder, 0, start=Progress(), changed={}
        ) as tracker:
            tracker.wandb.status = WandbStatus(mode, str(folder.path / "wandb" / files))
            tracker.stop("saved at step 3 (SIGINT); rerun the same command", INTERRUPTED)
        commands += re.findall(r"^W&B: .*: wandb (.*)$", capsys.readouterr().out, re.MULTILINE)
    wandb.termsetup(wandb.Settings(silent=False), None)  # other tests silence it
    counts = []
    for command in commands:
        *options, pattern = command.split()
        arguments = [*options, "--dry-run", *glob.glob(pattern)]
        counts.append(re.findall(r"Would sync (\d) run", CliRunner().invoke(cli, arguments).output))
    assert counts == [["1"], ["3"]]
