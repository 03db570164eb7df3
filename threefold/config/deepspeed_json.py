"""ds_configs JSON + recipe -> the configuration that DeepSpeed gets.

The JSON owns ZeRO, precision and communication. The recipe owns everything else: in the JSON, such
settings are "auto", equal to the recipe's, or left out.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pydantic import ValidationError

from models.errors import UserError, counted, reason_of, toml_value
from threefold.config.deepspeed_schema import (
    AUTO_KEYS,
    ONLY_ZERO_3,
    RECIPE_BLOCKS,
    RECIPE_KEYS,
    Review,
    meant_by_text,
    review_settings,
)
from threefold.config.json_repair import repair_json
from threefold.config.loading import REPOSITORY, value_text
from threefold.config.parallel_dims import ParallelDims
from threefold.config.recipe import Recipe
from threefold.config.sections import Tracking, repository_path

# ZeRO-1 and 2 sum gradients over the data ranks in buckets during the last backward pass of a step
# or of a group of micro-batches. 64 MiB in fp32 is enough to reach a network's full bandwidth, and
# holds only a few blocks of a large model. DeepSpeed's default of 5e8 elements would hold most of a
# stage, so that no sum could begin before the end of the pass.
GRADIENT_BUCKET_ELEMENTS = 2**24
REMOVED = object()  # a setting that is left out of the proposed file
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of an element
SHIPPED = ", ".join(
    str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "ds_configs").glob("*.json"))
)


def build_deepspeed_config(
    recipe: Recipe, dims: ParallelDims, *, has_gpu: bool = True
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`, with every "auto" filled in.

    Args:
        has_gpu: False to reject fp16, which DeepSpeed does not support on CPUs

    Raises:
        UserError: the JSON is missing or not valid, contradicts the recipe, or does not suit it.
    """
    config, _ = _read(recipe.deepspeed, recipe, dims, has_gpu=has_gpu)
    if problem := next(_combinations(recipe, config, dims), None):
        raise UserError(problem.finding)
    # A step of a ramp with fewer micro-batches reduces its gradients after the last of them.
    full_batch, every = recipe.batch.whole.global_sequences, recipe.layout.reduce_every
    micro_batches = full_batch // (recipe.batch.micro_sequences * dims.data)
    if every > micro_batches:
        raise UserError(
            f"layout.reduce_every = {every} is more than the {micro_batches} micro-batches of a "
            f"step; use layout.reduce_every = {micro_batches}"
        )
    zero = config["zero_optimization"]
    if zero["stage"] == 2 and dims.dp_cp_size == 1:
        # Nobody to share gradients with: shards would be copies.
        config["zero_optimization"] = zero | {"stage": 1, "overlap_comm": False}
    if config["zero_optimization"]["stage"] <= 2:
        bucket = {"reduce_bucket_size": GRADIENT_BUCKET_ELEMENTS}
        config["zero_optimization"] = bucket | config["zero_optimization"]
    return config | {
        "train_micro_batch_size_per_gpu": recipe.batch.micro_sequences,
        "gradient_accumulation_steps": recipe.micro_batches(dims.data),
        "gradient_clipping": recipe.optimizer.gradient_clipping,
        "communication_data_type": communication_precision(config),
        # Off, since this timer synchronises the device for every micro-batch; `tracking/tracker.py`
        # measures throughput.
        "timers": {"throughput": {"enabled": False}},
    }


def read_deepspeed_json(name: str, recipe: Recipe | None = None) -> dict[str, Any]:
    """Read and check one file of ds_configs/, named as in the recipe.

    Settings that the recipe owns are "auto" in the result, and keys without effect are left out.

    Args:
        recipe: the recipe to compare the file with, as far as that needs no number of ranks

    Raises:
        UserError: the file is missing or not valid JSON, or has keys or values that are not
            supported. The message lists all of them, and a text that would be accepted.
    """
    return _read(name, recipe)[0]


