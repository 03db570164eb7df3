"""Text -> token files and the tokenizer that made them.

Without arguments: the sources of this interpreter's standard library, which recipes/tiny.toml
trains on.

    python recipes/prepare_data.py
    python recipes/prepare_data.py --source books.jsonl --output data/books --vocab-size 32000
    python recipes/prepare_data.py --source 'crawl/*.jsonl.zst' --tokenizer data/books/tokenizer \\
        --output data/crawl --skip utf-8 --skip empty
    python recipes/prepare_data.py --source wikitext --config wikitext-103-raw-v1 \\
        --tokenizer gpt2 --output data/wikitext --skip empty

Whatever ends it, the same command goes on where it was. Over several machines with one file system:
the same command with --shard 0/16, --shard 1/16, ... and, when they are done, without it, which
joins what they have made.

What one step of a recipe reads (documents, and which of their tokens), and whether a corpus still
is what was written:

    python recipes/prepare_data.py show recipes/tiny.toml --step 17 --text
    python recipes/prepare_data.py verify data/books
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not recipes/, is where imports start
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
from recipes.preparing.documents import KINDS
from recipes.preparing.own_files import mark_workspace
from recipes.training.data.token_file import read_manifest, tokenizer_hash
from recipes.training.recipe.loading import REPOSITORY, load_recipe
from recipes.training.recipe.sections import repository_path
from recipes.training.run_folder.line_file import flush
from recipes.training.run_folder.lock import NO_FLOCK

if TYPE_CHECKING:
    from recipes.preparing.formats import Format, NumberedPiece
    from recipes.preparing.tokenization import Tokenization

SMALLEST_VOCABULARY = 257  # every byte and the end of text
DECISIVE = ("source", "config", "split", "column", "text_is", "tokenizer", "vocab_size",
            "validation_fraction")  # fmt: skip
PIECES = 1000  # of a source, about
SMALLEST_PIECE, LARGEST_PIECE = 2**22, 2**30  # bytes


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
    """Write token files, tokenizer and manifest into a folder that appears when all is there."""
    options = parse_command_line(arguments)
    output = repository_path(options.output)
    workspace = output.with_name(output.name + ".incomplete")
    if (output / "manifest.json").exists():
        check_the_same(options, output)
        clear(workspace)  # of one that was killed after its last step
        print(f"{output} is already there; delete it to prepare it again")
        return
    check_options(options, output, workspace)

    # These take seconds to import; the processes that tokenize do without most of them.
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
    with hold(workspace, shared=options.shard is not None):
        if output.exists() and any(output.iterdir()):
            raise UserError(f"another process has just written {output}")
        tokenization = plan(formats, pieces, options, workspace)
        if options.shard is not None:
            shard, shards = options.shard
            run_pieces(tokenization, pieces[shard::shards], options.processes)
            print(f"shard {shard}/{shards} is done; the command without --shard joins all of them")
            return
        run_pieces(tokenization, pieces, options.processes)
        facts = {"tokenizer": f"{options.output}/tokenizer", "options": what_decides(options)}
        manifest = join(tokenization, pieces, workspace / "corpus", facts)
        os.rename(workspace / "corpus", output)
        flush(output.parent)
        clear(workspace)
    tell(manifest, output)


def check_the_same(options: argparse.Namespace, output: Path) -> None:
    """Compare the options of an existing corpus with those of this command.

    Raises:
        UserError: some options differ, or the manifest of the corpus is damaged.
    """
    advice = f"use another --output, or delete {output} to prepare it again"
    made = read_manifest(output, advice=advice).get("options", {})
    if not isinstance(made, dict):
        raise UserError(
            f"{output / 'manifest.json'} is not a manifest of prepare_data.py (options = "
            f"{made!r}); {advice}"
        )
    wanted = what_decides(options)
    different = [
        f"--{key.replace('_', '-')} {made[key]} (here {wanted[key]})"
        for key in wanted
        if key in made and made[key] != wanted[key]
    ]
    if different:
        raise UserError(f"{output} is already there, made with {', '.join(different)}; {advice}")


def what_decides(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what a corpus holds."""
    chosen = {key: vars(options)[key] for key in DECISIVE}
    if options.tokenizer:
        del chosen["vocab_size"]
    return chosen


