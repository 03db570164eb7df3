"""The server of a node's snapshots: what it answers, to whom, and when it ends."""

import contextlib
import hashlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from threefold.checkpoint.snapshots import node_memory
from threefold.checkpoint.snapshots.node_memory import (
    Client,
    NodeMemory,
    ServerAddress,
    SnapshotUnavailable,
    listings,
)
from threefold.config.sections import REPOSITORY
from threefold.launch import snapshot_server
from threefold.launch.node_agent import ServerProcess
from threefold.launch.snapshot_server import ConnectionLimit, Handler
from threefold.launch.snapshot_server import Server as SnapshotServer

SNAPSHOT, FILE = "step-0000012-3-9f3a22c1", "weights-00000.safetensors"
CONTENT = os.urandom(300_000)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess.start(tmp_path / "threefold-run-node1")
    (process.folder / SNAPSHOT).mkdir()
    (process.folder / SNAPSHOT / FILE).write_bytes(CONTENT)
    yield process
    process.end()


@pytest.fixture
def client(process: ServerProcess) -> Client:
    return Client(ServerAddress("node1", process.port, process.secret, "127.0.0.1"))


def test_complete_snapshots_are_listed(client: Client, process: ServerProcess) -> None:
    (process.folder / "step-0000015-9f3a22c1.incomplete").mkdir()
    process.write_servers([{"node": "node1", "port": 1, "secret": "", "address": "a"}])
    assert client.listing() == {SNAPSHOT: {FILE: len(CONTENT)}}
    assert NodeMemory(process.folder).servers() == [ServerAddress("node1", 1, "", "a")]


def test_files_and_parts_arrive_unchanged(client: Client) -> None:
    assert client.content(SNAPSHOT, FILE) == CONTENT
    for start, stop in ((0, 1), (0, 0), (7, 7), (299_999, 300_000), (1_000, 200_001)):
        assert client.part(SNAPSHOT, FILE, start, stop) == CONTENT[start:stop]
    assert client.sha256(SNAPSHOT, FILE, 1) == hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize(
    ("snapshot", "file"),
    [
        (SNAPSHOT, "weights-00001.safetensors"),
        ("step-0000013-3-9f3a22c1", FILE),
        ("..", "servers.json"),
        (SNAPSHOT, "..%2Fservers.json"),
        ("step-0000015-9f3a22c1.incomplete", FILE),
    ],
)
def test_nothing_else_is_served(
    snapshot: str, file: str, client: Client, process: ServerProcess
) -> None:
    process.write_servers([])
    with pytest.raises(SnapshotUnavailable, match="node1"):
        client.content(snapshot, file)
    assert client.listing()  # the next request is answered


@pytest.mark.parametrize(("start", "stop"), [(0, 300_001), (300_000, 300_001)])
def test_a_part_beyond_the_end_is_refused(start: int, stop: int, client: Client) -> None:
    with pytest.raises(SnapshotUnavailable):
        client.part(SNAPSHOT, FILE, start, stop)


@pytest.mark.parametrize("secret", ["", "wrong", None])
def test_a_request_needs_the_secret(secret: str | None, process: ServerProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=5)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    for path in ("/", f"/{SNAPSHOT}/{FILE}", f"/{SNAPSHOT}/{FILE}?sha256"):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (403, b"")


def test_nodes_that_do_not_answer_are_left_out(client: Client) -> None:
    dead = Client(ServerAddress("node2", 1, "", "127.0.0.1"))
    assert set(listings([client, dead])) == {"node1"}
    assert listings([]) == {}


def test_the_server_deletes_the_snapshots_when_its_agent_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
        "from threefold.launch.node_agent import ServerProcess; "
        "process = ServerProcess.start(Path(sys.argv[2])); "
        "print(process.process.pid, flush=True); time.sleep(60)"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", code, str(REPOSITORY), str(tmp_path / "run-node1")],
        stdout=subprocess.PIPE,
    )
    assert agent.stdout
    server = int(agent.stdout.readline())
    assert len(list(tmp_path.iterdir())) == 1
    agent.kill()
    agent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (list(tmp_path.iterdir()) or is_alive(server)):
        time.sleep(0.05)
    assert not list(tmp_path.iterdir()) and not is_alive(server)


