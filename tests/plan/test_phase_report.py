"""The plan of a run with phases: time and memory per phase, and the totals."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from models.errors import UserError
from threefold.commands import plan
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.launch.replanning import Replanner
from threefold.plan.job import Machine, job_of, recipe_on_cluster
from threefold.plan.memory.peak import stage_memory
from threefold.plan.report import predicted_metrics, predicted_metrics_of_run
from threefold.plan.search import INVALID_IN_RUN
from threefold.prove.shrink import shrink
from threefold.sweep.choice import TrialRequest, choose

LONG = {
    "name": "long",
    "start_step": 1001,
    "model": {"sequence_length": 131072, "rope_theta": 8e6},
    "batch": {"global_sequences": 64},
}


def write(folder: Path, *phases: dict[str, Any], **batch: Any) -> Path:
    """Write the 7B recipe with phases and keys of [batch], and return its file."""
    table = tomllib.loads((REPOSITORY / "recipes/llama/7b.toml").read_text())
    table["batch"] |= batch
    file = folder / "staged.toml"
    file.write_text(tomli_w.dumps(table | {"phase": list(phases)}))
    return file


def planned(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, *words: object, top: int = 0
) -> tuple[int, str]:
    """Run plan.py and return its exit code and its output."""
    monkeypatch.setattr("sys.argv", ["plan.py", *map(str, words), "--top", str(top)])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    return int(ended.value.code or 0), capsys.readouterr().out


def test_each_phase_is_planned(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long phase does not fit without context ranks, and fits with them."""
    file = write(tmp_path, LONG)
    code, output = planned(capsys, monkeypatch, file)
    assert code == 1
    assert 'phase "long" does not fit into the 79 GiB of a GPU; plan.py --phase long' in output
    code, output = planned(capsys, monkeypatch, file, "--json")
    table = json.loads(output)
    rows = table["phases"]["rows"]
    assert table["phases"]["do_not_fit"] == ["long"]
    assert [row["fits"] for row in rows] == [True, False]
    assert rows[0]["memory_bytes"] == max(each["total"] for each in table["own"]["memory_bytes"])
    assert rows[0]["step_seconds"] == table["own"]["step_seconds"]["total"]
    assert rows[1]["memory_bytes"] > rows[1]["gpu_memory_bytes"] > rows[0]["memory_bytes"]
    recipe = load_recipe(file)
    assert table["phases"]["total_tokens"] == PhasePlan(recipe).total_tokens
    expected = sum(row["step_seconds"] * steps for row, steps in zip(
        rows, (1000, recipe.training.steps - 1000), strict=True
    ))  # fmt: skip
    assert table["phases"]["total_seconds"] == pytest.approx(expected)