def check_options(options: argparse.Namespace, output: Path, workspace: Path) -> None:
    """Refuse what cannot work before any work is done.

    Raises:
        UserError: naming the option, its value and one that works.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {options.output} has other things in it; use an empty folder")
    if os.path.ismount(output):
        raise UserError(f"--output {options.output} is a mount point; use a folder in it")
    if workspace.exists() and not (workspace / "lock").is_file() and any(workspace.iterdir()):
        raise UserError(
            f"{workspace}, where the command works, has other things in it; move them away, or use "
            f"another --output"
        )
    if not options.tokenizer and not SMALLEST_VOCABULARY <= options.vocab_size <= MAX_SIZE:
        raise UserError(
            f"--vocab-size {options.vocab_size} is not in {SMALLEST_VOCABULARY} (the 256 bytes and "
            f"the end of text) .. {MAX_SIZE}; use 32000"
        )
    if not 0 < options.validation_fraction < 1:
        raise UserError(
            f"--validation-fraction {options.validation_fraction} is not in 0 .. 1, the ends "
            f"excluded; use 0.1"
        )
    if options.processes < 1:
        raise UserError(f"--processes {options.processes} is too few; use 1")
    if options.shard is not None and not options.tokenizer:
        raise UserError(
            "--shard needs --tokenizer, or each would train one; prepare a part of the text "
            "first, and use its folder: --tokenizer data/part/tokenizer"
        )


def cut(formats: "list[Format]", options: argparse.Namespace) -> "list[NumberedPiece]":
    """All pieces of the source in order, each with the number of its format.

    The same for every shard and number of processes: a small source has small pieces, a large one
    about PIECES, or one for each file.

    Raises:
        UserError: there is nothing to read.
    """
    total = sum(piece.size for reader in formats for piece in reader.pieces(LARGEST_PIECE))
    target = min(max(total // PIECES, SMALLEST_PIECE), LARGEST_PIECE)
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
    """How the documents will be tokenized; a tokenizer is trained if none is named."""
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
def hold(workspace: Path, *, shared: bool) -> Iterator[None]:
    """Lock the workspace against other processes; finished pieces in it outlive an error.

    Args:
        workspace: the folder to lock
        shared: with other processes that hold it shared

    Raises:
        UserError: another process works there, or the file system has no flock.
        OSError: the lock fails for another reason, such as an I/O error.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    with (workspace / "lock").open("a+") as lock:  # NFS locks only what could be read, too
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{workspace} is in use by another process; wait for it") from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise OSError(error.errno, error.strerror, lock.name) from None
            raise UserError(
                f"{workspace} cannot be locked ({error.strerror}): its file system has no flock; "
                f"use an --output on another one, for example a local disk, and copy it"
            ) from None
        mark_workspace(lock)
        if not shared:  # what killed ones have begun
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
                print(f"{pieces} in {workspace}: the same command goes on there", file=sys.stderr)
            elif not shared:
                clear(workspace)
            raise


def clear(workspace: Path) -> None:
    """Remove what this command has made, and the folder if nothing else is in it."""
    for name in ("pieces", "corpus", *(path.name for path in workspace.glob("tokenizer-*"))):
        shutil.rmtree(workspace / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        (workspace / "lock").unlink()
        workspace.rmdir()


def tell(manifest: dict[str, Any], output: Path) -> None:
    """Say what has been prepared."""
    for part, facts in manifest["files"].items():
        print(f"{part}: {facts['documents']:,} documents, {facts['tokens']:,} tokens")
    for kind, skipped in manifest["skipped"].items():
        print(f"skipped {skipped['rows']:,} rows, {kind}: first {skipped['first']}")
    if manifest["document_start"]:
        start = manifest["document_start"]
        print(f"each document begins with the tokens {start}, which the tokenizer adds")
    print(f"written to {output}, vocabulary {manifest['vocab_size']:,}")


def show(arguments: list[str]) -> None:
    """Print what a step of a recipe reads."""
    parser = argparse.ArgumentParser(prog="prepare_data.py show", description=show.__doc__)
    parser.add_argument("recipe", type=Path, help="as for pretrain.py")
    parser.add_argument("--step", type=int, required=True, help="1, 2, ...")
    parser.add_argument("--text", action="store_true", help="and the beginning of each window")
    parser.add_argument("--run-dir", type=Path, help="default: runs/NAME of the recipe")
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

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    run = options.run_dir or REPOSITORY / "runs" / recipe.name
    for line in ledger(recipe, run, options.step, text=options.text):
        print(line)


def verify(arguments: list[str]) -> None:
    """Compare a corpus with the SHA-256s of its manifest; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="prepare_data.py verify", description=verify.__doc__)
    parser.add_argument("corpus", type=Path, help="a folder, from the repository's root")
    options = parser.parse_args(arguments)
    from recipes.preparing.prepared_corpus import find_damages

    corpus = repository_path(options.corpus)
    damages = list(find_damages(corpus, len(os.sched_getaffinity(0))))
    for damage in damages:
        print(f"{corpus}: {damage}")
    if damages:
        raise UserError(f"{corpus} is damaged; prepare it again")
    print(f"{corpus} is what was written")


def shard_of(text: str) -> tuple[int, int]:
    """(number, shards) of an option like 3/16."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not a shard; use 0/16, 1/16, ... 15/16")
    return int(found[1]), int(found[2])


def parse_command_line(arguments: list[str]) -> argparse.Namespace:
    """The command's options."""
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
        help='"stdlib"; files, folders or patterns of .jsonl, .ndjson, .json, .parquet, .txt, '
        ".arrow or .csv (text also .gz, .bz2, .zst), from here; what save_to_disk wrote; datasets "
        "of the hub",
    )
    add("--config", help="the hub dataset's configuration")
    add("--split", default="train", help="the dataset's split")
    add("--streaming", action="store_true", help="read the dataset without storing it here")
    add("--column", default="text", help="the column that holds the text")
    add("--text-is", choices=("line", "file"), default="line", help="the document in a .txt")
    add("--output", default="data/stdlib", help="folder to write, from the repository's root")
    add(
        "--tokenizer",
        help="of the hub, or a folder, from the repository's root; none: train one",
    )
    add("--vocab-size", type=int, default=2048, help="of the tokenizer to train")
    add("--validation-fraction", type=float, default=0.1, help="of the documents")
    add(
        "--skip",
        action="append",
        default=[],
        choices=KINDS,
        help="leave out rows that are empty, not UTF-8 or not JSON, or have no text in the column, "
        "and count them, instead of stopping at the first; repeatable",
    )
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--shard", type=shard_of, metavar="I/N", help="this machine's share, 0/N .. N-1/N")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
