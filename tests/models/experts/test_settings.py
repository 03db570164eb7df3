"""Wrong settings of experts: each message names the key, the value, and a value that works."""

import tomllib
from typing import Any
from unittest import mock

import pytest

from models.config import Experts
from models.errors import UserError
from tests.conftest import changed
from threefold.config import layout
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment

TABLE = tomllib.loads((REPOSITORY / "recipes" / "tiny-moe.toml").read_text())
DENSE = tomllib.loads(DEFAULT_RECIPE.read_text()) | {"layout": {}}
E = "model__experts__"
TWO_TENSOR_RANKS = {"layout__tensor": 2, "layout__expert": 1}

Changes = dict[str, Any]
# changes of tiny-moe.toml, number of ranks, two parts of the message: key with value, and value
# that works; the changes that the second part asks for
BAD: list[tuple[Changes, int, str, str, Changes]] = [
    # the experts
    ({E + "count": 1}, 2, "model.experts.count = 1 ", "count = 8", {E + "count": 8}),
    ({E + "count": 0}, 2, "model.experts.count = 0 ", "count = 8", {E + "count": 8}),
    ({E + "count": 99999}, 2, "model.experts.count = 99999 ", "count = 8", {E + "count": 8}),
    ({E + "count": "eight"}, 2, 'model.experts.count = "eight"', "count = 8", {E + "count": 8}),
    ({E + "count": 2.5}, 2, "model.experts.count = 2.5", "count = 8", {E + "count": 8}),
    ({E + "count": None}, 2, "model.experts.count is missing", "count = 8", {E + "count": 8}),
    (
        {E + "per_token": 9}, 2,
        "model.experts.per_token = 9 ", "per_token = 2", {E + "per_token": 2},
    ),
    (
        {E + "per_token": 0}, 2,
        "model.experts.per_token = 0 ", "per_token = 2", {E + "per_token": 2},
    ),
    (
        {E + "per_token": None}, 2,
        "model.experts.per_token is missing", "per_token = 2", {E + "per_token": 2},
    ),
    (
        {E + "ffn_hidden_size": 0}, 2, "model.experts.ffn_hidden_size = 0 ",
        "ffn_hidden_size = 1024", {E + "ffn_hidden_size": 1024},
    ),
    ({E + "shared": -1}, 2, "model.experts.shared = -1 ", "shared = 0", {E + "shared": 0}),
    (
        {E + "dense_layers": -1}, 2,
        "model.experts.dense_layers = -1 ", "dense_layers = 0", {E + "dense_layers": 0},
    ),
    (
        {E + "dense_layers": 4}, 2,
        "model.experts.dense_layers = 4 leaves none of layers = 4",
        "dense_layers = 3", {E + "dense_layers": 3},
    ),
    (
        {E + "balance_loss": -0.1}, 2,
        "model.experts.balance_loss = -0.1 ", "balance_loss = 0", {E + "balance_loss": 0},
    ),
    (
        {E + "balance_loss": float("nan")}, 2,
        "model.experts.balance_loss = nan", "balance_loss = 0.0", {E + "balance_loss": 0.0},
    ),
    ({E + "z_loss": -1}, 2, "model.experts.z_loss = -1", "z_loss = 0", {E + "z_loss": 0}),
    (
        {E + "router": "sigmod"}, 2,
        'model.experts.router = "sigmod"', 'router = "softmax"', {E + "router": "softmax"},
    ),
    (
        {E + "output_scale": 0.0}, 2,
        "model.experts.output_scale = 0.0 ", "output_scale = 1.0", {E + "output_scale": 1.0},
    ),
    (
        {E + "bias_update": -0.1, E + "router": "sigmoid"}, 2,
        "model.experts.bias_update = -0.1 ", "bias_update = 0", {E + "bias_update": 0},
    ),
    (
        {E + "bias_update": 0.001}, 2,
        "model.experts.bias_update = 0.001 ", 'router = "sigmoid"', {E + "router": "sigmoid"},
    ),
    (
        {E + "router": "softmax-after-topk"}, 2,
        "model.experts.normalize = true ", "normalize out", {E + "normalize": None},
    ),
    (
        {E + "normalize": 1}, 2,
        "model.experts.normalize = 1", "normalize = false", {E + "normalize": False},
    ),
    (
        {E + "cout": 8}, 2,
        "unknown key model.experts.cout = 8", "did you mean model.experts.count?",
        {E + "cout": None, E + "count": 8},
    ),
    (
        {"model__bias": True, E + "router": "sigmoid"}, 2,
        "model.bias = true ", "bias = false", {"model__bias": False, "model__qkv_bias": True},
    ),
    (
        {
            "model__bias": True, "model__hidden_size": 193, "model__head_size": 32,
            "layout__tensor": 2, "layout__expert": 1, "layout__expert_tensor_parallel": True,
        }, 2,
        "model.hidden_size = 193 is not divisible by layout.tensor = 2", "layout.tensor = 1",
        {"layout__tensor": 1},
    ),
    (
        {E + "groups": 3, E + "router": "sigmoid"}, 2,
        "model.experts.groups = 3 ", "groups = 2", {E + "groups": 2, E + "router": "sigmoid"},
    ),
    (
        {E + "groups": 8, E + "router": "sigmoid"}, 2,
        "model.experts.groups = 8 ", "groups = 4",
        {E + "groups": 4, E + "router": "sigmoid"},
    ),
    (
        {E + "groups": 0, E + "router": "sigmoid"}, 2,
        "model.experts.groups = 0 ", "groups = 1", {E + "groups": 1},
    ),
    (
        {E + "groups": 4, E + "groups_per_token": 5, E + "router": "sigmoid"}, 2,
        "model.experts.groups_per_token = 5 ", "groups_per_token = 4",
        {E + "groups": 4, E + "groups_per_token": 4, E + "router": "sigmoid"},
    ),
    (
        {E + "groups": 4, E + "per_token": 3, E + "router": "sigmoid"}, 2,
        "model.experts.groups_per_token = 1 ", "groups_per_token = 2",
        {E + "groups": 4, E + "groups_per_token": 2, E + "per_token": 3, E + "router": "sigmoid"},
    ),
    (
        {E + "groups": 4}, 2, "model.experts.groups = 4 ", "groups out", {E + "groups": None},
    ),
    # the layout
    ({"layout__expert": 0}, 2, "layout.expert = 0", "expert = 1", {"layout__expert": 1}),
    ({"layout__expert": "two"}, 2, 'layout.expert = "two"', "expert = 1", {"layout__expert": 1}),
    (
        {"layout__expert": 3}, 4,
        "model.experts.count = 8 is not divisible by layout.expert x layout.tensor = 3",
        "layout.expert = 2 or 4", {"layout__expert": 4},
    ),
    (
        {"layout__expert": 8, "layout__tensor": 2}, 16,
        "model.experts.count = 8 is not divisible by layout.expert x layout.tensor = 16",
        "layout.expert = 4, or layout.expert_tensor_parallel = true",
        {"layout__expert_tensor_parallel": True},
    ),
    (
        {"layout__expert": 16, "layout__tensor": 2, "layout__expert_tensor_parallel": True}, 16,
        "model.experts.count = 8 is not divisible by layout.expert = 16", "layout.expert = 8",
        {"layout__expert": 8},
    ),
    (
        {
            E + "ffn_hidden_size": 127, **TWO_TENSOR_RANKS,
            "layout__expert_tensor_parallel": True,
        }, 2,
        "model.experts.ffn_hidden_size = 127 is not divisible by layout.tensor = 2",
        "layout.tensor = 1, or layout.expert_tensor_parallel = false", {"layout__tensor": 1},
    ),
    (
        {
            E + "count": 7, E + "ffn_hidden_size": 127, **TWO_TENSOR_RANKS,
            "layout__expert_tensor_parallel": True,
        }, 2,
        "model.experts.ffn_hidden_size = 127 is not divisible by layout.tensor = 2",
        "layout.tensor = 1", {"layout__tensor": 1},
    ),
    (
        {"layout__expert_overlap": True}, 2,
        'layout.expert_overlap = true is not possible with layout.schedule = "1f1b"',
        "layout.expert_overlap = false", {"layout__expert_overlap": False},
    ),
    (
        {
            "layout__expert": 1, "layout__expert_overlap": True, "layout__pipeline": 2,
            "layout__schedule": "interleaved",
        }, 4,
        "layout.expert_overlap = true has no effect with layout.expert = 1",
        "layout.expert = 2 or more", {"layout__expert": 2},
    ),
    (
        {
            "layout__expert_overlap": True, "layout__pipeline": 2, "batch__micro_sequences": 8,
            "layout__schedule": "interleaved",
        }, 4,
        'layout.schedule = "interleaved" with layout.expert_overlap = true needs 4 micro-batches',
        "batch.global_sequences = 64", {"batch__global_sequences": 64},
    ),
    (
        {E + "count": 7, **TWO_TENSOR_RANKS}, 2,
        "model.experts.count = 7 is not divisible by layout.expert x layout.tensor = 2",
        "layout.tensor = 1", {"layout__tensor": 1},
    ),
    (
        {"layout__expert": 4}, 2,
        "layout.expert = 4 does not divide the 2 ranks", "layout.expert = 2",
        {"layout__expert": 2},
    ),
    (
        {"layout__expert": 4, "layout__tensor": 2}, 4,
        "layout.expert = 4 does not divide the 2 ranks", "layout.expert = 2",
        {"layout__expert": 2},
    ),
    (
        {"layout__expert": 2, "layout__dp_shard": 2}, 4,
        "layout.dp_shard = 2 with layout.expert = 2", "layout.dp_shard = 0",
        {"layout__expert": 2, "layout__dp_shard": 0},
    ),
    (
        {E + "shared": 1, E + "ffn_hidden_size": 127, **TWO_TENSOR_RANKS}, 2,
        "model.experts.shared x model.experts.ffn_hidden_size = 127 ", "layout.tensor = 1",
        {"layout__tensor": 1},
    ),
    (
        {"model__sequence_length": 255, **TWO_TENSOR_RANKS}, 2,
        "model.sequence_length = 255 is not divisible by layout.tensor = 2",
        "model.sequence_length = 254 or 256", {"model__sequence_length": 254},
    ),
    (
        {"deepspeed": "ds_configs/zero3_bf16.json"}, 2,
        "layout.expert = 2 with ZeRO-3", 'deepspeed = "ds_configs/zero2_bf16.json"',
        {"deepspeed": "ds_configs/zero2_bf16.json"},
    ),
    (
        {"deepspeed": "ds_configs/zero3_fp32.json"}, 2,
        "layout.expert = 2 with ZeRO-3", "layout.expert = 1", {"layout__expert": 1},
    ),
]  # fmt: skip
IDS = [", ".join(f"{key} = {value}" for key, value in row[0].items()) for row in BAD]


