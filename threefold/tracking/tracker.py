"""Metrics of the steps, and their reports: events, metrics.jsonl, the display, Weights & Biases."""

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from tqdm import tqdm

from models.cost import flops_per_token
from models.errors import UserError
from threefold.config.loading import value_text
from threefold.config.optimization import is_jump
from threefold.config.phases import PhasePlan, Segment, changes
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import peak_tflops
from threefold.run_folder.folder import RunFolder, code_version
from threefold.run_folder.history import Progress, WallTime
from threefold.run_folder.json_lines import task_accuracies, validation_losses
from threefold.runtime.exits import INTERRUPTED
from threefold.runtime.output import SECONDS_BETWEEN_LINES
from threefold.tracking.clocks import Startup
from threefold.tracking.weights_and_biases import (
    Picture,
    PredictedMetrics,
    SavedCheckpoint,
    WandbThread,
    alert_of,
    alerts_at_start,
    launch_facts,
    nothing_predicted,
)

if TYPE_CHECKING:
    from threefold.engine.experts import ExpertReport


class Meter:
    """Metrics of a step, computed from its result and duration.

    Args:
        recipe: the recipe of the run, with its phases
        precision: that of the weights; the MFU of matmuls in FP8 is relative to the FP8 peak
        device_name: "cpu", or the name of the GPU
    """

    def __init__(self, recipe: Recipe, world_size: int, *, precision: str, device_name: str):
        self.phase_plan, self.world_size = PhasePlan(recipe), world_size
        kind = recipe.training.matmul_precision
        self.peak_tflops = peak_tflops(device_name, precision if kind == "weights" else kind)
        self.on_gpu = device_name != "cpu"

    def line(
        self, progress: Progress, *, loss: float, grad_norm: float, learning_rate: float,
        seconds: float, experts: "ExpertReport | None" = None,
        prediction_losses: Sequence[float] | None = None, largest_logit: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the metrics of the newest step.

        Args:
            loss: mean loss of the global batch, in nats per token
            grad_norm: gradient norm before clipping
            experts: use of the experts; None for a dense model
            prediction_losses: mean loss of each further token; None if none is predicted
            largest_logit: largest attention logit; None if the optimizer does not limit logits

        Returns:
            The metrics; `mfu` is None if the peak of the device is unknown.
        """
        recipe = self.phase_plan.at(progress.step).recipe
        tokens = recipe.tokens_per_step
        tflops = flops_per_token(recipe.model) * tokens / self.world_size / 1e12 / seconds
        return {
            "step": progress.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": progress.tokens(self.phase_plan),
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "memory_gb": peak_memory_gb(self.on_gpu),
            **(expert_metrics(experts) if experts else {}),
            # The first one is the loss of the token after the next one.
            **{
                f"prediction_loss_{depth}": loss
                for depth, loss in enumerate(prediction_losses or (), start=1)
            },
            **({} if largest_logit is None else {"largest_attention_logit": largest_logit}),
        }


def expert_metrics(report: "ExpertReport") -> dict[str, Any]:
    """Return the metrics of the experts' use."""
    return {
        "balance_loss": report.balance_loss,
        "z_loss": report.z_loss,
        "expert_largest_load": report.largest_load,
        "expert_entropy": report.entropy,
        "expert_dropped": report.dropped,
    }


def peak_memory_gb(on_gpu: bool) -> float:
    """Return the peak memory of this process, in 10^9 bytes: on the GPU, or else in the machine."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


# The progress of a run on the terminal or in a log.


def has_columns(stream: TextIO) -> bool:
    """Return True if a stream is a terminal of known width; some programs leave it at 0."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # not a terminal, or a stream without a descriptor
        return False


class Display:
    """A progress bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, steps: int, done: int):
        self.steps = steps
        self.last_line = -math.inf
        self.seconds_per_step: float | None = None
        self.bar = (
            tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)
            if sys.stdout.isatty() and has_columns(sys.stderr)  # tqdm writes to standard error
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
    texts, accuracies = [], task_accuracies(metrics)
    for title, averaged in (("validation", False), ("averaged", True)):
        for name, loss in validation_losses(metrics, averaged=averaged).items():
            texts.append(" ".join(filter(None, [title, name, f"{loss:.4f}"])))
    return texts + [f"{name} {accuracy:.1%}" for name, accuracy in accuracies.items()]


@contextlib.contextmanager
def open_tracker(
    recipe: Recipe,
    folder: RunFolder,
    rank: int,
    *,
    start: Progress,
    changed: dict[str, Any],
    in_memory: bool = False,
    metrics: Sequence[dict[str, Any]] | None = None,
    predicted: PredictedMetrics = nothing_predicted,
) -> Iterator["Tracker"]:
    """Open a tracker on rank 0, and one that ignores all reports on the others; then close it.

    Args:
        start: the point at which the run resumes; step 0 if it starts
        changed: keys of the recipe that have changed since the checkpoint was saved
        in_memory: True if the run resumes from a snapshot in the memory of the nodes
        metrics: the lines of metrics.jsonl; rank 0 reads them itself if they are not given
        predicted: returns the planner's predictions for a step, by the name of the metric
    """
    if rank != 0:
        yield cast(Tracker, _NoReports())
        return
    tracker = Tracker(
        recipe,
        folder,
        start=start,
        changed=changed,
        in_memory=in_memory,
        metrics=metrics,
        predicted=predicted,
    )
    del metrics  # gigabytes after a million steps
    try:
        yield tracker
    except BaseException:
        tracker.wandb.exit_code = 1
        raise
    finally:
        tracker.close()


class Tracker:
    """The reports of the training loop: to the run folder, the display and Weights & Biases."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        start: Progress = Progress(),  # noqa: B008 (frozen)
        changed: dict[str, Any] | None = None,
        in_memory: bool = False,
        metrics: Sequence[dict[str, Any]] | None = None,
        predicted: PredictedMetrics = nothing_predicted,
    ):
        self.recipe, self.folder, self.last_step = recipe, folder, start.step
        self._has_stopped = False
        self.phase_plan = PhasePlan(recipe)
        details: dict[str, Any] = {"changed": changed} if changed else {}
        if start.step:
            details |= start.record()
        if in_memory:
            details["from_memory"] = True
        if plan := predicted(start.step + 1):
            details["plan"] = dict(plan)
        events = self._read_events()
        event = "resume" if start.step else "start"
        self.folder.event(event, start.step, code_version=code_version(), **details)
        self.wall_time = self._read_wall_time(metrics)
        facts = launch_facts(events, folder.attempt)
        self.display = Display(recipe.training.steps, start.step)
        self.wandb = WandbThread(
            recipe,
            folder,
            facts,
            predicted=predicted,
            metrics=metrics or (),
            tell=lambda status: self.display.say(f"W&B: {status.announcement}"),
        )
        for alert in alerts_at_start(events):
            self.wandb.send(alert)

    def step(self, metrics: dict[str, Any]) -> None:
        """Report the metrics of a step."""
        self.last_step = metrics["step"]
        self.folder.metric(metrics)
        self.display.step(metrics)
        self.wall_time.add(metrics)
        shares = self.wall_time.shares(time.time())
        self.wandb.send(metrics | {f"wall_time/{name}": share for name, share in shares.items()})

    def tell_repetition(self, corpora: Sequence[str]) -> None:
        """Report the corpora whose second epoch has begun with the newest step."""
        for corpus in corpora:
            self.display.say(
                f"step {self.last_step}: {corpus} has been read once; its second epoch begins, in "
                f"a new order"
            )

    def started(self, step: int, startup: Startup, *, compiled: bool) -> None:
        """Report the first step of this process, with the times of the start-up."""
        self.folder.event("first_step", step, seconds=startup.seconds, compiled=compiled)
        self.wall_time.started(startup.seconds)
        self.display.say(str(startup))

    def warn(self, message: str) -> None:
        """Report a problem that does not stop the run."""
        self.folder.event("warning", self.last_step, message=message)
        print(f"warning: {message}", file=sys.stderr)

    def slow(self, step: int, ranks: list[int], nodes: list[str], ratio: float) -> None:
        """Report ranks that have been slow in several successive comparisons."""
        self._record("slow", step, ranks=ranks, nodes=nodes, ratio=ratio)

    def skip(self, step: int, reason: str, samples: range) -> None:
        """Report a step that the optimizer has skipped."""
        first, last = samples.start, samples.stop - 1
        self._record("skip", step, reason=reason, samples=[first, last])
        print(f"skipped: step {step}: {reason}; samples {first} .. {last}", file=sys.stderr)

    def begin_phase(self, before: Segment, after: Segment) -> None:
        """Report that the next step is the first of a phase."""
        different = changes(before.recipe, after.recipe)
        steps = [after.first, self.phase_plan.steps_of(after.phase)[-1]]
        self.folder.event("phase", after.first, phase=after.phase, steps=steps, changed=different)
        values = ", ".join(f"{key} = {value_text(new)}" for key, (_, new) in different.items())
        rates = before.learning_rate(after.first - 1), after.learning_rate(after.first)
        if is_jump(*rates):
            values += f"; the learning rate changes from {rates[0]:.2e} to {rates[1]:.2e}"
            schedule = after.recipe.optimizer.schedule
            if schedule.warmup_steps and after.schedule_first == after.first:
                values += f", the start of a warm-up over {schedule.warmup_steps} {schedule.counts}"
        self.display.say(f'phase "{after.phase}" begins with step {after.first}: {values}')

    def replace_ranks(self, step: int, phase: str) -> None:
        """Report that all ranks end after a step, and start again with the engine of a phase."""
        shares = self.wall_time.shares(time.time())
        self.folder.event("boundary", step, phase=phase, wall_time=shares)
        self.display.say(f'step {step} is saved; the ranks start again for phase "{phase}"')

    def roll_back(
        self, step: int, to: Progress, reason: str, *, parts: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Report a rollback after a step, and the point at which the run continues.

        parts: fingerprints of the parts of the data from the second one on, which are recorded if
            the run has left a part (`to.left_parts`)
        """
        data = {"data_parts": list(parts)} if to.left_parts else {}
        self._record("rollback", step, reason=reason, to=to.step, **to.record(), **data)
        print(
            f"rolled back: step {step}: {reason}; continues after step {to.step} with sample "
            f"{to.samples}",
            file=sys.stderr,
        )
        try:
            self.folder.prepare(self.recipe, to, branching=True)
        except UserError as problem:  # metrics.jsonl keeps the lines of the discarded steps
            self.warn(str(problem))
        self.wall_time = self._read_wall_time()
        self.last_step = to.step

    def show(self, step: int, name: str, file: Path) -> None:
        """Report a picture or a text about a step, in a file of the run folder."""
        self.wandb.send(Picture(step, name, file))

    def saved(self, step: int, checkpoint: Path) -> None:
        """Report a checkpoint that has been published; any thread may call this."""
        if self.recipe.tracking.artifacts:
            self.wandb.send(SavedCheckpoint(step, checkpoint))

    def stop(self, reason: str, exit_code: int) -> None:
        """Report that the run stops before its last step."""
        self.wandb.exit_code, self._has_stopped = exit_code, True
        shares = self.wall_time.shares(time.time())
        self._record("stop", self.last_step, reason=reason, exit_code=exit_code, wall_time=shares)
        link = " and" if exit_code == INTERRUPTED else ":"  # "stopped and saved at step 35"
        print(f"stopped{link} {reason}", file=sys.stderr)

    def end(self) -> None:
        """Report that the last step is done."""
        self.folder.event("end", self.last_step, wall_time=self.wall_time.shares(time.time()))

    def _record(self, event: str, step: int, **facts: Any) -> None:
        """Record an event, and send an alert about it."""
        self.folder.event(event, step, **facts)
        if alert := alert_of({"event": event, "step": step} | facts):
            self.wandb.send(alert)

    def _read_events(self) -> list[dict[str, Any]]:
        """Return the events so far; none if they cannot be read."""
        try:
            return self.folder.read_events()
        except UserError as problem:
            self.warn(f"no alerts about earlier events: {problem}")
            return []

    def _read_wall_time(self, metrics: Sequence[dict[str, Any]] | None = None) -> WallTime:
        """Return the wall time of the run, including its earlier starts.

        metrics: the lines of metrics.jsonl; None to read them
        """
        try:
            lines = self.folder.read_metrics() if metrics is None else metrics
            return WallTime(self.folder.read_events(), lines)
        except UserError as problem:
            self.warn(f"earlier steps are not included in the goodput: {problem}")
            return WallTime([{"event": "start", "time": time.time()}])

    def close(self) -> None:
        """Close the display, and wait for Weights & Biases for a limited time."""
        self.display.close()
        problem = self.wandb.finish()
        if problem:
            if self.folder.has_written_metrics:
                problem += "; metrics.jsonl has every step"
            self.folder.event("warning", self.last_step, message=problem)
            if not self.wandb.has_told_failure:
                print(problem, file=sys.stderr)
        if self._has_stopped and (upload := self.wandb.status.at_stop):
            print(f"W&B: {upload}", flush=True)
        for missing in self.folder.missing_lines():
            print(f"warning: {missing}", file=sys.stderr)


class _NoReports:
    """Ignores the reports of the ranks other than 0."""

    def __getattr__(self, report: str) -> Callable[..., None]:
        assert callable(getattr(Tracker, report))
        return lambda *_, **__: None
