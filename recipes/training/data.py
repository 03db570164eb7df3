"""Token files -> micro-batches; a pure function of (recipe, progress, step), whatever the layout.

A corpus is cut into windows of sequence_length + 1 tokens, each overlapping the next by one.
Sample n of the run is a window chosen by the seed alone, a step reads the next G samples of a
global batch of G, and ranks divide these among themselves. Step k (from 1) reads the samples
(k - 1) G .. k G - 1, unless the run has been resumed with another batch; then it goes on from the
sample where the old one ended.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.training.progress import Progress
from recipes.training.recipe import Recipe, repository_path
from recipes.training.token_file import TokenFile
from recipes.training.topology import Topology

Batch = tuple[Tensor, Tensor]  # tokens [b, s] and labels [b, s], the tokens one place on
BLOCKS, BLOCK_BYTES = 256, 2**12  # of a file, spread evenly, that its fingerprint covers


class Windows:
    """A token file as windows of `sequence_length` inputs and their labels."""

    def __init__(self, file: TokenFile, sequence_length: int):
        self.file, self.sequence_length = file, sequence_length
        self.count = (len(file.tokens) - 1) // sequence_length
        if self.count < 1:
            raise ValueError(
                f"{file.path}.bin has {len(file.tokens)} tokens, less than one window of "
                f"model.sequence_length = {sequence_length}; use more text or shorter sequences"
            )

    def read(self, index: int) -> np.ndarray:
        """The [s + 1] tokens of a window."""
        start = index * self.sequence_length
        return self.file.tokens[start : start + self.sequence_length + 1].astype(np.int64)


class TrainingData:
    """What this data rank reads, training and validation.

    Raises:
        ValueError: token files, manifest, tokenizer and recipe do not fit each other.
    """

    def __init__(self, recipe: Recipe, topology: Topology, data_rank: int):
        for path in (*(source.path for source in recipe.data.train), recipe.data.validation):
            _check_manifest(recipe, repository_path(path))
        length = recipe.model.sequence_length
        self.sources = [
            Windows(TokenFile(repository_path(source.path)), length) for source in recipe.data.train
        ]
        self.weights = [source.weight for source in recipe.data.train]
        self.validation = Windows(TokenFile(repository_path(recipe.data.validation)), length)
        self.seed, self.vocab_size = recipe.seed, recipe.model.vocab_size
        self.micro_sequences = recipe.batch.micro_sequences
        self.global_sequences = recipe.batch.global_sequences
        self.data_rank, self.data_size = data_rank, topology.data
        self.evaluation_batches = recipe.training.evaluation_batches
        self.fingerprint = fingerprint(recipe)
        self.progress = Progress()
        needed = self.evaluation_batches * self.global_sequences
        if recipe.training.evaluate_every and needed > self.validation.count:
            most = self.validation.count // self.global_sequences
            works = (
                f"training.evaluation_batches = {most}" if most else "training.evaluate_every = 0"
            )
            raise ValueError(
                f"training.evaluation_batches = {self.evaluation_batches} of "
                f"batch.global_sequences = {self.global_sequences} need {needed} windows and "
                f"{recipe.data.validation} has {self.validation.count}; use {works}"
            )

    def resume(self, progress: Progress) -> None:
        """Go on where a run had come; the next step reads the next sample."""
        self.progress = progress

    def progress_after(self, step: int) -> Progress:
        """How far the run is after a step."""
        return Progress(step, self.progress.samples_after(step, self.global_sequences))

    def samples(self, step: int) -> list[range]:
        """The run's samples in this data rank's micro-batches of training step 1, 2, ..."""
        first = self.progress.samples_after(step - 1, self.global_sequences)
        return list(self._shares(first, self.global_sequences))

    def step(self, step: int) -> Iterator[Batch]:
        """The micro-batches of training step 1, 2, ..."""
        for samples in self.samples(step):
            yield self._batch([self.training_window(sample) for sample in samples])

    def evaluation(self) -> Iterator[Batch]:
        """The micro-batches of one validation: always the same windows, evenly over the file."""
        windows, count = self.validation, self.evaluation_batches * self.global_sequences
        for samples in self._shares(0, count):
            yield self._batch([windows.read(n * windows.count // count) for n in samples])

    def training_window(self, sample: int) -> np.ndarray:
        """The [s + 1] tokens of the run's sample: which source, then which of its windows."""
        source, place = choose_source(sample, self.weights)
        epoch, index = divmod(place, self.sources[source].count)
        key = f"{self.seed}/{source}/{epoch}"
        return self.sources[source].read(permuted(index, self.sources[source].count, key))

    def _shares(self, first: int, count: int) -> Iterator[range]:
        """This data rank's samples of first .. first + count - 1, one micro-batch at a time."""
        stride = self.micro_sequences * self.data_size
        start = first + self.data_rank * self.micro_sequences
        for sample in range(start, first + count, stride):
            yield range(sample, sample + self.micro_sequences)

    def _batch(self, windows: list[np.ndarray]) -> Batch:
        tokens = torch.from_numpy(np.stack(windows))  # [b, s + 1]
        if int(tokens.max()) >= self.vocab_size:
            raise ValueError(
                f"the corpus has token id {int(tokens.max())} and model.vocab_size is "
                f"{self.vocab_size}; use the size of the tokenizer that made it"
            )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def choose_source(sample: int, weights: Sequence[float]) -> tuple[int, int]:
    """The source of a sample, and how many samples that source gave before it.

    Source after source takes its share of what the ones before it left, rounded to the nearest
    whole number at every prefix of the run.
    """
    for source in range(len(weights) - 1):
        share = weights[source] / sum(weights[source:])
        before, after = int(sample * share + 0.5), int((sample + 1) * share + 0.5)
        if after > before:
            return source, before
        sample -= before
    return len(weights) - 1, sample


