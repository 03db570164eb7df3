import errno
import fcntl
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from multiprocessing import get_context, set_forkserver_preload
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tomli_w
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from models.errors import UserError, counted
from tests.commands import run_here
from tests.conftest import changed, small_recipe
from tests.fault_injection.soak_data import soak
from tests.ranks import FORK_SERVER_MODULES
from threefold.commands import prepare_data
from threefold.config.loading import DEFAULT_RECIPE, load_recipe, parse_recipe
from threefold.config.parallel_dims import ParallelDims
from threefold.data.dataset import TrainingData
from threefold.data.manifest import few_tokens, tokenizer_hash
from threefold.data.token_file import TokenFile
from threefold.prepare_data import corpus as corpus_module
from threefold.prepare_data import formats, tokenization
from threefold.prepare_data import tokenizer as tokenizer_module
from threefold.prepare_data.corpus import find_damages
from threefold.prepare_data.documents import PROBLEM_KINDS
from threefold.prepare_data.formats import TextLines
from threefold.prepare_data.sample_lookup import samples_of
from threefold.prepare_data.tokenization import Tokenization
from threefold.prepare_data.tokenizer import save_tokenizer
from threefold.prepare_data.workspace import LOCK_TEXT
from threefold.run_folder.folder import RunFolder, run_folder_of

TEXTS = [f"document {i}: the quick brown fox jumps over {i * 7} lazy dogs\n" for i in range(60)]


