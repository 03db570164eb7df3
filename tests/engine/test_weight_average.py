"""The average of the weights: alike in every layout, saved, resumed, evaluated and exported."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.errors import UserError
from models.hugging_face.weights import counterparts
from tests.conftest import changed, quick_and_long, selected, small_recipe
from tests.ranks import fp16_on_cpu, join_world, run_ranks
from threefold.checkpoint.format import Manifest
from threefold.checkpoint.resume import ResumePoint
from threefold.checkpoint.state import AVERAGE, CheckpointReader
from threefold.config.loading import load_recipe, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.config.sections import REPOSITORY
from threefold.convert.files import open_checkpoint
from threefold.convert.to_hugging_face import export, model_card
from threefold.engine.engine import Engine
from threefold.plan.goodput import own_bytes
from threefold.plan.job import Machine, job_of
from threefold.plan.memory.peak import memory_of_stage
from threefold.plan.time.update import AVERAGING_BYTES, OPTIMIZER_BYTES, optimizer_time
from threefold.pretrain.evaluation import Evaluator
from threefold.prove.training import (
    everything,
    gather,
    held_state,
    load_newest,
    many_cases,
    save,
    start,
    train_step,
)
from threefold.run_folder.folder import RunFolder
from threefold.trace.trace import trace
from threefold.tracking.tracker import evaluated

STEPS, SAVED_STEP = 4, 3
AVERAGING = {"decay": 0.7, "start_step": 1, "every": 2}
EXPERTS = {"count": 4, "per_token": 2, "ffn_hidden_size": 24}
LAYOUTS: dict[str, dict[str, Any]] = {  # on two ranks
    "zero-1": {},
    "zero-2, stages": {"layout__pipeline": 2, "deepspeed": "ds_configs/zero2_fp32.json"},
    "zero-3": {"deepspeed": "ds_configs/zero3_fp32.json"},
    "tensor, muon": {"layout__tensor": 2, "optimizer__kind": "muon"},
    "experts": {"layout__expert": 2, "model__experts": EXPERTS},
    "bf16": {"deepspeed": "ds_configs/zero1_bf16.json"},
    "zero-3, bf16": {"deepspeed": "ds_configs/zero3_bf16.json"},
}

QUICK = ("zero-1", "zero-2, stages", "zero-3", "bf16")
DENSE = QUICK[:3]


def recipe_of(corpus: Path, **changes: Any) -> Recipe:
    settings = {"batch__micro_sequences": 4, "optimizer__average": AVERAGING}
    return parse_recipe(changed(small_recipe(corpus), **settings | changes), "test")


def plain_recipe(corpus: Path) -> Recipe:
    return parse_recipe(changed(small_recipe(corpus), batch__micro_sequences=4), "test")


def master_weights(engine: Engine) -> dict[str, Tensor]:
    return gather(engine, held_state(engine, "fp32"))


def averages(engine: Engine) -> dict[str, Tensor]:
    return gather(engine, held_state(engine, AVERAGE))


def worker(corpus: str, folder: str, layouts: list[str]) -> dict[str, dict[str, Any]]:
    """Train, save and resume in each layout; return what the tests compare, on rank 0."""
    found, world = {}, LaunchEnvironment.from_environment(os.environ)
    with many_cases() as begin:
        for layout in layouts:
            begin()
            recipe = recipe_of(Path(corpus), **LAYOUTS[layout])
            run = RunFolder(Path(folder) / layout.replace(", ", "-"))
            engine, data = start(recipe, world)
            weights, kept = [master_weights(engine)], [averages(engine)]
            for step in range(1, STEPS + 1):
                train_step(engine, data, step)
                weights.append(master_weights(engine))
                kept.append(averages(engine))
                if step == SAVED_STEP:
                    save(engine, data, run, step=step)
                    before = everything(engine)
                    validation = Evaluator(engine, data).validate()
                    after = everything(engine)
            ended = everything(engine)
            load_newest(engine, data, run)  # as a rollback does
            rolled_back = everything(engine)
            engine, data = start(recipe, world)
            load_newest(engine, data, run)
            for step in range(SAVED_STEP + 1, STEPS + 1):
                train_step(engine, data, step)
            found[layout] = {
                "weights": weights, "averages": kept, "validation": validation,
                "before": before, "after": after, "rolled back": rolled_back, "ended": ended,
                "resumed": everything(engine),
            }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(corpus: Path, folder: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    tests = (
        test_the_average_is_that_of_the_formula,
        test_a_resumed_run_has_the_same_average_bit_for_bit,
        test_an_evaluation_of_the_average_changes_no_bit,
    )
    chosen = (layout for test in tests for layout in selected(request, test, "layout"))
    layouts = list(dict.fromkeys([*chosen, "zero-1"]))
    return run_ranks(2, worker, str(corpus), str(folder), layouts)[0]


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert got.keys() == expected.keys()
    return all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", quick_and_long(QUICK, LAYOUTS))
def test_the_average_is_that_of_the_formula(layout: str, runs: dict[str, dict[str, Any]]) -> None:
    """The averagings are at steps 2 and 4; at step 1 the average is still the weights."""
    run = runs[layout]
    for name, first in run["weights"][0].items():
        expected = first.double()
        for step in range(STEPS + 1):
            now = run["weights"][step][name].double()
            if step <= AVERAGING["start_step"]:
                expected = now
            elif step % AVERAGING["every"] == 0:
                expected = AVERAGING["decay"] * expected + (1 - AVERAGING["decay"]) * now
            found = run["averages"][step][name].double()
            assert float((found - expected).norm()) <= 2e-7 * float(expected.norm()), (name, step)
    assert not equal(run["averages"][STEPS], run["weights"][STEPS])


@pytest.mark.parametrize("layout", quick_and_long(QUICK, LAYOUTS))
def test_a_resumed_run_has_the_same_average_bit_for_bit(
    layout: str, runs: dict[str, dict[str, Any]]
) -> None:
    run = runs[layout]
    assert any(name.startswith(AVERAGE) for name in run["ended"])
    assert equal(run["rolled back"], run["before"])
    assert equal(run["resumed"], run["ended"])


@pytest.mark.parametrize("layout", quick_and_long(QUICK, LAYOUTS))
def test_an_evaluation_of_the_average_changes_no_bit(
    layout: str, runs: dict[str, dict[str, Any]]
) -> None:
    assert equal(runs[layout]["after"], runs[layout]["before"])


def test_the_validation_loss_is_that_of_the_average(
    corpus: Path, runs: dict[str, dict[str, Any]]
) -> None:
    weights = runs["zero-1"]["averages"][SAVED_STEP]
    [expected] = run_ranks(1, loss_worker, str(corpus), weights)
    for layout in set(DENSE) & runs.keys():
        found = runs[layout]["validation"]
        plain, averaged = (found[f"{prefix}validation_loss"] for prefix in ("", "averaged_"))
        assert averaged == pytest.approx(expected, rel=2e-6), layout
        assert abs(plain - averaged) > 1e-3 * plain
        assert f"averaged {averaged:.4f}" in evaluated(found)


def loss_worker(corpus: str, weights: dict[str, Tensor]) -> float:
    """Return the validation loss of a model with these weights."""
    engine, data = start(plain_recipe(Path(corpus)), join_world())
    for name, parameter in engine.parameters():
        parameter.data[: len(weights[name])].copy_(weights[name])  # without padding
    return Evaluator(engine, data).validate()["validation_loss"]


def test_an_export_has_the_average_of_all_shards(
    folder: Path, runs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    source = open_checkpoint(folder / "zero-1")
    for averaged, kind in ((False, "weights"), (True, "averages")):
        output = tmp_path / kind
        output.mkdir()
        export(source, output, dtype="fp32", tokenizer=None, averaged=averaged)
        exported = load_file(output / "model.safetensors")
        model = recipe_model(source)
        for name, counterpart in counterparts(model).items():
            for theirs, tensor in counterpart.split(runs["zero-1"][kind][SAVED_STEP][name]):
                assert torch.equal(exported[theirs], tensor), (kind, name)
        card = (output / "README.md").read_text()
        assert ("exponential moving average, decay 0.7" in card) == averaged
    assert "validation loss" not in model_card(source, "fp32", averaged=True, has_tokenizer=False)


def recipe_model(source: CheckpointReader) -> Any:
    return parse_recipe(source.manifest.recipe, "test").model


def test_checkpoints_without_an_average_are_named(
    corpus: Path, folder: Path, runs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    with_average = recipe_of(corpus)
    without = plain_recipe(corpus)
    source = open_checkpoint(folder / "zero-1")
    older = replace(source, manifest=without_average(source.manifest))
    assert ResumePoint(source).change_of_average(with_average) == ""
    assert ResumePoint(older).change_of_average(without) == ""
    assert ResumePoint(older, weights_only=True).change_of_average(with_average) == ""
    starts = ResumePoint(older).change_of_average(with_average)
    assert "has no average; the average starts from the weights" in starts
    assert "is dropped" in ResumePoint(source).change_of_average(without)
    with pytest.raises(UserError, match=r"--averaged: .* has no average of the weights"):
        export(older, tmp_path, dtype="fp32", tokenizer=None, averaged=True)
    begun, dropped = run_ranks(1, older_worker, str(corpus), str(source.path))[0]
    assert begun
    assert not any(name.startswith(AVERAGE) for name in dropped)


def without_average(manifest: Manifest) -> Manifest:
    prefix = f"{AVERAGE}/"
    tensors = {k: v for k, v in manifest.tensors.items() if not k.startswith(prefix)}
    return replace(manifest, tensors=tensors)


def older_worker(corpus: str, checkpoint: str) -> tuple[bool, list[str]]:
    """Load a checkpoint as if it had no average; then load it without `optimizer.average`."""
    world = join_world()
    source = CheckpointReader.verified(Path(checkpoint))
    older = replace(source, manifest=without_average(source.manifest))
    results = []
    with many_cases() as begin:
        begin()
        engine, data = start(recipe_of(Path(corpus)), world)
        engine.load(older)
        same = equal(averages(engine), master_weights(engine))
        # Initial weights do not bring the average of their run along.
        engine.load(source, weights_only=True)
        same &= equal(averages(engine), master_weights(engine))
        assert engine.average is not None and set(engine.average.updates) == {0}
        results.append(same)
        begin()
        engine, data = start(plain_recipe(Path(corpus)), world)
        engine.load(source)
        assert (
            engine.average is None
            and "averaged_validation_loss" not in Evaluator(engine, data).validate()
        )
    return results[0], list(everything(engine))


def test_a_skipped_step_does_not_change_the_average(corpus: Path, tmp_path: Path) -> None:
    """The first loss scale overflows, and halves until the gradients fit into fp16."""
    config = json.loads((REPOSITORY / "ds_configs/zero1_fp16.json").read_text())
    config["fp16"] = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
    paths = []
    for stage in (1, 3):
        config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": 100_000}
        paths.append(tmp_path / f"fp16_{stage}.json")
        paths[-1].write_text(json.dumps(config))
    for steps in run_ranks(2, skipping_worker, str(corpus), list(map(str, paths)))[0]:
        assert [skipped for skipped, *_ in steps] == [True, False, False, True]
        for skipped, same, updates, taken in steps:
            assert skipped == same
            assert updates == {taken}


Step = tuple[bool, bool, set[int], int]  # skipped, same average, its updates, steps taken


def skipping_worker(corpus: str, configs: list[str]) -> list[list[Step]]:
    world, found = LaunchEnvironment.from_environment(os.environ), []
    with fp16_on_cpu(), many_cases() as begin:
        for config in configs:
            begin()
            changes = {"optimizer__average": {"decay": 0.9}, "deepspeed": config}
            engine, data = start(recipe_of(Path(corpus), **changes), world)
            steps, kept, done = [], averages(engine), 0
            assert engine.average is not None
            for step in range(1, 5):
                if step == 4:  # the average and the weights differ by now
                    engine.wrapped.optimizer.loss_scaler.cur_scale = 2.0**30
                skips = engine.wrapped.skipped_steps
                train_step(engine, data, step)
                before, kept = kept, averages(engine)
                skipped = engine.wrapped.skipped_steps > skips
                done += not skipped
                steps.append((skipped, equal(kept, before), set(engine.average.updates), done))
            found.append(steps)
    return found


def test_the_planner_counts_the_average() -> None:
    path = REPOSITORY / "recipes/llama/8b.toml"
    overrides = ["cluster.nodes=1", "model.layers=2", "model.hidden_size=1024", "model.heads=8",
                 "model.kv_heads=8", "layout.tensor=2", "layout.pipeline=2",
                 "batch.global_sequences=8"]  # fmt: skip
    average = ["optimizer.average.decay=0.999", "optimizer.average.every=4"]
    recipes = [load_recipe(path, [*overrides, *more]) for more in ([], average)]
    plain, averaged = (job_of(recipe, Machine.of_cluster(recipe.cluster)) for recipe in recipes)
    traced = [trace(recipe, 8, 8, 0).between_steps for recipe in recipes]
    added = memory_of_stage(averaged, 0).optimizer - memory_of_stage(plain, 0).optimizer
    assert added == pytest.approx(traced[1].optimizer - traced[0].optimizer, rel=0.01)
    assert added == pytest.approx(memory_of_stage(plain, 0).optimizer / 3, rel=0.01)
    assert traced[1].buffers == traced[0].buffers
    assert own_bytes(averaged) == pytest.approx(own_bytes(plain) * 4 / 3)
    step_seconds = plain.software.step_seconds
    update = optimizer_time(plain) - step_seconds
    longer = (optimizer_time(averaged) - step_seconds) / update
    assert longer == pytest.approx(1 + AVERAGING_BYTES / 4 / OPTIMIZER_BYTES)
    assert averaged.with_layout(averaged.layout) == averaged
