"""Run test files in forked processes: `python -m pytest -p tests.workers --workers 2`.

pytest collects the tests once, which imports torch, DeepSpeed and all test files. Then it forks
processes, each of which runs one file at a time, so that the tests of a file share fixtures and run
in order. Files whose tests mostly wait (WAITING_FILES) run in as many processes of their own, so
that their waiting overlaps with the computing of the other files.

pytest-xdist would import everything in each process, and a waiting file would keep a core idle.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

TESTS = Path(__file__).resolve().parent
WAITING_FILES = (  # longest first
    "launch/test_launcher.py",
    "tracking/test_connection.py",
    "sweep/test_sweep.py",
    "supervision/test_supervisor.py",
    "checkpoint/test_resume.py",
    "tracking/test_tracker.py",
    "sweep/test_split_results.py",
    "sweep/test_split.py",
    "report/test_watch.py",
    "report/test_browser.py",
    "test_slurm.py",
    "mutants/test_mutants.py",
    "pretrain/preflight/test_run.py",
    "tracking/test_offline_run.py",
    "sweep/test_links.py",
    "sweep/width_transfer/test_transfer_check.py",
    "sweep/width_transfer/test_coordinates.py",
    "sweep/test_sweep_folder.py",
    "checkpoint/test_writer.py",
    "run_folder/test_lease.py",
    "run_folder/test_lock.py",
    "launch/test_node_agent.py",
    "tracking/test_alerts.py",
    "tracking/test_startup.py",
)
LONGEST_FILES = (  # of those that compute, longest first
    "engine/test_layouts.py",
    "test_pretrain.py",
    "prove/test_prove.py",
    "trace/test_trace.py",
    "pretrain/evaluation/test_evaluator.py",
    "test_phases.py",
    "convert/test_convert.py",
    "plan/test_planning.py",
    "gpu/test_gpu_checks.py",
    "pipeline/test_nccl_rules.py",
    "prepare_data/test_prepare_data.py",
    "models/test_transformer.py",
    "test_floors.py",
    "plan/test_traced_memory.py",
    "test_user_data.py",
)
TIMES = "time per file"  # plugin of tests/conftest.py
SECONDS_TO_END = 5.0  # of an interrupted process


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--workers`."""
    parser.addoption(
        "--workers", type=int, default=0, help="processes that compute; as many others wait"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; keep the order of the other files and within files.

    If a long file came last, the other processes would be idle meanwhile.
    """
    ranks = {TESTS / name: rank for rank, name in enumerate((*WAITING_FILES, *LONGEST_FILES))}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in processes."""
    count = session.config.option.workers
    if not count or session.config.option.collectonly or session.testsfailed:
        return None  # pytest runs the tests in this process, or stops
    capture: Any = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # each process starts its own
    try:
        Workers(session, count).run()
    finally:
        capture.start_global_capturing()
    return True


class Worker:
    """A forked process that runs test files.

    Attributes:
        waits: it runs the files whose tests mostly wait
        pending: indices of the tests that it has received and not finished
    """

    def __init__(self, session: pytest.Session, *, waits: bool, number: int):
        self.waits, self.pending = waits, deque[int]()
        self.connection, other = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self.connection.close()
                Reporter(session, other, number).run()
                code = 0
            except KeyboardInterrupt:
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        other.close()

    def send(self, indices: deque[int]) -> None:
        """Send the tests of a file; none tells the process to end."""
        self.pending += indices
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `receive` notices
            self.connection.send(list(indices))

    def end(self) -> int:
        """Interrupt the process if it still runs, wait for it, and return its exit code."""
        self.connection.close()
        process = psutil.Process(self.pid)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(psutil.TimeoutExpired):
            return process.wait(SECONDS_TO_END)
        process.kill()
        return process.wait()


class Workers:
    """The forked processes, and the files that wait for a process."""

    def __init__(self, session: pytest.Session, count: int):
        self.session, self.started = session, 0
        self.files: dict[bool, deque[deque[int]]] = {False: deque(), True: deque()}
        waiting = {TESTS / name for name in WAITING_FILES}
        for path, indices in groupby(range(len(session.items)), lambda i: session.items[i].path):
            self.files[path in waiting].append(deque(indices))
        start_fork_server()
        gc.freeze()  # a collection would copy the memory that the processes share
        self.workers: dict[Connection, Worker] = {}
        for waits, files in self.files.items():
            for _ in range(min(count, len(files))):
                self.start(waits=waits)

    def start(self, *, waits: bool) -> None:
        """Start a process."""
        worker = Worker(self.session, waits=waits, number=self.started)
        self.workers[worker.connection] = worker
        self.started += 1

    def run(self) -> None:
        """Run all files."""
        try:
            while self.workers:
                for connection in wait(list(self.workers)):
                    assert isinstance(connection, Connection)
                    self.receive(self.workers[connection])
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            for worker in self.workers.values():
                worker.end()

    def receive(self, worker: Worker) -> None:
        """Receive a message of a process, or notice its end."""
        hook, config = self.session.config.hook, self.session.config
        try:
            kind, data = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            del self.workers[worker.connection]
            code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
            worker.connection.close()
            if worker.pending:
                self.report_death(worker, code)
            return
        if kind == "next file":
            files = self.files[worker.waits]
            worker.send(files.popleft() if files else deque())
        elif kind == "start":
            hook.pytest_runtest_logstart(**data)
        elif kind == "finish":
            worker.pending.popleft()
            hook.pytest_runtest_logfinish(**data)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=config, data=data)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            message = warnings.WarningMessage(data["message"], UserWarning, *data["file"])
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, **data["place"]}
            )
        else:
            config.pluginmanager.getplugin(TIMES).update(*data)

    def report_death(self, worker: Worker, code: int) -> None:
        """Report the test that a process died in as failed; start one for the remaining tests."""
        item = self.session.items[worker.pending.popleft()]
        text = f"the process that ran this test ended with exit code {code}"
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", text, "call", sections=()
        )
        self.session.config.hook.pytest_runtest_logreport(report=report)
        if worker.pending:
            self.files[worker.waits].appendleft(worker.pending)
            self.start(waits=worker.waits)


