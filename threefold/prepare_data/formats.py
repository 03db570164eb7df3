"""Formats of sources: text files, tables and datasets, divided into pieces that processes read.

| format    | piece                                    | position of a row      |
|-----------|------------------------------------------|------------------------|
| JsonLines | a range of bytes of a file               | byte where it begins   |
| TextLines | a range of bytes of a file               | byte where it begins   |
| JsonArray | a file                                   | row                    |
| Texts     | several files, each of them a document   | file                   |
"""

import codecs
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from models.errors import UserError, reason_of
from threefold.prepare_data.documents import (
    BLANK,
    Problem,
    Row,
    decoded,
    document,
    field,
    json_document,
)

try:
    import pyarrow
except ModuleNotFoundError:  # optional: an export imports this module, but reads no source
    ArrowException: type[Exception] = OSError
else:
    ArrowException = pyarrow.ArrowException


# The interface of the formats: each process reads one piece of a source at a time, row by row.

# The classes that reading a damaged, truncated or unreadable file raises. Arrow's base class stands
# here instead of ValueError, because a defect of this code may raise a ValueError too.
READ_ERRORS = (OSError, ArrowException)


@dataclass(frozen=True)
class SourcePiece:
    """A part of a source.

    files: paths, or the name of a dataset
    start, stop: range in the format's units; if stop is None, the piece extends to the end
    size: in bytes, for the estimate of the remaining time
    version: changes when the files do
    unit: of start and stop: bytes, rows, row groups or shards
    """

    files: tuple[str, ...]
    start: int
    stop: int | None
    size: int
    version: str
    unit: str = ""

    def __str__(self) -> str:
        """Return the piece in words, for a message."""
        return describe(self.files, self.start, self.stop, self.unit)


NumberedPiece = tuple[int, SourcePiece]  # index of the format that reads the piece, and the piece


def describe(files: Sequence[str], start: int, stop: int | None, unit: str) -> str:
    """Return a piece in words: its files and its range.

    Args:
        unit: of the range; empty for a corpus that does not record it
    """
    if len(files) > 1:
        return f"one of the {len(files)} files from {files[0]} to {files[-1]}"
    if stop is None:
        return files[0]
    if stop - start == 1:
        return f"{unit.removesuffix('s')} {start} of {files[0]}".lstrip()
    return f"{unit} {start} .. {stop - 1} of {files[0]}".lstrip()


class Format(ABC):
    """A reader of documents.

    column: column that holds the text; empty if the format has no columns
    always_skipped: kinds of problems whose rows are skipped without an option
    """

    column = ""
    always_skipped: frozenset[str] = frozenset()

    @abstractmethod
    def pieces(self, target_bytes: int) -> Iterator[SourcePiece]:
        """Yield the pieces of the source in order, each of about `target_bytes`."""

    @abstractmethod
    def rows(self, piece: SourcePiece) -> Iterator[Row]:
        """Yield the rows of a piece."""

    def place(self, piece: SourcePiece, position: int) -> str:
        """Return the location of a row in words that a user can search for."""
        return f"{piece.files[0]}, row {position}"

    def version(self, piece: SourcePiece) -> str:
        """Return the current version of the files that the piece is read from."""
        return " ".join(version_of(Path(file)) for file in piece.files)


def version_of(file: Path) -> str:
    """Return the size of a file and the time of its last change."""
    about = file.stat()
    return f"{about.st_size}/{about.st_mtime_ns}"


BYTE_ORDER_MARK = codecs.BOM_UTF8
UTF16_MARKS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # suffix -> pyarrow's name
BLOCK_BYTES = 2**24
# Limit of a line: parsing needs several times its size, and a small compressed file can expand to a
# line larger than memory.
MAX_LINE_BYTES = 2**30


class TextLines(Format):
    """A file whose lines are documents, possibly compressed.

    Blank lines are skipped: files such as WikiText's separate paragraphs with them.
    """

    always_skipped = frozenset({BLANK})

    def __init__(self, file: Path):
        self.file = file

    def pieces(self, target_bytes: int) -> Iterator[SourcePiece]:
        """Yield ranges of bytes; a compressed file is one piece."""
        size, version = self.file.stat().st_size, version_of(self.file)
        if is_compressed(self.file):
            yield SourcePiece((str(self.file),), 0, None, size, version)
            return
        for start in range(0, size, target_bytes):
            stop = min(start + target_bytes, size)
            yield SourcePiece((str(self.file),), start, stop, stop - start, version, "bytes")

    def rows(self, piece: SourcePiece) -> Iterator[Row]:
        """Yield the lines that begin in the piece.

        Raises:
            UserError: A line is too long or does not fit into memory, or the file is in UTF-16. Its
                lines after the first may be valid UTF-8, so `--skip utf-8` would not skip them.
        """
        with open_bytes(self.file) as stream:
            position = piece.start
            if position:
                assert piece.stop is not None  # only a whole file has no stop
                position = start_of_line(stream, position, piece.stop)
            while piece.stop is None or position < piece.stop:
                try:
                    line = stream.readline(MAX_LINE_BYTES + 1)
                    if not line:
                        return
                    if not position and line.startswith(UTF16_MARKS):
                        raise UserError(
                            f"{self.file} is in UTF-16, and only UTF-8 is supported; convert it, "
                            f"for example with iconv -f UTF-16 -t UTF-8 {self.file} > NEW_FILE"
                        )
                    if len(line) > MAX_LINE_BYTES:
                        raise self._too_long(
                            piece, position, f"is longer than {MAX_LINE_BYTES} bytes"
                        )
                    text = line if position else line.removeprefix(BYTE_ORDER_MARK)
                    content = self.content(text)
                except MemoryError:
                    line = text = b""  # free the memory for the message
                    raise self._too_long(piece, position, "does not fit into memory") from None
                if content is not None:
                    yield Row(position, content)
                position += len(line)

    def _too_long(self, piece: SourcePiece, position: int, reason: str) -> UserError:
        place = self.place(piece, position)
        return UserError(f"{place} {reason}; split it into several documents, one per line")

    def content(self, line: bytes) -> str | Problem | None:
        """Return the document in a line, or None to ignore the line."""
        if not line.strip():
            return Problem(BLANK, "the line is blank")
        text = decoded(line.rstrip(b"\r\n"))
        return text if isinstance(text, Problem) else document(text, "the line")

    def place(self, piece: SourcePiece, position: int) -> str:
        """Return the file and the line number of a row."""
        with open_bytes(self.file) as stream:
            number, left = 1, position
            while left and (block := stream.read(min(left, BLOCK_BYTES))):
                number, left = number + block.count(b"\n"), left - len(block)
        return f"{self.file}, line {number}"