def deepspeed_notes(recipe: Recipe, dims: ParallelDims) -> list[str]:
    """Return a line about each setting of the JSON that is read differently or has no effect."""
    return _read(recipe.deepspeed, recipe, dims)[1].notes()


def require_auto(recipe: Recipe, reason: str) -> None:
    """Reject a JSON that fixes the micro-batch or the accumulation steps.

    Args:
        reason: the reason why the command may change these values

    Raises:
        UserError: one of the two is not "auto".
    """
    content = _parse(recipe.deepspeed, Review())
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if content.get(key, "auto") != "auto":
            raise UserError(
                f"{recipe.deepspeed}: {key} = {value_text(content[key])} is fixed, but {reason}; "
                f'use "{key}": "auto"'
            )


def _read(
    name: str,
    recipe: Recipe | None = None,
    dims: ParallelDims | None = None,
    *,
    has_gpu: bool = True,
) -> tuple[dict[str, Any], Review]:
    """Return the checked settings of a file, with "auto" for those of the recipe, and the review.

    Raises:
        UserError: as `read_deepspeed_json`; with a recipe, also for values that differ from it.
    """
    review = Review()
    content = _parse(name, review)
    owned = _review_owned(content, review, owned_values(recipe, dims) if recipe else {})
    settings = {key: value for key, value in content.items() if key not in RECIPE_KEYS}
    if recipe and (table := tracking_of_wandb(settings.get("wandb"), recipe.tracking)):
        review.advice.append(
            f"for the values of the wandb block, use this [tracking] in the recipe:\n{table}"
        )
    _resolve_precision(settings, review)
    _resolve_stage(settings, review)
    accepted = review_settings(settings, review)
    _check_dependencies(accepted, review)
    if not has_gpu:
        _reject_fp16(accepted, review)
    config = dict.fromkeys(AUTO_KEYS, "auto") | accepted
    config["zero_optimization"] = {"stage": 1} | accepted.get("zero_optimization", {})
    if review.findings:
        if recipe and dims:  # so that no finding is left for the next start
            for problem in _combinations(recipe, config, dims):
                review.reject(problem.finding)
                problem.correct(config)
        _leave_zero_3_out(config, review)
        proposal = owned | {key: value for key, value in config.items() if key in accepted}
        order = list(content)
        keys = sorted(proposal, key=lambda key: order.index(key) if key in order else len(order))
        proposal = {key: proposal[key] for key in keys}
        raise UserError(_rejection(name, review, proposal, is_complete=dims is not None))
    _leave_zero_3_out(config, review)
    if recipe and dims and (count := _added_in_bf16(config, recipe, dims)):
        review.advice.append(
            f"the gradients of {count} micro-batches are added up in bf16, as in DeepSpeed; to add "
            f'them up in fp32, write "data_types": {{"grad_accum_dtype": "fp32"}}'
        )
    return config, review


def _added_in_bf16(config: dict[str, Any], recipe: Recipe, dims: ParallelDims) -> int:
    """Return how many micro-batches have their gradients added up in bf16 by default; 0: none.

    With ZeRO-2 on several data ranks, the sums of groups of micro-batches are added up in fp32.
    """
    if precision(config) != "bf16" or config.get("data_types", {}).get("grad_accum_dtype"):
        return 0
    count = recipe.micro_batches(dims.data)
    if zero_stage(config) == 2 and dims.dp_cp_size > 1:
        count = min(count, recipe.layout.micro_batches_per_reduction(2))
    return count if count > 1 else 0


def _leave_zero_3_out(config: dict[str, Any], review: Review) -> None:
    """Note and remove the settings of a config that have an effect only with ZeRO-3."""
    if zero_stage(config) > 2:
        return
    zero = config["zero_optimization"]
    for key in [key for key in zero if key in ONLY_ZERO_3]:
        review.ignore(f"zero_optimization.{key}", "for ZeRO-3 only")
        del zero[key]