def prepare(
    *arguments: object, smallest_piece: int = formats.MIN_PIECE_BYTES
) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, with pieces of at least `smallest_piece` bytes.

    Its workers are forked from the server that forks ranks, which saves their imports.
    """
    set_forkserver_preload(FORK_SERVER_MODULES)
    with (
        mock.patch.object(formats, "MIN_PIECE_BYTES", smallest_piece),
        mock.patch.object(tokenization, "get_context", lambda _: get_context("forkserver")),
    ):
        return run_here(prepare_data.main, *arguments)


def into(prepared: Path, output: Path) -> list[object]:
    """Return the options that prepare the texts into a folder."""
    return ["--source", prepared / "text.jsonl", "--column", "body", "--output", output]


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
    options = into(prepared, prepared / "out")
    done = prepare(*options, "--vocab-size", 300)
    manifest = prepared / "out" / "manifest.json"
    written = datetime.fromtimestamp(manifest.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    assert done.returncode == 0 and done.stdout == (
        f"{prepared / 'out'} was prepared on {written} and is complete; delete it to prepare it "
        f"again, for example because its source has changed\n"
    )
    done = prepare(*options, "--vocab-size", 301)
    assert (
        done.returncode == 2
        and "made with --vocab-size 300; here --vocab-size 301; use" in done.stderr
    )


@pytest.mark.parametrize("wanted", [259, 1234])
def test_a_vocabulary_that_is_smaller_than_the_option_is_explained(
    wanted: int, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("abc abc\nabc\n" * 2)
    done = prepare("--source", tmp_path / "text.txt", "--output", tmp_path / "out",
                   "--validation-fraction", 0, "--vocab-size", wanted)  # fmt: skip
    size = json.loads((tmp_path / "out" / "manifest.json").read_text())["vocab_size"]
    assert (size < wanted) == (wanted == 1234)
    reason = f"words for a tokenizer of 1,234 tokens; set model.vocab_size = {size} in the recipe"
    assert (reason in done.stdout) == ("too few different words" in done.stdout) == (size < wanted)


def test_user_files_in_the_workspace_stay(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "out.incomplete").mkdir()
    (tmp_path / "out.incomplete" / "thesis.txt").write_text("precious")
    done = prepare("--source", prepared / "text.jsonl", "--output", tmp_path / "out")
    assert done.returncode == 2 and "out.incomplete, the working folder" in done.stderr
    assert (tmp_path / "out.incomplete" / "thesis.txt").read_text() == "precious"


def test_the_samples_of_a_step(tmp_path: Path) -> None:
    recipe = load_recipe(DEFAULT_RECIPE)  # batches of 32 sequences of 256 tokens
    run = RunFolder(tmp_path)
    assert samples_of(recipe, run, 3) == range(64, 96)
    for step, samples in ((1, 16), (2, 32), (3, 64), (4, 96), (5, 192)):  # the batch grew once
        run.metric({"step": step, "tokens": 256 * samples})
    run.event("rollback", 7, to=4, samples=160)
    assert samples_of(recipe, run, 2) == range(16, 32)
    assert samples_of(recipe, run, 3) == range(32, 64)
    assert samples_of(recipe, run, 5) == range(160, 192)
    assert samples_of(recipe, run, 6) == range(192, 224)
    assert samples_of(recipe, run, 9) == range(288, 320)


def test_an_existing_tokenizer_can_be_used(prepared: Path) -> None:
    done = prepare(
        *("--source", prepared / "text.jsonl", "--column", "body"),
        *("--tokenizer", prepared / "out" / "tokenizer", "--output", prepared / "again"),
    )
    assert done.returncode == 0, done.stderr
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (prepared / "again" / name).read_bytes() == (prepared / "out" / name).read_bytes()


def test_the_text_of_a_special_token_does_not_end_a_document(
    prepared: Path, tmp_path: Path
) -> None:
    rows = [{"body": "a <|endoftext|> b"}, {"body": "c"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--source", tmp_path / "text.jsonl", "--column", "body", "--validation-fraction", 0,
             "--tokenizer", prepared / "out" / "tokenizer"]  # fmt: skip
    done = prepare(*words, "--output", tmp_path / "split")
    assert done.returncode == 0 and "warning: the text contains" not in done.stdout
    assert "ends_in_text" not in json.loads((tmp_path / "split" / "manifest.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "split" / "tokenizer")
    file, end = TokenFile(tmp_path / "split" / "train"), tokenizer.eos_token
    tokens = file.read(0, file.count)
    assert tokenizer.decode(tokens) == f"a {end} b{end}c{end}"
    assert (tokens == tokenizer.eos_token_id).sum() == 2
    parsed = prepare(*words, "--output", tmp_path / "parsed", "--parse-special-tokens")
    assert "warning: the end-of-text token occurs 1 time inside documents, and" in parsed.stdout
    file = TokenFile(tmp_path / "parsed" / "train")
    assert (file.read(0, file.count) == tokenizer.eos_token_id).sum() == 3
    again = prepare(*words, "--output", tmp_path / "parsed")
    assert "made with --parse-special-tokens; here no --parse-special-tokens" in again.stderr


@pytest.fixture(scope="module")
def bos_tokenizer(prepared: Path) -> Path:
    """Save a tokenizer that begins every text with <s>, and return its folder."""
    tokenizer = Tokenizer.from_file(str(prepared / "out" / "tokenizer" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|endoftext|>",
        add_bos_token=True,
    ).save_pretrained(prepared / "bos")
    return prepared / "bos"


def test_documents_begin_as_the_tokenizer_begins_texts(
    prepared: Path, bos_tokenizer: Path, tmp_path: Path
) -> None:
    done = prepare(*into(prepared, tmp_path / "out"), "--tokenizer", bos_tokenizer)
    assert done.returncode == 0, done.stderr
    assert "each document begins with the tokens [300], which the tokenizer adds" in done.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["document_start"] == [tokenizer.bos_token_id] == [300]
    found = []
    for name in ("train", "validation"):
        file = TokenFile(tmp_path / "out" / name)
        tokens = file.read(0, file.count).tolist()
        found += [tokens[a:b] for a, b in pairwise(file.starts(0, file.sequences).tolist())]
        assert manifest["files"][name]["tokens"] == file.count
    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    assert sorted(found) == sorted(expected) and {each[0] for each in found} == {300}
    table = changed(
        small_recipe(tmp_path / "out"), model__vocab_size=301, training__evaluate_every=0
    )
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    shown = prepare("show", tmp_path / "recipe.toml", "--step", 1, "--text").stdout
    assert f"documents of {tmp_path}/out/train begin with the tokens [300]" in shown
    assert "<s>document" in shown


def test_pieces_without_a_start_are_not_used_for_documents_with_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a")
    reader = TextLines(tmp_path / "text.txt")
    (piece,) = reader.pieces(10**6)
    names = {
        Tokenization(
            formats=[reader], tokenizer=tmp_path, tokenizer_sha256="", vocab_size=9, start=start,
            end=0, split_special_tokens=False, validation_fraction=0.1, skip=frozenset(),
            folder=tmp_path,
        ).name(0, piece)
        for start in ((), (1,), (2,))
    }  # fmt: skip
    assert len(names) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--source", "nowhere.jsonl"], "--source nowhere.jsonl: no such file"),
        (
            ["--validation-fraction", "1"],
            "--validation-fraction 1.0 is not a share below 1; use 0.1",
        ),
        (
            ["--validation-fraction", "0.2", "--validation-source", "VALID.jsonl"],
            "--validation-fraction 0.2 has no effect with --validation-source",
        ),
        (["--validation-split", "train"], "--validation-split train is also --split"),
        (["--validation-split", "test"], "text.jsonl is not a dataset with splits; name the files"),
        (["--validation-source", "nowhere.txt"], "--validation-source nowhere.txt: no such file"),
        (["--validation-source", "EMPTY.jsonl"], "EMPTY.jsonl has no documents"),
        (
            ["--source", "VALID.jsonl", "--validation-source", "VALID.jsonl"],
            "VALID.jsonl is also in --source; name the files of the training part alone there",
        ),
        (["--vocab-size", "10"], "--vocab-size 10 is not in 257 (the"),
        (["--processes", "0"], "--processes 0 is too few; use 1"),
        (["--shard", "0/4"], "--shard needs --tokenizer"),
        (["--source", "EMPTY.jsonl"], "EMPTY.jsonl has no documents"),
        (["--source", "NUMBER.jsonl"], "NUMBER.jsonl, line 1: body = 4 is not a text"),
        (["--source", "LATER.jsonl"], "LATER.jsonl, line 2: not valid JSON"),
        (["--tokenizer", "NOWHERE.tokenizer"], "NOWHERE.tokenizer does not exist; "),
        (["--tokenizer", "FILE/tokenizer.json"], "tokenizer.json is a file; use its folder, "),
        (["--text-is", "file"], "--text-is file has no effect, because no source is a text file"),
        (["--streaming"], "--streaming has no effect, because no source is a dataset on the hub"),
        (["--source", "PLAIN.txt"], "--column body has no effect, because no source has columns"),
        (["--config", "abc"], "--config abc: --source "),
        (["--split", "validation"], "--split validation: "),
        (["--tokenizer", "data/wikki/tokenizer"], "data/wikki/tokenizer does not exist; "),
        (["--tokenizer", "CORPUS"], "is a corpus; use its tokenizer, "),
        (["--vocab-size", "300", "--tokenizer", "x"], "--vocab-size 300 has no effect with --tok"),
    ],
)
def test_bad_input_is_rejected_in_one_line(
    prepared: Path, tmp_path: Path, arguments: list[str], named: str
) -> None:
    for name, text in (
        ("EMPTY", ""),
        ("VALID", '{"body": "a"}\n'),
        ("LATER", '{"body": "a"}\n{"body": '),
        ("NUMBER", '{"body": 4}\n{"body": 5}\n'),
    ):
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "CORPUS" / "tokenizer").mkdir(parents=True)
    (tmp_path / "FILE").mkdir()
    (tmp_path / "FILE" / "tokenizer.json").touch()
    (tmp_path / "PLAIN.txt").write_text("a\n")
    arguments = [str(tmp_path / word) if word[:5].isupper() else word for word in arguments]
    source = [] if "--source" in arguments else ["--source", prepared / "text.jsonl"]
    column = ["--column", "body", "--output", tmp_path / "bad"]
    done = prepare(*source, *column, *arguments)
    assert done.returncode == 2
    assert named in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("bad*"))


def test_an_unknown_command_is_named() -> None:
    said = "unknown command shwo; did you mean show? Without a command, options such as --source"
    assert said in prepare("shwo", "recipes/tiny.toml").stderr


def words(corpus: Path, part: str) -> list[str]:
    """Return the texts of a part, in order, each without its end-of-text token."""
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    file = TokenFile(corpus / part)
    ids = np.split(file.read(0, file.count), file.starts(0, file.sequences)[1:-1])
    return [tokenizer.decode(each, skip_special_tokens=True) for each in ids]


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """Write files as WikiText's: with an official split, and an empty line after each line."""
    lines = "".join(f" {text.strip()}\n\n" for text in TEXTS)
    (tmp_path / "train.txt").write_text(lines)
    (tmp_path / "valid.txt").write_text(lines.replace("document", "held out"))
    return tmp_path


