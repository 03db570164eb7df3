"""The folder of one run: lock, recipe, metrics, events, and the versions that produced them."""

import errno
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models.errors import FULL_DISK_ERRORS, UserError, a_few, check_links, counted, why_no_folder
from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.loading import REPOSITORY
from threefold.config.parallel_dims import ParallelDims
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.run_folder.history import (
    History,
    Progress,
    current_event,
    published,
    replay,
    seconds_of,
    time_stamp,
)
from threefold.run_folder.json_lines import (
    LineFile,
    flush,
    number,
    write_whole,
)
from threefold.run_folder.lock import FolderLock, Lease, revoke

METRIC_KEYS = {"step": (int,)}
EVENT_KEYS = {"event": (str,), "step": (int,)}

# A folder with one of RUN_FILES is a run folder. Another folder becomes one only if it is empty or
# has nothing but files of BEFORE_A_RUN, logs and hidden files.
RUN_FILES = {
    "recipe.toml",
    "launched.toml",
    "lease",
    "metrics.jsonl",
    "events.jsonl",
    "checkpoints",
}
BEFORE_A_RUN = {"lock", "attempts.jsonl", "hang-at-start", "wandb", "lost+found"}
LOG_SUFFIXES = {".log", ".out", ".err", ".txt"}
OTHER_FOLDER = "use --run-dir with another folder"
RECIPE_FILES = ("recipe.toml", "launched.toml")  # written by pretrain.py and launch.py


def run_folder_of(recipe: Path) -> Path | None:
    """Return the folder of the run that has written this recipe; None for any other file."""
    folder = recipe.parent
    has_run = any((folder / name).is_file() for name in ("metrics.jsonl", "events.jsonl"))
    return folder if recipe.name in RECIPE_FILES and has_run else None


