"""`plan.py largest`: the family of a recipe on one machine, and its largest model in time."""

import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.errors import UserError
from tests.commands import run_here
from tests.conftest import shipped_recipes
from threefold.commands import plan
from threefold.config.layout import Cluster
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.plan import catalogue as catalogue_module
from threefold.plan.calibration.fit import Calibration
from threefold.plan.catalogue import Member, family_lines, family_table, largest, members
from threefold.plan.job import Machine, job_without_layout
from threefold.plan.search import search
from threefold.plan.software import load_software

LLAMA = REPOSITORY / "recipes" / "llama"
LLAMA_7B = LLAMA / "7b.toml"
CLUSTER = Cluster(nodes=1, gpus_per_node=4, gpu="H100")  # few layouts, which are found soon
SIZE = ("--nodes", "1", "--gpus-per-node", "4", "--gpu", "H100")


def plan_family(
    *overrides: str,
    headroom: float = 0.08,
    factors: Calibration | None = None,
    cluster: Cluster = CLUSTER,
) -> list[Member]:
    return members(
        LLAMA_7B, overrides, cluster=cluster, software=load_software("threefold"),
        calibrate=(factors or Calibration()).of, headroom=headroom,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def shipped_families() -> Iterator[None]:
    """Leave a user's own recipes out of the families."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue_module, "recipes_in_repository", shipped_recipes)
        yield


@pytest.fixture(scope="module")
def family() -> list[Member]:
    return plan_family()


@pytest.fixture
def few_relatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one smaller and two larger relatives."""
    kept = [LLAMA / f"{size}.toml" for size in ("1b", "13b", "405b")]
    monkeypatch.setattr(catalogue_module, "recipes_in_repository", lambda: kept)


@pytest.mark.long
def test_members_have_the_plans_of_a_search_on_the_given_machine(family: list[Member]) -> None:
    assert [member.recipe.name for member in family] == [
        f"llama-{size}b" for size in (1, 3, 7, 8, 13, 70, 405)
    ]
    for member in family[2:4]:
        recipe = load_recipe(member.path)
        best = search(job_without_layout(recipe, Machine.of_cluster(CLUSTER)), 1).plans[0]
        assert member.plan and member.plan.job.layout == best.job.layout
        assert member.days == pytest.approx(recipe.training.steps * best.time.total / 86_400)
    assert family[-1].plan is None and family[-1].days is None  # 405B on 4 GPUs


def test_the_largest_model_in_time_is_named(family: list[Member]) -> None:
    days = {member.recipe.name: member.days or float("inf") for member in family}
    assert days["llama-7b"] < days["llama-13b"] < days["llama-8b"]  # 2 T, 2 T and 15 T tokens
    found = largest(family, days["llama-13b"])
    assert found and found.recipe.name == "llama-13b"
    smaller = largest(family, days["llama-13b"] - 0.01)
    assert smaller and smaller.recipe.name == "llama-7b"
    assert largest(family, 0.01) is None
    lines = list(family_lines(family, CLUSTER, days["llama-13b"]))
    assert lines[-1].startswith(
        f"The largest model that trains its tokens in {days['llama-13b']:g}"
    )
    assert "is llama-13b." in lines[-1]
    assert lines[-1].endswith(
        "plan.py recipes/llama/13b.toml --nodes 1 --gpus-per-node 4 --gpu H100"
    )
    assert any("llama-405b" in line and "no layout fits" in line for line in lines)
    assert list(family_lines(family, CLUSTER, 0.01))[-1].startswith("No model of the family fits")
    assert family_table(family, CLUSTER, 0.01)["largest"] is None


@pytest.mark.long
@pytest.mark.usefixtures("few_relatives")
def test_overrides_headroom_and_calibration_apply_to_all_models() -> None:
    short = plan_family("training.steps=1000")
    assert len(short) == 4 and sum(member.plan is not None for member in short) == 3
    assert {member.recipe.training.steps for member in short} == {1000}
    slow = plan_family(factors=Calibration(compute=2.0))
    roomy = plan_family(headroom=0.5)
    for before, after, small in zip(short, slow, roomy, strict=True):
        if before.plan and after.plan:
            assert after.plan.time.total > 1.3 * before.plan.time.total
        if small.plan:
            assert small.plan.memory.total <= 0.5 * small.plan.job.machine.gpu.memory_gib * 2**30


@pytest.mark.usefixtures("few_relatives")
def test_a_relative_that_is_not_valid_with_the_overrides_has_the_reason() -> None:
    members_by_name = {each.recipe.name: each for each in plan_family("model.heads=32")}
    rejected = members_by_name["llama-13b"]
    assert rejected.plan is None and "kv_heads = 40 does not divide heads = 32" in rejected.problem
    assert members_by_name["llama-7b"].plan and not members_by_name["llama-7b"].problem
    with pytest.raises(UserError, match=r"7b\.toml --set model\.heads=33: "):
        plan_family("model.heads=33")


def test_settings_may_contradict_the_layouts_of_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named command predicts the same layout, too."""
    kept = [LLAMA / f"{size}.toml" for size in ("1b", "13b")]  # 13B: sequence parallelism of 2
    monkeypatch.setattr(catalogue_module, "recipes_in_repository", lambda: kept)
    options = ["--days", "2000", "--set", "model.sequence_length=1001"]
    done = run_plan("largest", str(LLAMA_7B), *SIZE, *options)
    *_, last = done.stdout.splitlines()
    assert "is llama-13b. To plan it: " in last and "no layout fits" not in done.stdout
    command = shlex.split(last.partition("To plan it: ")[2])
    best = json.loads(run_plan(*command[2:], "--json").stdout)["best"][0]
    family = json.loads(run_plan("largest", str(LLAMA_7B), *SIZE, *options, "--json").stdout)
    assert family["models"][-1]["best"]["layout"] == best["layout"]


@pytest.mark.usefixtures("few_relatives")
def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    largest_member = plan_family(headroom=0.9)[-1]
    assert largest_member.plan is None
    assert re.fullmatch(
        r"no layout fits; the closest needs [\d.]+ GiB more per GPU", largest_member.problem
    )


def test_a_model_without_any_layout_has_the_reason() -> None:
    cluster = Cluster(nodes=113, gpus_per_node=1, gpu="H100")
    reasons = [member.problem for member in plan_family(cluster=cluster) if member.plan is None]
    rejected = (
        "no layout fits; rejected: data ranks that do not divide the global batch, context sizes "
        "with fewer than 2,048 tokens per rank, pipelines with more stages than blocks, tensor "
        "groups across nodes"
    )
    assert len(reasons) == 7 and reasons.count(rejected) == 6  # 405B has layouts, all too large


def run_plan(*options: str) -> subprocess.CompletedProcess[str]:
    with contextlib.chdir(REPOSITORY):
        return run_here(plan.main, *options)


def test_a_users_broken_recipe_is_left_out_of_its_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "llama" / "mine.toml"
    broken.parent.mkdir()
    text = LLAMA_7B.read_text().replace("layers = 32", "layers = 32\nlayer = 5\nhead = 3")
    broken.write_text(text)
    monkeypatch.setattr(
        catalogue_module, "recipes_in_repository", lambda: [broken, LLAMA / "1b.toml"]
    )
    done = run_plan("largest", str(LLAMA_7B), *SIZE, "--days", "2000", "--json")
    assert done.returncode == 0
    names = [model["name"] for model in json.loads(done.stdout)["models"]]
    assert names == ["llama-1b", "llama-7b"]
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"plan.py: left out {broken}: 2 problems: unknown key model.layer = 5; ")
    assert "; unknown key model.head = 3; " in line


@pytest.mark.usefixtures("few_relatives")
def test_the_command_lists_a_family() -> None:
    done = run_plan("largest", str(LLAMA_7B), *SIZE, "--days", "2000", "--json")
    table = json.loads(done.stdout)
    assert done.returncode == 0 and table["largest"] and table["days"] == 2000
    assert table["models"][1]["recipe"] == "recipes/llama/7b.toml"
    assert table["models"][-1] | {"best": None, "days": None} == table["models"][-1]


@pytest.mark.usefixtures("few_relatives")
def test_the_named_command_predicts_the_same_days() -> None:
    options = ["--software=megatron-core", "--headroom=0.3", "--set=training.steps=20000"]
    done = run_plan("largest", str(LLAMA_7B), *SIZE, "--days", "60", *options)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    name = re.search(r"days is (\S+)\. To plan it: python (.*)", last)
    assert name and all(each in name[2] for each in options)
    (days,) = re.findall(rf"^{name[1]} .*?([\d.]+) +[\d.]+%", done.stdout, flags=re.MULTILINE)
    planned = json.loads(run_plan(*shlex.split(name[2])[1:], "--json").stdout)
    assert planned["best"][0]["days"] == pytest.approx(float(days), abs=0.06)


@pytest.mark.usefixtures("few_relatives")
def test_no_model_in_time_is_exit_code_1() -> None:
    done = run_plan("largest", str(LLAMA_7B), *SIZE, "--days", "0.01")
    assert done.returncode == 1 and "No model of the family fits" in done.stdout


def test_days_below_one_are_hours() -> None:
    done = run_plan(
        "largest", "--nodes", "1", "--gpus-per-node", "2", "--gpu", "cpu", "--days", "1"
    )
    assert re.search(r"^tiny .* [\d.]+ h ", done.stdout, flags=re.MULTILINE), done.stdout


def test_the_time_of_a_model_is_that_of_all_its_phases() -> None:
    phases = "recipes/tiny-phases.toml"
    table = json.loads(run_plan("largest", phases, "--days", "1", "--json").stdout)
    (model,) = table["models"]
    layout = model["best"]["edits"]
    settings = [f"--set={key}={json.dumps(layout[key])}" for key in layout if "." in key]
    planned = json.loads(run_plan(phases, "--top", "0", "--json", *settings).stdout)["phases"]
    assert model["tokens"] == planned["total_tokens"] == 4_096_000
    assert model["days"] * 86_400 == pytest.approx(planned["total_seconds"])
    assert model["best"]["days"] == model["days"]
    too_short = str(model["days"] / 2)  # more than the time of 200 steps of the first phase
    done = run_plan("largest", phases, "--days", too_short)
    assert done.returncode == 1 and " 4.1 M " in done.stdout


def test_the_layout_of_a_model_is_valid_for_every_batch_of_a_ramp() -> None:
    """Two data ranks with micro-batches of 16 are the fastest, but do not divide a batch of 8."""
    ramp = "--set=batch.ramp={start_sequences=8,increment=8,samples=800}"
    family = json.loads(run_plan("largest", "--days", "1", ramp, "--json").stdout)
    plan = json.loads(run_plan("--top", "1", ramp, "--json").stdout)["best"][0]
    tiny = next(model for model in family["models"] if model["name"] == "tiny")
    assert tiny["best"] == plan and plan["layout"]["micro_sequences"] == 4
    later = '--set=phase=[{name="later",start_step=101,layout={pipeline=4}}]'
    done = run_plan("largest", "--days", "1", later)
    assert 'no layout is valid in the whole run: phase "later": layout.tensor = 1' in done.stdout


def test_the_layout_of_a_model_fits_in_the_memory_of_every_phase() -> None:
    def run_with(micro: int) -> subprocess.CompletedProcess[str]:
        batch = f"batch={{global_sequences=64,micro_sequences={micro}}}"
        phase = f"name='long',start_step=101,model={{sequence_length=65536}},{batch}"
        return run_plan("largest", "--days", "9999", f"--set=phase=[{{{phase}}}]")

    assert run_with(1).returncode == 0
    done = run_with(32)
    assert done.returncode == 1 and 'phase "long" needs too much memory' in done.stdout


@pytest.mark.parametrize("days", ["0", "soon", "nan"])
def test_a_duration_that_is_not_one_is_rejected(days: str) -> None:
    done = run_plan("largest", "--days", days)
    assert done.returncode == 2
    assert f"invalid duration {days}: expected more than 0 and below 1,000,000 days" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "name =mine"], "by the recipe's name; leave out --set name =mine"),
        (["--set", "layout .tensor=8"], "largest chooses the layout; leave out --set layout .te"),
        (["--top", "3"], "unrecognized arguments: --top"),
        (["--set", "layout.tensor=8"], "largest chooses the layout; leave out --set layout.tens"),
    ],
)
def test_settings_that_the_search_chooses_are_rejected(options: list[str], message: str) -> None:
    done = run_plan("largest", "--days", "30", *options)
    assert done.returncode == 2 and message in done.stderr
