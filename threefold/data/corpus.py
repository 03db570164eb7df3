"""Corpora: checks before a run starts, the fingerprint of its data, and bytes per token."""

import difflib
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import UserError, reason_of, why_missing
from threefold.config.phases import PhasePlan, Segment
from threefold.config.recipe import Recipe
from threefold.config.sections import REPOSITORY, repository_path, short
from threefold.data.manifest import DELETE, read_manifest, tokenizer_hash
from threefold.data.token_file import TokenFile

BLOCKS_CHECKED = 256  # of a token file, spread evenly
BLOCK_TOKENS = 2**12


def open_corpus(path: str, recipe: Recipe, *, rank: int = 0, ranks: int = 1) -> TokenFile:
    """Open a corpus of the recipe and compare it with its manifest, the tokenizer and the model.

    Args:
        rank, ranks: this rank and the number of those that divide the check of a large index

    Raises:
        UserError: the tokenizer is missing, or the corpus does not fit it, its manifest or the
            model.
    """
    tokenizer = repository_path(recipe.data.tokenizer)
    if not (tokenizer / "tokenizer.json").is_file():
        problem = why_missing(tokenizer, "tokenizer.json")
        own = repository_path(path).parent / "tokenizer"
        advice = tokenizer_advice(recipe.data.tokenizer)
        if (own / "tokenizer.json").is_file():
            advice = f"use the corpus's own tokenizer, {short(own)}"
        raise UserError(f'data.tokenizer = "{recipe.data.tokenizer}" {problem}; {advice}')
    check_part(repository_path(path))
    file = TokenFile(repository_path(path))
    _check_manifest(recipe, file)
    is_ours = bool(read_manifest(file.path.parent))
    try:
        file.check_index(one_sequence_per_document=is_ours, rank=rank, ranks=ranks)
    except UserError as damage:
        if not file.divides_check(ranks):
            raise
        file.damage = damage  # the ranks end together, once they have joined each other
    _check_tokens(recipe, file)
    return file


