"""The names of the metrics of validation sets and tasks in metrics.jsonl."""

import math
import re
from collections.abc import Mapping
from typing import Any

LOSS_OF_SET = re.compile(r"validation/(?P<name>[^/]+)/loss")
ACCURACY_OF_TASK = re.compile(r"tasks/(?P<name>[^/]+)/accuracy")


def validation_losses(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss of each validation set by name, in nats per token; "" names a single set."""
    losses = _named(metrics, LOSS_OF_SET)
    if "validation_loss" in metrics:
        losses[""] = metrics["validation_loss"]
    return losses


def mean_validation_loss(metrics: Mapping[str, Any]) -> float | None:
    """Return the mean loss of the validation sets; None if there is none, or one is not finite."""
    losses = validation_losses(metrics).values()
    return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None


def task_accuracies(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracy of each task by name."""
    return _named(metrics, ACCURACY_OF_TASK)


def _named(metrics: Mapping[str, Any], pattern: re.Pattern) -> dict[str, float]:
    """Return the values of the keys that match a pattern, by the pattern's group "name"."""
    found = ((pattern.fullmatch(key), value) for key, value in metrics.items())
    return {match["name"]: value for match, value in found if match}
