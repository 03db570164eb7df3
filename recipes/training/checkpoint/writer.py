"""Save a checkpoint in the background while the steps continue.

The training thread waits only for the copy of this rank's share from the device to the host. A
second thread does the rest. The ranks of a stage assemble logical tensors, and each rank writes,
flushes and hashes its own. When all ranks have agreed that every file is complete, rank 0 writes
the manifest and publishes the checkpoint with one rename.

All communication goes through host memory, on separate groups: a broadcast of the state of the disk
when a save begins; then point-to-point messages within the stage, and two broadcasts and a gather
over a tree of all ranks.
"""

import secrets
import shutil
import sys
import threading
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from models.cost import parameter_count
from models.parallel.process_groups import create_host_groups
from recipes.training.checkpoint.assembly import Assembly
from recipes.training.checkpoint.manifest import FileRecord, Manifest, tensor_key
from recipes.training.checkpoint.state import KINDS, MOMENTS, WEIGHTS, TrainingState
from recipes.training.checkpoint.tensor_file import TensorFileWriter
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.checkpoint_folders import (
    checkpoint_name,
    publish,
    remove_debris,
    retain,
)
from recipes.training.run_folder.folder import RunFolder
from recipes.training.run_folder.progress import Progress
from recipes.training.run_folder.provenance import layout_of, versions
from recipes.training.runtime.host_memory import host_copy
from recipes.training.runtime.rank_tree import RankTree

KINDS_OF_FILE = {"weights": (WEIGHTS,), "moments": MOMENTS}  # for each of a rank's files
RESERVED_DISK_BYTES = 64 * 2**20  # for the manifest, metrics and logs
EXCHANGE_TIMEOUT = timedelta(hours=1)  # long, because ranks wait for each other's disks
SECONDS_FOR_SAVE_AFTER_ERROR = 60.0  # before a failed run abandons the save in flight

T = TypeVar("T")


