"""Rows of sweep.csv: columns that plan.py --table reads, and those of a sweep."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GPT_SWITCHES, changed, small_recipe
from threefold.config.loading import REPOSITORY, load_recipe, parse_recipe
from threefold.plan.calibration.runs_table import (
    REQUIRED_COLUMNS,
    SWITCH_COLUMNS,
    read_table,
)
from threefold.plan.report import rates
from threefold.sweep.folder import (
    COLUMNS,
    row_of_rejection,
    row_of_result,
    row_of_trial,
    table_text,
)
from threefold.sweep.trial import (
    LATER_MODEL_KEYS,
    Rejection,
    Result,
    Trial,
    without_later_keys,
)

SHAPES = {
    "llama": {},
    "gpt": GPT_SWITCHES,
    "pipeline": {
        "model__layers": 8,
        "layout": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 4},
        "cluster": {"nodes": 2, "gpus_per_node": 2, "gpu": "H100"},
    },
    "tensor": {
        "layout": {"tensor": 2, "sequence_parallel": True, "recompute": "full"},
        "batch__micro_sequences": 1,
    },
    "experts": {
        "layout": {"expert": 2},
        "model__experts": {
            "count": 8,
            "per_token": 2,
            "ffn_hidden_size": 64,
            "shared": 1,
            "dense_layers": 1,
        },
    },
    "ZeRO-3": {"deepspeed": "ds_configs/zero3_bf16.json"},
    "erf": {**GPT_SWITCHES, "model__activation": "gelu_erf", "model__bias": False},
    "windows": {
        "model__attention_pattern": ["window", "full"],
        "model__window": {"size": 16},
        "model__attention_sinks": True,
        "model__qkv_bias": True,
        "model__norm_placement": "both",
        "model__qk_norm": True,
        "model__qk_norm_over": "projection",
        "model__activation": "geglu",
    },
    "fp8": {"training__matmul_precision": "fp8", "model__head_size": 128},
    "muon": {"optimizer__kind": "muon", "optimizer__qk_clip": 100.0},
    "average, documents": {
        "optimizer__average": {"decay": 0.9, "every": 4},
        "data__separate_documents": True,
        "layout": {"pipeline": 2, "reduce_every": 2},
        "deepspeed": "ds_configs/zero2_bf16.json",
        "batch__micro_sequences": 1,
    },
}


def trial_of(**changes: Any) -> Trial:
    cluster = {"cluster": {"nodes": 1, "gpus_per_node": 4, "gpu": "H100"}}
    bf16 = {"deepspeed": "ds_configs/zero1_bf16.json"}
    table = changed(small_recipe(Path("absent")), **bf16 | cluster | changes)
    return Trial("small.toml", parse_recipe(table, "small"), 2, 5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_planner_reads_back_the_job(shape: str, tmp_path: Path) -> None:
    trial = trial_of(**SHAPES[shape])
    result = Result(outcome="ok", step_seconds=[0.3, 0.1, 0.2], memory_gib=1.5)
    row = row_of_trial(trial) | row_of_result(trial, result)
    # The planner's stack for the rows of a sweep is not known to `row_reader` here.
    text = table_text([row | {"framework": "Megatron-Core"}])
    (tmp_path / "sweep.csv").write_text(text)
    (read,) = read_table(tmp_path / "sweep.csv")
    assert read.skipped == "" and read.job is not None
    ours = trial.job
    for name in ("tensor", "pipeline", "virtual_stages", "data", "zero_stage", "sequence_parallel",
                 "recompute", "micro_sequences", "expert", "reduce_every"):  # fmt: skip
        assert getattr(read.job.layout, name) == getattr(ours.layout, name), name
    for name in ("layers", "kv_heads", "experts", *SWITCH_COLUMNS):
        assert getattr(read.job.model, name) == getattr(ours.model, name), name
    for name in ("optimizer", "limits_logits", "average_every", "separate_documents",
                 "quantization"):  # fmt: skip
        assert getattr(read.job, name) == getattr(ours, name), name
    assert read.job.machine.gpus == ours.machine.gpus
    assert read.job.machine.gpu.name == ours.machine.gpu.name
    assert read.job.precision == ours.precision
    assert read.job.global_sequences == ours.global_sequences
    assert read.measured.step_seconds == 0.2 and read.measured.memory_gib == 1.5
    assert not read.measured.out_of_memory


CPU = "cluster={nodes=1, gpus_per_node=4, gpu='cpu'}"


@pytest.mark.parametrize(
    ("recipe", "setting", "reason"),
    [
        ("tiny-mla", CPU, "arch latent attention"),
        (
            "tiny",
            "model.prediction={depth=1, loss_weight=0.3}",
            "arch prediction of further tokens",
        ),
    ],
)
def test_rows_whose_model_the_columns_cannot_describe_are_skipped(
    recipe: str, setting: str, reason: str, tmp_path: Path
) -> None:
    trial = Trial("x", load_recipe(REPOSITORY / "recipes" / f"{recipe}.toml", [CPU, setting]), 2, 5)
    (tmp_path / "sweep.csv").write_text(table_text([row_of_trial(trial)]))
    (read,) = read_table(tmp_path / "sweep.csv")
    assert read.job is None and read.skipped == f"{reason} is not modelled"


def test_the_columns_are_those_of_a_table_of_runs() -> None:
    assert set(COLUMNS) >= REQUIRED_COLUMNS
    row = row_of_trial(trial_of())
    assert set(row) <= set(COLUMNS)
    assert row["framework"] == "Threefold" and row["recipe"] == "small.toml"
    assert row["planned_step_s"] > 0 and row["planned_mem_gb"] > 0


def test_out_of_memory_is_a_measurement_and_a_hang_is_none(tmp_path: Path) -> None:
    trial = trial_of()
    rows = []
    for outcome in ("out_of_memory", "hung", "crashed"):
        result = row_of_result(trial, Result(outcome=outcome, reason="because"))
        rows.append(row_of_trial(trial) | result)
    assert [row.get("oom") for row in rows] == [1, None, None]
    assert {row["usable_for_time"] for row in rows} == {0}
    (tmp_path / "a.csv").write_text(table_text(rows))
    read = read_table(tmp_path / "a.csv")
    assert [row.measured.out_of_memory for row in read] == [True, False, False]


def test_a_rejected_combination_is_a_row_that_is_skipped(tmp_path: Path) -> None:
    rejection = Rejection("small.toml", "layout.tensor=3", 'model.heads = 4, "no"\nway')
    row = row_of_rejection(rejection) | {"outcome": "rejected", "reason": rejection.reason}
    text = table_text([row])
    (cells,) = csv.DictReader(io.StringIO(text))
    assert cells["reason"] == rejection.reason and "layout.tensor=3" in cells["recipe"]
    (tmp_path / "a.csv").write_text(text)
    assert read_table(tmp_path / "a.csv")[0].skipped


def test_rates_follow_from_the_median(tmp_path: Path) -> None:
    trial = trial_of()
    result = Result(outcome="ok", step_seconds=[0.1, 0.4, 0.2, 9.0])
    row = row_of_result(trial, result)
    assert result.median_seconds == pytest.approx(0.3)
    tokens = trial.recipe.tokens_per_step
    assert row["tokens_s_gpu"] == pytest.approx(tokens / 0.3 / 4, rel=1e-4)
    mfu = rates(trial.job, 0.3).mfu
    assert row["mfu_pct"] == pytest.approx(100 * mfu, rel=1e-3)
    assert row["mfu_pct"] == pytest.approx(
        row_of_result(trial, Result(outcome="ok", step_seconds=[0.6]))["mfu_pct"] * 2, rel=1e-3
    )


def test_the_fastest_rows_come_first() -> None:
    base = {"recipe": "a", "gpus": 2}
    rows = [
        base | {"trial": "1", "planned_step_s": 0.1},
        base | {"trial": "2", "step_time_s": 0.5},
        base | {"trial": "3", "step_time_s": 0.25},
    ]
    ordered = [cells["trial"] for cells in csv.DictReader(io.StringIO(table_text(rows)))]
    assert ordered == ["3", "2", "1"]


def test_a_key_that_older_versions_lacked_counts_only_if_it_is_set() -> None:
    """The results of an older sweep folder are found again."""
    trial = trial_of()
    table = trial.recipe.model_dump(mode="json")["model"]
    older = without_later_keys(trial.recipe.model, table)
    assert set(table) - set(older) == set(LATER_MODEL_KEYS)
    other = trial_of(model__attention_sinks=True)
    newer = without_later_keys(other.recipe.model, other.recipe.model_dump(mode="json")["model"])
    assert set(newer) - set(older) == {"attention_sinks"}
    in_fp8 = trial_of(training__matmul_precision="fp8")
    assert len({trial.identity, other.identity, in_fp8.identity}) == 3
