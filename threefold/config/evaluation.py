"""The tasks on which a run evaluates its model."""

from typing import Annotated

from pydantic import Field, model_validator

from models.errors import UserError
from threefold.config.section import Count, NonNegative, Section
from threefold.config.sections import SET_NAME


class Task(Section):
    """A task of multiple-choice or cloze items."""

    name: Annotated[str, Field(pattern=f"^{SET_NAME}$", max_length=128)]
    """Name of the task in the metrics, `tasks/<name>/accuracy`."""

    path: str
    """Path of the task's JSON lines, relative to the repository root; `prepare_data.py tasks`
    writes such files."""

    limit: Count | None = None
    """Number of items to use, from the start of the file. Leave it out to use all items."""


class Evaluation(Section):
    """Tasks that the model is scored on during the run, by the log-likelihood of the answers."""

    every: NonNegative | None = None
    """Steps between evaluations of the tasks, which also follow the last step; 0: never. Leave it
    out to evaluate with every validation (`training.evaluate_every`)."""

    tasks: tuple[Task, ...] = ()
    """Tasks, each with a name and a path."""

    @model_validator(mode="after")
    def _check(self) -> "Evaluation":
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise UserError(
                f"evaluation.tasks has a name twice: {', '.join(names)}; use another name for each "
                f"task"
            )
        if self.every is not None and not self.tasks:
            raise UserError(
                f"evaluation.every = {self.every} has no effect without evaluation.tasks; add a "
                f'task such as {{ name = "next_line", path = "data/tasks/next_line.jsonl" }}, or '
                f"leave evaluation.every out"
            )
        return self
