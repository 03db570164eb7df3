"""The folder of a sweep, and the rows of its table, sweep.csv.

Several schedulers may share the folder, and it outlives each of them.

    sweep.json           the measuring settings, which all trials share
    trials/KEY.json      a trial: its recipe, its plan and its row of the table
    results/KEY.json     the trial's result; without this file, the trial is still to be measured
    claims/KEY/          the lock of the scheduler that measures the trial
    corpora/             synthetic training data
    workers/ID/          files of the processes of one scheduler
    sweep.csv            one row per trial, rewritten after each result: the columns of
                         `plan.py table`'s input, and those of a sweep

Files are written under another name, flushed to the disk and then renamed, so that each is either
complete or missing.
"""

import contextlib
import csv
import errno
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.errors import FULL_DISK_ERRORS, UserError, check_links
from threefold.config.loading import value_text
from threefold.plan.calibration.runs_table import EXPERT_COLUMNS, SWITCH_COLUMNS, switch_cells
from threefold.plan.job import PlannedLayout
from threefold.plan.report import rates
from threefold.plan.time.step import TIME_PARTS
from threefold.prove.shrink import write_corpus
from threefold.run_folder.json_lines import flush, write_whole
from threefold.run_folder.lock import FolderInUse, FolderLock
from threefold.sweep.ranks.controller import WorkersFolder
from threefold.sweep.trial import (
    FAULTS,
    PARTS,
    Rejection,
    Result,
    Split,
    Trial,
    planned_parts,
    preference,
)

# The rows of the table.

FRAMEWORK = "Threefold"
ALWAYS_STATED = ("tie_embeddings", "qk_norm")  # also where they are those of the architecture
COLUMNS = (
    "row_id", "framework", "arch", "layers", "hidden", "heads", "kv_heads", "head_size", "ffn",
    "vocab", "seq", "tie_embeddings", "qk_norm", "gpu", "gpus", "gpus_per_node", "precision",
    "attention_kernel", "tp", "pp", "vpp", "cp", "cp_kind", "dp", *EXPERT_COLUMNS, "ep", "etp",
    "ep_overlap",
    "zero_stage", "seq_parallel", "recompute", "mbs", "gbs", "step_time_s", "round_times_s",
    "mem_gb", "oom", "usable_for_time", "schedule", "recompute_interval", "layers_per_stage",
    "outcome", "reason",
    "optimizer_kind", "qk_clip", "average_every", "separate_documents", "reduce_every",
    "planned_step_s", "planned_mem_gb", "mfu_pct", "tokens_s_gpu", "steps", "trial", "recipe",
    *(name for name in SWITCH_COLUMNS if name not in ALWAYS_STATED),
    *(f"{part}_s" for part in PARTS), "instrumented_step_s",
    *(f"planned_{part}_s" for part in TIME_PARTS),
)  # fmt: skip

Row = dict[str, Any]


def row_of_trial(trial: Trial) -> Row:
    """Return the columns that describe a trial and its plan."""
    job, model, cluster = trial.job, trial.job.model, trial.cluster
    layout, arch = job.layout, "llama" if model.norm == "rmsnorm" else "gpt"
    cells = switch_cells(model, arch)
    # The columns cannot describe these models. `plan.py table` skips rows of an unknown `arch`.
    if model.latent:
        arch = "latent attention"
    elif model.prediction:
        arch = "prediction of further tokens"
    return {
        **cells,
        "row_id": f"{trial.recipe.name}-{trial.key[:8]}",
        "framework": FRAMEWORK,
        "arch": arch,
        "layers": model.layers,
        "hidden": model.hidden_size,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_size": model.attention_head_size,
        "ffn": model.ffn_hidden_size,
        "vocab": model.vocab_size,
        "seq": model.sequence_length,
        **{name: int(getattr(model, name)) for name in ALWAYS_STATED},
        "gpu": cluster.gpu,
        "gpus": trial.workers.size,
        "gpus_per_node": cluster.gpus_per_node,
        "precision": job.quantization.kind if job.quantization else job.precision,
        "attention_kernel": "unfused" if job.writes_scores else "flash",
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "vpp": layout.virtual_stages,
        "cp": layout.context,
        "cp_kind": layout.context_attention if layout.context > 1 else "",
        "dp": layout.data,
        "ep": layout.expert if model.experts else "",
        "etp": layout.expert_tensor if model.experts else "",
        "ep_overlap": int(layout.expert_overlap) if model.experts else "",
        **expert_columns(model),
        "zero_stage": zero_cell(layout),
        "seq_parallel": int(layout.sequence_parallel),
        "recompute": layout.recompute,
        "mbs": layout.micro_sequences,
        "gbs": job.global_sequences,
        "schedule": layout.schedule,
        "recompute_interval": layout.recompute_interval,
        "optimizer_kind": job.optimizer,
        "qk_clip": int(job.limits_logits),
        "average_every": job.average_every or "",
        "separate_documents": int(job.separate_documents),
        "reduce_every": layout.reduce_every or "",
        "layers_per_stage": " ".join(str(count) for count in job.blocks_of_virtual_stages),
        "planned_step_s": digits(trial.planned_seconds),
        "planned_mem_gb": digits(trial.planned_gib),
        "steps": trial.steps,
        "trial": trial.key,
        "recipe": trial.source,
    }


