"""Token files -> micro-batches: a pure function of (recipe, progress, step) in every layout.

A corpus is cut into windows of sequence_length + 1 tokens, each overlapping the next by one token.
The seed and the phases alone decide which window is sample n of the run (`sample_order.py`). A step
reads the next G samples, where G is the global batch of the step, and the data ranks divide them.
Step k (from 1) of a recipe with one batch size reads the samples (k - 1) G .. k G - 1. If the run
was resumed with another batch, it continues with the sample after the last one read.

A window may cross the ends of documents. With data.separate_documents, each micro-batch's `info`
contains the lengths of its documents, which come from the token file's index. Therefore no stage
has to read or send tokens to know them. A document that begins before its window counts from the
window's first token.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.context_parallel.division import Lengths, Slices, rank_work
from models.errors import UserError, a_few, counted
from models.parallel.micro_batch_info import MaskKey, MicroBatchInfo
from threefold.config.parallel_dims import ParallelDims
from threefold.config.phases import PhasePlan, Segment
from threefold.config.recipe import Recipe
from threefold.config.sections import repository_path, whole_shares
from threefold.data.corpus import check_document_starts, fingerprint, open_corpus, token_bytes
from threefold.data.manifest import few_tokens, read_manifest
from threefold.data.sample_order import Mixture, mixture_after, source_numbers
from threefold.data.tasks import Tasks, open_tasks
from threefold.data.token_file import TokenFile
from threefold.run_folder.history import LeftParts, Progress

# The micro-batch, which flows through the model in one forward pass.


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of the run.

    tokens: int64 [b, s]; None on a stage that takes no tokens
    labels: the next token of each token, int64 [b, s]; in the training of a model that predicts D
        further tokens, the next 1 + D tokens, [b, s, 1 + D], or -1 where a further token does not
        count; None if tokens are None
    info: what all layers need: the dropout key, the documents, and the slices of a context rank
    """

    tokens: Tensor | None
    labels: Tensor | None
    info: MicroBatchInfo

    def pinned(self) -> "MicroBatch":
        """Return a copy in page-locked memory, which a GPU reads without the host."""
        if self.tokens is None or self.labels is None:
            return self
        return replace(self, tokens=self.tokens.pin_memory(), labels=self.labels.pin_memory())

    def on(self, device: torch.device) -> "MicroBatch":
        """Return a copy on a device; from page-locked memory, kernels run during the copy."""
        if self.tokens is None or self.labels is None:
            return self
        tokens, labels = (t.to(device, non_blocking=True) for t in (self.tokens, self.labels))
        return replace(self, tokens=tokens, labels=labels)


class SequenceView:
    """A token file as windows of `sequence_length` inputs and their labels."""

    def __init__(self, file: TokenFile, sequence_length: int):
        self.file, self.sequence_length = file, sequence_length
        self.count = (file.count - 1) // sequence_length
        if self.count < 1:
            options = read_manifest(file.path.parent).get("options", {})
            raise UserError(
                f"{file.path}.bin has {counted(file.count, 'token')}, and a window of "
                f"model.sequence_length = {sequence_length} needs {sequence_length + 1}; "
                f"{few_tokens(file.path.name, file.count, options)}"
            )

    def read(self, index: int, positions: range | None = None, *, further: int = 0) -> np.ndarray:
        """Return the tokens at n positions of a window, and the token after them: [n + 1].

        Args:
            positions: successive positions in the window; None: all positions
            further: number of tokens to add, also beyond the window; the file may have fewer
        """
        positions = positions or range(self.sequence_length)
        start = index * self.sequence_length
        stop = start + positions.stop + 1
        further = max(0, min(further, self.file.count - stop))
        return self.file.read(start + positions.start, stop + further)

    def document_lengths(self, index: int) -> tuple[int, ...]:
        """Return the lengths of the documents in a window's inputs."""
        start = index * self.sequence_length
        return self.file.document_lengths(start, start + self.sequence_length)

    def same_document(self, index: int, further: int) -> np.ndarray:
        """Return True where the token k positions later is of the same document: [s, further].

        The columns are those of k = 1, 2, ..., `further`. Tokens beyond the end of the file are of
        no document.
        """
        start, s = index * self.sequence_length, self.sequence_length
        stop = min(start + s + further, self.file.count)
        lengths = self.file.document_lengths(start, stop)
        numbers = np.full(s + further, -1)
        numbers[: stop - start] = np.repeat(np.arange(len(lengths)), lengths)
        return np.stack([numbers[k : k + s] == numbers[:s] for k in range(1, further + 1)], axis=1)


