"""Rows of sweep.csv: the columns of `plan.py table`'s input, and those of a sweep."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from models.config import ModelConfig
from threefold.plan.calibration.runs_table import EXPERT_COLUMNS, SWITCH_COLUMNS, switch_cells
from threefold.plan.job import PlannedLayout
from threefold.plan.report import rates
from threefold.sweep.trial import (
    PARTS,
    PLANNED_PARTS,
    Rejection,
    Result,
    Split,
    Trial,
    planned_parts,
)

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
    "planned_step_s", "planned_mem_gb", "mfu_pct", "tokens_s_gpu", "steps", "trial", "recipe",
    *(name for name in SWITCH_COLUMNS if name not in ALWAYS_STATED),
    *(f"{part}_s" for part in PARTS), "instrumented_step_s",
    *(f"planned_{part}_s" for part in PLANNED_PARTS),
)  # fmt: skip

Row = dict[str, Any]


def row_of_trial(trial: Trial) -> Row:
    """Return the columns that describe a trial and its plan."""
    job, model, cluster = trial.job, trial.job.model, trial.cluster
    layout, arch = job.layout, "llama" if model.norm == "rmsnorm" else "gpt"
    return {
        **switch_cells(model, arch),
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
        "precision": job.precision,
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
        rate = rates(trial.job, seconds, 1)
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
