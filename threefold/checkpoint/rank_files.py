"""The files that one rank writes: the logical tensors that it assembles."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from threefold.checkpoint.assembly import Assembly, Flats
from threefold.checkpoint.format import tensor_key
from threefold.checkpoint.state import KINDS, WEIGHTS
from threefold.checkpoint.tensor_file import FileRecord, TensorFileWriter

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
        assembly: the plan of the stage
        staged: this rank's share of weights and moments, in host memory
        workspace: where to write the files
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
