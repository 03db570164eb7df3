"""Events as marks on the curves, with a description of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.run_folder.json_lines import too_large

Event = Mapping[str, Any]
MAX_DEPTH = 4  # of nested lists and tables in a description
MAX_TEXT = 300  # characters of a description
MAX_MARKS = 400  # marks of each kind, spread over the run
# Kinds of marks, in the order of their lanes from the top; the symbols are Bokeh's.
SYMBOLS = {
    "resume": "triangle",
    "branch": "star",
    "stage": "diamond_cross",
    "re-plan": "diamond",
    "rollback": "inverted_triangle",
    "skip": "x",
    "stop": "square",
    "slow ranks": "hex",
    "GPU error": "asterisk",
    "warning": "plus",
    "save": "circle",
}
TURNS = ("resume", "branch", "re-plan", "rollback")  # the run changed its course
NO_DETAIL = {"event", "step", "time", "attempt", "wall_time", "code_version", "stamp", "seconds",
             "number", "predicted_step_seconds", "plan", "read_parts"}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """An event at a step.

    Attributes:
        kind: a key of SYMBOLS
        step: the last completed step
        text: description of the event; untrusted, because users and machines wrote its parts
    """

    kind: str
    step: int
    text: str


def marks_of(events: Iterable[Event]) -> list[Mark]:
    """Return the marks of a run's events; at most MAX_MARKS of a kind, which include the newest."""
    by_kind: dict[str, list[Mark]] = {kind: [] for kind in SYMBOLS}
    for event in events:
        if (kind := kind_of(event)) is not None:
            by_kind[kind].append(Mark(kind, event["step"], describe(event)))
    return [mark for marks in by_kind.values() for mark in spread(marks, MAX_MARKS)]


def kind_of(event: Event) -> str | None:
    """Return the kind of an event's mark; None for an event that is not marked."""
    kind = event["event"]
    if kind == "attempt":  # the first attempt of launch.py is the start of the run
        return "re-plan" if event.get("number") not in (None, 1) else None
    if kind == "replace":
        return "re-plan"
    names = {"slow": "slow ranks", "gpu_error": "GPU error"}
    name = names.get(kind, kind)
    return name if name in SYMBOLS else None


def describe(event: Event) -> str:
    """Return the details of an event in words."""
    kind = event["event"]
    if kind == "rollback":
        return _cut(f"to step {event.get('to')}: {event.get('reason', '')}")
    if kind == "repeat":
        return f"steps lost and repeated: {event.get('steps')}"
    if kind == "save":
        return _cut(str(event.get("checkpoint", "")).rpartition("/")[2])
    if kind == "slow":
        ranks, nodes, ratio = (_words(event.get(key)) for key in ("ranks", "nodes", "ratio"))
        return _cut(f"ranks {ranks} on {nodes} take {ratio} times as long as similar ranks")
    for key in ("reason", "message", "error"):
        if event.get(key):
            rest = f" ({event['layout']})" if kind == "attempt" and event.get("layout") else ""
            return _cut(f"{event[key]}{rest}")
    details = [
        f"changed: {_changes(value)}" if key == "changed" else f"{key} {_words(value)}"
        for key, value in event.items()
        if key not in NO_DETAIL
    ]
    return _cut(", ".join(details))


def spread(marks: Sequence[Mark], most: int) -> Sequence[Mark]:
    """Return at most `most` marks (2 or more), evenly spaced, including the first and the last."""
    if len(marks) <= most:
        return marks
    last = len(marks) - 1
    return [marks[round(place * last / (most - 1))] for place in range(most)]


def _changes(value: Any) -> str:
    """Return the changed keys of a recipe with their old and new values."""
    if not isinstance(value, dict):
        return _words(value)
    pairs = [
        (key, " -> ".join(map(_words, each)) if isinstance(each, list) else _words(each))
        for key, each in value.items()
    ]
    return "; ".join(f"{key}: {text}" for key, text in pairs)


def _words(value: Any, depth: int = 0) -> str:
    if isinstance(value, dict | list) and depth == MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_words(each, depth + 1)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(_words(each, depth + 1) for each in value)
    if too_large(value):  # str() has a limit of 4,300 digits
        return "a very large number"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