def rejection(table: dict[str, Any], ranks: int) -> str | None:
    """Return the message of a recipe that a run on `ranks` ranks rejects; None if it is valid."""
    try:
        recipe = parse_recipe(table, "recipe")
        dims = recipe.parallel_dims(LaunchEnvironment(size=ranks, local_size=ranks))
        build_deepspeed_config(recipe, dims)
    except UserError as error:
        return str(error)
    return None


def is_explained(changes: Changes, ranks: int, key: str, works: str, repair: Changes) -> bool:
    """Return True if the changes are rejected with the message, and the repaired ones are not."""
    table = changed(TABLE, **changes)
    message = rejection(table, ranks) or ""
    return (
        key in message
        and works in message.partition(key)[2]
        and "\n" not in message
        and rejection(changed(table, **repair), ranks) is None
    )


@pytest.mark.parametrize(("changes", "ranks", "key", "works", "repair"), BAD, ids=IDS)
def test_a_wrong_setting_is_rejected_with_a_value_that_works(
    changes: Changes, ranks: int, key: str, works: str, repair: Changes
) -> None:
    message = rejection(changed(TABLE, **changes), ranks)
    assert is_explained(changes, ranks, key, works, repair), message


def test_the_unmodified_recipes_are_valid() -> None:
    assert rejection(TABLE, 2) is None
    assert rejection(DENSE, 2) is None


