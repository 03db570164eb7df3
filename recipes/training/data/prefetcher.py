"""Micro-batches that are there when a step begins: fetched beside the step before it."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from recipes.training.data.micro_batch import MicroBatch


class Feed:
    """One step ahead of the run.

    read: step to its micro-batches
    last_step: nothing is fetched beyond it
    pinned: into memory that a GPU copies from by itself
    """

    def __init__(
        self, read: Callable[[int], Iterable[MicroBatch]], *, last_step: int, pinned: bool = False
    ):
        self.read, self.last_step, self.pinned = read, last_step, pinned
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._coming: dict[int, Future[list[MicroBatch]]] = {}

    def take(self, step: int) -> tuple[list[MicroBatch], float]:
        """A step's micro-batches, and the seconds that were waited for them.

        Raises:
            Exception: what reading them has raised: UserError or OSError for data that cannot be
                read, any other class for a defect.
        """
        started = time.perf_counter()
        coming = self._coming.pop(step, None) or self._thread.submit(self._fetch, step)
        micro_batches = coming.result()
        waited = time.perf_counter() - started
        if step < self.last_step:
            self._coming[step + 1] = self._thread.submit(self._fetch, step + 1)
        return micro_batches, waited

    def forget(self) -> None:
        """Drop what has been fetched: the run goes on elsewhere."""
        for coming in self._coming.values():
            coming.exception()  # waits
        self._coming.clear()

    def _fetch(self, step: int) -> list[MicroBatch]:
        micro_batches = self.read(step)
        return [each.pinned() if self.pinned else each for each in micro_batches]
