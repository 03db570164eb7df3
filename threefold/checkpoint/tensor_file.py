"""safetensors files, written tensor by tensor, so that a file never has to fit in memory.

| bytes | content                                                                    |
|-------|----------------------------------------------------------------------------|
| 8     | uint64, little-endian: length of the header                                |
| n     | the header, JSON: {name: {dtype, shape, data_offsets}}, padded with spaces |
|       | the tensors, contiguous and little-endian, in the header's order           |

The safetensors library (https://github.com/huggingface/safetensors), which reads the files, can
only write files whose tensors are all in memory.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

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
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str, metadata: Any = None
    ):
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        offset = 0
        for name, shape in shapes.items():
            end = offset + math.prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self._waiting = [(name, math.prod(shape) * BYTES[dtype]) for name, shape in shapes.items()]
        self._waiting.reverse()
        self._digest, self._bytes = hashlib.sha256(), 0
        self._stream = path.open("wb", buffering=0)
        self._put(memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, data: memoryview) -> None:
        """Write the elements of the next tensor.

        Raises:
            OSError: the file cannot be written.
        """
        expected, size = self._waiting.pop()
        assert (name, data.nbytes) == (expected, size), (name, data.nbytes, expected, size)
        self._put(data)

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
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        own = math.prod(shape) * BYTES[dtype]
        if files[-1] and size + own > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += own
    return files
