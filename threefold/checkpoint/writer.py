"""Save a checkpoint in the background: assembly of logical tensors, files and their publication.

The training thread waits only for the copy of this rank's share from the device to the host. A
second thread does the rest. The ranks of a stage assemble logical tensors, and each rank writes,
flushes and hashes its own. When all ranks have agreed that every file is complete, rank 0 writes
the manifest and publishes the checkpoint with one rename.

All communication goes through host memory, on separate groups: a broadcast of the state of the disk
when a save begins; then point-to-point messages within the stage, and two broadcasts and a gather
over a tree of all ranks.
"""

import hashlib
import math
import mmap
import os
import secrets
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from models.errors import FULL_DISK_ERRORS
from models.parallel.collectives import TensorAxis, create_host_groups
from models.sharding import Sharding, sharding_of
from threefold.checkpoint.format import FileRecord, Manifest, TensorFileWriter, tensor_key
from threefold.checkpoint.retention import (
    LACK_OF_ROOM,
    RESERVED_BYTES_AT_THE_END,
    RESERVED_DISK_BYTES,
    TO_FREE,
    lack_of_room,
    retain,
    room_of_a_start,
)
from threefold.checkpoint.state import KINDS, WEIGHTS, Fragment, TrainingState
from threefold.config.parallel_dims import ParallelDims
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.plan.goodput import duration
from threefold.run_folder.folder import RunFolder, layout_of, versions
from threefold.run_folder.history import (
    Progress,
    checkpoint_name,
    publish,
    published,
    remove_debris,
    step_of,
)
from threefold.runtime.processes import RankTree, gathered

# Assembly of logical tensors from the pieces on the ranks of one stage.
#
# Each rank assembles a share of the tensors, so that all ranks write files at the same time. All
# buffers are in host memory.

Flats = Sequence[Mapping[str, Tensor]]  # TrainingState.tensors: kind -> elements of each flat


@dataclass(frozen=True)
class ParameterPiece:
    """The piece of a parameter that one rank of the stage sends."""

    rank: int  # in the stage's group
    tensor_rank: int
    fragment: Fragment


