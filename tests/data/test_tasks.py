"""Requests: the split of texts into tokens, packing, and the windows of all context ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from models.errors import UserError
from tests.pretrain.evaluation.text_corpus import (
    END,
    SEQUENCE_LENGTH,
    evaluating_recipe,
    write_lines,
    write_text_corpus,
)
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import ParallelDims
from threefold.data.dataset import TrainingData
from threefold.data.tasks import UNCOUNTED, Tasks, TaskTokenizer, open_tasks, pack

PAIRS = [
    ("def f", "(x)"),
    ("return self.", " x"),
    ("    if self:\n        ", "pass"),
    ("    if self:\n\n", "\n    pass"),
    ("", "import os"),
    ("", END + "import"),
    ("self", "é"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "data"
    write_text_corpus(folder)
    return folder


def reference_pair(
    tokenizer: transformers.PreTrainedTokenizerBase, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Return the tokens as `TemplateLM` of lm-evaluation-harness 0.4.13 makes them."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prefix = tokenizer.bos_token_id
    if context == "":
        tokens = encode(continuation)
        return ([prefix], tokens) if prefix != tokens[0] else (tokens[:1], tokens[1:])
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = encode(context)
    return before, encode(context + continuation)[len(before) :]


def test_texts_are_split_as_by_the_harness(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    ours = TaskTokenizer(folder / "tokenizer", "data.tokenizer", start=[])
    assert ours.encode(PAIRS) == [reference_pair(theirs, *pair) for pair in PAIRS]
    with_start = TaskTokenizer(folder / "tokenizer", "data.tokenizer", start=[7]).encode(PAIRS)
    assert [context[0] for context, _ in with_start] == [7] * len(PAIRS)
    assert with_start[0] == ([7, *ours.encode(PAIRS)[0][0]], ours.encode(PAIRS)[0][1])
    assert with_start[4][0] == [7]  # an empty context needs no other token


def test_an_empty_prompt_needs_a_token_before_it(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json",):
        (tmp_path / name).write_bytes((folder / "tokenizer" / name).read_bytes())
    with pytest.raises(UserError, match="neither a BOS nor an end-of-text token"):
        TaskTokenizer(tmp_path, "data.tokenizer", start=[]).encode([("", "x")])
    settings = {"eos_token": {"content": END}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = TaskTokenizer(tmp_path, "data.tokenizer", start=[])
    assert tokenizer.encode([("", "x")])[0][0] == [tokenizer.tokenizer.token_to_id(END)]


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_complete_and_tight(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 100, size=400).tolist()
    windows = pack(lengths, 100)
    assert sorted(n for window in windows for n in window) == list(range(400))
    assert max(sum(lengths[n] for n in window) for window in windows) <= 100
    assert len(windows) <= 11 / 9 * -(-sum(lengths) // 100) + 1


def test_packing_fills_gaps() -> None:
    assert pack([60, 100, 30, 10, 40], 100) == [[1], [0, 4], [2, 3]]
    assert pack([], 100) == []


def recipe_of(folder: Path, **changes: object) -> Tasks:
    return open_tasks(parse_recipe(evaluating_recipe(folder, **changes), "test"))


def test_all_context_ranks_together_have_every_window(folder: Path) -> None:
    """The label at each position of a request is the token after it, on exactly one rank."""
    recipe = parse_recipe(
        evaluating_recipe(folder, layout__context=2, batch__micro_sequences=1), "test"
    )
    dims = ParallelDims(pipeline=1, data=2, tensor=1, context=2)
    seen: dict[int, int] = {}
    tasks = open_tasks(recipe)
    for rank in range(4):
        data = TrainingData(recipe, dims, rank)
        rows_of_rank = list(data.evaluation_samples(len(tasks.windows)))
        for rows, micro_batch in zip(rows_of_rank, data.task_windows(), strict=True):
            requests = tasks.requests_at(rows, micro_batch.info.slices)
            assert micro_batch.tokens is not None and micro_batch.labels is not None
            assert micro_batch.tokens.shape == micro_batch.labels.shape == requests.shape
            assert micro_batch.tokens.shape == (1, SEQUENCE_LENGTH // 2)
            assert sum(tasks.lengths(rows)[0]) == SEQUENCE_LENGTH
            for number, label in zip(
                requests.ravel(), micro_batch.labels.numpy().ravel(), strict=True
            ):
                if number != UNCOUNTED:
                    seen[number] = seen.get(number, 0) + 1
                    request = tasks.requests[number]
                    assert label in request.tokens[-request.predicted :]
    expected = {n: request.predicted for n, request in enumerate(tasks.requests)}
    assert seen == expected


def test_long_prompts_are_cut_on_the_left(folder: Path, tmp_path: Path) -> None:
    items = [{"prompt": "x = 1\n" * 200, "answer": "yes"}, {"prompt": "x", "answer": "y"}]
    write_lines(tmp_path / "long.jsonl", items)
    tasks = recipe_of(folder, evaluation__tasks=[{"name": "a", "path": f"{tmp_path}/long.jsonl"}])
    assert [request.is_cut for request in tasks.requests] == [True, False]
    assert tasks.requests[0].length == SEQUENCE_LENGTH
    (warning,) = tasks.warnings
    assert "task a: 1 of 2 choices" in warning and "cut off on the left" in warning
    whole = TaskTokenizer(folder / "tokenizer", "", start=[]).encode([("x = 1\n" * 200, " yes")])
    tokens = [*whole[0][0], *whole[0][1]]
    assert tasks.requests[0].tokens.tolist() == tokens[-SEQUENCE_LENGTH - 1 :]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"prompt": "x", "answer": "y = 2\n" * 100}, "more than model.sequence_length = 96"),
        ({"prompt": "class", "answer": "x", "delimiter": ""}, ""),
    ],
)
def test_a_choice_longer_than_a_sequence_is_rejected(
    item: dict[str, str], message: str, folder: Path, tmp_path: Path
) -> None:
    write_lines(tmp_path / "a.jsonl", [item])
    changes = {"evaluation__tasks": [{"name": "a", "path": f"{tmp_path}/a.jsonl"}]}
    if not message:
        assert recipe_of(folder, **changes).requests
        return
    with pytest.raises(UserError, match=f"task a, item 1, .* {message}"):
        recipe_of(folder, **changes)


def test_a_tokenizer_that_cannot_encode_is_rejected(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"made": "for a proof"}')
    with pytest.raises(UserError, match=r"cannot encode the tasks of evaluation\.tasks"):
        TaskTokenizer(tmp_path, 'data.tokenizer = "x"', start=[])


def test_tasks_are_opened_only_if_there_are_any(folder: Path) -> None:
    tasks = recipe_of(folder, evaluation__tasks=[])
    assert (tasks.tasks, tasks.requests, tasks.windows, tasks.warnings) == ([], [], [], [])
