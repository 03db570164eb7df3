"""A slow or missing reader of the output neither stops a process nor causes needless losses."""

import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.fault_injection.unread import UNREAD, Output
from threefold.config.loading import REPOSITORY
from threefold.runtime.output import progress_lines

PRINTING = """
import sys, time, traceback
from threefold.runtime import output
output.use_nonblocking_output()
{body}
"""


def everything(seconds: float = 2.0) -> str:
    """Return a program that waits this long without progress for a reader of its output."""
    return EVERYTHING.replace("{seconds}", str(seconds))


def start(body: str, output: Output) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PRINTING.format(body=body)],
        cwd=REPOSITORY,
        stdout=output.descriptor,
        stderr=output.descriptor,
    )


EVERYTHING = """
print("a line")
sys.stderr.write("a part")
sys.stderr.writelines([" of", " another"])
sys.stderr.flush()
try:
    raise RuntimeError("a bug")
except RuntimeError:
    traceback.print_exc()
print("the last line", end="")
output.finish_output({seconds})
output.end_process(7, seconds=0.2)
"""


@pytest.mark.parametrize("kind", ["pipe", "halted terminal", *UNREAD])
def test_a_process_prints_and_ends(kind: str) -> None:
    with Output(kind) as output:
        output.spoil()
        program = everything(2.0 if kind == "pipe" else 0.2)
        assert start(program, output).wait(timeout=60) == 7
        text = output.text()
    if kind in ("pipe", "full pipe"):
        places = [text.index(part) for part in ("a line\n", "a part of another", "RuntimeError: a")]
        assert places == sorted(places) and text.endswith("the last line")


def test_a_pipe_of_one_page_that_cannot_be_enlarged_takes_output() -> None:
    with Output("pipe") as output:
        assert fcntl.fcntl(output.descriptor, fcntl.F_SETPIPE_SZ, 4096) == 4096
        body = f"output.fcntl.F_SETPIPE_SZ = -1  # as at the limit of the user\n{everything()}"
        assert start(body, output).wait(timeout=60) == 7
        text = output.text()
    assert text.startswith("a line\n") and text.endswith("the last line")


def test_the_output_of_a_process_without_end_process_is_printed() -> None:
    with Output("pipe") as output:
        assert start("print('help', end='')\nsys.exit(3)", output).wait(timeout=60) == 3
        assert output.text() == "help"


def test_a_closed_descriptor_is_not_an_error() -> None:
    command = [sys.executable, "-c", PRINTING.format(body=everything())]
    script = 'exec "$@" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", script, "bash", *command], cwd=REPOSITORY, timeout=60)
    assert done.returncode == 7


def test_a_slow_reader_gets_all_of_a_run_that_ends_normally() -> None:
    lines = "".join(f"line {number} {'x' * 90}\n" for number in range(30_000))
    read, write = os.pipe()
    body = """
for number in range(30_000):
    print("line", number, "x" * 90)
output.finish_output(20)
output.end_process(0)
"""
    command = [sys.executable, "-c", PRINTING.format(body=body)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=write)
    os.close(write)
    text = b""
    while part := os.read(read, 2**16):
        text += part
        time.sleep(0.01)
    os.close(read)
    assert process.wait(timeout=60) == 0
    assert text.decode() == lines


def test_a_full_buffer_drops_the_oldest_lines_and_reports_it() -> None:
    body = """
import os
output.MAX_UNREAD_BYTES = 10_000
for number in range(20_000):
    print("line", number, "x" * 100)
os.write(2, b"printed")
print("the last line")
sys.stdout.finish(20)
output.end_process(0)
"""
    ours, theirs = socket.socketpair()  # like a terminal, a socket cannot be enlarged
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTING.format(body=body)],
        cwd=REPOSITORY,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    theirs.close()
    assert process.stderr.read(7) == b"printed"  # although the output is not read
    with ours.makefile() as stream:
        text = stream.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert text.endswith("the last line\n") and "bytes of output were dropped" in text
    assert "line 19999 " in text
    # Which lines are dropped depends on how often the thread runs while the socket has room.
    assert len(text) < 1_000_000  # of 2.3 MB


@pytest.mark.parametrize("grows", [True, False])
def test_a_launcher_can_print_when_the_ranks_have_filled_the_pipe(grows: bool) -> None:
    body = f"""
import os
if not {grows}:
    output.fcntl.F_SETPIPE_SZ = -1  # as at the limit of pipe-max-size
for number in range(10_000):
    print("line", number, "x" * 50)
output.finish_output(0.3)
os.write(2, b"filled")
open("/dev/stdin").read()
"""
    with Output("pipe") as output:
        output.stop_reading()
        if grows:
            output.fill()
        process = subprocess.Popen(
            [sys.executable, "-c", PRINTING.format(body=body)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=output.descriptor,
            stderr=subprocess.PIPE,
        )
        assert process.stderr.read(6) == b"filled"
        launcher = subprocess.Popen(
            [sys.executable, "-c", "print('Killing subprocess', 'x' * 3000, flush=True)"],
            stdout=output.descriptor,
        )
        try:
            assert launcher.wait(timeout=30) == 0
        finally:
            for each in (launcher, process):
                each.kill()
                each.wait()
            process.stdin.close()
            process.stderr.close()
        assert "Killing subprocess" in output.text()


def test_a_forked_process_prints() -> None:
    body = """
import os
if os.fork() == 0:
    print("the child")
    os._exit(0)
os.wait()
output.end_process(0)
"""
    with Output("pipe") as output:
        assert start(body, output).wait(timeout=60) == 0
        assert output.text() == "the child\n"


FOR_JSON = """
import ctypes, os, sys
from threefold.runtime.output import stdout_for_json
with stdout_for_json(True):
    ctypes.CDLL(None).printf(b"of C\\n")  # stays in C's buffer, because stdout is a pipe
    os.system("echo of a child")
    print("of Python")
print("{}", flush=True)
"""


def test_only_the_object_of_json_reaches_standard_output() -> None:
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", FOR_JSON],
        cwd=REPOSITORY,
        env=buffered,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "{}\n"
    assert sorted(done.stderr.split("\n")) == ["", "of C", "of Python", "of a child"]


LABELLED = """
output.label_lines(3)
print("one\\n\\ntwo")
print("a part", end="", flush=True)
print(" of a line")
sys.stderr.write("a message\\n")
output.finish_output(2)
output.end_process(0)
"""
LABEL = r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d rank 3\] "


def test_log_lines_begin_with_time_and_rank() -> None:
    with Output("pipe") as output:
        assert start(LABELLED, output).wait(timeout=60) == 0
        lines = output.text().splitlines()
    assert [re.sub(LABEL, "", line) for line in lines] == [
        *("one", "", "two", "a part of a line", "a message")
    ]
    assert [bool(re.match(LABEL, line)) for line in lines] == [True, False, True, True, True]


def test_a_call_of_minutes_prints_lines_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    asked = threading.Event()

    def describe() -> str:
        asked.set()
        return "reading"

    with progress_lines(describe, seconds_between_lines=0.01):
        assert asked.wait(60)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert set(lines) == {"  reading, 0 s so far"}
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_lines_on_a_terminal_have_no_label() -> None:
    with Output("halted terminal") as output:  # not halted before `spoil`
        assert start(LABELLED, output).wait(timeout=60) == 0
        lines = output.text().splitlines()
    assert lines == ["one", "", "two", "a part of a line", "a message"]
