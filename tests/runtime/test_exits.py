"""Ctrl-C ends every command with one line in place of a traceback; the end of a process."""

import os
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.commands import run_here
from threefold.commands import sweep
from threefold.config.loading import REPOSITORY
from threefold.pretrain.setup import leave_processes
from threefold.runtime import exits
from threefold.runtime.exits import (
    exit_at_signals,
    exit_now,
    ignore_ending_signals,
    interrupt_advice,
    interrupts_blocked,
)

COMMANDS = sorted(
    path.name for path in (REPOSITORY / "recipes").glob("*.py") if path.stem[0] != "_"
)
INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
WORK = f"""
from threefold.runtime.exits import end_at_interrupt, raise_at_interrupt
end_at_interrupt()
raise_at_interrupt()
try:
    exec({INTERRUPT!r})
finally:
    print("cleaned up")
"""


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_during_the_imports_ends_a_command_with_one_line(
    command: str, tmp_path: Path
) -> None:
    module = f"try: exec({INTERRUPT!r})\nexcept: pass"  # as libraries treat optional imports
    (tmp_path / "argparse.py").write_text(module)
    done = run(f"recipes/{command}", PYTHONPATH=str(tmp_path))
    assert done.stderr == f"{command}: interrupted; nothing has been started or written\n"
    assert done.returncode == -signal.SIGINT  # of which shells make 130


def test_an_interrupt_after_the_imports_can_be_handled_and_prints_one_line() -> None:
    done = run("-c", WORK)
    assert (done.stdout, done.stderr) == ("cleaned up\n", "-c: interrupted\n")
    assert done.returncode == -signal.SIGINT
    failed = run("-c", WORK.replace("exec", "no_name"))
    assert failed.returncode == 1 and "NameError" in failed.stderr


def test_an_ignored_interrupt_stays_ignored() -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    done = run("-c", ignored + WORK)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_raises_once_until_it_is_repeated_later() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    exit_at_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with pytest.raises(SystemExit, match="130"):
        signal.raise_signal(signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)  # does not interrupt the cleanup
    with mock.patch.object(exits, "ECHO_SECONDS", 0), pytest.raises(SystemExit, match="130"):
        signal.raise_signal(signal.SIGINT)
    ignore_ending_signals()
    with mock.patch.object(exits, "ECHO_SECONDS", 0):
        for number in exits.ENDING_SIGNALS:
            signal.raise_signal(number)


def test_a_sweep_under_nohup_survives_the_end_of_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with (
        mock.patch.object(sweep, "use_nonblocking_output"),
        mock.patch.object(sweep, "exit_now", sys.exit),
    ):
        assert run_here(sweep.main, "recipes/none.toml").returncode == 2
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_processes_can_be_started_out_of_reach_of_an_interrupt() -> None:
    with interrupts_blocked():
        child = subprocess.Popen([sys.executable, "-c", INTERRUPT + "print('continues')"])
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert child.wait() == 0


def test_exit_handlers_run_except_those_that_unregister_operators() -> None:
    library = torch.library.Library("exiting", "DEF")
    finalizers = weakref.finalize._registry  # type: ignore[attr-defined]
    (slow,) = (one for one in finalizers if one.alive and one.peek()[0] is library)
    handled = weakref.finalize(library, print)
    with (
        mock.patch("threefold.runtime.exits.leave_handlers_out") as leave,
        mock.patch("atexit._run_exitfuncs") as run_handlers,
    ):
        exit_now(5)
    assert run_handlers.called and leave.call_args.args == (5,)
    assert handled.atexit and not slow.atexit


def test_a_finished_rank_ignores_the_interrupt_of_another_ranks_wait() -> None:
    """Rank 0 may still wait for W&B; the other ranks have nothing left to do."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

    def interrupted() -> None:
        for number in handlers:
            signal.raise_signal(number)

    try:
        with (
            mock.patch("torch.distributed.barrier", side_effect=interrupted) as barrier,
            mock.patch("torch.distributed.destroy_process_group") as destroy,
        ):
            leave_processes()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert barrier.called and destroy.called


@pytest.mark.parametrize(
    ("group", "advice"),
    [(os.getpgrp, "press Ctrl-C"), (lambda: 1, 'run "kill -INT ')],
    ids=["in the foreground", "the shell has the terminal"],
)
def test_advice_names_what_reaches_this_process(group: Any, advice: str) -> None:
    with (
        mock.patch("os.open", return_value=os.dup(0)),
        mock.patch("os.tcgetpgrp", side_effect=lambda _: group()),
    ):
        assert interrupt_advice().startswith(advice)
    with mock.patch("os.open", side_effect=OSError):
        assert interrupt_advice() == "press Ctrl-C"


def test_the_first_rank_that_fails_records_its_code(tmp_path: Path) -> None:
    program = "import sys; from threefold.runtime.exits import exit_now; exit_now(int(sys.argv[1]))"
    file = tmp_path / "first"
    for code in (0, 6, 2):
        done = run("-c", program, str(code), THREEFOLD_FIRST_FAILURE=str(file))
        assert done.returncode == code, done.stderr
        assert file.exists() == (code != 0)
    assert file.read_text() == f"6 {socket.gethostname()}\n"
    assert run("-c", program, "2", THREEFOLD_FIRST_FAILURE=str(file / "absent")).returncode == 2
