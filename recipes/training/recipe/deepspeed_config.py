"""ds_configs JSON + recipe -> the configuration that DeepSpeed gets.

The JSON owns ZeRO, precision and communication; the recipe owns the batch and the clipping, which
the JSON leaves "auto".
"""

import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from models.cost import parameter_count
from models.errors import UserError
from recipes.training.recipe.deepspeed_schema import check_settings
from recipes.training.recipe.loading import REPOSITORY
from recipes.training.recipe.repository import repository_path
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.topology import Topology

AUTO_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
RECIPE_KEYS = {  # key of the JSON -> where its setting belongs
    "train_batch_size": "batch.global_sequences",
    "optimizer": "[optimizer]",
    "scheduler": "[optimizer.schedule]",
    "activation_checkpointing": "layout.recompute",
    "pipeline": "[layout]",
    "wandb": "[tracking]",
}
# ZeRO-1 and 2 sum gradients over the data ranks in buckets during the last backward pass of a step
# or of a group of micro-batches. 64 MiB in fp32 is enough to reach a network's full bandwidth, and
# holds only a few blocks of a large model. DeepSpeed's default of 5e8 elements would hold most of a
# stage, so that no sum could begin before the end of the pass.
GRADIENT_BUCKET_ELEMENTS = 2**24
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of an element
STEPS_PER_BREAKDOWN = 10
SHIPPED = ", ".join(
    str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "ds_configs").glob("*.json"))
)


