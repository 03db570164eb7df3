"""The fingerprint of a run's data, which a resumed run compares with its own."""

import hashlib
from pathlib import Path
from typing import Any

from threefold.config.phases import Span, StagePlan
from threefold.config.recipe import Recipe
from threefold.config.sections import repository_path
from threefold.data.corpus_manifest import read_manifest, tokenizer_hash
from threefold.data.token_file import TokenFile

BLOCKS = 256  # of each file, spread evenly, that the fingerprint covers
BLOCK_BYTES = 2**12
DOCUMENTS_SAMPLED = 256  # of a corpus, spread evenly, whose first tokens are compared


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """Return everything that decides which samples a run reads, except for the files' paths.

    The top level describes the first stage, and `parts` the later stages that change the data.
    A corpus is represented by the sizes of its two files and by blocks spread over them, both ends
    included. Reading whole files would delay the start of every run.
    """
    plan = StagePlan(recipe)
    tokenizer = tokenizer_hash(repository_path(recipe.data.tokenizer))
    later = [_part(plan.first_of_part(part)) for part in plan.parts[1:]]
    return {
        "tokenizer": tokenizer,
        "train": _sources(recipe),
        "separate_documents": recipe.data.separate_documents,
        "document_starts": document_starts(recipe),
    } | ({"parts": later} if later else {})


def _part(span: Span) -> dict[str, Any]:
    """Return the fingerprint of a part of the data, which begins with a stage."""
    model = span.recipe.model_dump(mode="json")["model"]
    return {
        "stage": span.stage,
        "first_step": span.first,
        "train": _sources(span.recipe),
        "separate_documents": span.recipe.data.separate_documents,
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
    count, offsets, documents = file.boundaries - 1, file.offsets, file.documents
    if count < 2:
        return []
    chosen = {
        number * (count - 1) // (DOCUMENTS_SAMPLED - 1) for number in range(DOCUMENTS_SAMPLED)
    }
    # Empty documents at the end begin after the last sequence or token.
    begun = {int(documents[number]) for number in chosen}.intersection(range(file.sequences))
    firsts = {int(offsets[sequence]) // file.dtype.itemsize for sequence in begun}
    firsts.intersection_update(range(file.count))
    found = {int(file.read(first, first + 1)[0]) for first in firsts}
    return list(found) if len(found) == 1 else []


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
