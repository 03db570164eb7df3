"""Gather matrices from the shards of several ranks, orthogonalize them, and return the results."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from models.cost import MUON_BATCH_ELEMENTS, MUON_ROUND_ELEMENTS
from models.parallel.collectives import TensorAxis, wait_for
from models.sharding import MatrixPart, Sharding, sharding_of
from threefold.checkpoint.state import Fragment, TrainingState
from threefold.engine.optimizer import orthogonalize
from threefold.pipeline.balance import packed
from threefold.runtime.processes import gathered

# Plan of the exchange that gathers logical matrices from the shards of an optimizer's state.
#
# A *piece* is a range of a matrix that one rank has in one of its flat tensors. Each matrix has an
# *owner*, the rank that gathers its pieces, orthogonalizes it, and returns the pieces of the
# result. Matrices are exchanged in rounds, so that the buffers of a round stay small.


@dataclass(frozen=True)
class Shard:
    """Consecutive elements of a parameter that a rank holds.

    Attributes:
        fragment: the elements, and their place in the rank's flat tensors
    """

    fragment: Fragment
    sharding: Sharding
    tensor_rank: int


@dataclass(frozen=True)
class MatrixPiece:
    """Consecutive elements of a tensor rank's part of a matrix, which one rank holds.

    Attributes:
        rank: the rank in the group that holds the piece
        flat: index of the rank's flat tensor that contains the piece
        offset: index of the first element in the flat tensor
        part: the tensor rank's part of the matrix
        copy: number of the copy of the matrix; tensor ranks may hold a copy each
        start: index of the first element within the part
    """

    rank: int
    flat: int
    offset: int
    part: MatrixPart
    start: int
    length: int
    copy: int = 0


@dataclass
class Matrix:
    """A logical matrix and its pieces, in the order of ranks and elements.

    Attributes:
        shape: rows and columns
        flat: index of the flat tensor that holds the pieces, the same on all ranks
    """

    shape: tuple[int, int]
    flat: int
    pieces: list[MatrixPiece] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    @property
    def cost(self) -> int:
        """Relative cost of a Newton-Schulz iteration: the multiply-adds of its three products."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)


@dataclass(frozen=True)
class Round:
    """A round from the perspective of one rank.

    Attributes:
        sent: the pieces that the rank holds, by owner, in the order of the message
        received: the pieces of the owned matrices, by holder, in the order of the message
    """

    owned: Sequence[Matrix]
    sent: Sequence[Sequence[MatrixPiece]]
    received: Sequence[Sequence[MatrixPiece]]

    @classmethod
    def of_rank(cls, rank: int, owned: Sequence[Sequence[Matrix]]) -> "Round":
        """Return the round of a rank, given the matrices of each owner."""
        sent = [
            [piece for matrix in matrices for piece in matrix.pieces if piece.rank == rank]
            for matrices in owned
        ]
        received: list[list[MatrixPiece]] = [[] for _ in owned]
        for matrix in owned[rank]:
            for piece in matrix.pieces:
                received[piece.rank].append(piece)
        return cls(owned[rank], sent, received)


def sizes(messages: Sequence[Sequence[MatrixPiece]]) -> list[int]:
    """Return the number of elements of each message."""
    return [sum(piece.length for piece in message) for message in messages]


def matrices_of(shards: Sequence[Sequence[Shard]], tensor_size: int) -> list[Matrix]:
    """Return the matrices that ranks hold together, in an order that all ranks agree on."""
    matrices: dict[tuple[str, int], Matrix] = {}
    for rank, own in enumerate(shards):
        for shard in own:
            tensor = TensorAxis(rank=shard.tensor_rank, size=tensor_size)
            parts = shard.sharding.matrix_parts(tensor)
            for number, part in enumerate(parts):
                piece = _piece(rank, shard, part)
                if piece.length <= 0:
                    continue
                key = shard.fragment.name, number
                matrix = matrices.setdefault(key, Matrix(part.shape, piece.flat))
                assert matrix.flat == piece.flat, "the ranks divide the parameters differently"
                matrix.pieces.append(piece)
    for (name, number), matrix in matrices.items():
        held = sum(piece.length for piece in matrix.pieces)
        expected = matrix.elements * len({piece.copy for piece in matrix.pieces})
        assert held == expected, f"{held} of {expected} elements: {name}, {number}"
    return [matrices[key] for key in sorted(matrices, key=lambda key: (matrices[key].flat, *key))]


