"""The setting that all parts share, and the result of a part."""

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
    small: use models and runs that take a few seconds on a CPU
    """

    device: str
    gpus: int
    output: Path
    small: bool = False

    def as_json(self) -> dict[str, Any]:
        """Convert the setting to JSON, for another process."""
        return asdict(self) | {"output": str(self.output)}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Setting":
        """Restore a setting from JSON."""
        return cls(**{**table, "output": Path(table["output"])})


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
        self.lines += [*("| " + " | ".join(line) + " |" for line in lines), ""]

    @property
    def status(self) -> str:
        """Return the status of the part: passed, failed or skipped."""
        if self.skipped:
            return SKIPPED
        return FAILED if self.failures else PASSED
