"""The manifest of a corpus, and the hashes of the tokenizer that it records."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from models.errors import UserError, a_few, counted, reason_of
from threefold.config.recipe import Recipe
from threefold.config.sections import repository_path

MAX_PADDING = 1024  # the largest multiple, a power of two, to which a vocabulary is padded
MIN_TRAINABLE_TOKENS = 32  # of a part; no recipe has windows that are shorter
DELETE = "delete the folder and prepare the corpus again"  # remedy for a damaged corpus


def read_manifest(folder: Path, *, advice: str = DELETE) -> dict[str, Any]:
    """Return the manifest of a corpus; empty for a corpus that Megatron's tools prepared.

    Args:
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
        raise UserError(f"{file} is damaged ({reason_of(error)}); {advice}") from None
    if (reason := _wrong_type(manifest)) is not None:
        raise UserError(f"{file} is not a manifest of prepare_data.py ({reason}); {advice}")
    return manifest


def is_corpus(folder: Path) -> bool:
    """Return whether prepare_data.py has written a folder, even if its manifest is missing.

    Neither checkpoints nor corpora of Megatron's tools have a pieces.jsonl.
    """
    return (folder / "pieces.jsonl").is_file()


def lost_manifest(folder: Path) -> str:
    """Return a message about a corpus of prepare_data.py without its manifest; "" for others."""
    if (folder / "manifest.json").exists() or not is_corpus(folder):
        return ""
    return f"{folder} has token files but no manifest.json; {DELETE}"


def _wrong_type(manifest: Any) -> str | None:
    """Return the first value of a manifest with another type than prepare_data.py writes."""
    if not isinstance(manifest, dict):
        return "not a JSON object"
    if type(size := manifest.get("vocab_size", 0)) is not int:
        return f"vocab_size = {size!r:.60} is not a whole number"
    start = manifest.get("document_start", [])
    if not isinstance(start, list) or any(type(token) is not int for token in start):
        return f"document_start = {start!r:.60} is not a list of tokens"
    files = manifest.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(file, dict) for file in files.values()):
        return f"files = {files!r:.60} is not a table of files"
    if not isinstance(options := manifest.get("options", {}), dict):
        return f"options = {options!r:.60} is not a table of options"
    return None


def few_tokens(part: str, tokens: int, options: dict[str, Any]) -> str:
    """Return what to do about a part of a corpus that is shorter than a window of a recipe.

    Args:
        part: train or validation
        options: the options with which prepare_data.py made the corpus, as the manifest records
            them; empty for a corpus of Megatron's tools
    """
    purpose = "validate" if part == "validation" else "train"
    remedy = f"too little text to {purpose} on; "
    if tokens >= MIN_TRAINABLE_TOKENS:
        remedy = f"use model.sequence_length = {tokens - 1} or less, or "
    if part != "validation":
        again = "prepare the corpus again with more text"
        return remedy + (again if tokens >= MIN_TRAINABLE_TOKENS else "use more text")
    source = "more text"
    if options.get("validation_source"):
        source = "more text in --validation-source"
    elif options.get("validation_split"):
        source = "a longer --validation-split"
    elif options.get("validation_fraction"):
        source = "more text or a larger --validation-fraction"
    return (
        f"{remedy}prepare the corpus again with {source}, or leave data.validation out and set "
        f"training.evaluate_every = 0"
    )


def unused_rows(recipe: Recipe) -> str:
    """Return a note if the model's vocabulary is larger than the tokenizer's; "" if it is not.

    Only manifests tell the size of the tokenizer. A size that is rounded up to a multiple of a
    power of two, as in many published models, is normal and has no note.
    """
    for source in recipe.data.train:
        tokens = read_manifest(repository_path(source.path).parent).get("vocab_size")
        if tokens is None:
            continue
        size = recipe.model.vocab_size
        padding = math.gcd(size, MAX_PADDING)  # the largest power of two of which it is a multiple
        if size - tokens >= padding:
            return (
                f"model.vocab_size = {size} is more than the {tokens:,} tokens of the tokenizer of "
                f"{source.path}: {counted(size - tokens, 'row')} of the embedding will never be "
                f"used, which is harmless; in a new run, model.vocab_size = {tokens} saves memory"
            )
    return ""


def unchecked_tokenizer(recipe: Recipe) -> str:
    """Return a note about corpora without a manifest, such as Megatron's; "" if all have one."""
    paths = [*(source.path for source in recipe.data.train), *recipe.data.validation_sets.values()]
    missing = [path for path in paths if not read_manifest(repository_path(path).parent)]
    if not missing:
        return ""
    return (
        f"no manifest.json next to {a_few(missing)}: the run cannot check that data.tokenizer made "
        f"these tokens"
    )


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
