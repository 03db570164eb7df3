"""Rank <-> (pipeline, data, tensor), and which rank the launcher made this process."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from models.errors import UserError


@dataclass(frozen=True)
class World:
    """The processes of a run, as one of them sees it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this node
    local_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "World":
        """Read the variables of `deepspeed`, `torchrun` or a plain `srun` (one task per GPU).

        If none are set, the world is this one process.

        Raises:
            UserError: a variable is not a number, or the numbers contradict each other.
        """
        for rank, size, local_rank, local_sizes in (
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
            (
                "SLURM_PROCID",
                "SLURM_NTASKS",
                "SLURM_LOCALID",
                ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
            ),
        ):
            if rank in environment and size in environment:
                local_size = next((key for key in local_sizes if key in environment), size)
                world = cls(
                    rank=_number(environment, rank),
                    size=_number(environment, size),
                    local_rank=_number(environment, local_rank) if local_rank in environment else 0,
                    local_size=_number(environment, local_size, or_list=True),
                )
                if not (world.rank < world.size and world.local_rank < world.size):
                    raise UserError(
                        f"{rank} = {world.rank} and {local_rank} = {world.local_rank} are not "
                        f"both below {size} = {world.size}; use numbers below it, or unset all "
                        f"three"
                    )
                if not world.local_size:
                    raise UserError(f"{local_size} = {environment[local_size]}; use 1 or more")
                return world
        return cls()


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on the three axes."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """The three axes: tensor innermost (inside a node), data between, pipeline outermost.

    The same order as DeepSpeed's PipeModelDataParallelTopology.
    """

    pipeline: int
    data: int
    tensor: int

    @classmethod
    def for_world(cls, world_size: int, *, pipeline: int, tensor: int) -> "Topology":
        """Data parallelism takes what pipeline and tensor leave of the world.

        Raises:
            UserError: they do not divide it.
        """
        if world_size % (pipeline * tensor):
            raise UserError(
                f"layout.tensor = {tensor} x layout.pipeline = {pipeline} does not divide the "
                f"world of {world_size} ranks; use {pipeline * tensor} ranks or a multiple, or "
                f"a layout whose product divides {world_size}, such as "
                f"layout.tensor = 1 and layout.pipeline = {_divisor(world_size, pipeline)}"
            )
        return cls(pipeline=pipeline, data=world_size // (pipeline * tensor), tensor=tensor)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pipeline * self.data * self.tensor

    def rank(self, place: Coordinates) -> int:
        """The global rank at a place."""
        return (place.pipeline * self.data + place.data) * self.tensor + place.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank."""
        outer, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(outer, self.data)
        return Coordinates(pipeline=pipeline, data=data, tensor=tensor)

    def tensor_groups(self) -> list[list[int]]:
        """The global ranks of every tensor group."""
        return [
            list(range(first, first + self.tensor))
            for first in range(0, self.world_size, self.tensor)
        ]

    def stage_groups(self) -> list[list[int]]:
        """The global ranks of every stage."""
        ranks = self.data * self.tensor
        return [list(range(first, first + ranks)) for first in range(0, self.world_size, ranks)]


def check_placement(topology: Topology, hosts: Sequence[str]) -> None:
    """Refuse tensor groups that cross nodes.

    hosts: of all ranks, by rank

    Raises:
        UserError: the launcher has not put neighbouring ranks on the same node.
    """
    for ranks in topology.tensor_groups():
        there = sorted({hosts[rank] for rank in ranks})
        if len(there) > 1:
            raise UserError(
                f"the tensor group of the ranks {ranks[0]} .. {ranks[-1]} is spread over "
                f"{' and '.join(there)}; start neighbouring ranks on one node (srun "
                f"--distribution=block), or use a smaller layout.tensor"
            )


def rank_map(topology: Topology, hosts: Sequence[str]) -> list[str]:
    """Who has which part, a line for each node.

    hosts: of all ranks, by rank
    """
    lines = []
    for host, group in groupby(range(len(hosts)), key=hosts.__getitem__):
        ranks = list(group)
        places = [topology.coordinates(rank) for rank in ranks]
        parts = [
            f"{axis} {_span([getattr(place, axis) for place in places])}"
            for axis in ("pipeline", "data", "tensor")
        ]
        lines.append(f"{host}: rank {_span(ranks)}: {', '.join(parts)}")
    return lines


def _number(environment: Mapping[str, str], name: str, *, or_list: bool = False) -> int:
    """Read a whole number from an environment variable.

    Args:
        environment: the variables
        name: the variable
        or_list: take the first number of Slurm's tasks per node, such as "8(x4)" or "4,2"

    Raises:
        UserError: the variable holds something else.
    """
    found = re.match(r"([0-9]{1,9})(?:$|[(,])" if or_list else r"([0-9]{1,9})$", environment[name])
    if not found:
        raise UserError(
            f'{name} = "{environment[name]}" is not a whole number; let deepspeed, torchrun or '
            f"srun set it, or unset it"
        )
    return int(found[1])


def _span(numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    return f"{first}" if first == last else f"{first} .. {last}"


def _divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is no larger than `at_most`."""
    return max(d for d in range(1, at_most + 1) if number % d == 0)
