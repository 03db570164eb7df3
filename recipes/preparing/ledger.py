"""Which documents a step reads: what one needs to know when the loss has jumped."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from recipes.preparing.corpus import Origins
from recipes.training.data import TrainingData
from recipes.training.progress import Progress
from recipes.training.recipe import Recipe, repository_path
from recipes.training.run_folder import RunFolder
from recipes.training.topology import Topology

TEXT_SHOWN = 200  # characters of a window


def ledger(recipe: Recipe, run: Path, step: int, *, text: bool) -> Iterator[str]:
    """A step's samples, a line each: corpus, window, tokens, documents and the places in them.

    run: its folder, which knows where the step began if the batch has changed before it
    text: show the beginning of each window's text

    Raises:
        ValueError: the corpora and the recipe do not fit each other.
    """
    data = TrainingData(recipe, Topology(pipeline=1, data=1, tensor=1), 0)
    data.resume(progress_before(recipe, run, step))
    first, last = (data.progress_after(at).samples for at in (step - 1, step))
    length = recipe.model.sequence_length
    yield f"step {step} reads samples {first} .. {last - 1}, windows of {length} + 1 tokens"
    folder = repository_path(recipe.data.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(folder) if text else None
    samples = np.arange(first, last)
    origins = [Origins(corpus.file.path) for corpus in data.sources]
    for sample, (source, window) in zip(samples, data.places(samples), strict=True):
        corpus, path = data.sources[source], recipe.data.train[source].path
        start, stop = window * length, (window + 1) * length + 1
        documents = ", ".join(
            f"document {number} [{begin} .. {end - 1}]{from_where(origins[source][number])}"
            for number, begin, end in corpus.file.documents_of(start, stop)
        )
        yield f"sample {sample}: {path} window {window}, tokens {start} .. {stop - 1}: {documents}"
        if tokenizer:
            shown = tokenizer.decode(corpus.read(window))[:TEXT_SHOWN]
            yield f"  {json.dumps(shown, ensure_ascii=False)}"


def from_where(origin: str) -> str:
    """The end of a phrase."""
    return f" of {origin}" if origin else ""


def progress_before(recipe: Recipe, run: Path, step: int) -> Progress:
    """How far the run was before a step: what its metrics say, or the recipe's batch all along."""
    for line in RunFolder(run).read_metrics():
        if line["step"] == step - 1:
            return Progress(step - 1, line["tokens"] // recipe.model.sequence_length)
    return Progress(step - 1, (step - 1) * recipe.batch.global_sequences)
