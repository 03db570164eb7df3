"""What a run tells: metrics.jsonl, a progress bar or plain lines, Weights & Biases."""

import atexit
import contextlib
import math
import netrc
import os
import queue
import re
import resource
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from tqdm import tqdm

from models.cost import flops_per_token
from models.errors import UserError
from recipes.gpus.datasheet import peak_tflops
from recipes.training.recipe.schema import Recipe
from recipes.training.run_folder.folder import RunFolder
from recipes.training.run_folder.line_file import write_whole
from recipes.training.run_folder.progress import Progress
from recipes.training.run_folder.provenance import code_version
from recipes.training.runtime.exits import leave_handlers_out
from recipes.training.tracking.startup import Startup

SECONDS_BETWEEN_LINES = 10.0


class Meter:
    """Turns a step's result and seconds into its line of metrics.jsonl."""

    def __init__(self, recipe: Recipe, world_size: int, *, precision: str, device_name: str):
        self.tokens_per_step = recipe.tokens_per_step
        self.sequence_length = recipe.model.sequence_length
        self.tflop_per_gpu = (
            flops_per_token(recipe.model) * recipe.tokens_per_step / world_size / 1e12
        )
        self.peak_tflops = peak_tflops(device_name, precision)
        self.on_gpu = device_name != "cpu"

    def line(
        self, progress: Progress, *, loss: float, grad_norm: float, learning_rate: float,
        seconds: float,
    ) -> dict[str, Any]:  # fmt: skip
        """The metrics of the step just done; `mfu` is None where the device's peak is unknown."""
        tflops = self.tflop_per_gpu / seconds
        return {
            "step": progress.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": progress.samples * self.sequence_length,
            "step_seconds": seconds,
            "tokens_per_second": self.tokens_per_step / seconds,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "memory_gb": peak_memory_gb(self.on_gpu),
        }


def peak_memory_gb(on_gpu: bool) -> float:
    """The most this process has held so far, in 10^9 bytes: of the GPU, or of the machine."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


@contextlib.contextmanager
def open_tracker(
    recipe: Recipe, folder: RunFolder, rank: int, *, start: Progress, changed: dict[str, Any]
) -> Iterator["Tracker"]:
    """Open a tracker on rank 0 and a silent one on the others; close it in any case.

    Args:
        recipe: of the run
        folder: of the run
        rank: of this process
        start: where the run resumes; step 0 if it starts
        changed: keys of the recipe that have changed since the checkpoint was saved
    """
    if rank != 0:
        yield Tracker()
        return
    tracker = RunTracker(recipe, folder, start=start, changed=changed)
    try:
        yield tracker
    except BaseException:
        tracker.wandb.exit_code = 1
        raise
    finally:
        tracker.close()


class Tracker:
    """Takes what the training loop reports; this one keeps it to itself."""

    def step(self, metrics: dict[str, Any]) -> None:
        """Take one step's metrics."""

    def started(self, step: int, startup: Startup, *, compiled: bool) -> None:
        """The first step of this process is done, with compiled kernels or not."""

    def warn(self, message: str) -> None:
        """Something is wrong and the run goes on."""

    def skip(self, step: int, reason: str, samples: range) -> None:
        """The optimizer has left a step out."""

    def roll_back(self, step: int, to: Progress, reason: str) -> None:
        """The run goes back after a step, and on with other data."""

    def stop(self, reason: str, exit_code: int) -> None:
        """The run stops before its last step."""

    def end(self) -> None:
        """The run has done its last step."""


