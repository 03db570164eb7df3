"""Run folders with invented metrics, as a run would write them."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from threefold.config.loading import DEFAULT_RECIPE, load_recipe
from threefold.config.recipe import Recipe

BEGAN = 1_800_000_000.0  # seconds since the epoch
TWO_SOURCES = (
    'data.train=[{path="data/stdlib/train",weight=0.75},{path="data/books/train",weight=0.25}]'
)


def recipe_of(*overrides: str, steps: int = 200) -> Recipe:
    """Return tiny.toml with two sources and some overrides."""
    options = [TWO_SOURCES, f"training.steps={steps}", *overrides]
    return load_recipe(DEFAULT_RECIPE, options)


def line_of(recipe: Recipe, step: int, **more: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    noise = math.sin(step * 12.9898) * 43758.5453 % 1.0
    tokens = recipe.tokens_per_step
    seconds = 0.5 + 0.1 * noise
    return {
        "step": step,
        "loss": 3.0 + 4.6 * math.exp(-step / 60) + 0.1 * noise,
        "grad_norm": 0.5 + noise,
        "learning_rate": 4e-3 * min(1.0, step / 40),
        "tokens": step * tokens,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_per_gpu": 14.2e-6 * tokens / seconds / 2,
        "mfu": None,
        "memory_gb": 0.61,
        "between_seconds": 0.01,
        "data_seconds": 0.001,
    } | more


def write_run(
    folder: Path, steps: Iterable[int] = range(1, 101), *, recipe: Recipe | None = None,
    events: Sequence[dict[str, Any]] = (), change: Callable[[dict[str, Any]], Any] | None = None,
) -> Path:  # fmt: skip
    """Write a run folder and return it.

    Args:
        folder: the folder to create
        steps: of the lines of metrics.jsonl
        recipe: None for `recipe_of()`
        events: further events
        change: changes a line of metrics.jsonl in place
    """
    recipe = recipe or recipe_of()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(recipe.toml())
    lines = [line_of(recipe, step) for step in steps]
    for line in lines:
        if change is not None:
            change(line)
    write_lines(folder / "metrics.jsonl", lines)
    start = {"event": "start", "step": 0, "time": BEGAN, "code_version": "1234567890abcdef"}
    write_lines(folder / "events.jsonl", [start, *events])
    return folder


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a file of JSON lines."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def event(kind: str, step: int, at: float = 100.0, **facts: Any) -> dict[str, Any]:
    """Return an event some seconds after the start."""
    return {"event": kind, "step": step, "time": BEGAN + at} | facts
