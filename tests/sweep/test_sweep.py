"""The sweep command with ranks that answer without measuring: faults, kills and two schedulers."""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import tomli_w

from tests.conftest import changed, small_recipe
from tests.sweep.sweeps import Sweep
from threefold.commands.sweep import number_of_rounds
from threefold.config.loading import REPOSITORY
from threefold.plan.calibration.fit import RankedTime
from threefold.plan.calibration.runs_table import read_table
from threefold.sweep.folder import SweepFolder
from threefold.sweep.report import agreement_line, leaders_text, round_lines
from threefold.sweep.scheduler import repeat, rounds_of_groups
from threefold.sweep.trial import Result, Trial

TOP = 6


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps(changed(small_recipe(Path("absent")), model__layers=8)))
    return path


def fake_sweep(folder: Path, recipe: Path) -> Sweep:
    folder.mkdir(exist_ok=True)
    return Sweep(folder, recipe, "--seconds-per-trial", "1.5")


@pytest.fixture
def sweep(tmp_path: Path, recipe: Path) -> Sweep:
    sweep = fake_sweep(tmp_path, recipe)
    sweep.options += ["--top", str(TOP)]
    return sweep


def test_a_sweep_measures_every_trial(sweep: Sweep) -> None:
    done = sweep.run_here()
    keys = {trial.key for trial in sweep.trials(top=TOP)}
    assert done.returncode == 0, done.stdout
    assert len(keys) == TOP and {row["trial"] for row in sweep.rows()} == keys
    assert sorted(sweep.finished()) == sorted(keys)
    assert f"{len(keys)} ok" in done.stdout and "of overhead per trial" in done.stdout
    assert "Fastest layouts of" in done.stdout and "00:00 left" in done.stdout
    assert not sweep.processes()
    again = sweep.run_here()
    assert again.returncode == 0 and len(sweep.finished()) == len(keys)
    assert f"{len(keys)} are already measured" in again.stdout


def test_faults_become_outcomes(sweep: Sweep) -> None:
    trials = sweep.trials(top=TOP)
    kinds = ["out_of_memory", "hang", "crash", "error"]
    faults = {trials[1 + n].key: kind for n, kind in enumerate(kinds)}
    sweep.inject(faults)
    done = sweep.run()
    assert done.returncode == 1, done.stdout
    rows = {faults.get(row["trial"], "ok"): row for row in sweep.rows()}
    assert {fault: row["outcome"] for fault, row in rows.items()} == {
        "ok": "ok", "out_of_memory": "out_of_memory", "hang": "hung", "crash": "crashed",
        "error": "crashed",
    }  # fmt: skip
    assert rows["out_of_memory"]["reason"] == "rank 1: MemoryError: as injected"
    assert rows["out_of_memory"]["oom"] == "1" and rows["ok"]["oom"] == "0"
    assert rows["hang"]["reason"] == "not finished within 2 seconds"
    assert rows["crash"]["reason"] == "rank 1 was killed by SIGKILL"
    assert rows["error"]["reason"] == "rank 1: RuntimeError: a defect, as injected"
    assert f"{len(trials) - 4} ok, 1 out_of_memory, 1 hung, 2 crashed" in done.stdout
    assert not sweep.processes() and not (sweep.folder / "workers").exists()
    sweep.inject({})
    finished = len(sweep.finished())
    assert sweep.run_here().returncode == 1 and len(sweep.finished()) == finished
    again = sweep.run_here("--retry")
    assert again.returncode == 0
    assert f"{len(trials) - 1} ok, 1 out_of_memory" in again.stdout
    assert len(sweep.finished()) == finished + 3


def test_out_of_memory_is_not_a_fault(sweep: Sweep) -> None:
    sweep.inject({sweep.trials(top=TOP)[-1].key: "out_of_memory"})
    done = sweep.run_here()
    assert done.returncode == 0 and "1 out_of_memory" in done.stdout


