"""Weights & Biases in a thread of its own, so that training never waits for it or fails with it."""

import atexit
import contextlib
import html
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from models.errors import UserError
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.json_lines import with_metric_per_position
from threefold.runtime.exits import (
    HUNG,
    INTERRUPTED,
    interrupt_advice,
    leave_handlers_out,
    one_interrupt,
)
from threefold.tracking.wandb_connection import (
    WandbStatus,
    choose_mode,
    end_service,
    has_written_all,
    requested_mode,
    restart_offline,
    short,
    start_wandb,
    tear_down,
    untold,
    wandb_arguments,
)

# Alerts in Weights & Biases: what happened to a run, and what launch.py decided.
#
# Pure functions of the events of a run. An alert reaches users by mail or in Slack, if they have
# enabled that in their settings of W&B.

INFO, WARN, ERROR = "INFO", "WARN", "ERROR"  # levels of W&B
MAX_TITLE = 63  # characters, the limit of W&B
MAX_TEXT = 2000
MAX_ALERTS_AT_START = 20  # the newest ones
STARTS = ("start", "resume")
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """An alert.

    Attributes:
        title: W&B sends alerts with the same title at most once a minute
        level: INFO, WARN or ERROR
    """

    title: str
    text: str
    level: str


def alert_of(event: Event) -> Alert | None:
    """Return the alert about an event; None for an event that needs no attention."""
    kind, reason = event.get("event"), str(event.get("reason", ""))
    step = event.get("step")
    if kind == "attempt":
        nodes, unused = _names(event.get("nodes")), _reasons(event.get("unused"))
        text = f"{reason}; after step {step}, on {nodes}; layout: {event.get('layout')}"
        text += f"; not used: {unused}" if unused else ""
        return _alert(f"attempt {event.get('number', '')} started", text, INFO)
    if kind == "attempt_end":
        blamed = _names(event.get("blamed"))
        return _alert(
            f"attempt {event.get('number', '')} ended",
            reason + (f"; blamed: {blamed}" if blamed else ""),
            WARN,
        )
    if kind == "gpu_error":
        left_out = "; the node is left out" if event.get("left_out") else ""
        return _alert(f"GPU error on {event.get('node')}", f"{event.get('error')}{left_out}", ERROR)
    if kind == "slow":
        nodes, ratio = _names(event.get("nodes")), event.get("ratio")
        return _alert("slow ranks", f"step {step}: ranks {event.get('ranks')} on {nodes} take "
                      f"{ratio} times as long as similar ranks", WARN)  # fmt: skip
    if kind == "rollback":
        text = f"step {step}: {reason}; continues after step {event.get('to')}"
        return _alert("rolled back", text, WARN)
    if kind == "skip" and "samples" in event:
        return _alert("step skipped", f"step {step}: {reason}", WARN)
    if kind == "skip":
        return _alert("damaged checkpoint", f"{event.get('checkpoint')}: {reason}", WARN)
    if kind == "stop":
        title = "out of memory" if event.get("out_of_memory") else "stopped"
        title = "no progress" if event.get("exit_code") == HUNG else title
        return _alert(title, reason, ERROR)
    return None


def alerts_at_start(events: Sequence[Event]) -> list[Alert]:
    """Return the alerts about what happened since the previous start and was not sent then.

    Rank 0 has sent alerts about what it recorded itself. Hangs and lacks of memory end the process
    before it can send anything, and launch.py does not send alerts at all.

    Args:
        events: all events up to the start of this process, oldest first
    """
    starts = [place for place, event in enumerate(events) if event.get("event") in STARTS]
    since = events[starts[-1] + 1 :] if starts else events
    failed = any(event.get("event") != "attempt" for event in since if _is_unsent(event))
    alerts = [alert_of(event) for event in since if _is_unsent(event)]
    # The first attempt of launch.py sends no alert.
    return [alert for alert in alerts if alert][-MAX_ALERTS_AT_START:] if failed or starts else []


