"""Rejection by one rank, shared with all others, so that no rank waits in a collective for it."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from models.errors import UserError
from threefold.pretrain import rejection
from threefold.run_folder.lock import FolderInUse
from threefold.runtime.exits import leave


@contextmanager
def rejected_together() -> Iterator[None]:
    """Raise on all ranks the UserError that one of them has raised; collective.

    Any other exception is a defect. The rank raises it after telling the other ranks, which then
    end with exit code 1 instead of waiting for that rank in their next collective.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    is_defect = problem is not None and not isinstance(problem, UserError)
    in_use = isinstance(problem, FolderInUse)
    of_ranks: list[tuple[bool, bool, str]] = [(False, False, "")] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (is_defect, in_use, str(problem or "")))
    if problem and is_defect:
        raise problem
    for rank, (failed, *_) in enumerate(of_ranks):
        if failed:
            # Launchers end all ranks when the first one exits, so let the failed rank print first.
            time.sleep(rejection.SECONDS_FOR_RANK_0_TO_SPEAK)
            print(f"this rank exits because rank {rank} failed", file=sys.stderr)
            leave(1)
    for _, in_use, message in of_ranks:
        if message:
            raise FolderInUse(message, alive=True) if in_use else UserError(message)
