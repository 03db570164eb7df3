"""The files of a checkpoint: safetensors, written tensor by tensor, and a verified manifest.

checkpoints/step-0000100/
  manifest.json                step, samples, recipe, layout, versions; size, SHA-256 of each file
  manifest.sha256              the SHA-256 of manifest.json
  weights-00000.safetensors    fp32 weights: logical tensors, the same in every layout
  moments-00000.safetensors    AdamW's moments, as exp_avg/NAME and exp_avg_sq/NAME; Muon's
                               momentum, as momentum_buffer/NAME; and the average of the weights,
                               as average/NAME

A folder with such a name is complete, because it is written under a name that ends with
`.incomplete` and then renamed.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from models.config import ModelConfig
from models.errors import UserError, reason_of
from threefold.config.optimization import Batch
from threefold.config.phases import with_current_names
from threefold.config.sections import Phase, with_current_keys
from threefold.pipeline.balance import packed
from threefold.run_folder.history import NAME, Progress, left_parts_from, step_of
from threefold.run_folder.json_lines import flush

# safetensors files, written tensor by tensor, so that a file never has to fit in memory.
#
# | bytes | content                                                                    |
# |-------|----------------------------------------------------------------------------|
# | 8     | uint64, little-endian: length of the header                                |
# | n     | the header, JSON: {name: {dtype, shape, data_offsets}}, padded with spaces |
# |       | the tensors, contiguous and little-endian, in the header's order           |
#
# The safetensors library (https://github.com/huggingface/safetensors), which reads the files, can
# only write files whose tensors are all in memory.

BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # per element
ALIGNMENT = 8  # of the first tensor, in bytes
FILE_BYTES = 5 * 10**9  # maximum size of a file that holds more than one tensor


class FileRecord(TypedDict):
    """Size and SHA-256 of a file as it was written."""

    bytes: int
    sha256: str


class TensorFileWriter:
    """Writer of one file: declare all names and shapes, then write the tensors in that order.

    Use it as a context manager. On exit the file is flushed to the disk, and `record` is complete.

    Args:
        dtype: type of all tensors but those in `other_dtypes`
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: str,
        other_dtypes: Mapping[str, str] = MappingProxyType({}),
        metadata: Any = None,
    ):
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        offset = 0
        self._waiting = []
        for name, shape in shapes.items():
            its_dtype = other_dtypes.get(name, dtype)
            size = math.prod(shape) * BYTES[its_dtype]
            offsets = [offset, offset + size]
            header[name] = {"dtype": its_dtype, "shape": list(shape), "data_offsets": offsets}
            self._waiting.append((name, size))
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self._waiting.reverse()
        self._digest, self._bytes = hashlib.sha256(), 0
        self._stream = path.open("wb", buffering=0)
        self._put(memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, data: memoryview) -> None:
        """Write the elements of the next tensor.

        Raises:
            OSError: the file cannot be written.
        """
        self.write_parts(name, [data])

    def write_parts(self, name: str, parts: Iterable[memoryview]) -> None:
        """Write the elements of the next tensor in several parts."""
        expected, size = self._waiting.pop()
        start = self._bytes
        for data in parts:
            self._put(data)
        written = self._bytes - start
        assert (name, written) == (expected, size), (name, written, expected, size)

    @property
    def record(self) -> FileRecord:
        """The file's size, and the SHA-256 of the bytes that were written."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            if kind is None:
                assert not self._waiting, self._waiting
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()

    def _put(self, data: memoryview) -> None:
        data = data.cast("B")
        self._digest.update(data)
        self._bytes += len(data)
        while data:  # a raw write may be partial
            data = data[self._stream.write(data) :]


def split_by_size(shapes: Mapping[str, tuple[int, ...]], *, dtype: str) -> list[list[str]]:
    """Split names, in order, into files of at most FILE_BYTES unless one tensor is larger."""
    return packed(shapes, lambda name: math.prod(shapes[name]) * BYTES[dtype], FILE_BYTES) or [[]]


FORMAT = 1
REMEDY = (
    "restore it from a copy, or use another checkpoint (pretrain.py resumes from the newest "
    "undamaged one)"
)
# fields that a manifest may lack
OPTIONAL = {"read_parts", "parent", "validation_loss", "special_tokens"}
Number = Annotated[int, Field(ge=0)]
# Without a folder: the files of a checkpoint are in its own folder, even if the manifest was
# edited.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=255)]


class _Weights(BaseModel):
    """The keys of the recipe of imported weights that this code reads; it ignores other keys."""

    model: ModelConfig


class _Steps(BaseModel):
    """The key of [training] that this code reads."""

    steps: Number


class _Run(_Weights):
    """The keys of the recipe of a run that this code reads, in any of its versions."""

    optimizer: dict[str, Any]
    batch: Batch
    training: _Steps
    phase: tuple[Phase, ...] = ()


def _check_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a checkpoint.

    Raises:
        PydanticCustomError: a key that this code reads is missing or has another type.
    """
    kind = _Run if "seed" in recipe else _Weights
    try:
        kind.model_validate_json(_json(with_current_names(recipe)), strict=True)
    except ValidationError as error:
        raise PydanticCustomError("recipe", "{problem}", {"problem": _first(error)}) from None
    return recipe