def launch_facts(events: Iterable[Event], attempt: str) -> dict[str, Any]:
    """Return number, nodes, layout and reason of launch.py's attempt, for the run's page in W&B.

    Args:
        attempt: the lease of the attempt; empty without launch.py
    """
    for event in events:
        if attempt and event.get("event") == "attempt" and event.get("attempt") == attempt:
            keys = {"number": "attempt", "nodes": "nodes", "layout": "layout", "reason": "reason"}
            return {name: event[key] for key, name in keys.items() if key in event}
    return {}


def _is_unsent(event: Event) -> bool:
    kind = event.get("event")
    if kind == "stop":
        return "wall_time" not in event  # the record of an orderly end has it
    if kind == "skip":
        return "checkpoint" in event
    return kind in ("attempt", "attempt_end", "gpu_error")


def _alert(title: str, text: str, level: str) -> Alert:
    return Alert(title[:MAX_TITLE], text[:MAX_TEXT], level)


def _names(value: Any) -> str:
    """Return a list of names for a message; empty if a user has edited it into something else."""
    return ", ".join(map(str, value)) if isinstance(value, list) else ""


def _reasons(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    return ", ".join(f"{node} ({reason})" for node, reason in value.items())


# Pictures, tables and references to checkpoints for Weights & Biases.

TASK_METRIC = re.compile(r"tasks/(?P<task>.+)/(?P<metric>[^/]+)")


@dataclass(frozen=True)
class Picture:
    """A picture or a text about a step, in a file of the run folder.

    Attributes:
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
    """A checkpoint in the run folder. The artifact refers to it and does not contain its files."""

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

    Attributes:
        logged_rows: rows when the table was logged last; W&B keeps each whole table, so that
            logging it after each evaluation would take quadratic space
        has_news: True if scores have been added since then
    """

    def __init__(self, metrics: Iterable[Mapping[str, Any]] = ()):
        self.rows: list[dict[str, Any]] = []
        self.logged_rows = 0
        for line in metrics:
            self.add(line)
        self.has_news = False

    def add(self, metrics: Mapping[str, Any]) -> bool:
        """Add the scores among the metrics of a step; return True if there are any.

        Scores of later steps are dropped, because the run has rolled back.
        """
        summaries: dict[str, dict[str, Any]] = {}
        for key, value in metrics.items():
            if match := TASK_METRIC.fullmatch(key):
                summaries.setdefault(match["task"], {})[match["metric"]] = value
        if summaries:
            step = metrics["step"]
            self.rows = [row for row in self.rows if row["step"] < step]
            self.rows += [
                {"step": step, "task": task} | scores for task, scores in summaries.items()
            ]
            self.has_news = True
        return bool(summaries)

    def metrics(self) -> dict[str, Any]:
        """Return the arguments of `run.log`."""
        import wandb

        self.logged_rows, self.has_news = len(self.rows), False
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        rows = [[row.get(column) for column in columns] for row in self.rows]
        return {"task_scores": wandb.Table(columns=columns, data=rows)}


Item = dict[str, Any] | Alert | Picture | SavedCheckpoint
PredictedMetrics = Callable[[int], Mapping[str, float]]  # step -> metric -> predicted value
ALL_FILES = "*run-*"  # of the offline and online runs in the run folder's wandb/
INTERRUPTED_WHILE_SENDING = "was interrupted while it sent its data"
CUT_OFF = "could not write all of its data to files (the disk may be full)"
SECONDS_UNTIL_WRITTEN = 30.0  # of sent data: W&B's process writes about every 15 s
SECONDS_BETWEEN_CHECKS = 0.1  # for an interrupt, and for the files of W&B
PIXELS = 8  # width and height of an expert in the picture of loads


def nothing_predicted(step: int) -> Mapping[str, float]:
    """Return no predictions."""
    return {}


class WandbThread:
    """A thread that sends metrics, alerts, pictures and checkpoints to Weights & Biases.

    Args:
        facts: facts about this start of the run, for its configuration and its summary
        predicted: returns the planner's predictions for a step, by the name of the metric; sent as
            "planned/..." with the metrics of each step, and, when they change, as configuration
        tell: called in any thread when the mode of Weights & Biases is known, when it changes, and
            before a wait

    Attributes:
        status: the mode, and the place of the data; "failed" before another mode is known
        exit_code: exit code of the run; W&B shows any but 0 and INTERRUPTED as failed. This process
            exits with it if it does not wait for W&B.
        has_told_failure: True if `tell` was called with a failure
    """

    MAX_QUEUED_STEPS = 100_000  # later steps are dropped while W&B does not respond
    SECONDS_BETWEEN_SENDS = 0.5  # waking once for all items in between takes half the CPU time
    SECONDS_TO_FINISH = 60.0
    SECONDS_BEFORE_NOTICE = 1.0  # a shorter wait at the end is not mentioned
    SECONDS_TO_KEEP = 20.0  # after an interrupt

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        facts: Mapping[str, Any] = MappingProxyType({}),
        *,
        predicted: PredictedMetrics = nothing_predicted,
        metrics: Iterable[Mapping[str, Any]] = (),
        tell: Callable[[WandbStatus], None] = untold,
    ):
        self._folder, self._facts = folder, dict(facts)
        self._predicted, self._plan = predicted, dict[str, float]()
        self._tell, self.status = tell, WandbStatus("failed")
        self._is_late = self._is_interrupted = self._awaits_server = self._has_restarted = False
        self._is_finishing, self._ended = threading.Event(), threading.Event()
        self._run: Any = None
        self._queue: queue.Queue[Item | None] = queue.Queue(self.MAX_QUEUED_STEPS)
        self._recent: deque[tuple[float, Item]] = deque()  # with the times at which they were sent
        self._task_table = TaskTable(metrics)
        self.exit_code = 0
        self.has_told_failure = False
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        WandbStatus.remove(folder.path)
        requested = requested_mode(recipe.tracking.mode)
        mode, reason = requested
        if mode != "disabled":
            arguments = recipe, requested
            self._thread = threading.Thread(target=self._work, args=arguments, daemon=True)
            self._thread.start()
        elif reason:  # a variable is involved
            self._change(WandbStatus(mode, reason=reason))

    def send(self, item: Item) -> None:
        """Queue the metrics of a step, an alert, a picture or a checkpoint; return at once."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(item)
            except queue.Full:
                self._problem = "Weights & Biases fell behind"

    def finish(self) -> str | None:
        """Wait a limited time until all metrics are sent; return a problem, or None."""
        if self._thread is None:
            return None
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._is_finishing.set()
        problem = "did not finish in time"
        with one_interrupt():
            try:
                self._wait()
            except KeyboardInterrupt:  # only of this wait: the run has finished
                problem = INTERRUPTED_WHILE_SENDING
                self._interrupt()
        if self._ended.is_set():
            return self._problem
        # The exit handler of W&B would wait longer. Handlers run in reverse order, so this one runs
        # first; it ends the process, so no other one runs.
        self._is_late = True
        atexit.register(self._leave_behind)
        self._fail(f"W&B {problem}")
        return f"Weights & Biases {problem}"

    def _wait(self) -> None:
        """Wait a limited time for the end of the thread.

        After a KeyboardInterrupt in `Thread.join`, Python 3.11 takes a running thread for ended.
        """
        notice = min(self.SECONDS_BEFORE_NOTICE, self.SECONDS_TO_FINISH)
        left = self.SECONDS_TO_FINISH - notice
        if self._ends_within(notice) or not left:
            return
        if not self.has_told_failure:
            subjects = {
                "online": "the run's data to be sent",
                "offline": "the run's data to be written",
            }
            connecting = "an answer, and then for the run's data to be sent or written to files"
            starting = connecting if self._awaits_server else "W&B to start"
            subject = subjects.get(self.status.mode, starting)
            reason = f"for {subject}, for at most {left:g} s in all; "
            reason += f"{interrupt_advice()} to end this wait"
            self._tell(WandbStatus("waiting", reason=reason))
        self._ends_within(left)

    def _ends_within(self, seconds: float) -> bool:
        """Wait for the end of the thread; return False if it is still running after the time.

        A signal does not end a wait that is just beginning, or if another thread receives it.
        Python then raises KeyboardInterrupt after the wait, so the waits are short.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._ended.wait(min(left, SECONDS_BETWEEN_CHECKS)):
                return True
        return self._ended.is_set()

    def _interrupt(self) -> None:
        """End the wait for the server, but keep unsent data; a second KeyboardInterrupt ends this.

        Without a connection, no data has left this thread, which writes an offline run as soon as
        the service process has ended. An online run's service process writes data into its file
        about every 15 s only.
        """
        self._is_interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            if self.status.mode == "online":
                reason = (
                    f"for its unsent data to be written to files, for at most "
                    f"{self.SECONDS_TO_KEEP:g} s; {interrupt_advice()} to end this wait, too"
                )
                self._tell(WandbStatus("waiting", reason=reason))
            deadline, is_killed = time.monotonic() + self.SECONDS_TO_KEEP, False
            while not self._ended.wait(SECONDS_BETWEEN_CHECKS) and time.monotonic() < deadline:
                if self.status.mode == "failed" and not self._has_restarted:  # not started yet
                    is_killed = is_killed or end_service()
                elif self.status.mode == "online" and has_written_all(self._run):
                    break

    def _leave_behind(self) -> None:
        """End this process, after the work of those exit handlers that are still needed."""
        self._folder.release()
        leave_handlers_out(self.exit_code)

    def _work(self, recipe: Recipe, requested: tuple[str, str]) -> None:
        is_read = False  # the end of the queue
        try:
            arguments = wandb_arguments(recipe, self._folder.path)
            # At Ctrl-C, the launcher `deepspeed` ends all processes that descend from it, also that
            # of W&B, which can be starting, or hold data that are not in a file yet.
            try:
                started = start_wandb(requested, arguments, tell=self._tell_wait)
            except Exception as error:
                if self._is_late:
                    raise
                mode, reason = choose_mode(*requested)
                run = self._restarted(arguments, error, WandbStatus(mode, reason=reason))
            else:
                run = self._started(*started)
            while (item := self._next()) is not None:
                self._recent.append((time.monotonic(), item))
                while self._recent[0][0] < time.monotonic() - SECONDS_UNTIL_WRITTEN:
                    self._recent.popleft()
                try:
                    self._send(run, item)
                except Exception as error:
                    if self._has_restarted or self._is_late:
                        raise
                    run = self._restarted(arguments, error, self.status)
            is_read = True
            try:
                self._finish(run)
            except Exception as error:
                if self._has_restarted or self._is_late or self.status.mode != "offline":
                    raise
                self._finish(self._restarted(arguments, error, self.status))
        except Exception as error:
            if self._is_interrupted:
                self._problem = f"Weights & Biases {INTERRUPTED_WHILE_SENDING}"
                self._fail(f"W&B {INTERRUPTED_WHILE_SENDING}")
            else:
                self._problem = f"Weights & Biases failed ({short(error)})"
                self._fail(f"of an error ({short(error)})")
            while not is_read:
                is_read = self._queue.get() is None
        finally:
            try:
                tear_down()  # W&B's process now writes the rest
                if self.status.mode == "offline" and has_written_all(self._run) is False:
                    self._problem = f"Weights & Biases {CUT_OFF}"
                    self._fail(f"W&B {CUT_OFF}")
            finally:
                self._ended.set()

    def _finish(self, run: Any) -> None:
        """Log the table, and finish the run, as failed unless it is complete or can be resumed."""
        if (table := self._task_table).has_news:
            run.log({"step": table.rows[-1]["step"]} | table.metrics())
        run.finish(exit_code=0 if self.exit_code == INTERRUPTED else self.exit_code)

    def _next(self) -> Item | None:
        """Return the next item, or None at the end.

        If the queue is empty, items collect for SECONDS_BETWEEN_SENDS, or until `finish`.
        """
        if self._queue.empty():
            self._is_finishing.wait(self.SECONDS_BETWEEN_SENDS)
        return self._queue.get()

    def _restarted(self, arguments: dict[str, Any], error: Exception, earlier: WandbStatus) -> Any:
        """Continue the run offline after an error, and send what may not have reached a file.

        earlier: the status until now; a run that was offline anyway keeps its reason
        """
        self._has_restarted = True
        has_sent = self._run is not None and earlier.mode == "online"
        files = ALL_FILES if has_sent else "offline-run-*"
        run, status = restart_offline(arguments, error, files)
        if earlier.mode == "offline":
            status = replace(status, reason=earlier.reason)
        self._started(run, status)
        self._task_table.logged_rows, self._task_table.has_news = 0, bool(self._task_table.rows)
        for _, item in self._recent:  # some may be sent twice
            self._send(run, item)
        return run

    def _tell_wait(self, status: WandbStatus) -> None:
        """Tell that the run waits for the server, before it has another mode."""
        self._awaits_server = True
        self._tell(status)

    def _started(self, run: Any, status: WandbStatus) -> Any:
        """Tell the mode of a run that has started, describe the run, and return it."""
        if self._is_interrupted and status.mode == "offline":
            status = replace(status, reason="the wait for its server was interrupted")
        self._plan, self._run = {}, run
        self._change(status)
        self._describe(run)
        return run

    def _fail(self, reason: str) -> None:
        """Tell that some of the data has not been sent."""
        self.has_told_failure = True
        files = str(self._folder.path / "wandb" / ALL_FILES)
        if self.status.mode in ("offline", "incomplete"):
            files = self.status.where
        if self.status.mode != "failed":  # it has started
            self._change(WandbStatus("incomplete", files, reason))
        else:
            mode = "disabled" if self._is_interrupted else "failed"
            self._change(WandbStatus(mode, reason=reason))

    def _change(self, status: WandbStatus) -> None:
        """Record a status, and tell it unless neither the mode nor the reason has changed."""
        self._folder.check_lease()
        is_new = replace(status, where="") != replace(self.status, where="")
        self.status = status
        status.write(self._folder.path)
        if is_new:
            self._tell(status)

    def _describe(self, run: Any) -> None:
        """Send what is known before the first step."""
        if measured := preflight_metrics(self._folder):
            run.log(measured)
        if self._facts:
            run.config.update({"launch": self._facts}, allow_val_change=True)
            run.summary.update({f"launch/{name}": fact for name, fact in self._facts.items()})

    def _send(self, run: Any, item: Item) -> None:
        match item:
            case Alert():
                run.alert(item.title, item.text, item.level)
            case Picture():
                with contextlib.suppress(OSError):  # the file is gone again
                    run.log(item.metrics())
            case SavedCheckpoint():
                item.log(run)
            case _:
                metrics = with_heat_map(with_metric_per_position(item))
                metrics |= self._planned(run, item["step"])
                table = self._task_table
                if table.add(item) and len(table.rows) >= 2 * table.logged_rows:
                    metrics |= table.metrics()
                run.log(metrics)

    def _planned(self, run: Any, step: int) -> dict[str, float]:
        """Return the predictions for a step, and update the configuration if they have changed."""
        if (plan := dict(self._predicted(step))) != self._plan:
            run.config.update({"plan": plan}, allow_val_change=True)
            self._plan = plan
        return {f"planned/{name}": value for name, value in plan.items()}


