"""Token files -> micro-batches; a pure function of (recipe, progress, step), whatever the layout.

A corpus is cut into windows of sequence_length + 1 tokens, each overlapping the next by one.
Sample n of the run is a window chosen by the seed alone, a step reads the next G samples of a
global batch of G, and ranks divide these among themselves. Step k (from 1) reads the samples
(k - 1) G .. k G - 1, unless the run has been resumed with another batch; then it goes on from the
sample where the old one ended.

A window goes across the ends of documents. With data.separate_documents they come along in each
micro-batch's context, from the token file's index, so that no stage has to read or send tokens
for them; a document that begins before its window counts from the window's first token.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.errors import UserError
from models.parallel.context import Context, Documents
from models.parallel.rng import MaskKey
from recipes.training.data.micro_batch import MicroBatch
from recipes.training.data.token_file import TokenFile, read_manifest, tokenizer_hash
from recipes.training.recipe.blend_weights import whole_shares
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.sections import repository_path
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.progress import Progress

ROUNDS = 6  # of the permutation; four are enough for it to be pseudorandom (Luby, Rackoff 1988)
BLOCKS, BLOCK_BYTES = 256, 2**12  # of a file, spread evenly, that its fingerprint covers
BLOCK_TOKENS = 2**12  # of as many blocks, that are looked at before a run


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

    def read(self, index: int) -> np.ndarray:
        """The [s + 1] tokens of a window."""
        start = index * self.sequence_length
        return self.file.read(start, start + self.sequence_length + 1)

    def document_lengths(self, index: int) -> tuple[int, ...]:
        """How a window's inputs divide into documents."""
        start = index * self.sequence_length
        return self.file.document_lengths(start, start + self.sequence_length)


