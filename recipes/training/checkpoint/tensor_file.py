"""safetensors files, written tensor by tensor: nothing needs the whole model in memory.

| bytes | what                                                                       |
|-------|----------------------------------------------------------------------------|
| 8     | uint64, little-endian: length of the header                                |
| n     | the header, JSON: {name: {dtype, shape, data_offsets}}, padded with spaces |
|       | the tensors, contiguous and little-endian, in the header's order           |

The library that reads them (https://github.com/huggingface/safetensors) writes only what is in
memory as a whole.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # per element
ALIGNMENT = 8  # of the first tensor
FILE_BYTES = 5 * 10**9  # of a file in a set of several


class TensorFileWriter:
    """One file: declare all names and shapes, then write the tensors in that order.

    As a context manager; the file is on the disk, and `facts` are known, when it ends.
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
        """The next tensor's elements.

        Raises:
            OSError: the disk is full, or whatever else it says.
        """
        expected, size = self._waiting.pop()
        assert (name, data.nbytes) == (expected, size), (name, data.nbytes, expected, size)
        self._put(data)

    @property
    def facts(self) -> dict[str, Any]:
        """The file's size, and the SHA-256 of what it should hold."""
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
        while data:  # a raw write may take less than it is given
            data = data[self._stream.write(data) :]


def split_by_size(shapes: Mapping[str, tuple[int, ...]], *, dtype: str) -> list[list[str]]:
    """Names in order, in files of at most FILE_BYTES unless a tensor is larger by itself."""
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