def tokenizer_advice(name: str) -> str:
    """Return what to use in place of a tokenizer that does not exist, for a message."""
    folders = sorted(file.parent for file in REPOSITORY.glob("data/*/tokenizer/tokenizer.json"))
    names = [str(folder.relative_to(REPOSITORY)) for folder in folders]
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        return f"did you mean {close[0]}?"
    if names:
        return f'use the folder "tokenizer" in a corpus, such as {names[0]}'
    return 'prepare a corpus with recipes/prepare_data.py, and use the folder "tokenizer" in it'


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
        candidates = (
            file.path.parent / "tokenizer",
            repository_path(f"{manifest.get('tokenizer')}"),
        )
        fitting = (
            str(short(folder))
            for folder in candidates
            if (folder / "tokenizer.json").is_file() and tokenizer_hash(folder) == made_with
        )
        theirs = next(fitting, f"the tokenizer whose tokenizer.json has the SHA-256 {made_with}")
        raise UserError(
            f'data.tokenizer = "{recipe.data.tokenizer}" is not the tokenizer that made '
            f"{file.path}; prepare the corpus again with --tokenizer {recipe.data.tokenizer}, or, "
            f"in a new run, use {theirs}"
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
    blocks = min(BLOCKS_CHECKED, math.ceil(file.count / BLOCK_TOKENS))
    for block in range(blocks):
        start = max(0, file.count - BLOCK_TOKENS) * block // max(1, blocks - 1)
        tokens = file.read(start, min(start + BLOCK_TOKENS, file.count))
        wrong = np.flatnonzero((tokens < 0) | (tokens >= recipe.model.vocab_size))
        if len(wrong):
            raise UserError(
                f"{file.path}.bin: token {start + wrong[0]} has the id {tokens[wrong[0]]} and "
                f"model.vocab_size is {recipe.model.vocab_size}; use the vocabulary of the "
                f"tokenizer that made the corpus"
            )


# The fingerprint of a run's data, which a resumed run compares with its own.

BLOCKS = 256  # of each file, spread evenly, that the fingerprint covers
BLOCK_BYTES = 2**12
DOCUMENTS_SAMPLED = 256  # of a corpus, spread evenly, whose first tokens are compared


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """Return everything that decides which samples a run reads, except for the files' paths.

    The top level describes the first phase, and `parts` the later phases that change the data.
    A corpus is represented by the sizes of its two files and by blocks spread over them, both ends
    included. Reading whole files would delay the start of every run.
    """
    plan = PhasePlan(recipe)
    tokenizer = tokenizer_hash(repository_path(recipe.data.tokenizer))
    later = [_part(plan.first_of_part(part)) for part in plan.parts[1:]]
    return {
        "tokenizer": tokenizer,
        "train": _sources(recipe),
        "separate_documents": recipe.data.separate_documents,
        "document_starts": document_starts(recipe),
    } | ({"parts": later} if later else {})


def content_hashes(plan: PhasePlan, data: dict[str, Any]) -> dict[str, Any]:
    """Return a hash of each part of a recipe's data, by its key and path.

    Args:
        data: `fingerprint` of the recipe
    """
    recipe, sets = plan.recipe, dict[str, str]()
    for segment in plan.segments:
        sets |= {path: name for name, path in segment.recipe.data.validation_sets.items()}
    return {
        f'data.tokenizer = "{recipe.data.tokenizer}"': data["tokenizer"],
        **{
            f'data.train with path = "{source.path}"': data["train"][str(number)]["content"]
            for number, source in enumerate(recipe.data.train)
        },
        "the data of a later phase": data.get("parts"),
        **{
            f'data.validation{f".{name}" if name else ""} = "{path}"': _content(
                repository_path(path)
            )
            for path, name in sets.items()
        },
    }


def _part(segment: Segment) -> dict[str, Any]:
    """Return the fingerprint of a part of the data, which begins with a phase."""
    model = segment.recipe.model_dump(mode="json")["model"]
    return {
        "phase": segment.phase,
        "first_step": segment.first,
        "train": _sources(segment.recipe),
        "separate_documents": segment.recipe.data.separate_documents,
        **{key: model[key] for key in ("sequence_length", "rope_theta", "rope_scaling")},
    }


def _sources(recipe: Recipe) -> dict[str, dict[str, Any]]:
    return {
        str(number): {
            "content": _content(repository_path(source.path)),
            "weight": source.weight,
        }
        for number, source in enumerate(recipe.data.train)
    }


def document_starts(recipe: Recipe) -> list[list[int]]:
    """Return the tokens that begin every document of each training corpus, such as BOS.

    Manifests of Megatron corpora and of older prepare_data.py corpora do not record them. For these
    corpora, the start is the first token of the sampled documents if all of them share it, and
    empty otherwise.
    """
    paths = [repository_path(source.path) for source in recipe.data.train]
    recorded = [read_manifest(path.parent).get("document_start") for path in paths]
    return [
        _shared_start(TokenFile(path)) if start is None else start
        for path, start in zip(paths, recorded, strict=True)
    ]


def _shared_start(file: TokenFile) -> list[int]:
    """Return the first token of documents spread over a file, if all begin with the same one."""
    count = file.boundaries - 1
    if count < 2:
        return []
    chosen = {
        number * (count - 1) // (DOCUMENTS_SAMPLED - 1) for number in range(DOCUMENTS_SAMPLED)
    }
    # Empty documents at the end begin after the last token.
    firsts = {file.range_of(number)[0] for number in chosen}.intersection(range(file.count))
    tokens = {int(file.read(first, first + 1)[0]) for first in firsts}
    return list(tokens) if len(tokens) == 1 else []


def _content(path: Path) -> str:
    digest = hashlib.sha256()
    for suffix in (".idx", ".bin"):
        with path.with_name(path.name + suffix).open("rb") as stream:
            size = stream.seek(0, 2)
            digest.update(size.to_bytes(8, "little"))
            for block in range(BLOCKS):
                stream.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()


# Bytes of text per token, for losses in bits per byte.

SPACE = "\u2581"  # SentencePiece's sign for a space
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of one byte, with SentencePiece's byte fallback


def token_bytes(tokenizer: Path, vocab_size: int) -> np.ndarray | None:
    """Return the number of bytes of UTF-8 text of each token id: int64 [vocab_size].

    A token of a byte-level vocabulary has as many bytes as characters. A token of SentencePiece has
    the bytes of its text, in which U+2581 is a space. Special tokens, such as the one between
    documents, and ids without a token have 0 bytes. The sum over a document
    without special tokens is the length of its text after the tokenizer's normalisation; if
    SentencePiece puts a space before a text, that space counts.

    Args:
        tokenizer: folder with tokenizer.json

    Returns:
        None if the vocabulary is neither byte-level nor SentencePiece's (for example WordPiece,
        which loses spaces), so that its tokens do not determine the text.

    Raises:
        UserError: tokenizer.json is not valid.
    """
    file = tokenizer / "tokenizer.json"
    try:
        settings = json.loads(file.read_bytes())
        decoders = set(_decoders(settings.get("decoder")))
        vocabulary: dict[str, int] = settings["model"]["vocab"] if decoders else {}
        if isinstance(vocabulary, list):  # Unigram lists [token, score] by id
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {int(token["id"]): token for token in settings.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file} is not a tokenizer of the tokenizers library ({reason_of(error)}); use a "
            f"folder written by save_pretrained"
        ) from None
    if "ByteLevel" in decoders:
        sizes = {number: len(token) for token, number in vocabulary.items()}
    elif decoders & {"Metaspace", "Replace"}:
        falls_back = "ByteFallback" in decoders
        sizes = {
            number: 1
            if falls_back and BYTE.fullmatch(token)
            else len(token.replace(SPACE, " ").encode(errors="surrogatepass"))
            for token, number in vocabulary.items()
        }
    else:
        return None
    sizes |= {
        number: 0 if token["special"] else len(token["content"].encode(errors="surrogatepass"))
        for number, token in added.items()
    }
    table = np.zeros(vocab_size, np.int64)
    for number, size in sizes.items():
        if number < vocab_size:
            table[number] = size
    return table


def _decoders(decoder: Any) -> list[str]:
    """Return the types of a decoder and of its parts; a `Replace` only if it makes spaces."""
    if decoder is None:
        return []
    decoders = [part for inner in decoder.get("decoders", ()) for part in _decoders(inner)]
    if decoder["type"] != "Replace" or decoder["pattern"] == {"String": SPACE}:
        decoders.append(decoder["type"])
    return decoders