def _json(content: dict[str, Any]) -> bytes:
    """Return parsed JSON as text that pydantic accepts, which follows JSON's rules for types.

    A path that is not valid UTF-8 has lone surrogates, which pydantic rejects; they become "?".
    """
    return json.dumps(content, ensure_ascii=False).encode("utf-8", errors="replace")


def _first(error: ValidationError) -> str:
    """Describe the first of pydantic's errors in one line."""
    problem = error.errors()[0]
    key = ".".join(map(str, problem["loc"]))
    if not key:
        return problem["msg"]
    value = f"{problem['input']!r:.100}".replace("\n", " ")
    if problem["type"] == "string_pattern_mismatch":
        return f"{key} = {value}: this is not the name of a file of the checkpoint"
    return f"{key} = {value}: {problem['msg']}"


class _Part(TypedDict):
    """The keys of a part of the data that this code reads."""

    phase: str
    first_step: int


def _check_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprints of a checkpoint.

    Raises:
        PydanticCustomError: a part of the data has no name or no first step.
    """
    try:
        _PARTS.validate_python(_current_parts(data), strict=True)
    except ValidationError as error:
        raise PydanticCustomError("data", "parts.{problem}", {"problem": _first(error)}) from None
    return data


def _current_parts(data: dict[str, Any]) -> Any:
    """Return the parts of the data with the current names of their keys, if they are tables."""
    parts = data.get("parts", [])
    is_list = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    return [with_current_keys(part) for part in parts] if is_list else parts


_PARTS = TypeAdapter(list[_Part])


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        step: number of completed steps
        updates: number of optimizer steps, which is less than `step` if fp16 skipped some
        loss_scale: state of fp16's dynamic loss scale; None without it
        recipe: the resolved recipe; only the [model] section for imported weights
        layout: sizes of the parallel axes, schedule, and DeepSpeed JSON at the save
        data: fingerprints of corpora and tokenizer
        versions: versions of this code, of Python and of the numerical libraries
        tensors: tensor name -> file name
        files: file name -> size and SHA-256
        read_parts: `Progress.left_parts` of a run whose phases change the data
        parent: the checkpoint of another run at which the run began, if there is one
        validation_loss: mean loss of the validation sets at the save, if the run has just
            validated; in nats per token
        special_tokens: bos_token_id and eos_token_id of imported weights; the latter may be a list
    """

    step: Number
    samples: Number
    tokens: Number
    updates: Number
    loss_scale: dict[str, Any] | None
    recipe: Annotated[dict[str, Any], AfterValidator(_check_recipe)]
    layout: dict[str, Any]
    data: Annotated[dict[str, Any], AfterValidator(_check_data)]
    versions: dict[str, Any]
    tensors: dict[str, FileName]
    files: dict[FileName, FileRecord]
    format: int = FORMAT
    read_parts: list[list[Number]] | None = None
    parent: dict[str, Any] | None = None
    validation_loss: float | None = None
    special_tokens: dict[str, int | list[int] | None] | None = None

    @property
    def progress(self) -> Progress:
        """The progress of a run that resumes from this checkpoint."""
        return Progress(self.step, self.samples, left_parts_from(self.read_parts))

    @property
    def has_moments(self) -> bool:
        """True if the checkpoint holds the optimizer's state, not only weights."""
        return any(name.startswith("exp_avg/") for name in self.tensors)

    @property
    def has_average(self) -> bool:
        """True if the checkpoint holds the average of the weights (`optimizer.average`)."""
        return any(name.startswith("average/") for name in self.tensors)

    def records(self, kinds: Collection[str]) -> dict[str, FileRecord]:
        """Return the records of the files that hold tensors of some kinds."""
        names = {file for key, file in self.tensors.items() if kind_of(key) in kinds}
        return {name: record for name, record in self.files.items() if name in names}

    def missing(self, folder: Path) -> str | None:
        """Return a message about the first missing or incomplete file; None if there is none."""
        for name, record in self.files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != record["bytes"]:
                return f"{file} was written and is now missing or incomplete"
        return None

    def write(self, folder: Path) -> None:
        """Write the manifest into a checkpoint's folder, and flush it to the disk."""
        for path in (*write_manifest(folder, self.text()), folder):
            flush(path)

    def text(self) -> str:
        """Return the content of manifest.json, without optional fields that are empty."""
        content = asdict(self)
        empty: tuple[object, ...] = (None, [], {})
        kept = {
            key: value
            for key, value in content.items()
            if key not in OPTIONAL or value not in empty
        }
        return json.dumps(kept, indent=1) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """Read the manifest of a checkpoint, without verifying its hash.

        Raises:
            UserError: the file is damaged, or was written by a later version of this code.
        """
        file = checkpoint / "manifest.json"
        return cls.parse(file.read_bytes(), file)

    @classmethod
    @lru_cache(maxsize=1)  # a start verifies a manifest and then reads it; megabytes take a second
    def parse(cls, text: bytes, file: Path) -> "Manifest":
        """Parse a manifest. The result is cached, so callers must not modify it.

        file: its name in messages

        Raises:
            UserError: the text is damaged, or was written by a later version of this code.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is damaged ({reason_of(error)}); {REMEDY}") from None
        if not isinstance(content, dict):
            raise UserError(f"{file} is damaged (not a JSON object); {REMEDY}")
        if "format" not in content:
            raise UserError(f'{file} is damaged (it has no "format"); {REMEDY}')
        if content["format"] != FORMAT:
            raise UserError(
                f"{file}: format = {content['format']}, but this version of Threefold reads "
                f"format = {FORMAT}; use the version that wrote the checkpoint"
            )
        if wrong := ({field.name for field in fields(cls)} ^ content.keys()) - OPTIONAL:
            raise UserError(
                f"{file} is damaged, or another version of Threefold wrote it (missing or unknown "
                f"keys: {', '.join(sorted(wrong))}); {REMEDY}"
            )
        try:
            _CONTENT.validate_json(_json(content), strict=True)
        except ValidationError as error:
            raise UserError(f"{file} is damaged ({_first(error)}); {REMEDY}") from None
        recipe, data = with_current_names(content["recipe"]), content["data"]
        parts = {"parts": _current_parts(data)} if "parts" in data else {}
        return cls(**content | {"recipe": recipe, "data": data | parts})


_CONTENT = TypeAdapter(Manifest)


def write_manifest(folder: Path, text: str) -> tuple[Path, Path]:
    """Write the text of a manifest and its SHA-256 into a folder, and return the two files.

    Raises:
        OSError: a file cannot be written.
    """
    file, digest = folder / "manifest.json", folder / "manifest.sha256"
    file.write_text(text, encoding="utf-8")
    digest.write_text(sha256(file) + "\n", encoding="utf-8")
    return file, digest


def tensor_key(kind: str, name: str) -> str:
    """Return the name of a tensor in a checkpoint's files; names of moments have a prefix."""
    return name if kind == "weights" else f"{kind}/{name}"


