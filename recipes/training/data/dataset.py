"""Token files -> micro-batches: a pure function of (recipe, progress, step) in every layout.

A corpus is cut into windows of sequence_length + 1 tokens, each overlapping the next by one token.
The seed and the stages alone decide which window is sample n of the run (`order.py`). A step reads
the next G samples, where G is the global batch of the step, and the data ranks divide them. Step k
(from 1) of a recipe with one batch size reads the samples (k - 1) G .. k G - 1, unless the run was
resumed with another batch: it then continues with the sample after the last one that the old batch
read.

A window may cross the ends of documents. With data.separate_documents, each micro-batch's `info`
contains the lengths of its documents, which come from the token file's index. Therefore no stage
has to read or send tokens to know them. A document that begins before its window counts from the
window's first token.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.context_parallel.division import Division, Lengths, Slices, divide, rank_work
from models.errors import UserError
from models.parallel.micro_batch_info import Documents, MicroBatchInfo
from models.parallel.rng import MaskKey
from recipes.training.data.checks import check_document_starts, open_corpus
from recipes.training.data.fingerprint import fingerprint
from recipes.training.data.micro_batch import MicroBatch
from recipes.training.data.order import Mixture, mixture_after, source_numbers
from recipes.training.data.token_file import TokenFile
from recipes.training.recipe.repository import repository_path
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.stages.plan import Span, StagePlan
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.progress import Progress, Read


class Windows:
    """A token file as windows of `sequence_length` inputs and their labels."""

    def __init__(self, file: TokenFile, sequence_length: int):
        self.file, self.sequence_length = file, sequence_length
        self.count = (file.count - 1) // sequence_length
        if self.count < 1:
            raise UserError(
                f"{file.path}.bin has {file.count} tokens, less than one window of "
                f"model.sequence_length = {sequence_length}; use more text or shorter sequences"
            )

    def read(self, index: int, positions: range | None = None) -> np.ndarray:
        """Return the tokens at some positions of a window, and the next one: [n + 1].

        positions: None: all s
        """
        positions = positions or range(self.sequence_length)
        start = index * self.sequence_length
        return self.file.read(start + positions.start, start + positions.stop + 1)

    def document_lengths(self, index: int) -> tuple[int, ...]:
        """Return the lengths of the documents in a window's inputs."""
        start = index * self.sequence_length
        return self.file.document_lengths(start, start + self.sequence_length)


