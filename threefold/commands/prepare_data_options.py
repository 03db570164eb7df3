"""Checks of the options of prepare_data.py, alone and against those of an existing corpus."""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from models.config import MAX_SIZE
from models.errors import UserError
from threefold.data.corpus import lost_manifest, read_manifest

MIN_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token
CONTENT_OPTIONS = ("source", "config", "split", "column", "text_is", "tokenizer", "vocab_size",
                   "validation_fraction")  # fmt: skip
VALIDATION_OPTIONS = ("validation_source", "validation_split")  # recorded if they are given


def content_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that determine the content of a corpus."""
    chosen = {key: vars(options)[key] for key in CONTENT_OPTIONS}
    if options.tokenizer:
        del chosen["vocab_size"]
    return chosen | {key: vars(options)[key] for key in VALIDATION_OPTIONS if vars(options)[key]}


def check_same_options(options: argparse.Namespace, output: Path) -> None:
    """Compare the options of an existing corpus with those of this command.

    Raises:
        UserError: An option differs, or the manifest of the corpus is damaged.
    """
    advice = f"use another --output, or delete {output} to prepare it again"
    made = read_manifest(output, advice=advice).get("options", {})
    wanted = content_options(options)
    different = [
        key
        for key in dict.fromkeys((*wanted, *VALIDATION_OPTIONS))
        if (key in made or key in VALIDATION_OPTIONS) and made.get(key) != wanted.get(key)
    ]
    if not set(VALIDATION_OPTIONS).isdisjoint(different):  # they change the fraction's default
        different = [key for key in different if key != "validation_fraction"]
    if different:
        before, here = (
            " and ".join(_typed(key, chosen.get(key)) for key in different)
            for chosen in (made, wanted)
        )
        raise UserError(f"{output} already exists, made with {before}; here {here}; {advice}")


def _typed(key: str, value: Any) -> str:
    """Return an option as it is typed on a command line, or say that it is not used."""
    option = f"--{key.replace('_', '-')}"
    if value is None:
        return f"no {option}"
    return f"{option} {shlex.join(map(str, value if isinstance(value, list) else [value]))}"


def check_options(options: argparse.Namespace, output: Path, workspace: Path) -> None:
    """Check the options before any work is done.

    Raises:
        UserError: An option has an invalid value.
    """
    if lost := lost_manifest(output):
        raise UserError(lost)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {options.output} contains other files; use an empty folder")
    if os.path.ismount(output):
        raise UserError(f"--output {options.output} is a mount point; use a folder in it")
    if workspace.exists() and not (workspace / "lock").is_file() and any(workspace.iterdir()):
        raise UserError(
            f"{workspace}, the working folder of this command, contains other files; move them "
            f"away, or use another --output"
        )
    if not options.tokenizer and not MIN_VOCAB_SIZE <= options.vocab_size <= MAX_SIZE:
        raise UserError(
            f"--vocab-size {options.vocab_size} is not in {MIN_VOCAB_SIZE} (the 256 bytes and "
            f"the end-of-text token) .. {MAX_SIZE}; use 32000"
        )
    if not 0 <= options.validation_fraction < 1:
        raise UserError(
            f"--validation-fraction {options.validation_fraction} is not a share below 1; use 0.1, "
            f"or 0 for a corpus without a validation part"
        )
    _check_validation(options)
    if options.processes < 1:
        raise UserError(f"--processes {options.processes} is too few; use 1")
    if options.shard is not None and not options.tokenizer:
        raise UserError(
            "--shard needs --tokenizer, because each shard would train a tokenizer of its own; "
            "prepare a part of the text first and use its tokenizer: "
            "--tokenizer data/part/tokenizer"
        )


def validation_option(options: argparse.Namespace) -> str:
    """Return the option that names the documents of the validation part, with its value.

    Returns:
        "" if the validation part is a share of the documents
    """
    if options.validation_source:
        return f"--validation-source {' '.join(options.validation_source)}"
    return f"--validation-split {options.validation_split}" if options.validation_split else ""


def _check_validation(options: argparse.Namespace) -> None:
    """Raise a UserError if the options of the validation part contradict each other."""
    if (own := validation_option(options)) and options.validation_fraction:
        raise UserError(
            f"--validation-fraction {options.validation_fraction} has no effect with {own}; omit it"
        )
    if options.validation_split == options.split and not options.validation_source:
        raise UserError(
            f"--validation-split {options.validation_split} is also --split, the training part; "
            f"use another split of the dataset, such as validation"
        )