def test_files_of_an_official_split_are_the_parts(official: Path) -> None:
    options = ["--source", official / "train.txt", "--validation-source", official / "valid.txt"]
    options += ["--output", official / "out", "--vocab-size", 300]
    done = prepare(*options, smallest_piece=500)
    assert done.returncode == 0, done.stderr
    unless = "each line of a text file is a document, unless --text-is file is given"
    assert f"\nskipped 120 blank lines; {unless}\n" in done.stdout
    expected = [f" {text.strip()}" for text in TEXTS]
    assert words(official / "out", "train") == expected
    assert words(official / "out", "validation") == [
        text.replace("document", "held out") for text in expected
    ]
    assert not list(find_damages(official / "out", 1))
    vocabulary = AutoTokenizer.from_pretrained(official / "out" / "tokenizer").get_vocab()
    assert not any("held" in token for token in vocabulary)  # it is trained on the training part
    assert "is complete; delete it to prepare it again" in prepare(*options).stdout
    other = prepare(*options[:2], *options[4:])
    validation = f"--validation-source {official / 'valid.txt'}"
    assert f"made with {validation}; here no --validation-source; use another" in other.stderr
    other = prepare(*options[:2], *options[4:6], "--vocab-size", 301)
    assert (
        f"made with --vocab-size 300 and {validation}; here --vocab-size 301 and no "
        f"--validation-source; use another"
    ) in other.stderr
    other = prepare(*options, "--source", official / "a b.txt", "c.txt")
    assert f"; here --source '{official / 'a b.txt'}' c.txt; use" in other.stderr


def test_splits_of_a_dataset_are_the_parts(tmp_path: Path) -> None:
    parts = {name: Dataset.from_dict({"text": [f"{name} {text}" for text in TEXTS]})
             for name in ("train", "validation")}  # fmt: skip
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    options = ["--source", tmp_path / "saved", "--vocab-size", 300, "--output", tmp_path / "out"]
    done = prepare(*options, "--validation-split", "validation")
    assert done.returncode == 0 and "has the splits" not in done.stdout, done.stderr
    hint = (
        f"{tmp_path}/saved has the splits train, validation, of which only train is read; with "
        f"--validation-split validation, that split becomes the validation part\n"
    )
    assert prepare(*options[:-1], tmp_path / "share").stdout.count(hint) == 1
    for name in parts:
        assert words(tmp_path / "out", name) == [f"{name} {text}" for text in TEXTS]
    blank = Dataset.from_dict({"text": [""] * 3})
    DatasetDict({"train": parts["train"], "validation": blank}).save_to_disk(tmp_path / "blank")
    options[1] = tmp_path / "blank"
    wrong = prepare(*options[:-1], tmp_path / "bad", "--validation-split", "validation",
                    "--skip", "empty")  # fmt: skip
    assert wrong.stderr == (
        "prepare_data.py: --validation-split validation has no documents, so the validation part "
        "would be empty (3 rows skipped); the first skipped row: the document is empty\n"
    )
    wrong = prepare(*options[:-1], tmp_path / "bad", "--validation-split", "validation")
    assert f"{tmp_path}/blank, validation split, row 0: the document is empty" in wrong.stderr
    options[1] = tmp_path / "saved"
    wrong = prepare(*options[:-1], tmp_path / "bad", "--config", "wikitext-2")
    assert f"--config wikitext-2: --source {tmp_path}/saved has no configurations" in wrong.stderr
    wrong = prepare(*options[:-1], tmp_path / "bad", "--validation-split", "valid")
    assert f"--validation-split valid: {tmp_path}/saved has the splits train" in wrong.stderr


