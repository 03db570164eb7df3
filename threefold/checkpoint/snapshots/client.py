"""Requests to the servers of snapshots (recipes/nodes/snapshot_server.py)."""

import http.client
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from threefold.checkpoint.snapshots.node_memory import Server

SECONDS_TO_ANSWER = 10.0
HASHED_BYTES_PER_SECOND = 50e6  # of a slow and busy node; the limit of the wait for a hash
MAX_CONNECTIONS = 64
MAX_ATTEMPTS = 2
MAX_AT_ONCE = 64  # nodes that are asked at the same time

Listing = dict[str, dict[str, int]]  # snapshot -> file -> bytes


class SnapshotUnavailable(Exception):
    """A server does not answer, or does not have what was asked for."""


class Client:
    """Requests to the server of one node, by one thread at a time.

    A process keeps MAX_CONNECTIONS connections at most, because the files of a large run are spread
    over a thousand nodes.

    Args:
        server: the server
    """

    _open: ClassVar[OrderedDict["Client", http.client.HTTPConnection]] = OrderedDict()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, server: Server):
        self.server = server

    def listing(self) -> Listing:
        """Return the complete snapshots of the node, and the sizes of their files.

        Raises:
            SnapshotUnavailable: the server does not answer.
        """
        text = self._get("/")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if _is_listing(found):
            return found
        raise SnapshotUnavailable(f"{self.server.node}: the answer is not a list of snapshots")

    def content(self, snapshot: str, file: str) -> bytes:
        """Return a whole file.

        Raises:
            SnapshotUnavailable: the server does not have it, or does not answer.
        """
        return bytes(self._get(f"/{snapshot}/{file}"))

    def part(self, snapshot: str, file: str, start: int, stop: int) -> bytearray:
        """Return the bytes start .. stop - 1 of a file.

        Raises:
            SnapshotUnavailable: the server does not have them, or does not answer.
        """
        if start == stop:
            return bytearray()
        content = self._get(f"/{snapshot}/{file}", part=f"bytes={start}-{stop - 1}")
        if len(content) != stop - start:
            raise SnapshotUnavailable(f"{self.server.node}: {file} is shorter than {stop} bytes")
        return content

    def sha256(self, snapshot: str, file: str, size: int) -> str:
        """Return the SHA-256 of a file, which the node computes, in hexadecimal.

        Args:
            snapshot: name of the snapshot
            file: name of the file
            size: of the file, in bytes; decides how long to wait

        Raises:
            SnapshotUnavailable: the server does not have it, or does not answer.
        """
        seconds = SECONDS_TO_ANSWER + size / HASHED_BYTES_PER_SECOND
        content = self._get(f"/{snapshot}/{file}?sha256", seconds=seconds)
        return content.decode(errors="replace")

    def _get(self, path: str, *, part: str = "", seconds: float = SECONDS_TO_ANSWER) -> bytearray:
        """Return the content of an answer; try again if the server has closed the connection.

        The server closes idle connections when it has too many. A server that has not answered in
        time is not asked again.
        """
        for attempt in range(MAX_ATTEMPTS):
            try:
                return self._request(path, part, seconds)
            except (OSError, http.client.HTTPException) as error:
                if attempt == MAX_ATTEMPTS - 1 or isinstance(error, TimeoutError):
                    raise self._unavailable(path, str(error)) from None
        raise AssertionError("no attempt was made")

    def _unavailable(self, path: str, reason: str) -> SnapshotUnavailable:
        return SnapshotUnavailable(f"{self.server.node}: {path}: {reason}")

    def _request(self, path: str, part: str, seconds: float) -> bytearray:
        """Return the content of an answer.

        Raises:
            SnapshotUnavailable: the server does not have it.
            OSError: the connection failed.
            HTTPException: the connection was closed, or the answer is not valid.
        """
        headers = {"Authorization": f"Bearer {self.server.secret}"}
        if part:
            headers["Range"] = part
        connection = self._connection(seconds)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if answer.length is None:
                raise http.client.HTTPException("the answer has no length")
            content = bytearray(answer.length)
            received = 0
            while received < len(content):  # one read may return a part
                count = answer.readinto(memoryview(content)[received:])
                if not count:
                    raise http.client.IncompleteRead(bytes(0), len(content) - received)
                received += count
            answer.read()  # the end, after which the connection can be used again
            if answer.status in (http.client.OK, http.client.PARTIAL_CONTENT):
                self._keep(connection)
                return content
        except (OSError, http.client.HTTPException):
            connection.close()
            raise
        connection.close()
        raise self._unavailable(path, answer.reason)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        """Return the connection of the last request, or a new one, which is opened by its use."""
        with self._lock:
            found = self._open.pop(self, None)
        found = found or http.client.HTTPConnection(self.server.address, self.server.port)
        found.timeout = seconds
        if found.sock is not None:
            found.sock.settimeout(seconds)
        return found

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection; close the least recently used connection if there are too many."""
        with self._lock:
            self._open[self] = connection
            oldest = (
                self._open.popitem(last=False)[1] if len(self._open) > MAX_CONNECTIONS else None
            )
        if oldest:
            oldest.close()


def _is_listing(content: Any) -> bool:
    """Return True if an answer has the shape of a `Listing`."""
    return isinstance(content, dict) and all(
        isinstance(files, dict) and all(type(size) is int for size in files.values())
        for files in content.values()
    )


def listings(clients: Sequence[Client]) -> dict[str, Listing]:
    """Return the snapshots of each node that answers, by node."""

    def listing_of(client: Client) -> Listing | None:
        try:
            return client.listing()
        except SnapshotUnavailable:
            return None

    if not clients:
        return {}
    with ThreadPoolExecutor(min(MAX_AT_ONCE, len(clients))) as pool:
        answers = pool.map(listing_of, clients)
        return {
            client.server.node: answer
            for client, answer in zip(clients, answers, strict=True)
            if answer is not None
        }
