"""Pictures, tables and references to checkpoints for Weights & Biases."""

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASK_METRIC = re.compile(r"tasks/(?P<task>.+)/(?P<metric>[^/]+)")


@dataclass(frozen=True)
class Picture:
    """A picture or a text about a step, in a file of the run folder.

    Attributes:
        step: the step
        name: name of the panel in W&B
        file: an SVG or text file
    """

    step: int
    name: str
    file: Path

    def metrics(self) -> dict[str, Any]:
        """Return the arguments of `run.log`."""
        import wandb

        content = self.file.read_text(encoding="utf-8")
        if self.file.suffix != ".svg":
            content = f"<pre>{html.escape(content)}</pre>"
        return {"step": self.step, self.name: wandb.Html(content, inject=False)}


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in the run folder. The artifact refers to it and does not contain its files.

    Attributes:
        step: the step after which it was saved
        folder: its folder
    """

    step: int
    folder: Path

    def log(self, run: Any) -> None:
        """Log the artifact; `run` is the W&B run."""
        import wandb

        artifact = wandb.Artifact(
            f"checkpoint-{run.id}", type="model", metadata={"step": self.step}
        )
        # W&B would read the whole checkpoint for a checksum; the manifest has one of each file.
        artifact.add_reference(self.folder.absolute().as_uri(), checksum=False)
        run.log_artifact(artifact, aliases=[f"step-{self.step}"])


class TaskTable:
    """The scores of all tasks so far, as a table with a row for each evaluation of a task.

    Args:
        metrics: the lines of metrics.jsonl so far
    """

    def __init__(self, metrics: Iterable[Mapping[str, Any]] = ()):
        self.rows: list[dict[str, Any]] = []
        for line in metrics:
            self.add(line)

    def add(self, metrics: Mapping[str, Any]) -> bool:
        """Add the scores among the metrics of a step; return True if there are any.

        Scores of later steps are dropped, because the run has rolled back.
        """
        found: dict[str, dict[str, Any]] = {}
        for key, value in metrics.items():
            if match := TASK_METRIC.fullmatch(key):
                found.setdefault(match["task"], {})[match["metric"]] = value
        if found:
            step = metrics["step"]
            self.rows = [row for row in self.rows if row["step"] < step]
            self.rows += [{"step": step, "task": task} | scores for task, scores in found.items()]
        return bool(found)

    def metrics(self) -> dict[str, Any]:
        """Return the arguments of `run.log`."""
        import wandb

        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        rows = [[row.get(column) for column in columns] for row in self.rows]
        return {"task_scores": wandb.Table(columns=columns, data=rows)}