def permuted(index: int, size: int, key: str) -> int:
    """Where `index` goes in a permutation of 0 .. size - 1 that `key` chooses.

    A four-round Feistel network over the next even number of bits, walked until it lands inside
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): nothing to build or store.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        index = left << half | right
        if index < size:
            return index


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """What decides which tokens a run reads, wherever the files lie.

    A corpus counts by the sizes of its two files and by blocks spread over them, the ends included:
    reading all of it would delay the start of every run.
    """
    sources = {}
    for number, source in enumerate(recipe.data.train):
        content = _content(repository_path(source.path))
        sources[str(number)] = {"content": content, "weight": source.weight}
    tokenizer = tokenizer_hash(repository_path(recipe.data.tokenizer))
    return {"tokenizer": tokenizer, "train": sources}


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


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 of a tokenizer's `tokenizer.json`, which alone decides the ids."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def _check_manifest(recipe: Recipe, path: Path) -> None:
    """Compare a token file's manifest, where there is one, with the recipe."""
    manifest_file = path.with_name("manifest.json")
    tokenizer = repository_path(recipe.data.tokenizer)
    if not (tokenizer / "tokenizer.json").is_file():
        raise ValueError(
            f'data.tokenizer = "{recipe.data.tokenizer}": no tokenizer.json there; '
            f"make it with recipes/prepare_data.py"
        )
    if not manifest_file.is_file():
        return  # a corpus that Megatron's tools prepared
    manifest = json.loads(manifest_file.read_text())
    if manifest["vocab_size"] > recipe.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {recipe.model.vocab_size} is smaller than the vocabulary of "
            f"{path}, {manifest['vocab_size']}; use model.vocab_size = {manifest['vocab_size']}"
        )
    if manifest["tokenizer_sha256"] != tokenizer_hash(tokenizer):
        raise ValueError(
            f'data.tokenizer = "{recipe.data.tokenizer}" is not the tokenizer that made {path}; '
            f"use {manifest['tokenizer']}, or prepare the corpus again"
        )
