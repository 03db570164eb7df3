"""A clock that divides the time of a rank among the parts of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from threefold.sweep.breakdown_parts import PARTS


class PartClock:
    """Divides a rank's time among parts: every moment belongs to the innermost open region.

    On a GPU, the host waits for the stream of the passes at both ends of a region. Work on other
    streams, such as overlapped collectives, counts only if the stream of the passes waits for it.

    Attributes:
        device: the device of this rank
        seconds: part -> seconds since the beginning of the step
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step, outside of all regions; its time counts as "other"."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open = ["other"]
        self._since = self._now()

    def end_step(self) -> dict[str, float]:
        """End the step, and return the seconds of each part."""
        assert len(self._open) == 1
        self._count()
        return self.seconds

    @property
    def current(self) -> str:
        """The part to which the time counts now."""
        return self._open[-1]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Open a region whose time counts to a part."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        now = self._now()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def _now(self) -> float:
        if self._stream is not None:
            # Synchronizing the whole device would wait for receives that were posted ahead, whose
            # messages may depend on later work of this rank.
            self._stream.synchronize()
        return time.perf_counter()
