"""Checks of the corpora before a run: manifest, tokenizer, model and recipe must fit each other."""

from pathlib import Path

import numpy as np

from models.errors import UserError, reason_of
from threefold.config.recipe import Recipe
from threefold.config.sections import repository_path
from threefold.data.corpus_manifest import DELETE, read_manifest, tokenizer_hash
from threefold.data.token_file import TokenFile

BLOCKS_CHECKED = 256  # of a token file, spread evenly
BLOCK_TOKENS = 2**12


def open_corpus(path: str, recipe: Recipe) -> TokenFile:
    """Open a corpus of the recipe and compare it with its manifest, the tokenizer and the model.

    Raises:
        UserError: the tokenizer is missing, or the corpus does not fit it, its manifest or the
            model.
    """
    tokenizer = repository_path(recipe.data.tokenizer)
    if not (tokenizer / "tokenizer.json").is_file():
        raise UserError(
            f'data.tokenizer = "{recipe.data.tokenizer}" has no tokenizer.json; '
            f"make it with recipes/prepare_data.py"
        )
    check_part(repository_path(path))
    file = TokenFile(repository_path(path))
    _check_manifest(recipe, file)
    file.check_index(one_sequence_per_document=bool(read_manifest(file.path.parent)))
    _check_tokens(recipe, file)
    return file


def check_part(file: Path) -> None:
    """Reject the validation part of a corpus that prepare_data.py wrote without one.

    file: the token file, without .bin or .idx

    Raises:
        UserError: the manifest of the corpus has no such part.
    """
    parts = read_manifest(file.parent).get("files")
    if file.name == "validation" and isinstance(parts, dict) and file.name not in parts:
        raise UserError(
            f"{file} does not exist: the corpus was prepared without a validation part "
            f"(--validation-fraction 0); leave data.validation out and set "
            f"training.evaluate_every = 0, or prepare the corpus again with a validation part"
        )


def _check_manifest(recipe: Recipe, file: TokenFile) -> None:
    """Compare a token file's manifest, if it has one, with the file and the recipe.

    Raises:
        UserError: the manifest is damaged, or contradicts the file or the recipe.
    """
    manifest_file = file.path.with_name("manifest.json")
    if not manifest_file.is_file():
        return  # a corpus that Megatron's tools prepared
    manifest = read_manifest(file.path.parent)
    try:
        vocab_size, made_with = int(manifest["vocab_size"]), manifest["tokenizer_sha256"]
        counts = dict(manifest.get("files", {}).get(file.path.name, {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{manifest_file} is not a manifest of prepare_data.py ({reason_of(error)}); {DELETE}"
        ) from None
    found = {"tokens": file.count, "documents": max(0, file.boundaries - 1)}
    wrong = {key: n for key, n in found.items() if counts.get(key, n) != n}
    if vocab_size > recipe.model.vocab_size:
        raise UserError(
            f"model.vocab_size = {recipe.model.vocab_size} is smaller than the vocabulary of "
            f"{file.path}, {vocab_size}; use model.vocab_size = {vocab_size}"
        )
    if made_with != tokenizer_hash(repository_path(recipe.data.tokenizer)):
        raise UserError(
            f'data.tokenizer = "{recipe.data.tokenizer}" is not the tokenizer that made '
            f"{file.path}; use {manifest.get('tokenizer')}, or prepare the corpus again"
        )
    for key, count in wrong.items():
        raise UserError(
            f"{file.path} has {count} {key} and {manifest_file} says {counts[key]}; use the files "
            f"that belong together, or delete the corpus and prepare it again"
        )


def check_document_starts(recipe: Recipe) -> None:
    """Reject a mixture of corpora with and without BOS at the start of documents.

    Only manifests count, because documents of a corpus may share their first token by chance.
    """
    trained = (source.path for source in recipe.data.train)
    paths = [*trained, *recipe.data.validation_sets.values()]
    manifests = {path: read_manifest(repository_path(path).parent) for path in paths}
    starts = {path: manifest.get("document_start") for path, manifest in manifests.items()}
    recorded = {path: start for path, start in starts.items() if start is not None}
    for path, start in recorded.items():
        first = next(iter(recorded))
        if start != recorded[first]:
            raise UserError(
                f"documents of {first} begin with the tokens {recorded[first]} and those of {path} "
                f"with {start} (document_start in manifest.json); prepare both with the same "
                f"tokenizer"
            )


def _check_tokens(recipe: Recipe, file: TokenFile) -> None:
    """Check a sample of the tokens, spread over the file; preparation checked all of them."""
    for block in range(min(BLOCKS_CHECKED, file.count)):
        start = max(0, file.count - BLOCK_TOKENS) * block // (BLOCKS_CHECKED - 1)
        tokens = file.read(start, min(start + BLOCK_TOKENS, file.count))
        wrong = np.flatnonzero((tokens < 0) | (tokens >= recipe.model.vocab_size))
        if len(wrong):
            raise UserError(
                f"{file.path}.bin: token {start + wrong[0]} has the id {tokens[wrong[0]]} and "
                f"model.vocab_size is {recipe.model.vocab_size}; use the vocabulary of the "
                f"tokenizer that made the corpus"
            )