@pytest.mark.parametrize("fraction", [0.1, 0.3, 1e-9])
def test_a_single_document_is_divided_by_tokens(
    prepared: Path, bos_tokenizer: Path, fraction: float, tmp_path: Path
) -> None:
    (tmp_path / "play.txt").write_text("".join(TEXTS))
    options = ["--source", tmp_path / "play.txt", "--text-is", "file"]
    options += ["--tokenizer", bos_tokenizer, "--validation-fraction", fraction]
    done = prepare(*options, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(bos_tokenizer)
    ids = [*tokenizer("".join(TEXTS))["input_ids"], tokenizer.eos_token_id]
    files = [TokenFile(tmp_path / "out" / name) for name in ("train", "validation")]
    train, validation = (file.read(0, file.count).tolist() for file in files)
    assert validation[0] == train[0] == tokenizer.bos_token_id
    assert [*train, *validation[1:]] == ids
    assert (
        f"its end, {counted(len(validation) - 1, 'token')}, is the validation part" in done.stdout
    )
    assert len(train) == min(round((1 - fraction) * len(ids)), len(ids) - 1)
    assert [file.boundaries for file in files] == [2, 2]
    assert not list(find_damages(tmp_path / "out", 1))


def test_a_tokenizer_is_trained_on_the_beginning_of_a_single_document(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("hamlet " * 950 + "ophelia " * 50)
    options = ["--source", tmp_path / "play.txt", "--text-is", "file", "--vocab-size", 270]
    for fraction in (0.1, 0.999):  # the hash of the document puts it into either part
        done = prepare(*options, "--validation-fraction", fraction, "--output", tmp_path / "out")
        assert done.returncode == 0, done.stderr
        vocabulary = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer").get_vocab()
        assert any("haml" in token for token in vocabulary)
        assert not any("oph" in token for token in vocabulary)
        shutil.rmtree(tmp_path / "out")


def test_a_corpus_without_a_validation_part(prepared: Path, tmp_path: Path) -> None:
    options = [*into(prepared, tmp_path / "out"), "--vocab-size", 300]
    done = prepare(*options, "--validation-fraction", 0)
    assert done.returncode == 0, done.stderr
    assert "validation: none; leave data.validation out of the recipe" in done.stdout
    assert words(tmp_path / "out", "train") == TEXTS
    assert not (tmp_path / "out" / "validation.bin").exists()
    assert not list(find_damages(tmp_path / "out", 1))
    table = changed(
        small_recipe(tmp_path / "out"), model__vocab_size=300, training__evaluate_every=0
    )
    reason = "the corpus was prepared without a validation part (--validation-fraction 0)"
    with pytest.raises(UserError, match=re.escape(reason)):
        TrainingData(parse_recipe(table, "test"), ParallelDims(pipeline=1, data=1, tensor=1), 0)
    without = parse_recipe(changed(table, data__validation=None), "test")
    assert TrainingData(without, ParallelDims(pipeline=1, data=1, tensor=1), 0).validation == {}
    tasks = prepare("tasks", "next-line", tmp_path / "out", "--output", tmp_path / "task.jsonl")
    assert tasks.returncode == 2 and reason in tasks.stderr


def test_a_manifest_that_lost_its_validation_part_is_damaged(
    prepared: Path, tmp_path: Path
) -> None:
    corpus = shutil.copytree(prepared / "out", tmp_path / "out")
    manifest = json.loads((corpus / "manifest.json").read_text())
    lost = manifest["files"].pop("validation")
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    assert list(find_damages(corpus, 1)) == [
        f"manifest.json says 0 {key} of validation, pieces.jsonl says {lost[key]}"
        for key in ("documents", "tokens")
    ]


def test_one_process_at_a_time_joins(prepared: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "out.incomplete"
    workspace.mkdir()
    with (workspace / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as a running shard does
        options = ["--source", prepared / "text.jsonl", "--column", "body"]
        done = prepare(*options, "--output", tmp_path / "out")
    assert done.returncode == 2 and "out.incomplete is in use by another process" in done.stderr


def test_bad_rows_are_left_out_and_counted(prepared: Path, tmp_path: Path) -> None:
    bad = ["", '{"body": ""}', '{"body": 7}', "{", '{"body": "  "}', "\udcff"]
    lines = [json.dumps({"body": text}) for text in TEXTS]
    mixed = [line for pair in zip(lines, bad * 10, strict=True) for line in pair]
    (tmp_path / "mixed.jsonl").write_text("\n".join(mixed), errors="surrogateescape")
    options = ["--column", "body", "--tokenizer", prepared / "out" / "tokenizer"]
    options += ["--source", tmp_path / "mixed.jsonl", "--output", tmp_path / "out"]
    rejected = prepare(*options, "--skip", "empty", "--skip", "json", "--skip", "utf-8")
    assert rejected.returncode == 2
    problem = "mixed.jsonl, line 6: body = 7 is not a text; use another --column, correct the row,"
    assert problem in rejected.stderr
    skip = [word for kind in PROBLEM_KINDS for word in ("--skip", kind)]
    done = prepare(*options, *skip)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    counts = {kind: skipped["rows"] for kind, skipped in manifest["skipped"].items()}
    assert counts == {"empty": 20, "column": 10, "json": 10, "utf-8": 10}
    first = manifest["skipped"]["json"]["first"]
    assert first.startswith(f"{tmp_path}/mixed.jsonl, line 8: not valid JSON")
    assert f"skipped 20 rows, empty: first {tmp_path}/mixed.jsonl, line 4: the d" in done.stdout
    assert (tmp_path / "out" / "train.bin").read_bytes() == (
        prepared / "out" / "train.bin"
    ).read_bytes()


def test_finished_pieces_stay_when_something_fails(prepared: Path, tmp_path: Path) -> None:
    source = shutil.copy(prepared / "text.jsonl", tmp_path)
    options = ["--source", source, "--column", "body", "--output", tmp_path / "out"]
    with mock.patch.object(corpus_module, "join", side_effect=UserError("no room")):
        done = prepare(*options, "--vocab-size", 300)
    assert done.returncode == 2
    workspace = tmp_path / "out.incomplete"
    assert (workspace / "lock").read_text() == LOCK_TEXT
    assert f"{workspace} keeps 1 finished piece; rerun the command afterwards to" in done.stderr
    assert not (tmp_path / "out").exists() and list(workspace.glob("pieces/*/report.json"))
    with mock.patch.object(corpus_module, "join", side_effect=UserError("no room")):
        done = prepare(*options, "--vocab-size", 300)
    assert "1 of 1 piece already finished" in done.stdout and "will be deleted" not in done.stdout
    with Path(source).open("a") as file:
        file.write('{"body": "one more text"}\n')
    with mock.patch.object(corpus_module, "join", side_effect=KeyboardInterrupt):
        done = prepare(*options, "--vocab-size", 300)
    assert "already finished" not in done.stdout
    assert (
        f"{workspace} keeps 1 finished piece; rerun the same command to resume (1 more piece from "
        f"an earlier source or earlier options will then be deleted)\n" in done.stderr
    )
    with mock.patch(
        "threefold.prepare_data.tokenizer.train_tokenizer", side_effect=KeyboardInterrupt
    ):
        done = prepare(*options, "--vocab-size", 301)
    assert "keeps 2 finished pieces (those of an earlier source or earlier options" in done.stderr
    done = prepare(*options, "--vocab-size", 300)
    assert done.returncode == 0 and "1 of 1 piece already finished" in done.stdout
    assert (
        f"1 finished piece in {workspace} will be deleted when this command has finished, because "
        f"the source or an option has changed since the interruption; to keep it, press Ctrl-C "
        f"and rerun with another --output\n" in done.stdout
    )


@pytest.mark.parametrize("filename", [None, "copy/tokenizer.json"])
def test_a_full_disk_is_named_with_what_stays(
    filename: str | None, prepared: Path, tmp_path: Path
) -> None:
    filename = filename and str(tmp_path / filename)
    full = OSError(errno.ENOSPC, "No space left on device", filename)
    options = into(prepared, tmp_path / "out")
    with mock.patch.object(corpus_module, "join", side_effect=full):
        done = prepare(*options, "--vocab-size", 300)
    folder, workspace = tmp_path / "copy" if filename else tmp_path, tmp_path / "out.incomplete"
    assert done.returncode == 2
    assert done.stderr == (
        f"prepare_data.py: the disk of {folder} is full (No space left on device); free space "
        f"there and rerun the same command, or use an --output on another disk; {workspace} keeps "
        f"1 finished piece, 1 MB in total; the disk needs room for the other pieces and for a "
        f"second copy of all pieces\n"
    )
    with mock.patch.object(corpus_module, "join", side_effect=OSError(errno.EIO, "I/O")):
        done = prepare(*options, "--vocab-size", 300)
    assert (
        "a file cannot be read or written (I/O)" in done.stderr and "full disk" not in done.stderr
    )


def test_a_disk_that_is_full_when_a_tokenizer_is_saved_is_named(tmp_path: Path) -> None:
    """The tokenizers library raises a plain Exception."""
    full = mock.Mock()
    full.save_pretrained.side_effect = Exception("No space left on device (os error 28)")
    with pytest.raises(OSError, match=r"No space left on device: '.*/tokenizer\.json'") as raised:
        save_tokenizer(full, tmp_path)
    assert raised.value.errno == errno.ENOSPC
    full.save_pretrained.side_effect = Exception("a bug")
    with pytest.raises(Exception, match="a bug"):
        save_tokenizer(full, tmp_path)


def test_a_fraction_that_leaves_a_part_empty_is_rejected_before_the_work(
    prepared: Path, tmp_path: Path
) -> None:
    """A rerun of the command is not advised."""
    for fraction, part in (("0.0001", "validation"), ("0.9999", "train")):
        options = [*into(prepared, tmp_path / part), "--vocab-size", 300]
        done = prepare(*options, "--validation-fraction", fraction)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        reason = f"the {part} part has no tokens: --validation-fraction {fraction} leaves none of "
        assert reason + "the 60 documents for it" in done.stderr
        better = "larger" if part == "validation" else "smaller"
        assert f"use a {better} fraction, more documents" in done.stderr
        assert not list(tmp_path.glob(f"{part}*"))
    (tmp_path / "same.txt").write_text("one\n\n" * 3)
    done = prepare("--source", tmp_path / "same.txt", "--output", tmp_path / "same")
    assert "the 3 documents (3 rows skipped) for it, and equal documents" in done.stderr


def test_a_part_that_is_shorter_than_a_window_is_announced(prepared: Path, tmp_path: Path) -> None:
    """The preparation and the recipe's check name the same remedy, which works."""
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(30)))
    output = tmp_path / "out"
    options = ["--source", tmp_path / "text.txt", "--validation-source", prepared / "text.jsonl"]
    done = prepare(*options, "--column", "body", "--vocab-size", 300, "--output", output)
    assert done.stdout.count("warning: ") == 1  # the validation part is long enough
    tokens = TokenFile(output / "train").count
    remedy = f"use model.sequence_length = {tokens - 1} or less, or prepare the corpus again"
    assert f"with {tokens} tokens, the train part" in done.stdout and remedy in done.stdout
    table = changed(small_recipe(output), model__vocab_size=300)
    one = ParallelDims(pipeline=1, data=1, tensor=1)
    fitting = parse_recipe(changed(table, model__sequence_length=tokens - 1), "test")
    assert TrainingData(fitting, one, 0).sources(1)[0].count == 1
    longer = parse_recipe(changed(table, model__sequence_length=tokens), "test")
    named = f"train.bin has {tokens} tokens, and a window of model.sequence_length = {tokens} needs"
    with pytest.raises(UserError, match=re.escape(named)) as raised:
        TrainingData(longer, one, 0)
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("part", "tokens", "made_with", "remedy"),
    [
        ("train", 31, {}, "too little text to train on; use more text"),
        (
            "train", 32, {},
            "use model.sequence_length = 31 or less, or prepare the corpus again with more text",
        ),
        ("validation", 9, {}, "too little text to validate on; prepare the corpus again with more "
         "text, or leave"),
        ("validation", 40, {"validation_fraction": 0.1}, "use model.sequence_length = 39 or less, "
         "or prepare the corpus again with more text or a larger --validation-fraction, or leave"),
        ("validation", 40, {"validation_fraction": 0.0, "validation_source": ["a.txt"]},
         "again with more text in --validation-source, or leave"),
        ("validation", 40, {"validation_split": "test"}, "again with a longer --validation-split"),
    ],
)  # fmt: skip
def test_the_remedy_for_a_short_part_names_options_that_help(
    part: str, tokens: int, made_with: dict[str, Any], remedy: str
) -> None:
    said = few_tokens(part, tokens, made_with)
    assert remedy in said and ("model.sequence_length" in said) == (tokens >= 32)
    named = set(re.findall("--[a-z-]+", said))
    assert named <= {f"--{key.replace('_', '-')}" for key in made_with}


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        ("corpus.join", "out.incomplete keeps 1 finished piece; rerun the same command"),
        (
            "tokenization.run_pieces",
            "out.incomplete keeps the tokenizer and no finished piece; rerun the same",
        ),
        ("tokenizer.train_tokenizer", "nothing is finished yet; rerun the same command to start"),
        ("tokenization.check_parts", "nothing has changed; rerun the same command to start"),
    ],
)
def test_an_interruption_says_what_stays(
    function: str, kept: str, prepared: Path, tmp_path: Path
) -> None:
    with mock.patch(f"threefold.prepare_data.{function}", side_effect=KeyboardInterrupt):
        done = prepare(*into(prepared, tmp_path / "out"), "--vocab-size", 300)
    assert done.stdout.startswith(f"preparing {tmp_path / 'out'} from {prepared / 'text.jsonl'}\n")
    assert done.returncode == 130 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("prepare_data.py: interrupted; ") and kept in done.stderr


