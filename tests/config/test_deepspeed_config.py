"""DeepSpeed JSON files of public projects: all findings at once, and a text that is accepted."""

import copy
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from models.errors import UserError
from threefold.config.deepspeed_json import (
    build_deepspeed_config,
    deepspeed_notes,
    leaves,
    read_deepspeed_json,
    require_auto,
)
from threefold.config.deepspeed_schema import (
    AUTO_KEYS,
    NOT_SUPPORTED,
    ONLY_ZERO_3,
    OUTPUTS,
    RECIPE_KEYS,
    SETTINGS,
    WITHOUT_EFFECT,
)
from threefold.config.json_repair import repair_json
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment, ParallelDims
from threefold.config.recipe import Recipe
from threefold.pretrain.experiment import read_experiment
from threefold.run_folder.history import Progress
from threefold.tracking.messages import announce

TINY = REPOSITORY / "recipes" / "tiny.toml"
PROPOSAL = re.compile(r"\nThis file would be accepted( \(pretrain\.py also [^\n]*\))?:\n")
PROFILER = {
    "enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True,
    "output_file": None,
}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}
BUCKETS = {
    "allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True,
    "reduce_bucket_size": 5e8, "overlap_comm": False, "contiguous_gradients": True,
}  # fmt: skip
SCALING = {"loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
STAGE_3 = {
    "stage": 3, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e8,
    "stage3_param_persistence_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7,
    "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 90000000,
    "sub_group_size": 4e8,
}  # fmt: skip
RECOMPUTE = {
    "partition_activations": False, "cpu_checkpointing": False,
    "contiguous_memory_optimization": False, "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False, "profile": False,
}  # fmt: skip
AUTO = dict.fromkeys((*AUTO_KEYS, "train_batch_size"), "auto")
PUBLIC: dict[str, tuple[dict[str, Any], int]] = {  # project -> settings, and those to be rejected
    "bigscience-workshop/Megatron-DeepSpeed": (
        {
            "train_micro_batch_size_per_gpu": 2, "train_batch_size": 64, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "steps_per_print": 1,
            "wall_clock_breakdown": False, "flops_profiler": PROFILER,
        },
        3,
    ),
    "microsoft/Megatron-DeepSpeed": (
        {
            "train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 1,
            "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
            "zero_optimization": STAGE_3 | {
                "offload_optimizer": CPU | {
                    "buffer_count": 4, "pipeline_read": False, "pipeline_write": False,
                },
            },
            "fp16": {"enabled": True, "initial_scale_power": 15} | SCALING,
            "wall_clock_breakdown": True, "zero_allow_untested_optimizer": True,
            "aio": {"block_size": 1048576, "queue_depth": 16, "thread_count": 2},
        },
        5,
    ),
    "microsoft/DeepSpeedExamples": (
        {
            "train_batch_size": 64, "gradient_accumulation_steps": 1, "steps_per_print": 1,
            "zero_optimization": STAGE_3 | {
                "cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": True,
            },
            "gradient_clipping": 1.0, "fp16": {"enabled": True, "loss_scale": 0} | SCALING,
            "wall_clock_breakdown": True, "zero_allow_untested_optimizer": False,
        },
        5,
    ),
    "SulRash/minLLMTrain": (
        {
            "bf16": {"enabled": "auto"}, "flops_profiler": PROFILER, "steps_per_print": 2000,
            "zero_optimization": {"stage": 2, "offload_optimizer": CPU} | BUCKETS,
            "wall_clock_breakdown": False,
        } | AUTO,
        1,
    ),
    "danielxmed/PolyGLU": (
        {
            "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}, "steps_per_print": 100,
            "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 16,
            "gradient_clipping": 1.0, "wall_clock_breakdown": False,
        },
        3,
    ),
    "HuangLK/transpeeder": (
        {
            "train_micro_batch_size_per_gpu": 1, "train_batch_size": 128, "steps_per_print": 100,
            "gradient_clipping": 1.0, "bf16": {"enabled": False},
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12} | SCALING,
            "optimizer": {
                "type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": 1e-6, "warmup_max_lr": 1e-5, "warmup_num_steps": 100,
                    "total_num_steps": 1000,
                },
            },
            "zero_optimization": {"stage": 1, "offload_optimizer": CPU} | BUCKETS,
            "activation_checkpointing": RECOMPUTE,
            "wandb": {"enabled": True, "team": None, "group": None, "project": "llama-65B"},
            "wall_clock_breakdown": True,
        },
        9,
    ),
    "ridgerchu/matmulfreellm": (
        {
            "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2} | BUCKETS,
        } | AUTO,
        0,
    ),
}  # fmt: skip


