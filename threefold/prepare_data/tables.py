"""Tables: Parquet files, and datasets of the `datasets` library.

| format    | piece                                    | position of a row      |
|-----------|------------------------------------------|------------------------|
| Parquet   | row groups of a file                     | row                    |
| Rows      | rows of a `datasets.Dataset`             | row                    |
| Stream    | a shard of a `datasets.IterableDataset`  | row of the shard       |
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow
from pyarrow import parquet

from models.errors import UserError, reason_of
from threefold.prepare_data.documents import Problem, Row, advice, document, field, printable
from threefold.prepare_data.formats import READ_ERRORS, Format, SourcePiece, version_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

ROWS_AT_ONCE = 256

T = TypeVar("T")


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
            raise UserError(f"{file} cannot be read: {reason_of(error)}") from None
        check_column(str(file), column, names, self._first_rows())

    def pieces(self, target_bytes: int) -> Iterator[SourcePiece]:
        """Yield groups of neighbouring row groups."""
        about = parquet.read_metadata(self.file)
        version, first, size = version_of(self.file), 0, 0
        for group in range(about.num_row_groups):
            size += about.row_group(group).total_byte_size
            if size >= target_bytes or group == about.num_row_groups - 1:
                yield SourcePiece((str(self.file),), first, group + 1, size, version, "row groups")
                first, size = group + 1, 0

    def rows(self, piece: SourcePiece) -> Iterator[Row]:
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

    def _first_rows(self) -> Iterator[dict[str, Any]]:
        with parquet.ParquetFile(self.file) as content:
            for batch in content.iter_batches(1):
                yield from batch.to_pylist()

    def _text(self, value: pyarrow.Scalar) -> str | Problem:
        try:
            return document(value.as_py(), self.column)
        except UnicodeDecodeError as error:
            return Problem("utf-8", f"byte {error.start} of {self.column} is not UTF-8")


class Rows(Format):
    """A dataset with random access to its rows.

    split: its name, for messages; empty for a file

    Raises:
        UserError: The dataset does not have the column.
    """

    def __init__(self, name: str, dataset: "Dataset", column: str, *, split: str = ""):
        check_column(name, column, dataset.column_names, dataset)
        self.name, self.dataset, self.column = name, dataset.select_columns([column]), column
        self.fingerprint, self.split = dataset._fingerprint, split

    def pieces(self, target_bytes: int) -> Iterator[SourcePiece]:
        """Yield ranges of rows."""
        count = len(self.dataset)
        row_bytes = max(1, self.dataset.data.nbytes // max(1, count))
        step = max(1, target_bytes // row_bytes)
        for start in range(0, count, step):
            stop = min(start + step, count)
            size = (stop - start) * row_bytes
            yield SourcePiece((self.name,), start, stop, size, self.fingerprint, "rows")

    def place(self, piece: SourcePiece, position: int) -> str:
        """Return the dataset, the split and the row number."""
        return ", ".join(
            filter(None, (self.name, self.split and f"{self.split} split", f"row {position}"))
        )

    def version(self, piece: SourcePiece) -> str:
        """Return the dataset's fingerprint."""
        return self.fingerprint

    def rows(self, piece: SourcePiece) -> Iterator[Row]:
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

    split: its name, for messages
    identity: configuration, split and commit, which distinguish datasets of the same name

    Raises:
        UserError: The dataset does not have the column.
    """

    def __init__(
        self, name: str, dataset: "IterableDataset", column: str, *, split: str, identity: str
    ):
        names = dataset.column_names
        if names is None:
            names = list(next(from_library(dataset, name), {}))
        check_column(name, column, names, dataset)
        self.name, self.dataset, self.column = name, dataset, column
        self.split, self.identity = split, identity

    def pieces(self, target_bytes: int) -> Iterator[SourcePiece]:
        """Yield the shards of the dataset."""
        for shard in range(self.dataset.num_shards):
            yield SourcePiece((self.name,), shard, shard + 1, 1, self.identity, "shards")

    def version(self, piece: SourcePiece) -> str:
        """Return the identity with which the dataset was opened."""
        return self.identity

    def rows(self, piece: SourcePiece) -> Iterator[Row]:
        """Yield the rows of the shard."""
        shard = self.dataset.shard(num_shards=self.dataset.num_shards, index=piece.start)
        for number, row in enumerate(from_library(shard, piece)):
            yield Row(number, field(row, self.column))

    def place(self, piece: SourcePiece, position: int) -> str:
        """Return the dataset, the split, the shard and the row number."""
        return f"{self.name}, {self.split} split, shard {piece.start}, row {position}"


def from_library(rows: Iterable[T], source: object) -> Iterator[T]:
    """Yield the rows of a library's iterator.

    Datasets and the hub's client raise many exception classes for unreadable data, so every
    exception is reported as a problem with the user's data. Only the library call is inside the
    `try`; a defect in the code that consumes the rows keeps its traceback.

    Args:
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
            raise UserError(f"{source} cannot be read: {reason_of(error)}") from None
        yield row


def check_column(
    name: str, column: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Check that a source has a column.

    rows: the rows of the source, of which at most the first is read, for the message

    Raises:
        UserError: The source does not have the column.
    """
    if column in columns:
        return
    first = next(from_library(rows, name), {})
    raise UserError(
        f"--column {column}: {name} has the columns {printable(', '.join(columns))}{advice(first)}"
    )
