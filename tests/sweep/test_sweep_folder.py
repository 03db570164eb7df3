"""The sweep folder: settings, claims, results, and files that dead schedulers leave behind."""

import csv
import errno
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from tests.sweep.test_table import trial_of
from threefold.commands.sweep import decisive_round
from threefold.data.token_file import TokenFile
from threefold.sweep import report
from threefold.sweep.folder import SweepFolder, SweepStopped
from threefold.sweep.ranks.protocol import read_message, write_message
from threefold.sweep.trial import Rejection, Result, Trial
from threefold.tracking.wandb_connection import WandbStatus

SETTINGS = {"warm_up": 2, "steps": 5}
OK = Result(outcome="ok", step_seconds=[0.1], memory_gib=1.0)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def trials(count: int) -> list[Trial]:
    return [trial_of(batch__global_sequences=8 * n) for n in range(1, count + 1)]


def rows(folder: SweepFolder) -> list[dict[str, str]]:
    with (folder.path / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_results_are_kept(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "sweep", SETTINGS)
    one, two = trials(2)
    for trial in (one, two):
        folder.add(trial)
    assert folder.result(one.key) is None
    folder.record(one, OK)
    folder.close()
    again = SweepFolder(tmp_path / "sweep", SETTINGS)
    assert again.result(one.key) == OK and again.result(two.key) is None
    again.record(two, Result(outcome="hung", reason="not finished", log="several\nlines"))
    assert [row["outcome"] for row in rows(again)] == ["ok", "hung"]
    again.close()
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == [
        "results", "sweep.csv", "sweep.json", "trials",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", "[1]", "5", "null", '"a"', '{"number": 2}'])
def test_a_message_that_is_not_of_the_trial_is_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(text)
    assert read_message(tmp_path / "request.json", 1) is None
    write_message(tmp_path / "request.json", {"number": 1})
    assert read_message(tmp_path / "request.json", 1) == {"number": 1}


def test_only_recipes_of_a_failed_mode_are_published_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = ("offline", "auto", "auto", "online", "offline", "online")
    asked = []

    def publish_trial(*arguments: Any, tell: object) -> WandbStatus:
        wanted, _ = arguments[-1]
        asked.append(wanted)
        return WandbStatus("online" if wanted == "online" else "offline")

    monkeypatch.setattr(report, "publish_trial", publish_trial)
    folder = SweepFolder(tmp_path / "sweep", SETTINGS)
    results = [(trial_of(batch__global_sequences=8 * number, tracking__mode=mode), OK)
               for number, mode in enumerate(modes, 1)]  # fmt: skip
    count, status = report.publish(folder, results)
    assert asked == ["offline", "auto", "offline", "online", "offline", "online"]
    assert count == 6 and status == WandbStatus("online")
    folder.close()


def test_a_variable_that_turns_wandb_off_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(UserError) as raised:
        report.check_wandb([trial_of(tracking__mode="online")])
    assert str(raised.value) == (
        '--wandb: WANDB_MODE = disabled overrides tracking.mode = "online"; unset the variable, '
        "or omit --wandb"
    )


def test_failures_are_answered_again_only_by_new_results(tmp_path: Path) -> None:
    folder, other = SweepFolder(tmp_path, SETTINGS), SweepFolder(tmp_path, SETTINGS)
    outcomes = ("ok", "hung", "crashed", "rejected", "out_of_memory")
    every = dict(zip(outcomes, trials(len(outcomes)), strict=True))
    for outcome, trial in every.items():
        folder.add(trial)
        folder.record(trial, OK if outcome == "ok" else Result(outcome=outcome, reason=outcome))
    folder.retry_failures()
    repeated = [outcome for outcome, trial in every.items() if folder.result_of(trial) is None]
    assert repeated == ["hung", "crashed", "rejected"]
    assert all(other.result_of(trial) for trial in every.values()), "other commands still read them"
    other.record(every["hung"], OK)
    folder.record(every["crashed"], Result(outcome="crashed", reason="again"))
    repeated = [outcome for outcome, trial in every.items() if folder.result_of(trial) is None]
    assert repeated == ["rejected"]
    folder.close()
    other.close()


def test_rejections_are_recorded(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path, SETTINGS)
    (trial,) = trials(1)
    folder.add_rejection(Rejection("a.toml", "layout.tensor=3", "does not divide"))
    folder.add_rejection(Rejection("a.toml", "as it is", "needs 99 of 80 GiB", trial))
    folder.write_table()
    outcomes = {row["outcome"]: row for row in rows(folder)}
    assert outcomes["rejected"]["reason"] == "does not divide"
    assert outcomes["too_large"]["layers"] == str(trial.recipe.model.layers)
    assert {row["usable_for_time"] for row in outcomes.values()} == {"0"}
    folder.close()


def test_other_measuring_settings_are_rejected(tmp_path: Path) -> None:
    SweepFolder(tmp_path, SETTINGS).close()
    SweepFolder(tmp_path, dict(SETTINGS)).close()
    with pytest.raises(UserError, match=r"measured with steps = 5, .* with steps = 9"):
        SweepFolder(tmp_path, SETTINGS | {"steps": 9})
    with pytest.raises(UserError, match=r"with steps = 5, .* with halving = true;"):
        SweepFolder(tmp_path, {"warm_up": 2, "halving": True})


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="use another --sweep-dir"):
        SweepFolder(tmp_path / "file" / "sweep", SETTINGS)
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match="unmounted, which does not exist; mount the disk or"):
        SweepFolder(tmp_path / "link" / "sweep", SETTINGS)