class JsonLines(TextLines):
    """A file with a JSON object in each line, possibly compressed."""

    always_skipped = frozenset()

    def __init__(self, file: Path, column: str):
        super().__init__(file)
        self.column = column

    def content(self, line: bytes) -> str | Problem | None:
        """Return the document in a line, or None for a blank line."""
        return json_document(line, self.column) if line.strip() else None


class JsonArray(Format):
    """A file that is one JSON array of objects, possibly compressed."""

    def __init__(self, file: Path, column: str):
        self.file, self.column = file, column

    def pieces(self, target_bytes: int) -> Iterator[SourcePiece]:
        """Yield the whole file as one piece."""
        size = self.file.stat().st_size
        yield SourcePiece((str(self.file),), 0, None, size, version_of(self.file))

    def rows(self, piece: SourcePiece) -> Iterator[Row]:
        """Yield the array's objects.

        Raises:
            UserError: The file is not valid JSON.
        """
        content = read_whole(self.file, "write an object per line, as .jsonl")
        try:
            items = json.loads(content.decode())
        except (
            ValueError,
            RecursionError,
        ) as error:  # also UnicodeDecodeError and too long integers
            raise UserError(f"{piece} cannot be read: {reason_of(error)}") from None
        for number, item in enumerate(items):
            yield Row(number, field(item, self.column))


class Texts(Format):
    """Files that are a document each, possibly compressed."""

    def __init__(self, files: list[Path], *, lenient: bool = False):
        self.files, self.lenient = files, lenient

    def pieces(self, target_bytes: int) -> Iterator[SourcePiece]:
        """Yield groups of neighbouring files."""
        group: list[Path] = []
        size = 0
        for file in self.files:
            group.append(file)
            size += file.stat().st_size
            if size >= target_bytes or file == self.files[-1]:
                versions = " ".join(map(version_of, group))
                yield SourcePiece(tuple(map(str, group)), 0, None, size, versions)
                group, size = [], 0

    def rows(self, piece: SourcePiece) -> Iterator[Row]:
        """Yield the text of each file."""
        for number, name in enumerate(piece.files):
            content = read_whole(Path(name), "divide it into several files")
            text = content.decode(errors="ignore") if self.lenient else decoded(content)
            if isinstance(text, str):
                text = document(text.replace("\r\n", "\n"), "the file")
            if isinstance(text, str) or not self.lenient:
                yield Row(number, text)

    def place(self, piece: SourcePiece, position: int) -> str:
        """Return the name of the file."""
        return piece.files[position]


def start_of_line(stream: IO[bytes], start: int, stop: int) -> int:
    """Return the position of the first line that begins at `start` or later; `stop` if none does.

    The line before may be longer than memory, so at most BLOCK_BYTES of it are read at once.
    """
    stream.seek(start - 1)
    position = start - 1
    while position < stop and (block := stream.readline(min(BLOCK_BYTES, stop - position))):
        position += len(block)
        if block.endswith(b"\n"):
            break
    return position


def read_whole(file: Path, remedy: str) -> bytes:
    """Return the content of a file, decompressed, without a byte order mark.

    Raises:
        UserError: The file does not fit into memory; the message ends with the remedy.
    """
    try:
        with open_bytes(file) as stream:
            return stream.read().removeprefix(BYTE_ORDER_MARK)
    except MemoryError:
        raise UserError(f"{file} does not fit into memory; {remedy}") from None


def is_compressed(file: Path) -> bool:
    """Return whether the suffix of a file is that of a compression."""
    return file.suffix.lower() in COMPRESSIONS


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading bytes, decompressed according to its suffix."""
    stream = file.open("rb")  # pyarrow cannot open names that are not UTF-8
    if not is_compressed(file):
        return stream
    compression = COMPRESSIONS[file.suffix.lower()]
    return io.BufferedReader(pyarrow.input_stream(stream, compression=compression))


# Division of a source into pieces, which processes tokenize independently.

TARGET_PIECES = 1000  # approximate number of pieces of a large source
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**22, 2**30


def cut(formats: Sequence[Format], name: str) -> list[NumberedPiece]:
    """Return all pieces of a source in order, each with the number of its format.

    The result is the same for every shard and number of processes. A large source has about
    TARGET_PIECES pieces, or one per file if it has more files.

    Args:
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