def write(folder: Path, content: dict[str, Any] | str) -> Path:
    file = folder / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def setting(file: Path, *overrides: str) -> tuple[Recipe, ParallelDims]:
    """Return tiny with a JSON, and its layout on two processes."""
    recipe = load_recipe(TINY, [f'deepspeed="{file}"', *overrides])
    return recipe, recipe.parallel_dims(LaunchEnvironment(size=2, local_size=2))


def build(folder: Path, content: dict[str, Any] | str, *overrides: str) -> dict[str, Any]:
    return build_deepspeed_config(*setting(write(folder, content), *overrides))


def findings(said: str, file: Path) -> list[str]:
    """Return the findings of a message, without the notes."""
    about = PROPOSAL.split(said)[0].removeprefix(f"{file}: ").partition("\nnotes, which")[0]
    return about.split("\n  ")[1:] or [about]


@pytest.mark.parametrize("project", PUBLIC)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_public_file_needs_one_correction(project: str, pipeline: int, tmp_path: Path) -> None:
    content, expected = PUBLIC[project]
    layout = f"layout.pipeline={pipeline}"
    if pipeline == 1 and content["zero_optimization"]["stage"] == 3:
        expected -= 1  # ZeRO-3 needs a layout without a pipeline
    if expected == 0:
        assert build(tmp_path, content, layout)
        return
    with pytest.raises(UserError) as raised:
        build(tmp_path, content, layout)
    said = str(raised.value)
    assert len(findings(said, tmp_path / "ds.json")) == expected, said
    assert ("steps_per_print (every step is in metrics.jsonl)" in said) == (
        "steps_per_print" in content
    )
    proposal = PROPOSAL.split(said)[2]
    assert build(tmp_path, proposal, layout)
    notes = deepspeed_notes(*setting(tmp_path / "ds.json", layout))
    assert [note for note in notes if IN_BF16 not in note] == []


TEMPLATE = """{
  // of a script
  "train_batch_size": GLOBAL_BATCH,  # of all ranks
  "train_micro_batch_size_per_gpu": ${MICRO}, /* of
  a rank */ "steps_per_print": LOG_INTERVAL,
  'zero_optimization': {"stage": {{ stage }}, "overlap_comm": None,},
  bf16: {"enabled": True}, "prescale_gradients": False,
  "zero_allow_untested_optimizer": <FLAG>, "gradient_clipping": -$CLIP
}
"""
SYNTAX = [
    "line 2, column 3 and line 3, column 38 and line 4, column 47: JSON has no comments",
    "line 3, column 23: GLOBAL_BATCH is a placeholder",
    "line 4, column 37: ${MICRO} is a placeholder",
    "line 5, column 32: LOG_INTERVAL is a placeholder",
    "line 6, column 3: 'zero_optimization' has single quotes",
    "line 6, column 34: {{ stage }} is a placeholder",
    "line 6, column 63: None is not valid in JSON; use null",
    "line 6, column 67: a comma before a closing bracket",
    "line 7, column 3: bf16 has no quotes",
    "line 7, column 21: True is not valid in JSON; use true",
    "line 7, column 50: False is not valid in JSON; use false",
    "line 8, column 36: <FLAG> is a placeholder",
    "line 8, column 65: -$CLIP is a placeholder",
]