class CheckpointWriter:
    """Writer of a run's checkpoints, one at a time; all ranks must make the same calls.

    Use it as a context manager: on exit it waits for the save in flight, but after an error only
    for a limited time.

    Args:
        state: this rank's share of weights and moments
        folder: the run folder
        recipe: the recipe of the run
        topology: the layout of the ranks
        data: fingerprints of corpora and tokenizer, for the manifest
        damaged: checkpoints that retention neither deletes nor counts
    """

    def __init__(
        self,
        state: TrainingState,
        folder: RunFolder,
        *,
        recipe: Recipe,
        topology: Topology,
        data: dict[str, Any],
        damaged: Collection[Path] = (),
    ):
        self.state, self.folder, self.recipe, self.damaged = state, folder, recipe, damaged
        self.rank = dist.get_rank()
        self.layout, self.data = layout_of(recipe, topology), data
        # Only rank 0 writes the manifest, so only rank 0 runs git.
        self.versions = versions() if self.rank == 0 else {}
        self.tree = RankTree(EXCHANGE_TIMEOUT)
        coordinates = topology.coordinates(self.rank)
        group = create_host_groups(topology.stage_groups(), EXCHANGE_TIMEOUT)
        assert group is not None  # every rank belongs to a stage
        copy, copies = topology.copy_of_shards(self.rank)
        self.assembly = Assembly(
            state,
            group,
            tensor_rank=coordinates.tensor,
            tensor_size=topology.tensor,
            copy=copy,
            copies=copies,
        )
        # Ranks that survived the end of an earlier run may still be writing into its workspaces.
        # The workspaces of this run therefore have other names.
        self.token = self._from_rank_0(secrets.token_hex(4))
        self.staged = [
            {kind: host_copy(tensor) for kind, tensor in flat.items()} for flat in state.tensors()
        ]
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._broken: Exception | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            if self._thread is not None:
                self._thread.join(SECONDS_FOR_SAVE_AFTER_ERROR)
            return
        self.wait()  # the save in flight reads the staged copies
        self.staged.clear()

    def save(self, progress: Progress) -> str | None:
        """Wait for the previous save, then begin to save the current state; collective.

        Returns:
            A message, the same on all ranks, if the previous save failed or the disk has no room
            for this one; otherwise None.

        Raises:
            RuntimeError: this rank can no longer reach the other ranks.
        """
        earlier = self.wait() if self._thread else None
        no_room = self._from_rank_0(self._lack_of_room() if self.rank == 0 else None)
        self._problem = f"step {progress.step} is not saved: {no_room}" if no_room else None
        if no_room:
            return "; ".join(filter(None, [earlier, self._problem]))
        self._copy_from_device()
        arguments = (progress, self.state.updates, self.state.loss_scale)
        self._thread = threading.Thread(target=self._work, args=arguments, daemon=True)
        self._thread.start()
        return earlier

    def wait(self) -> str | None:
        """Wait for the save in flight; return a message if the newest save failed.

        The message is the same on all ranks.

        Raises:
            RuntimeError: this rank can no longer reach the other ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._broken:  # if this rank continued, the other ranks would wait for it
            raise RuntimeError("a save has lost contact with the other ranks") from self._broken
        return self._problem

    def _lack_of_room(self) -> str | None:
        needed = 4 * len(KINDS) * parameter_count(self.recipe.model) + RESERVED_DISK_BYTES
        folder = self.folder.checkpoints
        try:
            folder.mkdir(exist_ok=True)  # a run folder that was moved away is not created again
            free = shutil.disk_usage(folder).free
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if free >= needed:
            return None
        return (
            f"{folder} has {free / 1e9:.3f} GB free and a checkpoint needs {needed / 1e9:.3f} GB; "
            f"make room, or keep fewer checkpoints with checkpoint.keep"
        )

    def _copy_from_device(self) -> None:
        for staged, flat in zip(self.staged, self.state.tensors(), strict=True):
            for kind, tensor in flat.items():
                staged[kind].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in self.state.weights):
            torch.cuda.current_stream().synchronize()

    def _work(self, progress: Progress, updates: int, loss_scale: dict[str, Any] | None) -> None:
        """Write and publish a checkpoint, in the writer's thread."""
        name = checkpoint_name(progress.step)
        workspace = self.folder.checkpoints / f"{name}.{self.token}.incomplete"
        try:
            files, tensors, problem = self._write_together(workspace)
            if self.rank == 0 and not problem:
                manifest = Manifest(
                    step=progress.step,
                    samples=progress.samples,
                    tokens=progress.samples * self.recipe.model.sequence_length,
                    updates=updates,
                    loss_scale=loss_scale,
                    tensors=tensors,
                    files=files,
                    recipe=self.recipe.model_dump(mode="json"),
                    layout=self.layout,
                    data=self.data,
                    versions=self.versions,
                )
                problem = self._publish(workspace, manifest)
            if self.rank == 0 and problem:
                shutil.rmtree(workspace, ignore_errors=True)
            problem = self._from_rank_0(problem)
        except Exception as error:
            self._broken = error
            return
        if problem:
            self._problem = f"step {progress.step} is not saved: {problem}"

    def _write_together(
        self, workspace: Path
    ) -> tuple[dict[str, FileRecord], dict[str, str], str | None]:
        """Write the files of all ranks; collective.

        Returns:
            On rank 0, the files of all ranks, the tensors in them, and a message if any rank
            failed. On the other ranks only a message if the workspace could not be created.
        """
        problem = None
        if self.rank == 0:
            self.folder.check_lease()  # the workspaces may belong to a later attempt
            try:
                remove_debris(self.folder.checkpoints)
                workspace.mkdir(parents=True)
            except OSError as error:
                problem = f"{workspace}: {error.strerror}"
        problem = self._from_rank_0(problem)
        if problem:
            return {}, {}, problem
        files: dict[str, FileRecord] = {}
        tensors: dict[str, str] = {}
        everyones = self.tree.gather(self._write_own(workspace))
        for rank, (own_files, own_tensors, own_problem) in everyones.items():
            files |= own_files
            tensors |= own_tensors
            if own_problem:
                problem = f"rank {rank}: {own_problem}"
        return dict(sorted(files.items())), tensors, problem

    def _write_own(
        self, workspace: Path
    ) -> tuple[dict[str, FileRecord], dict[str, str], str | None]:
        """Write this rank's files; return their records, tensors, and a message on failure."""
        sending = self.assembly.send(self.staged)
        files: dict[str, FileRecord] = {}
        tensors: dict[str, str] = {}
        problem = None
        for label, kinds in KINDS_OF_FILE.items():
            path = workspace / f"{label}-{self.rank:05d}.safetensors"
            arriving = (
                (tensor_key(kind, name), tensor)
                for kind in kinds
                for name, tensor in self.assembly.receive(kind, self.staged)
            )
            shapes = {
                tensor_key(kind, name): shape
                for kind in kinds
                for name, shape in self.assembly.shapes.items()
            }
            try:
                if shapes and not problem:
                    # This node may not see the folder yet that rank 0 has created.
                    workspace.mkdir(parents=True, exist_ok=True)
                    with TensorFileWriter(path, shapes, dtype="F32") as writer:
                        for key, tensor in arriving:
                            writer.write(key, tensor.numpy().data)
                    files[path.name] = writer.record
                    tensors |= dict.fromkeys(shapes, path.name)
            except OSError as error:
                problem = f"{path}: {error.strerror or error}"
            for _ in arriving:  # the senders wait until their messages are received
                pass
        for work in sending:
            work.wait()
        return files, tensors, problem

    def _publish(self, workspace: Path, manifest: Manifest) -> str | None:
        """Publish the checkpoint and delete old ones; return a message if publishing fails."""
        folder, settings = self.folder.checkpoints, self.recipe.checkpoint
        final = folder / checkpoint_name(manifest.step)
        try:
            unseen = manifest.missing(workspace)
            if unseen:
                return f"{unseen}; use a --run-dir on storage that all nodes share"
            # The metrics of the saved steps must not be lost. All earlier events must be on the
            # disk before the checkpoint, because their order decides which ones apply to it.
            self.folder.flush()
            manifest.write(workspace)
            self.folder.check_lease()
            publish(workspace, final)
        except OSError as error:
            return f"{error.filename or final}: {error.strerror or error}"
        self.folder.event("save", manifest.step, checkpoint=str(final))
        try:
            retain(folder, settings, step=manifest.step, damaged=self.damaged)
        except OSError as error:
            print(
                f"{error.filename}: {error.strerror}; old checkpoints are not deleted",
                file=sys.stderr,
            )
        return None

    def _from_rank_0(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        return self.tree.broadcast(value)
