"""The files of the checkpoints that convert.py writes.

The layout in the manifest tells which command wrote a checkpoint, so that `--overwrite` replaces
only outputs of the same command. A checkpoint of a run has none of these marks.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from models.errors import UserError
from threefold.checkpoint.format import (
    FileRecord,
    Manifest,
    TensorFileWriter,
    manifest_damage,
    split_by_size,
)
from threefold.convert.files import OutputFiles

MANIFEST = "manifest.json"
AVERAGED_FROM, RESHAPED_FROM = "averaged", "reshaped_from"  # keys of the layout


def recorded_files(folder: Path) -> dict[str, FileRecord | None]:
    """Return the records of the files of a checkpoint that convert.py wrote, from its manifest.

    Raises:
        UserError: the manifest has changed since it was written.
    """
    if damage := manifest_damage(folder):
        raise UserError(f"--overwrite does not replace {folder}: {damage}; use another folder")
    return {MANIFEST: None, "manifest.sha256": None, **Manifest.read(folder).files}


IMPORTED = OutputFiles(MANIFEST, '"layout": {}', recorded_files)
AVERAGED = OutputFiles(MANIFEST, f'"{AVERAGED_FROM}": [', recorded_files)
RESHAPED = OutputFiles(MANIFEST, f'"{RESHAPED_FROM}": ', recorded_files)


def write_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], weight: Callable[[str], Tensor]
) -> tuple[dict[str, FileRecord], dict[str, str]]:
    """Write weights as fp32, one at a time, divided over files of a limited size.

    Args:
        folder: folder to write into
        shapes: name -> shape of each logical weight
        weight: returns the weight with a name, fp32

    Returns:
        The records of the files, and name -> file, for the manifest.
    """
    files: dict[str, FileRecord] = {}
    tensors: dict[str, str] = {}
    for number, names in enumerate(split_by_size(shapes, dtype="F32")):
        file = f"weights-{number:05d}.safetensors"
        own = {name: shapes[name] for name in names}
        with TensorFileWriter(folder / file, own, dtype="F32") as writer:
            for name in names:
                writer.write(name, weight(name).numpy().data)
        files[file] = writer.record
        tensors |= dict.fromkeys(names, file)
    return files, tensors
