"""Save a checkpoint in the background while the steps continue.

The training thread waits only for the copy of this rank's share from the device to the host. A
second thread does the rest. The ranks of a stage assemble logical tensors, and each rank writes,
flushes and hashes its own. When all ranks have agreed that every file is complete, rank 0 writes
the manifest and publishes the checkpoint with one rename.

All communication goes through host memory, on separate groups: a broadcast of the state of the disk
when a save begins; then point-to-point messages within the stage, and two broadcasts and a gather
over a tree of all ranks.
"""

import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from models.errors import FULL_DISK_ERRORS
from models.parallel.process_groups import create_host_groups
from threefold.checkpoint.assembly import Assembly
from threefold.checkpoint.format import Manifest
from threefold.checkpoint.host_memory import host_copy
from threefold.checkpoint.rank_files import Written, united, write_files
from threefold.checkpoint.retention import (
    LACK_OF_ROOM,
    RESERVED_BYTES_AT_THE_END,
    RESERVED_DISK_BYTES,
    lack_of_room,
    retain,
)
from threefold.checkpoint.state import TrainingState
from threefold.config.parallel_dims import Topology
from threefold.config.phases import StagePlan
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import RunFolder, layout_of, versions
from threefold.run_folder.history import (
    checkpoint_name,
    publish,
    published,
    remove_debris,
    step_of,
)
from threefold.run_folder.progress import Progress
from threefold.runtime.processes import RankTree

FULL_DISK_MESSAGES = tuple(map(os.strerror, FULL_DISK_ERRORS))  # in the messages of failed saves
SECONDS_BETWEEN_TRIES = 10.0  # of the last save, while the disk is full
EXCHANGE_TIMEOUT = timedelta(hours=1)  # long, because ranks wait for each other's disks
SECONDS_FOR_SAVE_AFTER_ERROR = 60.0  # before a failed run abandons the save in flight

T = TypeVar("T")


