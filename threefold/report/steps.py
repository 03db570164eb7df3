"""The metrics of successive steps as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Steps:
    """Metrics of successive steps; every array has the shape [steps].

    Attributes:
        step: numbers of the steps, increasing; int64
        values: metric -> its value after each step, NaN where a line lacks it; float64
    """

    step: np.ndarray
    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]]) -> "Steps":
        """Convert lines of metrics.jsonl.

        Values that are not numbers become NaN, and metrics without any number are left out.
        """
        names = dict.fromkeys(name for keys in dict.fromkeys(map(tuple, lines)) for name in keys)
        columns = {
            name: _column([line.get(name) for line in lines]) for name in names if name != "step"
        }
        values = {name: each for name, each in columns.items() if not np.isnan(each).all()}
        return cls(np.array([line["step"] for line in lines], np.int64), values)

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> np.ndarray:
        """Return a metric; all NaN if no line has it."""
        found = self.values.get(name)
        return np.full(len(self), np.nan) if found is None else found

    def last(self, name: str) -> float | None:
        """Return the newest finite value of a metric; None if there is none."""
        values = self.column(name)
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def median(self, name: str) -> float | None:
        """Return the median of the finite values of a metric; None if there are none."""
        values = self.column(name)
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else None

    def at(self, steps: Sequence[int], name: str) -> np.ndarray:
        """Return a metric at or just before each of some steps; NaN before the first step."""
        places = np.searchsorted(self.step, np.array(steps, np.int64), side="right") - 1
        column = np.append(self.column(name), np.nan)  # place -1 is the appended NaN
        return column[places]


def _column(values: list[Any]) -> np.ndarray:
    if set(map(type, values)) <= {float, type(None)}:  # numpy turns None into NaN
        return np.array(values, np.float64)
    return np.array([_number(value) for value in values], np.float64)


def _number(value: Any) -> float:
    """Return a value of a line as a float; NaN for anything but a number of a usual size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")