def preflight_metrics(folder: RunFolder) -> dict[str, Any]:
    """Return the medians and the lowest values of the newest preflight; empty if there is none."""
    try:
        events = folder.read_events()
    except UserError:  # the run itself reports what it cannot read
        return {}
    preflights = [event for event in events if event.get("event") == "preflight"]
    if not preflights:
        return {}
    return {"step": preflights[-1].get("step", 0)} | {
        f"preflight/{measure.replace(' ', '_')}_{key}": values[key]
        for measure, values in preflights[-1].get("measures", {}).items()
        for key in ("median", "lowest")
    }


def with_heat_map(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics with a picture in place of the counts of experts, if there are any.

    Rows are layers and columns are experts. An expert with the mean number of tokens is gray, one
    with none is black, and one with twice the mean or more is white.
    """
    counts = metrics.get("expert_counts")
    if counts is None:
        return metrics
    import wandb

    loads = [[count * len(row) / sum(row) for count in row] for row in counts]
    pixels = [[min(255, round(load * 127.5)) for load in row] for row in loads]
    others = {key: value for key, value in metrics.items() if key != "expert_counts"}
    picture = np.array(pixels, dtype=np.uint8).repeat(PIXELS, 0).repeat(PIXELS, 1)
    return others | {"expert_load": wandb.Image(picture, caption="layers x experts")}