class RunFolder:
    """`runs/<name>/`: recipe.toml, metrics.jsonl, events.jsonl, checkpoints/, wandb/.

    Args:
        attempt: the attempt of launch.py that this process belongs to; empty for a run without
            launch.py, which locks the folder itself
        lock: `lock_descriptor`, if this process held the lock before it replaced itself
    """

    def __init__(self, path: Path, attempt: str = "", lock: int | None = None):
        self._given = path.absolute()
        path = path.resolve()  # `move_aside` then renames the target of a link and keeps the link
        self.path, self.attempt = path, attempt
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self._metric_lines = LineFile(self.metrics, keys=METRIC_KEYS)
        self._event_lines = LineFile(self.events, keys=EVENT_KEYS)
        self._lease = Lease(path, attempt) if attempt else None
        self._lock: FolderLock | Lease | None = self._lease
        self._inherited = lock

    def hold(self) -> None:
        """Create the folder and lock it until this process ends; call again to retry.

        A process that launch.py has started only checks that its attempt has the folder's lease.

        Raises:
            FolderInUse: another process holds the folder.
            UserError: the folder cannot be written, or a link in its path is dangling.
        """
        try:
            check_links(self._given, OTHER_FOLDER)
            self._check_owner()
            self._lock = self._lock or FolderLock(self.path, self._inherited)
            self._inherited = None
            if isinstance(self._lock, FolderLock) and not self.path.exists():
                self._lock.creates_folder = True
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_checkpoints()
            self._lock.acquire()
            if self._lease is None:
                revoke(self.path)  # ranks may have outlived the launch.py that held the lock
        except OSError as error:
            self.release()
            raise _cannot_write(error.filename or self.path, error) from None

    def check_unused(self) -> None:
        """Raise FolderInUse if another process holds the folder.

        Raises:
            UserError: the folder is not that of a run, or a link in its path is dangling.
        """
        check_links(self._given, OTHER_FOLDER)
        if self.path.exists():
            self._check_owner()
            lock = FolderLock(self.path)
            lock.acquire()
            lock.release()

    def _check_owner(self) -> None:
        """Raise a UserError if the folder has files and is not a run folder.

        A run would mix its files with those of a corpus or of recipes, and `move_aside` would
        rename their folder.
        """
        if not self.path.is_dir():
            return
        entries = list(self.path.iterdir())
        if any(_is_one_of(RUN_FILES, entry) for entry in entries):
            return
        others = [
            entry.name
            for entry in sorted(entries)
            if not (_is_one_of(BEFORE_A_RUN, entry) or _is_log(entry))
        ]
        if others:
            raise UserError(
                f"{self.path} is not a run folder: it contains {a_few(others)}; use --run-dir with "
                f"a new folder, such as runs/mine"
            )

    def _check_checkpoints(self) -> None:
        """Raise a UserError if the folder of checkpoints exists but is not a folder."""
        check_links(self.checkpoints, OTHER_FOLDER)
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise UserError(
                f"{self.checkpoints} is not a folder; rename it, or use --run-dir with another "
                f"folder"
            )

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._lock is not None:
            self._lock.release()

    @property
    def lock_descriptor(self) -> int | None:
        """The descriptor of the folder's lock; None if this process holds none."""
        return self._lock.descriptor if isinstance(self._lock, FolderLock) else None

    def move_aside(self) -> None:
        """Move everything that an earlier run left here to a sibling folder.

        The move is a single rename, so the next start finds either the whole earlier run or an
        empty folder.

        Raises:
            FolderInUse: another process has already locked the new folder.
            UserError: the folder cannot be moved.
        """
        if self._lease is not None:
            raise UserError(
                "--resume never: launch.py holds the run folder, which therefore cannot be moved; "
                "use --run-dir with another folder, or rename the folder first"
            )
        aside = self.path.with_name(f"{self.path.name}.{time_stamp()}")
        try:
            if all(entry.name.startswith("lock") for entry in self.path.iterdir()):
                return
            os.rename(self.path, aside)
            if self._given.is_symlink():  # otherwise `hold` would reject the link
                self.path.mkdir(exist_ok=True)
            flush(self.path.parent)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be moved to {aside} ({error.strerror}); use --run-dir with "
                f"another folder"
            ) from None
        earlier, self._lock = self._lock, None
        # The earlier lock is released before the new lock exists. Otherwise the heartbeat of the
        # earlier lock would mistake the new lock for that of another run and end this process.
        if earlier is not None:
            earlier.release(moved_to=aside)
        self.hold()
        print(f"the earlier run in this folder was moved to {aside}")

    def prepare(self, recipe: Recipe, start: Progress, *, branching: bool = False) -> None:
        """Prepare the folder to continue after a step.

        Args:
            recipe: written to recipe.toml
            start: the last completed step to keep, and the samples read before the next step
            branching: True if the next steps differ from the steps already recorded after `start`

        Raises:
            UserError: the folder cannot be written.
        """
        self.check_lease()
        self.write_recipe("recipe.toml", recipe)
        try:
            content = self._metric_lines.content()
            kept, lost = self._metric_lines.cut(content, start.step)
            # If a recorded step after `start` ended at or before the sample at which the run
            # continues, the step is from a branch that a rollback discarded.
            limit = start.tokens(PhasePlan(recipe))
            discarded = any(line.get("tokens", limit + 1) <= limit for line in map(_numbers, lost))
            if kept != content or not self.has_written_metrics:
                self._replace_metrics(kept, copy=branching or discarded)
            if lost:
                self.event("repeat", start.step, steps=len(lost), seconds=seconds_of(lost))
        except OSError as error:
            raise _cannot_write(error.filename or self.path, error) from None

    def write_recipe(self, name: str, recipe: Recipe) -> Path:
        """Write a recipe with every default into the folder, and return its file.

        Raises:
            UserError: the file cannot be written.
        """
        file = self.path / name
        try:
            write_whole(file, recipe.toml())
        except OSError as error:
            raise _cannot_write(error.filename or file, error) from None
        return file

    def restore_metrics(self, source: Path, step: int, *, stamp: str) -> None:
        """Replace metrics.jsonl with the lines of `source` up to a step; copy the previous file.

        Args:
            source: the metrics of the run that wrote the checkpoint to continue from
            step: the last step to keep
            stamp: part of the copy's name; if the copy exists, an earlier start has already made
                it

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            copied = self.path / f"metrics.{stamp}.jsonl"
            lines = LineFile(source, keys=METRIC_KEYS)
            kept, _ = lines.cut(lines.content(), step)
            self._replace_metrics(kept, copy=not copied.exists(), copy_to=copied)
        except OSError as error:
            raise _cannot_write(error.filename or self.path, error) from None

    def _replace_metrics(self, kept: bytes, *, copy: bool, copy_to: Path | None = None) -> None:
        """Replace metrics.jsonl. With `copy`, first copy the file if lines would be lost."""
        before = self._metric_lines.content()
        if copy and not kept.startswith(before):
            copied = copy_to or self.path / f"metrics.{time_stamp()}.jsonl"
            write_whole(copied, before.decode(errors="replace"))
        self._metric_lines.replace(kept.decode(errors="replace"))

    def event(self, event: str, step: int, **facts: Any) -> None:
        """Append to events.jsonl: start, resume, first_step, skip, save, ..."""
        self.check_lease()
        self._event_lines.append(_event(event, step, facts))

    def durable_event(self, event: str, step: int, **facts: Any) -> None:
        """Append to events.jsonl, and wait until the line is on the disk.

        Raises:
            UserError: the file cannot be written.
        """
        self.check_lease()
        try:
            self._event_lines.append_durably(_event(event, step, facts))
        except OSError as error:
            raise _cannot_write(self.events, error) from None

    def metric(self, line: dict[str, Any]) -> None:
        """Append the line of a step to metrics.jsonl; floats keep all their digits."""
        self.check_lease()
        self._metric_lines.append(line)

    @property
    def has_written_metrics(self) -> bool:
        """True if metrics.jsonl has lines, and no line waits in memory for room on the disk."""
        return self._metric_lines.is_written

    def missing_lines(self) -> list[str]:
        """Try to write the lines that wait in memory; return a message for each file without room.

        A checkpoint is published only after all earlier lines are on the disk, so the missing steps
        are always later than the newest checkpoint.
        """
        messages: list[str] = []
        if lines := self._metric_lines.write_waiting():
            since = " since its newest checkpoint" if published(self.checkpoints) else ""
            messages.append(
                f"{self.metrics} lacks the metrics of {counted(len(lines), 'step')}, from step "
                f"{min(line['step'] for line in lines)} on, which could not be written; resuming "
                f"the run repeats every step{since}"
            )
        if lines := self._event_lines.write_waiting():
            messages.append(
                f"{self.events} lacks {counted(len(lines), 'event')}, which could not be written"
            )
        return messages

    def check_lease(self) -> None:
        """End this process if launch.py has given the folder to a later attempt."""
        if self._lease is not None:
            self._lease.check()

    def flush(self) -> None:
        """Wait until all metrics and events are on the disk.

        Raises:
            OSError: a file cannot be written.
        """
        self._metric_lines.flush()
        self._event_lines.flush()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the numbers in the lines of metrics.jsonl that can be parsed.

        Raises:
            UserError: the file cannot be read.
        """
        return [_numbers(line) for line in _read(self._metric_lines)]

    def read_events(self) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl that can be parsed.

        Raises:
            UserError: the file cannot be read.
        """
        return [current_event(event) for event in _read(self._event_lines)]

    def history(self) -> History:
        """Return the history of the current branch, derived from the events.

        Raises:
            UserError: events.jsonl cannot be read.
        """
        return replay(self.read_events())


def _event(event: str, step: int, facts: dict[str, Any]) -> dict[str, Any]:
    return {"event": event, "step": step, "time": time.time()} | facts


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl without the values that are not numbers."""
    return {key: value for key, value in line.items() if number(value) is not None}


