"""Which documents a step reads: what one needs to know when the loss has jumped."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipes.preparing.prepared_corpus import Origins
from recipes.preparing.tokenizer import load_tokenizer
from recipes.training.data.dataset import TrainingData, document_starts
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.sections import repository_path
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.folder import RunFolder

TEXT_SHOWN = 200  # characters of a window


def ledger(recipe: Recipe, run: Path, step: int, *, text: bool) -> Iterator[str]:
    """A step's samples, a line each: corpus, window, tokens, documents and the places in them.

    run: its folder, which knows about changed batches and rollbacks
    text: show the beginning of each window's text

    Raises:
        UserError: the corpora and the recipe do not fit each other.
    """
    data = TrainingData(recipe, Topology(pipeline=1, data=1, tensor=1), 0)
    samples, length = samples_of(recipe, RunFolder(run), step), recipe.model.sequence_length
    span = f"{samples.start} .. {samples.stop - 1}"
    yield f"step {step} reads samples {span}, windows of {length} + 1 tokens"
    folder = repository_path(recipe.data.tokenizer)
    setting = f'data.tokenizer = "{recipe.data.tokenizer}"'
    tokenizer = load_tokenizer(folder, setting) if text else None
    for source, start in zip(recipe.data.train, document_starts(recipe), strict=True):
        if start:
            yield f"documents of {source.path} begin with the tokens {start}"
    origins = [Origins(corpus.file.path) for corpus in data.sources]
    for sample, (source, window) in zip(samples, data.places(np.array(samples)), strict=True):
        corpus, path = data.sources[source], recipe.data.train[source].path
        start, stop = window * length, (window + 1) * length + 1
        documents = ", ".join(
            f"document {number}, its tokens {begin} .. {end - 1}"
            f"{from_where(origins[source][number])}"
            for number, begin, end in corpus.file.documents_of(start, stop)
        )
        yield f"sample {sample}: {path} window {window}, tokens {start} .. {stop - 1}: {documents}"
        if tokenizer:
            shown = tokenizer.decode(corpus.read(window))[:TEXT_SHOWN]
            yield f"  {json.dumps(shown, ensure_ascii=False)}"


def from_where(origin: str) -> str:
    """The end of a phrase."""
    return f" of {origin}" if origin else ""


def samples_of(recipe: Recipe, run: RunFolder, step: int) -> range:
    """Return the samples that a step of a run has read, or will read with this recipe."""
    length, batch = recipe.model.sequence_length, recipe.batch.global_sequences
    firsts = {0: 0} | run.history().first_samples()  # of the step after each
    ends = {line["step"]: line["tokens"] // length for line in run.read_metrics()}
    for at, first in firsts.items():  # drop steps that a rollback has discarded
        ends = {step: end for step, end in ends.items() if step <= at or end > first}
    begins = ends | firsts
    if step in ends and step - 1 in begins:
        return range(begins[step - 1], ends[step])
    known = max(at for at in begins if at < step)
    first = begins[known] + (step - 1 - known) * batch
    return range(first, first + batch)