def _piece(rank: int, shard: Shard, part: MatrixPart) -> MatrixPiece:
    fragment = shard.fragment
    first = max(fragment.elements.start, part.elements.start)
    last = min(fragment.elements.stop, part.elements.stop)
    return MatrixPiece(
        rank=rank,
        flat=fragment.flat,
        offset=fragment.offset + first - fragment.elements.start,
        part=part,
        start=first - part.elements.start,
        length=last - first,
        copy=shard.tensor_rank if shard.sharding.replicated else 0,
    )


def owners_by_round(matrices: Iterable[Matrix], ranks: int) -> list[list[list[Matrix]]]:
    """Divide matrices into rounds, and assign each to the owner with the least work so far.

    Of several such owners, the one that holds most of the matrix is chosen. Within a round, the
    most expensive matrices are assigned first.

    Returns:
        For each round, the matrices of each owner.
    """
    load = [0] * ranks
    rounds: list[list[list[Matrix]]] = []
    for together in packed(matrices, lambda each: each.elements, MUON_ROUND_ELEMENTS * ranks):
        owned: list[list[Matrix]] = [[] for _ in range(ranks)]
        for matrix in sorted(together, key=lambda each: -each.cost):
            held: Counter[int] = Counter()  # elements of the matrix, by the rank that holds them
            for piece in matrix.pieces:
                held[piece.rank] += piece.length
            owner = min(range(ranks), key=lambda rank: (load[rank], -held[rank]))
            owned[owner].append(matrix)
            load[owner] += matrix.cost
        rounds.append(owned)
    return rounds


ADAMW_UPDATE_RMS = 0.2  # typical root mean square of AdamW's updates (Moonlight, section 2.2)


@dataclass(frozen=True)
class _Running:
    """The all-to-all of a round that runs in the background: its result, input and handle."""

    received: Tensor
    sent: Tensor
    work: dist.Work | None


class MatrixExchange:
    """Orthogonalizes logical matrices that are sharded over ranks, each matrix on one rank.

    The constructor communicates: an all-gather of the addresses of all shards.

    Communication of a call: in each round, an all-to-all to the owners of the matrices and one
    back. Both run in the background: the first one during `meanwhile` or the computation of the
    previous round, the second one during the computation of the next round.

    Args:
        group: the ranks that hold one copy of the optimizer state of a stage; None: only this rank
        dtype: type in which matrices are sent and orthogonalized
    """

    def __init__(
        self,
        state: TrainingState,
        group: dist.ProcessGroup | None,
        *,
        tensor: TensorAxis,
        dtype: torch.dtype,
    ):
        self.group, self.dtype = group, dtype
        own = [
            Shard(fragment, sharding_of(state.parameters[fragment.name]), tensor.rank)
            for fragment in state.fragments
            if sharding_of(state.parameters[fragment.name]).role == "hidden"
        ]
        shards = [own] if group is None else gather_shards(own, state, group)
        self.ranks = len(shards)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.flats = {id(flat): number for number, flat in enumerate(state.weights)}
        self.matrices = matrices_of(shards, tensor.size)
        self.rounds: dict[tuple[int, ...], list[Round]] = {}

    @torch.no_grad()
    def __call__(self, flats: Mapping[int, Tensor], meanwhile: Callable[[], None]) -> None:
        """Replace the matrices in the flat tensors by their scaled, orthogonalized values.

        Args:
            flats: this rank's shard of each flat tensor, by `id` of the tensor of its weights
            meanwhile: function to call while the elements of the first round are exchanged
        """
        held = {self.flats[key]: values for key, values in flats.items()}
        key = tuple(sorted(held))
        if key not in self.rounds:
            matrices = [matrix for matrix in self.matrices if matrix.flat in key]
            owners = owners_by_round(matrices, self.ranks)
            self.rounds[key] = [Round.of_rank(self.rank, owned) for owned in owners]
        rounds = self.rounds[key]
        coming = self._send(rounds[0], held) if rounds else None
        meanwhile()
        returning: tuple[Round, _Running] | None = None
        for number, current in enumerate(rounds):
            assert coming is not None
            running, coming = coming, None
            if number + 1 < len(rounds):
                coming = self._send(rounds[number + 1], held)
            self._orthogonalize(current, _finished(running))
            if returning is not None:
                self._store(*returning, held)
            # Send the results, which have replaced the received pieces, to their holders.
            back = self._exchange(running.received, current.received, current.sent)
            returning = current, back
        if returning is not None:
            self._store(*returning, held)

    def _send(self, current: Round, held: Mapping[int, Tensor]) -> _Running:
        """Begin to send this rank's pieces to the owners."""
        device = next(iter(held.values())).device
        sent = torch.empty(sum(sizes(current.sent)), dtype=self.dtype, device=device)
        for values, part in _in_place(current, sent, held):
            part.copy_(values)
        return self._exchange(sent, current.sent, current.received)

    def _exchange(
        self,
        sent: Tensor,
        messages: Sequence[Sequence[MatrixPiece]],
        answers: Sequence[Sequence[MatrixPiece]],
    ) -> _Running:
        if self.group is None:
            return _Running(sent, sent, None)
        received = sent.new_empty(sum(sizes(answers)))
        work = dist.all_to_all_single(
            received, sent, sizes(answers), sizes(messages), group=self.group, async_op=True
        )
        return _Running(received, sent, work)

    def _store(self, current: Round, running: _Running, held: Mapping[int, Tensor]) -> None:
        """Wait for the results, and copy them into the flat tensors."""
        for values, part in _in_place(current, _finished(running), held):
            values.copy_(part)

    def _orthogonalize(self, current: Round, buffer: Tensor) -> None:
        """Replace the pieces in the buffer by those of the scaled, orthogonalized matrices."""
        received = list(chain.from_iterable(current.received))
        split = buffer.split([piece.length for piece in received])
        places = {id(piece): values for piece, values in zip(received, split, strict=True)}
        for together in _batches(current.owned):
            matrices = torch.stack([_assembled(matrix, places, buffer) for matrix in together])
            updates = orthogonalize(matrices).mul_(update_scale(together[0].shape))
            for matrix, update in zip(together, updates, strict=True):
                _take_apart(matrix, update, places)


