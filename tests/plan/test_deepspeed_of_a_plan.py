"""The DeepSpeed JSON of a layout with another ZeRO stage than the recipe's."""

import json
import subprocess
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_here
from threefold.commands import plan
from threefold.config.deepspeed_json import different_settings
from threefold.config.loading import REPOSITORY
from threefold.launch.replanning import Replanner

SHIPPED = sorted((REPOSITORY / "ds_configs").glob("*.json"))


def write(folder: Path, stage: int = 2, **settings: Any) -> Path:
    """Write a JSON of a user, and return its file."""
    zero = {"stage": stage} | settings.pop("zero_optimization", {})
    file = folder / "own.json"
    file.write_text(json.dumps(settings | {"zero_optimization": zero}))
    return file


def run_plan(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Plan tiny.toml, whose fastest layout has ZeRO-1."""
    return run_here(
        plan.main, REPOSITORY / "recipes/tiny.toml", f"--set=deepspeed={file}", *options
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shipped_files_differ_only_in_their_stage(precision: str) -> None:
    files = [str(file) for file in SHIPPED if precision in file.name]
    assert len(files) == 3
    assert not any(different_settings(*pair) for pair in permutations(files, 2))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"communication_data_type": "fp32", "prescale_gradients": False}, []),
        ({"zero_optimization": {"reduce_bucket_size": 2**24, "overlap_comm": True}}, []),
        ({"fp16": {"enabled": False}}, []),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, []),
        (
            {"zero_optimization": {"reduce_bucket_size": 10**6}, "communication_data_type": "bf16"},
            ["communication_data_type", "zero_optimization.reduce_bucket_size"],
        ),
    ],
)
def test_values_other_than_those_of_a_run_are_named(
    settings: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    file = write(tmp_path, **settings)
    assert sorted(different_settings(str(file), "ds_configs/zero1_fp32.json")) == expected


def test_a_setting_that_only_the_shipped_file_has_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, stage=1, bf16={"enabled": True})
    settings = different_settings(str(file), "ds_configs/zero2_bf16.json")
    assert settings == ["data_types.grad_accum_dtype"]


@pytest.mark.parametrize(("stage", "expected"), [(2, []), (3, ["data_types.grad_accum_dtype"])])
def test_sums_of_fp16_are_compared_by_their_precision(
    stage: int, expected: list[str], tmp_path: Path
) -> None:
    """Without the key, gradients are added up in fp32, but in fp16 with ZeRO-3."""
    stated = {"data_types": {"grad_accum_dtype": "fp32"}} if stage == 2 else {}
    shipped = json.loads((REPOSITORY / "ds_configs/zero1_fp16.json").read_text())
    file = write(tmp_path, stage, fp16=shipped["fp16"], **stated)
    assert different_settings(str(file), "ds_configs/zero1_fp16.json") == expected


def test_the_advice_names_replaced_settings(tmp_path: Path) -> None:
    file = write(tmp_path, communication_data_type="bf16")
    message = (
        f"Layout 1 replaces {file} with ds_configs/zero1_fp32.json, which has other values of: "
        f"communication_data_type; to keep yours, use a copy of {file} with "
        f"zero_optimization.stage = 1\n"
    )
    assert run_plan(file, "--top", "1").stdout.endswith(f"\n{message}")
    written = run_plan(file, "--json", "--top", "1", "--write", str(tmp_path / "copy.toml"))
    (best,) = json.loads(written.stdout)["best"]
    assert best["edits"]["deepspeed"] == "ds_configs/zero1_fp32.json"
    assert best["replaced_settings"] == ["communication_data_type"]
    assert written.stderr.endswith(f"\nplan.py: {message}")
    kept = run_plan(write(tmp_path, 1, communication_data_type="bf16"), "--top", "1", "--json")
    assert json.loads(kept.stdout)["best"][0]["replaced_settings"] == []


def test_a_layout_for_fewer_nodes_names_replaced_settings(tmp_path: Path) -> None:
    file = write(tmp_path, communication_data_type="bf16")
    cluster = ["cluster.nodes=4", "cluster.gpus_per_node=1", "cluster.gpu=cpu"]
    settings = [*cluster, f"deepspeed={file}", "layout.pipeline=4"]
    replanner = Replanner(REPOSITORY / "recipes/tiny.toml", settings)
    placement = replanner.placement_on(2)
    assert placement is not None
    assert placement.layout.endswith(
        f", ds_configs/zero1_fp32.json, which has other values than {file} of: "
        f"communication_data_type"
    )
    own = replanner.placement_on(4)
    assert own is not None and own.layout.endswith(f", {file}")
