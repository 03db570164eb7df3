"""Division of a source into pieces, which processes tokenize independently."""

from collections.abc import Sequence

from models.errors import UserError
from threefold.prepare_data.format import Format, NumberedPiece

TARGET_PIECES = 1000  # approximate number of pieces of a large source
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**22, 2**30


def cut(formats: Sequence[Format], name: str) -> list[NumberedPiece]:
    """Return all pieces of a source in order, each with the number of its format.

    The result is the same for every shard and number of processes. A large source has about
    TARGET_PIECES pieces, or one per file if it has more files.

    Args:
        formats: readers of the source
        name: the option that names the source, with its values, for a message

    Raises:
        UserError: The source has no documents.
    """
    total = sum(piece.size for reader in formats for piece in reader.pieces(MAX_PIECE_BYTES))
    target = min(max(total // TARGET_PIECES, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    pieces = [
        (number, piece) for number, reader in enumerate(formats) for piece in reader.pieces(target)
    ]
    if not pieces:
        raise UserError(f"{name} has no documents")
    return pieces
