"""Readers of files and datasets: each process reads one piece at a time, row by row.

| format    | piece                                    | position of a row      |
|-----------|------------------------------------------|------------------------|
| JsonLines | a range of bytes of a file               | byte where it begins   |
| TextLines | a range of bytes of a file               | byte where it begins   |
| JsonArray | a file                                   | row                    |
| Texts     | several files, each of them a document   | file                   |
| Parquet   | row groups of a file                     | row                    |
| Rows      | rows of a `datasets.Dataset`             | row                    |
| Stream    | a shard of a `datasets.IterableDataset`  | row of the shard       |
"""

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import pyarrow
from pyarrow import parquet

from models.errors import UserError
from recipes.preparing.documents import Problem, Row, decoded, document, field, json_document

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSED = (".gz", ".bz2", ".zst")
BLOCK_BYTES = 2**24
ROWS_AT_ONCE = 256
# The classes that reading a damaged, truncated or unreadable file raises. Arrow's base class stands
# here instead of ValueError, because a defect of this code may raise a ValueError too.
READ_ERRORS = (OSError, pyarrow.ArrowException)

T = TypeVar("T")


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
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}" + ("" if stop is None else f" ({start} .. {stop - 1})")


class Format(ABC):
    """A reader of documents.

    column: column that holds the text; empty if the format has no columns
    """

    column = ""

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


class TextLines(Format):
    """A file whose lines are documents, possibly compressed."""

    def __init__(self, file: Path):
        self.file = file

    def pieces(self, target_bytes: int) -> Iterator[Piece]:
        """Yield ranges of bytes; a compressed file is one piece."""
        size, version = self.file.stat().st_size, version_of(self.file)
        if self.file.suffix in COMPRESSED:
            yield Piece((str(self.file),), 0, None, size, version)
            return
        for start in range(0, size, target_bytes):
            stop = min(start + target_bytes, size)
            yield Piece((str(self.file),), start, stop, stop - start, version)

    def rows(self, piece: Piece) -> Iterator[Row]:
        """Yield the lines that begin in the piece."""
        with open_bytes(self.file) as stream:
            position = piece.start
            if position:
                stream.seek(position - 1)
                position += len(stream.readline()) - 1
            while piece.stop is None or position < piece.stop:
                line = stream.readline()
                if not line:
                    return
                content = self.content(line if position else line.removeprefix(BYTE_ORDER_MARK))
                if content is not None:
                    yield Row(position, content)
                position += len(line)

    def content(self, line: bytes) -> str | Problem | None:
        """Return the document in a line, or None to ignore the line."""
        text = decoded(line.rstrip(b"\r\n"))
        return text if isinstance(text, Problem) else document(text, "the line")

    def place(self, piece: Piece, position: int) -> str:
        """Return the file and the line number of a row."""
        with open_bytes(self.file) as stream:
            number, left = 1, position
            while left and (block := stream.read(min(left, BLOCK_BYTES))):
                number, left = number + block.count(b"\n"), left - len(block)
        return f"{self.file}, line {number}"


class JsonLines(TextLines):
    """A file with a JSON object in each line, possibly compressed."""

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

    def pieces(self, target_bytes: int) -> Iterator[Piece]:
        """Yield the whole file as one piece."""
        size = self.file.stat().st_size
        yield Piece((str(self.file),), 0, None, size, version_of(self.file))

    def rows(self, piece: Piece) -> Iterator[Row]:
        """Yield the array's objects.

        Raises:
            UserError: The file is not valid JSON.
        """
        with open_bytes(self.file) as stream:
            content = stream.read().removeprefix(BYTE_ORDER_MARK)
        try:
            items = json.loads(content.decode())
        except (
            ValueError,
            RecursionError,
        ) as error:  # also UnicodeDecodeError and too long integers
            raise UserError(f"{piece} cannot be read: {first_line(error)}") from None
        for number, item in enumerate(items):
            yield Row(number, field(item, self.column))


class Texts(Format):
    """Files that are a document each, possibly compressed.

    lenient: drop bytes that are not UTF-8, and files without text
    """

    def __init__(self, files: list[Path], *, lenient: bool = False):
        self.files, self.lenient = files, lenient

    def pieces(self, target_bytes: int) -> Iterator[Piece]:
        """Yield groups of neighbouring files."""
        group: list[Path] = []
        size = 0
        for file in self.files:
            group.append(file)
            size += file.stat().st_size
            if size >= target_bytes or file == self.files[-1]:
                versions = " ".join(map(version_of, group))
                yield Piece(tuple(map(str, group)), 0, None, size, versions)
                group, size = [], 0

    def rows(self, piece: Piece) -> Iterator[Row]:
        """Yield the text of each file."""
        for number, name in enumerate(piece.files):
            with open_bytes(Path(name)) as stream:
                content = stream.read().removeprefix(BYTE_ORDER_MARK)
            text = content.decode(errors="ignore") if self.lenient else decoded(content)
            if isinstance(text, str):
                text = document(text.replace("\r\n", "\n"), "the file")
            if isinstance(text, str) or not self.lenient:
                yield Row(number, text)

    def place(self, piece: Piece, position: int) -> str:
        """Return the name of the file."""
        return piece.files[position]


