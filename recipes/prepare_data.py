"""Tokenize text into a corpus: token files, their tokenizer and a manifest.

Without arguments, the command prepares the Python sources of this interpreter's standard library,
on which recipes/tiny.toml trains.

    python recipes/prepare_data.py
    python recipes/prepare_data.py --source books.jsonl --output data/books --vocab-size 32000
    python recipes/prepare_data.py --source 'crawl/*.jsonl.zst' --tokenizer data/books/tokenizer \\
        --output data/crawl --skip utf-8 --skip empty
    python recipes/prepare_data.py --source wikitext --config wikitext-103-raw-v1 \\
        --validation-split validation --tokenizer gpt2 --output data/wikitext --skip empty
    python recipes/prepare_data.py --source c4/train --validation-source c4/validation \\
        --tokenizer gpt2 --output data/c4

After an interruption, rerun the same command to resume. To use several machines with a shared file
system, run the command with --shard 0/16, --shard 1/16, ... When all shards are done, run it once
without --shard to join them.

List the documents and tokens that a step of a recipe reads, and compare a corpus with its manifest:

    python recipes/prepare_data.py show recipes/tiny.toml --step 17 --text
    python recipes/prepare_data.py verify data/books

Make a task for evaluation.tasks from the validation documents of a corpus (`tasks --help`):

    python recipes/prepare_data.py tasks next-line data/stdlib --output data/tasks/next_line.jsonl

Exit code 0: done; 1: a corpus is damaged; 2: a source, a file or an option is rejected.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start in the root of the repository, not in recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

import argparse
import os
import re
import signal
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from models.errors import UserError, a_few, counted
from threefold.commands.prepare_data_options import (
    check_options,
    check_same_options,
    content_options,
    validation_option,
)
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.sections import repository_path
from threefold.data.corpus import few_tokens
from threefold.prepare_data.corpus import clear_workspace, full_disk_explained, lock_workspace
from threefold.prepare_data.formats import BLANK, PROBLEM_KINDS
from threefold.run_folder.json_lines import flush
from threefold.runtime.exits import REJECTED, raise_at_interrupt
from threefold.runtime.output import escape_output

if TYPE_CHECKING:
    from threefold.prepare_data.formats import Format, NumberedPiece
    from threefold.prepare_data.tokenization import Tokenization

VALIDATION_FRACTION = 0.1
FEW_TOKENS = 2049  # of a part; a window of model.sequence_length = 2048 needs as many


def main() -> None:
    """Run the command."""
    escape_output()
    commands = {"show": show, "verify": verify, "tasks": tasks}
    command = commands.get(sys.argv[1] if len(sys.argv) > 1 else "", prepare)
    try:
        command(sys.argv[1:] if command is prepare else sys.argv[2:])
    except UserError as problem:
        print(f"prepare_data.py: {problem}", file=sys.stderr)
        sys.exit(REJECTED)
    except OSError as problem:
        reason = f"cannot be read or written ({problem.strerror or problem})"
        print(f"prepare_data.py: {problem.filename or 'a file'} {reason}", file=sys.stderr)
        sys.exit(REJECTED)
    except KeyboardInterrupt as interruption:
        nothing = "nothing is written yet; rerun the same command to start again"
        kept = getattr(interruption, "__notes__", [nothing] if command is prepare else [])
        print("; ".join(["prepare_data.py: interrupted", *kept]), file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def prepare(arguments: list[str]) -> None:
    """Write token files, tokenizer and manifest; the output folder appears when it is complete."""
    options = parse_command_line(arguments)
    output = repository_path(options.output)
    workspace = output.with_name(output.name + ".incomplete")
    if (output / "manifest.json").exists():
        check_same_options(options, output)
        from threefold.prepare_data.corpus import find_damages

        reject_damages(output, find_damages(output, 1, only_sizes=True))
        clear_workspace(workspace)  # it remains if a process was killed after the last step
        prepared_at = datetime.fromtimestamp((output / "manifest.json").stat().st_mtime)
        print(
            f"{output} was prepared on {prepared_at:%Y-%m-%d %H:%M} and is complete; delete it to "
            f"prepare it again, for example because its source has changed"
        )
        return
    check_options(options, output, workspace)
    print(f"preparing {output} from {a_few(options.source)}", flush=True)

    # These imports take seconds, and the worker processes do not need most of them.
    import threefold.prepare_data.tokenizer  # noqa: F401 (for `plan`)
    from threefold.prepare_data.corpus import join
    from threefold.prepare_data.formats import cut
    from threefold.prepare_data.source import SourceOptions, open_source, open_validation
    from threefold.prepare_data.tokenization import check_parts, run_pieces

    raise_at_interrupt()
    reading = SourceOptions(
        column=options.column,
        config=options.config,
        split=options.split,
        streaming=options.streaming,
        text_is=options.text_is,
        suggests_split=not validation_option(options),
    )
    formats = open_source(options.source, reading)
    pieces = cut(formats, f"--source {' '.join(options.source)}")
    held_out = range(len(formats), len(formats))
    if validation := open_validation(options, reading, formats):
        held_out = range(len(formats), len(formats) + len(validation))
        cut_validation = cut(validation, validation_option(options))
        pieces += [(held_out[number], piece) for number, piece in cut_validation]
        formats += validation
    if options.shard is None or options.shard[0] == 0:  # one of the shards checks for all of them
        check_parts(
            formats,
            pieces,
            fraction=options.validation_fraction,
            held_out=held_out,
            validation_option=validation_option(options),
            skip=frozenset(options.skip),
        )
    with (
        full_disk_explained(workspace),
        lock_workspace(workspace, shared=options.shard is not None),
    ):
        if output.exists() and any(output.iterdir()):
            raise UserError(f"another process has just written {output}")
        tokenization = plan(formats, pieces, options, workspace, held_out=held_out)
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
        clear_workspace(workspace)
    tell(manifest, output)


def plan(
    formats: "list[Format]",
    pieces: "list[NumberedPiece]",
    options: argparse.Namespace,
    workspace: Path,
    *,
    held_out: range,
) -> "Tokenization":
    """Return the tokenization of the documents; train a tokenizer if the options name none.

    held_out: numbers of the formats whose documents are the validation part
    """
    from threefold.prepare_data.tokenizer import copy_tokenizer, plan_tokenization, train_tokenizer

    skip, fraction = frozenset(options.skip), options.validation_fraction
    if options.tokenizer:
        folder = copy_tokenizer(options.tokenizer, workspace)
    else:
        folder = train_tokenizer(
            formats,
            [item for item in pieces if item[0] not in held_out],
            workspace,
            vocab_size=options.vocab_size,
            validation_fraction=fraction,
            skip=skip,
        )
    return plan_tokenization(
        formats,
        folder,
        f"--tokenizer {options.tokenizer or folder}",
        validation_fraction=fraction,
        held_out=frozenset(held_out),
        skip=skip,
        pieces=workspace / "pieces",
    )


def tell(manifest: dict[str, Any], output: Path) -> None:
    """Print a summary of the prepared corpus."""
    for part, facts in manifest["files"].items():
        tokens = facts["tokens"]
        print(f"{part}: {counted(facts['documents'], 'document')}, {counted(tokens, 'token')}")
        if tokens < FEW_TOKENS:
            print(
                f"warning: with {counted(tokens, 'token')}, the {part} part is shorter than a "
                f"window of most recipes; "
                f"{few_tokens(part, tokens, manifest['options'])}"
            )
    if manifest.get("divided_document"):
        tokens = manifest["files"]["validation"]["tokens"] - len(manifest["document_start"])
        end = counted(tokens, "token")
        print(f"the source is one document; its end, {end}, is the validation part")
    if "validation" not in manifest["files"]:
        print(
            "validation: none; leave data.validation out of the recipe, and set "
            "training.evaluate_every = 0"
        )
    for kind, skipped in manifest["skipped"].items():
        if kind == BLANK:
            print(f"skipped {counted(skipped['rows'], 'blank line')}")
            continue
        print(f"skipped {counted(skipped['rows'], 'row')}, {kind}: first {skipped['first']}")
    if manifest["document_start"]:
        start = manifest["document_start"]
        print(f"each document begins with the tokens {start}, which the tokenizer adds")
    size, wanted = manifest["vocab_size"], manifest["options"].get("vocab_size", 0)
    print(f"written to {output}, vocabulary {size:,}")
    if size < wanted:  # training ends when every word is one token
        print(
            f"the text has too few different words for a tokenizer of {wanted:,} tokens; set "
            f"model.vocab_size = {size} in the recipe"
        )


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
            f"--step {options.step}: {options.recipe} has the steps 1 to {recipe.training.steps}; "
            f"use --step {max(1, min(options.step, recipe.training.steps))}"
        )
    from threefold.prepare_data.sample_lookup import ledger

    raise_at_interrupt()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback in `| head`
    run = options.run_dir or REPOSITORY / "runs" / recipe.name
    for line in ledger(recipe, run, options.step, text=options.text):
        print(line)


def verify(arguments: list[str]) -> None:
    """Compare a corpus with the SHA-256s of its manifest; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="prepare_data.py verify", description=verify.__doc__)
    parser.add_argument("corpus", type=Path, help="folder, relative to the repository's root")
    options = parser.parse_args(arguments)
    from threefold.prepare_data.corpus import find_damages

    raise_at_interrupt()
    corpus = repository_path(str(options.corpus))
    reject_damages(corpus, find_damages(corpus, len(os.sched_getaffinity(0))))
    print(f"{corpus} matches its manifest")


