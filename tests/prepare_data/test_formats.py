import argparse
import errno
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    SplitDict,
    SplitInfo,
    load_dataset_builder,
)
from pyarrow import parquet

from models.errors import UserError
from threefold.data.manifest import tokenizer_hash
from threefold.prepare_data import formats as formats_module
from threefold.prepare_data import source
from threefold.prepare_data.documents import PROBLEM_KINDS
from threefold.prepare_data.formats import Format, SourcePiece
from threefold.prepare_data.source import SourceOptions, open_source, open_validation
from threefold.prepare_data.tables import Stream
from threefold.prepare_data.tokenization import PieceCounts, texts_of
from threefold.prepare_data.workspace import mark_workspace

TEXTS = [
    f"document {i}: ünïcode 🙂 {'and more ' * (i % 7)}\u2028no line ends here" for i in range(100)
]
ALL = frozenset(PROBLEM_KINDS)


def opened(*names: Path | str, text_is: str = "line") -> list[Format]:
    return open_source([str(name) for name in names], SourceOptions(column="body", text_is=text_is))


def texts(formats: list[Format], target_bytes: int, skip: frozenset[str] = frozenset()) -> list:
    pieces = [(reader, piece) for reader in formats for piece in reader.pieces(target_bytes)]
    return [text for reader, piece in pieces for text in texts_of(reader, piece, skip)]


def json_lines(path: Path) -> None:
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(TEXTS))
    if path.suffix == ".jsonl":
        path.write_text(lines[:-1])  # without the last line break
        return
    with pyarrow.output_stream(str(path), compression="detect") as stream:
        stream.write(lines.encode())


def table() -> Dataset:
    return Dataset.from_dict({"id": list(range(len(TEXTS))), "body": TEXTS})


def write_arrow(path: Path) -> None:
    data = table().data.table
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, data.schema) as out:
        out.write_table(data)


