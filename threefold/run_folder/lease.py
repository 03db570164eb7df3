"""The lease of a run folder: the right to write into it, which launch.py gives to one attempt.

launch.py holds the lock of the folder itself, and starts the ranks several times: each start is an
attempt. A node that has lost its network, or whose processes were stopped, may still run ranks of
an earlier attempt. The file `lease` names the current attempt, and the ranks of another one must
not write. The check and the write are not atomic: a process that is suspended between them can
still write once after it has lost the lease. Every line and every checkpoint is checked immediately
before the write, so that window is a few microseconds.
"""

import errno
import os
import sys
from pathlib import Path

from threefold.run_folder.json_lines import write_whole
from threefold.run_folder.lock import LOST, FolderInUse

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
        """Return True if the lease names this attempt, False if it names another or is missing.

        Raises:
            OSError: the lease exists and cannot be read.
        """
        try:
            return self.file.read_text(encoding="utf-8", errors="replace").strip() == self.attempt
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """End this process if the folder belongs to another attempt.

        If the lease cannot be read, the process continues: the folder cannot be written either, and
        the writer reports that error.
        """
        try:
            if self._is_current_after_retry():
                return
        except OSError:
            return
        text = f"{self.file.parent} no longer belongs to attempt {self.attempt}; exiting\n"
        content = text.encode(errors="backslashreplace")
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, content)
        os._exit(LOST)

    def _is_current_after_retry(self) -> bool:
        try:
            return self.is_current()
        except OSError as error:
            if error.errno != errno.ESTALE:  # NFS, if the file has just been replaced
                raise
            return self.is_current()


def revoke(folder: Path) -> None:
    """Take the folder from every attempt, for a run that locks the folder itself.

    Raises:
        OSError: the lease cannot be removed.
    """
    (folder / FILE).unlink(missing_ok=True)


def grant(folder: Path, attempt: str) -> None:
    """Give the folder to an attempt, and so take it from the earlier one.

    Raises:
        OSError: the lease cannot be written.
    """
    write_whole(folder / FILE, f"{attempt}\n")
