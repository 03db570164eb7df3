"""The setting that all parts share, the result of a part, and the file that keeps all results."""

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
UNFINISHED = "unfinished"  # still running, or killed together with the command


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The machine that is checked and the sizes of the checks.

    device: "cuda", or "cpu" for tests of the checks themselves
    gpus: number of GPUs of this machine; on a CPU, the maximum number of ranks
    output: the folder of runs and logs
    results_folder: the folder of results.json and the report; None: `output`
    small: models and runs of a few seconds on a CPU
    part: the part that runs; "": results are not saved
    about: (name, value) of everything that the figures depend on
    """

    device: str
    gpus: int
    output: Path
    results_folder: Path | None = None
    small: bool = False
    part: str = ""
    about: tuple[tuple[str, str], ...] = ()
    started: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        """Convert it for another process."""
        folder = self.results_folder and str(self.results_folder)
        return asdict(self) | {"output": str(self.output), "results_folder": folder}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Setting":
        """Restore it."""
        about = tuple((name, value) for name, value in table["about"])
        folder = table["results_folder"] and Path(table["results_folder"])
        paths = {"output": Path(table["output"]), "results_folder": folder}
        return cls(**{**table, **paths, "about": about})

    @property
    def runs(self) -> Path:
        """Folder of the part's runs."""
        return self.output / "runs" / self.part

    @property
    def results(self) -> Path:
        """File with the results of all parts."""
        return (self.results_folder or self.output) / "results.json"

    def saved(self) -> "Result":
        """Return the results that the part has saved so far."""
        if not self.part:
            return Result()
        with results_of(self.results) as entries:
            entry = entries.get(self.part, {})
        is_own = entry.get("started") == self.started  # not that of an earlier invocation
        return Result(entry["lines"], entry["failures"]) if is_own else Result()

    def save(self, result: "Result", status: str = UNFINISHED) -> None:
        """Write the results so far, because the part may be ended before it is complete."""
        if self.part:
            entry = asdict(result) | {
                "status": status,
                "started": self.started,
                "seconds": time.time() - self.started,
                "date": time.strftime("%Y-%m-%d"),
                "about": self.about,
            }
            with results_of(self.results) as entries:
                entries[self.part] = entry


@dataclass
class Result:
    """The output of a part, as Markdown, and the checks that have failed."""

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: str = ""

    def say(self, line: str) -> None:
        """Add a paragraph to the output."""
        self.lines += [line, ""]

    def check(self, holds: bool, claim: str) -> None:
        """Record whether a claim holds; the part fails if any claim does not."""
        self.lines.append(f"- {'yes' if holds else '**NO**'}: {claim}")
        if not holds:
            self.failures.append(claim)

    def table(self, head: list[str], rows: list[list[str]]) -> None:
        """Add a table to the output."""
        lines = [head, ["---"] * len(head), *rows]
        if self.lines and self.lines[-1]:
            self.lines.append("")
        self.lines += [*map(_table_row, lines), ""]

    def row(self, cells: list[str], *, failure: str = "") -> None:
        """Add a row to the table that was added last; `failure` fails the part."""
        self.lines.insert(len(self.lines) - 1, _table_row([*cells, "**NO**" if failure else "yes"]))
        if failure:
            self.failures.append(failure)

    @property
    def status(self) -> str:
        """Return the status of the part: passed, failed or skipped."""
        if self.skipped:
            return SKIPPED
        return FAILED if self.failures else PASSED


@contextlib.contextmanager
def results_of(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the saved results by part; changes made inside the context are written back.

    Several processes may do this at a time. A process may be killed at any instant.
    """
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = file.read_text(encoding="utf-8") if file.exists() else "{}"
        entries = json.loads(text)
        yield entries
        if (changed := json.dumps(entries, indent=1)) != text:
            new = file.with_suffix(".new")
            new.write_text(changed, encoding="utf-8")
            new.replace(file)


def _table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