def tracking_of_wandb(block: Any, tracking: Tracking) -> str:
    """Return the [tracking] of a recipe with the values of a block "wandb", as TOML.

    Args:
        block: DeepSpeed's block "wandb"; a comment names a value that [tracking] does not accept
        tracking: the recipe's own [tracking], which has the other values

    Returns:
        The table with every value but the defaults; empty if the block has the recipe's values.
    """
    if not isinstance(block, dict):
        return ""
    wanted = {key: block.get(key) for key in ("project", "team", "group")}
    if block.get("enabled") is False:
        wanted["mode"] = "disabled"
    elif block.get("enabled") is True and tracking.mode == "disabled":
        wanted["mode"] = "auto"
    table = tracking.model_dump(exclude_defaults=True)
    comments = []
    for key, value in wanted.items():
        if value not in (None, "", "auto") or key == "mode":
            try:
                Tracking.model_validate({key: value})
                table[key] = value
            except ValidationError:
                comments.append(f"# {key} = {value_text(value)} is not valid in a recipe")
    if Tracking.model_validate(table) == tracking and not comments:
        return ""
    lines = [f"{key} = {toml_value(table[key])}" for key in table]
    return "\n".join(["[tracking]", *lines, *comments])


def _rejection(name: str, review: Review, proposal: dict[str, Any], *, is_complete: bool) -> str:
    """Return the message about a file with findings, with a text that would be accepted.

    is_complete: False if the layout and the GPUs, with which a run compares the file, are not known
    """
    notes = review.notes()
    if len(review.findings) + len(notes) == 1:
        about = f"{name}: {review.findings[0]}"
    else:
        count = counted(len(review.findings), "problem")
        about = "\n  ".join([f"{name}: {count}:", *review.findings])
        if notes:
            about += "\n  ".join(["\nnotes, which need no change:", *notes])
    rest = "" if is_complete else " (pretrain.py also compares it with the layout and the GPUs)"
    return f"{about}\nThis file would be accepted{rest}:\n{value_text(proposal, indent=2)}"


