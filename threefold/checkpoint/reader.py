"""Read the tensors of a checkpoint in any layout."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from threefold.checkpoint.format import Manifest, tensor_key


@dataclass(frozen=True)
class CheckpointReader:
    """The logical tensors of a verified checkpoint, in fp32, read on demand.

    A file stays mapped as long as one of its tensors exists.
    """

    path: Path
    manifest: Manifest

    @property
    def in_memory(self) -> bool:
        """True for a snapshot in the memory of the nodes."""
        return False

    def rows(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return the rows start .. stop - 1 (dimension 0) of a weight or a moment."""
        key = tensor_key(kind, name)
        with safe_open(self.path / self.manifest.tensors[key], framework="pt") as file:
            return file.get_slice(key)[start:stop]

    def tensor(self, kind: str, name: str) -> Tensor:
        """Return a whole weight or moment."""
        key = tensor_key(kind, name)
        with safe_open(self.path / self.manifest.tensors[key], framework="pt") as file:
            return file.get_tensor(key)
