"""Token files: Megatron's indexed dataset, so that corpora are shared with its users.

`NAME.bin` holds the tokens of all documents end to end, little-endian. `NAME.idx` holds

| bytes    | type      | what                                             |
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

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
TOKEN_CODES = {"<u2": 8, "<i4": 4}


class TokenFile:
    """A corpus of tokens, memory-mapped.

    Raises:
        ValueError: a file is missing, no token file or truncated.
    """

    def __init__(self, path: Path):
        index = path.with_name(path.name + ".idx")
        tokens = path.with_name(path.name + ".bin")
        for file in (index, tokens):
            if not file.is_file():
                raise ValueError(f"{file} is missing; make it with recipes/prepare_data.py")
        with index.open("rb") as stream:
            head = stream.read(HEADER.size)
            if len(head) < HEADER.size or head[:9] != MAGIC:
                raise ValueError(f"{index} is no token index; make it with recipes/prepare_data.py")
            _, version, code, self.documents, boundaries = HEADER.unpack(head)
            if version != 1 or code not in TOKEN_TYPES:
                raise ValueError(f"{index}: version {version} or token type {code} is unknown")
            sizes = np.fromfile(stream, "<i4", self.documents)
        expected = HEADER.size + 12 * self.documents + 8 * boundaries
        if index.stat().st_size != expected:
            raise ValueError(
                f"{index} has {index.stat().st_size} bytes instead of {expected}: truncated? "
                f"Make it again with recipes/prepare_data.py"
            )
        dtype = np.dtype(TOKEN_TYPES[code])
        expected = int(sizes.sum(dtype=np.int64)) * dtype.itemsize
        if tokens.stat().st_size != expected:
            raise ValueError(
                f"{tokens} has {tokens.stat().st_size} bytes instead of {expected}: truncated? "
                f"Make it again with recipes/prepare_data.py"
            )
        self.path = path
        self.tokens = np.memmap(tokens, dtype, mode="r") if expected else np.empty(0, dtype)


def write_token_file(path: Path, documents: Iterable[np.ndarray], *, vocab_size: int) -> int:
    """Write one sequence per document, flushed to disk; returns the number of tokens.

    Raises:
        ValueError: a token id outside the vocabulary.
    """
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<i4")
    sizes: list[int] = []
    with path.with_name(path.name + ".bin").open("wb") as stream:
        for number, document in enumerate(documents):
            document = np.asarray(document)
            if document.size and (document.min() < 0 or document.max() >= vocab_size):
                raise ValueError(f"document {number}: token id outside 0 .. {vocab_size - 1}")
            stream.write(document.astype(dtype).tobytes())
            sizes.append(len(document))
    with path.with_name(path.name + ".idx").open("wb") as stream:
        count = len(sizes)
        stream.write(HEADER.pack(MAGIC, 1, TOKEN_CODES[dtype.str], count, count + 1))
        lengths = np.asarray(sizes, "<i8")
        stream.write(lengths.astype("<i4").tobytes())
        stream.write(((np.cumsum(lengths) - lengths) * dtype.itemsize).astype("<i8").tobytes())
        stream.write(np.arange(count + 1, dtype="<i8").tobytes())
    return sum(sizes)