class Assembly:
    """Plan for assembling logical tensors from the pieces of a stage's ranks; the same every save.

    The constructor communicates within the stage: it connects the ranks that exchange pieces, and
    they send each other the addresses of the pieces.

    Args:
        state: this rank's share of weights and moments
        group: the ranks of this stage, communicating through host memory, which connect on demand
        copy: which copy of its shards this rank holds
        copies: number of copies of each shard (hybrid sharding); they share the sending
    """

    def __init__(
        self,
        state: TrainingState,
        group: dist.ProcessGroup,
        *,
        tensor: TensorAxis,
        copy: int = 0,
        copies: int = 1,
    ):
        self.group, self.tensor = group, tensor
        self.rank = dist.get_rank(group)
        self.shardings: dict[str, Sharding] = {
            name: sharding_of(parameter)
            for name, parameter in state.parameters.items()
            # Another stage holds the original of a replicated (tied) parameter.
            if not getattr(parameter, "ds_pipe_replicated", False)
        }
        sent = {n for number, n in enumerate(self.shardings) if number % copies == copy}
        own = [
            ParameterPiece(self.rank, tensor.rank, fragment)
            for fragment in state.fragments
            if fragment.name in sent
            and (tensor.rank == 0 or not self.shardings[fragment.name].replicated)
        ]
        kinds = {name: state.kinds(name) for name in self.shardings}
        # The parameters of all ranks would be gigabytes on 8,192 ranks. Ranks differ only in their
        # experts, so the first rank of those with equal parameters broadcasts them.
        parameters = self.shardings, kinds
        digest = hashlib.sha256(repr(parameters).encode()).digest()
        digests = gathered(digest, group)
        self.shardings, self.kinds = {}, dict[str, tuple[str, ...]]()
        for first in map(digests.index, dict.fromkeys(digests)):
            of_first = [parameters]
            dist.broadcast_object_list(of_first, group_src=first, group=group)
            self.shardings |= of_first[0][0]
            self.kinds |= of_first[0][1]
        shapes = {name: sharding.shape for name, sharding in self.shardings.items()}
        self.owners = assign_owners(shapes, dist.get_world_size(group))
        self.numbers = {name: number for number, name in enumerate(self.shardings)}
        self.own = own
        self.pieces: dict[str, list[ParameterPiece]] = {
            name: [] for name, owner in self.owners.items() if owner == self.rank
        }
        for piece in self._connect():
            self.pieces[piece.fragment.name].append(piece)

    def _connect(self) -> list[ParameterPiece]:
        """Connect this rank with those that it exchanges pieces with.

        A connection is made when both ranks ask for it, and until then `isend` may block. In a
        save, ranks could therefore deadlock. Here, all ranks make their connections in the same
        order: a random one, in which few connections wait for earlier ones.

        Returns:
            The pieces of the tensors that this rank assembles. Only their owner learns of them:
            under ZeRO-3, each of 8,192 ranks has a piece of every parameter.
        """
        outgoing: dict[int, list[ParameterPiece]] = {}
        for piece in self.own:
            outgoing.setdefault(self.owners[piece.fragment.name], []).append(piece)
        # The owners that each rank sends to, as the bits of a number.
        owners_of = gathered(sum(1 << owner for owner in outgoing), self.group)
        senders = {rank for rank, owners in enumerate(owners_of) if owners >> self.rank & 1}
        pieces = list(outgoing.get(self.rank, ()))
        pairs = [tuple(sorted((self.rank, n))) for n in outgoing.keys() | senders if n != self.rank]
        message = torch.zeros(1)
        # gloo chooses the network interface by the tag, and connects each interface separately.
        interface_count = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        for low, high in sorted(pairs, key=lambda pair: (hash(pair), pair)):
            for sender, owner in ((low, high), (high, low)):  # these messages have tag 0
                if sender == self.rank and owner in outgoing:
                    dist.send_object_list([outgoing[owner]], group=self.group, group_dst=owner)
                elif owner == self.rank and sender in senders:
                    arriving = [list[ParameterPiece]()]
                    dist.recv_object_list(arriving, group=self.group, group_src=sender)
                    pieces += arriving[0]
            for tag in range(1, interface_count):
                if self.rank == low:
                    dist.send(message, group=self.group, group_dst=high, tag=tag)
                else:
                    dist.recv(message, group=self.group, group_src=low, tag=tag)
        return pieces

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the logical tensors that this rank assembles, in order of assembly."""
        return {name: self.shardings[name].shape for name in self.pieces}

    def shapes_of(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return the `shapes` of the tensors that have a kind of state."""
        return {name: shape for name, shape in self.shapes.items() if kind in self.kinds[name]}

    def send(self, flats: Flats) -> list[dist.Work]:
        """Begin to send this rank's pieces of tensors that other ranks assemble."""
        works = [
            dist.isend(
                _elements(flats, kind, piece.fragment),
                group=self.group,
                group_dst=self.owners[piece.fragment.name],
                tag=self._tag(kind, piece.fragment.name),
            )
            for kind in KINDS
            for piece in self.own
            if kind in self.kinds[piece.fragment.name]
            and self.owners[piece.fragment.name] != self.rank
        ]
        return [work for work in works if work is not None]

    def receive(self, kind: str, flats: Flats) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, logical tensor) for the tensors that this rank assembles, one at a time.

        The caller must exhaust the iterators of all kinds, because other ranks wait until their
        messages have arrived.
        """
        for name in self.shapes_of(kind):
            yield name, self._put_together(kind, name, flats)

    def _put_together(self, kind: str, name: str, flats: Flats) -> Tensor:
        sharding = self.shardings[name]
        holders = 1 if sharding.dimension is None else self.tensor.size
        parts = [torch.empty(sharding.local_shape(self.tensor)) for _ in range(holders)]
        receiving = []
        for piece in self.pieces[name]:
            elements = piece.fragment.elements
            part = parts[0 if sharding.dimension is None else piece.tensor_rank]
            destination = part.view(-1)[elements.start : elements.stop]
            if piece.rank == self.rank:
                destination.copy_(_elements(flats, kind, piece.fragment))
                continue
            receiving.append(
                dist.irecv(
                    destination,
                    group=self.group,
                    group_src=piece.rank,
                    tag=self._tag(kind, name),
                )
            )
        for work in receiving:
            if work is not None:
                work.wait()
        return sharding.logical_tensor(parts)

    def _tag(self, kind: str, name: str) -> int:
        """Return the tag of a piece's message, which is unique between two ranks in a save."""
        return KINDS.index(kind) * len(self.numbers) + self.numbers[name]