def test_an_interruption_ends_the_training_of_a_tokenizer(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def texts(*_: object) -> Iterator[str]:
        nonlocal read
        for read in range(1_000_000):
            if read == 1000:
                os.kill(os.getpid(), signal.SIGINT)
            yield f"{TEXTS[read % len(TEXTS)]} {read}"

    monkeypatch.setattr("threefold.prepare_data.tokenizer.texts_of", texts)
    done = prepare(*into(prepared, tmp_path / "out"), "--vocab-size", 300)
    assert done.returncode == 130 and "nothing is finished yet" in done.stderr
    assert 1000 <= read < 900_000
    assert not list(tmp_path.iterdir())


def test_an_interruption_does_not_wait_for_the_training_of_a_tokenizer() -> None:
    """The library computes for minutes after it has read the texts, and cannot be interrupted."""
    may_end, ended = threading.Event(), threading.Event()

    def train(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        may_end.wait(20)
        ended.set()

    with (
        mock.patch.object(tokenizer_module, "SECONDS_TO_END_READING", 0),
        pytest.raises(KeyboardInterrupt),
    ):
        tokenizer_module._train(mock.Mock(train_from_iterator=train), iter([]), mock.Mock())
    assert not ended.is_set()
    may_end.set()


def test_a_part_that_turns_out_to_be_empty_keeps_the_pieces_for_more_documents(
    prepared: Path, tmp_path: Path
) -> None:
    options = [*into(prepared, tmp_path / "out"), "--tokenizer", prepared / "out" / "tokenizer"]
    options += ["--validation-fraction", "0.0001"]
    with mock.patch.object(tokenization, "MAX_CHECKED_CHARACTERS", 0):
        done = prepare(*options)
        assert done.returncode == 2 and "leaves none of the 60 documents" in done.stderr
        kept = "keeps 1 finished piece; add documents and rerun the command to use them, or delete"
        assert kept in done.stderr and "to resume" not in done.stderr
        lines = [json.dumps({"body": f"{number}"}) + "\n" for number in range(20_000)]
        (tmp_path / "more.jsonl").write_text("".join(lines))
        done = prepare(*options[:2], tmp_path / "more.jsonl", *options[2:])
    assert done.returncode == 0 and "1 of 2 pieces already finished" in done.stdout


def test_shards_are_joined_to_the_same_corpus(prepared: Path, tmp_path: Path) -> None:
    options = into(prepared, tmp_path / "out")
    options += ["--tokenizer", prepared / "out" / "tokenizer"]
    check = mock.Mock(wraps=tokenization.check_parts)
    for shard, checks in ((2, 0), (0, 1)):  # shard 0 checks the parts for all shards
        with mock.patch.object(tokenization, "check_parts", check):
            done = prepare(*options, "--shard", f"{shard}/3", smallest_piece=500)
        assert done.returncode == 0 and "without --shard joins" in done.stdout, done.stderr
        assert check.call_count == checks
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out.incomplete/pieces/*/*")}
    assert len(made) == 5 * 6  # every third of the nine pieces is still missing
    assert prepare(*options, "--shard", "3/3").returncode == 2
    done = prepare(*options, smallest_piece=500)
    assert "6 of 9 pieces already finished" in done.stdout, done.stderr
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (tmp_path / "out" / name).read_bytes() == (prepared / "out" / name).read_bytes()
    assert not list(tmp_path.glob("*.incomplete"))
    assert len((tmp_path / "out" / "pieces.jsonl").read_text().splitlines()) == 9


def test_a_corpus_that_does_not_exist_is_not_verified(prepared: Path) -> None:
    done = prepare("verify", prepared / "ot")
    assert done.stderr == (
        f"prepare_data.py: {prepared / 'ot'} does not exist, so it cannot be verified; did you "
        f"mean {prepared / 'out'}?\n"
    )
    done = prepare("verify", prepared)
    assert f"{prepared} has no manifest.json, so it cannot be verified" in done.stderr


def test_a_corpus_without_its_manifest_is_named_by_every_command(
    prepared: Path, tmp_path: Path
) -> None:
    corpus = shutil.copytree(prepared / "out", tmp_path / "out")
    shutil.copytree(corpus, tmp_path / "other")  # must not be suggested
    table = changed(small_recipe(corpus), model__vocab_size=300, training__evaluate_every=0)
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    show = ["show", tmp_path / "recipe.toml", "--step", 1]
    assert "warning" not in prepare(*show).stdout
    (corpus / "manifest.json").unlink()
    lost = (
        f"{corpus} has token files but no manifest.json; delete the folder and prepare the corpus "
        f"again\n"
    )
    for arguments in (["verify", corpus], into(prepared, corpus)):
        done = prepare(*arguments)
        assert done.returncode == 2 and done.stderr == f"prepare_data.py: {lost}"
    shown = prepare(*show)
    assert shown.returncode == 0 and shown.stdout.count(f"warning: {lost}") == 1
    (corpus / "pieces.jsonl").unlink()  # as a corpus of Megatron's tools
    assert "warning" not in prepare(*show).stdout
    done = prepare("verify", corpus)
    assert "has no manifest.json, so it cannot be verified; use the folder that" in done.stderr


def test_a_truncated_manifest_is_damaged(prepared: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(prepared / "out", tmp_path / "out")
    text = (corpus / "manifest.json").read_text()
    (corpus / "manifest.json").write_text(text[: text.index("tokenizer_sha256")])
    done = prepare("verify", corpus)
    assert done.returncode == 2
    assert f"{corpus}/manifest.json is damaged (line " in done.stderr
    assert done.stderr.endswith("; delete the folder and prepare the corpus again\n")


def test_a_corpus_is_verified(prepared: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(prepared / "out", tmp_path / "out")
    assert prepare("verify", corpus).returncode == 0
    chance = random.Random(0)
    for file in (path for path in corpus.rglob("*") if path.is_file()):
        content = file.read_bytes()
        if file.name == "manifest.json":
            continue  # no other file has its hash
        place = chance.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert list(find_damages(corpus, 2)), file
        file.unlink()
        assert list(find_damages(corpus, 2)), file
        file.write_bytes(content)
        assert not list(find_damages(corpus, 2))
    (corpus / "train.bin").write_bytes((corpus / "train.bin").read_bytes()[:-2])
    done = prepare("verify", corpus)
    assert done.returncode == 1 and "train.bin has" in done.stdout
    assert f"{corpus} is damaged; delete it and prepare it again" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.bin", "bytes instead of"),
        ("validation.idx", "bytes instead of"),
        ("pieces.jsonl", "is missing"),
        ("tokenizer/tokenizer.json", "is missing"),
    ],
)
def test_a_rerun_that_finds_a_damaged_corpus_fails(
    name: str, said: str, prepared: Path, tmp_path: Path
) -> None:
    corpus = shutil.copytree(prepared / "out", tmp_path / "out")
    options = [*into(prepared, corpus), "--vocab-size", 300]
    assert prepare(*options).returncode == 0
    if said == "is missing":
        (corpus / name).unlink()
    else:
        shorter = (corpus / name).read_bytes()[:-2]
        (corpus / name).write_bytes(shorter)
        said = f"has {len(shorter)} bytes instead of {len(shorter) + 2}"
    done = prepare(*options)
    assert done.returncode == 1 and done.stdout == f"{corpus}: {name} {said}\n"
    assert f"{corpus} is damaged; delete it and prepare it again" in done.stderr


@pytest.mark.long
def test_nothing_is_lost_under_kills(tmp_path: Path) -> None:
    report = soak(tmp_path, kills=2, seed=1, megabytes=2)
    assert not report.wrong, str(report)
    assert report.kills.total() == 2 and report.corpora


def test_the_ledger_lists_the_samples_of_a_step(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_data, "REPOSITORY", tmp_path)  # whose runs/tiny may exist
    table = changed(
        small_recipe(prepared / "out"), model__vocab_size=300, training__evaluate_every=0
    )
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    run = tmp_path / "run"
    arguments = ["show", tmp_path / "recipe.toml", "--step", 3, "--text", "--run-dir", run]
    lines = prepare(*arguments).stdout.splitlines()
    assert lines[0] == "step 3 reads samples 16 .. 23, windows of 32 + 1 tokens"
    data = TrainingData(parse_recipe(table, "small"), ParallelDims(), 0)
    batches = [micro_batch.tokens for micro_batch in data.micro_batches(3)]
    tokenizer = AutoTokenizer.from_pretrained(prepared / "out" / "tokenizer")
    for number, row in enumerate(np.concatenate(batches)):
        sample, text = lines[1 + 2 * number], json.loads(lines[2 + 2 * number])
        assert sample.startswith(f"sample {16 + number}: ") and "document" in sample
        assert " (within bytes 0 .. " in sample and f" of {prepared / 'text.jsonl'})" in sample
        assert text.startswith(tokenizer.decode(row)[:30])
    folder = RunFolder(run)
    folder.path.mkdir()
    (run / "recipe.toml").write_text(tomli_w.dumps(table))
    show = ["show", run / "recipe.toml", "--step", 3]
    assert prepare(*show).stdout.startswith("step 3 reads samples 16 .. 23")
    assert run_folder_of(run / "recipe.toml") is None
    folder.event("rollback", 2, to=2, samples=100)  # the folder is now that of a run
    assert prepare(*show).stdout.startswith("step 3 reads samples 100 .. 107")
    assert prepare(*show, "--run-dir", tmp_path).stdout.startswith("step 3 reads samples 16 .. 23")
    shutil.copy(run / "recipe.toml", run / "mine.toml")
    assert "samples 16 .. 23" in prepare("show", run / "mine.toml", "--step", 3).stdout
    rejected = prepare("show", tmp_path / "recipe.toml", "--step", 21)
    assert rejected.returncode == 2 and "has the steps 1 to 20; use --step 20\n" in rejected.stderr


def test_a_time_left_is_estimated_once_a_share_of_the_bytes_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A document that is one large piece would let the estimate grow without bound."""
    speed = tokenization.Speed([10_000, 89_990_000, 10_000_000], queue.Queue())
    for size, left in ((10_000, "100.0 MB left"), (99_990_000, "00:00 left")):
        speed.finished(mock.Mock(size=size))
        speed.last_line -= tokenization.SECONDS_BETWEEN_LINES
        speed.show()
        assert capsys.readouterr().out.endswith(f"reading the first documents  {left}\n")
    empty = tokenization.Speed([0], queue.Queue())
    empty.last_line -= tokenization.SECONDS_BETWEEN_LINES
    empty.show()
    assert capsys.readouterr().out == "0/1 pieces  reading the first documents  0.0 MB left\n"
