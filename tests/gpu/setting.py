"""The setting that all parts share, and the result of a part."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The machine that is checked and the sizes of the checks.

    device: "cuda", or "cpu" for tests of the checks themselves
    gpus: number of GPUs of this machine; on a CPU, the maximum number of ranks
    output: the folder of runs, logs and results
    small: models and runs of a few seconds on a CPU
    result_file: where a part writes its result as JSON, also while it runs; None: nowhere
    """

    device: str
    gpus: int
    output: Path
    small: bool = False
    result_file: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Convert it for another process."""
        paths = {"output": self.output, "result_file": self.result_file}
        return asdict(self) | {name: path and str(path) for name, path in paths.items()}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Setting":
        """Restore it."""
        file = table["result_file"]
        paths = {"output": Path(table["output"]), "result_file": file and Path(file)}
        return cls(**{**table, **paths})

    def save(self, result: "Result") -> None:
        """Write the results so far, because the part may be ended before it is complete."""
        if self.result_file is None:
            return
        new = self.result_file.with_suffix(".new")  # whole or not at all
        new.write_text(json.dumps(asdict(result) | {"status": result.status}), encoding="utf-8")
        new.replace(self.result_file)


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


def _table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
