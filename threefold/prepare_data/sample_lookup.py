"""List the documents that a step reads, to find the cause of a jump in the loss."""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from threefold.config.parallel_dims import ParallelDims
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.config.sections import repository_path
from threefold.data.corpus import document_starts
from threefold.data.dataset import TrainingData
from threefold.data.manifest import lost_manifest
from threefold.prepare_data.corpus import Origins
from threefold.prepare_data.tokenizer import load_tokenizer
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress
from threefold.run_folder.json_lines import MAX_INTEGER_IN_LINE

MAX_CHARACTERS_SHOWN = 200  # of a window


def sample_lines(recipe: Recipe, run: Path, step: int, *, text: bool) -> Iterator[str]:
    """Yield a line per sample of a step: corpus, window, tokens, documents and their token ranges.

    Args:
        run: run folder, which records changed batch sizes and rollbacks
        step: number of the step, from 1
        text: also yield the beginning of each window's text

    Raises:
        UserError: The corpora and the recipe do not match.
    """
    data = TrainingData(recipe, ParallelDims(pipeline=1, data=1, tensor=1), 0)
    before, samples = reading_of(data.phase_plan, RunFolder(run), step)
    data.resume(before)
    segment = data.phase_plan.at(step)
    length, phase = segment.recipe.model.sequence_length, ""
    if len(data.phase_plan.names) > 1:
        phase = f' (phase "{segment.phase}")'
    first_and_last = f"{samples.start} .. {samples.stop - 1}"
    yield f"step {step}{phase} reads samples {first_and_last}, windows of {length} + 1 tokens"
    folder = repository_path(recipe.data.tokenizer)
    setting = f'data.tokenizer = "{recipe.data.tokenizer}"'
    tokenizer = load_tokenizer(folder, setting) if text else None
    train = segment.recipe.data.train
    for corpus_folder in dict.fromkeys(repository_path(source.path).parent for source in train):
        if lost := lost_manifest(corpus_folder):
            yield f"warning: {lost}"
    for corpus_of_recipe, start in zip(train, document_starts(segment.recipe), strict=True):
        if start:
            yield f"documents of {corpus_of_recipe.path} begin with the tokens {start}"
    corpora = data.sources(step)
    paths = dict(zip(corpora, (source.path for source in train), strict=True))
    origins = {number: Origins(corpus.file.path) for number, corpus in corpora.items()}
    places = data.places(np.array(samples), step)
    for sample, (source, window) in zip(samples, places, strict=True):
        corpus, path = corpora[source], paths[source]
        first, stop = window * length, (window + 1) * length + 1
        documents = ", ".join(
            f"tokens {begin} .. {end - 1} of document {number}"
            + (f" (within {origin})" if (origin := origins[source][number]) else "")
            for number, begin, end in corpus.file.documents_of(first, stop)
        )
        yield f"sample {sample}: {path} window {window}, tokens {first} .. {stop - 1}: {documents}"
        if tokenizer:
            shown = tokenizer.decode(corpus.read(window))[:MAX_CHARACTERS_SHOWN]
            yield f"  {json.dumps(shown, ensure_ascii=False)}"


def samples_of(recipe: Recipe, run: RunFolder, step: int) -> range:
    """Return the samples that a step of a run has read, or will read with this recipe."""
    _, samples = reading_of(PhasePlan(recipe), run, step)
    return samples


def reading_of(plan: PhasePlan, run: RunFolder, step: int) -> tuple[Progress, range]:
    """Return the progress of a run before a step, and the samples that the step reads.

    The events record where the position in the data jumped. Otherwise the steps follow the recipe,
    or the metrics, because the run may have had another batch size.
    """
    history = run.history()
    firsts = {0: 0} | history.first_samples()  # step -> first sample of the next step
    jumps = sorted(firsts)

    def planned(after: int) -> Progress:
        jump = jumps[bisect_right(jumps, after) - 1]
        return history.progress_at(jump, firsts[jump]).after(after, plan)

    ends = {}
    for line in run.read_metrics():
        if line["step"] < 1:  # damaged
            continue
        expected = planned(line["step"])
        length = plan.at(line["step"]).recipe.model.sequence_length
        if abs(line.get("tokens", math.inf)) <= MAX_INTEGER_IN_LINE:  # neither damaged nor missing
            read = int(line["tokens"]) - expected.tokens(plan)
            ends[line["step"]] = expected.samples + read // length
    largest = list(accumulate((firsts[at] for at in jumps), max))
    ends = {  # without steps that a rollback has discarded
        at: end for at, end in ends.items() if end > largest[bisect_left(jumps, at) - 1]
    }
    begins = ends | firsts
    known = max(at for at in begins if at < step)
    before = replace(planned(known), samples=begins[known]).after(step - 1, plan)
    stop = before.after(step, plan).samples
    if known == step - 1:
        stop = ends.get(step, stop)
    return before, range(before.samples, stop)