def zero_cell(layout: PlannedLayout) -> str:
    """Return the ZeRO stage; with shard groups also their size, as "zero1=8"."""
    stage, group = layout.zero_stage, layout.dp_shard
    return f"zero{stage}={group}" if group else str(stage)


def expert_columns(model: ModelConfig) -> Row:
    """Return the columns that describe the experts of a model; empty for a dense model."""
    if model.experts is None:
        return {}
    return {name: getattr(model.experts, key) for name, key in EXPERT_COLUMNS.items()}


def row_of_rejection(rejection: Rejection) -> Row:
    """Return the columns of a combination that is not tried."""
    if rejection.trial:
        return row_of_trial(rejection.trial)
    return {
        "row_id": f"rejected-{rejection.key[:8]}",
        "framework": FRAMEWORK,
        "trial": rejection.key,
        "recipe": f"{rejection.source} ({rejection.settings})",
    }


def row_of_result(trial: Trial | None, result: Result) -> Row:
    """Return the columns of a trial's result."""
    measured: Row = {}
    seconds = result.median_seconds
    if trial is not None and seconds is not None:
        rate = rates(trial.job, seconds)
        measured = {
            "step_time_s": digits(seconds),
            "mfu_pct": digits(100 * rate.mfu),
            "tokens_s_gpu": digits(rate.tokens_per_second / trial.workers.size),
        }
        if result.split is not None:
            measured |= columns_of_split(trial, result.split)
    if result.memory_gib is not None:
        measured["mem_gb"] = digits(result.memory_gib)
    if result.outcome in ("ok", "out_of_memory"):
        measured["oom"] = int(result.outcome == "out_of_memory")
    return measured | {
        "usable_for_time": int(result.outcome == "ok"),
        "outcome": result.outcome,
        "reason": result.reason,
    }


def columns_of_split(trial: Trial, split: Split) -> Row:
    """Return the columns of the measured and the planned split of a step."""
    planned = planned_parts(trial.planned_time)
    return {
        **{f"{part}_s": digits(seconds) for part, seconds in split.parts.items()},
        "instrumented_step_s": digits(split.instrumented_seconds),
        **{f"planned_{part}_s": digits(seconds) for part, seconds in planned.items()},
    }


def digits(value: float) -> float:
    """Return a number with five significant digits."""
    return float(f"{value:.5g}")


def table_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as CSV, by recipe, number of GPUs and measured step time."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=order))
    return stream.getvalue()


def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a row's position: by recipe, number of GPUs, measured time, planned time, key."""
    missing = float("inf")
    return (
        row["recipe"],
        row.get("gpus", 0),
        row.get("step_time_s", missing),
        row.get("planned_step_s", missing),
        row["trial"],
    )


# The folder and its files.

PROBE_BYTES = 2**16


class SweepStopped(Exception):
    """The sweep cannot continue; the message tells the user how to fix the cause."""


