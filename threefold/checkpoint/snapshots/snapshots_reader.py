"""Read the tensors of a snapshot, in any layout, from the memory of the nodes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from threefold.checkpoint.format import tensor_key
from threefold.checkpoint.reader import CheckpointReader
from threefold.checkpoint.snapshots.client import Client
from threefold.checkpoint.snapshots.names import FP32_BYTES

LENGTH_BYTES = 8  # of the header's length, at the beginning of a safetensors file


@dataclass(frozen=True)
class SnapshotReader(CheckpointReader):
    """The logical tensors of a snapshot whose files have been verified, in fp32.

    `path` names the snapshot in messages.

    Attributes:
        snapshot: name of the snapshot's folder
        holders: file name -> the node that serves it
    """

    snapshot: str = ""
    holders: Mapping[str, Client] = field(default_factory=dict)
    _headers: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)

    @property
    @override
    def in_memory(self) -> bool:
        return True

    @override
    def rows(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        key = tensor_key(kind, name)
        file = self.manifest.tensors[key]
        first, header = self._header(file)
        shape = header[key]["shape"]
        begin, end = header[key]["data_offsets"]
        start, stop, _ = slice(start, stop).indices(shape[0])
        row = math.prod(shape[1:]) * FP32_BYTES
        assert end - begin == shape[0] * row, (key, header[key])
        begin += first
        if stop <= start or not row:
            return torch.empty(0, *shape[1:])
        content = self._part(file, begin + start * row, begin + stop * row)
        return torch.frombuffer(content, dtype=torch.float32).view(-1, *shape[1:])

    @override
    def tensor(self, kind: str, name: str) -> Tensor:
        file = self.manifest.tensors[tensor_key(kind, name)]
        shape = self._header(file)[1][tensor_key(kind, name)]["shape"]
        return self.rows(kind, name, 0, shape[0])

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """Return the position of the first tensor in a file, and the file's header."""
        if file not in self._headers:
            length = int.from_bytes(self._part(file, 0, LENGTH_BYTES), "little")
            text = self._part(file, LENGTH_BYTES, LENGTH_BYTES + length)
            self._headers[file] = LENGTH_BYTES + length, json.loads(text)
        return self._headers[file]

    def _part(self, file: str, start: int, stop: int) -> bytearray:
        return self.holders[file].part(self.snapshot, file, start, stop)
