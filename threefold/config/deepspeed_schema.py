"""The keys of a DeepSpeed JSON: supported ones with types and ranges, ignored and rejected ones."""

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from threefold.config.loading import value_text

LARGEST_COUNT = 2**60  # elements, steps
LARGEST_SCALE_POWER = 126  # of a loss scale: 2**127 is the largest power of two in fp32
PRECISIONS = ("fp32", "bf16", "fp16")
AUTO_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
RECIPE_BLOCKS = {  # block of the JSON -> the owner of its settings
    "optimizer": "[optimizer]",
    "scheduler": "[optimizer.schedule]",
    "activation_checkpointing": "layout.recompute",
    "pipeline": "[layout]",
}
RECIPE_KEYS = ("train_batch_size", *AUTO_KEYS, *RECIPE_BLOCKS)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value of the JSON.

    Args:
        example: A valid value, which error messages propose. Its type is the type of the setting:
            bool, int, float or str.
        low, high: The range of a number, both ends included.
        choices: All valid values, where they can be listed.
        nullable: null is valid and stands for DeepSpeed's default.
    """

    example: Any
    low: float = -math.inf
    high: float = LARGEST_COUNT
    choices: tuple[Any, ...] = ()
    nullable: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether the value has the type of the setting and is in its range."""
        if value is None:
            return self.nullable
        if self.choices:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if isinstance(self.example, bool) or isinstance(value, bool):
            return isinstance(value, bool) and isinstance(self.example, bool)
        if isinstance(self.example, (int, float)):
            is_number = isinstance(value, (int, float)) and self.low <= value <= self.high
            # DeepSpeed takes 5e8, which JSON makes a float, for an integer.
            return is_number and (isinstance(self.example, float) or value % 1 == 0)
        return isinstance(value, str)

    @property
    def description(self) -> str:
        """The valid values, for an error message."""
        if self.choices:
            return "one of " + ", ".join(map(value_text, self.choices))
        if isinstance(self.example, bool):
            return "true or false"
        if isinstance(self.example, (int, float)):
            kind = "an integer" if isinstance(self.example, int) else "a number"
            return f"{kind} in {self.low:g} .. {self.high:g}"
        return "a string"


def flag(example: bool) -> Setting:
    """Return a setting that is true or false."""
    return Setting(example=example)


def count(example: int, low: int = 1) -> Setting:
    """Return a setting that is an integer of at least `low`."""
    return Setting(example=example, low=low)


Table = Mapping[str, "Setting | Table"]