WRITERS: dict[str, Callable[[Path], object]] = {
    "lines.jsonl": json_lines,
    "lines.jsonl.gz": json_lines,
    "lines.jsonl.bz2": json_lines,
    "lines.json.zst": json_lines,
    "bom.jsonl": lambda path: path.write_bytes(
        b"\xef\xbb\xbf" + b"".join(json.dumps({"body": t}).encode() + b"\n" for t in TEXTS)
    ),
    "bom.txt": lambda path: path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8-sig"),
    "array.json.gz": lambda path: path.write_bytes(
        gzip.compress(json.dumps([{"body": text} for text in TEXTS]).encode())
    ),
    "array.json": lambda path: path.write_text(
        json.dumps([{"body": text} for text in TEXTS], indent=1), encoding="utf-8-sig"
    ),
    "groups.parquet": lambda path: parquet.write_table(table().data.table, path, row_group_size=7),
    "table.csv": lambda path: table().to_csv(str(path)),
    "table.arrow": write_arrow,
    "saved": lambda path: table().save_to_disk(str(path)),
    "splits": lambda path: DatasetDict({"train": table()}).save_to_disk(str(path)),
    "lines.txt": lambda path: path.write_text("\r\n".join(TEXTS), newline=""),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_source_gives_its_documents_in_order(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    for target_bytes in (1, 70, 1000, 10**9):
        assert texts(opened(tmp_path / name), target_bytes) == TEXTS


def test_pieces_follow_each_other(tmp_path: Path) -> None:
    json_lines(tmp_path / "lines.jsonl")
    for target_bytes in (1, 70, 1000):
        pieces = [p for r in opened(tmp_path / "lines.jsonl") for p in r.pieces(target_bytes)]
        assert len(pieces) == -(-(tmp_path / "lines.jsonl").stat().st_size // target_bytes)
        assert [piece.stop for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]


def test_texts_of_a_csv_stay_texts(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("id,body\n1,001\n,NA\n3,null\n")
    assert texts(opened(tmp_path / "table.csv"), 1) == ["001", "NA", "null"]


def test_several_sources_and_patterns(tmp_path: Path) -> None:
    json_lines(tmp_path / "b.jsonl")
    WRITERS["groups.parquet"](tmp_path / "a.parquet")
    (tmp_path / "notes.md").write_text("not this")
    assert texts(opened(tmp_path), 500) == TEXTS + TEXTS
    assert texts(opened(f"{tmp_path}/*.jsonl"), 500) == TEXTS
    assert texts(opened(tmp_path / "b.jsonl", tmp_path / "a.parquet"), 500) == TEXTS + TEXTS


def test_links_are_followed_and_files_count_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("in", "elsewhere"):
        (tmp_path / folder).mkdir()
    json_lines(tmp_path / "elsewhere" / "lines.jsonl")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "self").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "same.JSONL").symlink_to(tmp_path / "elsewhere" / "lines.jsonl")
    (tmp_path / "in" / "notes.md").write_text("not this")
    assert texts(opened(tmp_path / "in"), 500) == TEXTS
    said = capsys.readouterr().out
    assert "skipped 1 file (unsupported format), such as" in said
    assert (
        f"skipped 1 file (another name of a file that is already read), such as {tmp_path}/in/same"
        in said
    )
    assert texts(opened(f"{tmp_path}/in/**/*.jsonl"), 500) == TEXTS
    with pytest.raises(UserError, match="is named twice; name it once"):
        opened(tmp_path / "in", tmp_path / "elsewhere")
    table().save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for twice in ((tmp_path / "saved", arrow), (f"{tmp_path}/saved/", tmp_path / "saved")):
        with pytest.raises(UserError, match=r"\.arrow is named twice; name it once"):
            opened(*twice)
    with pytest.raises(UserError, match="--source stdlib: stdlib is named twice"):
        opened("stdlib", "stdlib")
    with pytest.raises(UserError, match="--source is empty"):
        opened("")


def test_files_can_be_documents(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"first {number}\nsecond\n")
    (tmp_path / "4.txt.gz").write_bytes(gzip.compress(b"first 4\nsecond\n"))
    whole = [f"first {number}\nsecond\n" for number in range(5)]
    assert texts(opened(tmp_path, text_is="file"), 30) == whole
    assert texts(opened(tmp_path / "3.txt"), 1) == ["first 3", "second"]


def test_a_stream_is_read_shard_by_shard() -> None:
    def rows(parts: list[int]) -> object:
        for part in parts:
            yield from ({"body": text} for text in TEXTS[25 * part : 25 * part + 25])

    dataset = IterableDataset.from_generator(rows, gen_kwargs={"parts": [0, 1, 2, 3]})
    stream = Stream("made", dataset, "body", split="train", identity="default/train/1")
    assert len(list(stream.pieces(1))) == 4
    assert texts([stream], 1) == TEXTS


BAD = {  # file -> its bytes, the row, the kind of problem, the message
    "utf8.jsonl": (b'{"body": "a"}\n{"body": "\xff"}\n', "line 2", "utf-8", "byte 10 is 0xff"),
    "half.jsonl": (b'{"body": "a"}\n\n{"body": "\\ud800"}', "line 3", "utf-8", "surrogate pair"),
    "json.jsonl": (b'{"body": "a"}\n{"body": \n', "line 2", "json", "JSON: it ends too early"),
    "number5000.jsonl": (b'{"body": "a"}\n[' + b"1" * 5000 + b"]", "line 2", "json", "not valid"),
    "list.jsonl": (b'{"body": "a"}\n[1, 2]\n', "line 2", "json", "[1, 2] is not a JSON object"),
    "deep.jsonl": (b'{"body": "a"}\n' + b"[" * 2 * 10**4, "line 2", "json", "not valid JSON"),
    "empty.jsonl": (b'{"body": "a"}\n{"body": " "}', "line 2", "empty", "the document is empty"),
    "column.jsonl": (b'{"body": "a"}\n{"text": 1}', "line 2", "column", 'no column "body"'),
    "number.jsonl": (b'{"body": "a"}\n{"body": 4}', "line 2", "column", "body = 4 is not a text"),
    "none.jsonl": (b'{"body": "a"}\n{"body": null}', "line 2", "column", "None is not a text"),
    "array.json": (b'[{"body": "a"}, {"body": ""}]', "row 1", "empty", "is empty"),
    "utf8.txt": (b"a\n\n\xc3\xa4\n\xe4\n", "line 4", "utf-8", "byte 0 is 0xe4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named(name: str, tmp_path: Path) -> None:
    content, place, kind, reason = BAD[name]
    (tmp_path / name).write_bytes(content)
    for target_bytes in (1, 10**6):
        with pytest.raises(UserError) as raised:
            texts(opened(tmp_path / name), target_bytes, skip=ALL - {kind})
        assert f"{tmp_path / name}, {place}: " in str(raised.value)
        assert reason.format(folder=tmp_path) in str(raised.value) and f"--skip {kind}" in str(
            raised.value
        )
        kept = texts(opened(tmp_path / name), target_bytes, skip=ALL)
        assert kept == (["a", "ä"] if name == "utf8.txt" else ["a"])


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_never_skipped_row_by_row(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "wide.txt"
    file.write_bytes(("\ufeff" + "\n".join(TEXTS)).encode(encoding))
    with pytest.raises(UserError, match=r"wide.txt is in UTF-16, and .*iconv -f UTF-16"):
        texts(opened(file), 10**6, skip=frozenset({"utf-8"}))


@pytest.mark.parametrize("content", [b'[{"body": "a"}, {"bo', b'[{"body": "a\xff"}]'])
def test_a_broken_array_is_not_skipped_as_a_row(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.json cannot be read: "):
        texts(opened(tmp_path / "broken.json"), 1, skip=ALL)


def test_parquet_with_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    offsets = np.array([0, 1, 3], np.int32)
    content = pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"a\xff\xff")
    column = pyarrow.StringArray.from_buffers(2, *content)
    parquet.write_table(pyarrow.table({"body": column}), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet, row 1: byte 0"):
        texts(opened(tmp_path / "bad.parquet"), 1)
    assert texts(opened(tmp_path / "bad.parquet"), 1, skip=frozenset({"utf-8"})) == ["a"]


@pytest.mark.parametrize(
    "name",
    ["wiki.train.tokens", "wiki.train.raw", "wiki.train.raw.gz", "WIKI.TXT.GZ", "\udce9.txt.gz"],
)
def test_plain_text_has_any_of_its_suffixes(name: str, tmp_path: Path) -> None:
    pack = gzip.compress if name.lower().endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(b"one\ntwo\n"))
    assert texts(opened(tmp_path / name), 1) == ["one", "two"]


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz"])
def test_blank_lines_of_text_are_skipped_and_counted(name: str, tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf\n = a = \n \n\nb\r\n\t\r\n\x0c\nc\n\n"
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(content))
    for target_bytes in (1, 10**6):
        assert texts(opened(tmp_path / name), target_bytes) == [" = a = ", "b", "c"]
    (reader,) = opened(tmp_path / name)
    report = PieceCounts()
    (piece,) = reader.pieces(10**6)
    list(texts_of(reader, piece, frozenset(), report))
    assert report.skipped == {"blank": {"rows": 6, "position": 0, "reason": "the line is blank"}}


REFUSED = {
    "nowhere.jsonl": (None, "nowhere.jsonl: no such file"),
    "text.docx": (b"PK", "text.docx: unsupported format; use one of .jsonl"),
    "folder": ("folder", "folder: the folder is empty; use a folder or a pattern such as"),
    "*.text": (None, "*.text: no file matches; use a folder or a pattern such as 'text/*.txt'"),
    "nowhere/**/*.txt": (
        None,
        "**/*.txt: no file matches, because the folder {folder}/nowhere does",
    ),
    "cut.parquet": (b"PAR1 and then nothing", "cut.parquet cannot be read"),
    "other.csv": (b"name,age\na,1\n", "other.csv has the columns name, age (use --column name)"),
    "semicolons.csv": (
        b"\xef\xbb\xbfid;text\n1;a, b, c\n",
        "semicolons.csv: the columns are separated by semicolons; separate them with commas, or",
    ),
    "tabs.csv": (b'"body"\t"age"\na\t1\n', "tabs.csv: the columns are separated by tabs; "),
    "text.docx.txt.pdf": (
        b"",
        "unsupported format; use one of .jsonl, .ndjson, .json, .parquet, "
        ".txt, .arrow, .csv, .tokens, .raw",
    ),
    "cut.arrow": (b"nothing", "cut.arrow cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_source_that_cannot_be_read_is_rejected(name: str, tmp_path: Path) -> None:
    content, reason = REFUSED[name]
    if content == "folder":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        opened(tmp_path / name)
    assert reason.format(folder=tmp_path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_a_compressed_file_that_is_cut_off_is_an_error(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"lines.jsonl{suffix}"
    json_lines(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match=f"lines.jsonl{suffix}"):
        texts(opened(file), 1)


def test_folders_that_a_pattern_matches_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep" / "inside").mkdir(parents=True)
    for file in (tmp_path / "a.txt", tmp_path / "deep" / "b.txt", tmp_path / "deep/inside/c.txt"):
        file.write_text("one\n")
    saved = tmp_path / "saved"
    Dataset.from_dict({"body": ["one"]}).save_to_disk(saved)
    assert len(opened(f"{tmp_path}/*")) == 1
    said = capsys.readouterr().out
    reason = "folder; pass it to --source by itself"
    assert f"skipped 1 folder ({reason}), such as {tmp_path}/deep" in said
    assert f"pass each one to --source by itself), such as {saved}" in said
    assert len(opened(f"{tmp_path}/deep/**")) == 2  # reads the files of matched folders
    assert "folder" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no file is one of .*skipped 1 folder \(folder; pass it"):
        opened(f"{tmp_path}/dee*")


def test_files_that_look_like_other_splits_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("test", "train", "valid", "latest"):
        (tmp_path / f"wiki.{split}.txt").write_text("one\n")
    reading = SourceOptions(suggests_split=True)
    open_source([str(tmp_path)], reading)
    assert capsys.readouterr().out == (
        "all files are read as one corpus, although wiki.valid.txt, wiki.test.txt may be other "
        f"splits; to keep them apart, name the files: --source {tmp_path}/wiki.train.txt "
        f"{tmp_path}/wiki.latest.txt --validation-source {tmp_path}/wiki.valid.txt (wiki.test.txt "
        "would then not be read)\n"
    )
    open_source([f"{tmp_path}/*.train.*", f"{tmp_path}/*.latest.*"], reading)
    open_source([f"{tmp_path}/*.test.*"], reading)
    open_source([str(tmp_path)], SourceOptions())
    assert not capsys.readouterr().out
    for number in range(8):
        (tmp_path / f"wiki.train.{number}.txt").write_text("one\n")
    (tmp_path / "wiki.test.txt").unlink()
    open_source([str(tmp_path)], reading)
    assert capsys.readouterr().out.endswith(
        "wiki.valid.txt may be another split; to keep them apart, pass only the other 10 files to "
        f"--source, and {tmp_path}/wiki.valid.txt to --validation-source\n"
    )


def test_a_missing_dataset_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="--source no/where is not a file, and cannot be loaded"):
        opened("no/where")


def open_parts(source: str, validation: str = "", split: str = "") -> list[Format]:
    options = argparse.Namespace(
        source=[source], validation_source=[validation] if validation else None,
        validation_split=split or None,
    )  # fmt: skip
    reading = SourceOptions(column="body")
    return open_validation(options, reading, open_source(options.source, reading))


@pytest.mark.parametrize(
    ("source", "validation", "split", "said"),
    [
        ("plain", "", "validation", "plain is not a dataset with splits; name the files"),
        ("plain", "plain", "", "--validation-source: plain has the same documents as the training"),
        ("plain", "plain", "test", "plain is not a dataset with splits; omit --validation-split"),
        ("splits", "splits", "", "--validation-source: splits has the same documents"),
        ("splits", "splits", "train", "--validation-source: splits has the same documents"),
        ("splits", "splits/train", "", "--validation-source: splits/train has the same documents"),
        ("splits", "", "copy", "--validation-split copy: splits has the same documents"),
        ("splits", "lines.jsonl", "x", "lines.jsonl is not a dataset with splits; omit --valid"),
        ("hub", "hub", "", "--validation-source: hub has the same documents"),
        ("hub", "", "valid", '--validation-split valid: hub: Unknown split "valid". Should be one'),
    ],
)
def test_the_training_part_is_not_the_validation_part(
    source: str,
    validation: str,
    split: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str, config: str | None, *, split: str) -> Dataset:
        if split not in ("train", "validation"):
            raise ValueError(f'Unknown split "{split}". Should be one of [train, validation].')
        return table() if split == "train" else Dataset.from_dict({"body": ["another"]})

    monkeypatch.setattr("threefold.prepare_data.source.load_dataset", load)
    monkeypatch.chdir(tmp_path)
    if source != "hub":
        table().save_to_disk("plain")
        other = Dataset.from_dict({"body": ["another"]})
        parts = {"train": table(), "copy": table(), "validation": other}
        DatasetDict(parts).save_to_disk("splits")
        json_lines(Path("lines.jsonl"))
    with pytest.raises(UserError) as rejected:
        open_parts(source, validation, split)
    assert said in str(rejected.value)
    if source != "hub":
        assert len(open_parts(source, "splits", "validation")) == 1
    else:
        assert len(open_parts("hub", "", "validation")) == 1


def test_a_streamed_dataset_is_known_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted preparation does not continue with the documents of a later commit."""
    json_lines(tmp_path / "lines.jsonl")

    def pieces(commit: str, split: str = "train") -> list[SourcePiece]:
        builder = load_dataset_builder("json", data_files=str(tmp_path / "lines.jsonl"))
        builder.hash = commit
        monkeypatch.setattr(source, "load_dataset_builder", lambda *_: builder)
        reading = SourceOptions(column="body", split=split, streaming=True)
        (stream,) = open_source(["hub"], reading)
        assert texts([stream], 1) == TEXTS
        return list(stream.pieces(1))

    assert pieces("a1") == pieces("a1") != pieces("b2")
    with pytest.raises(UserError, match=r"--split valid: hub: Bad split: valid"):
        pieces("a1", "valid")


@pytest.mark.parametrize(
    ("splits", "proposed"),
    [
        (["train", "test", "validation"], "validation"),
        (["test", "train"], "test"),
        (["train", "unsupervised"], ""),
        ([], ""),
    ],
)
def test_a_split_of_a_hub_dataset_is_proposed(
    splits: list[str],
    proposed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset = table()
    dataset.info.splits = SplitDict({name: SplitInfo(name) for name in splits}) or None
    monkeypatch.setattr("threefold.prepare_data.source.load_dataset", lambda *_, **__: dataset)
    open_source(["hub"], SourceOptions(column="body", suggests_split=True))
    said = capsys.readouterr().out
    assert (f"--validation-split {proposed}, that split" in said) == bool(proposed)
    assert bool(said) == bool(proposed)


def test_a_long_line_before_a_piece_is_skipped_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"x" * 1000 + b"\nsecond\n" + b"y" * 300 + b"\nlast"
    (tmp_path / "lines.txt").write_bytes(content)
    sizes: list[int] = []

    class Watched(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            sizes.append(-1 if size is None else size)
            return super().readline(size)

    monkeypatch.setattr(formats_module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(formats_module, "MAX_LINE_BYTES", 2000)
    monkeypatch.setattr(formats_module, "open_bytes", lambda file: Watched(content))
    for target in (1, 7, 100, 1001, 5000):
        assert texts(opened(tmp_path / "lines.txt"), target) == content.decode().split("\n")
    assert all(0 < size <= 64 or size == 2001 for size in sizes)


def test_names_of_columns_are_printed_with_escapes(tmp_path: Path) -> None:
    for number, (row, said) in enumerate(
        (
            ({"a b": "x"}, "its columns: a b (use --column 'a b')"),
            ({"\x1b[31m": "x"}, "its columns: \\x1b[31m"),
            ({"n" * 61: "x"}, f"its columns: {'n' * 57}..."),
            ({"line\nbreak": "x"}, "its columns: line\\nbreak"),
        )
    ):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
        with pytest.raises(UserError) as rejected:
            texts(opened(tmp_path / f"{number}.jsonl"), 1)
        assert f"{said}; correct the row" in str(rejected.value)
        assert str(rejected.value).isprintable()
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{number}.parquet")
        with pytest.raises(UserError) as rejected:
            opened(tmp_path / f"{number}.parquet")
        assert str(rejected.value).isprintable()


def test_every_kind_has_a_bad_row() -> None:
    assert {kind for _, _, kind, _ in BAD.values()} == set(PROBLEM_KINDS)


def test_a_source_that_changes_while_it_is_read_is_detected(tmp_path: Path) -> None:
    json_lines(tmp_path / "lines.jsonl")
    (reader,) = opened(tmp_path / "lines.jsonl")
    (piece,) = reader.pieces(10**9)
    assert reader.version(piece) == piece.version
    with (tmp_path / "lines.jsonl").open("a") as stream:
        stream.write("\n")
    assert reader.version(piece) != piece.version


def corpus_in(folder: Path) -> None:
    """Write the files of a small corpus that a search for text would find."""
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt"):
        (folder / "tokenizer" / name).write_text("{}")
    manifest = {"tokenizer_sha256": tokenizer_hash(folder / "tokenizer"), "vocab_size": 5}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
    (folder / "pieces.jsonl").write_text('{"files": ["a"], "start": 0, "stop": 5}\n')


def test_prepared_corpora_are_skipped_as_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_lines(tmp_path / "lines.jsonl")
    corpus_in(tmp_path / "made")
    workspace = tmp_path / "more.incomplete"
    corpus_in(workspace / "corpus")
    (workspace / "pieces" / "0" / "train").mkdir(parents=True)
    (workspace / "pieces" / "0" / "report.json").write_text("{}")
    with (workspace / "lock").open("a+") as lock:
        mark_workspace(lock)
    assert texts(opened(tmp_path), 500) == TEXTS
    said = capsys.readouterr().out
    assert said.count("skipped") == 2 and "1 file (unsupported format)" in said  # the lock
    assert (
        f"skipped 11 files (written by prepare_data.py), such as {tmp_path}/made/manifest" in said
    )
    # The pattern matches each file several times.
    assert texts(opened(f"{tmp_path}/**/**/lines.jsonl"), 500) == TEXTS
    with pytest.raises(UserError, match=r"no file is .*; skipped 5 files \(written by prep"):
        opened(tmp_path / "made")


def test_user_files_with_our_names_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of the user are read next to a pieces.jsonl, in NAME.incomplete and in our folders."""
    corpus_in(tmp_path / "made")
    workspace = tmp_path / "work.incomplete"
    for folder in ("pieces", "half.incomplete", "half.incomplete/pieces", "work.incomplete"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "half.incomplete" / "lock").write_text("")
    with (workspace / "lock").open("a+") as lock:
        mark_workspace(lock)
    own = [
        "half.incomplete/a.jsonl", "half.incomplete/pieces/b.jsonl", "made/c.jsonl",
        "pieces/d.jsonl", "pieces/pieces.jsonl", "pieces/manifest.json", "pieces/dataset_info.json",
        "work.incomplete/e.jsonl",
    ]  # fmt: skip
    for name in own:
        (tmp_path / name).write_text(json.dumps({"body": name}) + "\n")
    assert sorted(texts(opened(tmp_path), 500)) == sorted(own)
    assert (
        f"skipped 5 files (written by prepare_data.py), such as {tmp_path}/made/manifest.json"
        in capsys.readouterr().out
    )


def test_a_file_next_to_its_compressed_copy_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        json_lines(tmp_path / f"{name}.jsonl")
    opened(tmp_path)
    assert "warning" not in capsys.readouterr().out
    for name in ("a", "b"):
        packed = gzip.compress((tmp_path / f"{name}.jsonl").read_bytes())
        (tmp_path / f"{name}.jsonl.gz").write_bytes(packed)
    opened(tmp_path)
    assert (
        f"warning: {tmp_path}/a.jsonl and its compressed copy a.jsonl.gz are both read (and 1 more "
        f"pair); if they have the same documents, delete one of them" in capsys.readouterr().out
    )
    opened(tmp_path / "b.jsonl.gz", tmp_path / "b.jsonl")
    assert "b.jsonl and its compressed copy b.jsonl.gz are both" in capsys.readouterr().out


def test_skipped_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_lines(tmp_path / "lines.jsonl")
    (tmp_path / "moved.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    table().save_to_disk(tmp_path / "saved")
    capsys.readouterr()
    assert texts(opened(tmp_path), 500) == TEXTS
    said = capsys.readouterr().out
    assert f"skipped 1 file (broken link or not a regular file), such as {tmp_path}/moved" in said
    assert f"by itself), such as {tmp_path}/saved" in said
    assert len(texts(opened(f"{tmp_path}/saved/*.arrow"), 500)) == len(
        TEXTS
    )  # if the pattern names its files


def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_lines(tmp_path / "lines.jsonl")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="closed"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"url": "https://a.example/a/long/address", "Content": "text"}, "Content"),
        ({"id": "12", "lyrics": "a longer text", "n": 4}, "lyrics"),
        ({"meta": {"text": "nested"}, "n": 4}, None),
    ],
)
def test_the_likeliest_column_is_named(row: dict, column: str | None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    messages = []
    for name in ("rows.jsonl", "rows.parquet"):
        with pytest.raises(UserError) as rejected:
            texts(opened(tmp_path / name), 1)
        messages.append(str(rejected.value))
    advice = f"(use --column {column})" if column else "(use"
    assert [advice in message for message in messages] == [column is not None] * 2, messages
