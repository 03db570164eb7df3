"""Snapshots in the memory of a node: folders in /dev/shm, and requests to servers.

A snapshot is a checkpoint whose files are spread over the memory of the nodes. Each node holds the
files of its own ranks and copies of those of a partner node. The folder of a node:

threefold-RUN-NODE.PID/       PID of the agent
  servers.json                the servers of all nodes, written by the agent of launch.py
  step-0000150-7-9f3a22c1/    step, number of turns in the run's history, name of the writer
    manifest.json             as in a checkpoint on the disk; the same on all nodes
    manifest.sha256
    weights-00000.safetensors    files of the ranks of this node and of its partner
    ...

A folder with such a name is complete: it was written under a name that ends with `.incomplete`, and
was renamed when all ranks had written their files.
"""

import contextlib
import http.client
import json
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from threefold.checkpoint.format import write_manifest
from threefold.checkpoint.snapshots.names import FOLDER_VARIABLE, SERVERS

INCOMPLETE = ".incomplete"
RESERVED_SHARE = 0.05  # of the node's memory, which snapshots leave free
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # version 2
CACHED = ("active_file", "inactive_file")  # of memory.stat


@dataclass(frozen=True)
class ServerAddress:
    """The address of the server of a node's snapshots (threefold/launch/snapshot_server.py).

    Attributes:
        secret: without it, the server does not answer
        address: host name or IP address of the server
    """

    node: str
    port: int
    secret: str
    address: str


class NodeMemory:
    """The folder of this node's snapshots.

    Args:
        folder: the folder, which launch.py's agent has created
    """

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "NodeMemory | None":
        """Return the folder that launch.py's agent has prepared; None without launch.py."""
        folder = environment.get(FOLDER_VARIABLE)
        return cls(Path(folder)) if folder else None

    def servers(self) -> list[ServerAddress]:
        """Return the servers of all nodes that launch.py reaches; none if they are unknown."""
        try:
            servers = json.loads((self.folder / SERVERS).read_text(encoding="utf-8"))
            return [ServerAddress(**server) for server in servers]
        except (OSError, ValueError, RecursionError, TypeError):
            return []

    def workspace(self, step: int, writer: str) -> Path:
        """Return the folder for a snapshot that is being taken."""
        return self.folder / f"step-{step:07d}-{writer}{INCOMPLETE}"

    def create(self, workspace: Path) -> None:
        """Create the folder for a snapshot; several ranks of the node do.

        Raises:
            OSError: the folder cannot be created, for example because the agent has removed its
                parent.
        """
        workspace.mkdir(exist_ok=True)

    def publish(self, workspace: Path, name: str, manifest: str) -> None:
        """Write the manifest, and publish the complete snapshot with one rename.

        Raises:
            OSError: a file cannot be written, or the folder cannot be renamed.
        """
        write_manifest(workspace, manifest)
        os.rename(workspace, self.folder / name)

    def clean(self, *, keep: str, incomplete_only: bool = False) -> None:
        """Delete all snapshots but one.

        Args:
            keep: name of the snapshot to keep
            incomplete_only: keep the other complete snapshots too
        """
        with contextlib.suppress(OSError):  # the agent has removed the folder
            for entry in self.folder.iterdir():
                is_complete = entry.suffix != INCOMPLETE
                if entry.is_dir() and entry.name != keep and not (is_complete and incomplete_only):
                    shutil.rmtree(entry, ignore_errors=True)

    def lack_of_room(self, size: int) -> str:
        """Return a message if the node has no room for more bytes; "" if it has.

        The limit of the file system and the free memory of the node both count.
        """
        try:
            in_folder = shutil.disk_usage(self.folder).free
        except OSError as error:
            return f"{self.folder}: {error.strerror}"
        total, available = memory_of_node()
        in_memory = available - int(RESERVED_SHARE * total)
        free = min(in_folder, in_memory)
        if size <= free:
            return ""
        where = f"{self.folder.parent} has" if free == in_folder else "the node has"
        return (
            f"{where} {max(free, 0) / 1e9:.3f} GB of memory free, and a snapshot needs "
            f"{size / 1e9:.3f} GB"
        )


def memory_of_node() -> tuple[int, int]:
    """Return the total and the available memory for this process on its node, in bytes.

    A limit of a container or of Slurm (--mem) counts too.
    """
    fields = {}
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024
    limits = [(fields["MemTotal"], fields["MemAvailable"]), *cgroup_limits(OWN_CGROUP, CGROUPS)]
    return min(total for total, _ in limits), min(available for _, available in limits)


def cgroup_limits(membership: Path, root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the available memory of this process's cgroup and of its parents.

    Cached files count as available, because the kernel drops them when memory runs short. Cgroups
    without a limit are left out. The files are described in the kernel's
    admin-guide/cgroup-v2.rst.

    Args:
        membership: /proc/self/cgroup
        root: the folder at which cgroups are mounted
    """
    with contextlib.suppress(OSError):
        lines = membership.read_text(encoding="utf-8").splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), None)
        folder = root / own.lstrip("/") if own is not None else root
        for cgroup in [folder, *folder.parents]:
            if not cgroup.is_relative_to(root):
                return
            with contextlib.suppress(OSError, ValueError):  # no limit: no such file, or "max"
                limit = int((cgroup / "memory.max").read_text(encoding="utf-8"))
                used = int((cgroup / "memory.current").read_text(encoding="utf-8"))
                lines = (cgroup / "memory.stat").read_text(encoding="utf-8").splitlines()
                rows = (line.split() for line in lines)
                cached = sum(int(size) for key, size in rows if key in CACHED)
                yield limit, limit - used + cached


# Requests to the servers of snapshots (threefold/launch/snapshot_server.py).

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
    """

    _open: ClassVar[OrderedDict["Client", http.client.HTTPConnection]] = OrderedDict()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, server: ServerAddress):
        self.server = server

    def listing(self) -> Listing:
        """Return the complete snapshots of the node, and the sizes of their files.

        Raises:
            SnapshotUnavailable: the server does not answer.
        """
        text = self._get("/")
        try:
            listing = json.loads(text)
        except (ValueError, RecursionError):
            listing = None
        if _is_listing(listing):
            return listing
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
            connection = self._open.pop(self, None)
        connection = connection or http.client.HTTPConnection(self.server.address, self.server.port)
        connection.timeout = seconds
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        return connection

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
