"""The server of a node's snapshots: what it answers, to whom, and when it ends."""

import hashlib
import http.client
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.nodes.snapshot_server import ServerProcess
from recipes.training.recipe.repository import REPOSITORY
from recipes.training.snapshots import client as client_module
from recipes.training.snapshots.client import Client, SnapshotUnavailable, listings
from recipes.training.snapshots.node_memory import NodeMemory, Server

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
    return Client(Server("node1", process.port, process.secret, "127.0.0.1"))


def test_complete_snapshots_are_listed(client: Client, process: ServerProcess) -> None:
    (process.folder / "step-0000015-9f3a22c1.incomplete").mkdir()
    process.write_servers([{"node": "node1", "port": 1, "secret": "", "address": "a"}])
    assert client.listing() == {SNAPSHOT: {FILE: len(CONTENT)}}
    assert NodeMemory(process.folder).servers() == [Server("node1", 1, "", "a")]


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
    dead = Client(Server("node2", 1, "", "127.0.0.1"))
    assert set(listings([client, dead])) == {"node1"}
    assert listings([]) == {}


def test_the_server_deletes_the_snapshots_when_its_agent_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
        "from recipes.nodes.snapshot_server import ServerProcess; "
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
    monkeypatch.setattr(client_module, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(Client, "_open", OrderedDict())
    clients = [
        Client(Server(f"node{n}", process.port, process.secret, "127.0.0.1")) for n in range(8)
    ]
    for _ in range(2):
        for each in clients:
            assert each.part(SNAPSHOT, FILE, 5, 9) == CONTENT[5:9]
    assert list(Client._open)[-3:] == clients[-3:] and len(Client._open) == 3
