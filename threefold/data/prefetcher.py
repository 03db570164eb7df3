"""Reading of the next step's micro-batches in parallel with the current step."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from threefold.data.micro_batch import MicroBatch


class Prefetcher:
    """Reads micro-batches one step ahead of the run, in a thread.

    read: returns the micro-batches of a step
    last_step: the last step that is read
    pinned: whether to put them into page-locked memory, which a GPU reads without the host
    """

    def __init__(
        self, read: Callable[[int], Iterable[MicroBatch]], *, last_step: int, pinned: bool = False
    ):
        self.read, self.last_step, self.pinned = read, last_step, pinned
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetcher")
        self._coming: dict[int, Future[list[MicroBatch]]] = {}

    def take(self, step: int) -> tuple[list[MicroBatch], float]:
        """Return a step's micro-batches, and the seconds spent waiting for them.

        Raises:
            Exception: the exception that `read` raised: UserError or OSError for data that cannot
                be read, any other class for a defect.
        """
        started = time.perf_counter()
        coming = self._coming.pop(step, None) or self._thread.submit(self._fetch, step)
        micro_batches = coming.result()
        waited = time.perf_counter() - started
        if step < self.last_step:
            self._coming[step + 1] = self._thread.submit(self._fetch, step + 1)
        return micro_batches, waited

    def forget(self) -> None:
        """Discard the micro-batches read ahead, because the run continues with another step."""
        for coming in self._coming.values():
            coming.exception()  # waits for the thread
        self._coming.clear()

    def _fetch(self, step: int) -> list[MicroBatch]:
        micro_batches = self.read(step)
        return [each.pinned() if self.pinned else each for each in micro_batches]
