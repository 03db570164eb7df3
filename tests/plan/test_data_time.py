"""The hidden part of the data ranks' communication, against a simulation bucket by bucket."""

import itertools

import pytest

from threefold.config.loading import DEFAULT_RECIPE, load_recipe
from threefold.pipeline.gradients import MAX_RUNNING
from threefold.plan.job import DEFAULT_CLUSTER, Machine, job_of
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
    chunks = DataTraffic(reduced=0.8, buckets=8, virtual_stages=4, stages=4)
    assert whole.exposed_reductions(1.0) == pytest.approx(0.1)  # the last bucket
    assert chunks.exposed_reductions(1.0) == pytest.approx(0.1)
    slow = DataTraffic(reduced=4.0, buckets=8)
    slow_chunks = DataTraffic(reduced=4.0, buckets=8, virtual_stages=4, stages=4)
    assert slow_chunks.exposed_reductions(1.0) < slow.exposed_reductions(1.0) / 3


def test_a_cpu_hides_nothing() -> None:
    overrides = [f"cluster.{key}={value}" for key, value in DEFAULT_CLUSTER.items()]
    recipe = load_recipe(DEFAULT_RECIPE, ["layout.pipeline=1", *overrides])
    job = job_of(recipe, Machine.of_cluster(recipe.cluster))
    traffic = data_traffic(job)
    assert job.layout.data == 2 and traffic.reduced > 0
    assert data_time(job, 1.0) == pytest.approx(traffic.reduced + traffic.gathered)