def test_a_misspelt_constant_is_not_taken_for_a_placeholder() -> None:
    problems, text = repair_json('{"bf16": {"enabled": tru}, "prescale_gradients": STAGE}')
    assert problems[0].endswith(": tru is not valid in JSON; did you mean true?")
    assert "STAGE is a placeholder" in problems[1] and '"enabled": true}' in text
    for word in ("FULL", "TUNE", "$TRUE"):
        assert "is a placeholder" in repair_json(f'{{"a": {word}}}')[0][0]


def test_the_template_of_a_script_needs_one_correction(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        build(tmp_path, TEMPLATE)
    lines = findings(str(raised.value), tmp_path / "ds.json")
    assert len(lines) == len(SYNTAX)
    assert all(line.startswith(start) for line, start in zip(lines, SYNTAX, strict=True)), lines
    assert build(tmp_path, PROPOSAL.split(str(raised.value))[2])["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("text", "position"),
    [("", "it is empty; correct"), (" \n", "it is empty; correct"),
     ('{"a": 1', "it ends too early; correct the file, or use one of ds_configs"),
     ('{"a": 010}', "column 8: "), ('{"a": "x"y"}', "column 10: "), ('{"a": .5}', "column 7: "),
     ('{"a": X,\n"b": .5}', "line 2, column 6: "),
     ('{"a": X, "b": [', "it ends too early; line 1, column 7: X"),
     ('{"a": LR * 2}', "column 10: "), ("{'a\"': 1}", "column 2: "),
     ("{" + '"a": X, ' * 200 + '"a": X}', "column 807: ")],
)  # fmt: skip
def test_other_errors_of_syntax_are_located(text: str, position: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        build(tmp_path, text)
    said = str(raised.value)
    assert re.search(rf'ds\.json": this is not valid JSON: {position}', said) and "\n" not in said


def test_a_stage_that_is_a_text_keeps_its_number(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        build(tmp_path, '{"zero_optimization": {"stage": "2"}}')
    assert 'zero_optimization.stage = "2" is a text; use the number 2' in str(raised.value)
    proposal = PROPOSAL.split(str(raised.value))[2]
    assert json.loads(proposal)["zero_optimization"]["stage"] == 2


def test_a_missing_comma_is_located_where_it_is_missing(tmp_path: Path) -> None:
    text = (
        '{\n "bf16": {"enabled": false}  // off\n'
        ' "zero_optimization": {"stage": 1 "overlap_comm": false}\n}'
    )
    with pytest.raises(UserError) as raised:
        build(tmp_path, text)
    lines = findings(str(raised.value), tmp_path / "ds.json")
    comment, comma = lines
    assert comment.startswith("line 2, column 30: JSON has no comments")
    assert comma == "line 2, column 28 and line 3, column 34: a comma is missing here; add it"
    assert build(tmp_path, PROPOSAL.split(str(raised.value))[2])


def test_a_folder_is_not_a_deepspeed_config() -> None:
    with pytest.raises(UserError, match='deepspeed = "ds_configs": this is a folder; use one of'):
        read_deepspeed_json("ds_configs")


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert build(tmp_path, '\ufeff{"zero_optimization": {"stage": 1}}')


def test_keys_of_the_recipe_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        build(tmp_path, {"zero_optimization": {"stage": 1}, "other": 5})
    listed = str(raised.value).partition("the keys of the top level are ")[2].partition("\n")[0]
    assert set(listed.split(", ")) == {*RECIPE_KEYS, *SETTINGS}
    for wrong, suggestion in [
        (
            {"train_batchsize": 5},
            'did you mean train_batch_size? For example "train_batch_size": "a',
        ),
        ({"optimiser": 5}, 'did you mean optimizer? For example "optimizer": "auto"'),
        ({"bf16": {"enabled": True, "gradient_clipping": 1}}, "did you mean gradient_clipping?"),
    ]:
        with pytest.raises(UserError, match=re.escape(suggestion)):
            build(tmp_path, {"zero_optimization": {"stage": 1}} | wrong)


WANDB = {"enabled": True, "project": "bloom", "team": "bigscience", "group": "tr11-176B"}
IN_BF16 = "micro-batches are added up in bf16, as in DeepSpeed"
DECIDES = "without effect here: wandb ([tracking] of the recipe decides)"


@pytest.mark.parametrize(
    ("block", "overrides", "expected"),
    [
        (WANDB, [], {"project": "bloom", "team": "bigscience", "group": "tr11-176B"}),
        (WANDB | {"team": None, "group": "auto"}, [], {"project": "bloom"}),
        (WANDB, ["tracking.mode=disabled"], {"mode": "auto", "group": "tr11-176B"}),
        ({"enabled": False, "project": "bloom"}, [], {"mode": "disabled", "project": "bloom"}),
        (WANDB | {"project": "a/b", "team": 5}, [], {"project": "threefold", "team": ""}),
        ({"group": "été"}, ['tracking.tags=["a", "b"]'], {"group": "été", "tags": ("a", "b")}),
        ({"enabled": True, "project": "threefold", "team": None}, [], None),
        ({"enabled": False}, ["tracking.mode=disabled"], None),
        (True, [], None),
    ],
)
def test_a_block_about_wandb_becomes_a_table_of_the_recipe(
    block: Any, overrides: list[str], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    content = {"zero_optimization": {"stage": 1}, "wandb": block}
    recipe, dims = setting(write(tmp_path, content), *overrides)
    note, *advice = deepspeed_notes(recipe, dims)
    assert note == DECIDES
    if expected is None:
        assert not advice
        return
    about, _, table = advice[0].partition("\n")
    assert about == "for the values of the wandb block, use this [tracking] in the recipe:"
    pasted = recipe.model_dump(mode="json", exclude_none=True) | tomllib.loads(table)
    tracking = parse_recipe(pasted, "pasted").tracking
    assert {key: getattr(tracking, key) for key in expected} == expected
    accepted = recipe.model_copy(update={"tracking": tracking})
    if block != WANDB | {"project": "a/b", "team": 5}:  # values that no recipe accepts
        assert deepspeed_notes(accepted, dims) == [DECIDES]
    with pytest.raises(UserError) as raised:
        build(tmp_path, content | {"other": 5}, *overrides)
    assert advice[0] in str(raised.value)
    assert '"wandb"' not in PROPOSAL.split(str(raised.value))[2]


def test_the_proposed_file_has_the_values_of_the_findings(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "last_batch_iteration": 5}}
    content = {"zero_optimization": {"stage": 1}, "scheduler": scheduler, "gradient_clipping": 1.0}
    with pytest.raises(UserError) as raised:
        build(tmp_path, content)
    said, _, proposal = PROPOSAL.split(str(raised.value))
    assert 'use "type": "auto"' in said and 'use "warmup_num_steps": "auto"' in said
    assert "last_batch_iteration = 5 belongs to the recipe; remove it" in said
    assert json.loads(proposal) == content | {
        "scheduler": {"type": "auto", "params": {"warmup_num_steps": "auto"}}
    }


def test_a_run_without_a_launcher_is_told_how_to_start_its_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("threefold.pretrain.experiment.exit_now", sys.exit)
    monkeypatch.setattr(sys, "argv", ["recipes/pretrain.py", "my tiny.toml"])
    command = "start 4 ranks with: deepspeed --num_gpus 4 recipes/pretrain.py 'my tiny.toml'\n"
    for launcher, is_told in (
        ({}, True),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, False),
    ):
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            read_experiment(TINY, ["layout.tensor=2", "layout.pipeline=2"])
        said = capsys.readouterr().err
        assert "needs a multiple of" in said and (command in said) == is_told


def test_fp16_without_a_gpu_is_among_the_first_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("threefold.pretrain.experiment.exit_now", sys.exit)
    content = {
        "zero_optimization": {"stage": 0},
        "fp16": {"enabled": True},
        "bf16": {"enabled": False},
    }
    file = write(tmp_path, content)
    with pytest.raises(SystemExit):
        read_experiment(TINY, [f'deepspeed="{file}"', "layout.pipeline=1"])
    said = capsys.readouterr().err
    assert "stage = 0" in said and "fp16 needs a GPU and none was found" in said
    proposal = json.loads(PROPOSAL.split(said)[2])
    assert proposal == {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    file = write(tmp_path, content | {"zero_optimization": {"stage": 1}})
    assert read_experiment(TINY, [f'deepspeed="{file}"', "layout.pipeline=1"]).precision == "fp16"


def test_the_documented_message_is_the_real_one(tmp_path: Path) -> None:
    content = {"train_batch_size": 64, "zero_optimization": {"stage": 0}, "steps_per_print": 10}
    with pytest.raises(UserError) as raised:
        build(tmp_path, content)
    said = str(raised.value).replace(str(tmp_path / "ds.json"), "theirs.json")
    page = (REPOSITORY / "docs" / "zero-and-precision.md").read_text()
    assert f"```text\n{said}\n```" in page


def test_all_kinds_of_findings_come_at_once(tmp_path: Path) -> None:
    """Unknown keys, wrong values, the recipe's values, dependencies and the recipe's layout."""
    content = {
        "gradient_clipping": 7.0,
        "zero_optimization": {"stage": 3, "overlap_com": True, "reduce_bucket_size": -1},
        "bf16": {"enabled": True},
        "fp16": {"enabled": True},
        "prescale_gradients": True,
    }
    with pytest.raises(UserError) as raised:
        build(tmp_path, content, "layout.pipeline=2", "model.tie_embeddings=true")
    said = str(raised.value)
    named = ["gradient_clipping = 7.0", "unknown key zero_optimization.overlap_com",
             "reduce_bucket_size = -1", "bf16 and fp16 are both", "prescale_gradients and",
             "layout.pipeline = 2 with ZeRO-3"]  # fmt: skip
    lines = findings(said, tmp_path / "ds.json")
    assert len(lines) == len(named)
    assert all(name in line for name, line in zip(named, lines, strict=True)), said
    proposal = PROPOSAL.split(said)[2]
    assert build(tmp_path, proposal, "layout.pipeline=2", "model.tie_embeddings=true")


def test_the_recipes_own_values_are_accepted(tmp_path: Path) -> None:
    overrides = ("optimizer.schedule.decay=linear", "optimizer.schedule.minimum_learning_rate=0.0")
    recipe, dims = setting(write(tmp_path, {"zero_optimization": {"stage": 1}}), *overrides)
    expected = build_deepspeed_config(recipe, dims)
    optimizer, warmup = recipe.optimizer, recipe.optimizer.schedule.warmup_steps
    content = {
        "train_batch_size": recipe.batch.global_sequences,
        "train_micro_batch_size_per_gpu": recipe.batch.micro_sequences,
        "gradient_accumulation_steps": recipe.micro_batches(dims.data),
        "gradient_clipping": optimizer.gradient_clipping,
        "zero_optimization": {"stage": 1},
        "optimizer": {
            "type": "Adam",
            "params": {"lr": optimizer.learning_rate, "betas": list(optimizer.betas)},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": warmup, "total_num_steps": recipe.training.steps},
        },
        "pipeline": {"stages": 2},
    }
    assert build(tmp_path, content, *overrides) == expected
    del content["zero_optimization"]  # the settings that the recipe owns are left
    for path, value in leaves(content):
        if isinstance(value, bool | list):
            continue
        other = copy.deepcopy(content) | {"zero_optimization": {"stage": 1}}
        *blocks, key = path.split(".")
        table = other
        for block in blocks:
            table = table[block]
        table[key] = "other" if isinstance(value, str) else value + 1
        with pytest.raises(UserError, match=key):
            build(tmp_path, other, *overrides)
        table[key] = "auto"
        assert build(tmp_path, other, *overrides) == expected, path


def nested(path: str, value: Any) -> dict[str, Any]:
    block, _, key = path.rpartition(".")
    content: dict[str, Any] = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}}
    (content.setdefault(block, {}) if block else content)[key] = value
    if block == "fp16":
        content["fp16"].setdefault("enabled", False)
    return content


def test_keys_without_effect_are_noted_and_do_not_reach_deepspeed(tmp_path: Path) -> None:
    plain = read_deepspeed_json(str(write(tmp_path, nested("bf16.enabled", False))))
    cases = [(path, 5) for path in WITHOUT_EFFECT] + [(path, "auto") for path in NOT_SUPPORTED]
    off = [(path, value) for path, entry in NOT_SUPPORTED.items() for value in entry.off]
    off += [(path, {"enabled": False}) for path in [*NOT_SUPPORTED, *OUTPUTS]]
    off += [(path, False) for path in OUTPUTS]
    off += [("zero_optimization.offload_param", {"device": "none", "pin_memory": True})]
    for path, value in [*cases, *off]:
        recipe, dims = setting(write(tmp_path, nested(path, value)))
        config = read_deepspeed_json(recipe.deepspeed)
        config.pop("fp16", None)
        assert config == plain, path
        if (path, value) in off:
            assert deepspeed_notes(recipe, dims) == []
            continue
        (note,) = deepspeed_notes(recipe, dims)
        assert note.startswith(f"without effect here: {path} (")
        assert path not in WITHOUT_EFFECT or note.endswith(f" ({WITHOUT_EFFECT[path]})")


def decisions() -> list[str]:
    """Return the rows of the table of keys in docs/zero-and-precision.md."""
    groups: dict[str, list[str]] = {}
    for key, entry in SETTINGS.items():
        for path in [f"{key}.{name}" for name in entry] if isinstance(entry, dict) else [key]:
            only = " with ZeRO-3" if path.rpartition(".")[2] in ONLY_ZERO_3 else ""
            groups.setdefault(f"supported{only}", []).append(path)
    for path, reason in WITHOUT_EFFECT.items():
        groups.setdefault(f"no effect: {reason}", []).append(path)
    for path, unsupported in NOT_SUPPORTED.items():
        groups.setdefault(f"rejected: {unsupported.reason}", []).append(path)
    return [
        f"| {', '.join(f'`{path}`' for path in paths)} | {decision} |"
        for decision, paths in groups.items()
    ]


def test_the_documented_decisions_are_the_real_ones() -> None:
    page = (REPOSITORY / "docs" / "zero-and-precision.md").read_text()
    table = page.partition("| key of DeepSpeed | here |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == decisions()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_settings_of_zero_3_are_noted_with_other_stages(stage: int, tmp_path: Path) -> None:
    zero = {key: SETTINGS["zero_optimization"][key].example for key in ONLY_ZERO_3}
    content = {"zero_optimization": {"stage": stage} | zero}
    recipe, dims = setting(write(tmp_path, content), "layout.pipeline=1")
    kept = read_deepspeed_json(recipe.deepspeed)["zero_optimization"].keys() & zero.keys()
    names = ", ".join(f"zero_optimization.{key}" for key in ONLY_ZERO_3)
    note = f"without effect here: {names} (for ZeRO-3 only)"
    assert (deepspeed_notes(recipe, dims), kept) == (
        ([], zero.keys()) if stage == 3 else ([note], set())
    )


def test_a_run_prints_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, nested("steps_per_print", 10) | {"dump_state": True})
    found = mock.Mock(progress=Progress(), weights_only=False)
    announce(*setting(file), ["a", "a"], mock.Mock(path=tmp_path), found)
    notes = [
        f"  {file}: without effect here: {key} ({WITHOUT_EFFECT[key]})"
        for key in ("steps_per_print", "dump_state")
    ]
    assert [
        line for line in capsys.readouterr().out.splitlines() if "without effect" in line
    ] == notes


def test_auto_stands_for_the_default_of_every_setting(tmp_path: Path) -> None:
    for path, entry in [
        (f"{block}.{key}" if block else key, entry)
        for block, table in [("", SETTINGS), *SETTINGS.items()]
        if isinstance(table, dict)
        for key, entry in table.items()
    ]:
        if isinstance(entry, dict) or path.endswith((".enabled", "zero_optimization.stage")):
            continue
        recipe, dims = setting(write(tmp_path, nested(path, "auto")))
        assert path.rpartition(".")[2] not in str(read_deepspeed_json(recipe.deepspeed))
        (note,) = deepspeed_notes(recipe, dims)
        assert f'{path} ("auto" stands for the default)' in note


@pytest.mark.parametrize(
    ("bf16", "fp16", "expected"),
    [("auto", None, (True, None)), ("auto", "auto", (True, False)), ("auto", True, (False, True)),
     (None, "auto", (None, True)), (False, "auto", (False, True)), (True, "auto", (True, False))],
)  # fmt: skip
def test_auto_enables_one_precision(
    bf16: Any, fp16: Any, expected: tuple[Any, Any], tmp_path: Path
) -> None:
    written = {"bf16": bf16, "fp16": fp16}
    content = {name: {"enabled": value} for name, value in written.items() if value is not None}
    config = read_deepspeed_json(
        str(write(tmp_path, {"zero_optimization": {"stage": "auto"}, **content}))
    )
    assert tuple(config.get(name, {}).get("enabled") for name in written) == expected
    assert config["zero_optimization"] == {"stage": 1}


def test_the_former_name_of_bf16_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, {"zero_optimization": {"stage": 1}, "bfloat16": {"enabled": True}})
    assert read_deepspeed_json(str(file))["bf16"] == {"enabled": True}
    assert deepspeed_notes(*setting(file))[0] == "bfloat16 is read as bf16"