class SweepFolder:
    """The folder of a sweep, as one scheduler uses it.

    Args:
        path: the folder, created if it does not exist
        settings: measuring settings, which must equal those of the trials already in the folder

    Raises:
        UserError: the folder cannot be written, or its trials have other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self.path = path
        self._own_workers = WorkersFolder(path / "workers")
        self.workers, self.own = self._own_workers.parent, self._own_workers.path
        self._rows: dict[str, tuple[int, Row]] = {}  # with the time of the result's file
        self._retried: dict[str, int] = {}  # failed trials, with the time of the result's file
        self._tried_locks: dict[str, FolderLock] = {}
        with self.stops_without_space():
            self._create()
            self._check_settings(settings)
        self._own_workers.start_heartbeat()

    def close(self) -> None:
        """Remove the files of this scheduler, and those that dead schedulers left behind."""
        self._own_workers.close()
        self._remove_abandoned_claims()
        with contextlib.suppress(OSError):  # another scheduler uses it
            (self.path / "claims").rmdir()

    def add(self, trial: Trial) -> None:
        """Record a trial, unless an earlier command has already recorded it."""
        file = self._trial_file(trial.key)
        if not file.exists():
            recipe = trial.recipe.model_dump(mode="json", exclude_none=True)
            row = self._row_of_trial(trial)
            table = {"identity": trial.identity, "round": trial.round, "row": row}
            self._write_json(file, table | {"recipe": recipe})

    def add_rejection(self, rejection: Rejection) -> None:
        """Record a combination that is not tried, with the reason."""
        row = row_of_rejection(rejection)
        self._write_json(self._trial_file(rejection.key), {"identity": rejection.key, "row": row})
        result = Result(outcome=rejection.outcome, reason=rejection.reason)
        self._write_json(self._result_file(rejection.key), {"result": result.as_json(), "row": {}})

    def retry_failures(self) -> None:
        """Let `result_of` return None for trials that have failed so far, to measure them again.

        A result stays in the folder until a new one replaces it, because other commands may read it
        at the same time.
        """
        for file in (self.path / "results").glob("*.json"):
            result = self.result(file.stem)
            if result is not None and self._is_failure(result):
                self._retried[file.stem] = file.stat().st_mtime_ns

    def result(self, key: str) -> Result | None:
        """Return the result of a trial, or None if it is still to be measured."""
        table = read_json(self._result_file(key))
        return Result.from_json(table["result"]) if table else None

    def result_of(self, trial: Trial) -> Result | None:
        """Return the result of a trial, or None if it is still to be measured.

        A trial that asks for the split of a step is measured again if its result has none, and a
        failed one after `retry_failures`.
        """
        result = self.result(trial.key)
        if result is None or not result.answers(trial) or self._awaits_retry(trial.key):
            return None
        return result

    def record(self, trial: Trial, result: Result) -> None:
        """Write the result of a trial, and rewrite the table."""
        row = self._row_of_result(trial, result)
        self._write_json(self._result_file(trial.key), {"result": result.as_json(), "row": row})
        self.write_table()

    @contextlib.contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Claim a trial for this scheduler, and release it at the end.

        Yields:
            True if the claim succeeded, False if another scheduler measures the trial.
        """
        folder = self.path / "claims" / key
        # Keep one lock per trial, because it compares the holder's heartbeats between attempts.
        lock = self._tried_locks.setdefault(key, FolderLock(folder))
        with self.stops_without_space():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            except (FolderInUse, FileNotFoundError):  # the holder may just have released it
                yield False
                return
        del self._tried_locks[key]
        try:
            yield True
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # while the lock is still held
            lock.release()

    def corpus(self, vocab_size: int, sequence_length: int) -> Path:
        """Return the folder of a synthetic corpus, which the first call writes."""
        folder = self.path / "corpora" / f"vocabulary-{vocab_size}-sequence-{sequence_length}"
        if not folder.exists():
            fresh = self.own / folder.name
            with self.stops_without_space():
                write_corpus(fresh, vocab_size, validation_tokens=2 * sequence_length)
                folder.parent.mkdir(exist_ok=True)
                try:
                    fresh.rename(folder)
                except OSError as problem:
                    if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
        return folder

    def write_table(self) -> None:
        """Write sweep.csv with one result for each trial in the folder.

        A trial with several results is represented by the one with the most steps; among those, as
        `preference` decides.
        """
        for file in sorted((self.path / "results").glob("*.json")):
            written, _ = self._rows.get(file.stem, (0, None))
            if (changed := file.stat().st_mtime_ns) != written:
                trial, result = read_json(self._trial_file(file.stem)), read_json(file)
                if trial and result:
                    row = trial["row"] | result["row"]
                    outcome = {key: result["result"][key] for key in ("outcome", "reason")}
                    row = {"usable_for_time": 0} | row | outcome
                    of_trial = {"identity": trial["identity"], "round": trial.get("round", 1)}
                    self._rows[file.stem] = changed, row | of_trial
        by_trial: dict[str, list[Row]] = {}
        for _, row in self._rows.values():
            by_trial.setdefault(row["identity"], []).append(row)
        rows = [with_rounds(max(of, key=_order_of_rounds), of) for of in by_trial.values()]
        self._write(self.path / "sweep.csv", table_text(rows))

    def check_space(self) -> None:
        """Check that files can still be written, after a failure that a full disk may explain.

        Raises:
            SweepStopped: the disk is full.
        """
        probe = self.own / "probe"
        self._write(probe, " " * PROBE_BYTES)
        probe.unlink(missing_ok=True)

    @contextlib.contextmanager
    def stops_without_space(self) -> Iterator[None]:
        """Turn the error of a full disk into a message.

        Raises:
            SweepStopped: the disk is full.
        """
        try:
            yield
        except OSError as problem:
            if problem.errno not in FULL_DISK_ERRORS:
                raise
            raise SweepStopped(
                f"{self.path} cannot be written ({problem.strerror}); free disk space and rerun "
                f"the same command to continue"
            ) from None

    def _row_of_trial(self, trial: Trial) -> Row:
        """Return the columns of the table that describe a trial."""
        return row_of_trial(trial)

    def _row_of_result(self, trial: Trial, result: Result) -> Row:
        """Return the columns of the table with the measured values of a trial."""
        return row_of_result(trial, result)

    def _is_failure(self, result: Result) -> bool:
        """Return True if `sweep.py --retry` measures a trial with this result again."""
        return result.outcome in (*FAULTS, "rejected")

    def _awaits_retry(self, key: str) -> bool:
        """Return True if the result of a trial is a failure from before `retry_failures`."""
        before = self._retried.get(key)
        return before is not None and self._result_file(key).stat().st_mtime_ns == before

    def _remove_abandoned_claims(self) -> None:
        """Remove the claims of schedulers that no longer run."""
        with contextlib.suppress(OSError):  # another scheduler removes them
            for folder in list((self.path / "claims").glob("*")):
                lock = FolderLock(folder)
                with contextlib.suppress(FolderInUse, OSError):
                    lock.acquire()
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.release()

    def _create(self) -> None:
        try:
            check_links(self.path, "use another --sweep-dir")
            for name in ("trials", "results", "claims"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            self._own_workers.create()
        except OSError as problem:
            if problem.errno in FULL_DISK_ERRORS:
                raise
            raise UserError(
                f"{self.path} cannot be written ({problem.strerror}); use another --sweep-dir"
            ) from None

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the measuring settings, or compare them with those of an earlier command."""
        file, fresh = self.path / "sweep.json", self.own / "sweep.json"
        fresh.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        flush(fresh)
        with contextlib.suppress(FileExistsError):
            os.link(fresh, file)  # fails if another scheduler was first
        earlier = read_json(file) or {}
        if other := {key: value for key, value in earlier.items() if settings.get(key) != value}:
            new = {key: value for key, value in settings.items() if earlier.get(key) != value}
            was, now = (
                ", ".join(f"{key} = {value_text(value)}" for key, value in each.items())
                for each in (other, new)
            )
            self.close()
            raise UserError(
                f"{self.path} has trials that were measured with {was}, which cannot be compared "
                f"with {now}; use the same settings, or another --sweep-dir"
            )

    def _trial_file(self, key: str) -> Path:
        return self.path / "trials" / f"{key}.json"

    def _result_file(self, key: str) -> Path:
        return self.path / "results" / f"{key}.json"

    def _write_json(self, file: Path, table: Any) -> None:
        self._write(file, json.dumps(table, indent=1) + "\n")

    def _write(self, file: Path, text: str) -> None:
        """Replace a file atomically, through a temporary file in this scheduler's own folder."""
        with self.stops_without_space():
            write_whole(file, text, fresh=self.own / f"{file.name}.incomplete")
            flush(file.parent)


def with_rounds(chosen: Row, rows: Sequence[Row]) -> Row:
    """Return the columns of the row that represents a trial, with the times of all its rounds.

    Args:
        rows: all results of the trial; successive halving has only one with each number of steps
    """
    times = {
        row["round"]: row["step_time_s"]
        for row in rows
        if row.get("steps") == chosen.get("steps") and row.get("step_time_s")
    }
    table = {key: value for key, value in chosen.items() if key not in ("identity", "round")}
    if len(times) > 1:
        table["round_times_s"] = " ".join(str(times[number]) for number in sorted(times))
    return table


def _order_of_rounds(row: Row) -> tuple[Any, ...]:
    """Return a sort key of a trial's rows; the last row in this order is written to the table."""
    split, seconds = "instrumented_step_s" in row, row.get("step_time_s")
    return row.get("steps", 0), preference(outcome=row["outcome"], split=split, seconds=seconds)


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the content of a file, or None if it does not exist or is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