def _elements(flats: Flats, kind: str, fragment: Fragment) -> Tensor:
    return flats[fragment.flat][kind].narrow(0, fragment.offset, len(fragment.elements))


def assign_owners(shapes: Mapping[str, tuple[int, ...]], owners: int) -> dict[str, int]:
    """Assign each tensor to the owner, 0 .. owners - 1, with the fewest elements so far."""
    load = [0] * owners
    owner_of = {}
    for name, shape in shapes.items():
        owner_of[name] = load.index(min(load))
        load[owner_of[name]] += math.prod(shape)
    return owner_of


# The files that one rank writes: the logical tensors that it assembles.

KINDS_OF_FILE = {"weights": (WEIGHTS,), "moments": KINDS[1:]}  # for each of a rank's files


@dataclass(frozen=True)
class Written:
    """Files that ranks have written, the tensors in them (name -> file), and a problem if any."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


def united(written: Mapping[int, Written]) -> Written:
    """Return the files of all ranks together; the problem names its rank."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, str] = {}
    problem = None
    for rank, own in written.items():
        files |= own.files
        tensors |= own.tensors
        problem = f"rank {rank}: {own.problem}" if own.problem else problem
    return Written(dict(sorted(files.items())), tensors, problem)


def write_files(
    assembly: Assembly, staged: Flats, workspace: Path, rank: int, problem: str | None = None
) -> Written:
    """Assemble this rank's tensors and write them; collective within the stage.

    Args:
        staged: this rank's share of weights and moments, in host memory
        rank: global rank, for the names of the files
        problem: a reason not to write, with which this rank only sends to the others
    """
    sending = assembly.send(staged)
    files: dict[str, FileRecord] = {}
    tensors: dict[str, str] = {}
    for label, kinds in KINDS_OF_FILE.items():
        path = workspace / f"{label}-{rank:05d}.safetensors"
        arriving = (
            (tensor_key(kind, name), tensor)
            for kind in kinds
            for name, tensor in assembly.receive(kind, staged)
        )
        shapes = {
            tensor_key(kind, name): shape
            for kind in kinds
            for name, shape in assembly.shapes_of(kind).items()
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
    return Written(files, tensors, problem)


# Page-locked host memory of exactly the requested size.
#
# torch's allocator of pinned memory rounds every block up to a power of two and keeps it: the
# staged copies of a checkpoint would take up to twice the host memory that they need. Here whole
# pages of ordinary memory are registered with CUDA instead, and copies into them are just as fast.

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all CUDA contexts


def host_copy(tensor: Tensor) -> Tensor:
    """Allocate host memory for a copy of a tensor, page-locked when the tensor is on a GPU.

    The memory is written once, so that the system allocates all pages now and not during the first
    save.
    """
    if tensor.is_cuda:
        return page_locked(tensor.shape, tensor.dtype, torch.cuda.cudart())
    return torch.empty(tensor.shape, dtype=tensor.dtype).zero_()


def page_locked(shape: torch.Size, dtype: torch.dtype, runtime: Any) -> Tensor:
    """Allocate a tensor of zeros whose memory is registered with CUDA for as long as it exists.

    The tensor shares no page with other memory, because CUDA cannot register a page twice.

    Args:
        runtime: `torch.cuda.cudart()`, or a substitute with the same two functions

    Raises:
        RuntimeError: CUDA cannot lock the memory.
    """
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).zero_().view(shape)
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), size, PORTABLE))
    if code:
        raise RuntimeError(
            f"CUDA cannot lock {size / 1e9:.2f} GB of host memory for the copy of a checkpoint "
            f"(cudaHostRegister returned {code}); give the job more host memory"
        )
    release = weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    # At exit the system unlocks the memory by itself, while the call could hang with the device.
    release.atexit = False
    return buffer


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
        step: a step of the phase that the ranks train
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
        dims: ParallelDims,
        data: dict[str, Any],
        step: int = 1,
        damaged: Collection[Path] = (),
        parent: dict[str, Any] | None = None,
    ):
        self.state, self.folder, self.recipe, self.damaged = state, folder, recipe, damaged
        self.rank = dist.get_rank()
        self.phase_plan, self.data, self.parent = PhasePlan(recipe), data, parent
        self.layout = layout_of(self.phase_plan.at(step).recipe, dims)
        # Only rank 0 writes the manifest, so only rank 0 runs git.
        self.versions = versions() if self.rank == 0 else {}
        self.tree = RankTree(EXCHANGE_TIMEOUT)
        coordinates = dims.coordinates(self.rank)
        group = create_host_groups(dims.stages(), EXCHANGE_TIMEOUT, on_demand=True)
        assert group is not None  # every rank belongs to a stage
        copy, copies = dims.copy_of_shards(self.rank)
        self.assembly = Assembly(
            state,
            group,
            tensor=TensorAxis(rank=coordinates.tensor, size=dims.tensor),
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
        self._told = True  # whether that problem has been returned
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
        self.join()
        earlier = None if self._told else self._problem
        is_last = progress.step == self.recipe.training.steps
        patience = self.recipe.checkpoint.room_seconds if is_last else 0
        self.reserve = RESERVED_BYTES_AT_THE_END if ends_process else RESERVED_DISK_BYTES
        no_room, _ = (None, False) if patience else self._no_room_on_rank_0()
        self._problem, self._saving = _unsaved(progress.step, no_room), progress.step
        self._told = bool(no_room)
        if no_room:
            return "; ".join(filter(None, [earlier, self._problem]))
        write = self._write_patiently if patience else self._write_checkpoint
        self._begin(partial(write, progress, validation_loss), is_snapshot=False)
        return earlier

    def begin_snapshot(self, write: Callable[[Counters], str | None]) -> None:
        """Copy the current state from the device, and let the writer's thread write it; collective.

        Args:
            write: writes the staged copies with `write_files`; returns a message on failure
        """
        self.join()
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
        self.join()
        self._told = True
        return self._problem

    def join(self) -> None:
        """Wait for the save or snapshot in flight; a later `save` tells whether a save failed.

        Raises:
            RuntimeError: this rank can no longer reach the other ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._broken:  # if this rank continued, the other ranks would wait for it
            raise RuntimeError("a save has lost contact with the other ranks") from self._broken

    def remedy(self) -> str:
        """Return the newest checkpoint and how to resume from it, for a run whose save failed."""
        is_full = any(text in (self._problem or "") for text in (*FULL_DISK_MESSAGES, LACK_OF_ROOM))
        rerun = "rerun the same command"
        if is_full:
            room = room_of_a_start(self.recipe)
            rerun = f"free space until a start has the {room} that it needs, then {rerun}"
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
                # Without how much to free for this save, which is over.
                return _unsaved(progress.step, problem and problem.partition(TO_FREE)[0])
            if self.rank == 0 and not told:
                told = True
                self.on_wait(
                    f"the disk is full; the last checkpoint is saved as soon as there is space "
                    f"(waiting up to {duration(seconds)}): {problem}"
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
            tokens=progress.tokens(self.phase_plan),
            read_parts=[list(part) for part in progress.left_parts] or None,
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
            problem: a reason not to write, with which this rank only sends to the others
        """
        return write_files(self.assembly, self.staged, workspace, self.rank, problem)

    def _publish(self, workspace: Path, manifest: Manifest) -> str | None:
        """Publish the checkpoint and delete old ones; return a message if publishing fails."""
        folder = self.folder.checkpoints
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
            retain(folder, self.phase_plan, step=manifest.step, damaged=self.damaged)
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
