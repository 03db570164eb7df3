"""The sizes and ranks of the parallel axes, and the rank that the launcher gave this process."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

from models.errors import SharedError, UserError
from threefold.config.layout import Layout


@dataclass(frozen=True)
class LaunchEnvironment:
    """The processes of a run, as one of them sees it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this node
    local_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LaunchEnvironment":
        """Read the variables of `deepspeed`, `torchrun` or a plain `srun` (one task per GPU).

        If none are set, the world is this one process.

        Raises:
            UserError: a variable is not a number, or the numbers contradict each other.
        """
        for rank_key, size_key, local_rank_key, local_size_keys in (
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
            (
                "SLURM_PROCID",
                "SLURM_NTASKS",
                "SLURM_LOCALID",
                ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
            ),
        ):
            if rank_key in environment and size_key in environment:
                local_size_key = next(
                    (key for key in local_size_keys if key in environment), size_key
                )
                is_local_rank_known = local_rank_key in environment
                world = cls(
                    rank=_number(environment, rank_key),
                    size=_number(environment, size_key),
                    local_rank=_number(environment, local_rank_key) if is_local_rank_known else 0,
                    local_size=_number(environment, local_size_key, or_list=True),
                )
                if not (world.rank < world.size and world.local_rank < world.size):
                    raise UserError(
                        f"{rank_key} = {world.rank} and {local_rank_key} = {world.local_rank} are "
                        f"not both below {size_key} = {world.size}; use numbers below it, or unset "
                        f"all three"
                    )
                if not world.local_size:
                    raise UserError(
                        f"{local_size_key} = {environment[local_size_key]}; use 1 or more"
                    )
                return world
        return cls()


# The axes that number the ranks, from the outermost in: the ranks of a tensor group are neighbours.
AXES = ("pipeline", "data", "context", "tensor")
ALWAYS_SHOWN = ("pipeline", "data", "tensor")  # in texts; other axes only if they divide something
# The order of the axes in the texts about layouts.
IN_TEXTS = ("tensor", "pipeline", *(axis for axis in AXES if axis not in ALWAYS_SHOWN), "data")


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """A rank's index on each axis of AXES."""

    pipeline: int = 0
    data: int = 0
    context: int = 0
    tensor: int = 0


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the parallel axes, and the ranks of their groups.

    With pipeline = data = tensor = 2, the eight ranks are

        rank      0  1  2  3  4  5  6  7
        pipeline  0  0  0  0  1  1  1  1
        data      0  0  1  1  0  0  1  1
        tensor    0  1  0  1  0  1  0  1

    To DeepSpeed, context ranks are data ranks.

    Attributes:
        expert: neighbouring data and context ranks that divide the experts; they have the same
            other weights
        expert_tensor: tensor ranks that divide the columns of each expert: 1, or all of them
        dp_shard: neighbouring data and context ranks that divide the optimizer state; 0: all
    """

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    dp_shard: int = 0

    @classmethod
    def of_layout(cls, layout: Layout, world_size: int) -> "ParallelDims":
        """Return the sizes of a layout, whose data axis takes what the other axes leave.

        `Recipe.parallel_dims` has checked that the other axes divide the world.
        """
        sizes = {name: getattr(layout, name) for name in SIZES if name != "data"}
        others = cls(**sizes).world_size
        assert world_size % others == 0 == world_size // others * layout.context % layout.expert
        return cls(data=world_size // others, **sizes)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pipeline * self.dp_cp_size * self.tensor

    @property
    def dp_cp_size(self) -> int:
        """Ranks with the same part of the model, over which ZeRO divides: data x context."""
        return self.data * self.context

    @property
    def ep_size(self) -> int:
        """Ranks that have different experts and exchange tokens."""
        return self.expert * self.tensor // self.expert_tensor

    @property
    def dp_shard_size(self) -> int:
        """Ranks that divide the optimizer state."""
        return self.dp_shard or self.dp_cp_size

    @property
    def is_hsdp(self) -> bool:
        """True if several groups of ranks hold the same shards (hybrid sharding)."""
        return self.dp_shard_size < self.dp_cp_size

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every axis by name, also of those that divide only experts or shards."""
        return {name: getattr(self, name) for name in SIZES}

    @property
    def shown_sizes(self) -> dict[str, int]:
        """Sizes of AXES by name; an axis that few recipes have only if its size is above 1."""
        sizes = {name: getattr(self, name) for name in AXES}
        return {name: size for name, size in sizes.items() if name in ALWAYS_SHOWN or size > 1}

    @property
    def optional_sizes(self) -> list[str]:
        """The sizes above 1 of axes that few recipes have: ["context 2", "expert 4"]."""
        names = [name for name in SIZES if name not in (*ALWAYS_SHOWN, "dp_shard")]
        sizes = {name.replace("_", " "): getattr(self, name) for name in names}
        return [f"{name} {size}" for name, size in sizes.items() if size > 1]

    @property
    def text(self) -> str:
        """The sizes for a report: "tensor 2 x pipeline 1 x data 4, expert 2"."""
        axes = [f"{axis} {self.shown_sizes[axis]}" for axis in IN_TEXTS if axis in self.shown_sizes]
        experts = [size for size in self.optional_sizes if size not in axes]
        return ", ".join([" x ".join(axes), *experts])

    @property
    def layout_keys(self) -> dict[str, int]:
        """The keys of [layout] that result in these sizes."""
        keys = {name: size for name, size in self.sizes.items() if name in Layout.model_fields}
        return keys | {"expert_tensor_parallel": self.expert_tensor > 1}

    @property
    def lockstep_size(self) -> int:
        """Number of neighbouring ranks that wait for each other in every layer."""
        return math.lcm(self.context, self.expert) * self.tensor

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.shown_sizes.items())

    def rank(self, coordinates: Coordinates) -> int:
        """Return the global rank at some coordinates."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + getattr(coordinates, axis)
        return rank

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank."""
        indices = {}
        for axis in reversed(AXES):
            rank, indices[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**indices)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the global ranks of every group whose ranks differ only in these axes.

        Groups are in the order of their first ranks. groups("context") are the ranks that divide
        the same sequences; `stages` has the groups of all axes but the pipeline.
        """
        groups = [[0]]
        stride = self.world_size
        for axis in AXES:
            size = getattr(self, axis)
            stride //= size
            steps = range(0, stride * size, stride)
            if axis in axes:
                groups = [[rank + step for rank in ranks for step in steps] for ranks in groups]
            else:
                groups = [[rank + step for rank in ranks] for ranks in groups for step in steps]
        return groups

    def expert_groups(self) -> list[list[int]]:
        """Return the global ranks of every group whose ranks have different experts of a layer.

        With expert tensor parallelism these are ranks with the same tensor rank.
        """
        neighbours = self._neighbours(self.expert * self.tensor)
        parts = range(self.expert_tensor)
        return [ranks[n :: self.expert_tensor] for ranks in neighbours for n in parts]

    def expert_data_groups(self) -> list[list[int]]:
        """Return the ranks of every group that has the same experts, or the same parts of them."""
        return self._strided(self.expert * self.tensor)

    def dp_shard_groups(self) -> list[list[int]]:
        """Return the ranks of every group that divides optimizer state, in the order of shards."""
        copies = self.optimizer_groups()
        return [ranks[n :: self.tensor] for ranks in copies for n in range(self.tensor)]

    def stages(self) -> list[list[int]]:
        """Return the ranks of every pipeline stage."""
        return self.groups(*(axis for axis in AXES if axis != "pipeline"))

    def optimizer_groups(self) -> list[list[int]]:
        """Return the ranks of every group that holds one copy of a stage's optimizer state."""
        return self._neighbours(self.dp_shard_size * self.tensor)

    def dp_replicate_groups(self) -> list[list[int]]:
        """Return the global ranks of every group that holds the same shard."""
        return self._strided(self.dp_shard_size * self.tensor)

    def copy_of_shards(self, rank: int) -> tuple[int, int]:
        """Return which copy of its shard a rank holds, and the number of copies."""
        copy = rank // self.tensor % self.dp_cp_size // self.dp_shard_size
        return copy, self.dp_cp_size // self.dp_shard_size

    def _neighbours(self, size: int) -> list[list[int]]:
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def _strided(self, stride: int) -> list[list[int]]:
        """Return the ranks of a stage that are a multiple of `stride` apart, for every stage."""
        stages = self.stages()
        return [ranks[first::stride] for ranks in stages for first in range(stride)]