class Parquet(Format):
    """A Parquet file.

    Raises:
        UserError: The file is not a Parquet file, or does not have the column.
    """

    def __init__(self, file: Path, column: str):
        self.file, self.column = file, column
        try:
            names = parquet.read_schema(file).names
        except READ_ERRORS as error:
            raise UserError(f"{file} cannot be read: {first_line(error)}") from None
        check_column(str(file), column, names)

    def pieces(self, target_bytes: int) -> Iterator[Piece]:
        """Yield groups of neighbouring row groups."""
        about = parquet.read_metadata(self.file)
        version, first, size = version_of(self.file), 0, 0
        for group in range(about.num_row_groups):
            size += about.row_group(group).total_byte_size
            if size >= target_bytes or group == about.num_row_groups - 1:
                yield Piece((str(self.file),), first, group + 1, size, version)
                first, size = group + 1, 0

    def rows(self, piece: Piece) -> Iterator[Row]:
        """Yield the rows of the piece's row groups."""
        with parquet.ParquetFile(self.file) as content:
            assert piece.stop is not None  # only pieces of text files have no stop
            groups = range(piece.start, piece.stop)
            number = sum(content.metadata.row_group(g).num_rows for g in range(piece.start))
            batches = content.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=[self.column])
            for batch in batches:
                for value in batch.column(0):
                    yield Row(number, self._text(value))
                    number += 1

    def _text(self, value: pyarrow.Scalar) -> str | Problem:
        try:
            return document(value.as_py(), self.column)
        except UnicodeDecodeError as error:
            return Problem("utf-8", f"byte {error.start} of {self.column} is not UTF-8")


class Rows(Format):
    """A dataset with random access to its rows.

    Raises:
        UserError: The dataset does not have the column.
    """

    def __init__(self, name: str, dataset: "Dataset", column: str):
        check_column(name, column, dataset.column_names)
        self.name, self.dataset, self.column = name, dataset.select_columns([column]), column
        self.fingerprint = dataset._fingerprint

    def pieces(self, target_bytes: int) -> Iterator[Piece]:
        """Yield ranges of rows."""
        count = len(self.dataset)
        row_bytes = max(1, self.dataset.data.nbytes // max(1, count))
        step = max(1, target_bytes // row_bytes)
        for start in range(0, count, step):
            stop = min(start + step, count)
            size = (stop - start) * row_bytes
            yield Piece((self.name,), start, stop, size, self.fingerprint)

    def version(self, piece: Piece) -> str:
        """Return the dataset's fingerprint."""
        return self.fingerprint

    def rows(self, piece: Piece) -> Iterator[Row]:
        """Yield the rows of the piece."""
        stop = piece.stop
        assert stop is not None  # only pieces of text files have no stop
        starts = range(piece.start, stop, ROWS_AT_ONCE)
        batches = (self.dataset[n : min(n + ROWS_AT_ONCE, stop)] for n in starts)
        for start, batch in zip(starts, from_library(batches, piece), strict=True):
            for number, text in enumerate(batch[self.column], start):
                yield Row(number, document(text, self.column))


class Stream(Format):
    """A dataset that is streamed without being stored.

    identity: configuration, split and version, which distinguish datasets of the same name

    Raises:
        UserError: The dataset does not have the column.
    """

    def __init__(self, name: str, dataset: "IterableDataset", column: str, identity: str):
        names = dataset.column_names
        if names is None:
            names = list(next(from_library(dataset, name), {}))
        check_column(name, column, names)
        self.name, self.dataset, self.column, self.identity = name, dataset, column, identity

    def pieces(self, target_bytes: int) -> Iterator[Piece]:
        """Yield the shards of the dataset."""
        for shard in range(self.dataset.num_shards):
            yield Piece((self.name,), shard, shard + 1, 1, self.identity)

    def version(self, piece: Piece) -> str:
        """Return the identity with which the dataset was opened."""
        return self.identity

    def rows(self, piece: Piece) -> Iterator[Row]:
        """Yield the rows of the shard."""
        shard = self.dataset.shard(num_shards=self.dataset.num_shards, index=piece.start)
        for number, row in enumerate(from_library(shard, piece)):
            yield Row(number, field(row, self.column))

    def place(self, piece: Piece, position: int) -> str:
        """Return the shard and the row number."""
        return f"{self.name}, shard {piece.start}, row {position}"


def from_library(rows: Iterable[T], source: object) -> Iterator[T]:
    """Yield the rows of a library's iterator.

    Datasets and the hub's client raise many exception classes for unreadable data, so every
    exception is reported as a problem with the user's data. Only the library call is inside the
    `try`; a defect in the code that consumes the rows keeps its traceback.

    Args:
        rows: the library's iterator
        source: the source of the rows, for a message

    Raises:
        UserError: The library raised an exception.
    """
    coming = iter(rows)
    while True:
        try:
            row: Any = next(coming)
        except StopIteration:
            return
        except Exception as error:
            raise UserError(f"{source} cannot be read: {first_line(error)}") from None
        yield row


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading bytes, decompressed according to its suffix."""
    if file.suffix in COMPRESSED:
        return io.BufferedReader(pyarrow.input_stream(str(file), compression="detect"))
    return file.open("rb")


def version_of(file: Path) -> str:
    """Return the size of a file and the time of its last change."""
    about = file.stat()
    return f"{about.st_size}/{about.st_mtime_ns}"


def check_column(name: str, column: str, columns: list[str]) -> None:
    """Check that a source has a column.

    Raises:
        UserError: The source does not have the column.
    """
    if column not in columns:
        raise UserError(f"--column {column}: {name} has the columns {', '.join(columns)}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class if the message is empty."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
