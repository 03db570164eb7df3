"""Token files -> micro-batches: a pure function of (recipe, progress, step) in every layout.

A corpus is cut into windows of sequence_length + 1 tokens, each overlapping the next by one token.
The seed alone decides which window is sample n of the run. A step reads the next G samples, where G
is the global batch, and the data ranks divide them. Step k (from 1) reads the samples (k - 1) G ..
k G - 1, unless the run was resumed with another batch: it then continues with the sample after the
last one that the old batch read.

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
from recipes.training.data.mixing import choose_sources, permuted
from recipes.training.data.token_file import TokenFile
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.progress import Progress


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

    Stages that hold neither the first nor the last layer get micro-batches without tokens.

    Raises:
        UserError: token files, manifest, tokenizer and recipe do not fit each other.
    """

    def __init__(self, recipe: Recipe, topology: Topology, rank: int):
        length = recipe.model.sequence_length
        corpora = [open_corpus(source.path, recipe) for source in recipe.data.train]
        self.sources = [Windows(corpus, length) for corpus in corpora]
        self.weights = [source.weight for source in recipe.data.train]
        self.validation = Windows(open_corpus(recipe.data.validation, recipe), length)
        self.seed, self.vocab_size = recipe.seed, recipe.model.vocab_size
        self.micro_sequences = recipe.batch.micro_sequences
        self.global_sequences = recipe.batch.global_sequences
        self.separate_documents = recipe.data.separate_documents
        coordinates = topology.coordinates(rank)
        self.data_rank, self.data_size = coordinates.data, topology.data
        self.context_rank, self.context_size = coordinates.context, topology.context
        self.takes_tokens = coordinates.pipeline in recipe.layout.ends
        self.evaluation_batches = recipe.training.evaluation_batches
        self.recipe = recipe
        self.progress = Progress()
        check_document_starts(recipe)
        self._check_validation()

    def _check_validation(self) -> None:
        """Reject a validation file with fewer windows than one validation reads."""
        count, needed = self.validation.count, self.evaluation_batches * self.global_sequences
        if not self.recipe.training.evaluate_every or needed <= count:
            return
        most = count // self.global_sequences
        works = f"training.evaluation_batches = {most}" if most else "training.evaluate_every = 0"
        raise UserError(
            f"training.evaluation_batches = {self.evaluation_batches} of "
            f"batch.global_sequences = {self.global_sequences} need {needed} windows and "
            f"{self.recipe.data.validation} has {count}; use {works}"
        )

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides which samples the run reads; reads the files on first use."""
        return fingerprint(self.recipe)

    def resume(self, progress: Progress) -> None:
        """Continue from where a run stopped; the next step reads the next sample."""
        self.progress = progress

    def progress_after(self, step: int) -> Progress:
        """Return the progress of the run after a step."""
        return Progress(step, self.progress.samples_after(step, self.global_sequences))

    def samples(self, step: int) -> range:
        """Return the run's samples that training step 1, 2, ... reads, on all ranks."""
        first = self.progress.samples_after(step - 1, self.global_sequences)
        return range(first, first + self.global_sequences)

    def step(self, step: int) -> Iterator[MicroBatch]:
        """Yield this data rank's micro-batches of training step 1, 2, ..."""
        for samples in self._shares(self.samples(step).start, self.global_sequences):
            yield self._micro_batch(self._windows(samples), MaskKey(self.seed, samples))

    def evaluation(self) -> Iterator[MicroBatch]:
        """Yield this data rank's micro-batches of one validation, without dropout.

        The windows are always the same, spread evenly over the file.
        """
        corpus, count = self.validation, self.evaluation_batches * self.global_sequences
        for samples in self._shares(0, count):
            windows = [(corpus, n * corpus.count // count) for n in samples]
            yield self._micro_batch(windows, None)

    def places(self, samples: np.ndarray) -> list[tuple[int, int]]:
        """Return (corpus, window of the corpus) for each of the run's samples."""
        sources, turns = choose_sources(samples, self.weights)
        windows = np.empty_like(turns)
        for source, corpus in enumerate(self.sources):
            own = np.flatnonzero(sources == source)
            epochs, indices = np.divmod(turns[own], corpus.count)
            for epoch in np.unique(epochs).tolist():
                chosen = own[epochs == epoch]
                key = f"{self.seed}/{source}/{epoch}"
                windows[chosen] = permuted(indices[epochs == epoch], corpus.count, key)
        return list(zip(sources.tolist(), windows.tolist(), strict=True))

    def context_imbalance(self) -> float:
        """Return the work in attention of the busiest context rank, relative to the mean.

        1.0 is perfect: in each layer, the other context ranks wait for the busiest one. The result
        is that of this data rank's micro-batches in step 1.
        """
        model, layout = self.recipe.model, self.recipe.layout
        if self.context_size == 1 or not self.separate_documents:
            return 1.0
        if layout.context_attention == "ulysses" or model.attention_dropout > 0:
            return 1.0  # each rank attends to whole sequences, or computes all scores of its rows
        most = total = 0
        for samples in self._shares(0, self.global_sequences):
            lengths = self._document_lengths(self._windows(samples))
            work = rank_work(self.validation.sequence_length, self.context_size, lengths)
            most, total = most + max(work), total + sum(work)
        return most * self.context_size / total

    def _windows(self, samples: range) -> list[tuple[Windows, int]]:
        """Return the windows of the run's samples."""
        places = self.places(np.arange(samples.start, samples.stop))
        return [(self.sources[source], index) for source, index in places]

    def _shares(self, first: int, count: int) -> Iterator[range]:
        """Yield the samples of this data rank, of `count` from `first` on, per micro-batch."""
        stride = self.micro_sequences * self.data_size
        start = first + self.data_rank * self.micro_sequences
        for sample in range(start, first + count, stride):
            yield range(sample, sample + self.micro_sequences)

    def _micro_batch(
        self, windows: list[tuple[Windows, int]], dropout: MaskKey | None
    ) -> MicroBatch:
        documents, lengths = None, self._document_lengths(windows)
        if any(len(each) > 1 for each in lengths):  # otherwise attention needs no mask
            documents = Documents(lengths)
        info = MicroBatchInfo(dropout, documents, self._division(documents))
        if not self.takes_tokens:
            return MicroBatch(None, None, info)
        return MicroBatch(*self._read(windows, info.slices), info)

    def _document_lengths(self, windows: list[tuple[Windows, int]]) -> Lengths:
        """Return the lengths of the documents in each window, one document if not separated."""
        if not self.separate_documents:
            return ((self.validation.sequence_length,),) * len(windows)
        return tuple(corpus.document_lengths(index) for corpus, index in windows)

    def _division(self, documents: Documents | None) -> Division | None:
        """Return the division of sequences with these documents among the context ranks."""
        if self.context_size == 1:
            return None
        lengths = documents.lengths if documents else None
        length = self.validation.sequence_length
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
