"""Find the newest snapshot that is complete and undamaged, and read its tensors in any layout."""

import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from threefold.checkpoint.compatibility import check_same_run
from threefold.checkpoint.format import Manifest, tensor_key
from threefold.checkpoint.resume import Note, ResumePoint, no_note
from threefold.checkpoint.snapshots.names import FP32_BYTES, SnapshotName
from threefold.checkpoint.snapshots.node_memory import (
    Client,
    NodeMemory,
    ServerAddress,
    SnapshotUnavailable,
    listings,
)
from threefold.checkpoint.state import CheckpointReader, DamagedCheckpoint, newest_undamaged
from threefold.config.recipe import Recipe
from threefold.run_folder.history import History
from threefold.runtime.processes import gathered

# Read the tensors of a snapshot, in any layout, from the memory of the nodes.

LENGTH_BYTES = 8  # of the header's length, at the beginning of a safetensors file


@dataclass(frozen=True)
class SnapshotReader(CheckpointReader):
    """The logical tensors of a snapshot whose files have been verified, in fp32.

    `path` names the snapshot in messages.

    Attributes:
        holders: file name -> the node that serves it
    """

    snapshot: str = ""
    holders: Mapping[str, Client] = field(default_factory=dict)
    _headers: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)

    @property
    @override
    def in_memory(self) -> bool:
        return True

    @override
    def rows(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        key, file = tensor_key(kind, name), self.file_of(kind, name)
        first, header = self._header(file)
        shape = header[key]["shape"]
        begin, end = header[key]["data_offsets"]
        start, stop, _ = slice(start, stop).indices(shape[0])
        row = math.prod(shape[1:]) * FP32_BYTES
        assert end - begin == shape[0] * row, (key, header[key])
        begin += first
        if stop <= start or not row:
            return torch.empty(0, *shape[1:])
        content = self._part(file, begin + start * row, begin + stop * row)
        return torch.frombuffer(content, dtype=torch.float32).view(-1, *shape[1:])

    @override
    def tensor(self, kind: str, name: str) -> Tensor:
        shape = self._header(self.file_of(kind, name))[1][tensor_key(kind, name)]["shape"]
        return self.rows(kind, name, 0, shape[0])

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """Return the position of the first tensor in a file, and the file's header."""
        if file not in self._headers:
            length = int.from_bytes(self._part(file, 0, LENGTH_BYTES), "little")
            text = self._part(file, LENGTH_BYTES, LENGTH_BYTES + length)
            self._headers[file] = LENGTH_BYTES + length, json.loads(text)
        return self._headers[file]

    def _part(self, file: str, start: int, stop: int) -> bytearray:
        return self.holders[file].part(self.snapshot, file, start, stop)


PLACE_IN_MESSAGES = Path("memory of the nodes")  # instead of a run's folder of checkpoints
MANIFEST, DIGEST = "manifest.json", "manifest.sha256"


@dataclass(frozen=True)
class Candidate:
    """A snapshot of which every file is on a node that answers.

    Attributes:
        manifest: the bytes of its manifest, verified
        holders: file -> the nodes that have it
    """

    name: str
    manifest: bytes
    holders: Mapping[str, Sequence[str]]


def find_snapshot(
    memory: NodeMemory,
    history: History,
    at_least: int,
    *,
    recipe: Recipe,
    data: dict[str, Any],
    note: Note = no_note,
) -> ResumePoint:
    """Find the newest snapshot that can be loaded; collective, and the same on all ranks.

    Args:
        history: the history of the run; snapshots of abandoned steps are not used
        at_least: step of the newest checkpoint on the disk; older snapshots are not used

    Returns:
        Its `checkpoint` is None if no snapshot can be used; `skipped` names the
        snapshots of which a file has no undamaged copy.

    Raises:
        UserError: the snapshot belongs to another experiment.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        servers = memory.servers()
        found[0] = servers, list(_candidates(servers, history, at_least))
    dist.broadcast_object_list(found)
    servers, candidates = found[0]
    clients = {server.node: Client(server) for server in servers}

    def verified(candidate: Candidate) -> SnapshotReader:
        path = PLACE_IN_MESSAGES / candidate.name
        manifest = Manifest.parse(candidate.manifest, path)
        check_same_run(path, manifest, recipe, data)
        holders, damages = _verify(candidate, manifest, clients, note)
        if holders is None:
            raise DamagedCheckpoint(path, "; ".join(damages))
        for damage in damages if dist.get_rank() == 0 else ():
            print(f"warning: {damage}; the other copy is used", file=sys.stderr)
        return SnapshotReader(path, manifest, candidate.name, holders)

    skipped: dict[Path, str] = {}
    newest = next(newest_undamaged(candidates, verified, skipped), None)
    return ResumePoint(newest, skipped=skipped)


def _candidates(
    servers: Sequence[ServerAddress], history: History, at_least: int
) -> Iterator[Candidate]:
    """Yield the snapshots of the current branch that are complete, newest first."""
    clients = {server.node: Client(server) for server in servers}
    by_node = listings(list(clients.values()))
    names = {
        name
        for listing in by_node.values()
        for text in listing
        if (name := SnapshotName.parse(text))
    }
    for name in sorted(names, reverse=True):
        if name.step < at_least or not history.reaches(name.step, turns=name.turns):
            continue
        nodes = [node for node, listing in by_node.items() if str(name) in listing]
        manifest = _manifest(str(name), [clients[node] for node in nodes])
        if manifest is None:
            continue
        holders = complete(json.loads(manifest)["files"], {n: by_node[n][str(name)] for n in nodes})
        if holders is not None:
            yield Candidate(str(name), manifest, holders)


def _manifest(name: str, clients: Sequence[Client]) -> bytes | None:
    """Return the manifest of a snapshot from a node on which it is undamaged."""
    for client in clients:
        try:
            content, digest = client.content(name, MANIFEST), client.content(name, DIGEST)
        except SnapshotUnavailable:
            continue
        if hashlib.sha256(content).hexdigest() == digest.decode(errors="replace").strip():
            return content
    return None


def complete(
    files: Mapping[str, Any], sizes: Mapping[str, Mapping[str, int]]
) -> dict[str, list[str]] | None:
    """Return the nodes that hold each file of a snapshot.

    Args:
        files: file -> its record in the manifest
        sizes: node -> file -> bytes

    Returns:
        None if no node holds one of the files, or only with another size.
    """
    holders: dict[str, list[str]] = defaultdict(list)
    for node, found in sizes.items():
        for file, size in found.items():
            if file in files and size == files[file]["bytes"]:
                holders[file].append(node)
    return dict(holders) if holders.keys() == files.keys() else None


def _verify(
    candidate: Candidate, manifest: Manifest, clients: Mapping[str, Client], note: Note
) -> tuple[dict[str, Client] | None, list[str]]:
    """Verify the files of a snapshot, each rank a share of them; collective.

    Returns:
        File -> the server of an undamaged copy, or None if a file has none; and a message for each
        damaged copy.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own: dict[str, str] = {}
    damages: list[str] = []
    for number, (file, record) in enumerate(manifest.files.items()):
        if number % ranks != rank:
            continue
        note(f"verifying {candidate.name}/{file}")
        nodes = list(candidate.holders[file])
        for node in nodes[number % len(nodes) :] + nodes[: number % len(nodes)]:
            damage = _damage(clients[node], candidate.name, file, record)
            if damage is None:
                own[file] = node
                break
            damages.append(damage)
    everyones = gathered((own, damages))
    nodes_of = {file: node for files, _ in everyones for file, node in files.items()}
    found = [damage for _, own in everyones for damage in own]
    if nodes_of.keys() != manifest.files.keys():
        return None, found
    return {file: clients[node] for file, node in nodes_of.items()}, found


def _damage(client: Client, snapshot: str, file: str, record: Mapping[str, Any]) -> str | None:
    """Return a message if a node's copy of a file differs from its record; otherwise None."""
    try:
        if client.sha256(snapshot, file, record["bytes"]) == record["sha256"]:
            return None
    except SnapshotUnavailable as error:
        return str(error)
    return f"{client.server.node}: {file} has another SHA-256 than when it was written"
