"""The order of a run's samples: a mixture of corpora, each in its own random permutation."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from threefold.config.sections import whole_shares

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