def _parse(name: str, review: Review) -> dict[str, Any]:
    """Return the content of a file; syntax errors and duplicate keys are added to the findings.

    Raises:
        UserError: the file is missing or not valid JSON, or is not an object.
    """
    try:
        text = repository_path(name).read_text(encoding="utf-8-sig")
        problems, text = repair_json(text)
    except UserError as problem:
        raise UserError(
            f'deepspeed = "{name}": {problem}; correct the file, or use one of {SHIPPED}'
        ) from None
    except (FileNotFoundError, IsADirectoryError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else "this is a folder"
        raise UserError(f'deepspeed = "{name}": {reason}; use one of {SHIPPED}') from None
    except OSError as error:
        raise UserError(
            f'deepspeed = "{name}" cannot be read ({error.strerror}); use one of {SHIPPED}'
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or a number of 4,301 digits
        raise UserError(
            f'deepspeed = "{name}": this is not valid JSON: {reason_of(error)}; correct the '
            f"file, or use one of {SHIPPED}"
        ) from None
    review.findings += problems
    content = json.loads(
        text,
        object_pairs_hook=partial(_unique_keys, review),
        parse_constant=partial(_reject_constant, name),
    )
    if not isinstance(content, dict):
        raise UserError(
            f'deepspeed = "{name}": this is not a JSON object, which begins with {{; use one of '
            f"{SHIPPED}"
        )
    return content


def _unique_keys(review: Review, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON's pairs; DeepSpeed rejects keys that occur twice, too."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            review.reject(f"{key} occurs twice in an object; remove one of the two")
        content[key] = value
    return content


def _reject_constant(name: str, constant: str) -> None:
    raise UserError(f"{name}: {constant} is not valid in JSON; use a finite number")


@dataclass(frozen=True)
class Owned:
    """A setting of DeepSpeed that follows from the recipe.

    Attributes:
        values: the recipe's value, in every spelling that means the same
        origin: key and value of the recipe; empty if no key of the recipe can change the setting
    """

    values: tuple[Any, ...]
    origin: str = ""

    def accepts(self, value: Any) -> bool:
        """Return True if a value of the JSON is the recipe's."""
        is_flag = isinstance(value, bool)
        return any(value == own and is_flag == isinstance(own, bool) for own in self.values)


def _owned(key: str, value: Any, *spellings: Any) -> Owned:
    """Return the setting of a key of the recipe, with DeepSpeed's spellings if they differ."""
    return Owned(spellings or (value,), f"{key} = {value_text(value)}")


def owned_values(recipe: Recipe, dims: ParallelDims | None) -> dict[str, Owned]:
    """Return the settings of DeepSpeed that follow from a recipe, by path.

    Without the sizes of the axes, the accumulation steps are left out.
    """
    batch, optimizer, schedule = recipe.batch, recipe.optimizer, recipe.optimizer.schedule
    kinds = {"adamw": ("AdamW", "Adam", "adamw", "adam"), "muon": ("Muon", "muon")}
    shapes = {"constant": ("WarmupLR",), "cosine": ("WarmupCosineLR",)}
    if schedule.minimum_learning_rate == 0:
        shapes["linear"] = ("WarmupDecayLR",)
    rate = _owned("optimizer.learning_rate", optimizer.learning_rate)
    off = Owned((False,))
    steps: dict[str, Owned] = {}
    if dims:
        key = "batch.global_sequences / batch.micro_sequences / data ranks"
        steps["gradient_accumulation_steps"] = _owned(key, recipe.micro_batches(dims.data))
    return steps | {
        "train_batch_size": _owned("batch.global_sequences", batch.global_sequences),
        "train_micro_batch_size_per_gpu": _owned("batch.micro_sequences", batch.micro_sequences),
        "gradient_clipping": _owned("optimizer.gradient_clipping", optimizer.gradient_clipping),
        "optimizer.type": _owned("optimizer.kind", optimizer.kind, *kinds[optimizer.kind]),
        "optimizer.params.lr": rate,
        "optimizer.params.betas": _owned("optimizer.betas", list(optimizer.betas)),
        "optimizer.params.eps": _owned("optimizer.epsilon", optimizer.epsilon),
        "optimizer.params.weight_decay": _owned("optimizer.weight_decay", optimizer.weight_decay),
        "optimizer.params.momentum": _owned("optimizer.momentum", optimizer.momentum),
        "optimizer.params.adam_w_mode": Owned((True,)),
        "optimizer.params.torch_adam": Owned((True, False)),
        "scheduler.type": Owned(
            shapes.get(schedule.decay, ()), f'optimizer.schedule.decay = "{schedule.decay}"'
        ),
        "scheduler.params.warmup_min_lr": Owned((0,)),
        "scheduler.params.warmup_max_lr": rate,
        "scheduler.params.warmup_num_steps": _owned(
            "optimizer.schedule.warmup_steps", schedule.warmup_steps
        ),
        "scheduler.params.warmup_type": Owned(("linear",)),
        "scheduler.params.total_num_steps": (
            _owned("optimizer.schedule.steps", schedule.steps)
            if schedule.steps
            else _owned("training.steps", recipe.training.steps)
        ),
        "activation_checkpointing.partition_activations": off,
        "activation_checkpointing.cpu_checkpointing": off,
        "activation_checkpointing.contiguous_memory_optimization": off,
        "activation_checkpointing.number_checkpoints": Owned((None,)),
        "activation_checkpointing.synchronize_checkpoint_boundary": off,
        "activation_checkpointing.profile": off,
        "pipeline.stages": _owned("layout.pipeline", recipe.layout.pipeline),
        "pipeline.partition": Owned(("best",)),
        "pipeline.seed_layers": off,
        "pipeline.activation_checkpoint_interval": Owned((0,)),
    }


def _review_owned(
    content: Mapping[str, Any], review: Review, values: Mapping[str, Owned]
) -> dict[str, Any]:
    """Return the settings that the recipe owns, as the file may contain them.

    Args:
        review: receives a finding for each setting that differs from the recipe's
        values: the recipe's values, as far as they are known
    """
    accepted: dict[str, Any] = {}
    for key in RECIPE_KEYS:
        if key not in content:
            continue
        value = content[key]
        if key in RECIPE_BLOCKS and not isinstance(value, dict):
            review.reject(f"{key} = {value_text(value)} should be an object; remove it")
        elif key in RECIPE_BLOCKS:
            if values and (block := _review_block(key, value, review, values)):
                accepted[key] = block
        else:
            accepted[key] = _review_leaf(key, value, review, values) if key in values else "auto"
    return accepted


def _review_block(
    path: str, block: Mapping[str, Any], review: Review, values: Mapping[str, Owned]
) -> dict[str, Any]:
    """Return a block that the recipe owns, with a valid value in place of each rejected one."""
    accepted: dict[str, Any] = {}
    for key, value in block.items():
        if isinstance(value, dict):
            inner = _review_block(f"{path}.{key}", value, review, values)
        else:
            inner = _review_leaf(f"{path}.{key}", value, review, values)
        if inner not in ({}, REMOVED):
            accepted[key] = inner
    return accepted


KEYS_OF_RECIPE = {  # in place of shares of the peak learning rate
    "scheduler.params.cos_min_ratio": "optimizer.schedule.minimum_learning_rate, which is a "
    "learning rate, not a ratio",
    "scheduler.params.warmup_min_ratio": "optimizer.schedule.warmup_steps, whose warm-up always "
    "starts at a learning rate of 0",
}


def _review_leaf(path: str, value: Any, review: Review, values: Mapping[str, Owned]) -> Any:
    """Return a value that the file may contain; add a finding if the file has another one."""
    owned = values.get(path, Owned(()))
    if value == "auto" or owned.accepts(value):
        return value
    shown = f"{path} = {value_text(value)}"
    if (meant := meant_by_text(value)) is not None and owned.accepts(meant):
        review.reject(f'{shown} is a text; use {value_text(meant)} without quotes, or "auto"')
        return "auto"
    if owned.origin:
        review.reject(
            f"{shown} differs from the recipe, where {owned.origin}; use "
            f'"{path.rpartition(".")[2]}": "auto", or change the recipe'
        )
        return "auto"
    owner = KEYS_OF_RECIPE.get(path, RECIPE_BLOCKS[path.partition(".")[0]])
    review.reject(f"{shown} belongs to the recipe; remove it and use {owner}")
    return REMOVED


def _resolve_precision(settings: dict[str, Any], review: Review) -> None:
    """Replace the former name of bf16 and "auto" in "enabled" of bf16 and fp16."""
    if "bfloat16" in settings and "bf16" not in settings:
        settings["bf16"] = settings.pop("bfloat16")
        review.readings.append("bfloat16 is read as bf16")
    blocks = {name: settings[name] for name in ("bf16", "fp16") if name in settings}
    states = {
        name: block.get("enabled") for name, block in blocks.items() if isinstance(block, dict)
    }
    for name, state in states.items():
        if state == "auto":
            states[name] = True not in states.values()
            settings[name] = settings[name] | {"enabled": states[name]}
            word = "true" if states[name] else "false"
            review.readings.append(f'{name}.enabled = "auto" is read as {word}')


def _resolve_stage(settings: dict[str, Any], review: Review) -> None:
    """Reject a config without ZeRO, and replace "auto" in the stage."""
    zero = settings.setdefault("zero_optimization", {})
    if zero == "auto":
        zero = {"stage": "auto"}
    if not isinstance(zero, dict):
        return
    stage = zero.get("stage", 0)
    if stage in ("1", "2", "3"):
        review.reject(f'zero_optimization.stage = "{stage}" is a text; use the number {stage}')
        settings["zero_optimization"] = zero | {"stage": int(stage)}
        return
    if stage == "auto":
        review.readings.append('zero_optimization.stage = "auto" is read as 1')
    elif stage == 0 and not isinstance(stage, bool):
        setting = "stage = 0" if "stage" in zero else "stage is missing, which means 0"
        review.reject(
            f"zero_optimization.{setting}: use 1, which needs no more time or memory, also without "
            f"a pipeline; stage 0 is not supported, because it clips gradients wrongly in pipelines"
        )
    else:
        return
    settings["zero_optimization"] = zero | {"stage": 1}


def _check_dependencies(config: dict[str, Any], review: Review) -> None:
    """Reject settings that exclude each other, and correct them in the config."""
    if precision(config) == "bf16" and config.get("fp16", {}).get("enabled"):
        review.reject("bf16 and fp16 are both enabled; use bf16 alone")
        del config["fp16"]
    scaled = config.get("gradient_predivide_factor", 1) != 1 or config.get("prescale_gradients")
    if scaled and zero_stage(config) > 2:
        review.reject(
            f"prescale_gradients and gradient_predivide_factor scale gradients before they "
            f"are summed. With reduce_scatter, DeepSpeed does not support this under "
            f"ZeRO-{zero_stage(config)}; without it, the gradients would be wrong; remove them"
        )
        for key in ("prescale_gradients", "gradient_predivide_factor"):
            config.pop(key, None)


def _reject_fp16(config: dict[str, Any], review: Review) -> None:
    """Reject fp16 on a machine without a GPU, and replace it in the config."""
    if precision(config) == "fp16":
        review.reject(
            'fp16 needs a GPU and none was found; use "bf16": {"enabled": true} in its place, or '
            f'deepspeed = "{shipped_json(zero_stage(config), "bf16")}"'
        )
        del config["fp16"]
        config["bf16"] = {"enabled": True}


def zero_stage(config: dict[str, Any]) -> int:
    """Return the ZeRO stage of a checked config."""
    return config["zero_optimization"]["stage"]


def precision(config: dict[str, Any]) -> str:
    """Return the precision of the weights: fp32, bf16 or fp16."""
    return next((p for p in ("bf16", "fp16") if config.get(p, {}).get("enabled")), "fp32")


def communication_precision(config: dict[str, Any]) -> str:
    """Return the precision in which gradients are summed over the data ranks, by default fp32.

    DeepSpeed's own default is the precision of the weights. `docs/zero-and-precision.md` shows the
    error of sums in bf16 (`benchmarks/reduction_error.py`).
    """
    return config.get("communication_data_type", "fp32")


def accumulation_precision(config: dict[str, Any]) -> str:
    """Return the precision in which the gradients of micro-batches are added up.

    The default is that of the weights, as in DeepSpeed, but fp32 for fp16 weights with ZeRO-1 and 2
    (`threefold/pipeline/gradients.py`).
    """
    weights = precision(config)
    default = "fp32" if weights == "fp16" and zero_stage(config) < 3 else weights
    return config.get("data_types", {}).get("grad_accum_dtype") or default


def shipped_json(stage: int, precision: str) -> str:
    """Return the shipped JSON of a ZeRO stage and a precision, or that of ZeRO-1 if there is none.

    ZeRO-1 is shipped in all precisions.
    """
    return f"ds_configs/zero{stage if is_shipped(stage, precision) else 1}_{precision}.json"


@cache
def is_shipped(stage: int, precision: str) -> bool:
    """Return True if there is a shipped JSON of a ZeRO stage and a precision."""
    return (REPOSITORY / f"ds_configs/zero{stage}_{precision}.json").exists()


# Values that a run has for settings that its JSON leaves out.
DEFAULTS: Mapping[str, Any] = {
    "communication_data_type": "fp32",
    "bf16.enabled": False,
    "fp16.enabled": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
}


def different_settings(name: str, replacement: str) -> list[str]:
    """Return the settings that differ between a JSON and one of another ZeRO stage.

    The stage and the settings for ZeRO-3 only are left out.
    """
    configs = read_deepspeed_json(name), read_deepspeed_json(replacement)
    defaults = dict(DEFAULTS)
    if zero_stage(configs[1]) <= 2:
        defaults["zero_optimization.reduce_bucket_size"] = GRADIENT_BUCKET_ELEMENTS
    own, other = (
        {
            **defaults,
            **dict(leaves(config)),
            "data_types.grad_accum_dtype": accumulation_precision(config),
        }
        for config in configs
    )
    ignored = {f"zero_optimization.{key}" for key in ("stage", *ONLY_ZERO_3)}
    keys = [key for key in dict.fromkeys([*own, *other]) if key not in ignored]
    return [key for key in keys if own.get(key) != other.get(key)]


@dataclass(frozen=True)
class SettingProblem:
    """A setting of the JSON that does not suit the recipe.

    Attributes:
        finding: the setting, the reason and a remedy
        value: a value that suits the recipe
    """

    finding: str
    block: str
    key: str
    value: Any

    def correct(self, config: dict[str, Any]) -> None:
        """Correct the setting in a config."""
        config[self.block] = config[self.block] | {self.key: self.value}


def _combinations(
    recipe: Recipe, config: dict[str, Any], dims: ParallelDims
) -> Iterator[SettingProblem]:
    """Yield the settings of a checked JSON that do not suit the recipe.

    The caller may correct the config after each of them.
    """
    for problem in _unsuitable_stages(recipe, config, dims):
        yield SettingProblem(problem, "zero_optimization", "stage", 2)
    if recipe.training.matmul_precision == "fp8" and precision(config) == "fp16":
        problem = (
            f'training.matmul_precision = "fp8" with weights in fp16 ({recipe.deepspeed}), whose '
            f"range is smaller than that of the scales; use deepspeed = "
            f'"{shipped_json(zero_stage(config), "bf16")}", or training.matmul_precision = '
            f'"weights"'
        )
        yield SettingProblem(problem, "fp16", "enabled", False)


def _unsuitable_stages(recipe: Recipe, config: dict[str, Any], dims: ParallelDims) -> Iterator[str]:
    """Yield the reasons why a ZeRO stage does not suit the recipe; ZeRO-2 suits in all cases."""
    stage, layout, named = zero_stage(config), recipe.layout, f'deepspeed = "{recipe.deepspeed}"'
    at_stage_2 = shipped_json(2, precision(config))
    if layout.expert > 1 and stage > 2:
        yield (
            f"layout.expert = {layout.expert} with ZeRO-{stage} ({named}): "
            f"DeepSpeed's ZeRO-{stage} would average the gradients of different experts; use "
            f'deepspeed = "{at_stage_2}", or layout.expert = 1'
        )
    if dims.is_hsdp and stage > 2:
        yield (
            f"layout.dp_shard = {dims.dp_shard} with ZeRO-{stage} ({named}), "
            f'which shards over all data ranks; use deepspeed = "{at_stage_2}", or '
            f"layout.dp_shard = 0"
        )
    if layout.pipeline > 1 and stage > 2:
        yield (
            f"layout.pipeline = {layout.pipeline} with ZeRO-{stage} ({named}): each stage would "
            f"gather its weights again for both passes of every micro-batch; "
            f'use deepspeed = "{at_stage_2}", or layout.pipeline = 1'
        )
    if recipe.tracking.timeline_step and stage > 2:
        yield (
            f"tracking.timeline_step = {recipe.tracking.timeline_step} with ZeRO-{stage} "
            f"({named}): only the pipeline's engine is recorded, "
            f"which ZeRO-1 and 2 run on; use tracking.timeline_step = 0"
        )
    if layout.reduce_every and stage != 2:
        yield (
            f"layout.reduce_every = {layout.reduce_every} has no effect with ZeRO-{stage} "
            f"({named}); use layout.reduce_every = 0, or a JSON with ZeRO-2"
        )


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.key, value) of everything in nested tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
