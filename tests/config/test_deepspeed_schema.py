"""Supported keys of the DeepSpeed JSON train to the same result; all others are rejected."""

import json
import math
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import constants
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from typing_extensions import override

from models.errors import UserError
from tests.conftest import changed, small_recipe
from tests.ranks import fp16_on_cpu, run_ranks
from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.deepspeed_schema import (
    NOT_SUPPORTED,
    ONLY_ZERO_3,
    RECIPE_KEYS,
    SETTINGS,
    WITHOUT_EFFECT,
)
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.prove.training import many_cases, start, train_step

STEPS = 2
NON_DEFAULT: dict[
    str, Any
] = {  # every supported key -> a valid value that is not DeepSpeed's default
    "zero_optimization.stage": 1,
    "zero_optimization.contiguous_gradients": False,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.reduce_scatter": False,
    "zero_optimization.reduce_bucket_size": 1e4,
    "zero_optimization.sub_group_size": 10_000,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "zero_optimization.stage3_param_persistence_threshold": 1000,
    "zero_optimization.stage3_model_persistence_threshold": 5000,
    "zero_optimization.stage3_max_live_parameters": 10_000,
    "zero_optimization.stage3_max_reuse_distance": 0,
    "bf16.enabled": True,
    "fp16.enabled": True,
    "fp16.loss_scale": 1024.0,
    "fp16.initial_scale_power": 8,
    "fp16.loss_scale_window": 2,
    "fp16.hysteresis": 1,
    "fp16.consecutive_hysteresis": True,
    "fp16.min_loss_scale": 4,
    "data_types.grad_accum_dtype": "fp32",
    "communication_data_type": "bf16",
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
}
SCALED = ("prescale_gradients", "gradient_predivide_factor")
TOLERANCES = {"bf16.enabled": 2e-2, "fp16": 3e-3, "communication_data_type": 1e-2}


def stages_of(path: str) -> tuple[int, ...]:
    """Return the ZeRO stages to try a setting with."""
    block, _, key = path.rpartition(".")
    if key in ONLY_ZERO_3:
        return (3,)
    return (2, 3) if block == "zero_optimization" else (1,)


CASES = [(path, stage) for path in NON_DEFAULT for stage in stages_of(path)]


def config_with(path: str, value: Any, stage: int) -> dict[str, Any]:
    """Return a JSON with one more setting, unless it is empty, and the settings it requires."""
    name = REPOSITORY / "ds_configs" / f"zero{stage}_fp32.json"
    config: dict[str, Any] = json.loads(name.read_text())
    block, _, key = path.rpartition(".")
    if block in ("bf16", "fp16"):
        config[block] = {"enabled": True}
    if block == "fp16":
        config[block]["initial_scale_power"] = 10
    if path:
        (config.setdefault(block, {}) if block else config)[key] = value
    return config


def train_with_each(corpus: str, folder: str) -> dict[tuple[str, int], list[float] | str]:
    """Return the losses and norms with each setting on this rank, or the error."""
    found: dict[tuple[str, int], list[float] | str] = {}
    file = Path(folder) / f"rank{os.environ['RANK']}.json"
    table = changed(small_recipe(Path(corpus)), deepspeed=str(file), model__layers=1)
    with fp16_on_cpu(), many_cases() as begin:
        for path, stage in [("", 1), ("", 2), ("", 3), *CASES]:
            file.write_text(json.dumps(config_with(path, NON_DEFAULT.get(path), stage)))
            begin()
            try:
                found[path, stage] = train(table)
            except Exception:
                found[path, stage] = traceback.format_exc()
    return found


def train(table: dict[str, Any]) -> list[float]:
    """Return the losses and gradient norms of some steps."""
    engine, data = start(
        parse_recipe(table, "test"), LaunchEnvironment.from_environment(os.environ)
    )
    steps = [train_step(engine, data, step) for step in range(1, STEPS + 1)]
    return [number for step in steps for number in (step.loss, step.grad_norm)]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    return run_ranks(2, train_with_each, str(corpus), str(tmp_path_factory.mktemp("json")))[0]


