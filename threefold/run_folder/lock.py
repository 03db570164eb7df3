"""The lock and the lease of a run folder: one run at a time may write into it.

With flock, the kernel or the server of a network file system releases the lock when the process
dies. A server notices the death of a whole node only after a while. Without flock (Lustre mounted
with `noflock`, some FUSE file systems), the file `lock.exclusive` exists for as long as a run holds
the folder.

The holder touches its file every few seconds. A waiting process compares two modification times of
the same file, so clocks of different nodes need not agree. If the time has changed, the holder is
alive and waiting is pointless. A `lock.exclusive` whose time has not changed for a minute is stale.
"""

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from models.errors import UserError
from threefold.run_folder.json_lines import flush, write_whole
from threefold.runtime.launchers import start_ticks

NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
SECONDS_TO_WAIT = 300  # file servers release a dead node's lock after 30 to 120 s
BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0  # longer than network file systems cache a file's time
SHARED, EXCLUSIVE = "lock", "lock.exclusive"
NO_DESCRIPTOR = -1
LOST = 1  # exit code of a process whose lock another process has taken over


class FolderInUse(UserError):
    """Another process holds the run folder.

    Args:
        message: error message that names the folder and the holder
        alive: True if the holder is known to run, so that waiting for it is pointless
    """

    def __init__(self, message: str, *, alive: bool):
        super().__init__(message)
        self.alive = alive