def gather_shards(
    own: list[Shard], state: TrainingState, group: dist.ProcessGroup
) -> list[list[Shard]]:
    """Return the shards of each rank of a group; collective.

    `plan.py trace`, which simulates one rank, replaces this function; it reads `state`.
    """
    return gathered(own, group)


def update_scale(shape: tuple[int, int]) -> float:
    """Return the factor that gives an orthogonal matrix the root mean square of AdamW's updates.

    Moonlight (arXiv 2502.16982), equation 4.
    """
    return ADAMW_UPDATE_RMS * sqrt(max(shape))


def _batches(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """Yield matrices of equal shape that are orthogonalized together."""
    for shape, group in groupby(sorted(matrices, key=lambda m: m.shape), lambda m: m.shape):
        of_shape = list(group)
        count = max(1, MUON_BATCH_ELEMENTS // (shape[0] * shape[1]))
        for first in range(0, len(of_shape), count):
            yield of_shape[first : first + count]


def _assembled(matrix: Matrix, places: Mapping[int, Tensor], like: Tensor) -> Tensor:
    """Return a matrix from its pieces, given the values of each piece by its `id`.

    Copies of the matrix on several tensor ranks are equal. All of them get the same result.
    """
    whole = like.new_empty(matrix.shape)
    for pieces in _by_part(matrix):
        part = pieces[0].part
        values = torch.cat([places[id(piece)] for piece in pieces])
        region = whole[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
        region.copy_(values.view(len(part.rows), len(part.columns)))
    return whole


def _take_apart(matrix: Matrix, update: Tensor, places: Mapping[int, Tensor]) -> None:
    """Copy the pieces of a matrix to their places in the buffer, given by the `id` of the piece."""
    for pieces in _by_part(matrix):
        part = pieces[0].part
        region = update[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
        values = region.reshape(-1)
        for piece in pieces:
            places[id(piece)].copy_(values[piece.start : piece.start + piece.length])


def _in_place(
    current: Round, buffer: Tensor, held: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two views of each piece of this rank: in its flat tensor, and in a message buffer.

    buffer: pieces to send, or the results that have returned, in the same order
    """
    sent = list(chain.from_iterable(current.sent))
    for piece, part in zip(sent, buffer.split([piece.length for piece in sent]), strict=True):
        yield held[piece.flat][piece.offset : piece.offset + piece.length], part


def _by_part(matrix: Matrix) -> Iterator[list[MatrixPiece]]:
    """Yield the pieces of each tensor rank's part or copy, in the order of its elements."""

    def place(piece: MatrixPiece) -> tuple[int, int, int]:
        return piece.copy, piece.part.rows.start, piece.part.columns.start

    ordered = sorted(matrix.pieces, key=lambda piece: (*place(piece), piece.start))
    for _, pieces in groupby(ordered, place):
        yield list(pieces)


def _finished(running: _Running) -> Tensor:
    """Wait for an exchange and return what has arrived."""
    if running.work is not None:
        wait_for(running.work)
    return running.received
