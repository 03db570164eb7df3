"""The judgement of a preflight, for many combinations of slow and broken ranks."""

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from threefold.config.parallel_dims import ParallelDims
from threefold.pretrain.preflight.evaluate import (
    DATA,
    MATMUL,
    MEMORY,
    NETWORK,
    NODE_LINK,
    PIPELINE,
    TENSOR,
    DeviceReport,
    IssueSeverity,
    LinkReport,
    Planned,
    PreflightResult,
    RankLayout,
    best_of,
    evaluate,
    median_of_others,
    pair_rounds,
    scopes,
)

HEALTHY = DeviceReport("H100", tflops=700.0, free_gib=78.0)
RATES = {NODE_LINK: 300.0, NETWORK: 45.0, PIPELINE: 45.0, TENSOR: 250.0, DATA: 45.0}
PLANNED = Planned({MATMUL: 720.0, **RATES}, memory_gib=(60.0,))


class Cluster:
    """The reports of healthy ranks, some of which a test makes slow or broken.

    Args:
        nodes: number of nodes
        per_node: ranks of each node, which are a tensor group
        stages: pipeline stages
    """

    def __init__(self, nodes: int, per_node: int = 8, *, stages: int = 1):
        self.size, self.per_node, self.stages = nodes * per_node, per_node, stages
        self.devices = [HEALTHY] * self.size
        self.slowdowns: dict[str, dict[int, float]] = {}  # measure -> rank -> factor
        data = self.size // per_node // stages
        dims = ParallelDims(pipeline=stages, data=data, tensor=per_node)
        self.layout = RankLayout(per_node, dims)

    def slow(self, measure: str, ranks: range, factor: float = 3.0) -> "Cluster":
        """Make some ranks slow."""
        self.slowdowns.setdefault(measure, {}).update(dict.fromkeys(ranks, factor))
        return self

    def device(self, rank: int, **changes: object) -> "Cluster":
        """Change the report of a device."""
        self.devices[rank] = replace(self.devices[rank], **changes)  # type: ignore[arg-type]
        return self

    def links(self) -> list[LinkReport]:
        """Return the reports of all links: the slower one of two partners decides."""

        def rate(measure: str, *ranks: int) -> float:
            slow = self.slowdowns.get(measure, {})
            return RATES[measure] / max(slow.get(rank, 1.0) for rank in ranks)

        found = []
        for rank in range(self.size):
            transfers: dict[str, dict[int, float]] = {}
            for scope in scopes(self.size, self.per_node, self.stages):
                for pairs in pair_rounds(scope.size):
                    if (partner := scope.partner(rank, pairs)) is not None:
                        rates = transfers.setdefault(scope.measure, {})
                        rates[partner] = rate(scope.measure, rank, partner)
            groups = {
                axis: rate(axis, *ranks)
                for axis, every in self.layout.groups.items()
                for ranks in every
                if rank in ranks
            }
            found.append(LinkReport(transfers, groups, {}))
        return found

    def evaluate(
        self,
        *,
        spares: int = 0,
        planned: Planned = PLANNED,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> PreflightResult:
        """Return the result."""
        slow = self.slowdowns.get(MATMUL, {})
        devices = [
            replace(each, tflops=each.tflops and each.tflops * noise() / slow.get(rank, 1.0))
            for rank, each in enumerate(self.devices)
        ]
        broken = any(each.problem for each in devices)
        links = [] if broken else self.links()
        return evaluate(
            devices, links=links, layout=self.layout, planned=planned, ratio=1.5, spares=spares
        )


def named(
    result: PreflightResult, severity: IssueSeverity | None = None
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the measures and ranks of the issues."""
    return [
        (each.measure, each.ranks)
        for each in result.issues
        if severity is None or each.severity == severity
    ]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 128])
def test_healthy_ranks_have_no_findings(nodes: int) -> None:
    result = Cluster(nodes).evaluate(spares=3)
    assert not result.issues and not result.mismatches and not result.left_out
    assert not result.stops and not result.has_slow
    assert result.summaries[MATMUL].median == 700.0
    assert result.summaries[MATMUL].planned == 720.0


@pytest.mark.parametrize("nodes", [1, 128])
def test_one_slow_device_is_named(nodes: int) -> None:
    cluster = Cluster(nodes).slow(MATMUL, range(5, 6))
    began = time.monotonic()
    result = cluster.evaluate()
    assert time.monotonic() - began < 5
    assert named(result, IssueSeverity.SLOW) == [(MATMUL, (5,))]
    (issue,) = result.issues
    assert issue.value == pytest.approx(700 / 3) and issue.median_of_others == 700
    assert not result.stops and not result.left_out  # there is no spare node
    assert result.has_slow and result.mismatches == []
    assert cluster.evaluate(spares=1).stops
    assert list(cluster.evaluate(spares=1).left_out) == [0]


def test_all_devices_equally_slow_are_the_planners_mistake() -> None:
    cluster = Cluster(8).slow(MATMUL, range(64)).slow(NETWORK, range(64))
    result = cluster.evaluate(spares=8)
    assert result.mismatches == [MATMUL, NETWORK]
    assert not result.issues and not result.left_out and not result.stops
    assert Cluster(8).evaluate(planned=Planned()).mismatches == []


def test_a_single_device_is_compared_with_the_planner_only() -> None:
    result = Cluster(1, 1).slow(MATMUL, range(1)).evaluate()
    assert result.mismatches == [MATMUL] and not result.issues
    assert Cluster(1, 1).evaluate().mismatches == []


@pytest.mark.parametrize("nodes", [3, 4, 5, 6, 7, 8, 16, 33])
def test_a_slow_network_link_is_told_apart_from_its_partners(nodes: int) -> None:
    for node in range(nodes):
        cluster = Cluster(nodes, 2).slow(NETWORK, range(2 * node, 2 * node + 1))
        assert named(cluster.evaluate()) == [(NETWORK, (2 * node,))]


def test_a_node_between_two_slow_ones_is_not_slow() -> None:
    cluster = Cluster(8, 1).slow(NETWORK, range(2, 3)).slow(NETWORK, range(4, 5))
    assert named(cluster.evaluate()) == [(NETWORK, (2,)), (NETWORK, (4,))]


def test_a_single_pair_of_nodes_cannot_be_told_apart() -> None:
    cluster = Cluster(2).slow(NETWORK, range(3, 4))
    result = cluster.evaluate(spares=2)
    assert named(result, IssueSeverity.SHARED) == [(NETWORK, (3, 11))]
    assert not result.left_out and not result.stops


def test_a_slow_group_is_named_unless_a_slow_node_explains_it() -> None:
    cluster = Cluster(4).slow(DATA, range(9, 10))
    assert named(cluster.evaluate(spares=1)) == [(DATA, (1, 9, 17, 25))]
    assert not cluster.evaluate(spares=1).stops
    cluster.slow(NETWORK, range(9, 10))
    assert named(cluster.evaluate(spares=1)) == [(NETWORK, (9,))]
    assert list(cluster.evaluate(spares=1).left_out) == [1]


def test_the_stages_of_a_slow_node_are_explained_by_it() -> None:
    cluster = Cluster(4, 2, stages=2)
    cluster.slow(NETWORK, range(2, 3)).slow(PIPELINE, range(2, 3)).slow(DATA, range(2, 3))
    assert named(cluster.evaluate()) == [(NETWORK, (2,))]


def test_slow_links_and_groups_within_a_node_blame_it() -> None:
    cluster = Cluster(2, 2).slow(NODE_LINK, range(2, 3)).slow(TENSOR, range(2, 4))
    result = cluster.evaluate(spares=1)
    assert named(result, IssueSeverity.SLOW) == [(NODE_LINK, (2, 3)), (TENSOR, (2, 3))]
    assert list(result.left_out) == [1]


def test_broken_devices_stop_the_run_with_or_without_spares() -> None:
    cluster = Cluster(16).device(9, problem="17 rows of matmuls have wrong results")
    cluster.device(40, tflops=None, problem="CUDA error: uncorrectable ECC error")
    for spares in (0, 1, 2):
        result = cluster.evaluate(spares=spares)
        assert named(result, IssueSeverity.BROKEN) == [(MATMUL, (9,)), (MATMUL, (40,))]
        assert result.stops and list(result.left_out) == [1, 5] and not result.has_slow


def test_spares_replace_broken_nodes_first_and_then_the_slowest() -> None:
    cluster = Cluster(16).slow(MATMUL, range(0, 1), 2.0).slow(MATMUL, range(8, 9), 4.0)
    assert list(cluster.evaluate(spares=0).left_out) == []
    assert list(cluster.evaluate(spares=1).left_out) == [1]
    assert list(cluster.evaluate(spares=2).left_out) == [1, 0]
    cluster.device(70, problem="broken")
    assert list(cluster.evaluate(spares=1).left_out) == [8]
    assert list(cluster.evaluate(spares=2).left_out) == [8, 1]


@pytest.mark.parametrize(
    ("nodes", "broken", "left_out"), [(4, 2, 2), (4, 3, 0), (64, 9, 0), (1, 1, 1)]
)
def test_many_broken_nodes_point_to_the_software(nodes: int, broken: int, left_out: int) -> None:
    cluster = Cluster(nodes)
    for node in range(broken):
        cluster.device(8 * node, problem="wrong results")
    result = cluster.evaluate(spares=9)
    assert result.stops and len(result.left_out) == left_out


def test_many_slow_nodes_point_to_the_network() -> None:
    cluster = Cluster(64).slow(NETWORK, range(0, 9 * 8))
    result = cluster.evaluate(spares=64)
    assert len(named(result)) == 72 and not result.left_out and not result.stops


def test_memory_in_use_by_another_process() -> None:
    cluster = Cluster(2).device(3, free_gib=50.0).device(4, free_gib=76.5)
    result = cluster.evaluate(spares=1)
    assert named(result, IssueSeverity.SLOW) == [(MEMORY, (3,))]
    assert result.issues[0].planned == 60.0 and list(result.left_out) == [0]
    assert result.mismatches == []
    needs_more = replace(PLANNED, memory_gib=(60.0, 78.5))
    assert Cluster(2, stages=2).evaluate(planned=needs_more).mismatches == [MEMORY]


def test_different_devices_are_not_compared() -> None:
    cluster = Cluster(2)
    for rank in range(8, 16):
        cluster.device(rank, device="A100", tflops=250.0, free_gib=39.0)
    assert not cluster.evaluate().issues
    cluster.device(9, tflops=100.0)
    assert named(cluster.evaluate()) == [(MATMUL, (9,))]


def test_noise_names_nobody() -> None:
    generator = random.Random(0)
    for _ in range(50):
        result = Cluster(16).evaluate(spares=4, noise=lambda: generator.uniform(0.85, 1.0))
        assert not result.issues and not result.mismatches


def test_a_disturbance_in_one_of_two_measurements_is_ignored() -> None:
    first, second = Cluster(4).slow(NETWORK, range(3)), Cluster(4).slow(DATA, range(3))
    slow = [replace(HEALTHY, tflops=100.0)] * 32
    devices, links = best_of((slow, first.links()), ([HEALTHY] * 32, second.links()))
    assert devices == [HEALTHY] * 32 and links == Cluster(4).links()
    broken = [replace(HEALTHY, problem="wrong results")]
    assert best_of((broken, []), ([HEALTHY], [LinkReport()])) == (broken, [])


@pytest.mark.parametrize("values", [[1.0, 2.0], [3.0, 1.0, 2.0], [5.0, 1.0, 1.0, 4.0, 9.0]])
def test_the_median_of_the_others(values: list[float]) -> None:
    from statistics import median

    for index, value in enumerate(values):
        others = values[:index] + values[index + 1 :]
        assert median_of_others(sorted(values), value) == median(others)
    assert median_of_others([1.0], 1.0) is None


def test_groups_may_be_missing() -> None:
    result = evaluate(
        [HEALTHY],
        links=[LinkReport()],
        layout=RankLayout(1),
        planned=Planned(),
        ratio=1.5,
    )
    assert not result.issues and list(result.summaries) == [MATMUL]
