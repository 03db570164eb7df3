"""Token files in the format of Megatron's indexed dataset, so that corpora can be exchanged.

`NAME.bin` holds the tokens of all documents end to end, little-endian. `NAME.idx` holds

| bytes    | type      | content                                          |
|----------|-----------|--------------------------------------------------|
| 9        |           | magic `MMIDIDX\\0\\0`                              |
| 8        | uint64    | version, 1                                       |
| 1        | uint8     | token type: 8 uint16, 4 int32 (others are read)  |
| 8        | uint64    | sequences, n                                     |
| 8        | uint64    | document boundaries, n + 1 for one per document  |
| 4 n      | int32     | tokens of each sequence                          |
| 8 n      | int64     | byte offset of each sequence in the .bin         |
| 8 (n+1)  | int64     | index of the first sequence of each document     |
"""

import contextlib
import errno
import hashlib
import os
import struct
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from models.errors import UserError, a_few, why_no_folder

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
TOKEN_CODES = {"<u2": 8, "<i4": 4}
MAX_DOCUMENT_TOKENS = 2**31 - 1  # Megatron's format stores lengths as int32
INDEX_ENTRIES_PER_WRITE = 2**20
ENTRIES_PER_CHECK = 2**16  # of a column of the index; arrays of this size stay in the cache
MIN_BLOCKS_PER_RANK = 256  # so that all ranks find a damage in a small index
TEMPORARY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)  # errors of a failover
MAX_REPETITIONS, SECONDS_BETWEEN_TRIES = 12, 5.0  # a file server's failover takes up to a minute


