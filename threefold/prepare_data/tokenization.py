"""Tokenize the documents of pieces into token files, in worker processes.

A finished piece is a folder whose name is a hash of everything that determines its content. The
folder gets this name when all its files are on the disk, so any process that finds it can use it.
"""

import hashlib
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from multiprocessing.queues import Queue
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from models.errors import UserError, counted, reason_of
from threefold.data.token_file import TokenFileWriter, token_type
from threefold.prepare_data.documents import EmptyPart, Row
from threefold.prepare_data.formats import READ_ERRORS, Format, NumberedPiece, SourcePiece
from threefold.run_folder.json_lines import flush
from threefold.runtime.exits import interrupts_blocked
from threefold.runtime.output import SECONDS_BETWEEN_LINES

PARTS = ("train", "validation")
REPORT = "report.json"
MAX_CHECKED_CHARACTERS = 2**26  # read before the tokenization to check that no part is empty
BATCH_DOCUMENTS, BATCH_CHARACTERS = 64, 2**18  # tokenized together; larger batches are slower

Skipped = dict[str, Any]  # "rows": number of rows; "position", "reason": those of the first row


@dataclass(frozen=True)
class Tokenization:
    """The settings that turn documents into tokens.

    formats: readers of the source; each piece belongs to one of them
    tokenizer: path of tokenizer.json
    tokenizer_sha256: hash of the tokenizer
    start: tokens before each document, which the tokenizer puts before every text
    end: token after each document
    split_special_tokens: tokenize the text of special tokens like any other text, as in
        transformers' tokenizers
    validation_fraction: share of the documents that is held out
    held_out: numbers of the formats whose documents are the validation part
    skip: kinds of problems whose rows are skipped; other problems raise
    folder: folder of the finished pieces
    """

    formats: list[Format]
    tokenizer: Path
    tokenizer_sha256: str
    vocab_size: int
    start: tuple[int, ...]
    end: int
    split_special_tokens: bool
    validation_fraction: float
    skip: frozenset[str]
    folder: Path
    held_out: frozenset[int] = frozenset()

    def name(self, format_number: int, piece: SourcePiece) -> str:
        """Return the name of a piece's folder: a hash of everything that determines its content."""
        reader = self.formats[format_number]
        decides = (
            type(reader).__name__,
            reader.column,
            asdict(piece),
            self.tokenizer_sha256,
            self.vocab_size,
            self.end,
            self.split_special_tokens,
            self.validation_fraction,
            *([self.start] if self.start else []),  # older pieces have no recorded start
            *(["held out"] if format_number in self.held_out else []),
            *sorted(reader.always_skipped),  # older pieces have counted these rows as another kind
        )
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:24]

    def find(self, format_number: int, piece: SourcePiece) -> "PieceCounts | None":
        """Return the report of a finished piece, or None if it skipped rows that `skip` forbids."""
        file = self.folder / self.name(format_number, piece) / REPORT
        if not file.is_file():
            return None
        report = read_report(file)
        skip = self.skip | self.formats[format_number].always_skipped
        return report if skip.issuperset(report.skipped) else None

    def tell_outdated(self, pieces: Sequence[NumberedPiece], *, is_shard: bool) -> set[str]:
        """Print the number of finished pieces that belong to none of the pieces of the source.

        Args:
            is_shard: another command, without --shard, joins the pieces and deletes these

        Returns:
            names of these pieces
        """
        finished = {path.name for path in self.folder.glob("*") if not path.suffix}
        if outdated := finished - {self.name(*item) for item in pieces}:
            command = "the command without --shard" if is_shard else "this command"
            print(
                f"{counted(len(outdated), 'finished piece')} in {self.folder.parent} will be "
                f"deleted when {command} has finished, because the source or an option has "
                f"changed since the interruption; to keep "
                f"{'it' if len(outdated) == 1 else 'them'}, press Ctrl-C and rerun with another "
                f"--output"
            )
        return outdated

    def run(self, format_number: int, piece: SourcePiece, progress: Queue) -> "PieceCounts":
        """Tokenize a piece.

        Raises:
            UserError: A row is not a document, and `skip` does not name its kind of problem.
        """
        report = PieceCounts()
        reader = self.formats[format_number]
        dtype = token_type(self.vocab_size)
        with new_folder(self.folder / self.name(format_number, piece)) as room:
            with ExitStack() as open_files:
                files = {
                    name: open_files.enter_context(TokenFileWriter(room / name, dtype))
                    for name in PARTS
                }
                for texts in batches(texts_of(reader, piece, self.skip, report)):
                    tokens, ends = self._write(texts, files, format_number)
                    report.ends_in_text += ends
                    progress.put((len(texts), tokens))
            if reader.version(piece) != piece.version:
                raise UserError(f"{piece} changed while it was read; start again")
            for name, file in files.items():
                report.parts[name] = {
                    "documents": file.documents, "tokens": file.tokens, "sha256": file.hashes["bin"]
                }  # fmt: skip
            text = json.dumps(asdict(report))
            (room / REPORT).write_text(text, encoding="utf-8")
        return report

    def _write(
        self, texts: list[str], files: dict[str, TokenFileWriter], format_number: int
    ) -> tuple[int, int]:
        """Tokenize documents, and add each to its part.

        Returns:
            The number of tokens, and the number of end tokens inside documents.
        """
        is_validation = format_number in self.held_out
        tokenizer = fast_tokenizer(self.tokenizer, self.split_special_tokens)
        try:
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises Exception itself
                raise
            raise UserError(
                f"--tokenizer cannot tokenize a document that begins with {texts[0][:40]!r}, or "
                f"one of the {len(texts) - 1} after it: {reason_of(error)}; use another tokenizer"
            ) from None
        parts: dict[str, list[list[int]]] = {name: [] for name in PARTS}
        for text, encoding in zip(texts, encoded, strict=True):
            held_out = is_validation or is_held_out(text, self.validation_fraction)
            parts["validation" if held_out else "train"].append(
                [*self.start, *encoding.ids, self.end]
            )
        total = ends = 0
        for name, sequences in parts.items():
            tokens = np.fromiter(chain.from_iterable(sequences), np.int64)
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
                raise UserError(f"{self.tokenizer}: a token id outside 0 .. {self.vocab_size - 1}")
            files[name].write(tokens, np.array([len(ids) for ids in sequences], np.int64))
            total += tokens.size
            ends += int(np.count_nonzero(tokens == self.end))
        added = len(texts) * [*self.start, self.end].count(self.end)
        return total, ends - added


