"""A run that passes from layout to layout, and faults that a relay must notice."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from models.parallel.collectives import TensorAxis
from models.sharding import Sharding
from tests.conftest import GPT_SWITCHES, changed, small_recipe
from tests.ranks import run_ranks
from threefold.checkpoint.state import CheckpointReader, SharedState, TrainingState
from threefold.commands.prove import run_relay
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.prove import layouts
from threefold.prove.compare import ResumeResult
from threefold.prove.layouts import ProofCase, sample, valid_cases
from threefold.prove.report import CaseResult, relay_as_text
from threefold.prove.training import many_cases, resume_in_layout
from threefold.run_folder.folder import RunFolder

SHAPES = {
    "llama, grouped queries, average": {"optimizer__average": {"decay": 0.8}},
    "gpt, tied, biases": GPT_SWITCHES | {"model__layers": 3},
}
QUICK = "llama, grouped queries, average"
FAULTS = (
    "second moments as first",
    "blocks split as one",
    "one element late",
    "updates forgotten",
    "moments forgotten",
    "model keeps its weights",
)
BF16_FAULTS = ("model keeps its weights",)


def cases(corpus: Path, shape: dict[str, Any], *, ranks: int, count: int) -> list[ProofCase]:
    """Return `count` valid layouts of each world size, far from each other."""
    table = changed(small_recipe(corpus), **shape, training__steps=200)
    valid = valid_cases(parse_recipe(table, "small"), ranks=ranks, micro_sequences=(2,))
    chosen = []
    for size in {case.world_size for case in valid}:
        own = [case for case in valid if case.world_size == size]
        chosen += sample(own, count)
    return chosen


@pytest.mark.parametrize(
    "shape", [pytest.param(n, marks=[] if n == QUICK else pytest.mark.exhaustive) for n in SHAPES]
)
def test_a_run_resumes_in_any_layout(shape: str, corpus: Path, tmp_path: Path) -> None:
    legs = cases(corpus, SHAPES[shape], ranks=4, count=1 if shape == QUICK else 2)
    assert {leg.world_size for leg in legs} >= {1, 2, 4}
    findings = list(run_relay(legs, folder=tmp_path))
    assert len(findings) == len(legs)
    assert all(finding.passes for finding in findings), relay_as_text(findings, every_layout=True)
    assert sum(finding.result.first for finding in findings) == 1


@pytest.mark.long
def test_bf16_loses_nothing_either(corpus: Path, tmp_path: Path) -> None:
    with mock.patch.object(layouts, "CONFIG", "ds_configs/zero{}_bf16.json"):
        legs = cases(corpus, {}, ranks=2, count=4)
    assert {leg.zero_stage for leg in legs} == {1, 2, 3}
    findings = list(run_relay(legs, folder=tmp_path))
    for finding in findings:
        assert isinstance(finding.result, ResumeResult), finding.result
        assert not finding.result.changed and finding.result.loss < 1e-2  # bf16 rounds


@contextlib.contextmanager
def seeded_fault(fault: str | None) -> Iterator[None]:
    rows, elements = CheckpointReader.rows, Sharding.local_elements
    restore, ranges = TrainingState.restore, Sharding._ranges

    def other_kind(self: Any, kind: str, *arguments: Any) -> Tensor:
        return rows(self, "exp_avg_sq" if kind == "exp_avg" else kind, *arguments)

    def one_block(self: Sharding, *arguments: Any, **settings: Any) -> Tensor:
        with mock.patch.object(Sharding, "_ranges", joined):
            return elements(self, *arguments, **settings)

    def joined(self: Sharding, tensor: TensorAxis, padded: bool = False) -> list:
        return ranges(replace(self, blocks=(sum(self.blocks),)), tensor, padded)

    def late(self: Sharding, *arguments: Any, **settings: Any) -> Tensor:
        return elements(self, *arguments, **settings).roll(1)

    def restore_with(**changes: Any) -> Callable:
        def changed_restore(self: TrainingState, read: Any, **settings: Any) -> None:
            restore(self, read, **settings | changes)

        return changed_restore

    def forget_updates(self: TrainingState, *arguments: Any, **settings: Any) -> None:
        restore(self, *arguments, **settings)
        for flat in self.weights:
            self.optimizer.optimizer.state[flat]["step"].zero_()

    place, name, broken = {
        None: (CheckpointReader, "rows", rows),
        "second moments as first": (CheckpointReader, "rows", other_kind),
        "blocks split as one": (Sharding, "local_elements", one_block),
        "one element late": (Sharding, "local_elements", late),
        "updates forgotten": (TrainingState, "restore", forget_updates),
        "moments forgotten": (TrainingState, "restore", restore_with(updates=None)),
        "model keeps its weights": (SharedState, "copy_to_model", lambda self: None),
    }[fault]
    with mock.patch.object(place, name, broken):
        yield


def relay_with_faults(
    legs: list[ProofCase], bf16: list[ProofCase], folder: Path
) -> dict[str | None, list[ResumeResult]]:
    """Run the relay on each rank, once without a fault and once with each fault.

    bf16: legs for the faults that fp32 cannot have, as its model and optimizer share the weights
    """
    found: dict[str | None, list[ResumeResult]] = {}
    world = LaunchEnvironment(rank=int(os.environ["RANK"]), size=2, local_size=2)
    with many_cases() as begin:
        for number, fault in enumerate((None, *FAULTS)):
            found[fault] = []
            for leg in bf16 if fault in BF16_FAULTS else legs:
                begin()
                with seeded_fault(fault):
                    found[fault].append(
                        resume_in_layout(leg, world, RunFolder(folder / str(number)))
                    )
    return found


@pytest.mark.long
def test_faults_of_saving_and_loading_are_noticed(corpus: Path, tmp_path: Path) -> None:
    legs, bf16 = pipeline_and_tensor(corpus, "fp32"), pipeline_and_tensor(corpus, "bf16")
    found = run_ranks(2, relay_with_faults, legs, bf16, tmp_path)[0]
    assert all(leg.passes for leg in found.pop(None))
    for fault, results in found.items():
        seen = [leg.changed if fault in BF16_FAULTS else not leg.passes for leg in results]
        assert any(seen), fault


def pipeline_and_tensor(corpus: Path, dtype: str) -> list[ProofCase]:
    """Return a layout of two stages and one of two tensor ranks."""
    with mock.patch.object(layouts, "CONFIG", f"ds_configs/zero{{}}_{dtype}.json"):
        two = [leg for leg in cases(corpus, {}, ranks=2, count=99) if leg.world_size == 2]
    return [
        next(v for v in two if v.axes == axes and v.zero_stage == 1)
        for axes in ("tensor 1 x pipeline 2 x data 1", "tensor 2 x pipeline 1 x data 1")
    ]


def test_the_table_shows_failures(corpus: Path) -> None:
    first, second, *_ = cases(corpus, {}, ranks=2, count=2)
    findings = [
        CaseResult(first, ResumeResult(first=True, changed=[], loss=0.0)),
        CaseResult(
            second, ResumeResult(first=False, changed=["exp_avg embedding.weight"], loss=0.5)
        ),
    ]
    text = relay_as_text(findings, every_layout=False)
    assert "changed: exp_avg embedding.weight, losses after it 5.0e-01" in text
    assert "0 of 1 layouts resumed" in text