def test_sums_of_gradients_in_bf16_are_noted(tmp_path: Path) -> None:
    in_bf16 = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    (note,) = deepspeed_notes(*setting(write(tmp_path, in_bf16)))
    assert note.startswith(f"the gradients of 8 {IN_BF16}")
    correction = json.loads(f"{{{note.partition('write ')[2]}}}")
    whole_batch = ["layout.pipeline=1", "batch.micro_sequences=16"]
    two_data_ranks = ["layout.pipeline=1", "batch.micro_sequences=4", "layout.reduce_every=2"]
    zero2 = in_bf16 | {"zero_optimization": {"stage": 2}}
    (note,) = deepspeed_notes(*setting(write(tmp_path, zero2), *two_data_ranks))
    assert note.startswith(f"the gradients of 2 {IN_BF16}")
    for content, overrides in (
        (in_bf16 | correction, []),
        (in_bf16, whole_batch),
        (zero2, two_data_ranks[:2]),
        (in_bf16 | {"bf16": {"enabled": False}, "fp16": {"enabled": True}}, []),
    ):
        assert deepspeed_notes(*setting(write(tmp_path, content), *overrides)) == []


@pytest.mark.parametrize("zero", ["auto", 3, [], None, {}, {"stage": "x"}, {"stage": None}])
def test_any_value_of_the_zero_block_is_read_or_rejected(zero: Any, tmp_path: Path) -> None:
    name = write(tmp_path, {"zero_optimization": zero})
    recipe = load_recipe(DEFAULT_RECIPE, [f"deepspeed={name}"])
    dims = recipe.parallel_dims(LaunchEnvironment(size=2, local_size=2))
    if zero == "auto":
        assert build_deepspeed_config(recipe, dims)["zero_optimization"]["stage"] == 1
        return
    with pytest.raises(UserError, match="zero_optimization"):
        build_deepspeed_config(recipe, dims)


@pytest.mark.parametrize("key", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_commands_that_change_the_layout_require_auto(key: str, tmp_path: Path) -> None:
    recipe, _ = setting(write(tmp_path, {"zero_optimization": {"stage": 1}, key: 4}))
    with pytest.raises(UserError, match=f'{key} = 4 is fixed, but of a test; use "{key}": "auto"'):
        require_auto(recipe, "of a test")
    recipe, _ = setting(write(tmp_path, {"zero_optimization": {"stage": 1}, key: "auto"}))
    require_auto(recipe, "of a test")