def build_deepspeed_config(recipe: Recipe, topology: Topology) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`, with every "auto" filled in.

    Raises:
        UserError: the JSON sets a value that the recipe owns, or the two are incompatible.
    """
    config = read_deepspeed_json(recipe.deepspeed)
    _check_combination(recipe, config, topology)
    _check_reduce_every(recipe, config, recipe.micro_batches(topology.data))
    zero = config["zero_optimization"]
    if zero["stage"] == 2 and topology.replicas == 1:
        # Nobody to share gradients with: shards would be copies.
        config["zero_optimization"] = zero | {"stage": 1, "overlap_comm": False}
    if config["zero_optimization"]["stage"] <= 2:
        bucket = {"reduce_bucket_size": GRADIENT_BUCKET_ELEMENTS}
        config["zero_optimization"] = bucket | config["zero_optimization"]
    return config | {
        "train_micro_batch_size_per_gpu": recipe.batch.micro_sequences,
        "gradient_accumulation_steps": recipe.micro_batches(topology.data),
        "gradient_clipping": recipe.optimizer.gradient_clipping,
        "communication_data_type": communication_precision(config),
        # DeepSpeed prints nothing, since `tracking.py` does; a breakdown of times needs a number.
        "steps_per_print": STEPS_PER_BREAKDOWN if _breaks_down_times(config) else None,
        # Off, since this timer synchronises the device for every micro-batch; `tracking.py`
        # measures throughput.
        "timers": {"throughput": {"enabled": False}},
    }


def _breaks_down_times(config: dict[str, Any]) -> bool:
    """Return whether DeepSpeed prints times; its profiler of FLOPs turns them on too."""
    profiled = config.get("flops_profiler", {}).get("enabled", False)
    return bool(config.get("wall_clock_breakdown") or profiled)


def read_deepspeed_json(name: str) -> dict[str, Any]:
    """Read and check one file of ds_configs/, named as in the recipe.

    Raises:
        UserError: the file is missing or no JSON, or has a key or value that is not supported.
    """
    path = repository_path(name)
    try:
        config = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=partial(_unique_keys, name),
            parse_constant=partial(_reject_constant, name),
        )
    except UserError:  # of the two functions above
        raise
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f'deepspeed = "{name}": no such file; use one of {SHIPPED}') from None
    except OSError as error:
        raise UserError(
            f'deepspeed = "{name}" cannot be read ({error.strerror}); use one of {SHIPPED}'
        ) from None
    except (ValueError, RecursionError) as error:  # a plain ValueError for 4,301 digits
        raise UserError(
            f'deepspeed = "{name}": this is not valid JSON: {error}; use one of {SHIPPED}'
        ) from None
    if not isinstance(config, dict):
        raise UserError(f'deepspeed = "{name}": this is not a JSON object; use one of {SHIPPED}')
    _check_owners(name, config)
    check_settings(name, {key: value for key, value in config.items() if key not in AUTO_KEYS})
    if config.get("bf16", {}).get("enabled") and config.get("fp16", {}).get("enabled"):
        raise UserError(f"{name}: bf16 and fp16 are both enabled; use bf16 alone")
    scaled = config.get("gradient_predivide_factor", 1) != 1 or config.get("prescale_gradients")
    if scaled and zero_stage(config) > 2:
        raise UserError(
            f"{name}: prescale_gradients and gradient_predivide_factor scale gradients before they "
            f"are summed. With reduce_scatter, DeepSpeed does not support this under "
            f"ZeRO-{zero_stage(config)}; without it, the gradients would be wrong; remove them"
        )
    return config


def _unique_keys(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON's pairs; DeepSpeed rejects keys that occur twice, too."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UserError(f"{name}: {key} occurs twice in an object; remove one of the two")
        found[key] = value
    return found


def _reject_constant(name: str, constant: str) -> None:
    raise UserError(f"{name}: {constant} is not valid in JSON; use a finite number")


def _check_owners(name: str, config: dict[str, Any]) -> None:
    """Reject settings that the recipe owns, "auto" for any other key, and a config without ZeRO."""
    for key in AUTO_KEYS:
        if config.get(key) != "auto":
            raise UserError(
                f"{name}: {key} = {json.dumps(config.get(key))} belongs to the recipe; use "
                f'"{key}": "auto"'
            )
    for key, owner in RECIPE_KEYS.items():
        if key in config:
            raise UserError(f"{name}: {key} belongs to the recipe; remove it and use {owner}")
    for key, value in leaves(config):
        if value == "auto" and key not in AUTO_KEYS:
            raise UserError(
                f'{name}: {key} = "auto" is not filled in by anyone; use a value or remove it'
            )
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 1  # check_settings rejects it
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise UserError(
            f"{name}: zero_optimization.stage = {json.dumps(stage)}: without ZeRO DeepSpeed clips "
            f"wrongly over pipeline stages; use 1, which costs no more on one data rank"
        )


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


def shipped_json(stage: int, precision: str) -> str:
    """Return the shipped JSON of a ZeRO stage and a precision, or that of ZeRO-1 if there is none.

    ZeRO-1 is shipped in all precisions.
    """
    return f"ds_configs/zero{stage if is_shipped(stage, precision) else 1}_{precision}.json"


@cache
def is_shipped(stage: int, precision: str) -> bool:
    """Return True if there is a shipped JSON of a ZeRO stage and a precision."""
    return (REPOSITORY / f"ds_configs/zero{stage}_{precision}.json").exists()


def _check_combination(recipe: Recipe, config: dict[str, Any], topology: Topology) -> None:
    stage = zero_stage(config)
    at_stage_2 = shipped_json(2, precision(config))
    if recipe.layout.expert > 1 and stage > 2:
        raise UserError(
            f"layout.expert = {recipe.layout.expert} with ZeRO-{stage} (deepspeed = "
            f'"{recipe.deepspeed}"): '
            f"DeepSpeed's ZeRO-{stage} would average the gradients of different experts; use "
            f'deepspeed = "{at_stage_2}", or layout.expert = 1'
        )
    if recipe.layout.expert > 1 and not config["zero_optimization"].get("reduce_scatter", True):
        raise UserError(
            f'layout.expert = {recipe.layout.expert} with "reduce_scatter": false '
            f"({recipe.deepspeed}), which DeepSpeed does not support for experts; remove "
            f"reduce_scatter, or use layout.expert = 1"
        )
    if topology.is_hybrid and stage > 2:
        raise UserError(
            f"layout.shard_group = {topology.shard_group} with ZeRO-{stage} (deepspeed = "
            f'"{recipe.deepspeed}"), which shards over all data ranks; use deepspeed = '
            f'"{at_stage_2}", or layout.shard_group = 0'
        )
    if recipe.layout.pipeline > 1 and stage > 2:
        raise UserError(
            f"layout.pipeline = {recipe.layout.pipeline} with ZeRO-{stage} (deepspeed = "
            f'"{recipe.deepspeed}"): {_price_of_gathering(recipe, config, topology)}; '
            f'use deepspeed = "{at_stage_2}", or layout.pipeline = 1'
        )
    if recipe.tracking.timeline_step and stage > 2:
        raise UserError(
            f"tracking.timeline_step = {recipe.tracking.timeline_step} with ZeRO-{stage} "
            f'(deepspeed = "{recipe.deepspeed}"): only the pipeline\'s engine is recorded, '
            f"which ZeRO-1 and 2 run on; use tracking.timeline_step = 0"
        )
    gradients = config.get("data_types", {}).get("grad_accum_dtype")
    untied = gradients not in (None, precision(config)) and (
        precision(config) != "bf16" or gradients != "fp32"
    )
    if recipe.model.tie_embeddings and recipe.layout.pipeline > 1 and untied:
        raise UserError(
            f"model.tie_embeddings = true with layout.pipeline = {recipe.layout.pipeline} and "
            f'"grad_accum_dtype": "{gradients}" ({recipe.deepspeed}): DeepSpeed would let the two '
            f"copies drift apart; remove grad_accum_dtype, or use ds_configs/zero1_bf16.json"
        )


def _price_of_gathering(recipe: Recipe, config: dict[str, Any], topology: Topology) -> str:
    """Return why ZeRO-3 does not suit a pipeline, with the GiB that a GPU would receive."""
    ranks = topology.replicas
    if ranks == 1:
        return "there is only one data rank, so ZeRO-3 would shard nothing"
    passes = 2 * recipe.micro_batches(topology.data)
    weights = parameter_count(recipe.model) / (topology.pipeline * topology.tensor)
    gib = passes * weights * BYTES[precision(config)] * (ranks - 1) / ranks / 2**30
    amount = f"{gib:,.0f}" if gib >= 10 else f"{gib:.2g}"
    return (
        f"each stage would gather its weights for both passes of each of the {passes // 2:,} "
        f"micro-batches, about {amount} GiB per GPU in each step"
    )


def _check_reduce_every(recipe: Recipe, config: dict[str, Any], micro_batches: int) -> None:
    every, stage = recipe.layout.reduce_every, zero_stage(config)
    if every == 0:
        return
    if stage != 2:
        raise UserError(
            f"layout.reduce_every = {every} has no effect with ZeRO-{stage} (deepspeed = "
            f'"{recipe.deepspeed}"); use layout.reduce_every = 0, or a JSON with ZeRO-2'
        )
    if every > micro_batches:
        raise UserError(
            f"layout.reduce_every = {every} is more than the {micro_batches} micro-batches of a "
            f"step; use layout.reduce_every = {micro_batches}"
        )


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.key, value) of everything in nested tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
