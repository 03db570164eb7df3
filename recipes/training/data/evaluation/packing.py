"""Packing of short sequences into windows of one length."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the numbers of the sequences in each window, so that few windows hold all of them.

    It is best-fit decreasing: from the longest sequence to the shortest, each is put into the
    fullest window that has room for it, and into a new one if none has. It needs at most 11/9 of
    the smallest number of windows, plus one (Johnson et al. 1974, doi 10.1137/0203025).

    Args:
        lengths: lengths of the sequences, each 1 .. capacity
        capacity: length of a window
    """
    windows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, window), ascending
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        place = bisect_left(room, (lengths[number], -1))
        if place == len(room):
            free, window = capacity, len(windows)
            windows.append([])
        else:
            free, window = room.pop(place)
        windows[window].append(number)
        insort(room, (free - lengths[number], window))
    return windows
