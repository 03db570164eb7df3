"""The point from which a run resumes, with settings that have changed since."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from models.errors import UserError
from tests.checkpoint.test_compatibility import HERE, manifest_of, recipe_of
from threefold.checkpoint import resume
from threefold.checkpoint.compatibility import check_same_run
from threefold.checkpoint.resume import ResumePoint, find_damage
from threefold.checkpoint.state import CheckpointReader
from threefold.config.parallel_dims import ParallelDims
from threefold.config.recipe import Recipe
from threefold.data.corpus import fingerprint
from threefold.data.dataset import TrainingData
from threefold.run_folder.folder import layout_of
from threefold.run_folder.history import Progress


def test_permitted_changes_are_accepted_and_reported(corpus: Path) -> None:
    saved = recipe_of(corpus)
    now = recipe_of(
        corpus,
        layout__tensor=2,
        batch__global_sequences=16,
        optimizer__learning_rate=1e-3,
        training__steps=99,
        deepspeed="ds_configs/zero1_bf16.json",
    )
    check_same_run(HERE, manifest_of(saved), now, fingerprint(now))
    told = ResumePoint(CheckpointReader(HERE, manifest_of(saved))).changes(now)
    assert told == {
        "batch.global_sequences": [8, 16],
        "deepspeed": ["ds_configs/zero1_fp32.json", "ds_configs/zero1_bf16.json"],
        "layout.tensor": [1, 2],
        "optimizer.learning_rate": [0.004, 0.001],
        "training.steps": [20, 99],
    }


def resumed(saved: Recipe, step: int, **removed: str) -> ResumePoint:
    """Return the resume point after a step of a run; `section="key"` was unknown to its version."""
    table = saved.model_dump(mode="json")
    for section, key in removed.items():
        del table[section][key]
    manifest = replace(manifest_of(saved), step=step, recipe=table)
    return ResumePoint(CheckpointReader(HERE, manifest))


def test_keys_that_an_older_version_did_not_have_are_not_changes(corpus: Path) -> None:
    recipe = recipe_of(corpus)
    assert resumed(recipe, 20, checkpoint="room_seconds").changes(recipe) == {}
    other = recipe_of(corpus, checkpoint__room_seconds=7)
    changes = resumed(recipe, 20, checkpoint="room_seconds").changes(other)
    assert changes == {"checkpoint.room_seconds": [1800, 7]}


COUNTS = {"optimizer__schedule": {"warmup_steps": 2, "counts": "sequences", "decay": "constant"}}
BY_TOKENS = {
    "phase": [{"name": "late", "start_tokens": 4096, "optimizer": {"learning_rate": 1e-3}}]
}
ENDED = {"batch__ramp": {"start_sequences": 4, "increment": 4, "samples": 64}}
RAMP = {"batch__ramp": {"start_sequences": 4, "increment": 4, "samples": 120}}


@pytest.mark.parametrize(
    ("settings", "counting"),
    [
        ({}, ""),
        (COUNTS, r'optimizer.schedule.counts = "sequences"'),
        (BY_TOKENS, "phase.late.start_tokens = 4096"),
        (ENDED, ""),
        (RAMP, "batch.ramp"),
    ],
)
def test_a_changed_batch_moves_nothing_that_counts_what_was_read(
    settings: dict[str, Any], counting: str, corpus: Path
) -> None:
    found = resumed(recipe_of(corpus, training__steps=40, **settings), 20)
    longer = {"training__steps": 60}
    resume._check_counts(found, recipe_of(corpus, **longer, **settings))
    changed = recipe_of(corpus, **longer, **settings, batch__global_sequences=16)
    if not counting:
        resume._check_counts(found, changed)
        return
    with pytest.raises(
        UserError, match=f"reads .* samples in 20 steps, .*; {counting} "
    ) as rejected:
        resume._check_counts(found, changed)
    assert str(rejected.value).endswith("start_step = 21") == (counting != "batch.ramp")


def test_a_ramp_in_which_a_run_has_ended_has_not_ended(corpus: Path) -> None:
    found = resumed(recipe_of(corpus, training__steps=20, **RAMP), 20)
    resume._check_counts(found, recipe_of(corpus, training__steps=40, **RAMP))
    shorter = {"batch__ramp": RAMP["batch__ramp"] | {"samples": 8}}
    with pytest.raises(UserError, match=r"samples in 20 steps, .*; batch.ramp counts"):
        resume._check_counts(found, recipe_of(corpus, training__steps=40, **shorter))


LATE = {
    "name": "late",
    "start_step": 21,
    "optimizer": {"learning_rate": 1e-5, "schedule": {"warmup_steps": 0, "decay": "constant"}},
}
KEEP = "to keep the schedule of the checkpoint, use optimizer.schedule.steps = 20"
COSINE = {"optimizer__schedule__warmup_steps": 5, "training__steps": 20}


@pytest.mark.parametrize(
    ("settings", "new", "advice"),
    [
        ({"training__steps": 40}, "2.44e-03", KEEP),
        ({"training__steps": 40, "optimizer__schedule__steps": 20}, "", ""),
        ({"optimizer__learning_rate": 0.0005}, "", ""),  # the rate of the next step is the minimum
        (
            {"optimizer__schedule__minimum_learning_rate": 1e-3},
            "1.00e-03",
            "keys that changed: optimizer.schedule.minimum_learning_rate, training.steps",
        ),
        ({"optimizer__schedule__minimum_learning_rate": 4.8e-4}, "", ""),
        (
            {"optimizer__schedule__minimum_learning_rate": 0.0},
            "0.00e+00",
            "keys that changed: optimizer.schedule.minimum_learning_rate, training.steps",
        ),
        (
            {"optimizer__schedule": {"warmup_steps": 5, "decay": "constant"}},
            "4.00e-03",
            "keys that changed: optimizer.schedule.decay, "
            "optimizer.schedule.minimum_learning_rate, training.steps",
        ),
        ({"phase": [LATE]}, "1.00e-05", "keys that changed: phase, training.steps"),
    ],
)
def test_a_learning_rate_that_jumps_is_described(
    settings: dict[str, Any], new: str, advice: str, corpus: Path
) -> None:
    found = resumed(recipe_of(corpus, **COSINE), 20)
    text = found.learning_rate_jump(
        recipe_of(corpus, **(COSINE | {"training__steps": 21} | settings))
    )
    if not new:
        assert text == ""
    else:
        rates = f"changes from 4.00e-04 (recipe of the checkpoint) to {new} at step 21"
        assert text == f"the learning rate {rates}; {advice}"


def test_a_schedule_that_has_decayed_to_0_is_not_kept(corpus: Path) -> None:
    settings = COSINE | {"optimizer__schedule__minimum_learning_rate": 0.0}
    text = resumed(recipe_of(corpus, **settings), 20).learning_rate_jump(
        recipe_of(corpus, **(settings | {"training__steps": 40}))
    )
    assert "from 0.00e+00" in text and "add a [[phase]] with its own schedule" in text


def test_a_schedule_that_ended_with_its_warm_up_can_be_extended(corpus: Path) -> None:
    settings = COSINE | {"optimizer__schedule__warmup_steps": 20}
    found = resumed(recipe_of(corpus, **settings), 20)
    longer = settings | {"training__steps": 24}
    assert found.learning_rate_jump(recipe_of(corpus, **longer)) == ""
    lower = found.learning_rate_jump(recipe_of(corpus, **longer, optimizer__learning_rate=1e-3))
    assert "changes from 4.00e-03 (recipe of the checkpoint) to" in lower
    assert "optimizer.schedule.steps" not in lower


def test_a_jump_that_the_recipe_always_had_is_not_described(corpus: Path) -> None:
    recipe = recipe_of(corpus, **COSINE, phase=[LATE | {"start_step": 11}])
    assert resumed(recipe, 10).learning_rate_jump(recipe) == ""
    assert "phase" in resumed(recipe_of(corpus, **COSINE), 10).learning_rate_jump(recipe)


def test_an_edited_deepspeed_json_is_reported(corpus: Path, tmp_path: Path) -> None:
    config = json.loads(Path("ds_configs/zero1_fp32.json").read_text())
    file = tmp_path / "own.json"
    file.write_text(json.dumps(config))
    recipe = recipe_of(corpus, deepspeed=str(file))
    layout = layout_of(recipe, ParallelDims(pipeline=1, data=1, tensor=1))
    saved = replace(manifest_of(recipe), layout=layout)
    assert ResumePoint(CheckpointReader(HERE, saved)).changes(recipe) == {}
    file.write_text(json.dumps(config | {"bf16": {"enabled": True}}))
    assert ResumePoint(CheckpointReader(HERE, saved)).changes(recipe) == {
        "deepspeed_json.bf16.enabled": [None, True]
    }


def test_a_new_batch_size_resumes_at_the_next_sample(corpus: Path) -> None:
    def samples(data: TrainingData, step: int) -> list[int]:
        return [sample for each in data.micro_batches(step) for sample in each.info.dropout.samples]

    alone = ParallelDims(pipeline=1, data=1, tensor=1)
    before = TrainingData(recipe_of(corpus), alone, 0)
    assert samples(before, 4)[-1] == 31
    after = TrainingData(recipe_of(corpus, batch__global_sequences=16), alone, 0)
    after.resume(before.progress_after(4))
    assert samples(after, 5) == list(range(32, 48)) and samples(after, 6)[0] == 48
    assert after.progress_after(6) == Progress(step=6, samples=64)
    ((source, index),) = after.places(np.array([32]))
    window = next(after.micro_batches(5)).tokens[0]
    assert window.tolist() == after.sources()[source].read(index)[:-1].tolist()


@pytest.mark.parametrize("damaged_share", [None, *range(4)])
@pytest.mark.parametrize("rank", range(4))
def test_all_ranks_learn_of_damage(
    rank: int, damaged_share: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that did not learn of it would resume from a checkpoint that the others skip."""
    everyones = damages_by_rank(monkeypatch, damaged_share)
    expected = None if damaged_share is None else f"{HERE} is damaged"
    assert everyones[rank]() == expected