def kind_of(key: str) -> str:
    """Return the kind of a tensor from its name in a checkpoint's files (`tensor_key`)."""
    return key.rpartition("/")[0] or "weights"


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_damages(
    checkpoint: Path,
    *,
    kinds: Collection[str] = (),
    share: int = 0,
    shares: int = 1,
    threads: int = 1,
    note: Callable[[str], object] = lambda activity: None,
) -> Iterator[str]:
    """Verify a checkpoint's manifest and a share of its files; yield a sentence for each damage.

    Args:
        kinds: verify only the files that hold tensors of these kinds; (): all files
        share: the share to verify, 0 .. shares - 1
        shares: number of processes that verify the files together
        threads: number of files that this process verifies at the same time
        note: called before each file is read, to report progress

    Raises:
        UserError: the checkpoint was written by a later version of this code.
    """
    try:
        if damage := manifest_damage(checkpoint):
            yield damage
            return
        content = Manifest.read(checkpoint)
        if NAME.fullmatch(checkpoint.name) and content.step != step_of(checkpoint):
            yield f"{checkpoint / 'manifest.json'} belongs to step {content.step}"
        files = content.records(kinds) if kinds else content.files

        def verify(name: str) -> list[str]:
            note(f"verifying {checkpoint.name}/{name}")
            return list(_file_damages(checkpoint / name, files[name]))

        # An interrupt, or the first damage if the caller needs no other, does not wait for the
        # threads of a ThreadPool, which are daemons.
        with ThreadPool(threads) if threads > 1 else nullcontext() as pool:
            for damages in (pool.imap if pool else map)(verify, sorted(files)[share::shares]):
                yield from damages
    except OSError as error:
        yield f"{error.filename} cannot be read ({error.strerror or error})"