@dataclass
class PieceCounts:
    """The counts of a finished piece.

    parts: documents, tokens and SHA-256 of the .bin, by part
    skipped: skipped rows, by kind of problem
    ends_in_text: number of end tokens inside documents
    """

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    ends_in_text: int = 0


def read_report(file: Path) -> PieceCounts:
    """Read the report of a finished piece.

    Raises:
        UserError: The file is damaged.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return PieceCounts(
            parts=dict(content["parts"]),
            skipped=dict(content["skipped"]),
            ends_in_text=int(content.get("ends_in_text", 0)),
        )
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} is damaged ({reason_of(error)}); delete {file.parent} and rerun the same "
            f"command"
        ) from None


def texts_of(
    reader: Format, piece: SourcePiece, skip: frozenset[str], report: PieceCounts | None = None
) -> Iterator[str]:
    """Yield the texts of a piece.

    Raises:
        UserError: A row is not a document; the message names the file, the line and the reason.
    """
    report = report or PieceCounts()
    for row in readable(reader, piece):
        if isinstance(row.content, str):
            yield row.content
            continue
        kind, reason = row.content.kind, row.content.reason
        if kind not in skip | reader.always_skipped:
            place = reader.place(piece, row.position)
            remedy = f"correct the row, or skip such rows with --skip {kind}"
            if kind == "column" and "no column" not in reason:
                remedy = f"use another --column, {remedy}"
            raise UserError(f"{place}: {reason}; {remedy}")
        known = {"rows": 0, "position": row.position, "reason": reason}
        report.skipped.setdefault(kind, known)["rows"] += 1


def readable(reader: Format, piece: SourcePiece) -> Iterator[Row]:
    """Yield the rows of a piece.

    Raises:
        UserError: The files of the piece cannot be read.
    """
    try:
        yield from reader.rows(piece)
    except READ_ERRORS as error:
        raise UserError(f"{piece} cannot be read: {reason_of(error)}") from None


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield documents in groups that are large enough for a call of the tokenizer."""
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if len(group) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether a document is held out for validation.

    The content decides, so that equal documents are in the same part.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def check_parts(
    formats: Sequence[Format],
    pieces: Sequence[NumberedPiece],
    *,
    fraction: float,
    held_out: Collection[int],
    validation_option: str = "",
    skip: frozenset[str],
) -> None:
    """Check before the tokenization that no part is empty.

    Documents are read until each part has one. After MAX_CHECKED_CHARACTERS, the check ends
    without a result.

    Args:
        pieces: all pieces, in order
        fraction: share of the documents that is held out
        held_out: numbers of the formats whose documents are the validation part
        validation_option: the option that names these documents, for a message

    Raises:
        EmptyPart: A part has no documents.
        UserError: A row is not a document, and `skip` does not name its kind of problem.
    """
    own = {"train": [item for item in pieces if item[0] not in held_out]}
    if held_out:
        own["validation"] = [item for item in pieces if item[0] in held_out]
    for part, items in own.items():
        report, documents, characters = PieceCounts(), 0, 0
        kinds: set[bool] = set()  # True: held out
        for text in chain.from_iterable(texts_of(formats[n], p, skip, report) for n, p in items):
            documents, characters = documents + 1, characters + len(text)
            kinds.add(is_held_out(text, fraction))
            if not fraction or len(kinds) == 2 or characters > MAX_CHECKED_CHARACTERS:
                break
        else:
            if documents == 1:  # the join divides a single document by tokens
                continue
            lacking = part
            if documents:
                lacking = "train" if kinds == {True} else "validation"
            raise EmptyPart(
                lacking,
                documents=documents,
                skipped_rows=sum(kind["rows"] for kind in report.skipped.values()),
                first_skipped=next((kind["reason"] for kind in report.skipped.values()), ""),
                fraction=fraction,
                validation_option=validation_option,
            )


