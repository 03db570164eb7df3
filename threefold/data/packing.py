"""Packing of short sequences into windows of one length."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sequences into few windows by best-fit decreasing.

    From the longest sequence to the shortest, each is put into the fullest window that has room for
    it, or into a new window. If w windows would suffice, the result has at most 11/9 w + 4 windows
    (Johnson et al. 1974, doi 10.1137/0203025).

    Args:
        lengths: lengths of the sequences, each 1 .. capacity
        capacity: length of a window

    Returns:
        The numbers of the sequences in each window.
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