class Reporter:
    """The plugin of a forked process: runs tests, and sends their reports."""

    def __init__(self, session: pytest.Session, connection: Connection, number: int):
        self.session, self.config, self.connection = session, session.config, connection
        keep_fork_server()
        plugins = self.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(self)
        capture: Any = plugins.getplugin("capturemanager")
        capture.start_global_capturing()
        temporary: Any = session.config._tmp_path_factory
        temporary._basetemp = temporary.getbasetemp() / f"worker-{number}"
        temporary._basetemp.mkdir()

    def run(self) -> None:
        """Run the tests that the main process sends."""
        items = self.items()
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # for which fixtures of the session are kept
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.session.shouldfail or self.session.shouldstop:
                self.session._setupstate.teardown_exact(None)
                break
            item = following
        times: Any = self.config.pluginmanager.getplugin(TIMES)
        self.send("times", (times.core_seconds, times.wall_seconds))

    def items(self) -> Iterator[pytest.Item]:
        """Yield the tests of one file after the other, as the main process sends them."""
        while True:
            self.send("next file")
            indices = self.connection.recv()
            if not indices:
                return
            for index in indices:
                yield self.session.items[index]

    def send(self, kind: str, data: Any = None) -> None:
        """Send a message to the main process."""
        self.connection.send((kind, data))

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Send the begin of a test."""
        self.send("start", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Send the end of a test."""
        self.send("finish", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        hook = self.config.hook
        self.send("report", hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        """Send a warning, without its class, which the main process may not know."""
        self.send(
            "warning",
            {
                "message": f"{warning_message.category.__name__}: {warning_message.message}",
                "file": (warning_message.filename, warning_message.lineno),
                "place": {"when": when, "nodeid": nodeid, "location": location},
            },
        )


def start_fork_server() -> None:
    """Start the server that all processes fork their ranks from: imports take it seconds."""
    if "tests.ranks" not in sys.modules:
        return  # no test needs ranks
    from tests.ranks import FORK_SERVER_MODULES, RANK_ENVIRONMENT, environment

    forkserver.set_forkserver_preload(FORK_SERVER_MODULES)
    with environment(RANK_ENVIRONMENT):
        forkserver.ensure_running()


def keep_fork_server() -> None:
    """Let this process use the fork server of its parent, whose state it cannot wait for."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        server.ensure_running = forkserver.ensure_running = lambda: None
