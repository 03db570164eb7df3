"""prepare_data.py tasks: tasks from a corpus, and from samples of lm-evaluation-harness."""

import errno
import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from models.errors import UserError
from tests.commands import run_here
from tests.pretrain.evaluation.text_corpus import write_text_corpus
from threefold.commands import prepare_data
from threefold.data.tasks import read_items
from threefold.prepare_data import tasks
from threefold.prepare_data.tasks import (
    CHOICES,
    CONTEXT_LINES,
    items_of_samples,
    last_word,
    make_items,
    next_line,
    validation_texts,
)
from threefold.run_folder.json_lines import write_whole


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "data"
    write_text_corpus(folder)
    return folder


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here(prepare_data.main, "tasks", *arguments)


def all_text(corpus: Path) -> str:
    return "\n\n".join(text for texts in validation_texts(corpus) for text in texts)


def test_next_lines_are_lines_of_the_corpus(corpus: Path) -> None:
    text = all_text(corpus)
    items = make_items(corpus, next_line, count=50)
    assert items == make_items(corpus, next_line, count=50)
    for item in items:
        right = item["choices"][item["answer"]]
        assert f"{item['prompt']}\n{right}" in text
        assert len(set(item["choices"])) == CHOICES
        assert item["prompt"].count("\n") < CONTEXT_LINES
    answers = [item["answer"] for item in items]
    assert {answers.count(n) > 4 for n in range(CHOICES)} == {True}  # the order is random


def test_last_words_are_in_their_prompts(corpus: Path) -> None:
    text = all_text(corpus)
    for item in make_items(corpus, last_word, count=20):
        assert f"{item['prompt']} {item['answer']}\n" in f"{text}\n"
        assert item["answer"] in item["prompt"]


