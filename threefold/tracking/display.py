"""The progress of a run on the terminal or in a log."""

import math
import sys
import time
from typing import Any

from tqdm import tqdm

from threefold.run_folder.json_lines import task_accuracies, validation_losses

SECONDS_BETWEEN_LINES = 10.0


class Display:
    """A progress bar on a terminal, otherwise a line every ten seconds.

    Args:
        steps: number of steps of the run
        done: number of steps that are done
    """

    def __init__(self, steps: int, done: int):
        self.steps = steps
        self.last_line = -math.inf
        self.seconds_per_step: float | None = None
        self.bar = (
            tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)
            if sys.stdout.isatty() and sys.stderr.isatty()  # tqdm writes to standard error
            else None
        )

    def step(self, metrics: dict[str, Any]) -> None:
        """Show one step."""
        step, seconds = metrics["step"], metrics["step_seconds"]
        smoothed = self.seconds_per_step or seconds
        self.seconds_per_step = 0.9 * smoothed + 0.1 * seconds
        text = describe(metrics)
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(1)
            return
        now = time.monotonic()
        due = now - self.last_line >= SECONDS_BETWEEN_LINES
        if due or evaluated(metrics) or step == self.steps:
            left = (self.steps - step) * self.seconds_per_step
            print(
                f"step {step:>{len(str(self.steps))}}/{self.steps}  {text}  "
                f"{tqdm.format_interval(left)} left",
                flush=True,
            )
            self.last_line = now

    def say(self, line: str) -> None:
        """Show a line that remains above the progress bar."""
        if self.bar is not None:
            self.bar.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """End the line of the progress bar."""
        if self.bar is not None:
            self.bar.close()


def describe(metrics: dict[str, Any]) -> str:
    """Return the metrics of a step as one line."""
    parts = [f"loss {metrics['loss']:.4f}", *evaluated(metrics)]
    parts += [
        f"lr {metrics['learning_rate']:.2e}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"{metrics['tflops_per_gpu']:.3g} TFLOP/s",
    ]
    if metrics["mfu"] is not None:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if "epoch" in metrics:
        parts.append(f"epoch {metrics['epoch']:.2f}")
    return "  ".join(parts)


def evaluated(metrics: dict[str, Any]) -> list[str]:
    """Return the validation losses and the accuracies of tasks in the metrics of a step."""
    losses, accuracies = validation_losses(metrics), task_accuracies(metrics)
    texts = [" ".join(filter(None, ["validation", name, f"{losses[name]:.4f}"])) for name in losses]
    return texts + [f"{name} {accuracy:.1%}" for name, accuracy in accuracies.items()]