def is_alive(process: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_a_new_agent_deletes_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    left = tmp_path / "run-node1.123" / SNAPSHOT
    left.mkdir(parents=True)
    other = tmp_path / "run-node10.123"
    other.mkdir()
    process = ServerProcess.start(tmp_path / "run-node1")
    assert set(tmp_path.iterdir()) == {process.folder, other}
    assert process.folder.stat().st_mode & 0o777 == 0o700
    process.end()
    assert set(tmp_path.iterdir()) == {other} and process.process.returncode == 0


def test_a_process_keeps_few_connections(
    process: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(Client, "_open", OrderedDict())
    clients = [
        Client(ServerAddress(f"node{n}", process.port, process.secret, "127.0.0.1"))
        for n in range(8)
        for n in range(8)
    ]
    for _ in range(2):
        for each in clients:
            assert each.part(SNAPSHOT, FILE, 5, 9) == CONTENT[5:9]
    assert list(Client._open)[-3:] == clients[-3:] and len(Client._open) == 3


@contextlib.contextmanager
def serve(folder: Path, connections: ConnectionLimit) -> Iterator[ServerAddress]:
    """Run a server in this process, and yield its address."""
    (folder / SNAPSHOT).mkdir()
    (folder / SNAPSHOT / FILE).write_bytes(CONTENT)
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = SnapshotServer(listening, folder, "secret", connections=connections)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield ServerAddress("node1", listening.getsockname()[1], "secret", "127.0.0.1")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for connection in list(server.connections._peers):
            with contextlib.suppress(OSError):  # the client has closed it
                connection.shutdown(socket.SHUT_RDWR)
        for answering in threading.enumerate():
            if "process_request" in answering.name:
                answering.join()


@contextlib.contextmanager
def half_requests(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open connections that send the beginning of a request and then nothing."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.socket()) for _ in range(count)]
        for peer in peers:
            peer.setblocking(False)
            peer.connect_ex(("127.0.0.1", port))
        for peer in peers:
            with contextlib.suppress(OSError):  # not connected yet: the queue is full
                peer.send(b"GET / HTTP/1.1\r\nAuthorization: Bear")
        yield peers


def wait_until_threads_are_at_most(limit: int) -> None:
    """Wait for the thread of a closed connection, which takes a moment to end."""
    deadline = time.monotonic() + 10
    while sum("process_request" in thread.name for thread in threading.enumerate()) > limit:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_silent_peers_do_not_keep_out_a_peer_with_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_server, "SECONDS_FOR_SECRET", 0.02)
    with serve(tmp_path, ConnectionLimit(6, 4)) as server, half_requests(server.port, 60):
        for _ in range(3):
            assert Client(server).listing() == {SNAPSHOT: {FILE: len(CONTENT)}}
            wait_until_threads_are_at_most(6)


def test_an_idle_connection_is_closed_for_a_new_one_and_its_client_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_server, "SECONDS_FOR_SECRET", 0.02)
    with serve(tmp_path, ConnectionLimit(2, 2)) as server:
        clients = [Client(server) for _ in range(5)]
        for _ in range(2):
            for each in clients:
                assert each.content(SNAPSHOT, FILE) == CONTENT
                wait_until_threads_are_at_most(2)


def test_a_connection_on_which_nothing_arrives_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.1)
    with serve(tmp_path, ConnectionLimit(6, 4)) as server, half_requests(server.port, 3) as peers:
        for peer in peers:
            peer.settimeout(5)
            assert peer.recv(1) == b""


def test_a_body_that_is_cut_off_is_followed_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sendfile(self: socket.socket, stream: IO[bytes], start: int, count: int) -> int:
        self.sendall(stream.read(1000))
        raise TimeoutError  # as for a peer that reads nothing for too long

    monkeypatch.setattr(socket.socket, "sendfile", sendfile)
    with serve(tmp_path, ConnectionLimit(6, 4)) as server, socket.socket() as peer:
        peer.settimeout(10)
        peer.connect(("127.0.0.1", server.port))
        request = f"GET /{SNAPSHOT}/{FILE} HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n"
        peer.sendall(request.encode())
        answer = b"".join(iter(lambda: peer.recv(2**20), b""))
        with pytest.raises(SnapshotUnavailable):
            Client(server).content(SNAPSHOT, FILE)
    header, _, body = answer.partition(b"\r\n\r\n")
    assert header.startswith(b"HTTP/1.1 200 OK") and b"Content-Length: 300000" in header
    assert body == CONTENT[:1000]


def test_the_limit_of_files_leaves_room_for_the_files_that_are_read() -> None:
    for files, limit, strangers in ((128, 48, 24), (20_000, 4096, 256), (0, 2, 1)):
        connections = ConnectionLimit.for_files(files)
        assert (connections.limit, connections.strangers) == (limit, strangers)


def test_a_secret_that_is_not_ascii_is_rejected(process: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", process.port), timeout=5) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nAuthorization: Bearer \xe9\r\n\r\n")
        assert peer.recv(100).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}',
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
    ],
)
def test_another_program_at_the_port_is_a_server_that_does_not_answer(answer: bytes) -> None:
    def serve_answer(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed below
            while True:
                with listening.accept()[0] as peer:
                    peer.recv(1000)
                    peer.sendall(answer)

    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_answer, args=(listening,), daemon=True).start()
    try:
        other = Client(ServerAddress("node2", listening.getsockname()[1], "", "127.0.0.1"))
        with pytest.raises(SnapshotUnavailable, match="node2"):
            other.listing()
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


@pytest.mark.long
@pytest.mark.parametrize(("files", "threads"), [(128, 60), (4096, 300)])
def test_1500_half_requests_do_not_exhaust_the_server(
    files: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {files}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    process = ServerProcess.start(tmp_path / "run-node1")
    (process.folder / SNAPSHOT).mkdir()
    (process.folder / SNAPSHOT / FILE).write_bytes(CONTENT)
    reader = Client(ServerAddress("node1", process.port, process.secret, "127.0.0.1"))
    try:
        with half_requests(process.port, 1500):
            for _ in range(5):
                assert reader.content(SNAPSHOT, FILE) == CONTENT
                assert len(os.listdir(f"/proc/{process.process.pid}/task")) <= threads
                reader = Client(reader.server)
    finally:
        process.end()
