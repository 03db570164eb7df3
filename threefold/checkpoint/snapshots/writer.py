"""Take snapshots: checkpoints in the memory of the nodes, each file on two nodes."""

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel.collectives import create_host_groups
from threefold.checkpoint.snapshots.names import FP32_BYTES, SnapshotName
from threefold.checkpoint.snapshots.node_memory import NodeMemory
from threefold.checkpoint.writer import (
    EXCHANGE_TIMEOUT,
    CheckpointWriter,
    Counters,
    Written,
    united,
)
from threefold.run_folder.folder import EVENT_KEYS
from threefold.run_folder.history import Progress, current_event, replay
from threefold.run_folder.json_lines import LineFile
from threefold.runtime.processes import gathered

# Copies of a node's files in the memory of a partner node.
#
# Nodes form pairs, as in GEMINI (Wang et al., SOSP 2023, section 4). Of all placements with two
# copies, pairs are the least likely to lose both copies of a file when several nodes fail: two
# failures lose data only if they hit the same pair. Partners are half of the list of nodes apart,
# because neighbours in a list often share a rack or a switch.

CHUNK_BYTES = 64 * 2**20  # of a message


def partner_nodes(nodes: int) -> list[list[int]]:
    """Return the groups of partners: pairs of nodes, and one group of three if `nodes` is odd.

    In a group, each node copies its files to the next one, and the last one to the first. A single
    node has no partner.
    """
    half = max(nodes // 2, 1)
    groups = [[node, node + half] for node in range(nodes // 2)] or [[0]]
    if nodes > 1 and nodes % 2:
        groups[-1].append(nodes - 1)
    return groups


class Partners:
    """The ranks with which this rank exchanges copies; the constructor is collective.

    Args:
        timeout: time limit of each message

    Attributes:
        nodes: the nodes whose files this node holds: itself and the previous partner
    """

    def __init__(self, ranks_per_node: int, timeout: timedelta):
        nodes = dist.get_world_size() // ranks_per_node
        groups = [
            [node * ranks_per_node + local for node in group]
            for group in partner_nodes(nodes)
            for local in range(ranks_per_node)
        ]
        self.group = create_host_groups(groups, timeout)
        self.ranks: Sequence[int] = next(ranks for ranks in groups if dist.get_rank() in ranks)
        own = self.ranks.index(dist.get_rank())
        self.nodes = {rank // ranks_per_node for rank in (self.ranks[own], self.ranks[own - 1])}

    def exchange(self, workspace: Path, files: dict[str, int], problem: str | None) -> str | None:
        """Send this rank's files to the next partner, and write those of the previous one.

        Args:
            workspace: the folder of the files, on this node
            files: this rank's files -> bytes
            problem: a reason not to write, with which this rank receives without keeping

        Returns:
            The problem, or a message if the copies cannot be written.
        """
        size = len(self.ranks)
        if size == 1:
            return problem
        try:
            sources = [_mapped(workspace / name) for name in files]
        except OSError as error:
            sources, files = [], {}
            problem = problem or f"{error.filename or workspace}: {error.strerror}"
        own = self.ranks.index(dist.get_rank())
        arriving = gathered(files, self.group)[(own - 1) % size]
        destinations, problem = _create(workspace, arriving, problem)
        # Chunks of both directions travel at the same time; each side waits before the next one.
        outgoing = [part for source in sources for part in source.split(CHUNK_BYTES)]
        incoming = [part for destination in destinations for part in destination.split(CHUNK_BYTES)]
        for number in range(max(len(outgoing), len(incoming))):
            works = []
            if number < len(outgoing):
                target = (own + 1) % size
                works.append(dist.isend(outgoing[number], group=self.group, group_dst=target))
            if number < len(incoming):
                source = (own - 1) % size
                works.append(dist.irecv(incoming[number], group=self.group, group_src=source))
            for work in works:
                if work is not None:
                    work.wait()
        return problem


def _create(
    workspace: Path, files: dict[str, int], problem: str | None
) -> tuple[list[Tensor], str | None]:
    """Return a tensor for the bytes of each file, mapped to the file unless there is a problem."""
    destinations = []
    for name, size in files.items():
        path = workspace / name
        if problem is None:
            try:
                with path.open("wb") as stream:
                    os.posix_fallocate(stream.fileno(), 0, size)  # a full disk raises an error here
                destinations.append(_mapped(path))
                continue
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        destinations.append(torch.empty(size, dtype=torch.uint8))
    return destinations, problem


def _mapped(path: Path) -> Tensor:
    """Return the bytes of a file, mapped into memory."""
    with path.open("r+b") as stream:
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0), dtype=torch.uint8)


class TurnCounter:
    """Counts the turns of a run (`History.turns`), and reads each event of the file once.

    A turn is counted regardless of the events before it. Therefore only new events are read after
    the first count: parsing thousands of events would stop the training loop, which shares
    Python's lock with the thread of the checkpoint writer.
    """

    def __init__(self, events: Path):
        self._lines = LineFile(events, keys=EVENT_KEYS)
        self._turns = self._bytes = 0  # of the events that have been read

    def count(self) -> int:
        """Return the number of turns in the file.

        Raises:
            OSError: the file cannot be read.
        """
        with self._lines.path.open("rb") as stream:
            stream.seek(self._bytes)
            content = stream.read()
        complete = content[: content.rfind(b"\n") + 1]  # another thread may be writing a line
        self._turns += len(replay(map(current_event, self._lines.parse(complete))).turns)
        self._bytes += len(complete)
        return self._turns


class SnapshotWriter:
    """Takes a snapshot every few steps, in the thread of the checkpoint writer.

    After a snapshot that fails, for example because a node has too little memory, no further one is
    taken. The constructor is collective.

    Args:
        every: steps between snapshots
        step: the last completed step

    Attributes:
        bytes_of_node: size of the tensors of a snapshot that this node holds
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        memory: NodeMemory,
        *,
        every: int,
        step: int,
        ranks_per_node: int,
    ):
        self.writer, self.memory, self.every = writer, memory, every
        # Step of the newest snapshot or save that was begun. The first snapshot is taken after the
        # first step, because lost nodes may have left a single copy of the files just read.
        self.last = step + 1 - every
        self.partners = Partners(ranks_per_node, EXCHANGE_TIMEOUT)
        assembly, tree = writer.assembly, writer.tree
        elements = sum(
            math.prod(shape) * len(assembly.kinds[name]) for name, shape in assembly.shapes.items()
        )
        elements_of_ranks = tree.broadcast(tree.gather(elements))
        self.bytes_of_node = FP32_BYTES * sum(
            elements
            for rank, elements in elements_of_ranks.items()
            if rank // ranks_per_node in self.partners.nodes
        )
        self.leads_node = dist.get_rank() % ranks_per_node == 0
        if self.leads_node:  # an earlier attempt may not have completed its last snapshot
            memory.clean(keep="", incomplete_only=True)
        self.turns = TurnCounter(writer.folder.events)
        self.problem = ""  # of a snapshot that has failed; the same on all ranks
        self._told = False

    def is_due(self, step: int) -> bool:
        """Return True if a snapshot should be taken after a step; the same on all ranks."""
        return step - self.last >= self.every

    def take(self, progress: Progress) -> str:
        """Begin to take a snapshot; collective.

        Returns:
            A message if the previous snapshot has failed, once.
        """
        self.last = progress.step
        self.writer.join()
        if not self.problem:
            self.writer.begin_snapshot(partial(self._write, progress))
        elif not self._told:
            self._told = True
            return self.problem
        return ""

    def _write(self, progress: Progress, counters: Counters) -> str | None:
        """Write the snapshot of a step, in the writer's thread; collective."""
        tree = self.writer.tree
        workspace = self.memory.workspace(progress.step, self.writer.token)
        # Every rank checks the memory before any rank takes some of it.
        lack = self.memory.lack_of_room(self.bytes_of_node) or None
        problem = tree.broadcast(united(tree.gather(Written(problem=lack))).problem)
        if problem:
            written = Written(problem=problem)
        else:
            written = united(tree.gather(self._write_files(workspace)))
        rank_0: tuple[str, str, str | None] = ("", "", written.problem)
        if tree.rank == 0 and not written.problem:
            rank_0 = self._describe(progress, counters, written)
        name, manifest, problem = tree.broadcast(rank_0)
        if not problem:
            own = self._publish(workspace, name, manifest) if self.leads_node else None
            problem = tree.broadcast(united(tree.gather(Written(problem=own))).problem)
        if problem:
            self.problem = (
                f"the snapshot of step {progress.step} failed, so no more are taken: {problem}"
            )
        if self.leads_node:
            # All nodes have published this snapshot, so that the earlier one is not needed.
            self.memory.clean(keep="" if problem else name, incomplete_only=bool(problem))
        return None

    def _write_files(self, workspace: Path) -> Written:
        """Write this rank's files, and the copies of another node's; collective."""
        problem: str | None = None
        try:
            self.memory.create(workspace)
        except OSError as error:
            problem = f"{workspace}: {error.strerror}"
        written = self.writer.write_files(workspace, problem)
        sizes = {name: record["bytes"] for name, record in written.files.items()}
        return replace(written, problem=self.partners.exchange(workspace, sizes, written.problem))

    def _describe(
        self, progress: Progress, counters: Counters, written: Written
    ) -> tuple[str, str, str | None]:
        """Return the name of a snapshot, its manifest, and a message on failure; on rank 0."""
        folder = self.writer.folder
        try:
            folder.check_lease()
            # As for a checkpoint on the disk, the metrics and all earlier events must not be lost.
            folder.flush()
            turns = self.turns.count()
        except OSError as error:
            return "", "", str(error)
        name = SnapshotName(progress.step, turns, self.writer.token)
        return str(name), self.writer.manifest(progress, counters, written).text(), None

    def _publish(self, workspace: Path, name: str, manifest: str) -> str | None:
        """Publish the snapshot on this node; return a message if that fails."""
        try:
            self.memory.publish(workspace, name, manifest)
        except OSError as error:
            return f"{error.filename or workspace}: {error.strerror}"
        return None