def test_a_trial_is_claimed_once(tmp_path: Path) -> None:
    one, two = SweepFolder(tmp_path, SETTINGS), SweepFolder(tmp_path, SETTINGS)
    with one.claimed("a") as first:
        assert first
        with two.claimed("a") as second, two.claimed("b") as other:
            assert not second and other
    with two.claimed("a") as later:
        assert later
    one.close()
    two.close()
    assert not (tmp_path / "claims").exists()


def test_the_claim_of_a_dead_scheduler_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from threefold.sweep.folder import SweepFolder\n"
        f"folder = SweepFolder(Path(sys.argv[1]), {SETTINGS})\n"
        "with folder.claimed('a') as claimed:\n"
        "    print(claimed, flush=True); time.sleep(1000)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "True\n"
    folder = SweepFolder(tmp_path, SETTINGS)
    with folder.claimed("a") as claimed:
        assert not claimed
    assert len(list(folder.workers.iterdir())) == 2
    other.kill()
    other.wait()
    with folder.claimed("a") as claimed:
        assert claimed
    folder.close()
    assert not folder.workers.exists()  # nor are the files of the dead scheduler left


def test_only_abandoned_claims_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from threefold.sweep.folder import SweepFolder\n"
        f"folder = SweepFolder(Path(sys.argv[1]), {SETTINGS})\n"
        "with folder.claimed('recorded'): os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    (tmp_path / "claims" / "killed-before-its-lock").mkdir()
    one, two = SweepFolder(tmp_path, SETTINGS), SweepFolder(tmp_path, SETTINGS)
    assert (tmp_path / "claims" / "recorded").exists()
    with one.claimed("held"):
        two.close()
        assert [claim.name for claim in (tmp_path / "claims").iterdir()] == ["held"]
    one.close()
    assert not (tmp_path / "claims").exists()


def test_a_scheduler_on_another_machine_is_dead_without_heartbeat(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path, SETTINGS)
    other = folder.workers / "another_machine-1-1-00000000"
    other.mkdir()
    (other / "heartbeat").touch()
    SweepFolder(tmp_path, SETTINGS).close()
    assert other.exists()
    long_ago = time.time() - 200
    os.utime(other / "heartbeat", (long_ago, long_ago))
    folder.close()
    assert not other.exists()