class TrainingData:
    """The micro-batches of a rank, in training and in validation.

    Stages of the pipeline that hold neither the first nor the last layer get micro-batches without
    tokens.

    Raises:
        UserError: token files, manifest, tokenizer and recipe do not fit each other.
    """

    def __init__(self, recipe: Recipe, topology: Topology, rank: int):
        self.recipe, self.rank = recipe, rank
        self.plan = StagePlan(recipe)
        self._opened: dict[tuple[str, int], Windows] = {}
        self.numbers = source_numbers(self.plan)
        for span in self.plan.spans:
            with self.plan.naming(span):
                self._open(span)
        self.seed, self.vocab_size = recipe.seed, recipe.model.vocab_size
        self.resume(Progress(), topology)

    def _open(self, span: Span) -> None:
        """Open and check the corpora of a span."""
        recipe = span.recipe
        for path in (*(source.path for source in recipe.data.train), recipe.data.validation):
            key = path, recipe.model.sequence_length
            if key not in self._opened:
                opened = [each.file for (other, _), each in self._opened.items() if other == path]
                file = opened[0] if opened else open_corpus(path, recipe)
                self._opened[key] = Windows(file, recipe.model.sequence_length)
        check_document_starts(recipe)
        self._check_validation(span)

    def _check_validation(self, span: Span) -> None:
        """Reject a validation file with fewer windows than one validation reads."""
        recipe, count = span.recipe, self._validation(span).count
        batches, sequences = recipe.training.evaluation_batches, recipe.batch.global_sequences
        if not recipe.training.evaluate_every or batches * sequences <= count:
            return
        most = count // sequences
        works = f"training.evaluation_batches = {most}" if most else "training.evaluate_every = 0"
        raise UserError(
            f"training.evaluation_batches = {batches} of "
            f"batch.global_sequences = {sequences} need {batches * sequences} windows and "
            f"{recipe.data.validation} has {count}; use {works}"
        )

    @property
    def validation(self) -> Windows:
        """The validation file, as the windows of the next step's stage."""
        return self._validation(self.plan.at(self.progress.step + 1))

    def _validation(self, span: Span) -> Windows:
        return self._opened[span.recipe.data.validation, span.recipe.model.sequence_length]

    def sources(self, step: int = 1) -> dict[int, Windows]:
        """Return number -> corpus, as the windows of a step."""
        recipe = self.plan.at(step).recipe
        return {
            self.numbers[str(repository_path(source.path))]: self._opened[
                source.path, recipe.model.sequence_length
            ]
            for source in recipe.data.train
        }

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides which samples the run reads; reads the files on first use."""
        return fingerprint(self.recipe)

    def resume(self, progress: Progress, topology: Topology | None = None) -> None:
        """Continue from where a run stopped; the next step reads the next sample.

        Args:
            progress: the progress of the run
            topology: the layout of the next steps; None if it stays the same
        """
        self.progress = progress
        self._mixtures: dict[tuple[Read, int], Mixture] = {}
        if topology is None:
            return
        coordinates = topology.coordinates(self.rank)
        self.data_rank, self.data_size = coordinates.data, topology.data
        self.context_rank, self.context_size = coordinates.context, topology.context
        layout = self.plan.at(progress.step + 1).recipe.layout
        self.takes_tokens = coordinates.pipeline in layout.ends

    def progress_after(self, step: int) -> Progress:
        """Return the progress of the run after a step."""
        return self.progress.after(step, self.plan)

    def samples(self, step: int) -> range:
        """Return the run's samples that training step 1, 2, ... reads, on all ranks."""
        first = self.progress.after(step - 1, self.plan).samples
        return range(first, first + self.plan.at(step).recipe.batch.global_sequences)

    def step(self, step: int) -> Iterator[MicroBatch]:
        """Yield this data rank's micro-batches of training step 1, 2, ..."""
        recipe, samples = self.plan.at(step).recipe, self.samples(step)
        for share in self._shares(recipe, samples.start, len(samples)):
            yield self._micro_batch(recipe, self._windows(share, step), MaskKey(self.seed, share))

    def evaluation(self, step: int = 1) -> Iterator[MicroBatch]:
        """Yield this data rank's micro-batches of the validation after a step, without dropout.

        The windows are the same during a stage, spread evenly over the file.
        """
        span = self.plan.at(step)
        corpus, recipe = self._validation(span), span.recipe
        count = recipe.training.evaluation_batches * recipe.batch.global_sequences
        for samples in self._shares(recipe, 0, count):
            windows = [(corpus, n * corpus.count // count) for n in samples]
            yield self._micro_batch(recipe, windows, None)

    def places(self, samples: np.ndarray, step: int = 1) -> list[tuple[int, int]]:
        """Return (number of the corpus, window) for samples of the part of the data of a step."""
        return self._mixture(step).places(samples)

    def _mixture(self, step: int) -> Mixture:
        """Return the mixture that a step reads."""
        before = self.progress.after(step - 1, self.plan)
        part = self.plan.at(step).part
        is_new = part != self.plan.at(before.step).part
        read = before.left(self.plan).read if is_new else before.read
        if (read, part) not in self._mixtures:
            begin = read[-1][1] if read else 0
            readings = Progress(before.step, begin, read).readings(self.plan)
            tokens = {
                self.numbers[path]: windows.file.count
                for (name, _), windows in self._opened.items()
                if (path := str(repository_path(name))) in self.numbers
            }
            self._mixtures[read, part] = mixture_after(
                self.plan, readings, part=part, begin=begin, tokens=tokens
            )
        return self._mixtures[read, part]

    def context_imbalance(self) -> float:
        """Return the work in attention of the busiest context rank, relative to the mean.

        1.0 is perfect: in each layer, the other context ranks wait for the busiest one. The result
        is that of this data rank's micro-batches in the next step.
        """
        step = self.progress.step + 1
        recipe = self.plan.at(step).recipe
        model, layout = recipe.model, recipe.layout
        if self.context_size == 1 or not recipe.data.separate_documents:
            return 1.0
        if layout.context_attention == "ulysses" or model.attention_dropout > 0:
            return 1.0  # each rank attends to whole sequences, or computes all scores of its rows
        most = total = 0
        samples_of_step = self.samples(step)
        for samples in self._shares(recipe, samples_of_step.start, len(samples_of_step)):
            lengths = self._document_lengths(recipe, self._windows(samples, step))
            work = rank_work(model.sequence_length, self.context_size, lengths)
            most, total = most + max(work), total + sum(work)
        return most * self.context_size / total

    def _windows(self, samples: range, step: int) -> list[tuple[Windows, int]]:
        """Return the windows of samples of a step."""
        places = self.places(np.arange(samples.start, samples.stop), step)
        sources = self.sources(step)
        return [(sources[source], index) for source, index in places]

    def _shares(self, recipe: Recipe, first: int, count: int) -> Iterator[range]:
        """Yield the samples of this data rank, of `count` from `first` on, per micro-batch."""
        size = recipe.batch.micro_sequences
        start = first + self.data_rank * size
        for sample in range(start, first + count, size * self.data_size):
            yield range(sample, sample + size)

    def _micro_batch(
        self, recipe: Recipe, windows: list[tuple[Windows, int]], dropout: MaskKey | None
    ) -> MicroBatch:
        documents, lengths = None, self._document_lengths(recipe, windows)
        if any(len(each) > 1 for each in lengths):  # otherwise attention needs no mask
            documents = Documents(lengths)
        division = self._division(recipe.model.sequence_length, documents)
        info = MicroBatchInfo(dropout, documents, division)
        if not self.takes_tokens:
            return MicroBatch(None, None, info)
        return MicroBatch(*self._read(windows, info.slices), info)

    def _document_lengths(self, recipe: Recipe, windows: list[tuple[Windows, int]]) -> Lengths:
        """Return the lengths of the documents in each window, one document if not separated."""
        if not recipe.data.separate_documents:
            return ((recipe.model.sequence_length,),) * len(windows)
        return tuple(corpus.document_lengths(index) for corpus, index in windows)

    def _division(self, length: int, documents: Documents | None) -> Division | None:
        """Return the division of sequences with these documents among the context ranks."""
        if self.context_size == 1:
            return None
        lengths = documents.lengths if documents else None
        return divide(length, self.context_rank, self.context_size, lengths)

    def _read(
        self, windows: list[tuple[Windows, int]], slices: Slices | None
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and labels, each [b, s], or [b, s/c] on one of c context ranks."""
        parts = [self._read_slice(windows, positions) for positions in slices or (None,)]
        tokens = torch.cat([part[:, :-1] for part in parts], dim=1)
        return tokens, torch.cat([part[:, 1:] for part in parts], dim=1)

    def _read_slice(self, windows: list[tuple[Windows, int]], positions: range | None) -> Tensor:
        """Return some tokens of each window and the token after them: int64 [b, n + 1]."""
        read = [corpus.read(index, positions) for corpus, index in windows]
        tokens = torch.from_numpy(np.stack(read).astype(np.int64))
        wrong = ((tokens < 0) | (tokens >= self.vocab_size)).nonzero()
        if len(wrong):
            (row, column), (corpus, index) = wrong[0].tolist(), windows[int(wrong[0, 0])]
            place = index * corpus.sequence_length + (positions.start if positions else 0) + column
            raise UserError(
                f"{corpus.file.path}.bin: token {place} has the id {tokens[row, column]} and "
                f"model.vocab_size is {self.vocab_size}; use the size of the tokenizer that made it"
            )
        return tokens