# Of zero_optimization. With ZeRO-1 and 2, the pipeline engine reduces gradients and gathers weights
# itself, in buckets of `reduce_bucket_size`.
ONLY_ZERO_3: Table = {
    "contiguous_gradients": flag(True),
    "overlap_comm": Setting(example=True, nullable=True),
    "reduce_scatter": flag(True),
    "sub_group_size": count(1_000_000_000),
    "stage3_prefetch_bucket_size": count(50_000_000, low=0),
    "stage3_param_persistence_threshold": count(100_000, low=0),
    "stage3_model_persistence_threshold": count(1_000_000_000, low=0),
    "stage3_max_live_parameters": count(1_000_000_000, low=0),
    "stage3_max_reuse_distance": count(1_000_000_000, low=0),
}
SETTINGS: Table = {
    "zero_optimization": {
        "stage": Setting(example=1, choices=(1, 2, 3)),
        "reduce_bucket_size": count(2**24),
        **ONLY_ZERO_3,
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
    "communication_data_type": Setting(example="fp32", choices=PRECISIONS),
    "prescale_gradients": flag(False),
    "gradient_predivide_factor": Setting(example=1.0, low=2.0**-32, high=2.0**32),
}
NEEDED = {"bf16": "enabled", "fp16": "enabled"}  # block -> the key that it must contain


@dataclass(frozen=True)
class Unsupported:
    """A setting of DeepSpeed that is not supported.

    Attributes:
        reason: the reason, and a remedy
        off: the values that switch it off, as `is_off` takes them
    """

    reason: str
    off: tuple[Any, ...] = (False,)


def is_off(value: Any, off: tuple[Any, ...] = (False,)) -> bool:
    """Return True if a value switches a setting off.

    A block is off if it is empty, if its "enabled" is false, or if its "device" is "none".

    Args:
        off: the values that switch it off, in addition to null
    """
    if isinstance(value, dict):
        no_device = value.get("device", "cpu") in ("none", None)
        return not value or value.get("enabled") is False or no_device
    return any(value == one and type(value) is type(one) for one in (None, *off))


AUTO = '"auto" stands for the default'
_OFFLOADING = Unsupported(
    "weights and optimizer state stay on the GPU; remove it and use more data ranks"
)
_SECONDARY = "weights are sharded over all data ranks and gathered unquantized; remove it"
_SHORT_STATE = Unsupported("checkpoints hold weights and optimizer state in 32 bits; remove it")
_LAYOUT_OF_STATE = Unsupported(
    "checkpoints expect DeepSpeed's default layout of the optimizer state; remove it"
)
_ORDER_OF_DATA = Unsupported("the recipe's [data] determines the samples; remove it")
_MODEL = Unsupported("the recipe's [model] is trained as it is; remove it")
_DEFAULT = "only DeepSpeed's default is tested; remove it"
NOT_SUPPORTED = {
    "zero_optimization.offload_param": _OFFLOADING,
    "zero_optimization.offload_optimizer": _OFFLOADING,
    "zero_optimization.cpu_offload": _OFFLOADING,
    "zero_optimization.cpu_offload_param": _OFFLOADING,
    "zero_optimization.cpu_offload_params": _OFFLOADING,
    "zero_optimization.zenflow": _OFFLOADING,
    "zero_optimization.zero_hpz_partition_size": Unsupported(_SECONDARY, (1,)),
    "zero_optimization.zero_quantized_weights": Unsupported(_SECONDARY),
    "zero_optimization.zero_quantized_nontrainable_weights": Unsupported(_SECONDARY),
    "zero_optimization.zero_quantized_gradients": Unsupported(
        "gradients are summed without quantization, in the precision of "
        '"communication_data_type"; remove it'
    ),
    "zero_optimization.mics_shard_size": Unsupported(_SECONDARY, (-1,)),
    "zero_optimization.mics_hierarchical_params_gather": Unsupported(_SECONDARY),
    "zero_optimization.compute_grad_norm": Unsupported(
        "clipping and the watch for bad steps always need the gradient norm; remove it", (True,)
    ),
    "zero_optimization.round_robin_gradients": _LAYOUT_OF_STATE,
    "zero_optimization.parameter_alignment": _LAYOUT_OF_STATE,
    "zero_optimization.legacy_stage1": _LAYOUT_OF_STATE,
    "zero_optimization.memory_efficient_linear": Unsupported(_DEFAULT, (True,)),
    "zero_optimization.override_module_apply": Unsupported(_DEFAULT, (True,)),
    "zero_optimization.stage3_module_granularity_threshold": Unsupported(_DEFAULT, (0,)),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Unsupported(_DEFAULT),
    "zero_optimization.stage3_allgather_sequential": Unsupported(_DEFAULT),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Unsupported(_DEFAULT),
    "bf16.check_grad_overflow": Unsupported(
        "a step with gradients that are not finite is always skipped; remove it", (True,)
    ),
    "bf16.immediate_grad_update": Unsupported(
        "gradients are accumulated by the pipeline's engine; remove it"
    ),
    "bf16.bf16_master_weights_and_grads": _SHORT_STATE,
    "bf16.bf16_optimizer_states": _SHORT_STATE,
    "fp16.fp16_master_weights_and_grads": _SHORT_STATE,
    "fp16.fp16_optimizer_states": _SHORT_STATE,
    "fp16.auto_cast": Unsupported("the model's inputs are integers; remove it"),
    "amp": Unsupported('16-bit training needs "bf16" or "fp16"; remove it'),
    "torch_autocast": Unsupported('16-bit training needs "bf16" or "fp16"; remove it'),
    "gradient_allreduce_op": Unsupported(
        "gradients are averaged over the data ranks; remove it", ("mean",)
    ),
    "sparse_gradients": Unsupported("gradients are summed as dense tensors; remove it"),
    "compile": Unsupported("use the recipe's training.compile; remove it"),
    "tensor_parallel": Unsupported("use the recipe's layout.tensor; remove it"),
    "expert_parallel": Unsupported("use the recipe's layout.expert; remove it"),
    "use_data_before_expert_parallelism": Unsupported(
        "the recipe's [layout] determines the order of the ranks; remove it"
    ),
    "autotuning": Unsupported("use plan.py or sweep.py to find a layout; remove it"),
    "elasticity": Unsupported("use launch.py to continue on fewer nodes; remove it"),
    "curriculum_learning": _ORDER_OF_DATA,
    "data_efficiency": _ORDER_OF_DATA,
    "progressive_layer_drop": _MODEL,
    "sparse_attention": _MODEL,
    "compression_training": _MODEL,
    "quantize_training": _MODEL,
    "weight_quantization": _MODEL,
    "eigenvalue": _MODEL,
    "hybrid_engine": _MODEL,
    "graph_harvesting": Unsupported("use the recipe's training.compile; remove it"),
    "managed_gradient_accumulation": Unsupported(
        "gradients are accumulated by the pipeline's engine; remove it", (True,)
    ),
    "sequence_parallel_size": Unsupported("use the recipe's layout.context; remove it", (1,)),
    "data_types.param_dtype": Unsupported('use "bf16" or "fp16" for the weights; remove it'),
    "data_types.buffer_dtype": Unsupported(_DEFAULT),
    "data_types.keep_in_fp32_modules": Unsupported(_DEFAULT, ([],)),
    "zero_optimization.enable_sanity_checks": Unsupported(_DEFAULT),
    "zero_optimization.leaf_module": Unsupported(_DEFAULT),
    "zero_optimization.zeropp_loco_param": Unsupported(_SECONDARY),
}
_OWN_CHECKPOINTS = "checkpoints are not written by DeepSpeed"
_NO_OFFLOADING = "nothing is offloaded"
_NO_SCALING = "bf16 needs no loss scale"
_OWN_BUCKETS = "ZeRO-1 and 2 reduce and gather in buckets of reduce_bucket_size, ZeRO-3 by layers"
_OWN_LOADER = "batches are not read by DeepSpeed"
_METRICS = "metrics go to metrics.jsonl and to Weights & Biases, and report.py draws them"
_PROFILE = "use tracking.profile_step for a table of the operations and their times"
OUTPUTS = {  # key of DeepSpeed that asks for an output -> what to use instead
    "wall_clock_breakdown": _PROFILE,
    "flops_profiler": _PROFILE,
    "comms_logger": _PROFILE,
    "memory_breakdown": "metrics.jsonl has memory_gb, and plan.py trace counts its parts",
    "dump_state": "the run folder's recipe.toml has every setting of the run",
    "tensorboard": _METRICS,
    "csv_monitor": _METRICS,
    "comet": _METRICS,
}
WITHOUT_EFFECT = OUTPUTS | {  # key of DeepSpeed that changes nothing here -> the reason
    "wandb": "[tracking] of the recipe decides",
    "steps_per_print": "every step is in metrics.jsonl",
    "zero_allow_untested_optimizer": "DeepSpeed supports every optimizer of the recipe",
    "timers": "every step is measured",
    "log_level": "DeepSpeed prints only warnings",
    "disable_python_gc": "garbage is collected between steps",
    "vocabulary_size": "model.vocab_size is checked instead",
    "dataloader_drop_last": _OWN_LOADER,
    "seq_parallel_communication_data_type": "layout.context does not use DeepSpeed",
    "checkpoint": _OWN_CHECKPOINTS,
    "nebula": _OWN_CHECKPOINTS,
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "zero_optimization.elastic_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.load_from_fp32_weights": _OWN_CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.cpu_offload_use_pin_memory": _NO_OFFLOADING,
    "zero_force_ds_cpu_optimizer": _NO_OFFLOADING,
    "aio": _NO_OFFLOADING,
    "zero_optimization.allgather_partitions": _OWN_BUCKETS,
    "zero_optimization.allgather_bucket_size": _OWN_BUCKETS,
    "zero_optimization.use_multi_rank_bucket_allreduce": _OWN_BUCKETS,
    "zero_optimization.ignore_unused_parameters": "every parameter is used",
    "zero_optimization.log_trace_cache_warnings": "DeepSpeed prints only warnings",
    "disable_allgather": "DeepSpeed does not read it",
    "bf16.loss_scale": _NO_SCALING,
    "bf16.loss_scale_window": _NO_SCALING,
    "bf16.initial_scale_power": _NO_SCALING,
    "bf16.hysteresis": _NO_SCALING,
    "bf16.min_loss_scale": _NO_SCALING,
}


@dataclass
class Review:
    """The findings about a JSON, and the keys that have no effect.

    Attributes:
        findings: one line about each setting that is rejected, with a value that works
        readings: one line about each setting that is interpreted differently from its text
        without_effect: reason -> the keys that are accepted but have no effect
        advice: what to write into the recipe instead, which can have several lines
    """

    findings: list[str] = field(default_factory=list)
    readings: list[str] = field(default_factory=list)
    without_effect: dict[str, list[str]] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    def reject(self, finding: str) -> None:
        """Add a finding."""
        self.findings.append(finding)

    def ignore(self, path: str, reason: str) -> None:
        """Note a key that has no effect."""
        self.without_effect.setdefault(reason, []).append(path)

    def notes(self) -> list[str]:
        """Return the notes for the user, the advice last."""
        ignored = [
            f"without effect here: {', '.join(paths)} ({reason})"
            for reason, paths in self.without_effect.items()
        ]
        return [*self.readings, *ignored, *self.advice]


def review_settings(
    config: Mapping[str, Any], review: Review, table: Table = SETTINGS, prefix: str = ""
) -> dict[str, Any]:
    """Return the settings that have an effect, with a valid value in place of each rejected one.

    Args:
        config: the JSON's content, or a block of it
        review: receives a finding for each rejected key or value, and the keys without effect;
            what is switched off is not mentioned
        prefix: the path of the block, with a dot at its end; empty at the top level
    """
    accepted: dict[str, Any] = {}
    for key, value in config.items():
        path = prefix + key
        setting, unsupported = table.get(key), NOT_SUPPORTED.get(path)
        if path in WITHOUT_EFFECT:
            if path not in OUTPUTS or not is_off(value):
                review.ignore(path, WITHOUT_EFFECT[path])
        elif value == "auto" and (setting or unsupported):
            review.ignore(path, AUTO)
        elif unsupported:
            if not is_off(value, unsupported.off):
                text = value_text(value)
                review.reject(f"{path} = {text} is not supported: {unsupported.reason}")
        elif setting is None:
            review.reject(f"unknown key {path}; {_suggestion(key, table, prefix)}")
        elif isinstance(setting, Mapping):
            if block := _review_block(key, value, review, setting, path):
                accepted[key] = block
        elif not setting.accepts(value):
            meant = meant_by_text(value)
            is_text = meant is not None and setting.accepts(meant)
            accepted[key] = meant if is_text else setting.example
            problem = "a text" if is_text else f"not {setting.description}"
            quotes = " without quotes" if is_text else ""
            review.reject(
                f"{path} = {value_text(value)} is {problem}; use "
                f"{value_text(accepted[key])}{quotes}"
            )
        else:
            accepted[key] = value
    return accepted


def meant_by_text(value: Any) -> Any:
    """Return the number or flag that a text holds; None if it holds neither."""
    if not isinstance(value, str):
        return None
    with contextlib.suppress(ValueError):
        number = float(value)
        return int(number) if number.is_integer() else number
    return {"true": True, "false": False}.get(value.lower())


def _review_block(key: str, value: Any, review: Review, block: Table, path: str) -> dict[str, Any]:
    """Return the settings of a block as `review_settings` does."""
    example = _example(block)
    if not isinstance(value, dict):
        review.reject(
            f"{path} = {value_text(value)} should be an object; use {value_text(key)}: "
            f"{value_text(example)}"
        )
        return example
    accepted = review_settings(value, review, block, f"{path}.")
    if key in NEEDED and NEEDED[key] not in value:
        review.reject(f'{path} lacks "{NEEDED[key]}"; use {value_text(key)}: {value_text(example)}')
        return example | accepted
    return accepted


def _suggestion(key: str, table: Table, prefix: str) -> str:
    """Return the end of a message about an unknown key: a similar key, or all keys of its block."""
    keys = [*table] if prefix else [*RECIPE_KEYS, *table]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    elsewhere = [path for path in _paths(SETTINGS) if path.rpartition(".")[2] == key]
    elsewhere += [key] if prefix and key in RECIPE_KEYS else []
    if not close and elsewhere:
        return f"did you mean {elsewhere[0]}?"
    if not close:
        section = prefix.rstrip(".") or "the top level"
        return f"the keys of {section} are {', '.join(keys)}"
    if close[0] in RECIPE_KEYS:
        return f'did you mean {close[0]}? For example "{close[0]}": "auto"'
    setting = table[close[0]]
    example = _example(setting) if isinstance(setting, Mapping) else setting.example
    return f'did you mean {prefix}{close[0]}? For example "{close[0]}": {value_text(example)}'


def _paths(table: Table, prefix: str = "") -> Iterator[str]:
    """Yield "block.key" for every setting."""
    for key, setting in table.items():
        yield prefix + key
        if isinstance(setting, Mapping):
            yield from _paths(setting, f"{prefix}{key}.")


def _example(block: Table) -> dict[str, Any]:
    """Return a block with its first setting."""
    key, setting = next(iter(block.items()))
    assert isinstance(setting, Setting)
    return {key: setting.example}
