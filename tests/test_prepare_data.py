import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from transformers import AutoTokenizer

from recipes.training.data import TrainingData, tokenizer_hash
from recipes.training.recipe import REPOSITORY, parse_recipe
from recipes.training.token_file import TokenFile
from recipes.training.topology import Topology
from tests.conftest import changed, small_recipe

TEXTS = [f"document {i}: the quick brown fox jumps over {i * 7} lazy dogs\n" for i in range(60)]


def prepare(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "recipes/prepare_data.py", *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    options = ["--column", "body", "--vocab-size", 300, "--output", folder / "out"]
    done = prepare("--source", source, *options)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_tokens_are_the_documents(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "out" / "tokenizer")
    texts = []
    for name in ("train", "validation"):
        file = TokenFile(prepared / "out" / name)
        tokens = file.read(0, file.count)
        ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
        assert ends[-1] == len(tokens) - 1
        texts += [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends[:-1] + 1)]
    assert sorted(texts) == sorted(TEXTS)


def test_the_manifest_describes_the_folder(prepared: Path) -> None:
    manifest = json.loads((prepared / "out" / "manifest.json").read_text())
    counts = [manifest["files"][name]["documents"] for name in ("train", "validation")]
    assert sum(counts) == 60 and min(counts) > 0
    assert manifest["vocab_size"] == 300
    assert manifest["tokenizer_sha256"] == tokenizer_hash(prepared / "out" / "tokenizer")


def test_a_corpus_is_not_prepared_twice(prepared: Path) -> None:
    done = prepare("--source", prepared / "text.jsonl", "--output", prepared / "out")
    assert done.returncode == 0 and "already there" in done.stdout


def test_a_tokenizer_can_be_brought_along(prepared: Path) -> None:
    done = prepare(
        *("--source", prepared / "text.jsonl", "--column", "body"),
        *("--tokenizer", prepared / "out" / "tokenizer", "--output", prepared / "again"),
    )
    assert done.returncode == 0, done.stderr
    for name in ("train.bin", "train.idx", "validation.bin"):
        assert (prepared / "again" / name).read_bytes() == (prepared / "out" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--source", "nowhere.jsonl"], "--source nowhere.jsonl: no such file"),
        (["--column", "text"], "--column text"),
        (["--column", "body", "--validation-fraction", "0"], "--validation-fraction 0.0"),
        (["--column", "body", "--vocab-size", "10"], "use 257 or more"),
        (["--source", "text.csv"], "no loader for .csv"),
        (["--source", "EMPTY.jsonl"], "EMPTY.jsonl cannot be read"),
        (["--source", "BROKEN.jsonl"], "BROKEN.jsonl cannot be read"),
        (["--source", "NUMBER.jsonl"], "row 0: text = 4 is no text"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    prepared: Path, tmp_path: Path, arguments: list[str], named: str
) -> None:
    for name, text in (
        ("EMPTY", ""),
        ("BROKEN", '{"text": "a"}\n{"text": '),
        ("NUMBER", '{"text": 4}\n{"text": 5}\n'),
    ):
        (tmp_path / f"{name}.jsonl").write_text(text)
    arguments = [str(tmp_path / word) if word[:-6].isupper() else word for word in arguments]
    source = [] if "--source" in arguments else ["--source", prepared / "text.jsonl"]
    done = prepare(*source, "--output", tmp_path / "bad", *arguments)
    assert done.returncode == 1
    assert named in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("bad*"))


def test_the_ledger_says_what_a_step_reads(prepared: Path, tmp_path: Path) -> None:
    table = changed(
        small_recipe(prepared / "out"), model__vocab_size=300, training__evaluate_every=0
    )
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    run = tmp_path / "run"
    arguments = ["show", tmp_path / "recipe.toml", "--step", 3, "--text", "--run-dir", run]
    lines = prepare(*arguments).stdout.splitlines()
    assert lines[0] == "step 3 reads samples 16 .. 23, windows of 32 + 1 tokens"
    data = TrainingData(parse_recipe(table, "small"), Topology(1, 1, 1), 0)
    batches = [tokens for tokens, _ in data.step(3)]
    tokenizer = AutoTokenizer.from_pretrained(prepared / "out" / "tokenizer")
    for number, row in enumerate(np.concatenate(batches)):
        sample, text = lines[1 + 2 * number], json.loads(lines[2 + 2 * number])
        assert sample.startswith(f"sample {16 + number}: ") and "document" in sample
        assert text.startswith(tokenizer.decode(row)[:30])
    run.mkdir()  # a run whose first two steps had another batch
    (run / "metrics.jsonl").write_text(json.dumps({"step": 2, "tokens": 32 * 100}) + "\n")
    assert prepare(*arguments).stdout.startswith("step 3 reads samples 100 .. 107")
    refused = prepare("show", tmp_path / "recipe.toml", "--step", 21)
    assert refused.returncode == 1 and "--step 21 is not in 1 .. 20" in refused.stderr
