"""The hidden part of the data ranks' communication, against a simulation bucket by bucket."""

import itertools
from dataclasses import replace

import pytest

from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe
from threefold.pipeline.gradients import MAX_RUNNING
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.job import DEFAULT_CLUSTER, Machine, PlannedLayout, job_of
from threefold.plan.time.step import step_time
from threefold.plan.time.update import (
    DataTraffic,
    data_time,
    data_traffic,
    exposed_after,
)


def simulated(seconds: list[float], buckets: int) -> float:
    """Return when the last bucket leaves the last machine; each handles one bucket at a time."""
    free = [0.0] * len(seconds)
    for _ in range(buckets):
        ready = 0.0
        for machine, each in enumerate(seconds):
            ready = max(ready, free[machine]) + each / buckets
            free[machine] = ready
    return free[-1]


@pytest.mark.parametrize("buckets", [1, 2, 7])
def test_collectives_after_a_pass_are_a_flow_shop(buckets: int) -> None:
    for seconds in itertools.product((0.0, 0.3, 1.0, 4.0), repeat=3):
        passing, *collectives = seconds
        expected = simulated(list(seconds), buckets) - passing
        assert exposed_after(passing, collectives, buckets) == pytest.approx(expected)


def reductions_of(traffic: DataTraffic, backward: float) -> float:
    """Return the exposed seconds of a single stage's 1F1B, or GPipe, pass by pass.

    A bucket is reduced when its part of the pass has ended. At most two reductions run: the third
    bucket waits for the first one.
    """
    now, link, forward = 0.0, 0.0, backward / 2 if traffic.alternating else 0.0
    running: list[float] = []
    for _, micro_batch in itertools.product(range(traffic.groups), range(traffic.every)):
        now += forward
        for _ in range(traffic.buckets):
            now += backward / traffic.buckets
            if micro_batch == traffic.every - 1:
                link = max(link, now) + traffic.reduced / traffic.buckets
                running.append(link)
                if len(running) > MAX_RUNNING:
                    now = max(now, running.pop(0))
    passes = traffic.groups * traffic.every * (forward + backward)
    return max(now, link) - passes


@pytest.mark.parametrize("alternating", [True, False])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("reduced", [0.2, 0.6, 0.9, 1.2, 2.0, 4.0])
def test_groups_of_micro_batches_hide_reductions(
    reduced: float, every: int, alternating: bool
) -> None:
    """The formula is within 5 % of the step of a simulation, with 16 micro-batches."""
    for buckets in (2, 4, 16):
        traffic = DataTraffic(
            reduced=reduced,
            buckets=buckets,
            groups=16 // every,
            every=every,
            alternating=alternating,
        )
        step = 16 * (1.5 if alternating else 1.0)
        predicted = traffic.exposed_reductions(1.0)
        expected = reductions_of(traffic, 1.0)
        assert (step + predicted) / (step + expected) == pytest.approx(1, abs=0.05)


def test_the_last_reduction_of_interleaved_chunks_is_that_of_one_chunk() -> None:
    whole = DataTraffic(reduced=0.8, buckets=8)
    chunks = DataTraffic(reduced=0.8, buckets=8, virtual_stages=4, in_a_row=4)
    assert whole.exposed_reductions(1.0) == pytest.approx(0.1)  # the last bucket
    assert chunks.exposed_reductions(1.0) == pytest.approx(0.1)
    slow = DataTraffic(reduced=4.0, buckets=8)
    slow_chunks = DataTraffic(reduced=4.0, buckets=8, virtual_stages=4, in_a_row=4)
    assert slow_chunks.exposed_reductions(1.0) < slow.exposed_reductions(1.0) / 3


@pytest.mark.parametrize("reduced", [0.2, 1.2, 4.0])
def test_only_passes_for_gradients_of_weights_hide_the_last_reduction(reduced: float) -> None:
    """ZB-H1 ends with such a pass, and ZB-V's first stage with those of two chunks, W B W."""
    zb_h1 = DataTraffic(reduced=reduced, buckets=16)
    expected = simulated([0.4, reduced], 16) - 0.4
    assert zb_h1.exposed_reductions(1.0, 0.4) == pytest.approx(expected)
    now = link = 0.0
    for _ in range(2):
        for _ in range(8):
            now += 0.2 / 8
            link = max(link, now) + reduced / 16
        now += 0.3
    zb_v = DataTraffic(reduced=reduced, buckets=16, virtual_stages=2)
    assert zb_v.exposed_reductions(1.0, 0.4) == pytest.approx(link - (now - 0.3), abs=0.05)


def test_the_plan_of_a_zero_bubble_schedule_hides_less_of_its_reductions() -> None:
    recipe = load_recipe(REPOSITORY / "recipes" / "llama" / "405b.toml")
    job = job_of(recipe, Machine.of_cluster(recipe.cluster))
    sizes = {"tensor": 8, "pipeline": 4, "context": 1, "data": 64}
    seconds = {}
    for schedule in ("1f1b", "zb-h1", "zb-v"):
        virtual_stages = SCHEDULES[schedule].virtual_stages
        layout = PlannedLayout(**sizes, schedule=schedule, virtual_stages=virtual_stages)
        other = replace(job, layout=layout, global_sequences=8 * layout.data)
        seconds[schedule] = step_time(other).data
    assert seconds["1f1b"] < seconds["zb-v"] < seconds["zb-h1"]


def test_a_cpu_hides_nothing() -> None:
    overrides = [f"cluster.{key}={value}" for key, value in DEFAULT_CLUSTER.items()]
    recipe = load_recipe(DEFAULT_RECIPE, ["layout.pipeline=1", *overrides])
    job = job_of(recipe, Machine.of_cluster(recipe.cluster))
    traffic = data_traffic(job)
    assert job.layout.data == 2 and traffic.reduced > 0
    assert data_time(job, 1.0) == pytest.approx(traffic.reduced + traffic.gathered)
