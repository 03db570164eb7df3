"""The keys of a ds_configs JSON that are supported, at every level, with types and ranges."""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import UserError

LARGEST_COUNT = 2**60  # elements, steps
LARGEST_SCALE_POWER = 126  # of a loss scale: 2**127 is the largest power of two in fp32
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value of the JSON.

    Args:
        example: A valid value, which error messages propose. Its type is the type of the setting:
            bool, int, float, str or list (of strings).
        low, high: The range of a number, both ends included.
        choices: All valid values, where they can be listed.
        multiple: An integer must be a multiple of this number.
    """

    example: Any
    low: float = -math.inf
    high: float = LARGEST_COUNT
    choices: tuple[Any, ...] = ()
    multiple: int = 1

    def accepts(self, value: Any) -> bool:
        """Return whether the value has the type of the setting and is in its range."""
        if self.choices:
            return any(value == each and type(value) is type(each) for each in self.choices)
        if isinstance(self.example, bool) or isinstance(value, bool):
            return isinstance(value, bool) and isinstance(self.example, bool)
        if isinstance(self.example, (int, float)):
            is_number = isinstance(value, (int, float)) and self.low <= value <= self.high
            # DeepSpeed takes 5e8, which JSON makes a float, for an integer.
            return is_number and (isinstance(self.example, float) or value % self.multiple == 0)
        if isinstance(self.example, list):
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        return isinstance(value, str)

    @property
    def description(self) -> str:
        """The valid values, for an error message."""
        if self.choices:
            return "one of " + ", ".join(map(json.dumps, self.choices))
        if isinstance(self.example, bool):
            return "true or false"
        if isinstance(self.example, (int, float)):
            kind = "an integer" if isinstance(self.example, int) else "a number"
            multiple = f" that is a multiple of {self.multiple}" if self.multiple > 1 else ""
            return f"{kind} in {self.low:g} .. {self.high:g}{multiple}"
        return "a list of strings" if isinstance(self.example, list) else "a string"


def flag(example: bool) -> Setting:
    """Return a setting that is true or false."""
    return Setting(example=example)


def count(example: int, low: int = 1) -> Setting:
    """Return a setting that is an integer of at least `low`."""
    return Setting(example=example, low=low)


Table = Mapping[str, "Setting | Table"]

SETTINGS: Table = {
    "zero_optimization": {
        "stage": Setting(example=1, choices=(1, 2, 3)),
        "contiguous_gradients": flag(True),
        "overlap_comm": flag(True),
        "reduce_scatter": flag(True),
        "reduce_bucket_size": count(2**24),
        "use_multi_rank_bucket_allreduce": flag(True),
        "allgather_partitions": flag(True),
        # DeepSpeed asserts that buckets keep the alignment of NCCL's buffers.
        "allgather_bucket_size": Setting(example=500_000_000, low=2, multiple=2),
        "sub_group_size": count(1_000_000_000),
        "stage3_prefetch_bucket_size": count(50_000_000, low=0),
        "stage3_param_persistence_threshold": count(100_000, low=0),
        "stage3_model_persistence_threshold": count(1_000_000_000, low=0),
        "stage3_max_live_parameters": count(1_000_000_000, low=0),
        "stage3_max_reuse_distance": count(1_000_000_000, low=0),
    },
    "bf16": {"enabled": flag(True)},
    "fp16": {
        "enabled": flag(True),
        "loss_scale": Setting(example=0.0, low=0, high=2.0**LARGEST_SCALE_POWER),
        "initial_scale_power": Setting(example=16, low=0, high=LARGEST_SCALE_POWER),
        "loss_scale_window": count(1000),
        "hysteresis": count(2),
        "consecutive_hysteresis": flag(False),
        "min_loss_scale": count(1),
    },
    "data_types": {"grad_accum_dtype": Setting(example="fp32", choices=PRECISIONS)},
    "comms_logger": {
        "enabled": flag(True),
        "verbose": flag(False),
        "prof_all": flag(True),
        "prof_ops": Setting(example=["all_reduce"]),
        "debug": flag(False),
    },
    "flops_profiler": {
        "enabled": flag(True),
        "recompute_fwd_factor": Setting(example=0.0, low=0, high=1),
        "profile_step": count(1),
        "module_depth": count(-1, low=-1),
        "top_modules": count(1),
        "detailed": flag(True),
        "output_file": Setting(example="flops.txt"),
    },
    "communication_data_type": Setting(example="fp32", choices=PRECISIONS),
    "prescale_gradients": flag(False),
    "gradient_predivide_factor": Setting(example=1.0, low=2.0**-32, high=2.0**32),
    "zero_allow_untested_optimizer": flag(False),
    "memory_breakdown": flag(False),
    "wall_clock_breakdown": flag(False),
    "dump_state": flag(False),
}
NEEDED = {"bf16": "enabled", "fp16": "enabled"}  # block -> the key that it must contain

_OFFLOADING = "weights and optimizer state stay on the GPU; remove it and use more data ranks"
_SECONDARY = "weights are sharded over all data ranks and gathered unquantized; remove it"
_SHORT_STATE = "checkpoints hold weights and optimizer state in 32 bits; remove it"
_LAYOUT_OF_STATE = "checkpoints expect DeepSpeed's default layout of the optimizer state; remove it"
_OWN_CHECKPOINTS = "checkpoints are not written by DeepSpeed and fit every layout; remove it"
NOT_SUPPORTED = {  # key of DeepSpeed -> the reason, and a remedy
    "zero_optimization.offload_param": _OFFLOADING,
    "zero_optimization.offload_optimizer": _OFFLOADING,
    "zero_optimization.cpu_offload": _OFFLOADING,
    "zero_optimization.cpu_offload_param": _OFFLOADING,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOADING,
    "zero_optimization.zenflow": _OFFLOADING,
    "aio": _OFFLOADING,
    "zero_optimization.zero_hpz_partition_size": _SECONDARY,
    "zero_optimization.zero_quantized_weights": _SECONDARY,
    "zero_optimization.zero_quantized_nontrainable_weights": _SECONDARY,
    "zero_optimization.zero_quantized_gradients": "gradients are summed without quantization, in "
    'the precision of "communication_data_type"; remove it',
    "zero_optimization.mics_shard_size": _SECONDARY,
    "zero_optimization.mics_hierarchical_params_gather": _SECONDARY,
    "zero_optimization.compute_grad_norm": "clipping and the watch for bad steps always need the "
    "gradient norm; remove it",
    "zero_optimization.round_robin_gradients": _LAYOUT_OF_STATE,
    "zero_optimization.parameter_alignment": _LAYOUT_OF_STATE,
    "zero_optimization.legacy_stage1": _LAYOUT_OF_STATE,
    "zero_optimization.elastic_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.load_from_fp32_weights": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "checkpoint": _OWN_CHECKPOINTS,
    "bf16.check_grad_overflow": "a step with gradients that are not finite is always skipped; "
    "remove it",
    "bf16.immediate_grad_update": "gradients are accumulated by the pipeline's engine; remove it",
    "bf16.bf16_master_weights_and_grads": _SHORT_STATE,
    "bf16.bf16_optimizer_states": _SHORT_STATE,
    "fp16.fp16_master_weights_and_grads": _SHORT_STATE,
    "fp16.fp16_optimizer_states": _SHORT_STATE,
    "fp16.auto_cast": "the model's inputs are integers; remove it",
}


def check_settings(name: str, config: Any, table: Table = SETTINGS, prefix: str = "") -> None:
    """Reject keys and values that are not supported.

    Args:
        name: The file, for messages.
        config: The JSON's content, or a block of it.
        table: The settings of this level.
        prefix: The path of the block, with a dot at its end; empty at the top level.

    Raises:
        UserError: names file, key, value, the reason and a value that works.
    """
    for key, value in config.items():
        path = prefix + key
        setting = table.get(key)
        if path in NOT_SUPPORTED:
            shown = json.dumps(value)
            raise UserError(f"{name}: {path} = {shown} is not supported: {NOT_SUPPORTED[path]}")
        if setting is None:
            raise UserError(f"{name}: unknown key {path}; {_suggestion(key, table, prefix)}")
        if isinstance(setting, Mapping):
            if not isinstance(value, dict):
                raise UserError(
                    f"{name}: {path} = {json.dumps(value)} should be an object; use "
                    f"{json.dumps(key)}: {_example(setting)}"
                )
            if key in NEEDED and NEEDED[key] not in value:
                raise UserError(
                    f'{name}: {path} lacks "{NEEDED[key]}"; use {json.dumps(key)}: '
                    f"{_example(setting)}"
                )
            check_settings(name, value, setting, f"{path}.")
        elif not setting.accepts(value):
            raise UserError(
                f"{name}: {path} = {json.dumps(value)} is not {setting.description}; "
                f"use {json.dumps(setting.example)}"
            )


def _suggestion(key: str, table: Table, prefix: str) -> str:
    """Return the end of a message about an unknown key: a similar key, or all keys of its block."""
    close = difflib.get_close_matches(key, table, n=1, cutoff=0.6)
    elsewhere = [path for path in _paths(SETTINGS) if path.rpartition(".")[2] == key]
    if not close and elsewhere:
        return f"did you mean {elsewhere[0]}?"
    if not close:
        place = prefix.rstrip(".") or "the top level"
        return f"the keys of {place} are {', '.join(table)}"
    setting = table[close[0]]
    example = _example(setting) if isinstance(setting, Mapping) else json.dumps(setting.example)
    return f'did you mean {prefix}{close[0]}? For example "{close[0]}": {example}'


def _paths(table: Table, prefix: str = "") -> Iterator[str]:
    """Yield "block.key" for every setting."""
    for key, setting in table.items():
        yield prefix + key
        if isinstance(setting, Mapping):
            yield from _paths(setting, f"{prefix}{key}.")


def _example(block: Table) -> str:
    """Return a block with its first setting, as JSON."""
    key, setting = next(iter(block.items()))
    assert isinstance(setting, Setting)
    return json.dumps({key: setting.example})