def reject_damages(corpus: Path, damages: Iterable[str]) -> None:
    """Print the damages of a corpus, and end the command with exit code 1 if there are any."""
    is_damaged = False
    for damage in damages:
        print(f"{corpus}: {damage}")
        is_damaged = True
    if is_damaged:
        sys.exit(f"prepare_data.py: {corpus} is damaged; delete it and prepare it again")


def tasks(arguments: list[str]) -> None:
    """Write a task for evaluation.tasks from a corpus, or from samples of another program."""
    from threefold.prepare_data.tasks import write_task

    raise_at_interrupt()
    write_task(arguments)


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
    add_source_options(parser)
    add_corpus_options(parser)
    options = parser.parse_args(arguments)
    if options.validation_fraction is None:
        options.validation_fraction = 0.0 if validation_option(options) else VALIDATION_FRACTION
    return options


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the text to read."""
    parser.add_argument(
        "--source", nargs="+", default=["stdlib"],
        help='"stdlib"; files, folders or patterns, relative to the current folder (.jsonl, '
        ".ndjson, .json, .parquet, .txt, .arrow or .csv; text formats also .gz, .bz2 or .zst); "
        "folders written by save_to_disk; datasets of the Hugging Face hub",
    )  # fmt: skip
    parser.add_argument("--config", help="configuration of the hub dataset")
    parser.add_argument("--split", default="train", help="split of the dataset (default: train)")
    parser.add_argument(
        "--validation-source", nargs="+", metavar="SOURCE",
        help="validation part of a corpus with an official split, named as for --source; "
        "--source is then the training part",
    )  # fmt: skip
    parser.add_argument(
        "--validation-split", metavar="SPLIT",
        help="split of the dataset that is the validation part, for example validation",
    )  # fmt: skip
    parser.add_argument(
        "--streaming", action="store_true", help="stream the dataset without storing it"
    )
    parser.add_argument(
        "--column", default="text", help="column that holds the text (default: text)"
    )
    parser.add_argument(
        "--text-is", choices=("line", "file"), default="line",
        help="unit that is a document in a .txt file (default: line)",
    )  # fmt: skip


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the corpus to write, and of the processes that write it."""
    parser.add_argument(
        "--output", default="data/stdlib",
        help="folder to write, relative to the repository's root (default: data/stdlib)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer",
        help="name on the hub, or a folder relative to the repository's root; without it, a "
        "tokenizer is trained",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=2048,
        help="vocabulary size of a trained tokenizer (default: 2048)",
    )  # fmt: skip
    parser.add_argument(
        "--validation-fraction", type=float,
        help="share of the documents held out for validation; of a single document, its last "
        f"tokens; 0: no validation part (default: {VALIDATION_FRACTION})",
    )  # fmt: skip
    parser.add_argument(
        "--skip", action="append", default=[], choices=PROBLEM_KINDS,
        help="skip and count rows that are empty, not UTF-8, not JSON or without text in the "
        "column, instead of stopping at the first one; repeatable (blank lines of text files "
        "are always skipped)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)),
        help="worker processes (default: one per core)",
    )  # fmt: skip
    parser.add_argument(
        "--shard", type=shard_of, metavar="I/N", help="shard of this machine, 0/N to N-1/N"
    )


if __name__ == "__main__":
    main()
