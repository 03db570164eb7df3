"""`report.py --watch` serves the page on this machine during the run."""

import html
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from tests.commands import run_here
from tests.report.synthetic import line_of, recipe_of, write_lines, write_run
from threefold.commands.report import main
from threefold.config.loading import REPOSITORY
from threefold.report.page import Watcher
from threefold.run_folder.lock import FolderLock

EVERY = 0.2


@contextmanager
def watching(run: Path, output: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the command and yield its address; end it afterwards."""
    command = [sys.executable, "recipes/report.py", run, "--watch", "--every", EVERY]
    process = subprocess.Popen(
        [*map(str, command), "--output", str(output)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        match = re.search(r"serving on (http://127\.0\.0\.1:\d+/)", lines[1])
        assert match, lines
        yield match[1], process
    finally:
        process.kill()
        process.wait()


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_the_page_follows_the_run_and_the_server_ends_with_it(tmp_path: Path) -> None:
    run, output = write_run(tmp_path / "run", range(1, 11)), tmp_path / "report.html"
    lock = FolderLock(run)
    lock.acquire()
    with watching(run, output) as (url, process):
        first = read(url + "version")
        assert first in read(url)
        assert "10 of 200" in read(url)
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write('{"step": 11, "los')  # a line that is being written
        assert read(url + "version") != first
        page = read(url)
        assert "10 of 200" in page and "damaged" not in page
        write_lines(run / "metrics.jsonl", [line_of(recipe_of(), step) for step in range(1, 13)])
        assert "12 of 200" in read(url)
        assert_only_for_this_machine(url)
        lock.release()
        (run / "lock").unlink()
        assert process.wait(timeout=60) == 0
    assert "12 of 200" in output.read_text()
    assert "connect-src 'none'" in html.unescape(output.read_text())


def assert_only_for_this_machine(url: str) -> None:
    """Check that other names and other paths are not answered."""
    port = int(url.rstrip("/").rpartition(":")[2])
    for host, path, status in (
        (f"evil.example:{port}", "/", 403),
        (f"localhost:{port}", "/version", 200),
        (f"127.0.0.1:{port}", "/../metrics.jsonl", 404),
    ):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path, headers={"Host": host})
        assert connection.getresponse().status == status, host
        connection.close()


def test_a_run_that_has_ended_is_not_served(tmp_path: Path) -> None:
    run, output = write_run(tmp_path / "run", range(1, 4)), tmp_path / "report.html"
    done = run_here(main, run, "--watch", "--output", output)
    assert done.returncode == 0
    assert "there is nothing to watch" in done.stdout
    assert output.exists()


def test_the_page_is_generated_once_for_each_version(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(1, 4))
    generated: list[str] = []

    def generate(version: str) -> str:
        generated.append(version)
        return version

    watcher = Watcher([run], generate)
    assert watcher.page() == watcher.page() == watcher.version().encode()
    with (run / "events.jsonl").open("a") as stream:
        stream.write("\n")
    assert watcher.page().decode() == watcher.version()
    assert len(generated) == len(set(generated)) == 2