class TrainingData:
    """The micro-batches of a rank, in training and in evaluations.

    Stages of the pipeline that hold neither the first nor the last layer get micro-batches without
    tokens.

    Raises:
        UserError: token files, manifest, tokenizer and recipe do not fit each other.
    """

    def __init__(self, recipe: Recipe, dims: ParallelDims, rank: int):
        self.recipe, self.rank = recipe, rank
        self.phase_plan = PhasePlan(recipe)
        self._opened: dict[tuple[str, int], SequenceView] = {}
        self._tasks: dict[tuple[Any, ...], Tasks] = {}
        self._sources: dict[int, dict[int, SequenceView]] = {}  # by the first step of a segment
        self.numbers = source_numbers(self.phase_plan)
        for segment in self.phase_plan.segments:
            with self.phase_plan.naming(segment):
                self._open(segment, dims.world_size)
        self.seed, self.vocab_size = recipe.seed, recipe.model.vocab_size
        self.resume(Progress(), dims)

    def _open(self, segment: Segment, ranks: int) -> None:
        """Open the corpora of a segment, and check them together with the other ranks."""
        recipe = segment.recipe
        training = (source.path for source in recipe.data.train)
        for path in (*training, *recipe.data.validation_sets.values()):
            key = path, recipe.model.sequence_length
            if key not in self._opened:
                opened = [view.file for (other, _), view in self._opened.items() if other == path]
                file = (
                    opened[0] if opened else open_corpus(path, recipe, rank=self.rank, ranks=ranks)
                )
                self._opened[key] = SequenceView(file, recipe.model.sequence_length)
        self._sources[segment.first] = {
            self.numbers[str(repository_path(source.path))]: self._opened[
                source.path, recipe.model.sequence_length
            ]
            for source in recipe.data.train
        }
        check_document_starts(recipe)

    @property
    def phase_recipe(self) -> Recipe:
        """The recipe for evaluations: that of the step that `use_phase_of` was given last."""
        return self.phase_plan.at(self._evaluated_step).recipe

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence in evaluations."""
        return self.phase_recipe.model.sequence_length

    @property
    def separate_documents(self) -> bool:
        """True if attention in evaluations does not cross the ends of documents."""
        return self.phase_recipe.data.separate_documents

    @property
    def validation(self) -> dict[str, SequenceView]:
        """Name -> validation set; the name of a single path is ""."""
        recipe = self.phase_recipe
        length = recipe.model.sequence_length
        return {
            name: self._opened[path, length] for name, path in recipe.data.validation_sets.items()
        }

    def use_phase_of(self, step: int) -> None:
        """Let validations and evaluations of tasks use the settings of a step's phase."""
        self._evaluated_step = step

    def sources(self, step: int = 1) -> dict[int, SequenceView]:
        """Return number -> corpus, as the windows of a step."""
        return self._sources[self.phase_plan.at(step).first]

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the data that the run reads; hashes the files on first use."""
        return fingerprint(self.recipe)

    def check_index(self) -> None:
        """Raise what this rank has found in its part of a large index, which only it has read.

        Raises:
            UserError: the index is damaged.
        """
        for view in self._opened.values():
            if view.file.damage:
                raise view.file.damage

    def check_unchanged(self) -> None:
        """Check that the training data still have the fingerprint of the run's start.

        It is computed again only if a file has been written since it was opened.

        Raises:
            UserError: the fingerprint has changed.
        """
        views = [view for sources in self._sources.values() for view in sources.values()]
        written = {str(view.file.path) for view in views if view.file.is_written}
        if written and fingerprint(self.recipe) != self.fingerprint:
            raise UserError(
                f"{a_few(sorted(written))}: the tokens have been overwritten since the run began; "
                f"restore them, and rerun the same command to resume"
            )

    def resume(self, progress: Progress, dims: ParallelDims | None = None) -> None:
        """Continue from where a run stopped; the next step reads the next sample.

        Args:
            dims: the layout of the next steps; None if it stays the same
        """
        self.progress = progress
        self.use_phase_of(progress.step + 1)
        self._mixtures: dict[tuple[LeftParts, int], Mixture] = {}
        if dims is None:
            return
        coordinates = dims.coordinates(self.rank)
        self.data_rank, self.data_size = coordinates.data, dims.data
        self.context_rank, self.context_size = coordinates.context, dims.context
        layout = self.phase_plan.at(progress.step + 1).recipe.layout
        self.takes_tokens = coordinates.pipeline in layout.ends

    def progress_after(self, step: int) -> Progress:
        """Return the progress of the run after a step."""
        return self.progress.after(step, self.phase_plan)

    def samples(self, step: int) -> range:
        """Return the run's samples that training step 1, 2, ... reads, on all ranks."""
        first = self.progress.after(step - 1, self.phase_plan).samples
        return range(first, first + self.phase_plan.at(step).recipe.batch.global_sequences)

    def epochs(self, step: int) -> dict[str, float]:
        """Return how often each corpus has been read after a step, by its path.

        A mixture reads each corpus to within one sample of its share. With phases, an epoch is
        counted in windows of each phase's length.
        """
        shares: dict[str, float] = {}
        for consumed in self.progress_after(step).consumed_ranges(self.phase_plan):
            recipe = self.phase_plan.first_of_part(consumed.part).recipe
            per_period = whole_shares([source.weight for source in recipe.data.train])
            for source, share in zip(recipe.data.train, per_period, strict=True):
                windows = self._opened[source.path, recipe.model.sequence_length].count
                samples = (consumed.stop - consumed.first) * share / sum(per_period)
                shares[source.path] = shares.get(source.path, 0.0) + samples / windows
        return shares

    def epoch(self, step: int) -> float:
        """Return how often the corpus that has been read most often has been read after a step."""
        return max(self.epochs(step).values(), default=0.0)

    def repeated(self, step: int) -> list[str]:
        """Return the corpora whose second epoch begins in a step."""
        before, after = self.epochs(step - 1), self.epochs(step)
        return [path for path, epochs in after.items() if before.get(path, 0.0) <= 1 < epochs]

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield this data rank's micro-batches of training step 1, 2, ..."""
        recipe, samples = self.phase_plan.at(step).recipe, self.samples(step)
        for share in self._shares(recipe, samples.start, len(samples), self._groups_per_turn(step)):
            windows = self._windows(share, step)
            further = recipe.model.prediction_depth
            yield self._micro_batch(recipe, windows, MaskKey(self.seed, share), further=further)

    def validation_windows(self, name: str) -> list[int]:
        """Return the windows that each validation reads from a set, spread evenly over its file.

        Each set is validated over `training.evaluation_batches` global batches, or as a whole if it
        has fewer windows. They are full batches of the first phase, so that a ramp or a later phase
        with another batch does not change the windows.
        """
        corpus, recipe = self.validation[name], self.recipe
        wanted = recipe.training.evaluation_batches * recipe.batch.global_sequences
        count = min(wanted, corpus.count)
        return [n * corpus.count // count for n in range(count)]

    def evaluation(self, name: str = "") -> Iterator[MicroBatch]:
        """Yield this data rank's micro-batches of one validation, without dropout.

        If the windows do not fill the last global batch, the first window is repeated.

        name: name of the validation set; "" if `data.validation` is a single path
        """
        corpus, windows = self.validation[name], self.validation_windows(name)
        for samples in self.evaluation_samples(len(windows)):
            chosen = [windows[n] if n < len(windows) else windows[0] for n in samples]
            yield self._micro_batch(
                self.phase_recipe, [(corpus, window) for window in chosen], None
            )

    @property
    def tasks(self) -> Tasks:
        """The tasks of the recipe; reads and tokenises their files on first use."""
        return self._tasks_of(self.phase_recipe)

    @tasks.setter
    def tasks(self, tasks: Tasks) -> None:
        self._tasks[_encoding_of(self.phase_recipe)] = tasks

    def _tasks_of(self, recipe: Recipe) -> Tasks:
        key = _encoding_of(recipe)
        if key not in self._tasks:
            self._tasks[key] = open_tasks(recipe)
        return self._tasks[key]

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text per token, int64 [vocabulary]; None if the tokenizer has no such table."""
        folder = repository_path(self.recipe.data.tokenizer)
        return token_bytes(folder, self.vocab_size)

    def open_evaluation(self) -> None:
        """Read everything that evaluations need, so that mistakes are reported at the start.

        Raises:
            UserError: a task or the tokenizer cannot be used.
        """
        if self.recipe.training.evaluate_every:
            _ = self.token_bytes
        for segment in self.phase_plan.segments:
            with self.phase_plan.naming(segment):
                self._tasks_of(segment.recipe)

    def task_windows(self) -> Iterator[MicroBatch]:
        """Yield this data rank's micro-batches of one evaluation of the tasks, without dropout."""
        tasks = self.tasks
        for rows in self.evaluation_samples(len(tasks.windows)):
            info = self.info(tasks.lengths(rows))
            if not self.takes_tokens:
                yield MicroBatch(None, None, info)
                continue
            tokens, labels = tasks.tokens(rows, info.slices)
            yield MicroBatch(torch.from_numpy(tokens), torch.from_numpy(labels), info)

    def two_documents(self) -> MicroBatch:
        """Return a micro-batch of two documents per sequence, with the token 0 everywhere."""
        length, rows = self.sequence_length, self.phase_recipe.batch.micro_sequences
        info = self.info(((length // 2, length - length // 2),) * rows)
        if not self.takes_tokens:
            return MicroBatch(None, None, info)
        tokens = torch.zeros(rows, length // self.context_size, dtype=torch.int64)
        return MicroBatch(tokens, tokens, info)

    def evaluation_samples(self, count: int) -> Iterator[range]:
        """Yield the numbers of this data rank's sequences in an evaluation, per micro-batch.

        count: sequences of the evaluation on all ranks; they are filled up to whole global batches,
            because a pipeline runs whole batches
        """
        recipe = self.phase_recipe
        batches = -(-count // recipe.batch.global_sequences)
        return self._shares(recipe, 0, batches * recipe.batch.global_sequences)

    def places(self, samples: np.ndarray, step: int = 1) -> list[tuple[int, int]]:
        """Return (number of the corpus, window) for samples of the part of the data of a step."""
        return self._mixture(step).places(samples)

    def _mixture(self, step: int) -> Mixture:
        """Return the mixture that a step reads."""
        before = self.progress.after(step - 1, self.phase_plan)
        part = self.phase_plan.at(step).part
        is_new = part != self.phase_plan.at(before.step).part
        left = (before.left(self.phase_plan) if is_new else before).left_parts
        if (left, part) not in self._mixtures:
            begin = left[-1].samples if left else 0
            consumed_ranges = Progress(before.step, begin, left).consumed_ranges(self.phase_plan)
            tokens = {
                self.numbers[path]: windows.file.count
                for (name, _), windows in self._opened.items()
                if (path := str(repository_path(name))) in self.numbers
            }
            self._mixtures[left, part] = mixture_after(
                self.phase_plan, consumed_ranges, part=part, begin=begin, tokens=tokens
            )
        return self._mixtures[left, part]

    def context_imbalance(self) -> float:
        """Return the work in attention of the busiest context rank, relative to the mean.

        1.0 is perfect: in each layer, the other context ranks wait for the busiest one. The result
        is that of this data rank's micro-batches in the next step.
        """
        step = self.progress.step + 1
        recipe = self.phase_plan.at(step).recipe
        model, layout = recipe.model, recipe.layout
        if self.context_size == 1 or not recipe.data.separate_documents:
            return 1.0
        if layout.context_attention == "ulysses" or model.attention_dropout > 0:
            return 1.0  # each rank attends to whole sequences, or computes all scores of its rows
        most = total = 0
        samples_of_step = self.samples(step)
        first, count = samples_of_step.start, len(samples_of_step)
        for samples in self._shares(recipe, first, count, self._groups_per_turn(step)):
            lengths = self._document_lengths(recipe, self._windows(samples, step))
            work = rank_work(model.sequence_length, self.context_size, lengths)
            most, total = most + max(work), total + sum(work)
        return most * self.context_size / total

    def _windows(self, samples: range, step: int) -> list[tuple[SequenceView, int]]:
        """Return the windows of samples of a step."""
        sources = self.sources(step)
        places = self._mixture(step).places_of(samples)
        return [(sources[source], index) for source, index in places]

    def _shares(
        self, recipe: Recipe, first: int, count: int, groups_per_turn: int = 0
    ) -> Iterator[range]:
        """Yield the samples of this data rank, of `count` from `first` on, per micro-batch.

        Args:
            groups_per_turn: groups, of one micro-batch per data rank, after which each rank takes
                the next place in a group; 0: never
        """
        size = recipe.batch.micro_sequences
        group_size = size * self.data_size
        for group in range(first, first + count, group_size):
            turns = group // group_size // groups_per_turn if groups_per_turn else 0
            sample = group + (self.data_rank + turns) % self.data_size * size
            yield range(sample, sample + size)

    def _groups_per_turn(self, step: int) -> int:
        """Return the `groups_per_turn` of a step's mixture.

        The corpora repeat after a period. If its length and the number of data ranks have a common
        factor, a rank in a fixed place would always read the same ones of the period's samples, for
        example only one of two corpora. It would be slow in every step if their documents are
        longer, since attention to them costs more.
        """
        period = sum(whole_shares(self._mixture(step).weights))
        period //= math.gcd(period, self.phase_plan.at(step).recipe.batch.micro_sequences)
        factor = math.gcd(period, self.data_size)
        return period // factor if factor > 1 else 0

    def _micro_batch(
        self,
        recipe: Recipe,
        windows: list[tuple[SequenceView, int]],
        dropout: MaskKey | None,
        *,
        further: int = 0,
    ) -> MicroBatch:
        """Return windows as a micro-batch.

        further: number of labels of a token besides the next token
        """
        info = self.info(self._document_lengths(recipe, windows), dropout)
        if not self.takes_tokens:
            return MicroBatch(None, None, info)
        tokens, labels = self._read(windows, info.slices, further)
        if not further:
            return MicroBatch(tokens, labels[..., 0], info)
        if recipe.data.separate_documents:
            counts = [corpus.same_document(index, further) for corpus, index in windows]
            together = torch.from_numpy(np.stack(counts))  # [b, s, D]
            if info.slices is not None:
                here = [together[:, held.start : held.stop] for held in info.slices]
                together = torch.cat(here, dim=1)
            labels[..., 1:].masked_fill_(~together, -1)
        return MicroBatch(tokens, labels, info)

    def info(self, lengths: Lengths, dropout: MaskKey | None = None) -> MicroBatchInfo:
        """Return the information about a micro-batch.

        Args:
            lengths: lengths of the documents in each sequence, which add up to its length
            dropout: the key of the masks; None: no dropout
        """
        context = self.context_rank, self.context_size
        return MicroBatchInfo.of_windows(lengths, *context, dropout=dropout)

    def _document_lengths(self, recipe: Recipe, windows: list[tuple[SequenceView, int]]) -> Lengths:
        """Return the lengths of the documents in each window, one document if not separated."""
        if not recipe.data.separate_documents:
            return ((recipe.model.sequence_length,),) * len(windows)
        return tuple(corpus.document_lengths(index) for corpus, index in windows)

    def _read(
        self, windows: list[tuple[SequenceView, int]], slices: Slices | None, further: int
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [b, s] and labels [b, s, 1 + further]; s/c on one of c context ranks.

        Labels beyond the end of the corpus are -1.
        """
        parts = [self._read_slice(windows, positions, further) for positions in slices or (None,)]
        shifted = [part.unfold(1, 2 + further, 1) for part in parts]  # [b, n, 2 + further]
        tokens = torch.cat([part[..., 0] for part in shifted], dim=1)
        return tokens, torch.cat([part[..., 1:] for part in shifted], dim=1)

    def _read_slice(
        self, windows: list[tuple[SequenceView, int]], positions: range | None, further: int
    ) -> Tensor:
        """Return some tokens of each window and those after them: int64 [b, n + 1 + further].

        Tokens beyond the end of the corpus are -1.
        """
        read = [corpus.read(index, positions, further=further) for corpus, index in windows]
        count = len(positions or range(windows[0][0].sequence_length)) + 1 + further
        tokens = np.full((len(windows), count), -1)
        for row, of_window in zip(tokens, read, strict=True):
            row[: len(of_window)] = of_window
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            self._check_ids(tokens, [len(of_window) for of_window in read], windows, positions)
        return torch.from_numpy(tokens)

    def _check_ids(
        self,
        tokens: np.ndarray,
        counts: list[int],
        windows: list[tuple[SequenceView, int]],
        positions: range | None,
    ) -> None:
        """Reject ids that are not in the vocabulary; the first `counts` of each row were read."""
        exists = np.arange(tokens.shape[1]) < np.array(counts)[:, None]
        wrong = np.argwhere(exists & ((tokens < 0) | (tokens >= self.vocab_size)))
        if len(wrong):
            row, column = wrong[0].tolist()
            corpus, index = windows[row]
            place = index * corpus.sequence_length + (positions.start if positions else 0) + column
            raise UserError(
                f"{corpus.file.path}.bin: token {place} has the id {tokens[row, column]} and "
                f"model.vocab_size is {self.vocab_size}; use the size of the tokenizer that made it"
            )


def _encoding_of(recipe: Recipe) -> tuple[Any, ...]:
    """Return the keys on which the tokens of tasks depend: corpora may begin documents with BOS."""
    return recipe.model.sequence_length, *(source.path for source in recipe.data.train)


# Reading of the next step's micro-batches in parallel with the current step.


class Prefetcher:
    """Reads micro-batches one step ahead of the run, in a thread.

    read: returns the micro-batches of a step
    last_step: the last step that is read
    pinned: whether to put them into page-locked memory, which a GPU reads without the host. `next`
        does this, between steps, because the allocation of such memory may wait for the whole
        device, and in the middle of a step for a posted receive.
    """

    def __init__(
        self, read: Callable[[int], Iterable[MicroBatch]], *, last_step: int, pinned: bool = False
    ):
        self.read, self.last_step, self.pinned = read, last_step, pinned
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetcher")
        self._coming: dict[int, Future[list[MicroBatch]]] = {}

    def next(self, step: int) -> tuple[list[MicroBatch], float]:
        """Return a step's micro-batches, and the seconds spent waiting for them.

        Raises:
            Exception: the exception that `read` raised: UserError or OSError for data that cannot
                be read, any other class for a defect.
        """
        started = time.perf_counter()
        coming = self._coming.pop(step, None) or self._thread.submit(self._fetch, step)
        micro_batches = coming.result()
        waited = time.perf_counter() - started
        if step < self.last_step:
            self._coming[step + 1] = self._thread.submit(self._fetch, step + 1)
        if self.pinned:
            micro_batches = [batch.pinned() for batch in micro_batches]
        return micro_batches, waited

    def reset(self) -> None:
        """Discard the micro-batches read ahead, because the run continues with another step."""
        for coming in self._coming.values():
            coming.exception()  # waits for the thread
        self._coming.clear()

    def _fetch(self, step: int) -> list[MicroBatch]:
        return list(self.read(step))