@pytest.mark.long
@pytest.mark.parametrize(("path", "stage"), CASES)
def test_every_supported_key_trains_to_the_same_result(
    path: str, stage: int, trained: dict[tuple[str, int], list[float]]
) -> None:
    tolerance = TOLERANCES.get(path) or TOLERANCES.get(path.partition(".")[0], 1e-6)
    assert not isinstance(trained[path, stage], str), trained[path, stage]
    assert trained[path, stage] == pytest.approx(trained["", stage], rel=tolerance)


def paths(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, setting in table.items():
        if isinstance(setting, Mapping):
            yield from paths(setting, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        # not supported, with the reason
        ("zero_optimization.offload_param", {"device": "cpu"}, "offload_param = {"),
        ("zero_optimization.offload_optimizer", {"device": "cpu"}, "stay on the GPU; remove it"),
        ("zero_optimization.zero_hpz_partition_size", 8, "= 8 is not supported: weights"),
        ("zero_optimization.zero_quantized_weights", True, "gathered unquantized; remove it"),
        ("zero_optimization.zero_quantized_gradients", True, "are summed without quantization"),
        ("zero_optimization.round_robin_gradients", True, "layout of the optimizer state"),
        ("bf16.check_grad_overflow", False, "is always skipped; remove it"),
        ("bf16.bf16_optimizer_states", True, "optimizer state in 32 bits; remove it"),
        ("zero_optimization.cpu_offload", True, "stay on the GPU"),
        ("zero_optimization.zero_hpz_partition_size", True, "= true is not supported: weights"),
        ("managed_gradient_accumulation", False, "are accumulated by the pipeline's engine"),
        ("data_types.param_dtype", "bf16", 'use "bf16" or "fp16" for the weights; remove it'),
        ("compile", {"deepcompile": True}, "use the recipe's training.compile"),
        ("curriculum_learning", {"enabled": True}, "[data] determines the samples; remove it"),
        # unknown, with the intended key and an example
        ("zero_optimization.overlap_com", True, 'overlap_comm? For example "overlap_comm": true'),
        ("zero_optimization.max_live_parameters", 5, "zero_optimization.stage3_max_live_param"),
        ("zero_optimization.grad_accum_dtype", "fp32", "did you mean data_types.grad_accum_dtype?"),
        ("fp16.loss_scale_windows", 5, 'fp16.loss_scale_window? For example "loss_scale_window":'),
        ("data_types.params", 5, "the keys of data_types are grad_accum_dtype"),
        ("curriculum", {"enabled": False}, "unknown key curriculum; the keys of the top level"),
        ("bf_16", {"enabled": True}, 'did you mean bf16? For example "bf16": {"enabled": true}'),
        # types and ranges
        ("zero_optimization.stage", "1", 'zero_optimization.stage = "1"'),
        ("zero_optimization.stage", 1.0, "stage = 1.0 is not one of 1, 2, 3; use 1"),
        ("zero_optimization.overlap_comm", "true", '= "true" is a text; use true without quotes'),
        ("zero_optimization.overlap_comm", 1, "= 1 is not true or false; use true"),
        ("zero_optimization.reduce_bucket_size", "5e8", '"5e8" is a text; use 500000000 without'),
        ("zero_optimization.reduce_bucket_size", 0, "= 0 is not an integer in 1 .. "),
        ("zero_optimization.reduce_bucket_size", 1.5, "= 1.5 is not an integer in 1 .. "),
        ("zero_optimization.reduce_bucket_size", True, "= true is not an integer in 1 .. "),
        ("zero_optimization.reduce_bucket_size", None, "= null is not an integer in 1 .. "),
        ("zero_optimization.stage3_max_live_parameters", -1, "= -1 is not an integer in 0 .. "),
        ("fp16.initial_scale_power", 127, "= 127 is not an integer in 0 .. 126; use 16"),
        ("fp16.loss_scale", -1, "= -1 is not a number in 0 .. "),
        ("fp16.enabled", "yes", 'fp16.enabled = "yes" is not true or false; use true'),
        ("gradient_predivide_factor", 0, "= 0 is not a number in "),
        ("gradient_predivide_factor", math.nan, "NaN is not valid in JSON"),
        ("gradient_predivide_factor", math.inf, "Infinity is not valid in JSON"),
        ("data_types.grad_accum_dtype", "float32", 'one of "fp32", "bf16", "fp16"; use "fp32"'),
        ("bf16", True, 'bf16 = true should be an object; use "bf16": {"enabled": true}'),
        ("bf16", {}, 'bf16 lacks "enabled"; use "bf16": {"enabled": true}'),
    ],
)  # fmt: skip
def test_unsupported_settings_are_rejected(
    path: str, value: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.json"
    stage = 3 if path.rpartition(".")[2] in ONLY_ZERO_3 else 1
    file.write_text(json.dumps(config_with(path, value, stage)))
    with pytest.raises(UserError) as raised:
        read_deepspeed_json(str(file))
    said, *proposal = re.split(r"\nThis file would be accepted[^\n]*:\n", str(raised.value))
    assert said.startswith(f"{file}: ") and message in said and "\n" not in said
    if proposal:  # a number that is not finite is not JSON
        file.write_text(proposal[0])
        read_deepspeed_json(str(file))
    assert path.rpartition(".")[2] in said or "in JSON" in said


@pytest.mark.parametrize("path", SCALED)
@pytest.mark.parametrize("reduce_scatter", [True, False])
def test_gradient_predivide_factor_needs_zero_1_or_2(
    path: str, reduce_scatter: bool, tmp_path: Path
) -> None:
    """With reduce_scatter = false, ZeRO-3 would not undo gradient_predivide_factor."""
    file = tmp_path / "bad.json"
    config = config_with(path, NON_DEFAULT[path], 3)
    config["zero_optimization"]["reduce_scatter"] = reduce_scatter
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"not support this under ZeRO-3;.*; remove them"):
        read_deepspeed_json(str(file))


