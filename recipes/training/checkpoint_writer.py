"""Save a checkpoint beside the running steps.

The training thread waits for one thing: the copy of this rank's share out of the device. A thread
does the rest. The ranks of a stage put logical tensors together; each writes, flushes and hashes
its own; all agree that everything is there; rank 0 writes the manifest and makes the checkpoint
exist by one rename.

Communicates, on groups of its own and through the host's memory: a broadcast of the disk's state
when a save begins; after that point to point in the stage, and three times in the world.
"""

import platform
import secrets
import shutil
import threading
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from models.cost import parameter_count
from recipes.training.assembly import Assembly
from recipes.training.manifest import (
    Facts,
    Manifest,
    checkpoint_name,
    flush,
    publish,
    remove_debris,
    retain,
    tensor_key,
)
from recipes.training.progress import Progress
from recipes.training.recipe import Recipe
from recipes.training.run_folder import RunFolder, code_version
from recipes.training.tensor_file import TensorFileWriter
from recipes.training.topology import Topology
from recipes.training.training_state import KINDS, MOMENTS, WEIGHTS, TrainingState

FILES = {"weights": (WEIGHTS,), "moments": MOMENTS}  # of each rank, and the kinds in them
LOST_RANK = "another rank has gone"
SPACE_BESIDE = 64 * 2**20  # bytes: manifest, metrics, logs
PATIENCE = timedelta(hours=1)  # with a disk, before the ranks give each other up

T = TypeVar("T")


