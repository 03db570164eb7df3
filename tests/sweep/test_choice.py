"""The trials of a sweep: the planner's best layouts, grids, keys, and rejected combinations."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from models.errors import UserError
from tests.conftest import changed, small_recipe
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe, parse_recipe
from threefold.plan.job import Machine, job_without_layout
from threefold.plan.search import INVALID_IN_RUN, search
from threefold.sweep import choice as choice_module
from threefold.sweep.choice import TrialRequest, choose, values_of_setting
from threefold.sweep.report import choice_lines
from threefold.sweep.trial import Trial

LLAMA = DEFAULT_RECIPE.parent / "llama" / "7b.toml"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path / "small.toml")


def write(path: Path, **changes: Any) -> Path:
    path.write_text(tomli_w.dumps(changed(small_recipe(Path("absent")), **changes)))
    return path


def test_the_planners_best_layouts_are_chosen() -> None:
    trials = choose(TrialRequest(recipes=[LLAMA], top=7, nodes=[1], gpus_per_node=[4])).trials
    recipe = load_recipe(LLAMA, ["cluster.nodes=1", "cluster.gpus_per_node=4"])
    job = job_without_layout(recipe, Machine.of_cluster(recipe.cluster))
    plans = search(job, 7).plans
    planned = {plan.job.layout: plan for plan in plans}  # near-ties come in another order
    assert {trial.job.layout for trial in trials} == planned.keys()
    for trial in trials:
        plan = planned[trial.job.layout]
        assert trial.planned_seconds == pytest.approx(plan.time.total)
        assert trial.planned_gib == pytest.approx(plan.memory.total / 2**30)
    assert all(trial.recipe.cluster == recipe.cluster for trial in trials)


def test_all_layouts_are_those_of_the_search(recipe: Path) -> None:
    trials = choose(TrialRequest(recipes=[recipe], layouts="all")).trials
    loaded = load_recipe(recipe, ["cluster={nodes=1, gpus_per_node=2, gpu='cpu'}"])
    plans = search(job_without_layout(loaded, Machine.of_cluster(loaded.cluster)), 10**9).plans
    assert len(trials) == len(plans) > 20
    assert {trial.recipe.layout.schedule for trial in trials} >= {"1f1b", "zb-h1"}
    assert {trial.job.layout.zero_stage for trial in trials} == {1, 2, 3}
    seconds = [trial.planned_seconds for trial in trials]
    assert seconds == sorted(seconds)


def test_settings_make_a_grid(recipe: Path) -> None:
    settings = ["batch.micro_sequences=1,2", "layout.recompute=none,full"]
    choice = choose(TrialRequest(recipes=[recipe], settings=settings))
    assert next(choice_lines(choice, 0)) == "4 trials, on 2 ranks"
    trials = choice.trials
    found = {(t.recipe.batch.micro_sequences, t.recipe.layout.recompute) for t in trials}
    assert found == {(1, "none"), (1, "full"), (2, "none"), (2, "full")}
    assert {(t.job.layout.tensor, t.job.layout.data) for t in trials} == {(1, 2)}  # its own


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("a.b=1,2", ["a.b=1", "a.b=2"]),
        ("a.b=[1,3]", ["a.b=[1,3]"]),
        ("a.b=one,two", ["a.b=one", "a.b=two"]),
        ("a.b='one,two'", ["a.b='one,two'"]),
        ("a.b=7", ["a.b=7"]),
    ],
)
def test_commas_separate_values_unless_they_are_toml(setting: str, values: list[str]) -> None:
    assert values_of_setting(setting) == values


def test_the_planner_keeps_the_given_keys(recipe: Path) -> None:
    request = TrialRequest(recipes=[recipe], settings=["layout.tensor=1,2"], layouts="all")
    every_key = {t.key for t in choose(TrialRequest(recipes=[recipe], layouts="all")).trials}
    assert {trial.key for trial in choose(request).trials} == every_key
    request = TrialRequest(recipes=[recipe], settings=["layout.tensor=2"], layouts="all")
    found = choose(request).trials
    assert 0 < len(found) < len(every_key)
    assert {trial.recipe.layout.tensor for trial in found} == {2}


def test_the_own_layout_is_tried_if_no_other_has_the_given_keys(recipe: Path) -> None:
    keys = ["layout.pipeline=1", "layout.tensor=1"]  # so that two data ranks divide the batch
    odd = [*keys, "batch.micro_sequences=3", "batch.global_sequences=3"]
    with pytest.raises(UserError, match=r"micro_sequences = 3 x 2 data ranks; use batch.glo.* = 6"):
        choose(TrialRequest(recipes=[recipe], settings=odd))
    unknown = ["layout.schedule=gpipe", "layout.pipeline=2"]  # the search does not try it
    (trial,) = choose(TrialRequest(recipes=[recipe], settings=unknown)).trials
    assert trial.recipe.layout.schedule == "gpipe"


def test_nodes_and_recipes_multiply(recipe: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.toml", model__hidden_size=128)
    request = TrialRequest(
        recipes=[recipe, other], nodes=[1, 2], gpus_per_node=[1, 2], layouts="own", gpu="H100"
    )
    choice = choose(request)
    sizes = "2 on 1 rank, 4 on 2 ranks, 2 on 4 ranks"
    assert next(choice_lines(choice, 3, rounds=2)).startswith(
        f"8 trials in 2 rounds: {sizes}; 3 of"
    )
    trials = choice.trials
    assert len(trials) == 8
    assert sorted(trial.workers.size for trial in trials) == [1, 1, 2, 2, 2, 2, 4, 4]
    assert {trial.cluster.gpu for trial in trials} == {"H100"}
    assert trials == sorted(trials, key=lambda trial: (trial.workers, trial.planned_seconds))


def test_a_key_depends_on_what_decides_the_speed() -> None:
    same = [
        {},
        {"name": "other"},
        {"seed": 2},
        {"data__tokenizer": "elsewhere"},
        {"tracking__tags": ["a"]},
        {"training__steps": 30},
        {"layout__layers_per_stage": [2]},  # what the balance chooses anyway
    ]
    different = [
        {"steps": 6},
        {"warm_up": 1},
        {"model__hidden_size": 128},
        {"batch__micro_sequences": 4},
        {"layout__recompute": "full"},
        {"deepspeed": "ds_configs/zero2_fp32.json"},
        {"cluster__gpus_per_node": 4},
        {"cluster__gpu": "H100"},
        {"training__compile": True},
        {"data__separate_documents": True},
        {"optimizer__kind": "muon"},
        {"optimizer__kind": "muon", "optimizer__qk_clip": 100.0},
        {"optimizer__average": {"decay": 0.9, "every": 2}},
        {"optimizer__average": {"decay": 0.9, "every": 4}},
    ]

    def keyed(changes: dict[str, Any]) -> str:
        cluster = {k: changes.pop(k) for k in list(changes) if k.startswith("cluster__")}
        table = {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"}
        table |= {name.removeprefix("cluster__"): value for name, value in cluster.items()}
        steps = {name: changes.pop(name) for name in ("steps", "warm_up") if name in changes}
        recipe = changed(small_recipe(Path("absent")), **changes) | {"cluster": table}
        return Trial("a", parse_recipe(recipe, "a"), **{"warm_up": 2, "steps": 5} | steps).key

    assert len({keyed(dict(changes)) for changes in same}) == 1
    assert len({keyed(dict(changes)) for changes in [{}, *different]}) == 1 + len(different)


def test_equal_trials_run_once(recipe: Path, tmp_path: Path) -> None:
    renamed = write(tmp_path / "renamed.toml", name="renamed")
    trials = choose(TrialRequest(recipes=[recipe, renamed], layouts="own")).trials
    assert len(trials) == 1


def test_impossible_combinations_are_rejected_with_reasons(recipe: Path) -> None:
    settings = ["layout.tensor=1,2,3", "batch.micro_sequences=2,3"]
    choice = choose(TrialRequest(recipes=[recipe], settings=settings))
    assert len(choice.trials) == 2 and len(choice.rejections) == 4
    reasons = {each.settings: each.reason for each in choice.rejections}
    assert (
        "not divisible by layout.tensor = 3" in reasons["layout.tensor=3, batch.micro_sequences=2"]
    )
    assert (
        "batch.global_sequences = 8 is not divisible"
        in reasons["layout.tensor=1, batch.micro_sequences=3"]
    )
    assert {each.outcome for each in choice.rejections} == {"rejected"}


def test_a_combination_that_does_not_fit_its_world_is_rejected(recipe: Path) -> None:
    settings = ["layout.pipeline=1,2", "deepspeed=ds_configs/zero1_fp32.json,"
                "ds_configs/zero3_fp32.json"]  # fmt: skip
    choice = choose(TrialRequest(recipes=[recipe], settings=settings, gpus_per_node=[1, 2]))
    reasons = [each.reason for each in choice.rejections]
    assert any("gather its weights again" in reason for reason in reasons)
    assert any("of 2 ranks, not 1; " in reason for reason in reasons)
    assert any("of 2 ranks, not 1; " in reason for reason in reasons)
    assert len(choice.trials) + len(reasons) == 8


def test_a_layout_that_the_plan_rules_out_is_not_tried() -> None:
    settings = ["batch.micro_sequences=1,4", "layout.tensor=1", "layout.pipeline=1"]
    choice = choose(TrialRequest(recipes=[LLAMA], settings=settings))
    assert [trial.recipe.batch.micro_sequences for trial in choice.trials] == [1]
    (rejection,) = choice.rejections
    assert rejection.outcome == "too_large" and "micro_sequences=4" in rejection.settings
    assert "GiB per GPU according to the plan; the GPU has 79.1 GiB" in rejection.reason


@pytest.mark.parametrize("searched", [True, False])
def test_layouts_that_a_run_rejects_do_not_end_the_list(
    searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four tensor ranks, tiles of FP8 would be divided."""
    if not searched:  # as if the search did not know of another rule
        monkeypatch.setattr(choice_module, "problem_in_run", lambda *_: lambda plan: "")
    request = TrialRequest(
        recipes=[REPOSITORY / "recipes/tiny-fp8.toml"], layouts="all", gpus_per_node=[4],
    )  # fmt: skip
    choice = choose(request)
    layouts = [trial.recipe.layout for trial in choice.trials]
    assert len(layouts) > 20 and {layout.tensor for layout in layouts} == {1, 2}
    assert all("128 x layout.tensor" in each.reason for each in choice.rejections)
    assert searched == (not choice.rejections) == (choice.ruled_out[INVALID_IN_RUN] > 0)


