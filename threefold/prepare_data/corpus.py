"""The corpus that training reads: joined pieces and a manifest.

NAME/
  manifest.json     tokenizer, vocabulary, documents and tokens, SHA-256s, sources
  pieces.jsonl      origin of the tokens: a line for each piece, in order
  tokenizer/
  train.bin train.idx validation.bin validation.idx (without a validation part, only train)
"""

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import UserError, reason_of, suggestion, why_missing
from threefold.checkpoint.format import sha256
from threefold.data.manifest import folder_hash, lost_manifest, read_manifest
from threefold.data.token_file import (
    HEADER,
    HashedFile,
    TokenFile,
    TokenFileWriter,
    entry_ranges,
    token_type,
    write_index,
)
from threefold.prepare_data.documents import EmptyPart
from threefold.prepare_data.formats import NumberedPiece, describe
from threefold.prepare_data.tokenization import PARTS, PieceCounts, Tokenization, new_folder
from threefold.run_folder.json_lines import flush

BLOCK_BYTES = 2**24
LOCATION_KEYS = ("files", "start", "stop", "unit")  # fields of a SourcePiece in pieces.jsonl
COUNT_KEYS = ("documents", "tokens")  # counts of a part in the manifest


def join(
    tokenization: Tokenization,
    pieces: Sequence[NumberedPiece],
    output: Path,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Join finished pieces into a corpus in order, and return its manifest.

    A corpus of a single document is divided by tokens. There is no validation part if
    `validation_fraction` is 0 and no format is held out.

    The operating system copies the tokens. They are not read again, because they were counted and
    hashed when they were written.

    Args:
        pieces: all pieces of the source, in order
        output: folder of the corpus, which is deleted and created again
        facts: further entries of the manifest

    Raises:
        EmptyPart: A part has no tokens.
    """
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    found = [tokenization.find(*item) for item in pieces]
    reports = [report for report in found if report is not None]
    folders = [tokenization.folder / tokenization.name(*item) for item in pieces]
    assert len(reports) == len(pieces)  # all pieces are finished
    skipped = count_skipped(tokenization, pieces, reports)
    ends_in_text = sum(report.ends_in_text for report in reports)
    fraction = tokenization.validation_fraction
    is_divided = sum_documents(reports) == 1 and fraction > 0
    if is_divided:
        number = next(n for n, report in enumerate(reports) if sum_documents([report]))
        folders[number], reports[number] = divide(tokenization, folders[number], reports[number])
    files: dict[str, Any] = {}
    for part in PARTS if fraction or tokenization.held_out else PARTS[:1]:
        counts = [report.parts[part] for report in reports]
        files[part] = {key: sum(c[key] for c in counts) for key in ("documents", "tokens")}
        if not files[part]["tokens"]:
            rows = sum(reason["rows"] for reason in skipped.values())
            own_source = "the source of the validation part"  # check_parts names the option
            raise EmptyPart(
                part,
                documents=sum_documents(reports),
                skipped_rows=rows,
                first_skipped=next((each["first"] for each in skipped.values()), ""),
                fraction=fraction,
                validation_option=own_source if tokenization.held_out else "",
            )
        files[part] |= {
            "bin_sha256": digest_of(count["sha256"] for count in counts),
            "idx_sha256": join_part(
                [folder / part for folder in folders],
                output / part,
                documents=files[part]["documents"],
                vocab_size=tokenization.vocab_size,
            ),
        }
    shutil.copytree(tokenization.tokenizer.parent, output / "tokenizer")
    with (output / "pieces.jsonl").open("w", encoding="utf-8") as stream:
        for (_, piece), report in zip(pieces, reports, strict=True):
            where = {key: getattr(piece, key) for key in LOCATION_KEYS}
            stream.write(json.dumps(where | report.parts) + "\n")
    manifest = facts | {
        "tokenizer_sha256": tokenization.tokenizer_sha256,
        "vocab_size": tokenization.vocab_size,
        "document_start": list(tokenization.start),
        "files": files,
        "pieces_sha256": sha256(output / "pieces.jsonl"),
        "tokenizer_folder_sha256": folder_hash(output / "tokenizer"),
        "skipped": skipped,
    }
    if ends_in_text:
        manifest["ends_in_text"] = ends_in_text
    if is_divided:
        manifest["divided_document"] = True
    text = json.dumps(manifest, indent=2) + "\n"
    (output / "manifest.json").write_text(text, encoding="utf-8")
    for file in output.rglob("*"):
        flush(file)
    flush(output)
    return manifest


def divide(
    tokenization: Tokenization, folder: Path, report: PieceCounts
) -> tuple[Path, PieceCounts]:
    """Divide the only document of a corpus by tokens: its end is the validation part.

    Args:
        folder: the finished piece that holds the document

    Returns:
        The folder and the counts of a piece with both parts.
    """
    (part,) = (name for name in PARTS if report.parts[name]["documents"])
    file = TokenFile(folder / part)
    tokens, start = file.read(0, file.count), tokenization.start
    train = round((1 - tokenization.validation_fraction) * len(tokens))
    train = min(max(train, len(start) + 1), len(tokens) - 1)
    contents = {"train": tokens[:train], "validation": np.concatenate([start, tokens[train:]])}
    # Names of finished pieces have no suffix.
    target, parts = folder.with_name(f"{folder.name}.divided"), {}
    with new_folder(target) as room:
        for name, content in contents.items():
            with TokenFileWriter(room / name, file.dtype) as writer:
                writer.write(content, np.array([len(content)], np.int64))
            parts[name] = {"documents": 1, "tokens": len(content), "sha256": writer.hashes["bin"]}
    return target, PieceCounts(parts=parts, skipped=report.skipped)


def count_skipped(
    tokenization: Tokenization, pieces: Sequence[NumberedPiece], reports: Sequence[PieceCounts]
) -> dict[str, dict[str, Any]]:
    """Return the number of skipped rows by kind of problem, and the first of each kind in words."""
    total: dict[str, dict[str, Any]] = {}
    for (number, piece), report in zip(pieces, reports, strict=True):
        for kind, skipped in report.skipped.items():
            if kind not in total:
                place = tokenization.formats[number].place(piece, skipped["position"])
                total[kind] = {"rows": 0, "first": f"{place}: {skipped['reason']}"}
            total[kind]["rows"] += skipped["rows"]
    return total


def sum_documents(reports: Sequence[PieceCounts]) -> int:
    """Return the number of documents in all parts of all pieces."""
    return sum(counts["documents"] for report in reports for counts in report.parts.values())


def join_part(parts: Sequence[Path], target: Path, *, documents: int, vocab_size: int) -> str:
    """Join token files in order, and return the SHA-256 of the new index."""
    with target.with_name(target.name + ".bin").open("wb") as stream:
        for part in parts:
            append(part.with_name(part.name + ".bin"), stream.fileno())

    def lengths() -> Iterator[np.ndarray]:
        for part in parts:
            file = TokenFile(part)
            for first, after in entry_ranges(file.sequences):
                yield np.diff(file.starts(first, after))

    index = HashedFile(target.with_name(target.name + ".idx"))
    write_index(index, token_type(vocab_size), lengths, count=documents)
    return index.close()


def append(source: Path, target: int) -> None:
    """Append a file to an open one inside the kernel."""
    with source.open("rb") as stream:
        left = source.stat().st_size
        while left:
            copied = os.sendfile(target, stream.fileno(), None, left)
            if not copied:
                raise OSError(f"{source} has become shorter")
            left -= copied


class Origins:
    """The origins of the documents of a part, as pieces.jsonl records them.

    Raises:
        UserError: A line of pieces.jsonl is damaged.
    """

    def __init__(self, token_file: Path):
        pieces = token_file.with_name("pieces.jsonl")
        self.pieces = read_pieces(pieces) if pieces.is_file() else []
        counts = [piece.get(token_file.name, {}).get("documents", 0) for piece in self.pieces]
        self.ends = list(accumulate(counts))

    def __getitem__(self, document: int) -> str:
        """Return the files and the range of a document's piece in words; "" if not recorded."""
        number = bisect_right(self.ends, document)
        if number == len(self.ends):
            return ""
        return describe(*(self.pieces[number][key] for key in LOCATION_KEYS))


def read_pieces(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a pieces.jsonl.

    Raises:
        UserError: A line is damaged.
    """
    pieces = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            piece = {"unit": ""} | json.loads(line)  # corpora of older versions have none
            pieces.append({key: piece[key] for key in (*LOCATION_KEYS, *PARTS)})
            _check_piece(pieces[-1])
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            raise UserError(
                f"{file}, line {number}, is damaged ({reason_of(error)}); delete "
                f"{file.parent} and prepare it again"
            ) from None
    return pieces


def _check_piece(piece: dict[str, Any]) -> None:
    """Raise a UserError if a value of a line of pieces.jsonl has another type than was written."""
    files, start, stop, unit = (piece[key] for key in LOCATION_KEYS)
    if not (isinstance(files, list) and files and all(isinstance(file, str) for file in files)):
        raise UserError(f"files = {files!r:.60}")
    if type(start) is not int or not (stop is None or type(stop) is int):
        raise UserError(f"start = {start!r:.60}, stop = {stop!r:.60}")
    if not isinstance(unit, str):
        raise UserError(f"unit = {unit!r:.60}")
    for part in PARTS:
        for key in COUNT_KEYS:
            if type(count := piece[part][key]) is not int or count < 0:
                raise UserError(f"{part}.{key} = {count!r:.60}")


def find_damages(corpus: Path, threads: int, *, only_sizes: bool = False) -> Iterator[str]:
    """Compare a corpus with its manifest; yield a message for each difference.

    Args:
        only_sizes: compare the sizes of the token files, and read no file but the manifest

    Raises:
        UserError: The folder is not a corpus.
    """
    advice = "use the folder that --output named"
    if not (corpus / "manifest.json").is_file():
        if lost := lost_manifest(corpus):
            raise UserError(lost)
        others = sorted(file.parent for file in corpus.parent.glob("*/manifest.json"))
        problem = why_missing(corpus, "manifest.json")
        if others and not corpus.is_dir():
            names = [other.name for other in others]
            advice = suggestion(corpus.name, names, folder=f"{corpus.parent}/")
        raise UserError(f"{corpus} {problem}, so it cannot be verified; {advice}")
    manifest = read_manifest(corpus)
    try:
        files, tokenizer = manifest["files"], manifest["tokenizer_folder_sha256"]
        expected = {"pieces.jsonl": manifest["pieces_sha256"]}
        parts = [part for part in PARTS if part == "train" or part in files]
        expected |= {f"{part}.idx": files[part]["idx_sha256"] for part in parts}
        counts = {part: {key: files[part][key] for key in COUNT_KEYS} for part in parts}
        if any(type(count) is not int for part in parts for count in counts[part].values()):
            raise TypeError
        token_bytes = token_type(manifest["vocab_size"]).itemsize
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{corpus} is not a corpus that prepare_data.py has written "
            f"({reason_of(error)} in manifest.json); {advice}"
        ) from None
    if only_sizes:
        yield from _wrong_sizes(corpus, counts, token_bytes)
        return
    if folder_hash(corpus / "tokenizer") != tokenizer:
        yield "tokenizer/ differs from the tokenizer that made the corpus"
    wrong = {}
    for name in (*expected, *(f"{part}.bin" for part in parts)):
        if not (corpus / name).is_file():
            wrong[name] = "is missing"
        elif name in expected and sha256(corpus / name) != expected[name]:
            wrong[name] = "does not have the SHA-256 in the manifest"
    yield from (f"{name} {problem}" for name, problem in wrong.items())
    if any(name == "pieces.jsonl" or name.endswith(".bin") for name in wrong):
        return  # the .bin files cannot be compared without pieces.jsonl
    pieces = read_pieces(corpus / "pieces.jsonl")
    for part in PARTS:
        facts = counts.get(part, dict.fromkeys(COUNT_KEYS, 0))
        for key in COUNT_KEYS:
            if facts[key] != (total := sum(piece[part][key] for piece in pieces)):
                yield (
                    f"manifest.json says {facts[key]} {key} of {part}, pieces.jsonl says {total}"
                )
    for part in parts:
        sizes = [piece[part]["tokens"] * token_bytes for piece in pieces]
        starts = [0, *accumulate(sizes)]
        size = (corpus / f"{part}.bin").stat().st_size
        if size != starts[-1]:
            yield f"{part}.bin has {size} bytes instead of {starts[-1]}"
        with ThreadPoolExecutor(threads) as pool:
            digests = pool.map(partial(sha256_of_range, corpus / f"{part}.bin"), starts, sizes)
            for piece, start, digest in zip(pieces, starts, digests, strict=False):
                if digest != piece[part]["sha256"]:
                    end = start + piece[part]["tokens"] * token_bytes
                    origin = describe(*(piece[key] for key in LOCATION_KEYS))
                    yield (
                        f"{part}.bin has changed since it was written: bytes {start} .. {end - 1}, "
                        f"made from {origin}"
                    )


def _wrong_sizes(
    corpus: Path, counts: dict[str, dict[str, int]], token_bytes: int
) -> Iterator[str]:
    """Yield a message for each file of a corpus that is missing or has another size."""
    sizes: dict[str, int | None] = {"pieces.jsonl": None, "tokenizer/tokenizer.json": None}
    for part, count in counts.items():
        sizes[f"{part}.bin"] = count["tokens"] * token_bytes
        sizes[f"{part}.idx"] = HEADER.size + 12 * count["documents"] + 8 * (count["documents"] + 1)
    for name, size in sizes.items():
        if not (corpus / name).is_file():
            yield f"{name} is missing"
        elif size is not None and (actual := (corpus / name).stat().st_size) != size:
            yield f"{name} has {actual} bytes instead of {size}"


def sha256_of_range(file: Path, start: int, size: int) -> str:
    """Return the SHA-256 of `size` bytes of a file from `start` on, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        stream.seek(start)
        while block := stream.read(
            min(size, BLOCK_BYTES)
        ):  # ends after `size` bytes or at the end of the file
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def digest_of(digests: Iterable[str]) -> str:
    """Return one SHA-256 for a list of SHA-256s: the hash of the list with one per line."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
