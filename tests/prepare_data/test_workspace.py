"""The lock of a preparation's workspace."""

import errno
import os
from pathlib import Path

import pytest

from models.errors import UserError
from threefold.prepare_data.workspace import lock_workspace


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSYS, UserError, "its file system has no flock"),
        (errno.EIO, OSError, "Input/output error: '.*/corpus/lock'"),
    ],
)
def test_only_a_missing_flock_is_reported_as_one(
    number: int, kind: type, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(kind, match=said), lock_workspace(tmp_path / "corpus", shared=False):
        pass
