"""List the documents that a step reads, to find the cause of a jump in the loss."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipes.preparing.prepared_corpus import Origins
from recipes.preparing.tokenizer import load_tokenizer
from recipes.training.data.dataset import TrainingData
from recipes.training.data.fingerprint import document_starts
from recipes.training.recipe.repository import repository_path
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.folder import RunFolder

MAX_CHARACTERS_SHOWN = 200  # of a window


def ledger(recipe: Recipe, run: Path, step: int, *, text: bool) -> Iterator[str]:
    """Yield a line per sample of a step: corpus, window, tokens, documents and their token ranges.

    Args:
        recipe: recipe of the run
        run: run folder, which records changed batch sizes and rollbacks
        step: number of the step, from 1
        text: also yield the beginning of each window's text

    Raises:
        UserError: The corpora and the recipe do not match.
    """
    data = TrainingData(recipe, Topology(pipeline=1, data=1, tensor=1), 0)
    samples, length = samples_of(recipe, RunFolder(run), step), recipe.model.sequence_length
    span = f"{samples.start} .. {samples.stop - 1}"
    yield f"step {step} reads samples {span}, windows of {length} + 1 tokens"
    folder = repository_path(recipe.data.tokenizer)
    setting = f'data.tokenizer = "{recipe.data.tokenizer}"'
    tokenizer = load_tokenizer(folder, setting) if text else None
    for corpus_of_recipe, start in zip(recipe.data.train, document_starts(recipe), strict=True):
        if start:
            yield f"documents of {corpus_of_recipe.path} begin with the tokens {start}"
    origins = [Origins(corpus.file.path) for corpus in data.sources]
    for sample, (source, window) in zip(samples, data.places(np.array(samples)), strict=True):
        corpus, path = data.sources[source], recipe.data.train[source].path
        first, stop = window * length, (window + 1) * length + 1
        documents = ", ".join(
            f"document {number}, its tokens {begin} .. {end - 1}"
            f"{origin_phrase(origins[source][number])}"
            for number, begin, end in corpus.file.documents_of(first, stop)
        )
        yield f"sample {sample}: {path} window {window}, tokens {first} .. {stop - 1}: {documents}"
        if tokenizer:
            shown = tokenizer.decode(corpus.read(window))[:MAX_CHARACTERS_SHOWN]
            yield f"  {json.dumps(shown, ensure_ascii=False)}"


def origin_phrase(origin: str) -> str:
    """Return the origin of a document as the end of a phrase."""
    return f" of {origin}" if origin else ""


def samples_of(recipe: Recipe, run: RunFolder, step: int) -> range:
    """Return the samples that a step of a run has read, or will read with this recipe."""
    length, batch = recipe.model.sequence_length, recipe.batch.global_sequences
    firsts = {0: 0} | run.history().first_samples()  # step -> first sample of the next step
    ends = {line["step"]: line["tokens"] // length for line in run.read_metrics()}
    for at, first in firsts.items():  # drop steps that a rollback has discarded
        ends = {step: end for step, end in ends.items() if step <= at or end > first}
    begins = ends | firsts
    if step in ends and step - 1 in begins:
        return range(begins[step - 1], ends[step])
    known = max(at for at in begins if at < step)
    first = begins[known] + (step - 1 - known) * batch
    return range(first, first + batch)
