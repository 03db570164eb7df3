"""The order of a run's samples: a mixture of corpora, each in its own random permutation.

Without phases, the windows of a corpus are read in a random permutation, a new one for each epoch.
If a phase changes the sequence length, the corpus is cut into windows of the new length. The rest
of the epoch then reads, in a random permutation, only the windows without any token that the run
has already read in this epoch. No token is therefore an input twice before the epoch is over. A
window that has been read in part waits for the next epoch, which reads all windows.

The order is a function of the seed and of the number of samples read in each part of the data, so
no order is stored.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from threefold.config.phases import PhasePlan
from threefold.config.sections import repository_path, whole_shares
from threefold.run_folder.history import ConsumedRange

FEISTEL_ROUNDS = 6  # four are enough for a pseudorandom permutation (Luby, Rackoff 1988)


def choose_sources(samples: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sample, and the number of samples that source gave before; int64.

    After any number of samples, each source is less than one sample away from its share.
    """
    shares = whole_shares(weights)
    order, turns = one_period(shares)
    periods, places = np.divmod(samples.astype(np.int64), len(order))
    sources = order[places]
    return sources, periods * np.array(shares)[sources] + turns[places]


@lru_cache(maxsize=4)
def one_period(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sample of a period, and the source's samples before it; int64.

    Follows Tijdeman 1980, "The chairman assignment problem". Of the k sources, those that are
    behind by at least 1 / (2 k - 2) of a sample are candidates; the next sample comes from the
    candidate that would be the first to be a whole sample behind. No source is ever more than
    1 - 1 / (2 k - 2) away from its share.
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
    """Return the images of `indices` under a permutation of 0 .. size - 1; int64.

    The string `key` selects the permutation, which is computed and never stored. It is a Feistel
    network over the next even number of bits, repeated while the result is outside the range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). The round function is the
    finaliser of SplitMix64 (Steele et al. 2014).
    """
    half, mask, keys = _feistel(size, key)
    places = indices.astype(np.uint64)
    outside = np.arange(len(places))
    while len(outside):
        left, right = places[outside] >> half, places[outside] & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mixed(right, keys[turn]) & mask)
        places[outside] = left << half | right
        outside = outside[places[outside] >= size]
    return places.astype(np.int64)


def place_of(images: np.ndarray, size: int, key: str) -> np.ndarray:
    """Return the indices whose images under `permuted` are `images`: its inverse; int64."""
    half, mask, keys = _feistel(size, key)
    places = images.astype(np.uint64)
    outside = np.arange(len(places))
    while len(outside):
        left, right = places[outside] >> half, places[outside] & mask
        for turn in reversed(range(FEISTEL_ROUNDS)):
            left, right = right ^ (_mixed(left, keys[turn]) & mask), left
        places[outside] = left << half | right
        outside = outside[places[outside] >= size]
    return places.astype(np.int64)