def test_few_documents_of_a_large_corpus_are_read_at_a_time(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = validation_texts(corpus)
    monkeypatch.setattr(tasks, "MAX_DOCUMENTS_IN_MEMORY", 4)
    lists = list(validation_texts(corpus))
    assert len(whole) > 8 and {len(texts) for texts in lists} <= {3, 4}
    assert sorted(text for texts in lists for text in texts) == sorted(whole)
    items = make_items(corpus, next_line, count=30)
    assert len({item["prompt"] for item in items}) == 30


def test_the_command_writes_a_task_once(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "tasks" / "lines.jsonl"
    done = command("next-line", corpus, "--output", output, "--items", 10)
    assert done.returncode == 0, done.stderr
    assert f'tasks = [{{ name = "lines", path = "{output}" }}]' in done.stdout
    assert len(read_items(output)) == 10
    done = command("next-line", corpus, "--output", output)
    assert done.returncode == 2 and "already exists; use another file" in done.stderr
    done = command("next-line", corpus, "--output", tmp_path / "a", "--items", 100_000)
    assert done.returncode == 2 and "--items 100000: the validation documents" in done.stderr
    done = command("last-word", tmp_path, "--output", tmp_path / "a")
    assert done.returncode == 2 and "is missing; make it with" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["next-line", "--output", "my task.jsonl"],
            "characters; use --output {folder}/my-task.jsonl",
        ),
        (["last-word", "--output", "é.jsonl"], "characters; use --output {folder}/e.jsonl"),
        (
            ["next-line", "--output", "a.jsonl", "--delimiter", ""],
            "--delimiter '' has no effect with next-line, only with samples; omit it",
        ),
        (
            ["samples", "--output", "a.jsonl", "--items", 3],
            "--items 3 has no effect with samples, only with next-line or last-word; omit it",
        ),
    ],
)
def test_options_that_make_no_task_are_rejected(
    words: list[Any], said: str, corpus: Path, tmp_path: Path
) -> None:
    kind, option, name, *others = words
    done = command(kind, corpus, option, tmp_path / name, *others)
    assert done.returncode == 2 and said.format(folder=tmp_path) in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_path_of_a_task_is_quoted(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / 'my "tasks"' / "lines.jsonl"
    done = command("next-line", corpus, "--output", output, "--items", 5)
    printed = done.stdout.partition("in a recipe:\n")[2]
    (task,) = tomllib.loads(printed)["evaluation"]["tasks"]
    assert task == {"name": "lines", "path": str(output)}


@pytest.mark.parametrize(
    ("call", "code", "remedy"),
    [("fsync", errno.ENOSPC, "free disk space"), ("rename", errno.EACCES, "make the folder writ")],
)
def test_a_task_that_cannot_be_written_is_named_with_a_remedy(
    call: str, code: int, remedy: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, problem = tmp_path / "lines.jsonl", OSError(code, os.strerror(code))
    monkeypatch.setattr(os, call, mock.Mock(side_effect=problem))
    done = command("next-line", corpus, "--output", output, "--items", 5)
    said = f"prepare_data.py: --output {output} cannot be written ({problem.strerror}); {remedy}"
    assert done.returncode == 2 and done.stderr.startswith(said) and not list(tmp_path.iterdir())
    with pytest.raises(OSError, match=problem.strerror) as raised:
        write_whole(output, "text")
    assert raised.value.filename == str(output)


def sample(number: int, context: str, *continuations: str, target: Any) -> dict[str, Any]:
    """Return a sample as lm_eval 0.4.13 writes it, without the keys that are not read."""
    arguments = {
        f"gen_args_{n}": {"arg_0": context, "arg_1": text} for n, text in enumerate(continuations)
    }
    return {"doc_id": number, "doc": {}, "target": target, "arguments": arguments, "filter": "none"}


def written(file: Path, *samples: Any) -> Path:
    file.write_text("".join(f"{json.dumps(each)}\n" for each in samples))
    return file


def test_samples_become_items(tmp_path: Path) -> None:
    first = sample(0, "a", " b", " c", target=1)
    file = written(tmp_path / "x", first, sample(1, "d", " e", " f", target="0"), first)
    assert items_of_samples(file, None) == [
        {"id": "0", "prompt": "a", "delimiter": " ", "choices": ["b", "c"], "answer": 1},
        {"id": "1", "prompt": "d", "delimiter": " ", "choices": ["e", "f"], "answer": 0},
    ]
    file = written(tmp_path / "x", sample(0, "a", "b", target="b"), sample(1, "c", " d", target=""))
    assert [(i["delimiter"], i["answer"]) for i in items_of_samples(file, None)] == [
        ("", "b"), ("", " d"),
    ]  # fmt: skip
    texts = sample(0, "a", " b", " c", target="c"), sample(1, "d", " 1", " 0", " 2", target="2")
    file = written(tmp_path / "x", *texts)
    assert [item["answer"] for item in items_of_samples(file, None)] == [1, 2]
    output = tmp_path / "y.jsonl"
    done = command("samples", written(tmp_path / "x", first), "--output", output)
    assert done.returncode == 0 and read_items(output)[0].choices == ("b", "c"), done.stderr


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "has no samples"),
        (([],), "is not a sample"),
        (({"doc_id": 0},), "has no requests"),
        (({"doc_id": 0, "arguments": {"gen_args_0": {"arg_0": "a", "arg_1": {}}}},), "requests"),
        (
            (sample(0, "a", " b", " c", target=2),),
            "target = 2 is neither the text of one of 2",
        ),
        ((sample(0, "a", " b", " c", target="d"),), "target = 'd' is neither"),
        (
            (sample(0, "a", " 1", " 0", target="1"),),
            "the text of a choice and the number of another",
        ),
        (({"doc_id": 0, "arguments": [["a", "c"], ["b", "c"]]},), "compares 2 contexts"),
    ],
)
def test_other_samples_are_rejected(lines: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        items_of_samples(written(tmp_path / "x", *lines), None)


def test_another_delimiter_is_rejected(tmp_path: Path) -> None:
    file = written(tmp_path / "x", sample(0, "a", " b", " c", target=0))
    with pytest.raises(UserError, match="does not begin with --delimiter '\\\\n'"):
        items_of_samples(file, "\n")
