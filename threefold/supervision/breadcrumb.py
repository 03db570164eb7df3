"""The current activity of a rank, which the training loop records and the supervisor reads."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Breadcrumb:
    """The current activity of a rank.

    Attributes:
        step: the current step; 0 during start-up
        doing: the activity
        micro_batch: the micro-batch that the activity works on, if any
        count: number of activities so far
        patient: True while the rank waits for a disk, however long that takes; the rank does not
            end itself during this time
        waits_for_room: True while all ranks wait together for space on a full disk; the run has
            announced and limits this wait, so it is not a hang
    """

    step: int = 0
    doing: str = "starting"
    micro_batch: int | None = None
    count: int = 0
    patient: bool = False
    waits_for_room: bool = False

    def note(self, doing: str, *, micro_batch: int | None = None, step: int | None = None) -> None:
        """Record the start of another activity."""
        self.doing, self.micro_batch = doing, micro_batch
        self.step = self.step if step is None else step
        self.count += 1

    def wait_for_room(self, waits: bool) -> None:
        """Record the beginning or the end of the ranks' wait for space on a full disk."""
        self.waits_for_room = waits

    @contextlib.contextmanager
    def waiting_for_disk(self, doing: str, *, micro_batch: int | None = None) -> Iterator[None]:
        """Do not end this rank during this activity, however long it takes.

        Ranks that wait for this rank in a collective do end; their message names this activity.
        """
        before = self.patient
        self.note(doing, micro_batch=micro_batch)
        self.patient = True
        try:
            yield
        finally:
            self.patient = before
        self.note(doing, micro_batch=micro_batch)

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        when = f"step {self.step}" if self.step else "start-up"
        return f"{when}, {self.doing}{of}"
