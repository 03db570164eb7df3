"""The interface of the formats: each process reads one piece of a source at a time, row by row."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from threefold.prepare_data.documents import Row

try:
    from pyarrow import ArrowException
except ModuleNotFoundError:  # optional: an export imports this module, but reads no source
    ArrowException = OSError

# The classes that reading a damaged, truncated or unreadable file raises. Arrow's base class stands
# here instead of ValueError, because a defect of this code may raise a ValueError too.
READ_ERRORS = (OSError, ArrowException)


@dataclass(frozen=True)
class Piece:
    """A part of a source.

    files: paths, or the name of a dataset
    start, stop: range of bytes, row groups or rows, depending on the format; if stop is None, the
        piece extends to the end
    size: in bytes, for the estimate of the remaining time
    version: changes when the files do
    """

    files: tuple[str, ...]
    start: int
    stop: int | None
    size: int
    version: str

    def __str__(self) -> str:
        """Return the piece in words, for a message."""
        return describe(self.files, self.start, self.stop)


NumberedPiece = tuple[int, Piece]  # index of the format that reads the piece, and the piece


def describe(files: Sequence[str], start: int, stop: int | None) -> str:
    """Return a piece in words: its files and its range."""
    if len(files) > 1:
        return f"one of the {len(files)} files from {files[0]} to {files[-1]}"
    return files[0] + ("" if stop is None else f" ({start} .. {stop - 1})")


class Format(ABC):
    """A reader of documents.

    column: column that holds the text; empty if the format has no columns
    always_skipped: kinds of problems whose rows are skipped without an option
    """

    column = ""
    always_skipped: frozenset[str] = frozenset()

    @abstractmethod
    def pieces(self, target_bytes: int) -> Iterator[Piece]:
        """Yield the pieces of the source in order, each of about `target_bytes`."""

    @abstractmethod
    def rows(self, piece: Piece) -> Iterator[Row]:
        """Yield the rows of a piece."""

    def place(self, piece: Piece, position: int) -> str:
        """Return the location of a row in words that a user can search for."""
        return f"{piece.files[0]}, row {position}"

    def version(self, piece: Piece) -> str:
        """Return the current version of the files that the piece is read from."""
        return " ".join(version_of(Path(file)) for file in piece.files)


def version_of(file: Path) -> str:
    """Return the size of a file and the time of its last change."""
    about = file.stat()
    return f"{about.st_size}/{about.st_mtime_ns}"
