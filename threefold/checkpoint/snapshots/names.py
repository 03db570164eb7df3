"""The names that ranks and the server of a node's snapshots share; standard library only."""

import re
from typing import NamedTuple

FOLDER_VARIABLE = "THREEFOLD_SNAPSHOTS"  # set by launch.py's agent: the folder of this node
SERVERS = "servers.json"
FP32_BYTES = 4  # of an element of every tensor
SNAPSHOT = re.compile(r"step-(?P<step>\d{7,})-(?P<turns>\d+)-(?P<writer>[0-9a-f]+)")


class SnapshotName(NamedTuple):
    """The name of a snapshot; later steps compare as larger.

    Attributes:
        step: number of completed steps
        turns: number of turns in the history of the run when it was taken (`History.turns`)
        writer: random name of the run's ranks that have taken it
    """

    step: int
    turns: int
    writer: str

    def __str__(self) -> str:
        return f"step-{self.step:07d}-{self.turns}-{self.writer}"

    @classmethod
    def parse(cls, text: str) -> "SnapshotName | None":
        """Return the parts of a name; None if it is not the name of a complete snapshot."""
        match = SNAPSHOT.fullmatch(text)
        return cls(int(match["step"]), int(match["turns"]), match["writer"]) if match else None
