"""Measurements of a cluster: matmul rates, transfers between two ranks, and all-reduces."""

import socket
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple, get_args

Operation = Literal["transfer", "all-reduce"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
SIZES = {"cpu": (2**16, 2**20, 2**24), "cuda": (2**20, 2**25, 2**29)}  # bytes, by kind of device
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}  # rows, columns and inner dimension


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """Median time of a transfer between two ranks, or of an all-reduce.

    Attributes:
        across_nodes: True if the ranks are on several nodes
        bytes: size of the tensor on each rank
        seconds: time of one transfer in one direction, or of one all-reduce
    """

    operation: Operation
    across_nodes: bool
    ranks: int
    bytes: int
    seconds: float

    @property
    def bus_gigabytes_per_second(self) -> float:
        """Rate of each rank's link in one direction: NCCL's bus bandwidth."""
        share = 1.0
        if self.operation == "all-reduce":
            share = 2 * (self.ranks - 1) / self.ranks
        return 1e-9 * share * self.bytes / self.seconds


class RankRate(NamedTuple):
    """The host of a rank and the rate of its matmul."""

    host: str
    tflops: float

    @classmethod
    def here(cls, tflops: float) -> "RankRate":
        """Return the rate of a rank of this host."""
        return cls(socket.gethostname(), tflops)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of the ranks.

    Attributes:
        device: name of the device, as the driver reports it; of a CPU, its model
        matmul_size: rows, columns and inner dimension of the matmul
        links: the times of all transfers and all-reduces
    """

    device: str
    torch: str
    precision: str
    matmul_size: int
    rates: list[RankRate]
    links: list[LinkTime]

    @property
    def median_tflops(self) -> float:
        """The median matmul rate of the ranks."""
        return median(rate.tflops for rate in self.rates)

    @property
    def slowest(self) -> tuple[int, RankRate]:
        """The rank with the lowest matmul rate, and its rate."""
        return min(enumerate(self.rates), key=lambda ranked: ranked[1].tflops)

    @property
    def inside_nodes(self) -> list[LinkTime]:
        """The times of ranks on the same node; empty if each node has a single rank."""
        return [time for time in self.links if not time.across_nodes]

    @property
    def across_nodes(self) -> list[LinkTime]:
        """The times of ranks on several nodes; empty on a single node."""
        return [time for time in self.links if time.across_nodes]

    def or_shorter(self, other: "Measurements") -> "Measurements":
        """Return these measurements, with the times of others where those are shorter."""
        pairs = zip(self.links, other.links, strict=True)
        links = [min(pair, key=lambda time: time.seconds) for pair in pairs]
        return replace(self, links=links)