def _feistel(size: int, key: str) -> tuple[np.uint64, np.uint64, np.ndarray]:
    """Return the bits of a half, their mask, and the keys of the rounds of a permutation."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    digest = hashlib.blake2b(key.encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    return half, np.uint64((1 << int(half)) - 1), np.frombuffer(digest, "<u8")


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


SAMPLES_AHEAD = 128  # computed at a time, which takes hardly longer than those of a micro-batch
CANDIDATES_PER_BLOCK = 2**14  # windows that are compared with earlier passes at a time


@dataclass(frozen=True)
class WindowPass:
    """A pass over windows of one length in the current epoch, in the order of a permutation.

    Attributes:
        length: tokens of a window
        considered: number of windows at the start of the permutation that were read or left out
    """

    length: int
    key: str
    considered: int


class CorpusOrder:
    """The window of each successive sample of a corpus.

    Args:
        name: beginning of the keys of its permutations: the seed of the run and the number of the
            corpus, such as "1234/0"
    """

    def __init__(self, tokens: int, name: str):
        self.tokens, self.name = tokens, name
        self.length = 0
        self.given = 0  # samples read since `length` changed
        self.epoch = 0  # epoch in which `length` changed
        self.earlier: tuple[WindowPass, ...] = ()  # passes of that epoch before `length` changed
        self._unread: _Unread | None = None

    @property
    def count(self) -> int:
        """Number of windows of an epoch."""
        return (self.tokens - 1) // self.length

    def set_sequence_length(self, length: int) -> None:
        """Cut the corpus into windows of `length` tokens from the next sample on."""
        if length == self.length:
            return
        if self.length:
            self._finish_passes()
        self.length, self.given = length, 0
        self._unread = None
        if self.earlier:
            key = f"{self.name}/{self.epoch}/{len(self.earlier)}"
            self._unread = _Unread(self.tokens, length, key, self.earlier)

    def advance(self, samples: int) -> None:
        """Count samples as read."""
        self.given += samples

    def _finish_passes(self) -> None:
        """Update `epoch` and `earlier` before `length` changes."""
        if not self.given:
            return
        if self._unread is not None:
            considered = self._unread.considered(self.given)
            if considered is not None:
                self.earlier += (WindowPass(self.length, self._unread.key, considered),)
                return
        epochs, considered = divmod(self.given - self._rest, self.count)
        self.epoch += epochs + (self._unread is not None)
        key = f"{self.name}/{self.epoch}"
        self.earlier = (WindowPass(self.length, key, considered),) if considered else ()

    @property
    def _rest(self) -> int:
        """Number of windows that the epoch had left when `length` changed."""
        return self._unread.total if self._unread is not None else 0

    def windows(self, turns: np.ndarray) -> np.ndarray:
        """Return the windows of samples of this corpus; int64.

        turns: numbers of the samples, counted from the last call of `advance`
        """
        turns = turns + self.given
        positions = np.empty_like(turns)
        after = np.ones(len(turns), bool)
        if self._unread is not None:
            for position, turn in enumerate(turns.tolist()):
                window = self._unread.window(turn)
                if window is not None:
                    positions[position], after[position] = window, False
        first = self.epoch + (self._unread is not None)
        epochs, indices = np.divmod(turns[after] - (self._rest if after.any() else 0), self.count)
        windows = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            key = f"{self.name}/{first + epoch}"
            windows[epochs == epoch] = permuted(indices[epochs == epoch], self.count, key)
        positions[after] = windows
        return positions


class _Unread:
    """The windows of a permutation that contain no token of earlier passes.

    They are found block by block, and only the blocks that the run has reached.
    """

    def __init__(self, tokens: int, length: int, key: str, earlier: tuple[WindowPass, ...]):
        self.tokens, self.length, self.key, self.earlier = tokens, length, key, earlier
        self.count = (tokens - 1) // length
        self._ends = [0]  # unread windows up to the end of each block
        self._block = lru_cache(maxsize=4)(self._find)

    @property
    def total(self) -> int:
        """Number of unread windows in the whole permutation."""
        while not self._is_complete:
            self._append()
        return self._ends[-1]

    def window(self, turn: int) -> int | None:
        """Return the unread window number `turn`; None if there are fewer."""
        found = self._locate(turn)
        return None if found is None else found[1]

    def considered(self, turns: int) -> int | None:
        """Return the length of the permutation's start that contains `turns` unread windows.

        None if the permutation has fewer unread windows.
        """
        found = self._locate(turns - 1)
        return None if found is None else found[0] + 1

    def _locate(self, turn: int) -> tuple[int, int] | None:
        """Return (index in the permutation, window) of an unread window; None after the last."""
        while self._ends[-1] <= turn and not self._is_complete:
            self._append()
        if self._ends[-1] <= turn:
            return None
        block = bisect_right(self._ends, turn) - 1
        indices, windows = self._block(block)
        place = turn - self._ends[block]
        return int(indices[place]), int(windows[place])

    @property
    def _is_complete(self) -> bool:
        return (len(self._ends) - 1) * CANDIDATES_PER_BLOCK >= self.count

    def _append(self) -> None:
        indices, _ = self._block(len(self._ends) - 1)
        self._ends.append(self._ends[-1] + len(indices))

    def _find(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices and the windows of a block that are unread."""
        first = block * CANDIDATES_PER_BLOCK
        indices = np.arange(first, min(first + CANDIDATES_PER_BLOCK, self.count))
        windows = permuted(indices, self.count, self.key)
        unread = np.ones(len(windows), bool)
        for segment in self.earlier:
            unread &= ~self._overlaps(windows, segment)
        return indices[unread], windows[unread]

    def _overlaps(self, windows: np.ndarray, earlier: WindowPass) -> np.ndarray:
        """Return True for each window that shares a token with the windows of an earlier pass."""
        count = (self.tokens - 1) // earlier.length
        first = windows * self.length // earlier.length
        last = ((windows + 1) * self.length - 1) // earlier.length
        overlaps = np.zeros(len(windows), bool)
        for offset in range(int((last - first).max()) + 1):
            overlapping = first + offset
            inside = np.flatnonzero((overlapping <= last) & (overlapping < count))
            places = place_of(overlapping[inside], count, earlier.key)
            overlaps[inside] |= places < earlier.considered
        return overlaps