def test_a_phase_with_its_own_layout_fits(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {
        "tensor": 4,
        "context": 8,
        "context_attention": "ring",
        "recompute": "full",
        "pipeline": 1,
    }
    changes = {"layout": layout, "batch": {"global_sequences": 64, "micro_sequences": 1}}
    file = write(tmp_path, LONG | changes)
    code, output = planned(capsys, monkeypatch, file, "--phase", "long")
    assert code == 0, output
    assert 'Phase "long":' in output and "context 8" in output


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["--nodes", "2", "--gpu", "H200"], ["cluster.nodes=2", "cluster.gpu=H200"]),
        (["--nodes", "9", "--gpu", "GB200", "--gpus-per-node", "4", "--headroom", "0"],
         ["cluster.nodes=9", "cluster.gpus_per_node=4", "cluster.gpu=GB200"]),
    ],
)  # fmt: skip
def test_the_printed_options_lead_to_a_recipe_that_runs(
    words: list[str], changes: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On racks, too, tensor ranks are those of a node."""
    source = REPOSITORY / "recipes/llama/70b.toml"
    size = ["--set", "batch.global_sequences=36", "--set", "batch.micro_sequences=1"]
    monkeypatch.setattr("sys.argv", ["plan.py", str(source), *words, *size, "--top", "1"])
    with pytest.raises(SystemExit):
        plan.main()
    printed = capsys.readouterr().out.partition("To use layout 1: ")[2].split()[1::2]
    assert printed[: len(changes)] == changes
    recipe = load_recipe(source, [*size[1::2], *printed])
    assert recipe.cluster is not None
    per_node = recipe.cluster.gpus_per_node
    ranks = LaunchEnvironment(size=recipe.cluster.nodes * per_node, local_size=per_node)
    assert recipe.parallel_dims(ranks).world_size == ranks.size


@pytest.mark.parametrize(
    ("phase", "expected"), [("first", [1, 1, 1]), ("long", [2, 1, 1]), ("decay", [2, 2, 1])]
)
def test_a_written_recipe_keeps_all_phases(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, phase: str, expected: list[int]
) -> None:
    """Both the copy and the printed options give layout 1 to the planned phase."""
    source, copy = REPOSITORY / "recipes/tiny-phases.toml", tmp_path / "copy.toml"
    words = [source, "--phase", phase, "--write", copy, "--top", "1"]
    monkeypatch.setattr("sys.argv", ["plan.py", *map(str, words)])
    with pytest.raises(SystemExit):
        plan.main()
    printed = capsys.readouterr().out.partition("To use layout 1: ")[2].split()[1::2]
    cluster = ["cluster.nodes=1", "cluster.gpus_per_node=2", "cluster.gpu=cpu"]
    written = load_recipe(copy)
    assert written == load_recipe(source, [*printed, *cluster])
    pipelines = {each.phase: each.recipe.layout.pipeline for each in PhasePlan(written).phases}
    assert list(pipelines) == ["first", "long", "decay"]
    assert list(pipelines.values()) == expected
    assert "docs/phases.md explains the tables" in copy.read_text()


def test_a_ramp_is_planned_batch_by_batch(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = load_recipe(REPOSITORY / "recipes/llama/7b.toml").batch.global_sequences
    ramp = {"start_sequences": size // 4, "increment": size // 4, "samples": 100 * size}
    file = write(tmp_path, ramp=ramp)
    _, output = planned(capsys, monkeypatch, file, "--json")
    rows = json.loads(output)["phases"]["rows"]
    assert [row["global_sequences"] for row in rows] == [size // 4 * n for n in range(1, 5)]
    assert [row["step_seconds"] for row in rows] == sorted(row["step_seconds"] for row in rows)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny-phases", []),
        ("tiny", ["batch.ramp={start_sequences=8,increment=8,samples=3200}"]),
    ],
)
def test_all_layouts_are_timed_over_the_steps_of_the_phase(
    name: str, settings: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(REPOSITORY / f"recipes/{name}.toml"), *(f"--set={each}" for each in settings)]
    _, output = planned(capsys, monkeypatch, *words, "--json", top=1)
    table = json.loads(output)
    rows = [row for row in table["phases"]["rows"] if row["phase"] == "first"]
    own, (best,) = table["own"], table["best"]
    assert own["days"] * 86_400 == pytest.approx(sum(row["seconds"] for row in rows))
    assert own["gpu_hours"] == pytest.approx(2 * 24 * own["days"])
    faster = best["step_seconds"]["total"] / own["step_seconds"]["total"]
    assert best["days"] / own["days"] == pytest.approx(faster, rel=0.2)
    assert own["days"] < 200 * own["step_seconds"]["total"] / 86_400
    _, output = planned(capsys, monkeypatch, *words)
    hours = re.findall(r"^([\d.]+) hours, ", output, flags=re.MULTILINE)
    assert hours == [f"{24 * own['days']:.2g}"]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": {"ramp": {"start_sequences": 12, "increment": 4, "samples": 400}}},
        {"phase": [{"name": "later", "start_step": 101, "batch": {"global_sequences": 20}}]},
    ],
)
def test_chosen_layouts_are_valid_in_every_step(
    tmp_path: Path, changes: dict[str, Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 data ranks are the fastest, but a batch of 12 or 20 sequences allows only 4."""
    table = tomllib.loads((REPOSITORY / "recipes/tiny.toml").read_text())
    batch = {"global_sequences": 32, "micro_sequences": 1} | changes.get("batch", {})
    table |= changes | {"batch": batch, "cluster": {"nodes": 8, "gpus_per_node": 1, "gpu": "cpu"}}
    file, copy = tmp_path / "own.toml", tmp_path / "copy.toml"
    file.write_text(tomli_w.dumps(table))

    def check(overrides: Sequence[str]) -> None:
        recipe, cluster = recipe_on_cluster(file, overrides)
        segments = PhasePlan(recipe).segments
        assert len(segments) > 1
        for segment in segments:
            job = job_of(segment.recipe, Machine.of_cluster(cluster))
            assert job.layout.data == 4

    monkeypatch.setattr("sys.argv", ["plan.py", str(file), "--write", str(copy)])
    with pytest.raises(SystemExit):
        plan.main()
    output = capsys.readouterr().out
    left_out = int(re.findall(rf"{INVALID_IN_RUN} \((\d+)\)", output)[0])
    assert 0 < left_out < int(re.findall(r"Best of (\d+) layouts", output)[0])
    check(output.partition("To use layout 1: ")[2].split()[1::2])
    assert len(PhasePlan(load_recipe(copy)).segments) > 1

    choice = choose(TrialRequest(recipes=[file], top=3))
    assert [trial.job.layout.data for trial in choice.trials] == [4] * 3
    assert choice.ruled_out[INVALID_IN_RUN] > 0

    placement = Replanner(file, ["cluster.nodes=9"]).placement_on(8)
    assert placement is not None
    check(placement.overrides)


def test_a_later_phase_that_no_layout_suits_is_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tomllib.loads((REPOSITORY / "recipes/tiny.toml").read_text())
    table["phase"] = [{"name": "later", "start_step": 101, "layout": {"pipeline": 4}}]
    table["cluster"] = {"nodes": 2, "gpus_per_node": 1, "gpu": "cpu"}
    file = tmp_path / "own.toml"
    file.write_text(tomli_w.dumps(table))
    monkeypatch.setattr("sys.argv", ["plan.py", str(file), "--write", str(tmp_path / "copy.toml")])
    with pytest.raises(SystemExit):
        plan.main()
    output, errors = capsys.readouterr()
    reason = 'valid in the whole run: phase "later": layout.tensor = 1 x layout.pipeline = 4 needs'
    assert f"layouts is {reason}" in output and f"no layout is {reason}" in errors
    with pytest.raises(UserError, match='phase "later": layout'):
        choose(TrialRequest(recipes=[file]))


def test_an_unknown_phase_is_rejected(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, LONG)
    monkeypatch.setattr("sys.argv", ["plan.py", str(file), "--phase", "short"])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    assert ended.value.code == 2
    assert 'there is no phase "short"; use one of first, long' in capsys.readouterr().err


def test_the_proof_of_a_phase_has_its_switches(tmp_path: Path) -> None:
    file = write(tmp_path, LONG | {"data": {"separate_documents": True}})
    whole = PhasePlan(load_recipe(file))
    small = {
        name: shrink(whole.recipe_of(name), ranks=4, layers=2, steps=3, corpus=tmp_path)
        for name in whole.names
    }
    assert [each.data.separate_documents for each in small.values()] == [False, True]
    assert [each.model.rope_theta for each in small.values()][1] == 8e6
    assert all(not each.phase for each in small.values())


def test_launch_finds_a_layout_for_all_phases(tmp_path: Path) -> None:
    """On fewer nodes, a layout of a phase gives way to the one that launch.py chooses."""
    middle = {"name": "middle", "start_step": 11, "layout": {"pipeline": 4}}
    file = tmp_path / "staged.toml"
    table = tomllib.loads((REPOSITORY / "recipes/tiny.toml").read_text())
    table["layout"] = {"pipeline": 1}
    table["cluster"] = {"nodes": 4, "gpus_per_node": 1, "gpu": "cpu"}
    file.write_text(tomli_w.dumps(table | {"phase": [middle]}))
    replanner = Replanner(file)
    own = replanner.placement_on(4)
    assert own is not None and not own.chosen and own.pipelined
    fewer = replanner.placement_on(2)
    assert fewer is not None and fewer.chosen
    assert any(text.startswith("phase.middle.layout.pipeline=") for text in fewer.overrides)
    plan_of_fewer = PhasePlan(load_recipe(file, fewer.overrides))
    layouts = [segment.recipe.layout for segment in plan_of_fewer.segments]
    assert layouts[0] == layouts[1]


def test_the_predictions_for_a_run_follow_its_batch_and_its_phases(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, LONG, ramp={"start_sequences": 256, "increment": 256, "samples": 25600})
    )
    assert recipe.cluster is not None
    of_run = PhasePlan(recipe)
    predicted = predicted_metrics_of_run(of_run, Machine.of_cluster(recipe.cluster))
    assert of_run.at(1).recipe.batch.global_sequences == 256
    assert of_run.at(1000).recipe.batch.global_sequences == recipe.batch.global_sequences
    first, full, long = (predicted(step) for step in (1, 1000, 1001))
    assert predicted(2) == first
    assert 1.5 < full["step_seconds"] / first["step_seconds"] < 4.5
    assert long["mfu"] != full["mfu"]
    assert predicted_metrics_of_run(of_run, None)(1) == {}


def test_the_predicted_memory_is_in_gigabytes() -> None:
    recipe = load_recipe(REPOSITORY / "recipes/llama/7b.toml")
    assert recipe.cluster is not None
    machine = Machine.of_cluster(recipe.cluster)
    memory = stage_memory(job_of(recipe, machine))[0].counted
    assert predicted_metrics(recipe, machine)["memory_gb"] == pytest.approx(memory / 1e9)
