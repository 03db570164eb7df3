"""Task files: both kinds of items, and a message for each mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from threefold.data.tasks import Item, read_items

CHOICE = {"prompt": "a", "choices": ["b", "c"], "answer": 1}
CLOZE = {"prompt": "a", "answer": "b", "delimiter": "", "id": "x"}


def write(file: Path, *lines: Any) -> Path:
    file.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return file


def test_both_kinds_are_read(tmp_path: Path) -> None:
    assert read_items(write(tmp_path / "a", CHOICE, "", CHOICE)) == [Item("a", ("b", "c"), 1)] * 2
    (item,) = read_items(write(tmp_path / "a", CLOZE, CLOZE), limit=1)
    assert item == Item("a", ("b",), 0, "") and item.is_cloze


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "has no items"),
        (("{",), ":1 is not JSON"),
        (("[]",), ":1 is not a JSON object"),
        ((CHOICE, CLOZE), "lines with choices and lines without"),
        ((CHOICE, CHOICE | {"chioces": []}), ":2: unknown key 'chioces'"),
        ((CHOICE | {"prompt": None},), "prompt = None is not a text"),
        ((CHOICE | {"delimiter": 1},), "delimiter = 1 is not a text"),
        ((CHOICE | {"choices": ["b"]},), "is not a list of two or more texts"),
        ((CHOICE | {"choices": ["b", ""]},), "is not a list of two or more texts"),
        ((CHOICE | {"choices": "bc"},), "is not a list of two or more texts"),
        ((CHOICE | {"answer": 2},), "answer = 2 is not the number of one of 2 choices; use 0 to 1"),
        ((CHOICE | {"answer": True},), "answer = True is not the number"),
        ((CHOICE | {"answer": "1"},), "answer = '1' is not the number"),
        (({"prompt": "a"},), "answer = None is not a text"),
        ((CLOZE | {"answer": ""},), "answer is empty"),
    ],
)
def test_a_mistake_is_named(lines: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_items(write(tmp_path / "a", *lines))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere cannot be read .*prepare_data\.py tasks"):
        read_items(tmp_path / "nowhere")
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not UTF-8"):
        read_items(tmp_path / "a")
