"""Serve the snapshots in the memory of this node to the ranks of other nodes, over HTTP.

launch.py's agent starts this process. It ends, and deletes all snapshots of the node, when its
standard input ends: then the agent has ended, however that happened. Only the standard library is
imported.

    GET /                          {snapshot: {file: bytes}} of all complete snapshots
    GET /SNAPSHOT/FILE             the file, or a part of it with the header "Range: bytes=0-99"
    GET /SNAPSHOT/FILE?sha256      the SHA-256 of the file, in hexadecimal

Each request needs the header "Authorization: Bearer SECRET".
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/nodes/
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import contextlib
import hashlib
import hmac
import json
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any

from recipes.training.snapshots.names import SERVERS, SNAPSHOT

PATH = re.compile(
    rf"/(?P<snapshot>{SNAPSHOT.pattern})/(?P<file>[a-z]+(-\d+)?\.(json|sha256|safetensors))"
)
RANGE = re.compile(r"bytes=(\d+)-(\d+)")
SECONDS_TO_DELETE = 10.0
MAX_QUEUED_CONNECTIONS = 1024  # that wait for a thread


@dataclass
class ServerProcess:
    """The server of a node, as its agent sees it.

    Attributes:
        process: the server; it ends when its standard input is closed
        folder: the folder of the node's snapshots
        port: the TCP port of the server
        secret: what requests must know
    """

    process: "subprocess.Popen[bytes]"
    folder: Path
    port: int
    secret: str

    @classmethod
    def start(cls, prefix: Path) -> "ServerProcess":
        """Create an empty folder for snapshots, and start its server.

        Args:
            prefix: the path of the folder, without the number that this function appends. What
                earlier agents have left under the same prefix is deleted

        Raises:
            OSError: the folder cannot be created.
        """
        for earlier in prefix.parent.glob(f"{prefix.name}.*"):
            shutil.rmtree(earlier, ignore_errors=True)
        # Another name each time: the server of an agent that has just been killed deletes its own.
        folder = prefix.with_name(f"{prefix.name}.{os.getpid()}")
        folder.mkdir(mode=0o700)
        secret = secrets.token_hex(16)
        with socket.create_server(
            ("", 0), family=socket.AF_INET, backlog=MAX_QUEUED_CONNECTIONS
        ) as listening:
            process = subprocess.Popen(
                [sys.executable, __file__, str(folder), str(listening.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
            port = listening.getsockname()[1]
        assert process.stdin
        process.stdin.write(f"{secret}\n".encode())
        process.stdin.flush()
        return cls(process, folder, port, secret)

    def write_servers(self, servers: Sequence[dict[str, Any]]) -> bool:
        """Write the list of all servers for the ranks of this node; return False if that fails."""
        file = self.folder / SERVERS
        whole = file.with_suffix(".new")
        try:
            whole.write_text(json.dumps(servers))
            os.replace(whole, file)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Let the server delete the snapshots and end."""
        assert self.process.stdin
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_DELETE)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection; `folder` and `secret` are set by `main`."""

    protocol_version = "HTTP/1.1"  # connections are kept
    disable_nagle_algorithm = True  # it would delay the body, which follows the header, by 40 ms
    folder: Path
    secret: str

    def do_GET(self) -> None:
        """Answer a request."""
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given, f"Bearer {self.secret}"):
            self._fail(HTTPStatus.FORBIDDEN)
            return
        path, _, query = self.path.partition("?")
        names = PATH.fullmatch(path)
        try:
            if path == "/":
                self._answer(json.dumps(self._listing()).encode())
            elif names is None:
                self._fail(HTTPStatus.NOT_FOUND)
            else:
                with (self.folder / names["snapshot"] / names["file"]).open("rb") as stream:
                    self._serve(stream, query)
        except OSError:  # no such file
            self._fail(HTTPStatus.NOT_FOUND)

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""

    def _listing(self) -> dict[str, dict[str, int]]:
        found = {}
        for folder in self.folder.iterdir():
            if SNAPSHOT.fullmatch(folder.name):
                found[folder.name] = {file.name: file.stat().st_size for file in folder.iterdir()}
        return found

    def _answer(self, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _serve(self, stream: IO[bytes], query: str) -> None:
        """Send a file, a part of it, or its hash."""
        if query == "sha256":
            digest = hashlib.file_digest(stream, "sha256")  # type: ignore[arg-type]
            self._answer(digest.hexdigest().encode())
            return
        size = os.fstat(stream.fileno()).st_size
        part = RANGE.fullmatch(self.headers.get("Range", ""))
        start, stop = (int(part[1]), int(part[2]) + 1) if part else (0, size)
        if not start <= stop <= size:
            self._fail(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        self.send_response(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK)
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if stop > start:
            self.connection.sendfile(stream, start, stop - start)

    def _fail(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")  # part of an answer may have been sent
        self.send_header("Content-Length", "0")
        self.end_headers()


class Server(ThreadingHTTPServer):
    """A server on a socket that already listens, with a thread per connection."""

    daemon_threads = True

    def __init__(self, listening: socket.socket):
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that end early."""


def main() -> None:
    """Serve until the standard input ends, then delete the snapshots."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two files per rank that reads
    folder, listening = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    Handler.folder, Handler.secret = folder, sys.stdin.readline().strip()
    server = Server(listening)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