def test_the_folder_of_a_scheduler_killed_while_it_starts_is_removed(tmp_path: Path) -> None:
    """The scheduler is killed between the creation of its folder and that of the first file."""
    code = (
        "import sys; from pathlib import Path\n"
        "from threefold.sweep.ranks.controller import WorkersFolder\n"
        "WorkersFolder(Path(sys.argv[1]) / 'workers').path.mkdir(parents=True)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    (left,) = (tmp_path / "workers").iterdir()
    one, two = SweepFolder(tmp_path, SETTINGS), SweepFolder(tmp_path, SETTINGS)
    assert not left.exists() and one.own.exists()
    two.close()
    assert one.own.exists()
    one.close()
    assert not (tmp_path / "workers").exists()


def test_the_table_has_each_trial_with_its_most_steps(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path, {"halving": True})
    one, two = trials(2)
    for trial, seconds in ((one, 0.1), (two, 0.2), (one.with_steps(10), 0.15)):
        folder.add(trial)
        folder.record(trial, Result(outcome="ok", step_seconds=[seconds]))
    found = [(row["steps"], row["step_time_s"]) for row in rows(folder)]
    assert found == [("10", "0.15"), ("5", "0.2")]
    folder.close()


@pytest.mark.parametrize("seconds", list(itertools.permutations((0.1, 0.2, 0.3))))
def test_the_table_has_the_fastest_round_or_a_fault(
    seconds: tuple[float, ...], tmp_path: Path
) -> None:
    folder = SweepFolder(tmp_path, SETTINGS)
    one, two, three = trials(3)
    crashed = Result(outcome="crashed", reason="a defect")
    failed = Result(outcome="out_of_memory", reason="too large")
    for number, time_of_round in enumerate(seconds, start=1):
        ok = Result(outcome="ok", step_seconds=[time_of_round])
        results = (ok, crashed if number == 2 else ok, failed if number == 1 else ok)
        for trial, result in zip((one, two, three), results, strict=True):
            each = trial.in_round(number)
            folder.add(each)
            folder.record(each, result)
    found = {row["gbs"]: (row["outcome"], row["step_time_s"]) for row in rows(folder)}
    assert found == {"8": ("ok", "0.1"), "16": ("crashed", ""),
                     "24": ("out_of_memory", "")}  # fmt: skip
    trial, result = decisive_round(folder, one)
    assert result.median_seconds == 0.1 and trial.round == 1 + seconds.index(0.1)
    assert decisive_round(folder, two)[1].outcome == "crashed"
    folder.close()


def test_two_schedulers_write_one_table(tmp_path: Path) -> None:
    one, two = SweepFolder(tmp_path, SETTINGS), SweepFolder(tmp_path, SETTINGS)
    for folder, trial in zip((one, two), trials(2), strict=True):
        folder.add(trial)
        folder.record(trial, OK)
    assert len(rows(one)) == 2
    one.close()
    two.close()


def test_a_corpus_is_written_once(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path, SETTINGS)
    corpus = folder.corpus(250, 2048)
    written = (corpus / "train.bin").stat().st_mtime_ns
    assert folder.corpus(250, 2048) == corpus != folder.corpus(250, 4096)
    assert (corpus / "train.bin").stat().st_mtime_ns == written
    assert TokenFile(corpus / "validation").count > 2048
    folder.close()


def test_a_write_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = SweepFolder(tmp_path, SETTINGS)
    (trial,) = trials(1)
    folder.add(trial)
    folder.record(trial, OK)
    files = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        for write in (folder.write_table, lambda: folder.record(trial, OK)):
            with pytest.raises(SweepStopped, match=r"free disk space and rerun the same command"):
                write()
    after = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    assert after == files
    folder.close()


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        folder = SweepFolder(disk / "sweep", SETTINGS)
        one, two = trials(2)
        folder.add(one)
        folder.record(one, OK)
        before = (folder.path / "sweep.csv").read_text()
        (disk / "filling").write_bytes(bytes(2**19))
        with (disk / "filling").open("ab", buffering=0) as stream, pytest.raises(OSError):
            while True:
                stream.write(bytes(4096))
        with pytest.raises(SweepStopped, match=r"sweep cannot be written \(No space left"):
            folder.record(two, OK)
        with pytest.raises(SweepStopped):
            folder.check_space()
        assert (folder.path / "sweep.csv").read_text() == before
        assert [file.name for file in (folder.path / "results").iterdir()] == [f"{one.key}.json"]
        (disk / "filling").unlink()
        folder.add(two)
        folder.record(two, OK)
        folder.check_space()
        assert len(rows(folder)) == 2
        folder.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
