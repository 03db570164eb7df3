import os
from pathlib import Path

from threefold.run_folder import provenance


def test_the_code_version_is_the_commit(tmp_path: Path, monkeypatch) -> None:
    assert provenance.code_version() is None or len(provenance.code_version()) >= 40
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", os.path.dirname(tmp_path))
    assert provenance.code_version() is None
