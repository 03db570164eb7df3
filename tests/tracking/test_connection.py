"""The mode of Weights & Biases and its reason, with a server of the test in place of W&B's."""

import contextlib
import gzip
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from pydantic import ValidationError
from typing_extensions import override
from wandb import Settings
from wandb.sdk import mailbox
from wandb.sdk.lib import wb_logging

from tests.conftest import changed
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress
from threefold.runtime.exits import INTERRUPTED, STOPPED
from threefold.tracking import wandb_connection, weights_and_biases
from threefold.tracking.messages import summarize
from threefold.tracking.tracker import open_tracker
from threefold.tracking.wandb_connection import (
    BLOCK_BYTES,
    WandbStatus,
    check_variables,
    choose_mode,
    has_written_all,
    requested_mode,
    restart_offline,
    short,
    start_wandb,
    tear_down,
    wandb_arguments,
)

KEY = "k" * 40
DEFAULT_SERVER = Settings.model_fields["base_url"].default
LINE = {
    "step": 1, "loss": 2.5, "learning_rate": 1e-3, "step_seconds": 0.5, "tokens": 256,
    "tokens_per_second": 1000.0, "tflops_per_gpu": 0.01, "mfu": None,
}  # fmt: skip


class Server(ThreadingHTTPServer):
    """A server that answers what W&B asks at a login and in a run.

    Attributes:
        status: the HTTP status of its answers
        history: the metrics of all runs
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.history = 200, list[dict[str, Any]]()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        query, variables = body.get("query", ""), body.get("variables", {})
        if path.endswith("/file_stream"):
            lines = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history += map(json.loads, lines)
            return {}
        if "viewer" in query:
            viewer = {"id": "dg==", "username": "me", "entity": "me", "flags": "{}"}
            return {"data": {"viewer": viewer | {"teams": {"edges": []}}}}
        if "upsertBucket" in query:
            project = {"id": "cA==", "name": variables["project"]}
            project["entity"] = {"id": "ZQ==", "name": "me"}  # type: ignore[assignment]
            bucket = {"id": "aWQ=", "name": variables["name"], "displayName": "run"}
            bucket |= {"description": "", "config": "{}", "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": self.url} for name in variables["files"]]
            created = {"runID": "aWQ=", "uploadHeaders": [], "files": files}
            return {"data": {"createRunFiles": created}}
        return {"data": {}}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        try:
            body = json.loads(content)
        except ValueError:
            body = {}
        answer = json.dumps(self.server.answer(self.path, body)).encode()
        self.send_response(self.server.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST

    @override
    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no log."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder in which no one has logged in yet."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the log of the command wandb
    tear_down()
    yield tmp_path
    tear_down()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no wait at the end of a run be announced or too short on a busy machine."""
    monkeypatch.setattr(weights_and_biases.WandbThread, "SECONDS_BEFORE_NOTICE", 60.0)
    monkeypatch.setattr(weights_and_biases.WandbThread, "SECONDS_TO_KEEP", 60.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    return folder


def log_in(server: Server) -> None:
    login = [sys.executable, "-m", "wandb", "login", "--relogin", "--host", server.url, KEY]
    done = subprocess.run(login, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def train(table: dict[str, Any], folder: RunFolder) -> WandbStatus:
    """Report a step of a run with tracking.mode = "auto"; return the status that it leaves."""
    recipe = parse_recipe(changed(table, tracking__mode="auto"), "test")
    with open_tracker(recipe, folder, 0, start=Progress(), changed={}) as tracker:
        tracker.step(LINE)
        tracker.end()
    summarize(recipe, folder, LaunchEnvironment(rank=0, local_rank=0, size=1, local_size=1))
    status = WandbStatus.read(folder.path)
    assert status
    return status


@pytest.mark.long
def test_a_login_is_found_by_the_run(
    small: dict, folder: RunFolder, home: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    log_in(server)
    assert f"machine 127.0.0.1:{server.server_port}" in (home / ".netrc").read_text()
    capfd.readouterr()
    status = train(small, folder)
    run_id = (folder.path / "wandb" / "run_id").read_text()
    page = f"{server.url}/me/threefold/runs/{run_id}"
    assert (status.mode, status.where) == ("online", page)
    assert [line["loss"] for line in server.history] == [2.5]
    printed = capfd.readouterr()
    waiting = f"W&B: waiting for {server.url} to answer, for at most 30 s\n"
    assert waiting in printed.out.partition(f"W&B: online at {page}\n")[0]
    assert f"W&B: online at {page}\n" in printed.out
    assert f"  W&B         online at {page}\n" in printed.out
    assert "wandb:" not in printed.out + printed.err  # no messages of its own


def test_an_empty_variable_of_wandb_is_as_if_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("WANDB_ENTITY", "me")
    check_variables()
    left = {name for name in os.environ if name.startswith("WANDB_")}
    assert "WANDB_ENTITY" in left and left.isdisjoint({"WANDB_MODE", "WANDB_API_KEY"})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", 'rejected the key (401; use "wandb login --relogin")'),
        (KEY, "rejected WANDB_API_KEY (401; set another key, or unset it and use "),
    ],
)
def test_a_rejected_key_is_named(key: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    with mock.patch.multiple(
        "threefold.tracking.wandb_connection", tear_down=mock.DEFAULT, _init=mock.DEFAULT
    ):
        _, status = restart_offline({"id": "x", "dir": "."}, Exception("returned error 401: no"))
    assert words in status.reason


def test_an_error_of_the_settings_names_the_setting() -> None:
    with pytest.raises(ValidationError) as raised:
        Settings(mode="sometimes")
    assert short(raised.value).startswith("mode = 'sometimes': ")


def test_a_server_that_rejects_the_key_leaves_the_run_offline_with_the_same_id(
    small: dict, folder: RunFolder, home: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    log_in(server)
    server.status = 401
    capfd.readouterr()
    status = train(small, folder)
    run_id = (folder.path / "wandb" / "run_id").read_text()
    assert status.mode == "offline" and status.reason.startswith(
        f"{server.url} rejected the key (401; "
    )
    assert status.reason.endswith(f"); the data stay in the run folder, under the W&B id {run_id}")
    (files,) = (folder.path / "wandb").glob(f"offline-run-*-{run_id}")
    assert list(files.glob("*.wandb"))
    printed = capfd.readouterr()
    told, summed = about_wandb(printed.out)
    assert told[1:] == [f"offline, because {status.reason}"]  # after the line about the wait
    assert summed == [f"offline; upload with: wandb sync {status.where}"]
    assert "Traceback" not in printed.out + printed.err


CRASH = """
import sys
sys.path[0] = "."
from pathlib import Path
from threefold.config.loading import DEFAULT_RECIPE, load_recipe
from threefold.run_folder.folder import RunFolder
from threefold.runtime.exits import exit_now
from threefold.tracking.weights_and_biases import WandbThread

folder = RunFolder(Path(sys.argv[1]))
folder.hold()
thread = WandbThread(
    load_recipe(DEFAULT_RECIPE, []), folder, tell=lambda status: print(status, flush=True)
)
for number, _ in enumerate(sys.stdin, start=1):
    thread.send({"step": number, "loss": 2.5})
    print("sent", flush=True)
print("problem:", thread.finish(), flush=True)
exit_now(0)
"""


@pytest.mark.long
def test_a_crash_of_wandb_ends_in_an_offline_run_and_no_traceback(
    tmp_path: Path, home: Path, server: Server
) -> None:
    log_in(server)
    with subprocess.Popen(
        [sys.executable, "-c", CRASH, str(tmp_path / "run")], cwd=REPOSITORY, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline().startswith("waiting for http")
        assert process.stdout.readline().startswith("online at ")
        core = [c for c in psutil.Process(process.pid).children() if "wandb-core" in c.name()]
        os.kill(core[0].pid, signal.SIGKILL)
        lines = []
        while not any(line.startswith("offline") for line in lines):  # the first error comes late
            assert len(lines) < 200, lines
            time.sleep(0.05)
            process.stdin.write("\n")
            process.stdin.flush()
            lines.append(process.stdout.readline())
        process.stdin.close()
        lines += process.stdout.read().splitlines()
        errors = process.stderr.read()
    run_id = (tmp_path / "run" / "wandb" / "run_id").read_text()
    assert process.returncode == 0 and lines[-1] == "problem: None", (lines, errors)
    offline = next(line for line in lines if line.startswith("offline"))
    assert f", under the W&B id {run_id}; upload with: wandb sync" in offline
    assert list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}"))
    assert "Traceback" not in errors and "Error" not in errors, errors


@pytest.mark.parametrize(
    ("wanted", "variables", "mode", "reason"),
    [
        (
            "auto",
            {},
            "offline",
            f"there is no key for {DEFAULT_SERVER}, the default server of wandb ",
        ),
        ("online", {}, "offline", "there is no key for https://api."),
        ("auto", {"WANDB_API_KEY": KEY}, "online", ""),
        ("offline", {"WANDB_API_KEY": KEY}, "offline", 'tracking.mode = "offline"'),
        ("auto", {"WANDB_API_KEY": "short"}, "offline", "WANDB_API_KEY invalid: API key must"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "dryrun"}, "offline", "WANDB_MODE = dryrun"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled", "WANDB_MODE = disabled"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "run"}, "online", "WANDB_MODE = run"),
        (
            "online",
            {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"},
            "offline",
            'WANDB_MODE = offline overrides tracking.mode = "online"',
        ),
        (
            "online",
            {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"},
            "disabled",
            'WANDB_MODE = disabled overrides tracking.mode = "online"',
        ),
        (
            "offline",
            {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"},
            "online",
            'WANDB_MODE = online overrides tracking.mode = "offline"',
        ),
        ("offline", {"WANDB_MODE": "dryrun"}, "offline", "WANDB_MODE = dryrun"),
        ("auto", {"WANDB_MODE": "online"}, "offline", "there is no key for https://api."),
    ],
)
def test_the_reason_of_a_mode(
    wanted: str, variables: dict[str, str], mode: str, reason: str, home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen, why = choose_mode(*requested_mode(wanted))
    assert chosen == mode and why.startswith(reason) and bool(why) == bool(reason)
    assert ("overrides" in why) == ("overrides" in reason)


@pytest.mark.parametrize(
    ("mode", "variable", "lines"),
    [
        (
            "online",
            "disabled",
            ['off, because WANDB_MODE = disabled overrides tracking.mode = "on'],
        ),
        ("auto", "disabled", ["off, because WANDB_MODE = disabled"]),
        (
            "disabled",
            "online",
            ['off, because tracking.mode = "disabled"; WANDB_MODE = online does'],
        ),
        ("disabled", "disabled", []),
        ("disabled", "", []),
    ],
)
def test_a_run_without_wandb_says_so_if_a_variable_is_involved(
    mode: str, variable: str, lines: list[str], small: dict, folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("WANDB_MODE", variable)
    recipe = parse_recipe(changed(small, tracking__mode=mode), "test")
    with (
        mock.patch.object(weights_and_biases, "start_wandb") as start,
        open_tracker(recipe, folder, 0, start=Progress(), changed={}) as tracker,
    ):
        tracker.step(LINE)
        tracker.end()
    summarize(recipe, folder, LaunchEnvironment(rank=0, local_rank=0, size=1, local_size=1))
    assert not start.called
    told, summed = about_wandb(capsys.readouterr().out)
    assert len(told) == len(lines)
    assert all(line.startswith(start) for line, start in zip(told, lines, strict=True))
    assert summed == ["off"] * len(lines)


def test_a_full_disk_prints_no_traceback_for_each_message_of_wandb(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, added = logging.getLogger("wandb"), list[logging.Handler]()

    def start(**arguments: Any) -> SimpleNamespace:
        added.append(wb_logging.add_file_handler("id", Path("/dev/full")))
        logger.info("run started")
        return SimpleNamespace(define_metric=lambda *names, **options: None)

    monkeypatch.setattr("wandb.init", start)
    start_wandb(("offline", ""), {"dir": str(home)})
    logger.info("run finished")
    logger.removeHandler(*added)
    assert not capfd.readouterr().err
    logging.FileHandler("/dev/full").emit(logging.makeLogRecord({"msg": "of another library"}))
    assert "--- Logging error ---" in capfd.readouterr().err


def about_wandb(printed: str) -> tuple[list[str], list[str]]:
    """Return the lines about the mode of W&B during the run, and those of the summary."""
    lines = printed.splitlines()
    told = [line.removeprefix("W&B: ") for line in lines if line.startswith("W&B: ")]
    return told, [line.removeprefix("  W&B").strip() for line in lines if "  W&B   " in line]


@pytest.mark.parametrize("machine", ["api.forge.coreweave.com", "api.wandb.ai"])
def test_the_key_of_the_public_server_is_found_by_either_name(machine: str, home: Path) -> None:
    (home / ".netrc").write_text(f"machine {machine} login user password {KEY}\n")
    assert choose_mode(*requested_mode("auto")) == ("online", "")


def test_a_mode_in_a_settings_file_is_named(home: Path) -> None:
    file = home / ".config" / "wandb" / "settings"
    file.parent.mkdir(parents=True)
    file.write_text("[default]\nmode = offline\n")
    assert choose_mode(*requested_mode("auto")) == ("offline", f"{file} sets mode = offline")


@pytest.mark.parametrize("fails", ["start", "last step", "end"])
def test_what_may_not_be_in_a_file_is_sent_again_if_the_process_of_wandb_ends(
    fails: str, small: dict, folder: RunFolder, home: Path
) -> None:
    ended, replacement, error = mock.Mock(), mock.Mock(), RuntimeError("Connection lost")
    started = (ended, WandbStatus("offline", "first", "a reason"))
    restarted = (replacement, WandbStatus("offline", "both", "of an error"))
    start: dict[str, Any] = {"return_value": started}
    if fails == "start":
        start = {"side_effect": error}
    elif fails == "end":
        ended.finish.side_effect = error
    else:
        ended.log.side_effect = [None, error]
    recipe = parse_recipe(changed(small, tracking__mode="offline"), "test")
    with (
        mock.patch.object(weights_and_biases, "start_wandb", **start),
        mock.patch.object(weights_and_biases, "restart_offline", return_value=restarted),
        open_tracker(recipe, folder, 0, start=Progress(), changed={}) as tracker,
    ):
        tracker.step(LINE)
        tracker.step(LINE | {"step": 2})
    steps = [call.args[0]["step"] for call in replacement.log.call_args_list]
    assert steps == [LINE["step"], 2] and replacement.finish.called


def test_an_error_in_the_last_call_ends_the_thread(
    small: dict, folder: RunFolder, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = mock.Mock()
    run.finish.side_effect = RuntimeError("no answer")
    started = (run, WandbStatus("online", "http://page"))
    with mock.patch.object(weights_and_biases, "start_wandb", return_value=started):
        status = train(small, folder)
    assert (status.mode, status.reason) == ("incomplete", "of an error (no answer)")
    printed = capfd.readouterr()
    told, summed = about_wandb(printed.out)
    incomplete = "incomplete, because of an error (no answer); training is not affected"
    assert told == ["online at http://page", incomplete]
    command = f"wandb sync --include-online {status.where}"
    assert summed == [f"incomplete; upload the rest with: {command}"]
    assert printed.err == ""
    (warning,) = [event for event in folder.read_events() if event["event"] == "warning"]
    claim = "Weights & Biases failed (no answer); metrics.jsonl has every step"
    assert warning["message"] == claim


@pytest.mark.parametrize(("code", "shown"), [(0, 0), (INTERRUPTED, 0), (STOPPED, 3), (None, 1)])
def test_a_run_that_has_failed_is_shown_as_failed(
    code: int | None, shown: int, small: dict, folder: RunFolder, home: Path
) -> None:
    """A run that was asked to stop continues later."""
    run, start = mock.Mock(), Progress(0, 0)
    started = (run, WandbStatus("online", "http://page"))
    recipe = parse_recipe(changed(small, tracking__mode="auto"), "test")
    with (
        mock.patch.object(weights_and_biases, "start_wandb", return_value=started),
        contextlib.suppress(RuntimeError),
        open_tracker(recipe, folder, 0, start=start, changed={}) as tracker,
    ):
        if code is None:
            raise RuntimeError("a bug")
        if code:
            tracker.stop("the loss is nan", code)
    run.finish.assert_called_once_with(exit_code=shown)


def interrupt_after(event: threading.Event) -> None:
    """Interrupt this process shortly after an event, as Ctrl-C under `deepspeed` does.

    The system may deliver the signal to any thread. Here it is one that the main thread does not
    wait for, so the signal does not end the main thread's wait.
    """

    def interrupt() -> None:
        event.wait(60)
        time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        for _ in range(5):  # for half a second, as the signals of the launcher's processes arrive
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "wandb" in child.name():
                        child.terminate()
            time.sleep(0.1)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    threading.Thread(target=interrupt, daemon=True).start()


def test_an_interrupted_wait_for_a_server_leaves_an_offline_run(
    small: dict, folder: RunFolder, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, waits = list[WandbStatus](), threading.Event()

    def tell(status: WandbStatus) -> None:
        told.append(status)
        if "to end this wait" in status.reason:
            waits.set()

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    recipe = parse_recipe(changed(small, tracking__mode="online"), "test")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(weights_and_biases.WandbThread, "SECONDS_BEFORE_NOTICE", 0.1)
        monkeypatch.setattr(weights_and_biases.WandbThread, "_leave_behind", lambda self: None)
        thread = weights_and_biases.WandbThread(recipe, folder, tell=tell)
        thread.send(LINE | {"loss": 7000.125})
        while not told:  # until it waits for the server
            time.sleep(0.02)
        interrupt_after(waits)
        assert thread.finish() is None
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"  # or exits would wait for the server
    (file,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    assert b"7000.125" in file.read_bytes()
    run = SimpleNamespace(id=(folder.path / "wandb" / "run_id").read_text())
    run.settings = SimpleNamespace(sync_file=str(file))
    assert has_written_all(run)
    os.truncate(file, file.read_bytes().rindex(b"\x92\x01"))  # before the field of the exit
    assert has_written_all(run) is False
    status = WandbStatus.read(folder.path)
    assert status == told[-1]
    assert (status.mode, status.reason) == ("offline", "the wait for its server was interrupted")


@pytest.mark.parametrize("is_written", [False, True])
def test_an_interrupted_wait_of_an_online_run_is_announced(
    is_written: bool, small: dict, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after a time, or as soon as the last record of the run is in its file."""
    told, release = list[str](), threading.Event()
    file = folder.path / "run-mine.wandb"
    if is_written:
        file.write_bytes(b"\x0a\x04mine\x92\x01\x00")
    run = mock.Mock(id="mine", settings=mock.Mock(sync_file=str(file)))
    run.finish.side_effect = lambda exit_code: release.wait(20)
    started = (run, WandbStatus("online", "http://page"))
    monkeypatch.setattr(weights_and_biases, "start_wandb", lambda *_, **__: started)
    monkeypatch.setattr(weights_and_biases, "tear_down", lambda: None)
    monkeypatch.setattr(weights_and_biases.WandbThread, "_leave_behind", lambda self: None)
    monkeypatch.setattr(weights_and_biases.WandbThread, "SECONDS_BEFORE_NOTICE", 0.01)
    if not is_written:  # otherwise, the run would finish without a problem after 20 s
        monkeypatch.setattr(weights_and_biases.WandbThread, "SECONDS_TO_KEEP", 0.01)
    recipe = parse_recipe(changed(small, tracking__mode="online"), "test")
    thread = weights_and_biases.WandbThread(
        recipe, folder, tell=lambda status: told.append(str(status))
    )
    while not told:  # until it is online
        time.sleep(0.02)
    finishes = threading.Event()
    finishes.set()
    interrupt_after(finishes)
    problem = "was interrupted while it sent its data"
    assert thread.finish() == f"Weights & Biases {problem}"
    release.set()
    assert told[-2].startswith("waiting for its unsent data to be written to files, for at most")
    incomplete = f"incomplete, because W&B {problem}; training is not affected; upload the"
    assert told[-1].startswith(incomplete)


@pytest.mark.parametrize(
    "error",
    [mailbox.HandleAbandonedError(), mailbox.MailboxClosedError(), ConnectionResetError("lost")],
    ids=repr,
)
def test_errors_of_an_ended_service_are_recognized(error: Exception) -> None:
    assert short(error) == "wandb's process on this machine has ended"
    assert short(ValueError("wrong.\nmore")) == "wrong"


@pytest.mark.parametrize("at", range(-9, 2))
def test_the_last_record_is_found_across_a_boundary_of_blocks(at: int, tmp_path: Path) -> None:
    """at: bytes from the boundary to the start of the record."""
    file, record = tmp_path / "run-mine.wandb", b"mine\x92\x01\x00"
    data = bytes(BLOCK_BYTES + at) + record + bytes(9)
    file.write_bytes(data[:BLOCK_BYTES] + b"header!" + data[BLOCK_BYTES:])
    run = SimpleNamespace(id="mine", settings=SimpleNamespace(sync_file=str(file)))
    assert has_written_all(run)
    assert has_written_all(SimpleNamespace(id="other", settings=run.settings)) is False
    file.unlink()
    assert has_written_all(run) is None


def test_a_part_without_a_record_is_deleted(small: dict, folder: RunFolder) -> None:
    """`wandb sync` sends nothing of a run whose file has only a header."""
    arguments = wandb_arguments(parse_recipe(small, "test"), folder.path)
    sizes = {"offline-run-1": 7, "offline-run-2": 8, "run-3": 7}
    for name, size in sizes.items():
        part = folder.path / "wandb" / f"{name}-{arguments['id']}"
        part.mkdir()
        (part / f"run-{arguments['id']}.wandb").write_bytes(bytes(size))
    run, _ = start_wandb(("disabled", ""), arguments)
    run.finish()
    assert [path.name[:13] for path in folder.path.glob("wandb/*run-*")] == ["offline-run-2"]


def test_a_run_whose_files_are_cut_off_is_said_to_be_incomplete(
    small: dict, folder: RunFolder, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk: the record of the exit, which comes last, is not in the file."""
    file = folder.path / "cut_off.wandb"
    file.write_bytes(b"some")
    run = mock.Mock(id="mine", settings=mock.Mock(sync_file=str(file)))
    files = str(folder.path / "wandb/offline-run-*")
    started = (run, WandbStatus("offline", files, "a reason"))
    with mock.patch.object(weights_and_biases, "start_wandb", return_value=started):
        train(small, folder)
    told, summed = about_wandb(capfd.readouterr().out)
    cut_off = "could not write all of its data to files (the disk may be full)"
    assert told[1] == f"incomplete, because W&B {cut_off}; training is not affected"
    assert summed == [f"incomplete; upload with: wandb sync {files}"]


def test_the_status_of_an_earlier_process_is_removed(small: dict, folder: RunFolder) -> None:
    (folder.path / "wandb").mkdir()
    WandbStatus("online", "http://page").write(folder.path)
    assert WandbStatus.read(folder.path)
    recipe = parse_recipe(changed(small, tracking__mode="disabled"), "small")
    weights_and_biases.WandbThread(recipe, folder)
    assert WandbStatus.read(folder.path) is None


def test_the_files_of_a_moved_run_folder_are_those_in_it(folder: RunFolder) -> None:
    (folder.path / "wandb").mkdir()
    for mode, expected in (("offline", folder.path / "wandb" / "run-*"), ("online", "/elsewhere")):
        WandbStatus(mode, "/before/wandb/run-*" if mode == "offline" else "/elsewhere").write(
            folder.path
        )
        status = WandbStatus.read(folder.path)
        assert status and status.where == str(expected)


@pytest.mark.parametrize("content", ["", "5", "[" * 100_000, '{"mode": 1}', "\x00"])
def test_a_damaged_status_is_left_out_of_the_summary(content: str, folder: RunFolder) -> None:
    (folder.path / "wandb").mkdir()
    (folder.path / "wandb" / "status.json").write_text(content)
    assert WandbStatus.read(folder.path) is None


def test_the_team_and_the_group_of_the_recipe_are_those_of_the_run(
    small: dict, folder: RunFolder
) -> None:
    table = changed(small, tracking__team="bigscience", tracking__group="tr11")
    arguments = wandb_arguments(parse_recipe(table, "test"), folder.path)
    assert (arguments["entity"], arguments["group"]) == ("bigscience", "tr11")
    plain = wandb_arguments(parse_recipe(small, "test"), folder.path)
    assert not {"entity", "group"} & plain.keys()  # so that WANDB_ENTITY applies


def test_an_offline_run_whose_process_has_ended_continues_without_a_message(
    small: dict, folder: RunFolder, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At Ctrl-C, the launcher `deepspeed` also ends the process of W&B."""
    ended, replacement = mock.Mock(), mock.Mock()
    ended.log.side_effect = RuntimeError("Connection lost")
    started = (ended, WandbStatus("offline", "first", "a reason"))
    restarted = (replacement, WandbStatus("offline", "both", "of an error"))
    with (
        mock.patch.object(weights_and_biases, "start_wandb", return_value=started),
        mock.patch.object(weights_and_biases, "restart_offline", return_value=restarted) as restart,
    ):
        status = train(small, folder)
    assert restart.call_count == 1
    assert [call.args[0]["loss"] for call in replacement.log.call_args_list] == [2.5]
    assert replacement.finish.called
    files = str(folder.path / "wandb" / "both")
    assert status == WandbStatus("offline", files, "a reason")
    told, summed = about_wandb(capfd.readouterr().out)
    assert told == ["offline, because a reason"]
    assert summed == [f"offline; upload with: wandb sync --include-online {files}"]


def test_a_server_that_refuses_connections_is_told_from_a_silent_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert not wandb_connection._refuses(server)
    assert wandb_connection._refuses(server)
