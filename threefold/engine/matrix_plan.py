"""Plan of the exchange that gathers logical matrices from the shards of an optimizer's state.

A *piece* is a range of a matrix that one rank has in one of its flat tensors. Each matrix has an
*owner*, the rank that gathers its pieces, orthogonalizes it, and returns the pieces of the result.
Matrices are exchanged in rounds, so that the buffers of a round stay small.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from models.cost import MUON_ROUND_ELEMENTS
from models.sharding import MatrixPart, Sharding
from threefold.checkpoint.state import Fragment


@dataclass(frozen=True)
class Shard:
    """Consecutive elements of a parameter that a rank holds.

    Attributes:
        fragment: the elements, and their place in the rank's flat tensors
        sharding: the declaration of the parameter
        tensor_rank: rank along the tensor axis
    """

    fragment: Fragment
    sharding: Sharding
    tensor_rank: int


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a tensor rank's part of a matrix, which one rank holds.

    Attributes:
        rank: the rank in the group that holds the piece
        flat: index of the rank's flat tensor that contains the piece
        offset: index of the first element in the flat tensor
        part: the tensor rank's part of the matrix
        start: index of the first element within the part
        length: number of elements
    """

    rank: int
    flat: int
    offset: int
    part: MatrixPart
    start: int
    length: int


@dataclass
class Matrix:
    """A logical matrix and its pieces, in the order of ranks and elements.

    Attributes:
        shape: rows and columns
        flat: index of the flat tensor that holds the pieces, the same on all ranks
        pieces: the pieces
    """

    shape: tuple[int, int]
    flat: int
    pieces: list[Piece] = field(default_factory=list)

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
        owned: the matrices that the rank owns
        sent: the pieces that the rank holds, by owner, in the order of the message
        received: the pieces of the owned matrices, by holder, in the order of the message
    """

    owned: Sequence[Matrix]
    sent: Sequence[Sequence[Piece]]
    received: Sequence[Sequence[Piece]]

    @classmethod
    def of_rank(cls, rank: int, owned: Sequence[Sequence[Matrix]]) -> "Round":
        """Return the round of a rank, given the matrices of each owner."""
        sent = [
            [piece for matrix in matrices for piece in matrix.pieces if piece.rank == rank]
            for matrices in owned
        ]
        received: list[list[Piece]] = [[] for _ in owned]
        for matrix in owned[rank]:
            for piece in matrix.pieces:
                received[piece.rank].append(piece)
        return cls(owned[rank], sent, received)


def sizes(messages: Sequence[Sequence[Piece]]) -> list[int]:
    """Return the number of elements of each message."""
    return [sum(piece.length for piece in message) for message in messages]


def matrices_of(shards: Sequence[Sequence[Shard]], tensor_size: int) -> list[Matrix]:
    """Return the matrices that ranks hold together, in an order that all ranks agree on.

    Args:
        shards: the shards of each rank of the group
        tensor_size: number of tensor ranks
    """
    found: dict[tuple[str, int], Matrix] = {}
    for rank, own in enumerate(shards):
        for shard in own:
            parts = shard.sharding.matrix_parts(shard.tensor_rank, tensor_size)
            for number, part in enumerate(parts):
                piece = _piece(rank, shard.fragment, part)
                if piece.length <= 0:
                    continue
                key = shard.fragment.name, number
                matrix = found.setdefault(key, Matrix(part.shape, piece.flat))
                assert matrix.flat == piece.flat, "the ranks divide the parameters differently"
                matrix.pieces.append(piece)
    for (name, number), matrix in found.items():
        held = sum(piece.length for piece in matrix.pieces)
        assert held == matrix.elements, f"{held} of {matrix.elements} elements: {name}, {number}"
    return [found[key] for key in sorted(found, key=lambda key: (found[key].flat, *key))]


def _piece(rank: int, fragment: Fragment, part: MatrixPart) -> Piece:
    first = max(fragment.elements.start, part.elements.start)
    last = min(fragment.elements.stop, part.elements.stop)
    return Piece(
        rank=rank,
        flat=fragment.flat,
        offset=fragment.offset + first - fragment.elements.start,
        part=part,
        start=first - part.elements.start,
        length=last - first,
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
    for together in _filled(matrices, MUON_ROUND_ELEMENTS * ranks):
        owned: list[list[Matrix]] = [[] for _ in range(ranks)]
        for matrix in sorted(together, key=lambda each: -each.cost):
            held = _held(matrix)
            owner = min(range(ranks), key=lambda rank: (load[rank], -held.get(rank, 0)))
            owned[owner].append(matrix)
            load[owner] += matrix.cost
        rounds.append(owned)
    return rounds


def _held(matrix: Matrix) -> Mapping[int, int]:
    """Return the number of elements of a matrix by the rank that holds them."""
    held: dict[int, int] = {}
    for piece in matrix.pieces:
        held[piece.rank] = held.get(piece.rank, 0) + piece.length
    return held


def _filled(matrices: Iterable[Matrix], elements: int) -> Iterator[list[Matrix]]:
    """Yield consecutive matrices with at most `elements` elements together, or a single one."""
    together: list[Matrix] = []
    size = 0
    for matrix in matrices:
        if together and size + matrix.elements > elements:
            yield together
            together, size = [], 0
        together.append(matrix)
        size += matrix.elements
    if together:
        yield together