@pytest.mark.parametrize(
    ("kills", "options"),
    [(2, {"top": 9}), pytest.param(10, {"layouts": "all"}, marks=pytest.mark.long)],
)
def test_a_killed_sweep_continues(
    kills: int, options: dict[str, Any], tmp_path: Path, recipe: Path
) -> None:
    disturbed = fake_sweep(tmp_path / "disturbed", recipe)
    undisturbed = fake_sweep(tmp_path / "undisturbed", recipe)
    trials = disturbed.trials(**options)
    kinds = ["crash", "out_of_memory", "hang", "error"][:kills]
    faults = {trials[4 * n].key: kind for n, kind in enumerate(kinds)}
    for each in (disturbed, undisturbed):
        each.options += [f"--{name}={value}" for name, value in options.items()]
        each.inject(faults)
    randomly = random.Random(0)
    for number in range(kills):
        before, process = len(disturbed.finished()), disturbed.start()
        if number % 2 == 0:  # while ranks measure; otherwise possibly before they start
            while len(disturbed.finished()) == before and process.poll() is None:
                time.sleep(0.02)
        time.sleep(randomly.uniform(0.0, 0.5))
        disturbed.kill(process)
    for each in (disturbed, undisturbed):
        done = each.run_here()
        assert done.returncode == 1, done.stdout
    assert disturbed.untimed_rows() == undisturbed.untimed_rows()
    rows = disturbed.rows()
    assert [row["step_time_s"] for row in rows] == [
        row["step_time_s"] for row in undisturbed.rows()
    ]
    assert {row["trial"] for row in rows} == {trial.key for trial in trials}
    measured = {row["trial"] for row in rows if row["outcome"] == "ok"}
    # A rank may finish a trial in the instant in which its scheduler is killed.
    assert set(disturbed.finished()) == measured
    assert len(disturbed.finished()) <= len(measured) + kills
    assert not list(disturbed.folder.glob("workers")) + list(disturbed.folder.glob("claims"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_says_how_to_continue(sweep: Sweep, number: int) -> None:
    process = sweep.start()
    while len(sweep.finished()) < 2:
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "interrupted; rerun the same command to continue" in output
    assert "Traceback" not in output
    assert not sweep.processes() and not (sweep.folder / "workers").exists()


def test_two_schedulers_share_a_sweep(sweep: Sweep) -> None:
    keys = [trial.key for trial in sweep.trials(top=TOP)]
    both = [sweep.start(), sweep.start()]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted(sweep.finished()) == sorted(keys)  # each once
    assert len(sweep.rows()) == len(keys)
    for output in outputs:
        assert f"{len(keys)} ok" in output


def test_a_scheduler_takes_over_from_a_killed_one(sweep: Sweep) -> None:
    keys = {trial.key for trial in sweep.trials(top=TOP)}
    both = [sweep.start(), sweep.start()]
    while len(sweep.finished()) < 2:
        time.sleep(0.02)
    both[0].kill()
    output, _ = both[1].communicate(timeout=120)
    both[0].communicate()
    assert both[1].returncode == 0, output
    assert {row["trial"] for row in sweep.rows()} == keys
    assert len(sweep.finished()) <= len(keys) + 1
    assert sweep.end_of_processes()


@pytest.mark.long
def test_a_suspended_sweep_continues(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS_WITHOUT_HEARTBEAT", "5")
    process = sweep.start()
    while len(sweep.finished()) < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while any("--rank-of" in line for line in sweep.processes()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and f"{TOP} ok" in output


def test_a_full_disk_stops_the_sweep(sweep: Sweep, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        sweep.folder = disk / "sweep"
        keys = [trial.key for trial in sweep.trials(top=TOP)]
        sweep.inject({keys[3]: "full"})
        done = sweep.run()
        assert done.returncode == 1, done.stdout
        message = f"sweep.py: {sweep.folder} cannot be written (No space left on device); free disk"
        assert message in done.stdout and "Traceback" not in done.stdout
        assert not sweep.processes()
        assert len(list((sweep.folder / "results").iterdir())) == 3
        assert len(sweep.rows()) == 3
        (sweep.folder / "filling").unlink()
        sweep.inject({})
        again = sweep.run_here()
        assert again.returncode == 0, again.stdout
        assert {row["trial"] for row in sweep.rows()} == set(keys)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_fastest_of_several_rounds_counts(sweep: Sweep) -> None:
    trials = sweep.trials(top=TOP)
    sweep.inject({trials[0].key: "out_of_memory", trials[1].in_round(2).key: "crash"})
    assert sweep.run_here().returncode == 0
    done = sweep.run_here("--rounds", "3")
    assert done.returncode == 1, done.stdout
    assert sweep.run_here().returncode == 1  # the crash of an earlier round still counts
    assert f"{TOP} trials in 3 rounds, on " in done.stdout
    assert f"; {TOP} of {3 * TOP} measurements are already done" in done.stdout
    assert "round 2" in done.stdout and "00:00 left" in done.stdout
    assert f"{TOP - 2} ok, 1 out_of_memory, 1 crashed" in done.stdout
    assert len(sweep.finished()) == (TOP - 1) + (TOP - 2) + (TOP - 2)
    rows = {row["trial"]: row for row in sweep.rows()}
    assert len(rows) == TOP
    for trial in trials[2:]:
        files = [
            sweep.folder / "results" / f"{trial.in_round(number).key}.json" for number in (1, 2, 3)
        ]
        results = [json.loads(file.read_text())["result"] for file in files]
        fastest = min(median(result["step_seconds"]) for result in results)
        (row,) = (rows[file.stem] for file in files if file.stem in rows)
        assert float(row["step_time_s"]) == pytest.approx(fastest, rel=1e-4)
    assert rows[trials[1].in_round(2).key]["outcome"] == "crashed"
    assert "Between rounds, the step time of a trial varies by up to " in done.stdout
    both = sweep.rejection("--rounds", "2", "--halving")
    assert "--halving and --rounds exclude each other" in both


def timed_in_rounds(rounds: list[list[float]]) -> list[RankedTime]:
    """Return the times of trials whose seconds are given by round; the plan expects 1, 2, ..."""
    trials = list(zip(*rounds, strict=True))
    return [RankedTime(n, min(seconds), seconds) for n, seconds in enumerate(trials, start=1)]


def test_rounds_that_order_the_trials_differently_are_noise() -> None:
    group = timed_in_rounds([[1.0, 2.0, 3.0], [1.2, 4.0, 3.0], [1.1, 2.0, 3.0]])
    line = agreement_line([group])
    # Of three pairs of trials, the second round orders one differently from the other rounds.
    assert line is not None and f"Kendall's tau = {(1 / 3 + 1 + 1 / 3) / 3:.2f}." in line
    assert "varies by up to 20.0% (median)" in line  # 20 %, 100 % and 0 %
    longer = [*group[:2], replace(group[2], rounds=(*group[2].rounds, 9.0))]
    assert agreement_line([longer]) == line  # of a round of one trial, nothing can be said
    slow = timed_in_rounds([[10.0, 20.0, 30.0], [10.0, 20.0, 30.0]])
    both = agreement_line([group, slow])  # trials of different groups are not compared
    assert both is not None and f"tau = {(5 / 9 + 1) / 2:.2f}." in both
    assert agreement_line([timed_in_rounds([[1.0, 2.0, 3.0]])]) is None
    assert agreement_line([timed_in_rounds([[1.0, 2.0], [1.0, 2.0]])]) is None  # too few to rank
    assert agreement_line([]) is None


def test_leaders_are_measured_until_one_is_clearly_the_fastest(sweep: Sweep) -> None:
    """Without ranks: the rounds of the two fastest trials overlap until the fourth round."""
    trials = sweep.trials(top=TOP)
    places = {trial.identity: place for place, trial in enumerate(trials)}
    noise = {1: 0.0, 2: 0.06, 3: -0.05}  # by round, of the second trial; then it is slower
    measured: list[tuple[int, int]] = []

    class Recorded:
        """A scheduler that records results without measuring."""

        def __init__(self, folder: SweepFolder):
            self.folder = folder

        def measure(self, trials: list[Trial]) -> Iterator[tuple[Trial, Result]]:
            for trial in trials:
                place = places[trial.identity]
                seconds = 1.0 + 0.5 * place
                if place == 1:
                    seconds = 1.0 + noise.get(trial.round, 0.5)
                result = Result(outcome="ok", step_seconds=[seconds], memory_gib=1.0)
                measured.append((trial.round, place))
                self.folder.record(trial, result)
                yield trial, result

    folder = SweepFolder(sweep.folder, {"warm_up": 1, "steps": 5})
    scheduler: Any = Recorded(folder)
    try:
        list(repeat(scheduler, trials, lambda every, left: None, rounds=2, most=30))
        groups = rounds_of_groups(folder, trials)
        lines = list(round_lines(groups))
        folder.write_table()
    finally:
        folder.close()
    assert [number for number, place in measured if place > 1] == [
        *[1] * (TOP - 2), *[2] * (TOP - 2)
    ]  # fmt: skip
    last = max(number for number, _ in measured)
    assert 4 <= last < 30
    assert any("layout 1 is faster than all others" in line for line in lines), lines
    equal = timed_in_rounds([[1.0, 1.5] * 3 + [1.0], [1.5, 1.0] * 3 + [1.5]])
    assert leaders_text(equal) == (
        "layouts 1, 2, 3, 4, 5 and 2 slower layouts cannot be told apart in 2 rounds"
    )
    assert any("pairs of layouts differ by more than the noise" in line for line in lines), lines
    rounds = sorted(len(row["round_times_s"].split()) for row in sweep.rows())
    assert rounds == [*[2] * (TOP - 2), last, last]
    assert len(read_table(sweep.folder / "sweep.csv")[0].measured.round_seconds) == last


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", (3, 3)), ("2-8", (2, 8)), ("1-4", None), ("4-3", None), ("2-", None)],
)
def test_rounds_are_a_number_or_a_range(text: str, expected: tuple[int, int] | None) -> None:
    if expected:
        assert number_of_rounds(text) == expected
        return
    with pytest.raises(argparse.ArgumentTypeError, match="invalid"):
        number_of_rounds(text)


def test_halving_gives_the_leaders_more_steps(sweep: Sweep) -> None:
    done = sweep.run_here("--halving")
    assert done.returncode == 0, done.stdout
    rows = sweep.rows()
    count = len(sweep.trials(top=TOP))
    steps = [int(row["steps"]) for row in rows]
    expected, left, each = [], count, 2
    while left > 2:
        kept = (left + 1) // 2
        expected += [each] * (left - kept)
        left, each = kept, 2 * each
    expected += [each] * left
    assert sorted(steps) == sorted(expected)
    listed = re.findall(r"^ *\d+\. +([\d.]+) s in (\d+) steps ", done.stdout, re.MULTILINE)
    ranks = [(-int(steps), float(seconds)) for seconds, steps in listed]
    assert len(ranks) > 2 and ranks == sorted(ranks) and ranks[0][0] == -max(steps)
    leaders = sorted(rows, key=lambda row: -int(row["steps"]))[:2]
    times = sorted(float(row["step_time_s"]) for row in rows)
    assert sorted(float(row["step_time_s"]) for row in leaders) == times[:2]
    before = len(sweep.finished())
    again = sweep.run_here("--halving")
    assert again.returncode == 0 and len(sweep.finished()) == before


def test_other_trials_are_added(sweep: Sweep) -> None:
    sweep.options += ["--layouts", "own"]
    sweep.run_here("--set", "batch.micro_sequences=1,2")
    assert len(sweep.rows()) == 2
    done = sweep.run_here("--set", "batch.micro_sequences=2,4,3", "--json")
    assert len(sweep.rows()) == 4 and done.returncode == 0
    assert sorted(row["outcome"] for row in sweep.rows()) == ["ok", "ok", "ok", "rejected"]
    table = json.loads(done.stdout.splitlines()[-1])
    assert table["outcomes"]["rejected"] == 1 and len(table["trials"]) == 2
    assert "measured with steps = 5" in sweep.rejection("--steps", "9")


def test_invalid_options_are_errors(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "latin").write_bytes(b"n\xf6de1 slots=8\n")
    (tmp_path / "words").write_text("node1\n")
    for options, message in (
        (["--nodes", "2"], "cluster.nodes = 2: without --hostfile or a Slurm allocation all ranks"),
        (["--hostfile", str(tmp_path / "absent")], "absent: No such file or directory; use a file"),
        (["--hostfile", str(tmp_path / "latin")], "latin: it is not a text file; use a file with"),
        (["--hostfile", str(tmp_path / "words")], "words, line 1: 'node1' is not a host; for ex"),
        (["--launcher", "deepspeed"], "use --hostfile FILE"),
        (["--set", "layout.tensor=3"], "not divisible by layout.tensor = 3"),
        (["--steps", "1000001"], "1000001: expected 1 to 1000000, for example 4"),
        (["--nodes", "0"], "invalid number 0: expected 1 to 1000000"),
        (
            ["--gpu", "H100"],
            "H100 (--gpu or cluster.gpu) is a GPU, and the ranks run on CPUs; unset",
        ),
        (["--seconds-per-trial", "no"], "invalid duration no"),
    ):
        assert message in sweep.rejection(*options), options
    assert sweep.run("--nodes", "2").returncode == 2
    assert not sweep.folder.exists()


@pytest.mark.long
def test_trials_are_runs_of_a_group_in_wandb(sweep: Sweep) -> None:
    assert "use --set tracking.mode=auto" in sweep.rejection("--wandb")
    sweep.options[-1] = "2"
    for run, count in ((sweep.run, 2), (sweep.run_here, 0)):  # the second one has nothing to write
        done = run("--wandb", "--set", "tracking.mode=offline")
        assert done.returncode == 0, done.stdout
        assert f"wrote {count} runs of the W&B group sweep" in done.stdout
        assert ('W&B: offline, because tracking.mode = "offline"' in done.stdout) == (count > 0)
        runs = list((sweep.folder / "wandb").glob("offline-run-*"))
        names = sorted(run.name.partition("-sweep-")[2] for run in runs)
        assert names == sorted(row["trial"] for row in sweep.rows())


def test_the_command_does_not_import_torch() -> None:
    code = (
        "import sys, threefold.commands.sweep; print(sys.modules.keys() & {'torch', 'deepspeed'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr
