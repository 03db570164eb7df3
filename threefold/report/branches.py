"""The kept steps of a run, and the branches that it has abandoned.

A run abandons steps when it rolls back or continues from an earlier checkpoint. It then copies
metrics.jsonl to metrics.<stamp>.jsonl and removes the abandoned lines (`RunFolder.prepare`). If the
file could not be rewritten, for example on a full disk, it contains some steps twice, and the later
line of a step counts. After a kill, the steps since the checkpoint are repeated with equal results,
so no copy of their first lines exists.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

Line = dict[str, Any]


def divide(lines: Iterable[Line]) -> tuple[list[Line], list[list[Line]]]:
    """Divide the lines of a file into kept steps and abandoned branches.

    Args:
        lines: metrics of steps, in the order of the file

    Returns:
        The kept lines, with increasing steps, and the abandoned branches. A branch begins with the
        last kept line before it, if there is one, so that its curve starts on the kept curve.
    """
    kept: list[Line] = []
    branches: list[list[Line]] = []
    for line in lines:
        if kept and line["step"] <= kept[-1]["step"]:
            cut = bisect_left(kept, line["step"], key=lambda each: each["step"])
            branches.append(kept[max(0, cut - 1) :])
            del kept[cut:]
        kept.append(line)
    return kept, branches


def abandoned_branches(kept: Sequence[Line], copies: Iterable[Sequence[Line]]) -> list[list[Line]]:
    """Return the branches in earlier copies of metrics.jsonl that the run has not kept.

    Args:
        kept: the kept lines of the run
        copies: the lines of each copy, oldest first; each has the whole file of its time
    """
    known: set[tuple] = set()
    found: list[list[Line]] = []
    for lines in copies:
        known = known or {_identity(line) for line in kept}
        then_kept, branches = divide(lines)
        for branch in [*branches, then_kept]:
            found += _unknown_parts(branch, known)
            known |= {_identity(line) for line in branch}
    return found


def _unknown_parts(branch: Sequence[Line], known: set[tuple]) -> list[list[Line]]:
    """Return the sequences of unknown lines, each preceded by the line before it."""
    parts: list[list[Line]] = []
    is_new = [_identity(line) not in known for line in branch]
    if branch and is_new[0]:
        parts.append([branch[0]])
    for (before, line), (was_new, new) in zip(pairwise(branch), pairwise(is_new), strict=True):
        if new and not was_new:
            parts.append([before])
        if new:
            parts[-1].append(line)
    return parts


def _identity(line: Line) -> tuple:
    """Return a key that differs between two runs of the same step; NaN equals NaN here."""
    values = (line.get(key) for key in ("loss", "grad_norm", "step_seconds", "tokens"))
    return (line["step"], *map(repr, values))