class TrainingData:
    """What a rank is fed, in training and in validation: on stages between, contexts alone.

    Raises:
        UserError: token files, manifest, tokenizer and recipe do not fit each other.
    """

    def __init__(self, recipe: Recipe, topology: Topology, rank: int):
        self.sources = [_open(source.path, recipe) for source in recipe.data.train]
        self.weights = [source.weight for source in recipe.data.train]
        self.validation = _open(recipe.data.validation, recipe)
        self.seed, self.vocab_size = recipe.seed, recipe.model.vocab_size
        self.micro_sequences = recipe.batch.micro_sequences
        self.global_sequences = recipe.batch.global_sequences
        self.separate_documents = recipe.data.separate_documents
        place = topology.coordinates(rank)
        self.data_rank, self.data_size = place.data, topology.data
        self.takes_tokens = place.pipeline in recipe.layout.ends
        self.evaluation_batches = recipe.training.evaluation_batches
        self.recipe = recipe
        self.progress = Progress()
        _check_document_starts(recipe)
        needed = self.evaluation_batches * self.global_sequences
        if recipe.training.evaluate_every and needed > self.validation.count:
            most = self.validation.count // self.global_sequences
            works = (
                f"training.evaluation_batches = {most}" if most else "training.evaluate_every = 0"
            )
            raise UserError(
                f"training.evaluation_batches = {self.evaluation_batches} of "
                f"batch.global_sequences = {self.global_sequences} need {needed} windows and "
                f"{recipe.data.validation} has {self.validation.count}; use {works}"
            )

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What decides what the run reads; the files are looked at when it is asked for."""
        return fingerprint(self.recipe)

    def resume(self, progress: Progress) -> None:
        """Go on where a run had come; the next step reads the next sample."""
        self.progress = progress

    def progress_after(self, step: int) -> Progress:
        """How far the run is after a step."""
        return Progress(step, self.progress.samples_after(step, self.global_sequences))

    def samples(self, step: int) -> range:
        """The run's samples that training step 1, 2, ... reads, on all ranks."""
        first = self.progress.samples_after(step - 1, self.global_sequences)
        return range(first, first + self.global_sequences)

    def step(self, step: int) -> Iterator[MicroBatch]:
        """This data rank's micro-batches of training step 1, 2, ..."""
        for samples in self._shares(self.samples(step).start, self.global_sequences):
            places = self.places(np.arange(samples.start, samples.stop))
            windows = [(self.sources[source], index) for source, index in places]
            yield self._micro_batch(windows, MaskKey(self.seed, samples))

    def evaluation(self) -> Iterator[MicroBatch]:
        """Those of one validation: always the same windows, evenly over the file; no dropout."""
        corpus, count = self.validation, self.evaluation_batches * self.global_sequences
        for samples in self._shares(0, count):
            windows = [(corpus, n * corpus.count // count) for n in samples]
            yield self._micro_batch(windows, None)

    def places(self, samples: np.ndarray) -> list[tuple[int, int]]:
        """(source, window) of the run's samples: which corpus, then which of its windows."""
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

    def _shares(self, first: int, count: int) -> Iterator[range]:
        """This data rank's samples of first .. first + count - 1, one micro-batch at a time."""
        stride = self.micro_sequences * self.data_size
        start = first + self.data_rank * self.micro_sequences
        for sample in range(start, first + count, stride):
            yield range(sample, sample + self.micro_sequences)

    def _micro_batch(
        self, windows: list[tuple[Windows, int]], dropout: MaskKey | None
    ) -> MicroBatch:
        documents = None
        if self.separate_documents:
            lengths = tuple(corpus.document_lengths(index) for corpus, index in windows)
            if any(len(each) > 1 for each in lengths):  # otherwise whole sequences are the same
                documents = Documents(lengths)
        context = Context(dropout, documents)
        if not self.takes_tokens:
            return MicroBatch(None, None, context)
        return MicroBatch(*self._read(windows), context)

    def _read(self, windows: list[tuple[Windows, int]]) -> tuple[Tensor, Tensor]:
        """Tokens [b, s] and labels [b, s]."""
        read = [corpus.read(index) for corpus, index in windows]
        tokens = torch.from_numpy(np.stack(read).astype(np.int64))  # [b, s + 1]
        wrong = ((tokens < 0) | (tokens >= self.vocab_size)).nonzero()
        if len(wrong):
            (row, place), (corpus, index) = wrong[0].tolist(), windows[int(wrong[0, 0])]
            raise UserError(
                f"{corpus.file.path}.bin: token {index * corpus.sequence_length + place} has the "
                f"id {tokens[row, place]} and model.vocab_size is {self.vocab_size}; use the size "
                f"of the tokenizer that made it"
            )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def choose_sources(samples: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each sample, and how many samples that source gave before it; int64.

    After any number of samples, each source has given its share to less than one sample.
    """
    shares = whole_shares(weights)
    order, turns = one_period(shares)
    periods, places = np.divmod(samples.astype(np.int64), len(order))
    sources = order[places]
    return sources, periods * np.array(shares)[sources] + turns[places]


@lru_cache(maxsize=4)
def one_period(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The sources of a period's samples, and how many each gave in it before; int64.

    Tijdeman 1980, "The chairman assignment problem": of the sources that are behind by at least
    1 / (2 k - 2), the one that would first be behind by a whole sample. With k sources none is
    ever more than 1 - 1 / (2 k - 2) from its share.
    """
    period, parts = sum(shares), max(1, 2 * len(shares) - 2)
    share, given = np.array(shares), np.zeros(len(shares), np.int64)
    order, turns = np.empty(period, np.int64), np.empty(period, np.int64)
    for place in range(period):
        behind = parts * ((place + 1) * share - period * given)  # in 1 / (parts * period) samples
        left = np.where(behind >= period, (period * (parts - 1) - behind) / share, np.inf)
        source = int(left.argmin())
        order[place], turns[place] = source, given[source]
        given[source] += 1
    return order, turns


def permuted(indices: np.ndarray, size: int, key: str) -> np.ndarray:
    """Where `indices` go in a permutation of 0 .. size - 1 that `key` chooses; int64.

    A Feistel network over the next even number of bits, walked until it lands inside (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains"): nothing to build or store. Its round
    function is the finaliser of SplitMix64 (Steele et al. 2014).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    places = indices.astype(np.uint64)
    outside = np.arange(len(places))
    while len(outside):
        left, right = places[outside] >> half, places[outside] & mask
        for turn in range(ROUNDS):
            mixed = right + keys[turn]
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        places[outside] = left << half | right
        outside = outside[places[outside] >= size]
    return places.astype(np.int64)


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """What decides what a run reads, wherever the files lie.

    A corpus counts by the sizes of its two files and by blocks spread over them, the ends included:
    reading all of it would delay the start of every run.
    """
    sources = {}
    for number, source in enumerate(recipe.data.train):
        content = _content(repository_path(source.path))
        sources[str(number)] = {"content": content, "weight": source.weight}
    tokenizer = tokenizer_hash(repository_path(recipe.data.tokenizer))
    return {
        "tokenizer": tokenizer,
        "train": sources,
        "separate_documents": recipe.data.separate_documents,
        "document_starts": document_starts(recipe),
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
    chosen = {number * (count - 1) // (BLOCKS - 1) for number in range(BLOCKS)}
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


def _open(path: str, recipe: Recipe) -> Windows:
    """A corpus of the recipe, compared with its manifest, the tokenizer and the model."""
    tokenizer = repository_path(recipe.data.tokenizer)
    if not (tokenizer / "tokenizer.json").is_file():
        raise UserError(
            f'data.tokenizer = "{recipe.data.tokenizer}": no tokenizer.json there; '
            f"make it with recipes/prepare_data.py"
        )
    file = TokenFile(repository_path(path))
    _check_manifest(recipe, file)
    _check_tokens(recipe, file)
    return Windows(file, recipe.model.sequence_length)


def _check_manifest(recipe: Recipe, file: TokenFile) -> None:
    """Compare a token file's manifest, where there is one, with the file and the recipe.

    Raises:
        UserError: the manifest is damaged, or says something else than the file or the recipe.
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
            f"{manifest_file} is not a manifest of prepare_data.py ({error!r}); prepare the corpus "
            f"again"
        ) from None
    found = {"tokens": file.count, "documents": max(0, file.boundaries - 1)}
    wrong = {key: n for key, n in found.items() if counts.get(key, n) != n}
    if vocab_size > recipe.model.vocab_size:
        raise UserError(
            f"model.vocab_size = {recipe.model.vocab_size} is smaller than the vocabulary of "
            f"{file.path}, {vocab_size}; use model.vocab_size = {vocab_size}"
        )
    if made_with != tokenizer_hash(repository_path(recipe.data.tokenizer)):
        raise UserError(
            f'data.tokenizer = "{recipe.data.tokenizer}" is not the tokenizer that made '
            f"{file.path}; use {manifest.get('tokenizer')}, or prepare the corpus again"
        )
    for key, count in wrong.items():
        raise UserError(
            f"{file.path} has {count} {key} and {manifest_file} says {counts[key]}; use the files "
            f"that belong together, or prepare the corpus again"
        )


def _check_document_starts(recipe: Recipe) -> None:
    """Reject corpora of which some begin documents with BOS and others do not.

    Only manifests count: documents of another corpus may share their first token by chance.
    """
    paths = [*(source.path for source in recipe.data.train), recipe.data.validation]
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
    """Look at some tokens, spread over the file: preparation has looked at all of them."""
    for block in range(min(BLOCKS, file.count)):
        start = max(0, file.count - BLOCK_TOKENS) * block // (BLOCKS - 1)
        tokens = file.read(start, min(start + BLOCK_TOKENS, file.count))
        wrong = np.flatnonzero((tokens < 0) | (tokens >= recipe.model.vocab_size))
        if len(wrong):
            raise UserError(
                f"{file.path}.bin: token {start + wrong[0]} has the id {tokens[wrong[0]]} and "
                f"model.vocab_size is {recipe.model.vocab_size}; use the vocabulary of the "
                f"tokenizer that made the corpus"
            )