def test_a_duplicate_key_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    text = json.dumps(config_with("", None, 1))
    file.write_text(text.replace('"stage": 1', '"stage": 1, "stage": 2'))
    with pytest.raises(UserError, match="stage occurs twice"):
        read_deepspeed_json(str(file))


def test_every_supported_key_is_tested() -> None:
    assert set(NON_DEFAULT) == set(paths(SETTINGS))


class RecordingDict(dict):
    """A dict that records the keys that are looked up in it."""

    def __init__(self, content: dict[str, Any]):
        super().__init__(content)
        self.asked: set[str] = set()

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    @override
    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    @override
    def keys(self) -> Any:
        return self

    def __copy__(self) -> "RecordingDict":
        return self


def keys_of_deepspeed() -> set[str]:
    """Return the paths of all keys that the pinned DeepSpeed reads or rejects by name."""
    content = RecordingDict({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1})
    content["gradient_accumulation_steps"] = 8
    deepspeed_config.DeepSpeedConfig(content)
    blocks = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }
    found = content.asked | set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    found |= {f"zero_optimization.{key}" for key in deepspeed_config._REMOVED_ZERO_CONFIG_KEYS}
    for block, model in blocks.items():
        found |= {f"{block}.{field.alias or key}" for key, field in model.model_fields.items()}
    data_types = ("GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE", "KEEP_IN_FP32_MODULES")
    return found | {f"data_types.{getattr(constants, name)}" for name in data_types}


def test_every_key_of_deepspeed_has_one_decision() -> None:
    supported = {path.partition(".")[0] for path in paths(SETTINGS)} | set(paths(SETTINGS))
    decisions = [supported, set(NOT_SUPPORTED), set(WITHOUT_EFFECT), set(RECIPE_KEYS)]
    read = keys_of_deepspeed()
    assert {"dump_state", "tensorboard", "autotuning", "zero_optimization.stage"} <= read
    assert read - set.union(*decisions) - {"bfloat16"} == set()  # the former name of bf16
    assert sum(map(len, decisions)) == len(set.union(*decisions))
