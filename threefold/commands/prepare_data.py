"""The command recipes/prepare_data.py: corpora, evaluation tasks and views of them."""

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.config import MAX_SIZE
from models.errors import UserError, a_few, counted, suggestion
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.sections import output_path, repository_path
from threefold.data.manifest import few_tokens, lost_manifest, read_manifest, tokenizer_hash
from threefold.prepare_data.documents import BLANK, PROBLEM_KINDS
from threefold.prepare_data.workspace import clear_workspace, full_disk_explained, lock_workspace
from threefold.run_folder.folder import run_folder_of
from threefold.run_folder.json_lines import flush
from threefold.runtime.command_line import add_overrides, file_path, filled
from threefold.runtime.exits import REJECTED, raise_at_interrupt
from threefold.runtime.output import escape_output

if TYPE_CHECKING:
    from threefold.prepare_data.formats import Format, NumberedPiece
    from threefold.prepare_data.tokenization import Tokenization

VALIDATION_FRACTION = 0.1
VOCAB_SIZE = 2048
FEW_TOKENS = 2049  # of a part; a window of model.sequence_length = 2048 needs as many


def main(description: str | None = None) -> None:
    """Run the command."""
    escape_output()
    commands = {"show": show, "verify": verify, "tasks": tasks}
    arguments = sys.argv[1:]
    command = commands.get(arguments[0] if arguments else "")
    try:
        if command is None and arguments and not arguments[0].startswith("-"):
            raise UserError(
                f"unknown command {arguments[0]}; {suggestion(arguments[0], list(commands))} "
                f"Without a command, options such as --source prepare a corpus"
            )
        if command is None:
            prepare(arguments, description)
        else:
            command(arguments[1:])
    except UserError as problem:
        notes = getattr(problem, "__notes__", [])
        print("; ".join([f"prepare_data.py: {problem}", *notes]), file=sys.stderr)
        sys.exit(REJECTED)
    except OSError as problem:
        reason = f"cannot be read or written ({problem.strerror or problem})"
        print(f"prepare_data.py: {problem.filename or 'a file'} {reason}", file=sys.stderr)
        sys.exit(REJECTED)
    except KeyboardInterrupt as interruption:
        nothing = "nothing has changed; rerun the same command to start again"
        kept = getattr(interruption, "__notes__", [nothing] if command is None else [])
        print("; ".join(["prepare_data.py: interrupted", *kept]), file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def prepare(arguments: list[str], description: str | None = None) -> None:
    """Write token files, tokenizer and manifest; the output folder appears when it is complete."""
    options = parse_command_line(arguments, description)
    output = output_path(options.output)
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
    where = a_few(options.source)
    if options.validation_source:
        where += f", and its validation part from {a_few(options.validation_source)}"
    print(f"preparing {output} from {where}", flush=True)

    # These imports take seconds, and the worker processes do not need most of them.
    import threefold.prepare_data.tokenizer  # noqa: F401 (for `plan`)
    from threefold.prepare_data.corpus import join
    from threefold.prepare_data.formats import cut
    from threefold.prepare_data.source import (
        SourceOptions,
        check_unused_options,
        open_source,
        open_validation,
    )
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
    check_unused_options(formats, reading)
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
        lock_workspace(workspace, shared=options.shard is not None) as earlier,
    ):
        if output.exists() and any(output.iterdir()):
            check_same_options(options, output)
            raise UserError(
                f"another process has just prepared {output} with the same options; it is complete"
            )
        tokenization = plan(formats, pieces, options, workspace, held_out=held_out)
        is_shard = options.shard is not None
        earlier.outdated = tokenization.tell_outdated(pieces, is_shard=is_shard)
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
    from threefold.prepare_data.tokenization import Tokenization
    from threefold.prepare_data.tokenizer import (
        copy_tokenizer,
        document_start,
        load_tokenizer,
        train_tokenizer,
        vocabulary_size,
    )

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
    tokenizer = load_tokenizer(folder, f"--tokenizer {options.tokenizer or folder}")
    return Tokenization(
        formats=formats,
        tokenizer=folder / "tokenizer.json",
        tokenizer_sha256=tokenizer_hash(folder),
        vocab_size=vocabulary_size(tokenizer),
        start=tuple(document_start(tokenizer)),
        end=tokenizer.eos_token_id,
        split_special_tokens=not options.parse_special_tokens,
        validation_fraction=fraction,
        skip=skip,
        folder=workspace / "pieces",
        held_out=frozenset(held_out),
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
            print(
                f"skipped {counted(skipped['rows'], 'blank line')}; each line of a text file is a "
                f"document, unless --text-is file is given"
            )
            continue
        print(f"skipped {counted(skipped['rows'], 'row')}, {kind}: first {skipped['first']}")
    if manifest["document_start"]:
        start = manifest["document_start"]
        print(f"each document begins with the tokens {start}, which the tokenizer adds")
    if ends := manifest.get("ends_in_text"):
        print(
            f"warning: the end-of-text token occurs {counted(ends, 'time')} inside documents, and "
            f"training treats it as the end of a document"
        )
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
    parser.add_argument("recipe", type=file_path, help="TOML file, as for pretrain.py")
    parser.add_argument("--step", type=int, required=True, help="number of the step, from 1")
    parser.add_argument(
        "--text", action="store_true", help="also print the beginning of each window's text"
    )
    parser.add_argument(
        "--run-dir",
        type=file_path,
        help="run folder (default: that of RECIPE if it is the recipe.toml of a run; otherwise "
        "runs/NAME)",
    )
    add_overrides(parser)
    options = parser.parse_args(arguments)
    recipe = load_recipe(options.recipe, options.set)
    if not 1 <= options.step <= recipe.training.steps:
        raise UserError(
            f"--step {options.step}: {options.recipe} has the steps 1 to {recipe.training.steps}; "
            f"use --step {max(1, min(options.step, recipe.training.steps))}"
        )
    from threefold.prepare_data.sample_lookup import sample_lines

    raise_at_interrupt()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback in `| head`
    run = options.run_dir or run_folder_of(options.recipe) or REPOSITORY / "runs" / recipe.name
    for line in sample_lines(recipe, run, options.step, text=options.text):
        print(line)


def verify(arguments: list[str]) -> None:
    """Compare a corpus with the SHA-256s of its manifest; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="prepare_data.py verify", description=verify.__doc__)
    parser.add_argument("corpus", type=file_path, help="folder, relative to the repository's root")
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
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is not a shard; use 0/16, 1/16, ... 15/16")
    return int(match[1]), int(match[2])


def parse_command_line(arguments: list[str], description: str | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source_options(parser)
    add_corpus_options(parser)
    options = parser.parse_args(arguments)
    if options.vocab_size is None:
        options.vocab_size = VOCAB_SIZE
    elif options.tokenizer:
        raise UserError(
            f"--vocab-size {options.vocab_size} has no effect with --tokenizer "
            f"{options.tokenizer}; omit it"
        )
    if options.validation_fraction is None:
        options.validation_fraction = 0.0 if validation_option(options) else VALIDATION_FRACTION
    return options


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the text to read."""
    parser.add_argument(
        "--source", type=filled, nargs="+", default=["stdlib"],
        help='"stdlib"; files, folders or patterns, relative to the current folder (.jsonl, '
        ".ndjson, .json, .parquet, .txt, .tokens, .raw, .arrow or .csv; text formats also .gz, "
        ".bz2 or .zst); folders written by save_to_disk; datasets of the Hugging Face hub",
    )  # fmt: skip
    parser.add_argument("--config", type=filled, help="configuration of the hub dataset")
    parser.add_argument(
        "--split", type=filled, default="train", help="split of the dataset (default: train)"
    )
    parser.add_argument(
        "--validation-source", type=filled, nargs="+", metavar="SOURCE",
        help="validation part of a corpus with an official split, named as for --source; "
        "--source is then the training part",
    )  # fmt: skip
    parser.add_argument(
        "--validation-split", type=filled, metavar="SPLIT",
        help="split of the dataset that is the validation part, for example validation",
    )  # fmt: skip
    parser.add_argument(
        "--streaming", action="store_true", help="stream the dataset without storing it"
    )
    parser.add_argument(
        "--column", type=filled, default="text", help="column that holds the text (default: text)"
    )
    parser.add_argument(
        "--text-is", choices=("line", "file"), default="line",
        help="unit that is a document in a text file (default: line)",
    )  # fmt: skip


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the corpus to write, and of the processes that write it."""
    parser.add_argument(
        "--output", type=filled, default="data/stdlib",
        help="folder to write, relative to the repository's root (default: data/stdlib)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer",
        type=filled,
        help="name on the hub, or a folder relative to the repository's root; without it, a "
        "tokenizer is trained",
    )
    parser.add_argument(
        "--parse-special-tokens", action="store_true",
        help="turn text such as <|im_start|> into the special token with that name; by default, it "
        "is tokenized like any other text",
    )  # fmt: skip
    parser.add_argument(
        "--vocab-size", type=int,
        help=f"vocabulary size of a trained tokenizer (default: {VOCAB_SIZE})",
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


# Checks of the options of prepare_data.py, alone and against those of an existing corpus.

MIN_VOCAB_SIZE = 257  # the 256 bytes and the end-of-text token
CONTENT_OPTIONS = ("source", "config", "split", "column", "text_is", "tokenizer", "vocab_size",
                   "validation_fraction")  # fmt: skip
VALIDATION_OPTIONS = ("validation_source", "validation_split")
OPTIONAL = (*VALIDATION_OPTIONS, "parse_special_tokens")  # recorded if they are given


def content_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that determine the content of a corpus."""
    chosen = {key: vars(options)[key] for key in CONTENT_OPTIONS}
    if options.tokenizer:
        del chosen["vocab_size"]
    return chosen | {key: vars(options)[key] for key in OPTIONAL if vars(options)[key]}


def check_same_options(options: argparse.Namespace, output: Path) -> None:
    """Compare the options of an existing corpus with those of this command.

    Raises:
        UserError: An option differs, or the manifest of the corpus is damaged.
    """
    advice = f"use another --output, or delete {output} to prepare it again"
    made = read_manifest(output, advice=advice).get("options", {})
    wanted = content_options(options)
    different = [
        key
        for key in dict.fromkeys((*wanted, *OPTIONAL))
        if (key in made or key in OPTIONAL) and made.get(key) != wanted.get(key)
    ]
    if not set(VALIDATION_OPTIONS).isdisjoint(different):  # they change the fraction's default
        different = [key for key in different if key != "validation_fraction"]
    if different:
        before, here = (
            " and ".join(_typed(key, chosen.get(key)) for key in different)
            for chosen in (made, wanted)
        )
        raise UserError(f"{output} already exists, made with {before}; here {here}; {advice}")


def _typed(key: str, value: Any) -> str:
    """Return an option as it is typed on a command line, or say that it is not used."""
    option = f"--{key.replace('_', '-')}"
    if value is None:
        return f"no {option}"
    if value is True:
        return option
    return f"{option} {shlex.join(map(str, value if isinstance(value, list) else [value]))}"


def check_options(options: argparse.Namespace, output: Path, workspace: Path) -> None:
    """Check the options before any work is done.

    Raises:
        UserError: An option has an invalid value.
    """
    if lost := lost_manifest(output):
        raise UserError(lost)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {options.output} is a file; use a folder, such as data/books")
    if output.exists() and any(output.iterdir()):
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
    if not 0 <= options.validation_fraction < 1:
        raise UserError(
            f"--validation-fraction {options.validation_fraction} is not a share below 1; use 0.1, "
            f"or 0 for a corpus without a validation part"
        )
    _check_validation(options)
    if options.processes < 1:
        raise UserError(f"--processes {options.processes} is too few; use 1")
    if options.shard is not None and not options.tokenizer:
        raise UserError(
            "--shard needs --tokenizer, because each shard would train a tokenizer of its own; "
            "prepare a part of the text first and use its tokenizer: "
            "--tokenizer data/part/tokenizer"
        )


def validation_option(options: argparse.Namespace) -> str:
    """Return the option that names the documents of the validation part, with its value.

    Returns:
        "" if the validation part is a share of the documents
    """
    if options.validation_source:
        return f"--validation-source {' '.join(options.validation_source)}"
    return f"--validation-split {options.validation_split}" if options.validation_split else ""


def _check_validation(options: argparse.Namespace) -> None:
    """Raise a UserError if the options of the validation part contradict each other."""
    if (own := validation_option(options)) and options.validation_fraction:
        raise UserError(
            f"--validation-fraction {options.validation_fraction} has no effect with {own}; omit it"
        )
    if options.validation_split == options.split and not options.validation_source:
        raise UserError(
            f"--validation-split {options.validation_split} is also --split, the training part; "
            f"use another split of the dataset, such as validation"
        )
