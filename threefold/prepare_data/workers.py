"""Distribute pieces over worker processes, and show the progress."""

import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.queues import Queue

from tqdm import tqdm

from models.errors import UserError, counted
from threefold.prepare_data.format import NumberedPiece, Piece
from threefold.prepare_data.tokenization import Tokenization, run_piece, start_worker
from threefold.runtime.exits import interrupts_blocked

SECONDS_BETWEEN_LINES = 10.0
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
    speed = Speed(sum(piece.size for _, piece in left), counts)
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
    running: dict[Future, Piece] = {}
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

    total: bytes of all pieces
    counts: queue of (documents, tokens), which the worker processes fill
    """

    def __init__(self, total: int, counts: Queue):
        self.total, self.counts = total, counts
        self.documents = self.tokens = self.done = 0
        self.started = self.last_line = time.monotonic()
        self.bar = tqdm(total=total, unit="B", unit_scale=True) if sys.stdout.isatty() else None

    def finished(self, piece: Piece) -> None:
        """Count a finished piece."""
        self.done += piece.size
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
            left = (now - self.started) * (self.total - self.done) / self.done if self.done else 0
            until = f"{tqdm.format_interval(left)} left" if self.done else "time left unknown yet"
            print(f"{self.done / self.total:4.0%}  {self.describe(now)}  {until}", flush=True)
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
