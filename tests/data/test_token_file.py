"""Token files compared with Megatron's own reader and writer."""

import errno
import os
import shutil
import time
from itertools import chain
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from models.errors import UserError
from threefold.data import token_file
from threefold.data.token_file import (
    HEADER,
    TOKEN_TYPES,
    HashedFile,
    TokenFile,
    TokenFileWriter,
    entry_ranges,
    token_type,
    write_index,
    write_token_file,
)

DOCUMENTS = 1_500


def documents(largest: int, *, count: int = DOCUMENTS) -> list[np.ndarray]:
    """Return random documents of 0 to 40 tokens; about one in forty is empty."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 41, count)
    lengths[[0, -1]] = 0  # also at both ends
    return [random.integers(0, largest + 1, length) for length in lengths]


@pytest.mark.parametrize("vocab_size", [2**16, 2**16 + 1])
def test_megatron_reads_what_we_write(vocab_size: int, tmp_path: Path) -> None:
    ours = documents(vocab_size - 1)
    write_token_file(tmp_path / "x", ours, vocab_size=vocab_size)
    theirs = IndexedDataset(str(tmp_path / "x"))
    assert len(theirs) == DOCUMENTS and len(theirs.document_indices) == DOCUMENTS + 1
    for number, document in enumerate(ours):
        assert theirs[number].tolist() == document.tolist()
    assert theirs.index.dtype is (np.uint16 if vocab_size == 2**16 else np.int32)


@pytest.mark.parametrize("dtype", [np.dtype(name) for name in TOKEN_TYPES.values()], ids=str)
def test_we_read_what_megatron_writes(dtype: np.dtype, tmp_path: Path) -> None:
    theirs = documents(min(np.iinfo(dtype).max, 2**31))
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype.type)
    for document in theirs:
        parts = np.array_split(document, 2)  # two sequences per document, like two sentences
        builder.add_document(document.astype(dtype), [len(part) for part in parts])
    builder.finalize(str(tmp_path / "x.idx"))
    file = TokenFile(tmp_path / "x")
    tokens = np.concatenate(theirs)
    assert file.dtype == dtype and file.count == len(tokens)
    assert file.read(0, file.count).tolist() == tokens.tolist()
    assert file.read(1000, 1003).tolist() == tokens[1000:1003].tolist()
    assert file.sequences == 2 * DOCUMENTS
    file.check_index(one_sequence_per_document=False)
    places = [
        (number, place) for number, document in enumerate(theirs) for place in range(len(document))
    ]
    for start, stop in ((0, 1), (0, 100), (4321, 4400), (len(tokens) - 50, len(tokens))):
        found = file.documents_of(start, stop)
        spelled_out = [(number, at) for number, begin, end in found for at in range(begin, end)]
        assert spelled_out == places[start:stop]
    numbers = np.repeat(np.arange(DOCUMENTS), [len(document) for document in theirs])
    for start in range(0, len(tokens), 997):
        for stop in range(start + 1, min(start + 100, len(tokens)), 7):
            counted = np.unique(numbers[start:stop], return_counts=True)[1]
            assert file.document_lengths(start, stop) == tuple(counted.tolist())
    ends = np.cumsum([len(document) for document in theirs]).tolist()
    ranges = [file.range_of(number) for number in range(file.boundaries - 1)]
    assert ranges == list(zip([0, *ends], ends, strict=False))


def test_windows_span_long_and_empty_documents(tmp_path: Path) -> None:
    lengths = [0, 20, 0, 0, 4, 1, 0, 35, 0]
    write_token_file(tmp_path / "x", [np.arange(length) for length in lengths], vocab_size=40)
    file = TokenFile(tmp_path / "x")
    windows = [file.document_lengths(start, start + 12) for start in range(0, 60, 12)]
    assert windows == [(12,), (8, 4), (1, 11), (12,), (12,)]


@pytest.mark.parametrize("vocab_size", [2**16, 2**16 + 1])
def test_a_document_may_have_more_than_2_gib(vocab_size: int, tmp_path: Path) -> None:
    """The .bin is a sparse file with the size of its documents, so it takes no disk space."""
    lengths, dtype = np.array([5, 2**30, 0, 3, 2**29], "<i4"), token_type(vocab_size)
    index = HashedFile(tmp_path / "x.idx")
    write_index(index, dtype, lambda: [lengths[:2], lengths[2:]], count=len(lengths))
    index.close()
    starts = [0, 5, 5 + 2**30, 5 + 2**30, 8 + 2**30]
    with (tmp_path / "x.bin").open("wb") as stream:
        stream.truncate((starts[-1] + 2**29) * dtype.itemsize)
    file = TokenFile(tmp_path / "x")
    assert file.starts(0, file.sequences).tolist() == [*starts, file.count]
    last = starts[-1]
    assert file.documents_of(last - 5, last + 1) == [(1, 2**30 - 2, 2**30), (3, 0, 3), (4, 0, 1)]
    assert file.document_lengths(last - 5, last + 1) == (2, 3, 1)
    theirs = IndexedDataset(str(tmp_path / "x")).index
    assert theirs.sequence_pointers.tolist() == [start * dtype.itemsize for start in starts]


def test_a_document_too_long_for_the_index_is_rejected(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"has 2147483648 tokens, .* lengths up to 2147483647"),
        TokenFileWriter(tmp_path / "x", token_type(10)) as file,
    ):
        file.write(np.zeros(1), np.array([7, 2**31]))


def test_a_file_without_documents_is_empty(tmp_path: Path) -> None:
    assert write_token_file(tmp_path / "x", [], vocab_size=10) == 0
    assert TokenFile(tmp_path / "x").count == 0


def test_a_flipped_bit_of_the_index_gives_a_message_or_is_found_by_its_checksum(
    tmp_path: Path,
) -> None:
    """Lengths and addresses must agree; only the list of documents has no second record."""
    random = np.random.default_rng(0)
    count = write_token_file(tmp_path / "x", documents(99, count=60), vocab_size=100)
    index = tmp_path / "x.idx"
    sound, window = index.read_bytes(), 32

    def read() -> list[tuple[list[tuple[int, int, int]], tuple[int, ...]]]:
        file = TokenFile(tmp_path / "x")
        return [
            (file.documents_of(start, start + window), file.document_lengths(start, start + window))
            for start in range(0, count - window, window)
        ]

    expected, rejected, unnoticed = read(), 0, 0
    for bit in random.choice(8 * len(sound), 150, replace=False).tolist():
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        index.write_bytes(damaged)
        try:
            found = read()
        except UserError as error:
            assert str(error).startswith(str(index)) and "recipes/prepare_data.py" in str(error)
            rejected += 1
            continue
        for ranges, lengths in found:
            assert sum(lengths) == window and min(lengths) > 0
            assert sum(end - begin for _, begin, end in ranges) == window
        in_documents = bit // 8 >= len(sound) - 8 * 61
        assert found == expected or in_documents
        unnoticed += found != expected
    assert rejected > 100 and unnoticed <= 10


@pytest.mark.parametrize("one_sequence_per_document", [True, False])
def test_a_flipped_bit_of_the_index_is_found_at_the_start(
    one_sequence_per_document: bool, tmp_path: Path
) -> None:
    """Only the lowest bit of a document's first sequence may also belong to a sound index.

    A document of another program may have no sequences, which is what such a flip looks like.
    """
    random = np.random.default_rng(1)
    write_token_file(tmp_path / "x", documents(99, count=60), vocab_size=100)
    index = tmp_path / "x.idx"
    sound, silent = index.read_bytes(), []

    def check() -> None:
        TokenFile(tmp_path / "x").check_index(one_sequence_per_document=one_sequence_per_document)

    check()
    for bit in random.choice(8 * len(sound), 300, replace=False).tolist():
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        index.write_bytes(damaged)
        try:
            check()
        except UserError as error:
            assert str(error).startswith(str(tmp_path)) and "recipes/prepare_data.py" in str(error)
        else:
            silent.append(bit - 8 * (len(sound) - 8 * 61))
    assert all(bit > 0 and bit % 64 == 0 for bit in silent)
    assert len(silent) == (0 if one_sequence_per_document else 1)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("one_sequence_per_document", [True, False])
def test_every_entry_of_an_index_with_several_blocks_is_checked(
    one_sequence_per_document: bool, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "ENTRIES_PER_CHECK", 3)
    if ranks > 1:  # otherwise each of them would check everything
        monkeypatch.setattr(token_file, "MIN_BLOCKS_PER_RANK", 2)
    count = 20
    write_token_file(tmp_path / "x", documents(99, count=count), vocab_size=100)

    def check() -> None:
        for rank in range(ranks):
            TokenFile(tmp_path / "x").check_index(
                one_sequence_per_document=one_sequence_per_document, rank=rank, ranks=ranks
            )

    check()
    index = tmp_path / "x.idx"
    sound, position = index.read_bytes(), HEADER.size
    for size, entries in ((4, count), (8, count), (8, count + 1)):
        for _ in range(entries):
            damaged = bytearray(sound)
            damaged[position] ^= 2
            index.write_bytes(damaged)
            with pytest.raises(UserError, match=r"x\.(idx is damaged|bin has)"):
                check()
            position += size
    assert position == len(sound)


def test_ranks_divide_the_checks_of_a_large_index_only() -> None:
    blocks = token_file.MIN_BLOCKS_PER_RANK * token_file.ENTRIES_PER_CHECK
    assert entry_ranges(blocks, 3, 8) == entry_ranges(blocks)
    shares = [entry_ranges(6 * blocks + 1, rank, 8) for rank in range(8)]
    assert sorted(chain(*shares[:6])) == entry_ranges(6 * blocks + 1)
    assert shares[6:] == shares[:2]
    assert max(len(share) for share in shares) == token_file.MIN_BLOCKS_PER_RANK + 1


def test_a_damaged_index_names_the_command_that_compares_its_checksum(tmp_path: Path) -> None:
    write_token_file(tmp_path / "x", [np.arange(9), np.arange(9)], vocab_size=9)
    index = tmp_path / "x.idx"
    content = bytearray(index.read_bytes())
    content[HEADER.size] ^= 1  # the length of the first document
    index.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.idx is damaged: .*prepare_data\.py verify") as raised:
        TokenFile(tmp_path / "x").document_lengths(0, 12)
    assert "\n" not in str(raised.value)


def test_the_error_about_a_file_truncated_during_a_run_names_it(tmp_path: Path) -> None:
    write_token_file(tmp_path / "x", [np.arange(100)], vocab_size=100)
    file = TokenFile(tmp_path / "x")
    os.truncate(tmp_path / "x.bin", 100)
    assert file.read(0, 50).tolist() == list(range(50))
    with pytest.raises(UserError, match=r"x\.bin ends before token 51; it had 100"):
        file.read(0, 51)


def test_reads_are_continued_until_they_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads less than 2 GiB at once, and any file system may read less than asked for."""
    write_token_file(tmp_path / "x", [np.arange(100)] * 3, vocab_size=100)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 7), at))
    file = TokenFile(tmp_path / "x")
    assert file.read(3, 203).tolist() == [*range(3, 100), *range(100), *range(3)]
    assert file.starts(0, 3).tolist() == [0, 100, 200, 300]
    os.truncate(tmp_path / "x.bin", 100)
    with pytest.raises(UserError, match=r"x\.bin ends before token 51"):
        file.read(0, 51)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_read_is_repeated_while_a_file_server_fails_over(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_token_file(tmp_path / "x", [np.arange(100)], vocab_size=100)
    file = TokenFile(tmp_path / "x")
    shutil.copy(tmp_path / "x.bin", tmp_path / "y.bin")
    (tmp_path / "y.bin").replace(tmp_path / "x.bin")  # what makes a handle stale
    stale, waits = file._file._descriptor, []
    inode, pread = os.fstat(stale).st_ino, os.pread

    def read(descriptor: int, size: int, position: int) -> bytes:
        is_over = len(waits) == 3 if code == errno.EIO else os.fstat(descriptor).st_ino != inode
        if not is_over:
            raise OSError(code, os.strerror(code))
        return pread(descriptor, size, position)

    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(time, "sleep", waits.append)
    assert file.read(0, 100).tolist() == list(range(100))
    assert capsys.readouterr().err == (
        f"{tmp_path}/x.bin cannot be read ({os.strerror(code)}); trying again for up to 60 s\n"
    )
    assert len(waits) == (3 if code == errno.EIO else 1)


def test_an_error_that_stays_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_token_file(tmp_path / "x", [np.arange(100)], vocab_size=100)
    file, waits = TokenFile(tmp_path / "x"), []
    monkeypatch.setattr(os, "pread", mock.Mock(side_effect=OSError(errno.EIO, "Input/output")))
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(OSError, match=r"\[Errno 5\] Input/output: '.*/x\.bin'"):
        file.read(0, 100)
    assert sum(waits) == 60