class PositionedFile:
    """A file that is read at given positions.

    A failed read is repeated for a minute: while a file server fails over, reads end with an I/O
    error, or with one about a stale handle. The file is then opened again.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self._written = os.fstat(self._descriptor).st_mtime_ns

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def size(self) -> int:
        """The present size in bytes."""
        return os.fstat(self._descriptor).st_size

    @property
    def is_written(self) -> bool:
        """True if its modification time has changed since it was opened."""
        try:
            return os.fstat(self._descriptor).st_mtime_ns != self._written
        except OSError:  # the file server does not answer
            return False

    def read(self, size: int, position: int) -> bytes:
        """Return `size` bytes from a position on; fewer only if the file ends there.

        Raises:
            OSError: the file cannot be read; the error names it.
        """
        content = self._patient_read(size, position)
        if len(content) == size:
            return content
        blocks = [content]
        while blocks[-1] and size > len(blocks[-1]):  # Linux reads less than 2 GiB at once
            size, position = size - len(blocks[-1]), position + len(blocks[-1])
            blocks.append(self._patient_read(size, position))
        return b"".join(blocks)

    def _patient_read(self, size: int, position: int) -> bytes:
        """Return at most `size` bytes from a position on; none only at the end of the file."""
        left = MAX_REPETITIONS
        while True:
            try:
                return os.pread(self._descriptor, size, position)
            except OSError as error:
                if not left or error.errno not in TEMPORARY:
                    raise OSError(error.errno, error.strerror, str(self.path)) from None
                if left == MAX_REPETITIONS:
                    seconds = f"{MAX_REPETITIONS * SECONDS_BETWEEN_TRIES:.0f} s"
                    print(f"{self.path} cannot be read ({error.strerror}); trying again for up to "
                          f"{seconds}", file=sys.stderr, flush=True)  # fmt: skip
            time.sleep(SECONDS_BETWEEN_TRIES)
            self._open_again()
            left -= 1

    def _open_again(self) -> None:
        """Replace the descriptor, which may be stale, if the file can be opened."""
        with contextlib.suppress(OSError):
            opened = os.open(self.path, os.O_RDONLY)
            os.dup2(opened, self._descriptor, inheritable=False)
            os.close(opened)


class TokenFile:
    """A corpus of tokens; opening it reads only the header and the address of the last document.

    The .bin is read on demand, not mapped. If it is truncated during a run, the error names the
    file, whereas a mapped file would end the process with a bus error. Moreover, the tokens read do
    not count as memory of the process. Entries of the .idx are read in the same way.

    Attributes:
        damage: what this rank has found in its share of an index that the ranks check together

    Raises:
        UserError: a file is missing, not a token file, or truncated.
    """

    def __init__(self, path: Path):
        self.path = path
        self._index = path.with_name(path.name + ".idx")
        file = path.with_name(path.name + ".bin")
        for name in (self._index, file):
            if not path.parent.is_dir():
                raise UserError(
                    f"{path.parent} {why_no_folder(path.parent)}; use a corpus that "
                    f"recipes/prepare_data.py has written"
                )
            if not name.is_file() and path.is_dir():
                raise UserError(f"{path} is a folder; name a corpus in it, such as {path}/train")
            if not name.is_file():
                there = sorted(each.stem for each in path.parent.glob("*.idx")
                               if each.with_suffix(".bin").is_file())  # fmt: skip
                raise UserError(
                    f"{name} is missing; make it with recipes/prepare_data.py"
                    + (f", or use another corpus in this folder: {a_few(there)}" if there else "")
                )
        with self._index.open("rb") as stream:
            head = stream.read(HEADER.size)
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise UserError(
                f"{self._index} is not a token index; make it with recipes/prepare_data.py"
            )
        _, version, code, self.sequences, self.boundaries = HEADER.unpack(head)
        if version != 1 or code not in TOKEN_TYPES:
            raise UserError(
                f"{self._index}: version {version} or token type {code} is unknown; make the file "
                f"with recipes/prepare_data.py"
            )
        self.dtype = np.dtype(TOKEN_TYPES[code])
        self._index_size = HEADER.size + 12 * self.sequences + 8 * self.boundaries
        _check_size(self._index, self._index_size)
        self._index_file, end = PositionedFile(self._index), 0
        if self.sequences:
            last = self.sequences - 1
            length = int(self._entries("<i4", HEADER.size, last, last + 1)[0])
            address = self._entry(HEADER.size + 4 * self.sequences, last)
            end = address + length * self.dtype.itemsize
        _check_size(file, end)
        self.count = file.stat().st_size // self.dtype.itemsize
        self._file = PositionedFile(file)
        self.damage: UserError | None = None

    @property
    def is_written(self) -> bool:
        """True if one of the two files may have other content than when it was opened."""
        return self._file.is_written or self._index_file.is_written

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens start .. stop - 1, across documents, in the file's type.

        Raises:
            UserError: the file has become shorter.
            OSError: the file cannot be read.
        """
        size = self.dtype.itemsize
        content = self._file.read((stop - start) * size, start * size)
        if len(content) < (stop - start) * size:
            raise UserError(
                f"{self.path}.bin ends before token {stop}; it had {self.count} when the run began"
            )
        return np.frombuffer(content, self.dtype)

    def documents_of(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the ranges of documents that make up the tokens start .. stop - 1.

        Each range is (document, first token, token after the last), counted within the document.

        Raises:
            UserError: the index is damaged.
        """
        lengths = []
        while start < stop:
            # Empty sequences share the address of the next one, so the last match is the right one.
            sequence = self._sequences_before(start, bisect_right) - 1
            document = self._documents_before(sequence, bisect_right) - 1
            begin, end = self.range_of(document)
            if not begin <= start < end:
                raise self._damaged(f"token {start} is not in document {document}")
            lengths.append((document, start - begin, min(stop, end) - begin))
            start = end
        return lengths

    def document_lengths(self, start: int, stop: int) -> tuple[int, ...]:
        """Count the tokens start .. stop - 1 of each document; empty documents are left out.

        Raises:
            UserError: the index is damaged.
        """
        # The range of sequences that begin here, then the documents that begin with one of them.
        first, after = (
            self._sequences_before(start, bisect_right),
            self._sequences_before(stop, bisect_left),
        )
        starts = self.starts(max(0, first - 1), after)
        if not starts[0] <= start < stop <= starts[-1]:
            raise self._damaged(f"no sequences contain the tokens {start} .. {stop - 1}")
        documents = (self._documents_before(number, bisect_left) for number in (first, after))
        begun = self._entries("<i8", HEADER.size + 12 * self.sequences, *documents)
        if np.any((begun < first) | (begun >= after)) or np.any(np.diff(begun) < 0):
            raise self._damaged(f"no documents contain the tokens {start} .. {stop - 1}")
        begins = np.unique(starts[begun - max(0, first - 1)])  # empty documents share their address
        return tuple(np.diff(begins, prepend=start, append=stop).tolist())

    def _sequences_before(self, token: int, bisect: Callable[..., int]) -> int:
        """Return the number of sequences that begin before a token, or with it: `bisect_right`.

        The search reads single entries. Mapping the column would take longer, and a file that is
        truncated during the run would end the process with a bus error.
        """
        position, address = HEADER.size + 4 * self.sequences, token * self.dtype.itemsize
        return bisect(range(self.sequences), address, key=lambda n: self._entry(position, n))

    def _documents_before(self, sequence: int, bisect: Callable[..., int]) -> int:
        """Return the number of documents that begin before a sequence, or with it."""
        position = HEADER.size + 12 * self.sequences
        return bisect(range(self.boundaries), sequence, key=lambda n: self._entry(position, n))

    def _entry(self, position: int, number: int) -> int:
        """Read an entry of a column of int64 that begins at a position of the index."""
        content = self._index_file.read(8, position + 8 * number)
        if len(content) < 8:
            raise self._shorter(self._index_file.size)
        return int.from_bytes(content, "little", signed=True)

    def range_of(self, document: int) -> tuple[int, int]:
        """Return the first token of a document, and the token after its last one.

        Raises:
            UserError: the index is damaged.
        """
        if not 0 <= document < self.boundaries - 1:
            raise self._damaged(f"there is no document {document}")
        position = HEADER.size + 12 * self.sequences
        starts = self.starts(*self._entries("<i8", position, document, document + 2).tolist())
        return int(starts[0]), int(starts[-1])

    def starts(self, first: int, after: int) -> np.ndarray:
        """Return the first tokens of the sequences first .. after - 1, and of the next sequence.

        The index holds lengths and addresses, which must agree.

        Returns:
            int64 [after - first + 1]; after the last sequence, the number of tokens of the file

        Raises:
            UserError: the index is damaged.
        """
        if not 0 <= first <= after <= self.sequences:
            raise self._damaged(f"there are no sequences {first} .. {after - 1}")
        size, end = self.dtype.itemsize, self.count * self.dtype.itemsize
        position = HEADER.size + 4 * self.sequences
        offsets = self._entries("<i8", position, first, min(after + 1, self.sequences))
        if after == self.sequences:
            offsets = np.append(offsets, end)
        lengths = self._entries("<i4", HEADER.size, first, after).astype(np.int64)
        wrong = np.diff(offsets) != lengths * size
        if np.any(wrong) or np.any(lengths < 0) or offsets[0] % size or not 0 <= offsets[0] <= end:
            raise self._damaged(f"sequences {first} .. {after - 1} are not contiguous")
        return offsets // size

    def check_index(
        self, *, one_sequence_per_document: bool, rank: int = 0, ranks: int = 1
    ) -> None:
        """Check that lengths, addresses, documents and the size of the .bin agree.

        All entries are read, in blocks, which the ranks of a run divide if there are many. The .bin
        is not read.

        Args:
            one_sequence_per_document: True for a corpus of prepare_data.py; other corpora may have
                several sequences in a document, and documents without sequences

        Raises:
            UserError: the index is damaged.
        """
        position = HEADER.size + 12 * self.sequences
        for first, after in entry_ranges(self.sequences, rank, ranks):
            starts = self.starts(first, after)
            if first == 0 and starts[0]:
                raise self._damaged(f"the first sequence begins at token {starts[0]}")
        if self.boundaries < 2:  # a file without documents
            return
        ends = [self._entries("<i8", position, n, n + 1)[0] for n in (0, self.boundaries - 1)]
        if ends != [0, self.sequences]:
            raise self._damaged(
                f"its documents begin at sequence {ends[0]} and end at sequence {ends[1]} of "
                f"{self.sequences}"
            )
        exact = one_sequence_per_document and self.boundaries == self.sequences + 1
        for first, after in entry_ranges(self.boundaries, rank, ranks):
            after = min(after + 1, self.boundaries)  # compare also with the next block
            documents = self._entries("<i8", position, first, after)
            steps = np.diff(documents)
            wrong = np.flatnonzero((steps != 1) if exact else (steps < 0))
            if len(wrong) or not 0 <= documents[0] <= documents[-1] <= self.sequences:
                raise self._damaged(f"documents {first} .. {after - 1} are not in order")

    def divides_check(self, ranks: int) -> bool:
        """Return True if `check_index` reads different entries on different ranks."""
        return entry_ranges(self.boundaries, 0, ranks) != entry_ranges(self.boundaries)

    def _damaged(self, reason: str) -> UserError:
        return UserError(
            f"{self._index} is damaged: {reason}; restore it from a copy, or delete the corpus "
            f"and prepare it again (recipes/prepare_data.py verify {self.path.parent} compares its "
            f"checksum)"
        )

    def _entries(self, dtype: str, position: int, first: int, after: int) -> np.ndarray:
        """Read the entries first .. after - 1 of a column, given its position in the index."""
        size = np.dtype(dtype).itemsize
        content = self._index_file.read((after - first) * size, position + first * size)
        if len(content) < (after - first) * size:
            raise self._shorter(self._index_file.size)
        return np.frombuffer(content, dtype)

    def _shorter(self, size: int) -> UserError:
        return UserError(
            f"{self._index} has become shorter: {size} bytes of {self._index_size}; restore it "
            f"from a copy, or delete the corpus and make it again with recipes/prepare_data.py"
        )


def entry_ranges(count: int, rank: int = 0, ranks: int = 1) -> list[tuple[int, int]]:
    """Return the ranges of a column's entries that a rank checks, a block each."""
    firsts = range(0, max(count, 1), ENTRIES_PER_CHECK)
    shares = max(1, min(ranks, len(firsts) // MIN_BLOCKS_PER_RANK))
    firsts = firsts[rank % shares :: shares]
    return [(first, min(first + ENTRIES_PER_CHECK, count)) for first in firsts]


def _check_size(file: Path, expected: int) -> None:
    if file.stat().st_size != expected:
        raise UserError(
            f"{file} has {file.stat().st_size} bytes instead of {expected}: truncated? "
            f"Restore it from a copy, or delete the corpus and make it again with "
            f"recipes/prepare_data.py"
        )


class TokenFileWriter:
    """Writer of a token file with one sequence per document.

    Use it as a context manager; the file is complete on exit.

    Args:
        path: path of the token file, without .bin or .idx
        type_of_tokens: result of `token_type`
    """

    def __init__(self, path: Path, type_of_tokens: np.dtype):
        self.path, self.dtype = path, type_of_tokens
        self.documents = self.tokens = 0
        self._bin = HashedFile(path.with_name(path.name + ".bin"))
        self._idx = HashedFile(path.with_name(path.name + ".idx"))
        self._lengths: list[np.ndarray] = []

    def write(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents.

        Args:
            tokens: the tokens of the documents, end to end
            lengths: the number of tokens of each document

        Raises:
            UserError: a document is too long for the index.
        """
        longest = np.max(lengths, initial=0)
        if longest > MAX_DOCUMENT_TOKENS:
            raise UserError(
                f"{self.path}: a document has {longest} tokens, but the index of a token file "
                f"holds lengths up to {MAX_DOCUMENT_TOKENS}; divide the document"
            )
        self._bin.write(np.ascontiguousarray(tokens, self.dtype))
        self._lengths.append(np.asarray(lengths, "<i4"))
        self.documents, self.tokens = self.documents + len(lengths), self.tokens + len(tokens)

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            write_index(self._idx, self.dtype, lambda: self._lengths, count=self.documents)
        self.hashes = {"bin": self._bin.close(), "idx": self._idx.close()}


class HashedFile:
    """A new file that is hashed (SHA-256) while it is written, and flushed to the disk."""

    def __init__(self, path: Path):
        self._stream, self._hash = path.open("wb"), hashlib.sha256()

    def write(self, content: bytes | np.ndarray) -> None:
        """Append bytes."""
        data = content if isinstance(content, bytes) else content.data
        self._stream.write(data)
        self._hash.update(data)

    def close(self) -> str:
        """Flush and close the file; return its SHA-256 in hexadecimal."""
        with self._stream:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return self._hash.hexdigest()


def write_index(
    stream: HashedFile,
    type_of_tokens: np.dtype,
    lengths: Callable[[], Iterable[np.ndarray]],
    *,
    count: int,
) -> None:
    """Write an .idx with one sequence per document.

    Args:
        lengths: returns the number of tokens of each document, in blocks; called twice, so that
            only one block is in memory
    """
    size = type_of_tokens.itemsize
    stream.write(HEADER.pack(MAGIC, 1, TOKEN_CODES[type_of_tokens.str], count, count + 1))
    for block in lengths():
        stream.write(np.ascontiguousarray(block, "<i4"))
    offset = 0
    for block in lengths():
        lengths_in_bytes = size * np.asarray(block, "<i8")  # a length in bytes may not fit in int32
        ends = offset + np.cumsum(lengths_in_bytes)
        stream.write(ends - lengths_in_bytes)
        offset = int(ends[-1]) if len(ends) else offset
    for first in range(0, count + 1, INDEX_ENTRIES_PER_WRITE):
        after = min(first + INDEX_ENTRIES_PER_WRITE, count + 1)
        stream.write(np.arange(first, after, dtype="<i8"))


def token_type(vocab_size: int) -> np.dtype:
    """Return the smallest type in Megatron's format for ids below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<i4")


def write_token_file(path: Path, documents: Iterable[np.ndarray], *, vocab_size: int) -> int:
    """Write one sequence per document, flushed to disk; return the number of tokens.

    Raises:
        UserError: a token id is outside the vocabulary.
    """
    with TokenFileWriter(path, token_type(vocab_size)) as file:
        for number, document in enumerate(documents):
            document = np.asarray(document)
            if document.size and (document.min() < 0 or document.max() >= vocab_size):
                raise UserError(f"document {number}: token id outside 0 .. {vocab_size - 1}")
            file.write(document, np.array([len(document)]))
    return file.tokens
