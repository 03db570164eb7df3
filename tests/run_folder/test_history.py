"""The order of the events decides which rollbacks apply to a branch."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conftest import changed
from threefold.config.loading import parse_recipe
from threefold.prepare_data.sample_lookup import samples_of
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import replay

BATCH, LENGTH = 8, 32


def event(text: str) -> dict[str, Any]:
    """Parse an event such as "rollback 26 24 208": name, step, `to` and `samples`."""
    kind, *numbers = text.split()
    step, *rest = map(int, numbers or [0])
    found = {"event": kind, "step": step}
    if kind == "rollback":
        found |= {"to": rest[0], "samples": rest[1]}
    elif kind == "branch":
        found |= {"checkpoint": f"step-{step:07d}", "stamp": "x", "resume": "x"}
    if kind in ("branch", "resume") and rest:
        found["samples"] = rest[0]
    return found


def history(*texts: str):
    return replay(map(event, texts))


SAVED = ("start", "save 8", "save 16", "save 24")
BACK = (*SAVED, "rollback 26 24 208")


@pytest.mark.parametrize(
    ("texts", "step", "samples", "rollbacks"),
    [
        (BACK, 24, 208, 1),
        ((*BACK, "resume 24 208"), 24, 208, 1),  # killed and restarted
        ((*BACK, "rollback 25 24 216"), 24, 216, 2),
        ((*BACK, "save 32"), 24, 208, 0),  # trained past the rollback
        ((*BACK, "save 24"), 24, None, 0),  # saved again after the rollback
        ((*BACK, "save 32"), 32, None, 0),
        ((*BACK, "save 32", "rollback 34 32 280"), 32, 280, 1),
        ((*BACK, "save 32", "resume 24 208", "rollback 26 24 220"), 24, 220, 1),  # 32 is damaged
        ((*BACK, "rollback 25 16 216"), 16, 216, 2),  # 24 is damaged
        ((*BACK, "rollback 25 16 216"), 24, None, 1),
        # the event of a save was lost, because the run was killed before writing it
        (BACK, 32, None, 0),
        # the user has abandoned the branch
        ((*BACK, "branch 16", "resume 16 128"), 24, None, 0),
        ((*BACK, "branch 16", "resume 16 128", "save 24"), 24, None, 0),
        ((*BACK, "branch 24"), 24, None, 0),
        ((*BACK, "branch 24", "resume 24 192"), 24, None, 0),
        ((*BACK, "branch 24", "resume 24 192", "rollback 26 24 208"), 24, 208, 1),
        ((*BACK, "branch 32"), 24, 208, 0),  # from a checkpoint of another folder
        # an automatic resume from an earlier checkpoint, because the later ones are damaged
        ((*BACK, "resume 16 128"), 24, None, 1),
        ((*BACK, "start"), 24, None, 0),
        # a save of the same step in the next branch
        ((*BACK, "resume 16 128", "save 24"), 24, None, 0),
    ],
)
def test_rollbacks_apply_to_the_checkpoint_of_the_current_branch(
    texts: tuple[str, ...], step: int, samples: int | None, rollbacks: int
) -> None:
    found = history(*texts)
    assert found.rolled_back.get(step) == samples
    assert found.rollbacks(step) == rollbacks


def test_a_branch_is_pending_until_a_process_trains_from_it() -> None:
    assert history(*SAVED).branch is None
    assert history(*SAVED, "branch 16").branch.pending
    assert not history(*SAVED, "branch 16", "resume 16 128").branch.pending
    assert not history(*SAVED, "branch 16", "resume 16 128", "save 24").branch.pending
    assert history(*SAVED, "branch 16", "resume 16", "branch 8").branch.step == 8


@pytest.mark.parametrize(
    ("later", "reached"),
    [
        ([], True),
        ([{"event": "resume", "step": 20}], True),
        ([{"event": "resume", "step": 30}, {"event": "save", "step": 40}], True),
        ([{"event": "resume", "step": 10}, {"event": "resume", "step": 30}], False),
        ([{"event": "rollback", "step": 50, "to": 20, "samples": 9}], True),
        ([{"event": "rollback", "step": 50, "to": 10, "samples": 9}], False),
        ([{"event": "branch", "step": 20, "checkpoint": "step-0000020", "stamp": "s"}], False),
        ([{"event": "start", "step": 0}], False),
    ],
)
def test_a_state_belongs_to_the_branch_until_its_steps_are_abandoned(
    later: list[dict[str, Any]], reached: bool
) -> None:
    before = [{"event": "start", "step": 0}, {"event": "resume", "step": 10}]
    turns = len(replay(before).turns)
    assert replay([*before, *later]).reaches(20, turns=turns) == reached


def test_events_without_a_required_field_are_skipped() -> None:
    broken = [{"event": "rollback", "step": 26, "to": 24}, {"event": "branch"}, {"event": "save"}]
    found = replay([*map(event, BACK), *broken, {"event": "rollback", "to": "x", "samples": 1}])
    assert found.rolled_back == {24: 208}


@pytest.fixture
def recipe(small):
    return parse_recipe(changed(small, training__steps=40), "test")


def write(folder: RunFolder, texts: tuple[str, ...], ends: dict[int, int]) -> None:
    """Write events, and metrics given as step -> number of samples read so far."""
    for text in texts:
        found = event(text)
        folder.event(found.pop("event"), found.pop("step"), **found)
    for step, samples in ends.items():
        folder.metric({"step": step, "tokens": samples * LENGTH})


def test_the_ledger_follows_the_branch(recipe, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    ends = {step: BATCH * step for step in range(1, 27)}
    write(folder, (*BACK, "branch 16 128", "resume 16 128", "save 24"), ends)
    assert samples_of(recipe, folder, 25) == range(192, 200)  # and not from sample 208 on
    assert samples_of(recipe, folder, 17) == range(128, 136)
    assert samples_of(recipe, folder, 30) == range(232, 240)


def test_the_ledger_follows_many_rollbacks_and_resumes(recipe, tmp_path: Path) -> None:
    folder, random = RunFolder(tmp_path), Random(0)
    expected: dict[int, range] = {}
    step = sample = 0
    while step < 30:
        for _ in range(random.randint(1, 4)):
            step, sample = step + 1, sample + BATCH
            expected[step] = range(sample - BATCH, sample)
            if random.random() < 0.5:  # other lines are lost
                write(folder, (), {step: sample})
        if random.random() < 0.4:  # skips the samples of the discarded steps
            to = max(0, step - random.randint(0, 5))
            folder.event("rollback", step, to=to, samples=sample)
            step = to
        elif random.random() < 0.6:  # reads them again
            step = max(0, step - random.randint(0, 3))
            sample = expected[step].stop if step else 0
            folder.event("resume", step, samples=sample)
    for at in range(1, step + 1):
        assert samples_of(recipe, folder, at) == expected[at]


def test_the_ledger_follows_a_branch_to_a_checkpoint_of_another_run(recipe, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(
        folder, BACK, {step: BATCH * step for step in range(1, 33)}
    )  # the metrics of the other run
    facts = {"checkpoint": "/elsewhere/step-0000032", "stamp": "x", "samples": 256}
    folder.event("branch", 32, resume="/elsewhere/step-0000032", **facts)
    folder.event("resume", 32, samples=256)
    assert samples_of(recipe, folder, 25) == range(192, 200)  # and not from sample 208 on
    assert samples_of(recipe, folder, 33) == range(256, 264)


def test_the_ledger_follows_a_branch_to_an_abandoned_checkpoint(recipe, tmp_path: Path) -> None:
    """The second branch rolls back at step 18, and the first one at step 26."""
    folder = RunFolder(tmp_path)
    ends = {step: BATCH * step for step in range(1, 25)}
    ends |= {step: BATCH * (step + 2) for step in range(25, 33)}
    second = ("branch 16 128", "resume 16 128", "rollback 18 16 144")
    write(folder, (*BACK, "save 32", *second), ends)
    facts = {"checkpoint": "abandoned-x-step-0000032", "stamp": "y", "samples": 272}
    folder.event("branch", 32, resume="abandoned-x-step-0000032", **facts)
    folder.event("resume", 32, samples=272)
    assert samples_of(recipe, folder, 17) == range(128, 136)  # and not from sample 144 on
    assert samples_of(recipe, folder, 25) == range(208, 216)
    assert samples_of(recipe, folder, 33) == range(272, 280)
    folder.event("branch", 16, checkpoint="abandoned-y-step-0000016", stamp="z", samples=144)
    assert folder.history().resumed == {16: 144}


def test_the_ledger_knows_the_samples_after_a_rollback(recipe, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    ends = {
        step: BATCH * step for step in range(1, 27)
    }  # the lines of 25 and 26 are not dropped yet
    write(folder, BACK, ends)
    assert samples_of(recipe, folder, 25) == range(208, 216)
    assert samples_of(recipe, folder, 26) == range(216, 224)
    folder.metric({"step": 25, "tokens": 216 * LENGTH})
    assert samples_of(recipe, folder, 25) == range(208, 216)


def test_the_ledger_reads_torn_files(recipe, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(folder, BACK, {step: BATCH * step for step in range(1, 25)})
    for file in (folder.events, folder.metrics):
        with file.open("ab") as stream:
            stream.write(b'{"event": "rollback", "st' + b"\0" * 40)
    assert samples_of(recipe, folder, 25) == range(208, 216)
    assert json.loads(folder.events.read_text().splitlines()[0])["event"] == "start"


@pytest.mark.parametrize("tokens", ["NaN", "Infinity", "-Infinity", "1e300", str(10**300), '"9"'])
def test_the_ledger_ignores_damaged_counts(recipe, tokens: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(folder, BACK, {step: BATCH * step for step in range(1, 25)})
    with folder.metrics.open("a") as stream:
        stream.write(f'{{"step": 25, "tokens": {tokens}}}\n{{"step": -5, "tokens": 6}}\n')
    assert samples_of(recipe, folder, 25) == range(208, 216)


@pytest.mark.parametrize(
    ("texts", "saved"),
    [
        (SAVED, {8, 16, 24}),
        ((*SAVED, "start"), set()),
        ((*SAVED, "rollback 26 16 128"), {8, 16}),  # 24 was damaged and is repeated
        ((*SAVED, "resume 16 128"), {8, 16}),
        ((*SAVED, "branch 8"), {8}),
        ((*SAVED, "branch 8", "resume 8 64", "save 12"), {8, 12}),
    ],
)
def test_only_checkpoints_of_the_branch_count_as_saved(
    texts: tuple[str, ...], saved: set[int]
) -> None:
    assert history(*texts).saved == saved


@pytest.mark.parametrize("checkpoint", ["", "/elsewhere/checkpoints/step-0000016"])
def test_a_branch_from_elsewhere_has_saved_nothing(checkpoint: str) -> None:
    branch = {"event": "branch", "step": 16, "checkpoint": checkpoint, "stamp": "x"}
    assert replay([*map(event, SAVED), branch]).saved == set()