def _read(lines: LineFile) -> list[dict[str, Any]]:
    try:
        return lines.read()
    except OSError as error:
        raise UserError(
            f"{lines.path} cannot be read ({error.strerror}); make it readable, or use --run-dir "
            f"with another folder"
        ) from None


def _is_one_of(names: set[str], path: Path) -> bool:
    """Return True if a file has one of the names, maybe with a suffix such as ".incomplete"."""
    return any(path.name == name or path.name.startswith(f"{name}.") for name in names)


def _is_log(path: Path) -> bool:
    """Return True for a hidden file, a log of a launcher or a job, or a folder with only logs."""
    if path.name.startswith("."):
        return True
    if path.is_dir():
        return all(map(_is_log, path.iterdir()))
    return path.suffix in LOG_SUFFIXES


def _cannot_write(file: Path | str, error: OSError) -> UserError:
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return UserError(
            f"{file} {why_no_folder(Path(file))}; name a folder with --run-dir, such as runs/mine"
        )
    is_full = error.errno in FULL_DISK_ERRORS
    remedy = "free disk space" if is_full else "make it writable"
    return UserError(
        f"{file} cannot be written ({error.strerror}); {remedy}, or use --run-dir with another "
        f"folder"
    )


# The provenance of a run's numbers: versions of code and libraries, and the layout.


def code_version() -> str | None:
    """Return the repository's commit, with "-dirty" if it has changes; None outside git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of this code, of Python and of the numerical libraries."""
    libraries = {name: version(name) for name in ("torch", "deepspeed", "numpy")}
    return {"threefold": code_version(), "python": platform.python_version()} | libraries


def layout_of(recipe: Recipe, dims: ParallelDims) -> dict[str, Any]:
    """Return the layout of a run, with the content of the DeepSpeed JSON."""
    return dims.shown_sizes | {
        "schedule": recipe.layout.schedule,
        "deepspeed": recipe.deepspeed,
        "deepspeed_json": read_deepspeed_json(recipe.deepspeed),
    }
