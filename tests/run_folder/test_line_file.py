"""Files of JSON lines after a power loss and on a full disk."""

import errno
import json
from pathlib import Path
from unittest import mock

import pytest

from threefold.run_folder.folder import RunFolder
from threefold.run_folder.json_lines import LineFile

LINES = [{"event": "save", "step": step} for step in (1, 2, 3)]
TEXT = "".join(json.dumps(line) + "\n" for line in LINES).encode()


@pytest.mark.parametrize("cut", range(1, len(TEXT)))
def test_a_line_after_a_torn_line_is_readable(cut: int, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(TEXT[:cut])
    whole = sum(len(json.dumps(line)) <= len(part) for line, part in
                zip(LINES, TEXT[:cut].split(b"\n"), strict=False))  # fmt: skip
    lines = LineFile(file, keys={"event": (str,)})
    assert lines.read() == LINES[:whole]
    lines.append({"event": "start", "step": 9})
    assert lines.read() == [*LINES[:whole], {"event": "start", "step": 9}]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"event": "rol',
        b"\0" * 500,
        b"\0" * 500 + b"\n",
        b'{"event": "sa' + b"\0" * 30 + b"\n",
        b"\xff\xfe\n",
        b"\n\n",
        b"17\n",
        b'"event"\n',
        b'{"step": 4}\n',
        b'{"event": [], "step": 4}\n',
        b'{"event": null, "step": 4}\n',
        b'{"event": "stop"}}\n',
    ],
)
def test_lines_that_cannot_be_parsed_are_skipped(torn: bytes, tmp_path: Path) -> None:
    first = len(TEXT.split(b"\n")[0]) + 1
    file = tmp_path / "events.jsonl"
    file.write_bytes(TEXT[:first] + torn.rstrip(b"\n") + b"\n" + TEXT[first:])
    assert LineFile(file, keys={"event": (str,)}).read() == LINES
    file.write_bytes(TEXT + torn)
    LineFile(file, keys={"event": (str,)}).append({"event": "end", "step": 4})
    assert LineFile(file, keys={"event": (str,)}).read() == [*LINES, {"event": "end", "step": 4}]


def test_a_line_after_nul_bytes_is_read(tmp_path: Path) -> None:
    """Another writer has appended a line without checking for a newline first."""
    (tmp_path / "events.jsonl").write_bytes(TEXT + b"\0" * 100 + b'{"event": "end", "step": 3}\n')
    events = RunFolder(tmp_path).read_events()
    assert [event["event"] for event in events] == ["save", "save", "save", "end"]


def test_waiting_lines_are_read_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")  # the folder does not exist: nothing can be written
    folder.event("rollback", 7, to=4, samples=56)
    assert [event["to"] for event in folder.read_events()] == [4]
    assert folder.history().rolled_back == {4: 56}
    with pytest.raises(OSError, match="No such file"):
        folder.flush()
    folder.path.mkdir()
    folder.flush()
    assert RunFolder(folder.path).history().rolled_back == {4: 56}


def test_waiting_lines_do_not_extend_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(TEXT[:-5])  # the last line is torn
    lines = LineFile(file, keys={"event": (str,)})
    with mock.patch.object(LineFile, "_write", side_effect=OSError(errno.ENOSPC, "full")):
        lines.append({"event": "end", "step": 4})
    assert lines.read() == [*LINES[:2], {"event": "end", "step": 4}]


@pytest.mark.parametrize("how", ["append", "append_durably", "flush"])
def test_the_end_of_a_full_disk_is_reported_once(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = LineFile(tmp_path / "metrics.jsonl", keys={"step": (int,)})
    for number in (1, 2):  # the disk is full twice
        with mock.patch.object(LineFile, "_write", side_effect=OSError(errno.ENOSPC, "full")):
            lines.append({"step": number})
            lines.append({"step": number})
        (full,) = capsys.readouterr().err.splitlines()
        waiting = f"the lines from step {number} on stay in memory until they can be written"
        assert full == f"warning: the disk is full ({lines.path}); {waiting}"
        getattr(lines, how)(*([] if how == "flush" else [{"step": number}]))
        (again,) = capsys.readouterr().err.splitlines()
        assert (
            again == f"{lines.path} can be written again; the lines that stayed in memory are in it"
        )
        lines.append({"step": number})
        assert capsys.readouterr().err == ""


def test_a_failed_replacement_leaves_the_file_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(TEXT)
    lines = LineFile(file, keys={"event": (str,)})
    with (
        mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(OSError, match="No space left"),
    ):
        lines.replace('{"event": "start", "step": 0}\n')
    assert file.read_bytes() == TEXT
    assert [each.name for each in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_durable_append_succeeds_or_raises(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "run" / "events.jsonl", keys={"event": (str,)})
    with pytest.raises(OSError, match="No such file"):
        lines.append_durably({"event": "branch"})
    assert lines.read() == []  # the caller got an error, so the line must not be written later


def test_a_replacement_drops_the_lines_that_wait(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "run" / "metrics.jsonl", keys={"step": (int,)})
    lines.append({"step": 1})  # the folder does not exist: nothing can be written
    (tmp_path / "run").mkdir()
    lines.replace('{"step": 7}\n')
    lines.append({"step": 8})
    assert [line["step"] for line in lines.read()] == [7, 8]
