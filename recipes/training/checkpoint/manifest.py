"""What a checkpoint is on the disk, and whether it is still what was written.

checkpoints/step-0000100/
  manifest.json                step, samples, recipe, layout, versions; every file, size and SHA-256
  manifest.sha256              of manifest.json
  weights-00000.safetensors    fp32 weights: logical tensors, whatever the layout; one file per rank
  moments-00000.safetensors    Adam's, as exp_avg/NAME and exp_avg_sq/NAME

A folder with such a name is complete: it was written under another one (`.incomplete`) and renamed.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from models.errors import UserError
from recipes.training.run_folder.checkpoint_folders import NAME, step_of
from recipes.training.run_folder.line_file import flush
from recipes.training.run_folder.progress import Progress

FORMAT = 1

Facts = dict[str, Any]  # of a file: "bytes", "sha256"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    step, samples, tokens: what the run had done and read
    updates: the optimizer's steps, fewer than `step` where fp16 skipped some
    loss_scale: of fp16, the scaler's state
    recipe: as it was resolved; of weights from elsewhere, the [model] section alone
    data: fingerprints of corpora and tokenizer
    tensors: name -> file; files: file -> facts
    """

    step: int
    samples: int
    tokens: int
    updates: int
    loss_scale: dict[str, Any] | None
    recipe: dict[str, Any]
    layout: dict[str, Any]
    data: dict[str, Any]
    versions: dict[str, Any]
    tensors: dict[str, str]
    files: dict[str, Facts]
    format: int = FORMAT

    @property
    def progress(self) -> Progress:
        """Where a run goes on from it."""
        return Progress(self.step, self.samples)

    @property
    def has_moments(self) -> bool:
        """Whether it holds an optimizer's state, or weights alone."""
        return any(name.startswith("exp_avg/") for name in self.tensors)

    def missing(self, folder: Path) -> str | None:
        """The first file that is not in a folder with its size; None: they are all there."""
        for name, facts in self.files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != facts["bytes"]:
                return f"{file} has been written and is not there"
        return None

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder, and wait until all of that is on the disk."""
        file = folder / "manifest.json"
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")
        file.with_suffix(".sha256").write_text(sha256(file) + "\n")
        for path in (file, file.with_suffix(".sha256"), folder):
            flush(path)

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """Read the manifest of a checkpoint, which `find_damages` has verified.

        Raises:
            UserError: the file is damaged, or a later version of this code has written it.
        """
        file = checkpoint / "manifest.json"
        try:
            content = dict(json.loads(file.read_text()))
        except (ValueError, RecursionError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}); use another checkpoint") from None
        if content.get("format") != FORMAT:
            raise UserError(
                f"{file}: format = {content.get('format')}, and this version of Threefold reads "
                f"format = {FORMAT}; use the one that wrote it"
            )
        if wrong := {field.name for field in fields(cls)} ^ content.keys():
            raise UserError(
                f"{file}: missing or unknown: {', '.join(sorted(wrong))}; use the version of "
                f"Threefold that wrote it"
            )
        return cls(**content)


def tensor_key(kind: str, name: str) -> str:
    """A tensor's name in a checkpoint's files: weights have their own, moments are prefixed."""
    return name if kind == "weights" else f"{kind}/{name}"


def sha256(file: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_damages(
    checkpoint: Path,
    *,
    share: int = 0,
    shares: int = 1,
    note: Callable[[str], object] = lambda activity: None,
) -> Iterator[str]:
    """Verify a checkpoint's manifest and a share of its files; yield a sentence for each damage.

    Args:
        checkpoint: its folder
        share: 0 .. shares - 1
        shares: number of processes that verify the files together
        note: is told each file before it is read, as a sign of progress

    Raises:
        UserError: a later version of this code has written it.
    """
    manifest, digest = checkpoint / "manifest.json", checkpoint / "manifest.sha256"
    for file in (manifest, digest):
        if not file.is_file():
            yield f"{file} is missing"
            return
    try:
        expected, found = sha256(manifest) + "\n", digest.read_text(errors="replace")
        if found != expected:
            file = digest if _is_damaged_digest(found, expected) else manifest
            yield f"{file} is not what was written (SHA-256)"
            return
        content = Manifest.read(checkpoint)
        if NAME.fullmatch(checkpoint.name) and content.step != step_of(checkpoint):
            yield f"{manifest} is of step {content.step}"
        for name, facts in sorted(content.files.items())[share::shares]:
            note(f"verifying {checkpoint.name}/{name}")
            yield from _file_damages(checkpoint / name, facts)
    except OSError as error:
        yield f"{error.filename} cannot be read ({error.strerror or error})"


def _is_damaged_digest(found: str, expected: str) -> bool:
    """Return True if the digest file is damaged, rather than the file that it describes.

    If the hashed file were damaged, the two digests would be unrelated: on average one character in
    16 would match, and the probability that half of them match is below 10^-18.
    """
    same = sum(here == there for here, there in zip(found, expected, strict=False))
    well_formed = re.fullmatch(r"[0-9a-f]{64}\n", found) is not None
    return not well_formed or same > len(expected) // 2


def _file_damages(file: Path, facts: Facts) -> Iterator[str]:
    if not file.is_file():
        yield f"{file} is missing"
    elif file.stat().st_size != facts["bytes"]:
        yield f"{file} has {file.stat().st_size} bytes instead of {facts['bytes']}"
    elif sha256(file) != facts["sha256"]:
        yield f"{file} is not what was written (SHA-256)"
