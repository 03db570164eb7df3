"""Assembly of logical tensors from the pieces on the ranks of one stage.

Each rank assembles a share of the tensors, so that all ranks write files at the same time. All
buffers are in host memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.sharding import Sharding, sharding_of
from threefold.checkpoint.state import KINDS, Fragment, TrainingState

Flats = Sequence[Mapping[str, Tensor]]  # TrainingState.tensors: kind -> elements of each flat


@dataclass(frozen=True)
class Piece:
    """The piece of a parameter that one rank of the stage sends."""

    rank: int  # in the stage's group
    tensor_rank: int
    fragment: Fragment


class Assembly:
    """Plan for assembling logical tensors from the pieces of a stage's ranks; the same every save.

    The constructor communicates: an all-gather of the parameters and the fragments' addresses
    within the stage.

    Args:
        state: this rank's share of weights and moments
        group: the ranks of this stage, communicating through host memory
        tensor_rank: this rank's index in its tensor group
        tensor_size: number of tensor ranks
        copy: which copy of its shards this rank holds
        copies: number of copies of each shard (hybrid sharding); they share the sending
    """

    def __init__(
        self,
        state: TrainingState,
        group: dist.ProcessGroup,
        *,
        tensor_rank: int,
        tensor_size: int,
        copy: int = 0,
        copies: int = 1,
    ):
        self.group, self.tensor_size = group, tensor_size
        self.rank = dist.get_rank(group)
        self.shardings: dict[str, Sharding] = {
            name: sharding_of(parameter)
            for name, parameter in state.parameters.items()
            # Another stage holds the original of a replicated (tied) parameter.
            if not getattr(parameter, "ds_pipe_replicated", False)
        }
        sent = {n for number, n in enumerate(self.shardings) if number % copies == copy}
        own = [
            Piece(self.rank, tensor_rank, fragment)
            for fragment in state.fragments
            if fragment.name in sent
            and (tensor_rank == 0 or not self.shardings[fragment.name].replicated)
        ]
        everyones: list[Any] = [None] * dist.get_world_size(group)
        kinds = {name: state.kinds(name) for name in self.shardings}
        dist.all_gather_object(everyones, (self.shardings, kinds, own), group=group)
        self.shardings = {}
        self.kinds: dict[str, tuple[str, ...]] = {}
        for shardings, kinds, _ in everyones:  # ranks may hold different experts
            self.shardings |= shardings
            self.kinds |= kinds
        self.pieces: dict[str, list[Piece]] = {name: [] for name in self.shardings}
        for *_, pieces in everyones:
            for piece in pieces:
                self.pieces[piece.fragment.name].append(piece)
        shapes = {name: sharding.shape for name, sharding in self.shardings.items()}
        self.owners = assign_owners(shapes, dist.get_world_size(group))
        self.numbers = {name: number for number, name in enumerate(self.shardings)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the logical tensors that this rank assembles, in order of assembly."""
        return {
            name: sharding.shape
            for name, sharding in self.shardings.items()
            if self.owners[name] == self.rank
        }

    def shapes_of(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return the `shapes` of the tensors that have a kind of state."""
        return {name: shape for name, shape in self.shapes.items() if kind in self.kinds[name]}

    def send(self, flats: Flats) -> list[dist.Work]:
        """Begin to send this rank's pieces of tensors that other ranks assemble."""
        works = [
            dist.isend(
                _elements(flats, kind, piece.fragment),
                group=self.group,
                group_dst=self.owners[name],
                tag=self._tag(kind, name),
            )
            for kind in KINDS
            for name, pieces in self.pieces.items()
            for piece in pieces
            if kind in self.kinds[name] and piece.rank == self.rank != self.owners[name]
        ]
        return [work for work in works if work is not None]

    def receive(self, kind: str, flats: Flats) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, logical tensor) for the tensors that this rank assembles, one at a time.

        The caller must exhaust the iterators of all kinds, because other ranks wait until their
        messages have arrived.
        """
        for name in self.shapes_of(kind):
            yield name, self._put_together(kind, name, flats)

    def _put_together(self, kind: str, name: str, flats: Flats) -> Tensor:
        sharding = self.shardings[name]
        holders = 1 if sharding.dimension is None else self.tensor_size
        parts = [torch.empty(sharding.local_shape(self.tensor_size)) for _ in range(holders)]
        receiving = []
        for piece in self.pieces[name]:
            elements = piece.fragment.elements
            part = parts[0 if sharding.dimension is None else piece.tensor_rank]
            destination = part.view(-1)[elements.start : elements.stop]
            if piece.rank == self.rank:
                destination.copy_(_elements(flats, kind, piece.fragment))
                continue
            receiving.append(
                dist.irecv(
                    destination,
                    group=self.group,
                    group_src=piece.rank,
                    tag=self._tag(kind, name),
                )
            )
        for work in receiving:
            if work is not None:
                work.wait()
        return sharding.logical_tensor(parts)

    def _tag(self, kind: str, name: str) -> int:
        """Return the tag of a piece's message, which is unique between two ranks in a save."""
        return KINDS.index(kind) * len(self.numbers) + self.numbers[name]


def _elements(flats: Flats, kind: str, fragment: Fragment) -> Tensor:
    return flats[fragment.flat][kind].narrow(0, fragment.offset, len(fragment.elements))


def assign_owners(shapes: Mapping[str, tuple[int, ...]], owners: int) -> dict[str, int]:
    """Assign each tensor to the owner, 0 .. owners - 1, with the fewest elements so far."""
    load = [0] * owners
    owner_of = {}
    for name, shape in shapes.items():
        owner_of[name] = load.index(min(load))
        load[owner_of[name]] += math.prod(shape)
    return owner_of
