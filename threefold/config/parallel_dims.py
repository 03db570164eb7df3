"""Rank <-> (pipeline, data, context, tensor), and the rank that the launcher gave this process."""

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
    """A rank's index on each axis."""

    pipeline: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes, from the outermost in: pipeline, data, context, tensor (inside a node).

    To DeepSpeed, context ranks are data ranks: its PipeModelDataParallelTopology has the same order
    with `replicas` data ranks. `expert` is the number of neighbouring replicas that divide the
    experts; all their other weights are the same. `expert_tensor` is the number of tensor ranks
    that divide each expert: 1, or all of them. `dp_shard` is the number of neighbouring replicas
    that divide the optimizer state; 0: all of them.
    """

    pipeline: int
    data: int
    tensor: int
    context: int = 1
    expert: int = 1
    dp_shard: int = 0
    expert_tensor: int = 1

    @classmethod
    def for_world(
        cls,
        world_size: int,
        *,
        pipeline: int,
        tensor: int,
        context: int = 1,
        expert: int = 1,
        dp_shard: int = 0,
        expert_tensor: int = 1,
    ) -> "Topology":
        """Return a topology whose data axis takes what the other axes, a divisor, leave.

        `Recipe.topology` checks that the axes divide the world, and the shard group the replicas.
        """
        given = pipeline * tensor * context
        assert world_size % given == 0 == world_size // (pipeline * tensor) % expert
        return cls(
            pipeline=pipeline,
            data=world_size // given,
            tensor=tensor,
            context=context,
            expert=expert,
            dp_shard=dp_shard,
            expert_tensor=expert_tensor,
        )

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pipeline * self.replicas * self.tensor

    @property
    def replicas(self) -> int:
        """Ranks with the same part of the model, over which ZeRO divides: data x context."""
        return self.data * self.context

    @property
    def exchanging_ranks(self) -> int:
        """Ranks that have different experts and exchange tokens."""
        return self.expert * self.tensor // self.expert_tensor

    @property
    def is_hybrid(self) -> bool:
        """True if several groups of replicas hold the same shards (hybrid sharding)."""
        return 0 < self.dp_shard < self.replicas

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes by name, without a context axis of size 1."""
        sizes = {"pipeline": self.pipeline, "data": self.data, "context": self.context}
        return {name: n for name, n in sizes.items() if name != "context" or n > 1} | {
            "tensor": self.tensor
        }

    def rank(self, place: Coordinates) -> int:
        """The global rank at a place."""
        replica = (place.pipeline * self.data + place.data) * self.context + place.context
        return replica * self.tensor + place.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank."""
        outer, tensor = divmod(rank, self.tensor)
        outer, context = divmod(outer, self.context)
        pipeline, data = divmod(outer, self.data)
        return Coordinates(pipeline=pipeline, data=data, tensor=tensor, context=context)

    def tensor_groups(self) -> list[list[int]]:
        """The global ranks of every tensor group."""
        return self._neighbours(self.tensor)

    def context_groups(self) -> list[list[int]]:
        """The global ranks of every context group, which share their samples."""
        span = self.context * self.tensor
        return [
            list(range(first + tensor, first + span, self.tensor))
            for first in range(0, self.world_size, span)
            for tensor in range(self.tensor)
        ]

    def expert_groups(self) -> list[list[int]]:
        """The global ranks of every group whose ranks have different experts of the same layers.

        With expert tensor parallelism these are ranks with the same tensor rank.
        """
        groups = self._neighbours(self.expert * self.tensor)
        if self.expert_tensor == 1:
            return groups
        return [ranks[tensor :: self.tensor] for ranks in groups for tensor in range(self.tensor)]

    def expert_data_groups(self) -> list[list[int]]:
        """The global ranks of every group that has the same experts, or the same parts of them."""
        span = self.expert * self.tensor
        return [
            list(range(ranks[0] + place, ranks[-1] + 1, span))
            for ranks in self.stage_groups()
            for place in range(span)
        ]

    def dp_shard_groups(self) -> list[list[int]]:
        """The global ranks of every group that divides optimizer state, in the order of shards."""
        span = (self.dp_shard or self.replicas) * self.tensor
        return [
            ranks[first + tensor : first + span : self.tensor]
            for ranks in self.stage_groups()
            for first in range(0, len(ranks), span)
            for tensor in range(self.tensor)
        ]

    def optimizer_groups(self) -> list[list[int]]:
        """The global ranks of every group that holds one copy of a stage's optimizer state."""
        return self._neighbours((self.dp_shard or self.replicas) * self.tensor)

    def dp_replicate_groups(self) -> list[list[int]]:
        """The global ranks of every group that holds the same shard."""
        span = (self.dp_shard or self.replicas) * self.tensor
        return [ranks[place::span] for ranks in self.stage_groups() for place in range(span)]

    def copy_of_shards(self, rank: int) -> tuple[int, int]:
        """Return which copy of its shard a rank holds, and the number of copies."""
        ranks = self.dp_shard or self.replicas
        place = self.coordinates(rank)
        return (place.data * self.context + place.context) // ranks, self.replicas // ranks

    def sequence_groups(self) -> list[list[int]]:
        """The global ranks of every group that holds tokens of the same sequences."""
        return self._neighbours(self.context * self.tensor)

    def _neighbours(self, size: int) -> list[list[int]]:
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def stage_groups(self) -> list[list[int]]:
        """The global ranks of every stage."""
        return self._neighbours(self.replicas * self.tensor)


def nearest_data_sizes(size: int, *, micro_batches: int, least: int) -> list[int]:
    """Return the largest data axis up to `size`, and the smallest one above it, that divide a step.

    Args:
        size: data ranks, possibly 0; sizes above 2 x size + 1 are not considered
        micro_batches: of a step, on all data ranks together
        least: of each data rank
    """
    most = micro_batches // least
    below = (n for n in range(min(size, most), 0, -1) if micro_batches % n == 0)
    above = (n for n in range(size + 1, min(2 * size + 1, most) + 1) if micro_batches % n == 0)
    return [n for n in (next(below, 0), next(above, 0)) if n]


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
            f"{axis} {_span([getattr(place, axis) for place in places])}" for axis in topology.axes
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