@pytest.mark.parametrize("owner", range(4))
def test_a_rank_that_cannot_read_a_share_fails_alone(
    owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint would be skipped, and steps lost, because one node reads wrongly."""
    everyones = damages_by_rank(monkeypatch, owner, unreadable_for=owner)
    for rank, find in enumerate(everyones):
        if rank != owner:
            assert find() is None
    reader = (owner + 2) % 4  # on the other node of two
    said = f"{HERE} is damaged; but rank {reader} has read the file without an error"
    with pytest.raises(RuntimeError, match=said):
        everyones[owner]()


def damages_by_rank(
    monkeypatch: pytest.MonkeyPatch, damaged_share: int | None, unreadable_for: int | None = None
) -> list[Callable[[], str | None]]:
    """Return `find_damage` of each of four ranks, one of whose shares is damaged.

    Args:
        unreadable_for: the only rank that finds the damage; None: all ranks find it
    """
    ranks = 4

    def damage_found(rank: int, share: int) -> str | None:
        found = share == damaged_share and unreadable_for in (None, rank)
        return f"{HERE} is damaged" if found else None

    own = [damage_found(rank, rank) for rank in range(ranks)]
    again = [(rank + 2) % ranks for rank in range(ranks)]
    confirmed = [damage_found(n, again[n]) if own[again[n]] else None for n in range(ranks)]

    def find(rank: int) -> str | None:
        collectives = iter([own, confirmed])  # the values of all ranks

        def damages(checkpoint: Path, *, share: int, shares: int, note: object) -> Iterator[str]:
            assert shares == ranks
            found = damage_found(rank, share)
            return iter([found] if found else [])

        def gather(value: str | None) -> list[str | None]:
            values = next(collectives)
            assert value == values[rank]
            return values

        monkeypatch.setattr(resume, "find_damages", damages)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
        monkeypatch.setattr(resume, "gathered", gather)
        return find_damage(HERE)

    return [partial(find, rank) for rank in range(ranks)]
