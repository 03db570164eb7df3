"""`plan.py --failures-per-day`: costs of a job, text and JSON."""

import json
import re
import sys

import pytest

from models.cost import parameter_count
from threefold.commands import plan
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.plan.goodput import duration, fault_costs, snapshot_costs
from threefold.plan.job import Machine, job_of
from threefold.plan.software import THREEFOLD

SEVEN_B = REPOSITORY / "recipes/llama/7b.toml"


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Run plan.py on the 7B recipe; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["plan.py", str(SEVEN_B), "--top", "0", *options])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_costs_follow_from_the_size_of_the_model() -> None:
    recipe = load_recipe(SEVEN_B, [])
    assert recipe.cluster is not None
    job = job_of(recipe, Machine.of_cluster(recipe.cluster), THREEFOLD)
    checkpoint = 12 * parameter_count(recipe.model)
    costs = fault_costs(job, detection_seconds=10)
    assert costs.write_seconds == pytest.approx(checkpoint / (1e9 * recipe.cluster.nodes))
    assert costs.restart_seconds == pytest.approx(10 + 60 + costs.write_seconds)
    faster = fault_costs(
        job, detection_seconds=10, storage_bytes_per_second=100e9, restart_seconds=33
    )
    assert faster.write_seconds == pytest.approx(checkpoint / 100e9)
    assert faster.restart_seconds == 33
    # The copy to the host is the same; the share of the write is not.
    assert costs.pause_seconds - faster.pause_seconds == pytest.approx(
        0.05 * (costs.write_seconds - faster.write_seconds)
    )


def test_the_plan_names_the_best_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert run(monkeypatch, "--failures-per-day", "8") == 0
    said = capsys.readouterr().out
    assert "With 8 failures per day (a save pauses the steps for" in said
    own, best = re.findall(
        r"checkpoint\.every = (\d+) \(.*?\): ([\d.]+)% of the time in kept", said
    )
    assert int(own[0]) == load_recipe(SEVEN_B, []).checkpoint.every
    assert float(best[1]) > float(own[1])
    assert said.rstrip().endswith("; the best interval")


def test_the_best_interval_is_not_named_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run(monkeypatch, "--failures-per-day", "8", "--json")
    found = json.loads(capsys.readouterr().out)["goodput"]
    every = found["best"]["every"]
    assert found["best"]["kept"] > found["own"]["kept"]
    own = ("--set", f"checkpoint.every={every}")
    snapshots = json.loads(said_with(monkeypatch, capsys, *own, "--json"))["goodput"]["snapshots"]
    assert "own" not in snapshots
    own += ("--set", f"checkpoint.snapshot_every={snapshots['best']['every']}")
    said = said_with(monkeypatch, capsys, *own)
    marked = re.findall(r"checkpoint\.(\w+) = .*; the best interval\n", said)
    assert marked == ["every", "snapshot_every"] and said.count("checkpoint.") == 2


def said_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *options: str) -> str:
    """Return the output of plan.py with eight failures per day."""
    run(monkeypatch, "--failures-per-day", "8", *options)
    return capsys.readouterr().out


def test_the_plan_names_the_costs_of_snapshots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said = said_with(monkeypatch, capsys, "--set", "checkpoint.snapshot_every=100")
    found = re.findall(
        r"checkpoint\.snapshot_every = (\d+) \(.*?\): ([\d.]+)% of the time in kept", said
    )
    assert found[0][0] == "100" and float(found[1][1]) > float(found[0][1])
    options = ("--set", "checkpoint.snapshot_every=100", "--json")
    snapshots = json.loads(said_with(monkeypatch, capsys, *options))["goodput"]["snapshots"]
    for case in ("own", "best"):
        shares = {key: value for key, value in snapshots[case].items() if key != "every"}
        assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(("nodes", "copies"), [(4, 2), (1, 1)])
def test_costs_of_snapshots_follow_from_the_size_of_the_model(nodes: int, copies: int) -> None:
    recipe = load_recipe(SEVEN_B, ["cluster.nodes=" + str(nodes), "layout.pipeline=1"])
    assert recipe.cluster is not None
    job = job_of(recipe, Machine.of_cluster(recipe.cluster), THREEFOLD)
    state = 12 * parameter_count(recipe.model)
    costs = snapshot_costs(job, detection_seconds=10)
    per_node = state / nodes  # one stage, whose ranks divide the state evenly
    assert costs.sent_bytes == pytest.approx(copies * per_node)
    assert costs.memory_bytes == pytest.approx((2 * copies + 1) * per_node)
    assert costs.times.write_seconds == pytest.approx(
        per_node / 8 / 1.4e9 + copies * per_node / 5e9
    )
    assert costs.times.restart_seconds > 70 + per_node / 8 / 1.4e9
    assert snapshot_costs(job, detection_seconds=10, restart_seconds=5).times.restart_seconds == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--storage", "5"], "--storage requires --failures-per-day"),
        (["--restart", "5"], "--restart requires --failures-per-day"),
        (["--failures-per-day", "0"], "expected more than 0 and up to 100,000 failures per day"),
        (["--failures-per-day", "many"], "invalid number many"),
    ],
)
def test_wrong_options_are_rejected(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert run(monkeypatch, *options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2134, "0.21 s"), (35.2, "35 s"), (720, "12 min"), (12_600, "3.5 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