def test_a_search_counts_what_the_plan_rules_out() -> None:
    assert choose(TrialRequest(recipes=[LLAMA], top=1)).ruled_out["too large for a GPU"] > 10


def test_a_json_that_fixes_the_micro_batch_suits_the_own_layout_only(
    recipe: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    micro = load_recipe(recipe).batch.micro_sequences
    file.write_text(
        json.dumps(
            {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": micro},
        )
    )
    settings = [f'deepspeed="{file}"']
    assert choose(TrialRequest(recipes=[recipe], settings=settings, layouts="own")).trials
    with pytest.raises(UserError, match=r"is fixed, but the sweep tries other layouts; use "):
        choose(TrialRequest(recipes=[recipe], settings=settings))


def test_replaced_settings_of_a_json_are_named_once_per_zero_stage(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    own = {"zero_optimization": {"stage": 1}, "communication_data_type": "bf16"}
    file.write_text(json.dumps(own))
    recipe = write(tmp_path / "small.toml", deepspeed=str(file))
    choice = choose(TrialRequest(recipes=[recipe], layouts="all"))
    assert {trial.job.layout.zero_stage for trial in choice.trials} == {1, 2, 3}
    start = f"Each layout with ZeRO-{{}} replaces {file} with ds_configs/zero{{}}_fp32.json, which"
    assert [line.split(" has ")[0] for line in sorted(choice.replaced)] == [
        start.format(stage, stage) for stage in (2, 3)
    ]
    assert set(choice.replaced) < set(choice_lines(choice, 0))


def test_an_unknown_recipe_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such recipe"):
        choose(TrialRequest(recipes=[tmp_path / "absent.toml"]))


def test_a_sweep_without_trials_is_an_error(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"no combination can run.*unknown key batch\.micro"):
        choose(TrialRequest(recipes=[recipe], settings=["batch.micro=1,2"]))