class FolderLock:
    """A lock on a folder, held by this process until it ends or releases it.

    Args:
        inherited: the descriptor of the lock, if this process held it before it replaced itself
            with another program (`execve`); NO_DESCRIPTOR if it held it without flock
    """

    def __init__(self, folder: Path, inherited: int | None = None):
        self.folder, self.inherited = folder, inherited
        self.shared = folder / SHARED  # never deleted; the flock on it is the lock
        self.exclusive = folder / EXCLUSIVE  # its existence is the lock
        self.record = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "machine": machine_id(),
            "started": start_ticks(os.getpid()),
            "token": secrets.token_hex(8),
        }
        self._stream: Any = None
        self._seen: tuple[str, int] | None = None
        self._seen_at = 0.0
        self._moved = self._held_before = False
        self.creates_folder = False  # True: `release` removes the folder if only the lock is in it
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock without waiting; call again to retry.

        Raises:
            FolderInUse: another process holds the lock.
            OSError: the folder cannot be written.
        """
        stream = self._open()
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            raise self._in_use(self.shared) from None
        except OSError as error:
            stream.close()
            if error.errno not in NO_FLOCK:
                raise
            self._create_exclusive()
        else:
            if not self._is_current(stream):
                stream.close()
                raise FolderInUse(
                    f"{self.folder} is being moved by another run; wait for it, or use --run-dir "
                    f"for a second run",
                    alive=False,
                )
            self._stream = stream
            stream.truncate(0)
            stream.write(json.dumps(self.record) + "\n")
            stream.flush()
        atexit.register(self.release)
        threading.Thread(target=self._beat, name="folder lock", daemon=True).start()

    def release(self, moved_to: Path | None = None) -> None:
        """Release the lock; do nothing if this process does not hold it.

        Args:
            moved_to: new path of the folder, if it was renamed after the lock was taken
        """
        self._released.set()
        atexit.unregister(self.release)
        if self._stream is not None:
            self._remove_folder_of_lock()  # before another process can lock it
            with contextlib.suppress(OSError):  # the record may still wait for room on a full disk
                self._stream.close()
            return
        exclusive = (moved_to or self.folder) / self.exclusive.name
        with contextlib.suppress(OSError):
            if self._holds(exclusive):
                exclusive.unlink()
                self._remove_folder_of_lock()

    def _remove_folder_of_lock(self) -> None:
        """Remove the folder if it was created for this lock and contains nothing else."""
        with contextlib.suppress(OSError):
            names = {entry.name for entry in self.folder.iterdir()}
            if self.creates_folder and names <= {SHARED}:  # EXCLUSIVE would be another process's
                self.shared.unlink(missing_ok=True)
                self.folder.rmdir()

    def _open(self) -> Any:
        """Open the file of the lock, or take over its descriptor."""
        inherited, self.inherited = self.inherited, None
        self._held_before = inherited == NO_DESCRIPTOR
        if inherited is not None and not self._held_before:
            with contextlib.suppress(OSError):
                os.set_inheritable(inherited, False)
                return os.fdopen(inherited, "a+", encoding="utf-8")
        return self.shared.open("a+", encoding="utf-8")

    @property
    def descriptor(self) -> int:
        """The descriptor of the lock, which this process holds; NO_DESCRIPTOR without flock."""
        return NO_DESCRIPTOR if self._stream is None else self._stream.fileno()

    def _is_current(self, stream: Any) -> bool:
        """Return False if the folder was renamed between opening its lock and locking it."""
        try:
            return os.path.samestat(os.fstat(stream.fileno()), self.shared.stat())
        except FileNotFoundError:
            return False

    def _create_exclusive(self) -> None:
        for _ in range(2):
            try:
                descriptor = os.open(self.exclusive, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                in_use = self._in_use(self.exclusive)
                if not self._is_stale():
                    raise in_use from None
                self._remove_stale()
                continue
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(json.dumps(self.record) + "\n")
            flush(self.exclusive)
            print(
                f"warning: {self.folder} is on a file system without flock, so the file "
                f"{self.exclusive.name} is used as the lock; if this node dies, the next run waits "
                f"{STALE_SECONDS:.0f} s before it takes the folder over",
                file=sys.stderr,
            )
            return
        raise self._in_use(self.exclusive)

    def _is_stale(self) -> bool:
        """Return True if the holder of the exclusive file appears to be dead."""
        if self._seen is None:
            return True  # released a moment ago
        holder = _parse(self._seen[0])
        if holder.get("machine") == self.record["machine"]:
            is_own = holder.get("process") == self.record["process"]  # before it replaced itself
            return not is_running(holder) or (is_own and self._held_before)
        return time.monotonic() - self._seen_at >= STALE_SECONDS

    def _remove_stale(self) -> None:
        """Remove a stale file, under a mutex, because two processes may have noticed it."""
        mutex = self.folder / "lock.takeover"
        try:
            os.close(os.open(mutex, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            raise FolderInUse(
                f"{self.folder} is being taken over by another process; if there is none, remove "
                f"{mutex}",
                alive=False,
            ) from None
        try:
            if self._seen is not None and _look(self.exclusive) == self._seen:
                self.exclusive.unlink()
        finally:
            mutex.unlink()

    def _in_use(self, file: Path) -> FolderInUse:
        """Return an error that describes the holder of a lock file.

        The file is compared with its state at the previous call: if only the time has changed, the
        holder is alive.
        """
        now = _look(file)
        if now != self._seen:
            same_holder = self._seen is not None and now is not None and now[0] == self._seen[0]
            self._moved, self._seen, self._seen_at = same_holder, now, time.monotonic()
        text = now[0] if now else ""
        holder = _parse(text)
        alive = self._moved
        if holder.get("machine") == self.record["machine"]:
            alive = is_running(holder)
        name = text or "another process"
        if holder:
            name = f"process {holder.get('process')} on {holder.get('host')}"
        return FolderInUse(
            f"{self.folder} is in use by {name}; wait for it, or use --run-dir for a second run",
            alive=alive,
        )

    def _beat(self) -> None:
        """Touch the file regularly; end this process if another one has taken the folder over."""
        file = self.shared if self._stream is not None else self.exclusive
        while not self._released.wait(BEAT_SECONDS):
            if self._was_taken_over(file) and not self._released.is_set():
                text = f"{self.folder} was taken over by another run; use another --run-dir\n"
                os.write(2, text.encode(errors="backslashreplace"))
                os._exit(LOST)
            with contextlib.suppress(OSError):
                os.utime(file)

    def _holds(self, exclusive: Path) -> bool:
        seen = _look(exclusive)
        return seen is not None and _parse(seen[0]).get("token") == self.record["token"]

    def _was_taken_over(self, file: Path) -> bool:
        """Return True if another run took the folder over.

        This happens if this process was suspended for long, or if flock locks a file for one node
        only (`localflock` of Lustre, `local_lock=flock` of NFS) and a run on another node has the
        lock, too.
        """
        try:
            seen = _look(file)
        except OSError:  # the disk may be unavailable for a moment
            return False
        return seen is not None and _parse(seen[0]).get("token") not in (
            self.record["token"], None,
        )  # fmt: skip


def is_held(folder: Path) -> bool:
    """Return True if a run appears to hold a folder; the lock itself is not touched.

    A holder on another machine counts as alive if it has touched its file in the last minute, which
    assumes that the clocks of both machines agree.
    """
    for name in (EXCLUSIVE, SHARED):
        try:
            seen = _look(folder / name)
        except OSError:
            continue
        holder = _parse(seen[0]) if seen else {}
        if not seen or not holder:
            continue
        if holder.get("machine") == machine_id():
            if is_running(holder):
                return True
        elif time.time() - seen[1] / 1e9 < STALE_SECONDS:
            return True
    return False


def _look(file: Path) -> tuple[str, int] | None:
    """Return the content and the modification time of a lock file; None if it does not exist."""
    try:
        # Opening the file makes NFS ask the server; its cached time could be out of date.
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(1000).strip(), os.fstat(stream.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _parse(record: str) -> dict[str, Any]:
    try:
        content = json.loads(record)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_running(holder: dict[str, Any]) -> bool:
    """Return True if the holder still runs on this machine and its PID was not reused."""
    process = holder.get("process")
    started = start_ticks(process) if type(process) is int else None
    return started is not None and started == holder.get("started")


def machine_id() -> str:
    """Return an identifier of the machine, its boot and its container.

    A host name is not enough, because containers may share one. If /proc cannot be read, the
    identifier is random and never equals another one, so holders are judged by their heartbeats
    alone.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(8)}"


