"""Tokenize text into a corpus: token files, their tokenizer and a manifest.

Without arguments, the command prepares the Python sources of this interpreter's standard library,
on which recipes/tiny.toml trains.

    python recipes/prepare_data.py
    python recipes/prepare_data.py --source books.jsonl --output data/books --vocab-size 32000
    python recipes/prepare_data.py --source 'crawl/*.jsonl.zst' --tokenizer data/books/tokenizer \\
        --output data/crawl --skip utf-8 --skip empty
    python recipes/prepare_data.py --source wikitext --config wikitext-103-raw-v1 \\
        --tokenizer gpt2 --output data/wikitext --skip empty

After an interruption, rerun the same command to resume. To use several machines with a shared file
system, run the command with --shard 0/16, --shard 1/16, ... When all shards are done, run it once
without --shard to join them.

List the documents and tokens that a step of a recipe reads, and compare a corpus with its manifest:

    python recipes/prepare_data.py show recipes/tiny.toml --step 17 --text
    python recipes/prepare_data.py verify data/books
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start in the root of the repository, not in recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from models.config import MAX_SIZE
from models.errors import UserError
from recipes.preparing.formats.documents import PROBLEM_KINDS
from recipes.preparing.own_files import mark_workspace
from recipes.training.data.corpus_manifest import read_manifest, tokenizer_hash
from recipes.training.recipe.loading import REPOSITORY, load_recipe
from recipes.training.recipe.repository import repository_path
from recipes.training.run_folder.line_file import flush
from recipes.training.run_folder.lock import NO_FLOCK

if TYPE_CHECKING:
    from recipes.preparing.formats.format import Format, NumberedPiece
    from recipes.preparing.tokenization import Tokenization

MIN_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token
CONTENT_OPTIONS = ("source", "config", "split", "column", "text_is", "tokenizer", "vocab_size",
            "validation_fraction")  # fmt: skip
TARGET_PIECES = 1000  # approximate number of pieces of a large source
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**22, 2**30


def main() -> None:
    """Run the command."""
    commands = {"show": show, "verify": verify}
    command = commands.get(sys.argv[1] if len(sys.argv) > 1 else "", prepare)
    try:
        command(sys.argv[1:] if command is prepare else sys.argv[2:])
    except UserError as problem:
        sys.exit(f"prepare_data.py: {problem}")
    except OSError as problem:
        where = problem.filename or "a file"
        sys.exit(
            f"prepare_data.py: {where} cannot be read or written ({problem.strerror or problem})"
        )
    except KeyboardInterrupt:
        sys.exit("prepare_data.py: interrupted")


def prepare(arguments: list[str]) -> None:
    """Write token files, tokenizer and manifest; the output folder appears when it is complete."""
    options = parse_command_line(arguments)
    output = repository_path(options.output)
    workspace = output.with_name(output.name + ".incomplete")
    if (output / "manifest.json").exists():
        check_same_options(options, output)
        clear(workspace)  # it remains if a process was killed after the last step
        print(f"{output} already exists; delete it to prepare it again")
        return
    check_options(options, output, workspace)

    # These imports take seconds, and the worker processes do not need most of them.
    from recipes.preparing.prepared_corpus import join
    from recipes.preparing.source import open_source
    from recipes.preparing.workers import run_pieces

    formats = open_source(
        options.source,
        column=options.column,
        config=options.config,
        split=options.split,
        streaming=options.streaming,
        text_is=options.text_is,
    )
    pieces = cut(formats, options)
    with lock_workspace(workspace, shared=options.shard is not None):
        if output.exists() and any(output.iterdir()):
            raise UserError(f"another process has just written {output}")
        tokenization = plan(formats, pieces, options, workspace)
        if options.shard is not None:
            shard, shards = options.shard
            run_pieces(tokenization, pieces[shard::shards], options.processes)
            print(f"shard {shard}/{shards} is done; the command without --shard joins all of them")
            return
        run_pieces(tokenization, pieces, options.processes)
        facts = {"tokenizer": f"{options.output}/tokenizer", "options": content_options(options)}
        manifest = join(tokenization, pieces, workspace / "corpus", facts)
        os.rename(workspace / "corpus", output)
        flush(output.parent)
        clear(workspace)
    tell(manifest, output)


def check_same_options(options: argparse.Namespace, output: Path) -> None:
    """Compare the options of an existing corpus with those of this command.

    Raises:
        UserError: An option differs, or the manifest of the corpus is damaged.
    """
    advice = f"use another --output, or delete {output} to prepare it again"
    made = read_manifest(output, advice=advice).get("options", {})
    if not isinstance(made, dict):
        raise UserError(
            f"{output / 'manifest.json'} is not a manifest of prepare_data.py (options = "
            f"{made!r}); {advice}"
        )
    wanted = content_options(options)
    different = [
        f"--{key.replace('_', '-')} {made[key]} (here {wanted[key]})"
        for key in wanted
        if key in made and made[key] != wanted[key]
    ]
    if different:
        raise UserError(f"{output} already exists, made with {', '.join(different)}; {advice}")


def content_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that determine the content of a corpus."""
    chosen = {key: vars(options)[key] for key in CONTENT_OPTIONS}
    if options.tokenizer:
        del chosen["vocab_size"]
    return chosen


