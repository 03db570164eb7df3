"""Rejection of a run that cannot start: one message and an exit code, on every rank."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from models.errors import UserError
from threefold.config.parallel_dims import World
from threefold.run_folder.lock import FolderInUse
from threefold.runtime.exits import BUSY, REJECTED, PortInUse, leave

SECONDS_FOR_RANK_0_TO_SPEAK = 5


@contextmanager
def rejections(world: World, origin: str = "") -> Iterator[None]:
    """Turn a UserError into one message and an exit code: 6 if folder or port is in use, else 2.

    Launchers end all ranks when the first one exits. The other ranks therefore wait for rank 0 to
    print its message, and print their own only if they are still running after that.

    Args:
        world: the ranks of the run
        origin: recipe file and overrides, for the beginning of the message
    """
    try:
        yield
    except UserError as problem:
        about = f"{origin}: " if origin else ""
        if world.rank != 0:
            time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
            about = f"rank {world.rank}: {about}"
        print(f"pretrain.py: {about}{problem}", file=sys.stderr, flush=True)
        leave(BUSY if isinstance(problem, FolderInUse | PortInUse) else REJECTED)