class CheckpointWriter:
    """Saves a run, one checkpoint at a time; all ranks build it and make the same calls.

    data: fingerprints of corpora and tokenizer, for the manifest
    """

    def __init__(
        self,
        state: TrainingState,
        folder: RunFolder,
        *,
        recipe: Recipe,
        topology: Topology,
        data: dict[str, Any],
    ):
        self.state, self.folder = state, folder
        self.recipe, self.topology, self.data = recipe, topology, data
        self.rank = dist.get_rank()
        self.world = dist.new_group(backend="gloo", timeout=PATIENCE)
        stages = [
            dist.new_group(ranks, backend="gloo", timeout=PATIENCE)
            for ranks in topology.stage_groups()
        ]
        place = topology.coordinates(self.rank)
        self.assembly = Assembly(
            state,
            stages[place.pipeline],
            tensor_rank=place.tensor,
            tensor_size=topology.tensor,
        )
        # Ranks that survived an earlier run's death may still be writing into theirs.
        self.token = self._from_rank_0(secrets.token_hex(4))
        self.staged = [
            {kind: _host_buffer(tensor) for kind, tensor in flat.items()}
            for flat in state.tensors()
        ]
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    def save(self, progress: Progress) -> str | None:
        """Begin to save the run as it is now; collective.

        Returns what went wrong, the same on all ranks: with the save before, which is waited for,
        or with the disk's room for this one.
        """
        earlier = self.wait() if self._thread else None
        no_room = self._from_rank_0(self._lack_of_room())
        self._problem = f"step {progress.step} is not saved: {no_room}" if no_room else None
        if no_room:
            return "; ".join(filter(None, [earlier, self._problem]))
        self._copy_from_device()
        arguments = (progress, self.state.updates, self.state.loss_scale)
        self._thread = threading.Thread(target=self._work, args=arguments, daemon=True)
        self._thread.start()
        return earlier

    def wait(self) -> str | None:
        """Wait for the save in flight; what went wrong with the newest, the same on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._problem

    def _lack_of_room(self) -> str | None:
        needed = 4 * len(KINDS) * parameter_count(self.recipe.model) + SPACE_BESIDE
        folder = self.folder.checkpoints
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if free >= needed:
            return None
        return (
            f"{folder} has {free / 1e9:.3f} GB free and a checkpoint needs {needed / 1e9:.3f}; "
            f"make room, or keep fewer with checkpoint.keep"
        )

    def _copy_from_device(self) -> None:
        for staged, flat in zip(self.staged, self.state.tensors(), strict=True):
            for kind, tensor in flat.items():
                staged[kind].copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _work(self, progress: Progress, updates: int, loss_scale: dict[str, Any] | None) -> None:
        """The thread: write and publish."""
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
                    recipe=self.recipe.model_dump(mode="json"),
                    layout=layout_of(self.recipe, self.topology),
                    data=self.data,
                    versions=versions(),
                    tensors=tensors,
                    files=files,
                )
                problem = self._publish(workspace, manifest)
            if self.rank == 0 and problem:
                shutil.rmtree(workspace, ignore_errors=True)
            problem = self._from_rank_0(problem)
        except RuntimeError as error:  # and the launcher will end this one too
            problem = f"{LOST_RANK} ({str(error).splitlines()[0]})"
        except Exception as error:  # the thread must not end without a word
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self._problem = f"step {progress.step} is not saved: {problem}"

    def _write_together(
        self, workspace: Path
    ) -> tuple[dict[str, Facts], dict[str, str], str | None]:
        """All ranks' files, the tensors in them, and what went wrong on any rank."""
        problem = None
        if self.rank == 0:
            try:
                remove_debris(self.folder.checkpoints)
                workspace.mkdir(parents=True)
            except OSError as error:
                problem = f"{workspace}: {error.strerror}"
        problem = self._from_rank_0(problem)
        if problem:
            return {}, {}, problem
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self._write_own(workspace), group=self.world)
        files, tensors = {}, {}
        for rank, (own_files, own_tensors, own_problem) in enumerate(everyones):
            files |= own_files
            tensors |= own_tensors
            if own_problem:
                problem = f"rank {rank}: {own_problem}"
        return dict(sorted(files.items())), tensors, problem

    def _write_own(self, workspace: Path) -> tuple[dict[str, Facts], dict[str, str], str | None]:
        """This rank's files, the tensors in them, and what went wrong."""
        sending = self.assembly.send(self.staged)
        files: dict[str, Facts] = {}
        tensors: dict[str, str] = {}
        problem = None
        for label, kinds in FILES.items():
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
                    workspace.mkdir(exist_ok=True)  # seen late from another node
                    with TensorFileWriter(path, shapes, dtype="F32") as writer:
                        for key, tensor in arriving:
                            writer.write(key, memoryview(tensor.numpy()))
                    files[path.name] = writer.facts
                    tensors |= dict.fromkeys(shapes, path.name)
            except OSError as error:
                problem = f"{path}: {error.strerror}"
            except MemoryError:
                problem = f"{path}: no memory to put a tensor together"
            for _ in arriving:  # the others wait until what they send is taken
                pass
        for work in sending:
            work.wait()
        return files, tensors, problem

    def _publish(self, workspace: Path, manifest: Manifest) -> str | None:
        """Make the checkpoint exist, and let old ones go; returns what went wrong."""
        final = self.folder.checkpoints / checkpoint_name(manifest.step)
        try:
            if self.folder.metrics.exists():
                flush(self.folder.metrics)  # no later than the steps that they tell of
            manifest.write(workspace)
            publish(workspace, final)
            self.folder.event("save", manifest.step, checkpoint=str(final))
            retain(self.folder.checkpoints, self.recipe.checkpoint, manifest.step)
        except OSError as error:
            return f"{error.filename or final}: {error.strerror}"
        return None

    def _from_rank_0(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.world)
        return values[0]


def _host_buffer(tensor: Tensor) -> Tensor:
    """Room for a copy in the host's memory; written to once, so that it is there in fact."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).zero_()


def layout_of(recipe: Recipe, topology: Topology) -> dict[str, Any]:
    """How the run was spread."""
    axes = {"pipeline": topology.pipeline, "data": topology.data, "tensor": topology.tensor}
    return axes | {"schedule": recipe.layout.schedule, "deepspeed": recipe.deepspeed}


def versions() -> dict[str, Any]:
    """What computed the numbers."""
    libraries = {name: version(name) for name in ("torch", "deepspeed", "numpy")}
    return {"threefold": code_version(), "python": platform.python_version()} | libraries