def check_options(options: argparse.Namespace, output: Path, workspace: Path) -> None:
    """Check the options before any work is done.

    Raises:
        UserError: An option has an invalid value.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {options.output} contains other files; use an empty folder")
    if os.path.ismount(output):
        raise UserError(f"--output {options.output} is a mount point; use a folder in it")
    if workspace.exists() and not (workspace / "lock").is_file() and any(workspace.iterdir()):
        raise UserError(
            f"{workspace}, the working folder of this command, contains other files; move them "
            f"away, or use another --output"
        )
    if not options.tokenizer and not MIN_VOCAB_SIZE <= options.vocab_size <= MAX_SIZE:
        raise UserError(
            f"--vocab-size {options.vocab_size} is not in {MIN_VOCAB_SIZE} (the 256 bytes and "
            f"the end-of-text token) .. {MAX_SIZE}; use 32000"
        )
    if not 0 < options.validation_fraction < 1:
        raise UserError(
            f"--validation-fraction {options.validation_fraction} is not between 0 and 1; use 0.1"
        )
    if options.processes < 1:
        raise UserError(f"--processes {options.processes} is too few; use 1")
    if options.shard is not None and not options.tokenizer:
        raise UserError(
            "--shard needs --tokenizer, because each shard would train a tokenizer of its own; "
            "prepare a part of the text first and use its tokenizer: "
            "--tokenizer data/part/tokenizer"
        )


def cut(formats: "list[Format]", options: argparse.Namespace) -> "list[NumberedPiece]":
    """Return all pieces of the source in order, each with the number of its format.

    The result is the same for every shard and number of processes. A large source has about
    TARGET_PIECES pieces, or one per file if it has more files.

    Raises:
        UserError: The source has no documents.
    """
    total = sum(piece.size for reader in formats for piece in reader.pieces(MAX_PIECE_BYTES))
    target = min(max(total // TARGET_PIECES, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    pieces = [
        (number, piece) for number, reader in enumerate(formats) for piece in reader.pieces(target)
    ]
    if not pieces:
        raise UserError(f"--source {' '.join(options.source)} has no documents")
    return pieces


def plan(
    formats: "list[Format]",
    pieces: "list[NumberedPiece]",
    options: argparse.Namespace,
    workspace: Path,
) -> "Tokenization":
    """Return the tokenization of the documents; train a tokenizer if the options name none."""
    from recipes.preparing.tokenization import Tokenization
    from recipes.preparing.tokenizer import (
        copy_tokenizer,
        document_start,
        load_tokenizer,
        train_tokenizer,
    )

    skip, fraction = frozenset(options.skip), options.validation_fraction
    if options.tokenizer:
        folder = copy_tokenizer(options.tokenizer, workspace)
    else:
        folder = train_tokenizer(
            formats,
            pieces,
            workspace,
            vocab_size=options.vocab_size,
            validation_fraction=fraction,
            skip=skip,
        )
    tokenizer = load_tokenizer(folder, f"--tokenizer {options.tokenizer or folder}")
    return Tokenization(
        formats=formats,
        tokenizer=folder / "tokenizer.json",
        tokenizer_sha256=tokenizer_hash(folder),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        start=tuple(document_start(tokenizer)),
        end=tokenizer.eos_token_id,
        split_special_tokens=getattr(tokenizer, "split_special_tokens", False),
        validation_fraction=fraction,
        skip=skip,
        folder=workspace / "pieces",
    )


@contextlib.contextmanager
def lock_workspace(workspace: Path, *, shared: bool) -> Iterator[None]:
    """Lock the workspace against other processes; keep its finished pieces after an error.

    Args:
        workspace: the folder to lock
        shared: take a shared lock, as the processes of all shards do

    Raises:
        UserError: Another process uses the workspace, or the file system does not support flock.
        OSError: The lock fails for another reason, such as an I/O error.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    with (workspace / "lock").open("a+") as lock:  # NFS needs a readable file for LOCK_SH
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{workspace} is in use by another process; wait for it") from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise OSError(error.errno, error.strerror, lock.name) from None
            raise UserError(
                f"{workspace} cannot be locked ({error.strerror}): its file system has no flock; "
                f"use an --output on another one, for example a local disk, and copy the result"
            ) from None
        mark_workspace(lock)
        if not shared:  # remove unfinished folders of killed processes
            for leftover in (
                *workspace.glob("*.incomplete"),
                *workspace.glob("pieces/*.incomplete"),
            ):
                shutil.rmtree(leftover, ignore_errors=True)
        try:
            yield
        except BaseException:
            shutil.rmtree(workspace / "corpus", ignore_errors=True)
            finished = [path for path in workspace.glob("pieces/*") if not path.suffix]
            trained = [path for path in workspace.glob("tokenizer-*") if not path.suffix]
            if finished or trained:
                pieces = f"{len(finished)} finished pieces" if finished else "a tokenizer"
                print(f"{workspace} keeps {pieces}; rerun the same command to resume",
                      file=sys.stderr)  # fmt: skip
            elif not shared:
                clear(workspace)
            raise


