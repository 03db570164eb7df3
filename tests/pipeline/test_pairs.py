"""Pairs of a forward and a backward pass that run at the same time."""

from dataclasses import replace
from itertools import chain
from typing import Any
from unittest import mock

import pytest

from models.errors import UserError
from threefold.config.layout import PAIRED_SCHEDULES
from threefold.pipeline.schedules import BACKWARD, FORWARD, WEIGHT, Pass, Pipeline
from threefold.pipeline.simulation import pipeline_seconds, simulate

PIPELINES = [
    Pipeline(
        stages=p, micro_batches=m, schedule=schedule, virtual_stages=virtual_stages, paired=True
    )
    for schedule, virtual_stages in (("interleaved", 2), ("interleaved", 4), ("dualpipev", 2))
    for p in (2, 3, 4, 8)
    for m in (2 * p, 2 * p + 1, 4 * p)
]
FORWARD_SECONDS, BACKWARD_SECONDS = 1.0, 2.0  # of a chunk


def name(pipeline: Pipeline) -> str:
    sizes = f"{pipeline.stages}x{pipeline.virtual_stages}-{pipeline.micro_batches}"
    return f"{pipeline.schedule}-{sizes}"


def length(pipeline: Pipeline) -> float:
    weights = 1.0 if pipeline.splits else 0.0
    seconds = {
        FORWARD: FORWARD_SECONDS, BACKWARD: BACKWARD_SECONDS - weights, WEIGHT: weights,
    }  # fmt: skip
    return pipeline_seconds(simulate(pipeline, lambda work: seconds[work.kind]))


def unpaired(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, paired=False)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_units_keep_the_order_and_pair_independent_passes(pipeline: Pipeline) -> None:
    for order in pipeline.orders:
        units = pipeline.units(order)
        assert list(chain.from_iterable(units)) == list(order)
        pairs = [unit for unit in units if len(unit) > 1]
        assert len(pairs) >= pipeline.micro_batches - pipeline.stages
        for pair in pairs:
            assert [work.kind for work in pair] == [FORWARD, BACKWARD]
            assert pipeline.needed(pair[1]) != pair[0]
        assert pipeline.units(pipeline.forward_orders[0]) == [
            (work,) for work in pipeline.forward_orders[0]
        ]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_without_communication_pairs_cost_little(pipeline: Pipeline) -> None:
    """Nothing with interleaving; with DualPipeV at most a forward pass of each other stage."""
    more = length(pipeline) - length(unpaired(pipeline))
    most = 0.0
    if pipeline.schedule == "dualpipev":
        most = (pipeline.stages - 1) * pipeline.virtual_stages * FORWARD_SECONDS
    assert -1e-9 <= more <= most + 1e-9


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)])
def test_in_other_schedules_pairs_would_lengthen_the_step(
    schedule: str, virtual_stages: int
) -> None:
    assert schedule not in PAIRED_SCHEDULES
    pipeline = Pipeline(
        stages=4, micro_batches=16, schedule=schedule, virtual_stages=virtual_stages, paired=True
    )
    assert length(pipeline) > 1.2 * length(unpaired(pipeline))


def test_with_fewer_micro_batches_the_stages_would_wait_for_each_other() -> None:
    settings: dict[str, Any] = {
        "stages": 4,
        "micro_batches": 5,
        "schedule": "interleaved",
        "virtual_stages": 2,
    }
    with pytest.raises(UserError, match="use 8"):
        Pipeline(**settings, paired=True)
    with (
        mock.patch("threefold.pipeline.schedules.min_micro_batches", lambda *_, **__: 1),
        pytest.raises(ValueError, match="wait for each other"),
    ):
        length(Pipeline(**settings, paired=True))


def test_a_pass_and_the_pass_that_needs_it_are_not_a_pair() -> None:
    pipeline = Pipeline(stages=1, micro_batches=2, paired=True)
    order = [Pass(FORWARD, 0, 0, 0), Pass(BACKWARD, 0, 0, 0)]
    assert pipeline.units(order) == [(order[0],), (order[1],)]
