"""A run that is short of memory says where, what was predicted, and which layout to use instead."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch

from tests.conftest import changed
from tests.ranks import start_ranks
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.phases import PhasePlan
from threefold.plan.job import Machine, job_of
from threefold.plan.memory.peak import fullest_stage
from threefold.plan.software import THREEFOLD
from threefold.plan.time.step import step_time
from threefold.pretrain import out_of_memory
from threefold.pretrain.out_of_memory import (
    REPORT,
    Allocated,
    allocated_text,
    alternative,
    alternative_text,
    is_out_of_memory,
)
from threefold.run_folder.folder import RunFolder
from threefold.runtime.exits import FINISHED, STOPPED
from threefold.supervision.hang_report import Breadcrumb

# Before the first step, each rank gets a limit of SPARE bytes for further allocations, in place of
# the size of a GPU's memory.
LIMITED = """
import re, resource, sys
from pathlib import Path
from recipes import pretrain
train = pretrain.train
def limited(run, step):
    used = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + {spare}, used + {spare}))
    return train(run, step)
pretrain.train = limited
sys.argv = {argv}
pretrain.main()
"""
SPARE = 220 * 2**20
SEVEN_B = REPOSITORY / "recipes/llama/7b.toml"


def run(recipe: Path, folder: Path, *overrides: str) -> tuple[list[int], list[str]]:
    """Run two ranks with little memory."""
    folder.mkdir(exist_ok=True)
    argv = ["pretrain.py", str(recipe), "--run-dir", str(folder / "run")]
    for override in overrides:
        argv += ["--set", override]
    script = LIMITED.format(spare=SPARE, argv=argv)
    return start_ranks(2, ["-c", script], folder=folder, seconds=240)


def test_the_message_names_a_layout_that_then_runs(small: dict, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    table = changed(
        small,
        model__layers=8,
        model__sequence_length=512,
        batch={"global_sequences": 16, "micro_sequences": 8},
        training={"steps": 1, "evaluate_every": 0},
        checkpoint={"every": 100},
    )
    recipe.write_text(tomli_w.dumps(table))
    codes, outputs = run(recipe, tmp_path / "first")
    assert STOPPED in codes, outputs
    said = "".join(outputs)
    size = r"[\d.]+ [GM]iB"
    found = re.search(
        rf"out of memory on rank (\d) \(.*\) \(pipeline 0, data \d, tensor 0\) in step 1, .*"
        rf"can't allocate memory.*\n.*allocated: weights {size}, optimizer {size}, peak "
        rf"{size}\n.*predicted: (.*); in total {size} of 8.0 GiB\n"
        rf".*to use less memory, rerun with ((?:--set \S+ ?)+)\(predicted",
        said,
    )
    assert found, said
    parts = dict(part.split(" ")[:2] for part in found[2].split(", "))
    program = {name: float(number) for name, number in parts.items() if name != "overhead"}
    assert max(program, key=lambda name: program[name]) == "activations"
    assert len(re.findall("to use less memory", said)) == 1  # one message for all ranks
    assert (tmp_path / "first" / "run" / REPORT).read_text().startswith("out of memory on rank")
    stops = [e for e in RunFolder(tmp_path / "first" / "run").read_events() if e["event"] == "stop"]
    assert stops[0]["reason"].startswith("out of memory on rank")
    assert stops[0]["out_of_memory"] is True  # launch.py may try another layout
    options = shlex.split(found[3])[1::2]
    codes, outputs = run(recipe, tmp_path / "second", *options)
    assert codes == [FINISHED, FINISHED], outputs


@pytest.mark.parametrize("file", ["llama/7b.toml", "llama/70b.toml", "mixtral/8x7b.toml"])
def test_the_alternative_needs_less_memory(file: str) -> None:
    recipe = load_recipe(REPOSITORY / "recipes" / file, [])
    assert recipe.cluster is not None
    machine = Machine.of_cluster(recipe.cluster)
    other = alternative(recipe, machine)
    assert other is not None
    own = fullest_stage(job_of(recipe, machine, THREEFOLD))
    smaller = load_recipe(REPOSITORY / "recipes" / file, other.options)
    memory = fullest_stage(job_of(smaller, machine, THREEFOLD))
    assert memory.total == pytest.approx(other.memory.total)
    assert memory.counted < 0.86 * own.counted
    assert 0.5 < other.slowdown < 3
    steps = [step_time(job_of(each, machine, THREEFOLD)).total for each in (smaller, recipe)]
    assert other.slowdown == pytest.approx(steps[0] / steps[1])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_alternative_of_a_phase_changes_that_phase(recompute: str) -> None:
    file = REPOSITORY / "recipes/tiny-phases.toml"
    given = ["cluster.nodes=1", "cluster.gpus_per_node=4", "cluster.gpu=cpu",
             f"layout.recompute={recompute}", "phase.long.batch.micro_sequences=8"]  # fmt: skip
    whole = load_recipe(file, given)
    assert whole.cluster is not None
    machine = Machine.of_cluster(whole.cluster)
    other = alternative(whole, machine, "long")
    assert other is not None
    assert all(option.startswith("phase.long.") for option in other.options)
    phases = PhasePlan(load_recipe(file, [*given, *other.options]))
    memory = fullest_stage(job_of(phases.recipe_of("long"), machine, THREEFOLD))
    assert memory.total == pytest.approx(other.memory.total)
    assert phases.recipe_of("first") == PhasePlan(whole).recipe_of("first")
    for segment in phases.segments:
        job_of(segment.recipe, machine, THREEFOLD)  # it is valid


def test_without_an_alternative_more_hardware_is_suggested() -> None:
    recipe = load_recipe(
        REPOSITORY / "recipes/tiny.toml",
        ["layout.pipeline=1", "layout.recompute=full", "batch.micro_sequences=1",
         "cluster.nodes=1", "cluster.gpus_per_node=1", "cluster.gpu=cpu"],
    )  # fmt: skip
    assert recipe.cluster is not None
    assert alternative(recipe, Machine.of_cluster(recipe.cluster)) is None
    assert "use more nodes" in alternative_text(None)


def test_the_alternative_names_replaced_settings() -> None:
    recipe = load_recipe(REPOSITORY / "recipes/llama/7b.toml", [])
    assert recipe.cluster is not None
    other = alternative(recipe, Machine.of_cluster(recipe.cluster))
    assert other is not None and not other.replaced
    text = alternative_text(replace(other, replaced=["communication_data_type"]))
    assert text == f"{alternative_text(other)}; its DeepSpeed JSON changes communication_data_type"


def test_only_errors_of_allocators_are_explained() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_other_errors_are_raised_unchanged(tmp_path: Path) -> None:
    experiment: Any = SimpleNamespace(
        recipe=SimpleNamespace(tracking=SimpleNamespace(memory_snapshot=False)),
        world=SimpleNamespace(rank=0),
    )
    handle: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path))
    with (
        pytest.raises(RuntimeError, match="Connection closed by peer"),
        out_of_memory.out_of_memory_explained(experiment, handle),
    ):
        raise RuntimeError("Connection closed by peer")
    assert not (tmp_path / REPORT).exists()


def test_parts_that_do_not_exist_yet_are_left_out() -> None:
    assert allocated_text(Allocated(None, None, 2**30, 2**31)) == (
        "peak 1.00 GiB, reserved by torch 2.00 GiB"
    )


def test_the_event_is_recorded_before_the_details_are_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launch.py may kill the rank during the search."""
    handle = SimpleNamespace(
        folder=RunFolder(tmp_path), supervisor=SimpleNamespace(names=["rank 0"], crumb=Breadcrumb())
    )

    def details(*_: object) -> list[str]:
        (stop,) = handle.folder.read_events()
        assert stop["out_of_memory"] is True
        assert "MemoryError" in (tmp_path / REPORT).read_text()
        return ["  the details"]

    monkeypatch.setattr(out_of_memory, "first_line", lambda *_: "out of memory on rank 0")
    monkeypatch.setattr(out_of_memory, "details", details)
    world = SimpleNamespace(rank=0)
    out_of_memory.report(
        SimpleNamespace(world=world),
        handle,
        None,
        error=MemoryError(),  # type: ignore[arg-type]
    )
    lines = (tmp_path / REPORT).read_text().splitlines()
    assert (lines[0], lines[-1]) == ("out of memory on rank 0", "  the details")
