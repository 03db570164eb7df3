"""Take snapshots: checkpoints in the memory of the nodes, each file on two nodes."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from models.errors import UserError
from threefold.checkpoint.rank_files import Written, united
from threefold.checkpoint.snapshots.names import FP32_BYTES, SnapshotName
from threefold.checkpoint.snapshots.node_memory import NodeMemory
from threefold.checkpoint.snapshots.partners import Partners
from threefold.checkpoint.writer import EXCHANGE_TIMEOUT, CheckpointWriter, Counters
from threefold.run_folder.progress import Progress


class SnapshotWriter:
    """Takes a snapshot every few steps, in the thread of the checkpoint writer.

    After a snapshot that fails, for example because a node has too little memory, no further one is
    taken. The constructor is collective.

    Args:
        writer: the writer of the run's checkpoints
        memory: the snapshots of this node
        every: steps between snapshots
        step: the last completed step
        ranks_per_node: number of ranks on each node
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
        # Files of the size of this rank's own that its node has to hold.
        copies = 1 if dist.get_world_size() == ranks_per_node else 2
        self.files_per_node = copies * ranks_per_node
        self.leads_node = dist.get_rank() % ranks_per_node == 0
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
        self.writer.wait()
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
        lack = self.memory.lack_of_room(self._bytes_per_node()) or None
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

    def _bytes_per_node(self) -> int:
        """Return the size of the files that this rank's node holds of a snapshot."""
        assembly = self.writer.assembly
        elements = sum(
            math.prod(shape) * len(assembly.kinds[name]) for name, shape in assembly.shapes.items()
        )
        return FP32_BYTES * elements * self.files_per_node

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
            turns = len(folder.history().turns)
        except (OSError, UserError) as error:
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