def clear(workspace: Path) -> None:
    """Remove this command's files from the workspace, and the folder if it is then empty."""
    for name in ("pieces", "corpus", *(path.name for path in workspace.glob("tokenizer-*"))):
        shutil.rmtree(workspace / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        (workspace / "lock").unlink()
        workspace.rmdir()


def tell(manifest: dict[str, Any], output: Path) -> None:
    """Print a summary of the prepared corpus."""
    for part, facts in manifest["files"].items():
        print(f"{part}: {facts['documents']:,} documents, {facts['tokens']:,} tokens")
    for kind, skipped in manifest["skipped"].items():
        print(f"skipped {skipped['rows']:,} rows, {kind}: first {skipped['first']}")
    if manifest["document_start"]:
        start = manifest["document_start"]
        print(f"each document begins with the tokens {start}, which the tokenizer adds")
    print(f"written to {output}, vocabulary {manifest['vocab_size']:,}")


def show(arguments: list[str]) -> None:
    """Print the documents and tokens that a step of a recipe reads."""
    parser = argparse.ArgumentParser(prog="prepare_data.py show", description=show.__doc__)
    parser.add_argument("recipe", type=Path, help="TOML file, as for pretrain.py")
    parser.add_argument("--step", type=int, required=True, help="number of the step, from 1")
    parser.add_argument(
        "--text", action="store_true", help="also print the beginning of each window's text"
    )
    parser.add_argument("--run-dir", type=Path, help="run folder (default: runs/NAME)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as for pretrain.py"
    )
    options = parser.parse_args(arguments)
    recipe = load_recipe(options.recipe, options.set)
    if not 1 <= options.step <= recipe.training.steps:
        raise UserError(
            f"--step {options.step} is not in 1 .. {recipe.training.steps}, the steps of "
            f"{options.recipe}; use --step 1"
        )
    from recipes.preparing.ledger import ledger

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback in `| head`
    run = options.run_dir or REPOSITORY / "runs" / recipe.name
    for line in ledger(recipe, run, options.step, text=options.text):
        print(line)


def verify(arguments: list[str]) -> None:
    """Compare a corpus with the SHA-256s of its manifest; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="prepare_data.py verify", description=verify.__doc__)
    parser.add_argument("corpus", type=Path, help="folder, relative to the repository's root")
    options = parser.parse_args(arguments)
    from recipes.preparing.prepared_corpus import find_damages

    corpus = repository_path(options.corpus)
    damages = list(find_damages(corpus, len(os.sched_getaffinity(0))))
    for damage in damages:
        print(f"{corpus}: {damage}")
    if damages:
        raise UserError(f"{corpus} is damaged; prepare it again")
    print(f"{corpus} matches its manifest")


def shard_of(text: str) -> tuple[int, int]:
    """Parse a shard such as 3/16 into its number and the number of shards."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not a shard; use 0/16, 1/16, ... 15/16")
    return int(found[1]), int(found[2])


def parse_command_line(arguments: list[str]) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--source",
        nargs="+",
        default=["stdlib"],
        help='"stdlib"; files, folders or patterns, relative to the current folder (.jsonl, '
        ".ndjson, .json, .parquet, .txt, .arrow or .csv; text formats also .gz, .bz2 or .zst); "
        "folders written by save_to_disk; datasets of the Hugging Face hub",
    )
    add("--config", help="configuration of the hub dataset")
    add("--split", default="train", help="split of the dataset (default: train)")
    add("--streaming", action="store_true", help="stream the dataset without storing it")
    add("--column", default="text", help="column that holds the text (default: text)")
    add(
        "--text-is",
        choices=("line", "file"),
        default="line",
        help="unit that is a document in a .txt file (default: line)",
    )
    add(
        "--output",
        default="data/stdlib",
        help="folder to write, relative to the repository's root (default: data/stdlib)",
    )
    add(
        "--tokenizer",
        help="name on the hub, or a folder relative to the repository's root; without it, a "
        "tokenizer is trained",
    )
    add(
        "--vocab-size",
        type=int,
        default=2048,
        help="vocabulary size of a trained tokenizer (default: 2048)",
    )
    add(
        "--validation-fraction",
        type=float,
        default=0.1,
        help="share of the documents held out for validation (default: 0.1)",
    )
    add(
        "--skip",
        action="append",
        default=[],
        choices=PROBLEM_KINDS,
        help="skip and count rows that are empty, not UTF-8, not JSON or without text in the "
        "column, instead of stopping at the first one; repeatable",
    )
    add(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="worker processes (default: one per core)",
    )
    add("--shard", type=shard_of, metavar="I/N", help="shard of this machine, 0/N to N-1/N")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
