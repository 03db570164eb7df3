"""Serving of the page on this machine during its runs."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

from models.errors import UserError, reason_of
from threefold.run_folder.lock import is_held

HOST = "127.0.0.1"
WATCHED = ("metrics.jsonl", "events.jsonl", "recipe.toml", "timeline.svg")
LAST_ANSWERS_SECONDS = 2.0  # time for open pages to load the final state


class Watcher:
    """A page that is generated again when its run folders have changed.

    Args:
        paths: the run folders
        generate: function that returns the page as HTML, for a version
    """

    def __init__(self, paths: Sequence[Path], generate: Callable[[str], str]):
        self.paths, self.generate = paths, generate
        self._lock = Lock()
        self._page: tuple[str, bytes] | None = None

    def version(self) -> str:
        """Return a text that changes when a run folder changes."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(os.fsencode(path) + f" {is_held(path)}\n".encode())
            for name in WATCHED:
                try:
                    found = (path / name).stat()
                except OSError:
                    continue
                digest.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> bytes:
        """Return the page; it is generated at most once for each version."""
        with self._lock:
            version = self.version()
            if self._page is None or self._page[0] != version:
                self._page = (version, self.generate(version).encode())
            return self._page[1]

    def is_running(self) -> bool:
        """Return True if a process holds one of the run folders."""
        return any(map(is_held, self.paths))


def serve(watcher: Watcher, *, port: int, seconds: float) -> None:
    """Serve a page on this machine until its runs end or the user presses Ctrl-C.

    Args:
        watcher: the page
        port: port to listen on; 0: a free port
        seconds: interval at which the runs are checked

    Raises:
        UserError: the port is in use.
    """
    try:
        server = new_server(watcher, port)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--port {port} cannot be used ({reason_of(error)}); use another one, such as --port 0 "
            f"for any free port"
        ) from None
    thread = Thread(target=server.serve_forever, name="report", daemon=True)
    thread.start()
    print(f"serving on http://{HOST}:{server.server_port}/ until the run ends; Ctrl-C stops it",
          flush=True)  # fmt: skip
    try:
        while watcher.is_running():
            time.sleep(seconds)
        time.sleep(seconds + LAST_ANSWERS_SECONDS)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        server.shutdown()
        server.server_close()


def new_server(watcher: Watcher, port: int) -> ThreadingHTTPServer:
    """Return a server of a page on this machine; port 0 is a free one."""
    return ThreadingHTTPServer((HOST, port), _handler(watcher))


def _handler(watcher: Watcher) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers `/` with the page, and `/version` with its version."""

        def do_GET(self) -> None:
            """Answer a request of a browser on this machine."""
            # A page of another site whose name was made to point here sends its own name.
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (HOST, "localhost"):
                self._answer(403, b"only for this machine", "text/plain")
            elif self.path == "/":
                self._answer(200, watcher.page(), "text/html; charset=utf-8")
            elif self.path == "/version":
                self._answer(200, watcher.version().encode(), "text/plain")
            else:
                self._answer(404, b"not found", "text/plain")

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing about requests."""

        def _answer(self, code: int, content: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

    return Handler
