"""The checkpoint that a command reads: verified, and its weights one tensor at a time."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from models.config import ModelConfig
from recipes.training.manifest import Manifest, damages, published, tensor_key


@dataclass(frozen=True)
class Source:
    """A checkpoint whose files are what was written."""

    path: Path
    manifest: Manifest

    @property
    def model(self) -> ModelConfig:
        """The architecture; of weights from elsewhere too."""
        return ModelConfig(**self.manifest.recipe["model"])

    def tensor(self, kind: str, name: str) -> Tensor:
        """A logical weight or moment, fp32; its file is mapped for as long as the tensor lives."""
        key = tensor_key(kind, name)
        with safe_open(self.path / self.manifest.tensors[key], framework="pt") as file:
            return file.get_tensor(key)


def open_checkpoint(path: Path) -> Source:
    """A checkpoint, or the newest undamaged one of a run folder.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if (path / "manifest.json").is_file():
        damage = next(damages(path), None)
        if damage:
            raise ValueError(f"{damage}; use another checkpoint")
        return Source(path, Manifest.read(path))
    found = published(path / "checkpoints") or published(path)
    for checkpoint in reversed(found):
        if next(damages(checkpoint), None) is None:
            return Source(checkpoint, Manifest.read(checkpoint))
    if found:
        raise ValueError(f"{path}: all checkpoints here are damaged; {next(damages(found[-1]))}")
    raise ValueError(f"{path}: no checkpoint there; use a run folder such as runs/tiny")