@pytest.mark.parametrize(
    "changes",
    [
        {E + "count": 2, E + "per_token": 1},
        {E + "count": 2**14},
        {E + "per_token": 8},
        {E + "ffn_hidden_size": 1},
        {E + "dense_layers": 3},
        {E + "balance_loss": 0.0, E + "z_loss": 0.0},
        {E + "router": "sigmoid", E + "bias_update": 0.001, E + "output_scale": 2.5},
        {E + "router": "sigmoid", E + "groups": 4, E + "groups_per_token": 4, E + "per_token": 8},
        {"layout__expert": 1},
        {"deepspeed": "ds_configs/zero2_fp32.json"},
    ],
    ids=str,
)
def test_the_smallest_and_the_largest_values_are_valid(changes: Changes) -> None:
    assert rejection(changed(TABLE, **changes), 2) is None


def test_expert_ranks_require_experts() -> None:
    message = rejection(changed(DENSE, layout__expert=2), 2)
    assert message is not None
    assert "layout.expert = 2 has no effect without model.experts" in message
    assert message.endswith("use layout.expert = 1")


def test_all_missing_keys_are_named_with_values_that_work() -> None:
    message = rejection(changed(DENSE, model__experts={}), 2)
    examples = {"count": 8, "per_token": 2, "ffn_hidden_size": 1024}
    for key, value in examples.items():
        assert f"model.experts.{key} is missing; for example {key} = {value}" in (message or "")
    assert rejection(changed(DENSE, model__experts=examples), 2) is None


