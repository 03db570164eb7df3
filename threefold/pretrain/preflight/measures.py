"""The measures of a preflight, the reports of the ranks, and the pairs of ranks that are measured.

Every rank takes part in the same few rounds, whatever the size of the run. In a round, disjoint
pairs of ranks exchange messages, so that all links are measured at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

MATMUL, MEMORY = "matmul", "free memory"
NODE_LINK, NETWORK, PIPELINE = "node link", "network link", "pipeline link"
TENSOR, DATA = "tensor all-reduce", "data all-reduce"
UNITS = {MATMUL: "TFLOP/s", MEMORY: "GiB"}  # all others are in GB/s
MAX_BLAMED_NODES = 8  # more that fail or are slow together point to a common cause
MIN_NODES_FOR_FAR_PAIRS = 6  # with fewer, neighbours and distant nodes are often the same
# Set by launch.py: the number of healthy spare nodes. Not set under other launchers.
SPARE_NODES = "THREEFOLD_SPARE_NODES"


def unit(measure: str) -> str:
    """Return the unit of a measure."""
    return UNITS.get(measure, "GB/s")


@dataclass(frozen=True)
class DeviceReport:
    """The device of a rank.

    Attributes:
        device: the driver's name of the device
        tflops: rate of a matmul in the precision of the run; None if the device has failed
        free_gib: free memory before the model is built; None on a CPU
        problem: the error of the device, or its wrong results; empty if there is none
    """

    device: str
    tflops: float | None = None
    free_gib: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class LinkReport:
    """The links of a rank.

    Attributes:
        transfers: scope -> partner of this rank -> GB/s in one direction
        groups: axis -> bus bandwidth in GB/s of the all-reduce of this rank's group
        bytes: scope or axis -> size of the messages
    """

    transfers: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    groups: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """Ranks at equal distances, among which pairs are measured.

    Attributes:
        measure: NODE_LINK, NETWORK or PIPELINE
        size: number of ranks in a line
        stride: distance between neighbouring global ranks of the line
    """

    measure: str
    size: int
    stride: int

    def partner(self, rank: int, pairs: Sequence[tuple[int, int]]) -> int | None:
        """Return the global rank that a rank exchanges messages with; None if it has no partner.

        Args:
            rank: a global rank
            pairs: the pairs of a round, as indices in the line
        """
        own = rank // self.stride % self.size
        for pair in pairs:
            if own in pair:
                return rank + (sum(pair) - 2 * own) * self.stride
        return None


def scopes(world_size: int, per_node: int, stages: int) -> list[Scope]:
    """Return the scopes of a run: within nodes, between nodes, and between pipeline stages.

    Ranks with the same position in their nodes form pairs, so that every network link of a node is
    measured. Stages get pairs of their own only if they are not neighbouring nodes anyway.

    Args:
        world_size: number of ranks
        per_node: ranks of each node
        stages: pipeline stages
    """
    found = [
        Scope(NODE_LINK, per_node, 1),
        Scope(NETWORK, world_size // per_node, per_node),
    ]
    span = world_size // stages
    if span > per_node:
        found.append(Scope(PIPELINE, stages, span))
    return [scope for scope in found if scope.size > 1]


def pair_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, in which each of `size` members gets two partners or more.

    A slow member is slow with all its partners, and each of its partners is fast with another one.
    Members form pairs with both neighbours on a ring, and with a distant member if there are many,
    because a member between two slow ones would otherwise seem slow. Two members are one pair.
    """
    if size < 2:
        return []
    if size == 2:
        return [[(0, 1)]]
    rounds = [
        [(first, first + 1) for first in range(0, size - 1, 2)],
        [(first, first + 1) for first in range(1, size - 1, 2)],
    ]
    closing = (0, size - 1)
    if size % 2:
        rounds.append([closing])
    else:
        rounds[1].append(closing)
    if size >= MIN_NODES_FOR_FAR_PAIRS:
        half = size // 2
        rounds.append([(first, first + half) for first in range(half)])
    return rounds


def best_of(
    first: tuple[list[DeviceReport], list[LinkReport]],
    second: tuple[list[DeviceReport], list[LinkReport]],
) -> tuple[list[DeviceReport], list[LinkReport]]:
    """Return the better values of two measurements of the ranks, and the problems of both.

    A disturbance that lasts only for a moment does not make a node slow.
    """
    devices = [
        replace(
            one,
            tflops=_larger(one.tflops, other.tflops),
            free_gib=_larger(one.free_gib, other.free_gib),
            problem=one.problem or other.problem,
        )
        for one, other in zip(first[0], second[0], strict=True)
    ]
    if not first[1] or not second[1]:
        return devices, []
    links = [
        replace(
            one,
            transfers={
                measure: {
                    partner: max(rate, other.transfers[measure][partner])
                    for partner, rate in rates.items()
                }
                for measure, rates in one.transfers.items()
            },
            groups={axis: max(rate, other.groups[axis]) for axis, rate in one.groups.items()},
        )
        for one, other in zip(first[1], second[1], strict=True)
    ]
    return devices, links


def _larger(one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)
