"""The manifest of a corpus, and the hashes of the tokenizer that it records."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from models.errors import UserError


def read_manifest(folder: Path, *, advice: str = "prepare the corpus again") -> dict[str, Any]:
    """Return the manifest of a corpus; empty for a corpus that Megatron's tools prepared.

    Args:
        folder: folder of the corpus
        advice: end of the error message, which names a remedy

    Raises:
        UserError: the file is not a JSON object.
    """
    file = folder / "manifest.json"
    if not file.is_file():
        return {}
    try:
        manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} is not a manifest of prepare_data.py ({error!r}); {advice}"
        ) from None
    if not isinstance(manifest, dict):
        raise UserError(
            f"{file} is not a manifest of prepare_data.py (not a JSON object); {advice}"
        )
    return manifest


def tokenizer_hash(folder: Path) -> str:
    """Return the SHA-256 of a tokenizer's `tokenizer.json`, which alone determines the ids."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def folder_hash(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a folder's files."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.glob("*") if path.is_file()):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(os.fsencode(file.name) + f" {content}\n".encode())
    return digest.hexdigest()