class RunTracker(Tracker):
    """Shows, writes and sends what the training loop reports."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        start: Progress = Progress(),  # noqa: B008 (frozen)
        changed: dict[str, Any] | None = None,
    ):
        self.recipe, self.folder, self.last_step = recipe, folder, start.step
        facts: dict[str, Any] = {"changed": changed} if changed else {}
        if start.step:
            facts["samples"] = start.samples
        event = "resume" if start.step else "start"
        self.folder.event(event, start.step, code_version=code_version(), **facts)
        self.wandb = WandbThread(recipe, folder)
        self.display = Display(recipe.training.steps, start.step)

    def step(self, metrics: dict[str, Any]) -> None:
        """Take one step's metrics."""
        self.last_step = metrics["step"]
        self.folder.metric(metrics)
        self.display.step(metrics)
        self.wandb.log(metrics)

    def started(self, step: int, startup: Startup, *, compiled: bool) -> None:
        """The first step of this process is done, with compiled kernels or not."""
        self.folder.event("first_step", step, seconds=startup.seconds, compiled=compiled)
        self.display.say(str(startup))

    def warn(self, message: str) -> None:
        """Something is wrong and the run goes on."""
        self.folder.event("warning", self.last_step, message=message)
        print(f"warning: {message}", file=sys.stderr)

    def skip(self, step: int, reason: str, samples: range) -> None:
        """The optimizer has left a step out."""
        first, last = samples.start, samples.stop - 1
        self.folder.event("skip", step, reason=reason, samples=[first, last])
        print(f"skipped: step {step}: {reason}; samples {first} .. {last}", file=sys.stderr)

    def roll_back(self, step: int, to: Progress, reason: str) -> None:
        """The run goes back after a step, and on with other data."""
        self.folder.event("rollback", step, reason=reason, to=to.step, samples=to.samples)
        print(
            f"rolled back: step {step}: {reason}; on after step {to.step} with sample {to.samples}",
            file=sys.stderr,
        )
        try:
            self.folder.prepare(self.recipe, to, branching=True)
        except UserError as problem:  # the lines of the discarded steps stay
            self.warn(str(problem))
        self.last_step = to.step

    def stop(self, reason: str, exit_code: int) -> None:
        """The run stops before its last step."""
        self.wandb.exit_code = exit_code
        self.folder.event("stop", self.last_step, reason=reason, exit_code=exit_code)
        print(f"stopped: {reason}", file=sys.stderr)

    def end(self) -> None:
        """The run has done its last step."""
        self.folder.event("end", self.last_step)

    def close(self) -> None:
        """Finish; waits for Weights & Biases for a bounded time."""
        self.display.close()
        problem = self.wandb.finish()
        if problem:
            self.folder.event("warning", self.last_step, message=problem)
            print(problem, file=sys.stderr)


class Display:
    """A progress bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, steps: int, done: int):
        self.steps = steps
        self.last_line = -math.inf
        self.seconds_per_step: float | None = None
        self.bar = (
            tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)
            if sys.stdout.isatty()
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
        if due or "validation_loss" in metrics or step == self.steps:
            left = (self.steps - step) * self.seconds_per_step
            print(
                f"step {step:>{len(str(self.steps))}}/{self.steps}  {text}  "
                f"{tqdm.format_interval(left)} left",
                flush=True,
            )
            self.last_line = now

    def say(self, line: str) -> None:
        """Show a line that stays."""
        if self.bar is not None:
            self.bar.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Leave the terminal as it should be."""
        if self.bar is not None:
            self.bar.close()


def describe(metrics: dict[str, Any]) -> str:
    """One step in a line."""
    parts = [f"loss {metrics['loss']:.4f}"]
    if "validation_loss" in metrics:
        parts.append(f"validation {metrics['validation_loss']:.4f}")
    parts += [
        f"lr {metrics['learning_rate']:.2e}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"{metrics['tflops_per_gpu']:.3g} TFLOP/s",
    ]
    if metrics["mfu"] is not None:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    return "  ".join(parts)