SIZES = tuple(dict.fromkeys((*IN_TEXTS, *(field.name for field in fields(ParallelDims)))))


def check_placement(dims: ParallelDims, hosts: Sequence[str]) -> None:
    """Reject tensor groups that cross nodes.

    hosts: of all ranks, by rank

    Raises:
        UserError: the launcher has not put neighbouring ranks on the same node.
    """
    for ranks in dims.groups("tensor"):
        nodes = sorted({hosts[rank] for rank in ranks})
        if len(nodes) > 1:
            raise SharedError(
                f"the tensor group of the ranks {ranks[0]} .. {ranks[-1]} is spread over "
                f"{' and '.join(nodes)}; start neighbouring ranks on one node (srun "
                f"--distribution=block), or use a smaller layout.tensor"
            )


def rank_map(dims: ParallelDims, hosts: Sequence[str]) -> list[str]:
    """Return the ranks of each node and their coordinates, a line for each node.

    hosts: of all ranks, by rank
    """
    lines = []
    for host, group in groupby(range(len(hosts)), key=hosts.__getitem__):
        ranks = list(group)
        places = [dims.coordinates(rank) for rank in ranks]
        spans = [
            f"{axis} {_span([getattr(rank, axis) for rank in places])}" for axis in dims.shown_sizes
        ]
        lines.append(f"{host}: rank {_span(ranks)}: {', '.join(spans)}")
    return lines


def _number(environment: Mapping[str, str], name: str, *, or_list: bool = False) -> int:
    """Read a whole number from an environment variable.

    Args:
        or_list: take the first number of Slurm's tasks per node, such as "8(x4)" or "4,2"

    Raises:
        UserError: the variable holds something else.
    """
    match = re.match(r"([0-9]{1,9})(?:$|[(,])" if or_list else r"([0-9]{1,9})$", environment[name])
    if not match:
        raise UserError(
            f'{name} = "{environment[name]}" is not a whole number; let deepspeed, torchrun or '
            f"srun set it, or unset it"
        )
    return int(match[1])


def _span(numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    return f"{first}" if first == last else f"{first} .. {last}"