def manifest_damage(checkpoint: Path) -> str | None:
    """Return a sentence about a manifest that differs from its hash; None if they agree.

    Raises:
        OSError: a file cannot be read.
    """
    manifest, digest = checkpoint / "manifest.json", checkpoint / "manifest.sha256"
    for file in (manifest, digest):
        if not file.is_file():
            return f"{file} is missing"
    expected, saved = sha256(manifest) + "\n", digest.read_text(encoding="utf-8", errors="replace")
    if saved == expected:
        return None
    file = digest if _is_damaged_digest(saved, expected) else manifest
    return f"{file} has changed since the save (SHA-256)"


def _is_damaged_digest(saved: str, expected: str) -> bool:
    """Return True if the digest file is damaged, rather than the hashed file.

    If the hashed file were damaged, the two digests would be unrelated: on average one character in
    16 would match, and the probability of a match in half of the characters is below 10^-18.
    """
    same = sum(here == there for here, there in zip(saved, expected, strict=False))
    well_formed = re.fullmatch(r"[0-9a-f]{64}\n", saved) is not None
    return not well_formed or same > len(expected) // 2


def _file_damages(file: Path, record: FileRecord) -> Iterator[str]:
    if not file.is_file():
        yield f"{file} is missing"
    elif file.stat().st_size != record["bytes"]:
        yield f"{file} has {file.stat().st_size} bytes instead of {record['bytes']}"
    elif sha256(file) != record["sha256"]:
        yield f"{file} has changed since the save (SHA-256)"
