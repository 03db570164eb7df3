import os
from pathlib import Path

from threefold.run_folder import folder


def test_the_code_version_is_the_commit(tmp_path: Path, monkeypatch) -> None:
    assert folder.code_version() is None or len(folder.code_version()) >= 40
    monkeypatch.setattr(folder, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", os.path.dirname(tmp_path))
    assert folder.code_version() is None