def source_numbers(plan: PhasePlan) -> dict[str, int]:
    """Return path -> number of each training corpus, numbered in the order of first use.

    The number is part of the key of a corpus's permutation.
    """
    numbers: dict[str, int] = {}
    for part in plan.parts:
        for source in plan.first_of_part(part).recipe.data.train:
            numbers.setdefault(str(repository_path(source.path)), len(numbers))
    return numbers


@dataclass
class Mixture:
    """The corpus and the window of each sample of one part of the data.

    Attributes:
        sources: number of each corpus of the mixture
        orders: number of a corpus -> its order, at the first sample of the part
        first: the first sample of the mixture, from which the shares of the corpora count
        before: samples of each corpus from `first` up to the start of the part
    """

    sources: tuple[int, ...]
    weights: tuple[float, ...]
    orders: dict[int, CorpusOrder]
    first: int
    before: np.ndarray
    _ahead: tuple[int, list[tuple[int, int]]] = field(
        default_factory=lambda: (0, []), init=False, repr=False, compare=False
    )

    def places_of(self, samples: range) -> list[tuple[int, int]]:
        """Return the `places` of successive samples, which are computed some samples ahead."""
        first, ahead = self._ahead
        if samples.start < first or samples.stop > first + len(ahead):
            first, stop = samples.start, max(samples.stop, samples.start + SAMPLES_AHEAD)
            ahead = self.places(np.arange(first, stop))
            self._ahead = first, ahead
        return ahead[samples.start - first : samples.stop - first]

    def places(self, samples: np.ndarray) -> list[tuple[int, int]]:
        """Return (number of the corpus, window) for samples of the part."""
        chosen, turns = choose_sources(samples - self.first, self.weights)
        windows = np.empty_like(turns)
        for index, source in enumerate(self.sources):
            own = np.flatnonzero(chosen == index)
            if len(own):
                own_turns = turns[own] - self.before[index]
                windows[own] = self.orders[source].windows(own_turns)
        numbers = np.array(self.sources)[chosen]
        return list(zip(numbers.tolist(), windows.tolist(), strict=True))


def mixture_after(
    plan: PhasePlan,
    consumed_ranges: Iterable[ConsumedRange],
    part: int,
    begin: int,
    tokens: dict[int, int],
) -> Mixture:
    """Return the mixture of a part of the data, which continues after the samples read before.

    Args:
        consumed_ranges: the samples read before
        tokens: number of a corpus -> its tokens

    Returns:
        The mixture. If the part before had the same corpora and weights, their shares continue.
    """
    numbers, seed = source_numbers(plan), plan.recipe.seed
    orders = {number: CorpusOrder(count, f"{seed}/{number}") for number, count in tokens.items()}
    current: Mixture | None = None
    for consumed in (*consumed_ranges, ConsumedRange(part, begin, begin)):
        train = plan.first_of_part(consumed.part).recipe.data.train
        sources = tuple(numbers[str(repository_path(source.path))] for source in train)
        weights = tuple(source.weight for source in train)
        is_same = current is not None and (current.sources, current.weights) == (sources, weights)
        first = current.first if current is not None and is_same else consumed.first
        length = plan.length_of_part(consumed.part)
        for source in sources:
            orders[source].set_sequence_length(length)
        before = counts(weights, consumed.first - first)
        current = Mixture(sources, weights, orders, first, before)
        for source, given in zip(
            sources, (counts(weights, consumed.stop - first) - before).tolist(), strict=True
        ):
            orders[source].advance(given)
    assert current is not None
    return current


def counts(weights: tuple[float, ...], samples: int) -> np.ndarray:
    """Return the samples of each corpus among the first `samples` of a mixture; int64."""
    shares = whole_shares(weights)
    order, _ = one_period(shares)
    periods, rest = divmod(samples, len(order))
    return periods * np.array(shares) + np.bincount(order[:rest], minlength=len(shares))
