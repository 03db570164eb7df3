"""The lease of a run folder: the right to write into it, which launch.py gives to one attempt.

launch.py holds the lock of the folder itself, and starts the ranks several times: each start is an
attempt. A node that has lost its network, or whose processes were stopped, may still run ranks of
an earlier attempt. The file `lease` names the current attempt, and the ranks of another one must
not write. As with every lease, a process that is suspended between its check and its write can be
late; a check precedes every line and every checkpoint, so this takes a suspension of microseconds.
"""

import os
import sys
from pathlib import Path

from recipes.training.run_folder.line_file import write_whole
from recipes.training.run_folder.lock import LOST, FolderInUse

FILE = "lease"


class Lease:
    """The lease of a run folder, as a rank of an attempt sees it.

    It takes the place of the folder's lock (`FolderLock`), which launch.py holds.

    Args:
        folder: the run folder
        attempt: name of the attempt that this process belongs to
    """

    def __init__(self, folder: Path, attempt: str):
        self.file, self.attempt = folder / FILE, attempt

    def acquire(self) -> None:
        """Check that the attempt is the current one.

        Raises:
            FolderInUse: it is not.
            OSError: the lease cannot be read.
        """
        if not self.is_current():
            raise FolderInUse(
                f"{self.file.parent} now belongs to another attempt of launch.py than "
                f"{self.attempt}; start the run with launch.py, without --lease",
                alive=True,
            )

    def release(self, moved_to: Path | None = None) -> None:
        """Do nothing; the lease ends when launch.py grants the next one."""

    def is_current(self) -> bool:
        """Return True unless the folder belongs to another attempt.

        Raises:
            OSError: the lease exists and cannot be read.
        """
        try:
            return self.file.read_text().strip() == self.attempt
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """End this process if the folder belongs to another attempt.

        Nothing is decided if the lease cannot be read: then the folder cannot be written either.
        """
        try:
            if self.is_current():
                return
        except OSError:
            return
        text = f"{self.file.parent} belongs to a later attempt than {self.attempt}; exiting\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        os._exit(LOST)


def grant(folder: Path, attempt: str) -> None:
    """Give the folder to an attempt, and so take it from the earlier one.

    Raises:
        OSError: the lease cannot be written.
    """
    write_whole(folder / FILE, f"{attempt}\n")