def test_a_value_in_place_of_the_section_is_rejected() -> None:
    message = rejection(changed(TABLE, model__experts=5), 2)
    assert message is not None and "model.experts = 5: " in message
    _, _, example = message.partition("for example ")
    assert example == "experts = { count = 8, per_token = 2, ffn_hidden_size = 1024 }"


@pytest.mark.parametrize(("shared", "size"), [(0, 0), (1, 128), (3, 384)])
def test_shared_experts_are_one_mlp(shared: int, size: int) -> None:
    experts = Experts(count=8, per_token=2, ffn_hidden_size=128, shared=shared)
    assert experts.shared_ffn_hidden_size == size


def test_a_setting_that_is_not_checked_is_noticed() -> None:
    row = row_of(E + "per_token", 0)
    with mock.patch.object(Experts, "__post_init__", lambda self: None):
        assert rejection(changed(TABLE, **row[0]), 2) is None
        assert not is_explained(*row)


def test_a_message_without_a_value_that_works_is_noticed() -> None:
    row = row_of("layout__expert", 3)
    assert is_explained(*row)
    with mock.patch.object(layout, "nearest_divisors", lambda number, value: "another one"):
        assert not is_explained(*row)


def test_a_value_that_does_not_work_is_noticed() -> None:
    changes, ranks, key, works, _ = row_of("layout__expert", 3)
    assert not is_explained(changes, ranks, key, works, {"layout__expert": 5})


def row_of(key: str, value: Any) -> tuple[Changes, int, str, str, Changes]:
    return next(row for row in BAD if row[0] == {key: value})
