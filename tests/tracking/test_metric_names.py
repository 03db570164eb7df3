"""Metrics of validation sets and tasks are found by their names, and shown."""

from threefold.run_folder.history import WallTime, seconds_of
from threefold.run_folder.json_lines import (
    mean_validation_loss,
    task_accuracies,
    validation_losses,
)
from threefold.tracking.tracker import describe

STEP = {
    "loss": 2.0,
    "learning_rate": 1e-3,
    "tokens_per_second": 10.0,
    "tflops_per_gpu": 1.0,
    "mfu": None,
    "step_seconds": 1.0,
}
SETS = {
    "validation/web/loss": 2.5,
    "validation/web/bits_per_byte": 1.0,
    "validation/my.code/loss": 1.5,
    "tasks/next_line/accuracy": 0.25,
    "tasks/next_line/accuracy_per_byte": 0.5,
}


def test_names_are_found() -> None:
    assert validation_losses(SETS) == {"web": 2.5, "my.code": 1.5}
    assert task_accuracies(SETS) == {"next_line": 0.25}
    single = {"validation_loss": 3.0, "validation_bits_per_byte": 1.0}
    assert validation_losses(single) == {"": 3.0} and task_accuracies(single) == {}


def test_the_mean_loss_is_that_of_all_validation_sets() -> None:
    assert mean_validation_loss(SETS) == 2.0
    assert mean_validation_loss({"validation_loss": 3.0}) == 3.0
    assert mean_validation_loss(SETS | {"validation/web/loss": float("inf")}) is None
    assert mean_validation_loss({"loss": 2.0}) is None


def test_evaluations_are_shown() -> None:
    line = describe(STEP | SETS)
    assert "loss 2.0000  validation web 2.5000  validation my.code 1.5000  next_line 25.0%" in line
    assert "loss 2.0000  validation 3.0000  lr" in describe(STEP | {"validation_loss": 3.0})


def test_tasks_count_as_validation_in_the_wall_time() -> None:
    line = STEP | {"validation_seconds": 2.0, "task_seconds": 3.0}
    assert WallTime([], [line]).validating == 5.0
    assert seconds_of([line]) == 6.0