@lru_cache(maxsize=1)
def fast_tokenizer(file: Path, split_special_tokens: bool) -> Tokenizer:
    """Load a tokenizer.json without truncation and padding."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = split_special_tokens
    return tokenizer


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when all its files are on the disk.

    If several processes write the same folder, the first result is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique among the processes of all machines.
    room = Path(mkdtemp(prefix=f"{path.name}.", suffix=".incomplete", dir=path.parent))
    room.chmod(0o755)
    try:
        yield room
        for file in (*room.rglob("*"), room):
            flush(file)
        try:
            os.rename(room, path)
        except OSError:
            if not path.is_dir():  # another process was faster
                raise
        flush(path.parent)
    finally:
        shutil.rmtree(room, ignore_errors=True)


_working: tuple[Tokenization, Queue]  # set once, by start_worker


def start_worker(tokenization: Tokenization, progress: Queue) -> None:
    """Prepare a worker process: one tokenizer thread, and exit together with the parent."""
    global _working
    _working = tokenization, progress
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None  # this is a worker
    connection.wait([parent.sentinel])
    os._exit(1)


def run_piece(format_number: int, piece: SourcePiece) -> PieceCounts:
    """Tokenize a piece in a worker."""
    tokenization, progress = _working
    return tokenization.run(format_number, piece, progress)


# Distribute pieces over worker processes, and show the progress.

MIN_SHARE_FOR_ESTIMATE = 0.05  # of the bytes are done before a time left is estimated
PIECES_IN_FLIGHT_PER_PROCESS = 2  # the running piece and the next one


def run_pieces(tokenization: Tokenization, pieces: Sequence[NumberedPiece], processes: int) -> None:
    """Tokenize the pieces that are not finished yet.

    Raises:
        UserError: A row is not a document, or a process was killed.
    """
    left = [item for item in pieces if not tokenization.find(*item)]
    if len(left) < len(pieces):
        print(f"{len(pieces) - len(left):,} of {counted(len(pieces), 'piece')} already finished")
    if not left:
        return
    workers = counted(min(processes, len(left)), "worker")
    print(f"tokenizing {counted(len(left), 'piece')} of the source with {workers}", flush=True)
    context = get_context("spawn")  # a fork would inherit the threads of the tokenizer
    counts = context.Queue()
    speed = Speed([piece.size for _, piece in left], counts)
    pool = ProcessPoolExecutor(
        min(processes, len(left)),
        mp_context=context,
        initializer=start_worker,
        initargs=(tokenization, counts),
    )
    try:
        _run(pool, left, speed, processes=min(processes, len(left)))
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, perhaps because the memory was full; rerun the same "
            "command to resume, with fewer --processes if it happens again"
        ) from None
    finally:
        speed.close()
        for worker in list((pool._processes or {}).values()):  # their results are not needed
            worker.terminate()
        pool.shutdown(cancel_futures=True)


def _run(
    pool: ProcessPoolExecutor, left: list[NumberedPiece], speed: "Speed", *, processes: int
) -> None:
    coming = iter(left)
    running: dict[Future, SourcePiece] = {}
    while True:
        while len(running) < PIECES_IN_FLIGHT_PER_PROCESS * processes:
            item = next(coming, None)
            if item is None:
                break
            with interrupts_blocked():  # the first call starts the processes
                running[pool.submit(run_piece, *item)] = item[1]
        if not running:
            return
        done, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
            speed.finished(running.pop(future))
        speed.show()


class Speed:
    """Progress and time left: a bar on a terminal, otherwise a line every ten seconds.

    sizes: bytes of each piece
    counts: queue of (documents, tokens), which the worker processes fill
    """

    def __init__(self, sizes: Sequence[int], counts: Queue):
        self.total, self.all_pieces, self.counts = sum(sizes), len(sizes), counts
        self.documents = self.tokens = self.done = self.pieces = 0
        self.started = self.last_line = time.monotonic()
        self.bar = (
            tqdm(total=self.total, unit="B", unit_scale=True) if sys.stdout.isatty() else None
        )

    def finished(self, piece: SourcePiece) -> None:
        """Count a finished piece."""
        self.done += piece.size
        self.pieces += 1
        if self.bar is not None:
            self.bar.update(piece.size)

    def show(self) -> None:
        """Show the progress if the interval since the last line has passed."""
        while True:
            try:
                documents, tokens = self.counts.get_nowait()
            except queue.Empty:
                break
            self.documents, self.tokens = self.documents + documents, self.tokens + tokens
        now = time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(self.describe(now))
        elif now - self.last_line >= SECONDS_BETWEEN_LINES:
            left = self.total - self.done
            until = f"  {left / 1e6:,.1f} MB left"
            if self.done >= MIN_SHARE_FOR_ESTIMATE * self.total > 0:
                seconds = (now - self.started) * left / self.done
                until = f"  {tqdm.format_interval(seconds)} left"
            counts = self.describe(now) if self.documents else "reading the first documents"
            print(f"{self.pieces}/{self.all_pieces} pieces  {counts}{until}", flush=True)
            self.last_line = now

    def describe(self, now: float) -> str:
        """Return the counts and rates in words."""
        seconds = now - self.started
        return (
            f"{counted(self.documents, 'document')} ({self.documents / seconds:,.0f}/s)  "
            f"{counted(self.tokens, 'token')} ({self.tokens / seconds:,.0f}/s)"
        )

    def close(self) -> None:
        """Close the progress bar."""
        if self.bar is not None:
            self.bar.close()