class Counters(NamedTuple):
    """The optimizer's number of updates, and the state of fp16's loss scale."""

    updates: int
    loss_scale: dict[str, Any] | None


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
        step: a step of the stage that the ranks train
        damaged: checkpoints that retention neither deletes nor counts
        parent: the checkpoint of another run at which this one began, for the manifest

    Attributes:
        on_publish: called with the step and the folder of each published checkpoint, on rank 0, by
            the thread that writes it
        on_wait: called with a message when the last save begins to wait for space on the disk, on
            rank 0, by the same thread
        on_pause: called with True before each wait of the last save for space, and with False after
            the wait, on all ranks, by the same thread
        is_asked_to_stop: returns True if a signal asks the run to stop; the last save then no
            longer waits
    """

    def __init__(
        self,
        state: TrainingState,
        folder: RunFolder,
        *,
        recipe: Recipe,
        topology: Topology,
        data: dict[str, Any],
        step: int = 1,
        damaged: Collection[Path] = (),
        parent: dict[str, Any] | None = None,
    ):
        self.state, self.folder, self.recipe, self.damaged = state, folder, recipe, damaged
        self.rank = dist.get_rank()
        self.plan, self.data, self.parent = StagePlan(recipe), data, parent
        self.layout = layout_of(self.plan.at(step).recipe, topology)
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
        self.on_publish: Callable[[int, Path], None] = lambda step, folder: None
        self.on_wait: Callable[[str], None] = lambda message: None
        self.on_pause: Callable[[bool], None] = lambda waits: None
        self.reserve = RESERVED_DISK_BYTES  # of free space, beyond the size of the checkpoint
        self.is_asked_to_stop: Callable[[], bool] = lambda: False
        self._thread: threading.Thread | None = None
        self._is_snapshot = False  # what the thread writes
        self._problem: str | None = None  # of the newest save to the disk
        self._saving = 0  # the step of the newest save to the disk
        self._broken: Exception | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            if self._thread is not None and not self._is_snapshot:
                self._thread.join(SECONDS_FOR_SAVE_AFTER_ERROR)
            return
        self.wait()  # the save in flight reads the staged copies
        self.staged.clear()

    def save(
        self,
        progress: Progress,
        validation_loss: float | None = None,
        *,
        ends_process: bool = False,
    ) -> str | None:
        """Wait for the previous save, then begin to save the current state; collective.

        The save after the last step of the run waits in its thread while the disk is full.

        Args:
            progress: the progress of the run
            validation_loss: mean loss of the validation sets with the current weights, for the
                manifest
            ends_process: True if no step of this process follows; the checkpoint may then fill the
                disk almost completely

        Returns:
            A message, the same on all ranks, if the previous save failed or the disk has no room
            for this one; otherwise None.

        Raises:
            RuntimeError: this rank can no longer reach the other ranks.
        """
        earlier = self.wait() if self._thread else None
        patience = self._patience(progress.step)
        self.reserve = RESERVED_BYTES_AT_THE_END if ends_process else RESERVED_DISK_BYTES
        no_room, _ = (None, False) if patience else self._no_room_on_rank_0()
        self._problem, self._saving = _unsaved(progress.step, no_room), progress.step
        if no_room:
            return "; ".join(filter(None, [earlier, self._problem]))
        write = self._write_patiently if patience else self._write_checkpoint
        self._begin(partial(write, progress, validation_loss), is_snapshot=False)
        return earlier

    def _patience(self, step: int) -> int:
        """Return the seconds for which the save of a step waits for room on a full disk."""
        is_last = step == self.recipe.training.steps
        return self.recipe.checkpoint.room_seconds if is_last else 0

    def begin_snapshot(self, write: Callable[[Counters], str | None]) -> None:
        """Copy the current state from the device, and let the writer's thread write it; collective.

        Args:
            write: writes the staged copies with `write_files`; returns a message on failure
        """
        self.wait()
        self._begin(write, is_snapshot=True)

    @property
    def busy(self) -> bool:
        """True while a save or a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

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

    def remedy(self) -> str:
        """Return the newest checkpoint and how to resume from it, for a run whose save failed."""
        is_full = any(text in (self._problem or "") for text in (*FULL_DISK_MESSAGES, LACK_OF_ROOM))
        rerun = "free space, then rerun the same command" if is_full else "rerun the same command"
        try:
            steps = [
                step_of(path)
                for path in published(self.folder.checkpoints)
                if path not in self.damaged and step_of(path) < self._saving
            ]
        except OSError:
            return rerun
        if not steps:
            return f"no checkpoint exists; {rerun} to start again"
        return f"the newest checkpoint is step {steps[-1]}; {rerun} to resume from it"

    def _no_room_on_rank_0(self) -> tuple[str | None, bool]:
        """Return `_lack_of_room` of rank 0 on all ranks; collective."""
        return self._from_rank_0(self._lack_of_room() if self.rank == 0 else (None, False))

    def _lack_of_room(self) -> tuple[str | None, bool]:
        """Delete the folders of unfinished saves, and check that a checkpoint fits on the disk.

        Returns:
            A message if no checkpoint can be written, and True if that is because the disk is full.
        """
        folder = self.folder.checkpoints
        self.folder.check_lease()  # the folders may belong to a later attempt
        try:
            folder.mkdir(exist_ok=True)  # a run folder that was moved away is not created again
            remove_debris(folder)
            lack = lack_of_room(folder, self.recipe, reserve=self.reserve)
        except OSError as error:
            return f"{folder}: {error.strerror}", error.errno in FULL_DISK_ERRORS
        return lack, lack is not None

    def _begin(self, write: Callable[[Counters], str | None], *, is_snapshot: bool) -> None:
        """Stage the current state, and start the thread that writes it."""
        for staged, flat in zip(self.staged, self.state.tensors(), strict=True):
            for kind, tensor in flat.items():
                staged[kind].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in self.state.weights):
            torch.cuda.current_stream().synchronize()
        counters = Counters(self.state.updates, self.state.loss_scale)

        def work() -> None:
            try:
                problem = write(counters)
            except Exception as error:
                self._broken = error
                return
            if not is_snapshot:
                self._problem = problem

        self._is_snapshot = is_snapshot
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def _write_patiently(
        self, progress: Progress, validation_loss: float | None, counters: Counters
    ) -> str | None:
        """Write and publish the last checkpoint, and try again while the disk is full; collective.

        A request to stop ends the wait. The ranks synchronize after each try, so that none waits
        long for another.

        Returns:
            A message, the same on all ranks, if the checkpoint is not saved.
        """
        seconds = self.recipe.checkpoint.room_seconds
        deadline, told = time.monotonic() + seconds, False
        while True:
            no_room, is_full = self._no_room_on_rank_0()
            problem = no_room or self._try_to_write(progress, validation_loss, counters)
            is_full = is_full or any(text in (problem or "") for text in FULL_DISK_MESSAGES)
            is_waiting = time.monotonic() < deadline and not self.is_asked_to_stop()
            if not self._from_rank_0(is_full and is_waiting):
                return _unsaved(progress.step, problem)
            if self.rank == 0 and not told:
                told = True
                self.on_wait(
                    f"the disk is full; the last checkpoint is saved as soon as there is space "
                    f"(waiting up to {seconds / 60:g} minutes): {problem}"
                )
            self.on_pause(True)
            try:
                time.sleep(SECONDS_BETWEEN_TRIES)
            finally:
                self.on_pause(False)

    def _write_checkpoint(
        self, progress: Progress, validation_loss: float | None, counters: Counters
    ) -> str | None:
        """Write and publish a checkpoint; collective.

        Returns:
            A message, the same on all ranks, if the checkpoint is not saved.
        """
        problem = self._try_to_write(progress, validation_loss, counters)
        return _unsaved(progress.step, problem)

    def _try_to_write(
        self, progress: Progress, validation_loss: float | None, counters: Counters
    ) -> str | None:
        """Write and publish a checkpoint; collective. Return a problem, the same on all ranks."""
        workspace = (
            self.folder.checkpoints / f"{checkpoint_name(progress.step)}.{self.token}.incomplete"
        )
        written = self._write_together(workspace)
        problem = written.problem
        if self.rank == 0 and not problem:
            manifest = self.manifest(progress, counters, written)
            problem = self._publish(workspace, replace(manifest, validation_loss=validation_loss))
        if self.rank == 0 and problem:
            shutil.rmtree(workspace, ignore_errors=True)
        return self._from_rank_0(problem)

    def manifest(self, progress: Progress, counters: Counters, written: Written) -> Manifest:
        """Return the manifest of the state after a step; on rank 0."""
        return Manifest(
            step=progress.step,
            samples=progress.samples,
            tokens=progress.tokens(self.plan),
            read_parts=[list(each) for each in progress.read] or None,
            parent=self.parent,
            updates=counters.updates,
            loss_scale=counters.loss_scale,
            tensors=written.tensors,
            files=written.files,
            recipe=self.recipe.model_dump(mode="json"),
            layout=self.layout,
            data=self.data,
            versions=self.versions,
        )

    def _write_together(self, workspace: Path) -> Written:
        """Write the files of all ranks; collective.

        Returns:
            On rank 0, the files of all ranks. On the other ranks only a message if the workspace
            could not be created.
        """
        problem = None
        if self.rank == 0:
            try:
                workspace.mkdir(parents=True)
            except OSError as error:
                problem = f"{workspace}: {error.strerror}"
        problem = self._from_rank_0(problem)
        if problem:
            return Written(problem=problem)
        return united(self.tree.gather(self.write_files(workspace)))

    def write_files(self, workspace: Path, problem: str | None = None) -> Written:
        """Write this rank's files from the staged copies; collective within the stage.

        Args:
            workspace: where to write them
            problem: a reason not to write, with which this rank only sends to the others
        """
        return write_files(self.assembly, self.staged, workspace, self.rank, problem)

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
        self.on_publish(manifest.step, final)
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


def _unsaved(step: int, problem: str | None) -> str | None:
    return f"step {step} is not saved: {problem}" if problem else None
