"""Serve the snapshots in the memory of this node to the ranks of other nodes, over HTTP.

launch.py's agent starts this process. It ends, and deletes all snapshots of the node, when its
standard input ends: then the agent has ended, however that happened. Only the standard library is
imported.

    GET /                          {snapshot: {file: bytes}} of all complete snapshots
    GET /SNAPSHOT/FILE             the file, or a part of it with the header "Range: bytes=0-99"
    GET /SNAPSHOT/FILE?sha256      the SHA-256 of the file, in hexadecimal

Each request needs the header "Authorization: Bearer SECRET". Peers that do not send it can neither
exhaust the threads and files of this process nor keep other peers out (`ConnectionLimit`).
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from threefold/launch/
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import contextlib
import hashlib
import hmac
import json
import os
import re
import resource
import shutil
import socket
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any

from threefold.checkpoint.snapshots.names import SNAPSHOT

PATH = re.compile(
    rf"/(?P<snapshot>{SNAPSHOT.pattern})/(?P<file>[a-z]+(-\d+)?\.(json|sha256|safetensors))"
)
RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
MAX_CONNECTIONS = 4096  # with a thread each
MAX_STRANGERS = 256  # connections that have not sent the secret yet
FILES_PER_CONNECTION = 2  # the connection, and the file that it reads
RESERVED_FILES = 32  # of this process: standard streams, the listening socket, folders
SECONDS_OF_SILENCE = 30.0  # after which a connection is closed
# An unauthenticated connection may be closed for a new one after this time.
SECONDS_FOR_SECRET = 0.05
SECONDS_BETWEEN_LOOKS = 0.02  # while there are too many connections


@dataclass
class Peer:
    """A connection.

    Attributes:
        since: time when it was opened, or when its last answer was complete
        is_known: True once it has sent the secret
        is_closed: True once closed to make room for a new connection; its thread may still run
    """

    since: float
    is_known: bool = False
    is_served: bool = False
    is_closed: bool = False


class ConnectionLimit:
    """The open connections, at most as many as the process has threads and files for.

    If there are too many, a new connection waits until another one is closed: the one that has
    waited longest without sending the secret, or else the one that has been idle longest. A peer
    that sends its request at once is therefore served, however many silent peers there are. Closing
    an idle connection is safe, because `Client` reconnects.

    Args:
        limit: of all connections
        strangers: limit of the connections that have not sent the secret
    """

    def __init__(self, limit: int, strangers: int):
        self.limit, self.strangers = limit, strangers
        self._peers: dict[socket.socket, Peer] = {}
        self._changed = threading.Condition()

    @classmethod
    def for_files(cls, files: int) -> "ConnectionLimit":
        """Return the connections of a process that may open `files` files."""
        limit = min(MAX_CONNECTIONS, max(2, (files - RESERVED_FILES) // FILES_PER_CONNECTION))
        return cls(limit, min(MAX_STRANGERS, limit // 2))

    def admit(self, connection: socket.socket) -> None:
        """Add a connection; first wait until there is room for it."""
        with self._changed:
            while True:
                strangers = {own: peer for own, peer in self._peers.items() if not peer.is_known}
                if len(strangers) < self.strangers and len(self._peers) < self.limit:
                    break
                idle = {own: peer for own, peer in self._peers.items() if not peer.is_served}
                self._close_oldest(strangers or idle)
                self._changed.wait(SECONDS_BETWEEN_LOOKS)
            self._peers[connection] = Peer(time.monotonic())

    def _close_oldest(self, peers: dict[socket.socket, Peer]) -> None:
        """Close the connection that has waited longest, unless all have just begun to wait."""
        latest = time.monotonic() - SECONDS_FOR_SECRET
        open_peers = [entry for entry in peers.items() if not entry[1].is_closed]
        own, peer = min(open_peers, key=lambda entry: entry[1].since, default=(None, None))
        if own is not None and peer is not None and peer.since <= latest:
            peer.is_closed = True
            with contextlib.suppress(OSError):  # the peer has closed it
                own.shutdown(socket.SHUT_RDWR)  # its thread ends, and closes it

    def begin(self, connection: socket.socket) -> None:
        """Note that a connection has sent the secret, and that its request is answered now."""
        with self._changed:
            self._peers[connection].is_known = self._peers[connection].is_served = True

    def end(self, connection: socket.socket) -> None:
        """Note that the answer is complete."""
        with self._changed:
            peer = self._peers[connection]
            peer.is_served, peer.since = False, time.monotonic()

    def remove(self, connection: socket.socket) -> None:
        """Forget a connection that is about to be closed."""
        with self._changed:
            self._peers.pop(connection, None)
            self._changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: "Server"
    protocol_version = "HTTP/1.1"  # connections are kept
    disable_nagle_algorithm = True  # it would delay the body, which follows the header, by 40 ms
    timeout = SECONDS_OF_SILENCE

    def do_GET(self) -> None:
        """Answer a request."""
        sent = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(sent, f"Bearer {self.server.secret}".encode()):
            self._fail(HTTPStatus.FORBIDDEN)
            return
        self.server.connections.begin(self.connection)
        try:
            self._answer_request()
        finally:
            self.server.connections.end(self.connection)

    def _answer_request(self) -> None:
        path, _, query = self.path.partition("?")
        names = PATH.fullmatch(path)
        try:
            with contextlib.ExitStack() as stack:
                try:
                    listing = self._listing() if path == "/" else None
                    file = names and self.server.folder / names["snapshot"] / names["file"]
                    stream = file and stack.enter_context(file.open("rb"))
                except OSError:  # no such file
                    listing = stream = None
                if stream:
                    self._serve(stream, query)
                elif listing is not None:
                    self._answer(json.dumps(listing).encode())
                else:
                    self._fail(HTTPStatus.NOT_FOUND)
        except OSError:  # the peer has not read for too long, or has closed the connection
            self.close_connection = True  # the rest of the body is missing: send nothing else

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""

    def _listing(self) -> dict[str, dict[str, int]]:
        snapshots = {}
        for folder in self.server.folder.iterdir():
            if SNAPSHOT.fullmatch(folder.name):
                snapshots[folder.name] = {
                    file.name: file.stat().st_size for file in folder.iterdir()
                }
        return snapshots

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
    """A server on a socket that already listens, with a thread per connection.

    Args:
        folder: the folder of the node's snapshots
        secret: what requests must know
    """

    daemon_threads = True

    def __init__(
        self, listening: socket.socket, folder: Path, secret: str, *, connections: ConnectionLimit
    ):
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.folder, self.secret, self.connections = folder, secret, connections

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection in a thread, when there is room for it."""
        self.connections.admit(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that end early."""


def main() -> None:
    """Serve until the standard input ends, then delete the snapshots."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two files per rank that reads
    folder, listening = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    secret = sys.stdin.readline().strip()
    server = Server(listening, folder, secret, connections=ConnectionLimit.for_files(most))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
