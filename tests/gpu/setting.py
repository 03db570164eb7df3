"""The setting that all parts share, and what a part finds out."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The machine that is checked and the sizes of the checks.

    device: "cuda", or "cpu" for tests of the checks themselves
    gpus: that this machine has; on a CPU, the ranks that are allowed
    output: the folder of runs, logs and results
    small: models and runs of a few seconds on a CPU
    """

    device: str
    gpus: int
    output: Path
    small: bool = False

    def as_json(self) -> dict[str, Any]:
        """Convert it for another process."""
        return asdict(self) | {"output": str(self.output)}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Setting":
        """Restore it."""
        return cls(**{**table, "output": Path(table["output"])})


@dataclass
class Result:
    """What a part prints, as Markdown, and the checks that have failed."""

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: str = ""

    def say(self, line: str) -> None:
        """Add a paragraph."""
        self.lines += [line, ""]

    def check(self, holds: bool, claim: str) -> None:
        """Record whether a claim holds; the part fails if one does not."""
        self.lines.append(f"- {'yes' if holds else '**NO**'}: {claim}")
        if not holds:
            self.failures.append(claim)

    def table(self, head: list[str], rows: list[list[str]]) -> None:
        """Add a table."""
        lines = [head, ["---"] * len(head), *rows]
        if self.lines and self.lines[-1]:
            self.lines.append("")
        self.lines += [*("| " + " | ".join(line) + " |" for line in lines), ""]

    @property
    def status(self) -> str:
        """Summarise the part in a word."""
        if self.skipped:
            return SKIPPED
        return FAILED if self.failures else PASSED