# The lease of a run folder: the right to write into it, which launch.py gives to one attempt.
#
# launch.py holds the lock of the folder itself, and starts the ranks several times: each start is
# an attempt. A node that has lost its network, or whose processes were stopped, may still run
# ranks of an earlier attempt. The file `lease` names the current attempt, and the ranks of another
# one must not write. The check and the write are not atomic: a process that is suspended between
# them can still write once after it has lost the lease. Every line and every checkpoint is checked
# immediately before the write, so that window is a few microseconds.

LEASE = "lease"


class Lease:
    """The lease of a run folder, as a rank of an attempt sees it.

    It takes the place of the folder's lock (`FolderLock`), which launch.py holds.

    Args:
        attempt: name of the attempt that this process belongs to
    """

    def __init__(self, folder: Path, attempt: str):
        self.file, self.attempt = folder / LEASE, attempt

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


def holder_of(folder: Path) -> str:
    """Return what the holder of a folder has written into its lock and its lease."""
    text = ""
    for name in (SHARED, EXCLUSIVE, LEASE):
        with contextlib.suppress(OSError):
            text += (folder / name).read_text(encoding="utf-8", errors="replace")
    return text


def revoke(folder: Path) -> None:
    """Take the folder from every attempt, for a run that locks the folder itself.

    Raises:
        OSError: the lease cannot be removed.
    """
    (folder / LEASE).unlink(missing_ok=True)


def grant(folder: Path, attempt: str) -> None:
    """Give the folder to an attempt, and so take it from the earlier one.

    Raises:
        OSError: the lease cannot be written.
    """
    write_whole(folder / LEASE, f"{attempt}\n")
