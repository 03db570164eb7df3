"""Reduction of a long curve to as many points as a screen can show.

The points of a curve are divided into buckets, and each bucket keeps its minimum and its maximum.
A spike of a single step is therefore always drawn at its full height, which averaging or taking
every n-th point would not guarantee.
"""

import numpy as np


def reduced(values: np.ndarray, buckets: int) -> np.ndarray:
    """Return the indices of the points to draw, in increasing order; int64.

    Args:
        values: the curve, [n]; points that are not finite are left out
        buckets: at most this many buckets; each gives up to two points. The first and the last
            point are always kept.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= 2 * buckets:
        return finite
    heights = values[finite]
    edges = np.linspace(0, len(finite), buckets + 1).astype(np.int64)[:-1]
    lowest = _first_equal(heights, np.minimum.reduceat(heights, edges), edges)
    highest = _first_equal(heights, np.maximum.reduceat(heights, edges), edges)
    ends = [0, len(finite) - 1]
    return finite[np.unique(np.concatenate([lowest, highest, ends]))]


def trend(values: np.ndarray, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each bucket, for a line through a noisy curve.

    Args:
        values: the curve, [n]; points that are not finite are left out
        buckets: number of buckets; each has at least one finite point

    Returns:
        The index of the middle point of each bucket, int64 [buckets], and the means, [buckets].
    """
    finite = np.flatnonzero(np.isfinite(values))
    edges = np.linspace(0, len(finite), buckets + 1).astype(np.int64)
    sizes = np.diff(edges)
    means = np.add.reduceat(values[finite], edges[:-1]) / sizes
    return finite[edges[:-1] + sizes // 2], means


def _first_equal(heights: np.ndarray, wanted: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the index of the first point of each bucket that equals the bucket's wanted height."""
    sizes = np.diff(np.append(edges, len(heights)))
    candidates = np.flatnonzero(heights == np.repeat(wanted, sizes))
    buckets = np.searchsorted(edges, candidates, side="right")
    _, firsts = np.unique(buckets, return_index=True)
    return candidates[firsts]