class WandbThread:
    """Weights & Biases beside the run: whatever it does, training neither waits nor stops."""

    QUEUE_LIMIT = 100_000  # steps; what comes while W&B is stuck for longer than that is dropped
    SECONDS_TO_FINISH = 60.0

    def __init__(self, recipe: Recipe, folder: RunFolder):
        self._folder = folder
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(self.QUEUE_LIMIT)
        self.exit_code = 0  # of this process, should W&B have to be left behind
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        if recipe.tracking.mode != "disabled":
            self._thread = threading.Thread(target=self._work, args=(recipe,), daemon=True)
            self._thread.start()

    def log(self, metrics: dict[str, Any]) -> None:
        """Hand a step over; returns at once."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(metrics)
            except queue.Full:
                self._problem = "Weights & Biases fell behind; metrics.jsonl has every step"

    def finish(self) -> str | None:
        """Wait for what is queued, a bounded time; returns what went wrong, if anything."""
        if self._thread is None:
            return None
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(self.SECONDS_TO_FINISH)
        if self._thread.is_alive():
            # W&B's exit handler would wait longer. This one runs first, and is the last to run.
            atexit.register(self._leave_behind)
            return "Weights & Biases did not finish in time; metrics.jsonl has every step"
        return self._problem

    def _leave_behind(self) -> None:
        """End this process; do first what the exit handlers after this one would do."""
        self._folder.release()
        leave_handlers_out(self.exit_code)

    def _work(self, recipe: Recipe) -> None:
        try:
            run = start_wandb(wandb_arguments(recipe, self._folder.path))
            while (metrics := self._queue.get()) is not None:
                run.log(metrics)
            run.finish()
        except Exception as error:
            self._problem = f"Weights & Biases stopped ({error}); metrics.jsonl has every step"
            while self._queue.get() is not None:
                pass


def start_wandb(arguments: dict[str, Any]) -> Any:
    """`wandb.init`; offline where online fails."""
    import wandb  # takes a second, which the training thread need not wait for

    settings = wandb.Settings(silent=True, console="off", init_timeout=30)
    try:
        run = wandb.init(**arguments, settings=settings)
    except Exception:
        if arguments["mode"] != "online":
            raise
        wandb.teardown()  # the attempt still holds the run's id
        run = wandb.init(**arguments | {"mode": "offline"}, settings=settings)
    run.define_metric("*", step_metric="step")
    return run


def check_wandb(recipe: Recipe, folder: Path, *, keeps_id: bool) -> None:
    """Check what Weights & Biases will be started with, before the engine is built.

    Args:
        recipe: of the run
        folder: the run folder
        keeps_id: whether the run continues the W&B run that the folder names

    Raises:
        UserError: a variable or the file with the run's id is wrong.
    """
    if recipe.tracking.mode == "disabled":
        return
    wandb_mode(recipe)
    run_id = folder / "wandb" / "run_id"
    if keeps_id and run_id.exists():
        read_run_id(run_id)


def wandb_mode(recipe: Recipe) -> str:
    """Return W&B's mode for a run: "online", "offline", or what WANDB_MODE says.

    Raises:
        UserError: WANDB_BASE_URL is not a URL.
    """
    if recipe.tracking.mode != "auto":
        return recipe.tracking.mode
    return os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")


def wandb_arguments(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What `wandb.init` gets: the same run id every time this folder is resumed.

    Mode "auto" is W&B's own WANDB_MODE where that is set.
    """
    tracking, mode = recipe.tracking, wandb_mode(recipe)
    home = folder / "wandb"
    home.mkdir(exist_ok=True)
    run_id = home / "run_id"
    if not run_id.exists():
        write_whole(run_id, secrets.token_hex(4))
    return {
        "project": tracking.project,
        "name": recipe.name,
        "id": read_run_id(run_id),
        "resume": "allow" if mode == "online" else None,
        "tags": list(tracking.tags),
        "config": recipe.model_dump(mode="json") | {"code_version": code_version()},
        "mode": mode,
        "dir": str(folder),
    }


def read_wandb_key() -> None:
    """Take W&B's key from the file that WANDB_API_KEY_FILE names, where it is not set itself.

    Raises:
        UserError: the file cannot be read, other users can read it, or it holds no key.
    """
    name = os.environ.get("WANDB_API_KEY_FILE")
    if not name or os.environ.get("WANDB_API_KEY"):
        return
    file = Path(os.path.expanduser(name))
    try:
        readers, key = file.stat().st_mode & 0o077, file.read_bytes().strip()
    except OSError as error:
        raise UserError(
            f"WANDB_API_KEY_FILE = {name} cannot be read ({error.strerror}); use a file with the "
            f"key and nothing else, or unset it"
        ) from None
    if readers:
        raise UserError(f"WANDB_API_KEY_FILE = {name} can be read by others; use chmod 600 {name}")
    if not re.fullmatch(rb"[!-~]+", key):
        raise UserError(
            f"WANDB_API_KEY_FILE = {name} does not hold a key; use a file with the key and nothing "
            f"else, or unset it"
        )
    os.environ["WANDB_API_KEY"] = key.decode()


def read_run_id(file: Path) -> str:
    """Read the id under which W&B knows a run folder.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """
    try:
        run_id = file.read_text(errors="replace").strip()
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); make it readable, or delete it for a new "
            f"W&B run"
        ) from None
    if not re.fullmatch(r"[A-Za-z0-9_-]+", run_id):
        raise UserError(
            f"{file} holds {run_id[:40]!r} instead of the id of a W&B run; write this run's id "
            f"into it, or delete it for a new W&B run"
        )
    return run_id


def has_wandb_key() -> bool:
    """Whether a key is in the environment or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        host = urlparse(url).hostname or ""
    except ValueError as error:
        raise UserError(
            f"WANDB_BASE_URL = {url}: {error}; use https://api.wandb.ai, or unset it"
        ) from None
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return False
