"""Text -> token files and the tokenizer that made them.

Without arguments: the sources of this interpreter's standard library, which recipes/tiny.toml
trains on.

    python recipes/prepare_data.py
    python recipes/prepare_data.py --source books.jsonl --output data/books --vocab-size 32000
    python recipes/prepare_data.py --source wikitext --config wikitext-103-raw-v1 \\
        --tokenizer gpt2 --output data/wikitext

With a recipe, what one of its steps reads: documents, and which of their tokens.

    python recipes/prepare_data.py show recipes/tiny.toml --step 17 --text
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not recipes/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator

import numpy as np
from datasets import Dataset, disable_progress_bars, load_dataset
from datasets.exceptions import DatasetGenerationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.preparing.ledger import ledger
from recipes.training.data import tokenizer_hash
from recipes.training.recipe import REPOSITORY, load_recipe, repository_path
from recipes.training.token_file import write_token_file

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte and END_OF_TEXT
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["show"]:
        show(sys.argv[2:])
        return
    options = parse_command_line()
    output = repository_path(options.output)
    if (output / "manifest.json").exists():
        print(f"{output} is already there; delete it to prepare it again")
        return
    workspace = output.with_name(output.name + ".incomplete")
    try:
        check_options(options, output)
        shutil.rmtree(workspace, ignore_errors=True)
        workspace.mkdir(parents=True)
        prepare(options, output, workspace)
    except (ValueError, OSError) as problem:
        sys.exit(f"prepare_data.py: {problem}")
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


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
    try:
        recipe = load_recipe(options.recipe, options.set)
        if not 1 <= options.step <= recipe.training.steps:
            raise ValueError(
                f"--step {options.step} is not in 1 .. {recipe.training.steps}, the steps of "
                f"{options.recipe}; use --step 1"
            )
        run = options.run_dir or REPOSITORY / "runs" / recipe.name
        for line in ledger(recipe, run, options.step, text=options.text):
            print(line)
    except ValueError as problem:
        sys.exit(f"prepare_data.py: {problem}")


def check_options(options: argparse.Namespace, output: Path) -> None:
    """Refuse what cannot work before any work is done.

    Raises:
        ValueError: naming the option, its value and one that works.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {options.output} has other things in it; use an empty folder")
    if options.vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"--vocab-size {options.vocab_size} has no room for the 256 bytes and {END_OF_TEXT}; "
            f"use {SMALLEST_VOCABULARY} or more"
        )
    if not 0 < options.validation_fraction < 1:
        raise ValueError(
            f"--validation-fraction {options.validation_fraction} is no part of the documents; "
            f"use 0.1"
        )
    if options.processes < 1:
        raise ValueError(f"--processes {options.processes} is too few; use 1")
    local = Path(options.source)
    if local.suffix and local.suffix not in LOADERS and local.parent.is_dir():
        raise ValueError(
            f"--source {options.source}: no loader for {local.suffix}; use one of "
            f"{', '.join(LOADERS)}"
        )


def prepare(options: argparse.Namespace, output: Path, workspace: Path) -> None:
    """Write token files, tokenizer and manifest into a folder that appears when all is there."""
    corpus = load_corpus(options)
    print(f"{len(corpus):,} documents from {options.source}")
    training, validation = split(corpus, options.column, options.validation_fraction)
    tokenizer = make_tokenizer(options, training)
    tokenizer.save_pretrained(workspace / "tokenizer")
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    files = {}
    for name, part in (("train", training), ("validation", validation)):
        documents = tokenize(part, options, tokenizer)
        tokens = write_token_file(workspace / name, documents, vocab_size=vocab_size)
        if tokens == 0:
            raise ValueError(f"the {name} part has no tokens; use more text")
        print(f"{name}: {len(part):,} documents, {tokens:,} tokens")
        files[name] = {"documents": len(part), "tokens": tokens} | {
            f"{suffix}_sha256": file_hash(workspace / f"{name}.{suffix}")
            for suffix in ("bin", "idx")
        }
    manifest = {
        "source": options.source,
        "tokenizer": f"{options.output}/tokenizer",
        "tokenizer_sha256": tokenizer_hash(workspace / "tokenizer"),
        "vocab_size": vocab_size,
        "files": files,
    }
    (workspace / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    os.rename(workspace, output)
    print(f"written to {output}, vocabulary {vocab_size:,}")


def load_corpus(options: argparse.Namespace) -> Dataset:
    """Any source as a dataset with a text column."""
    disable_progress_bars()
    source = Path(options.source)
    if options.source == "stdlib":
        return Dataset.from_dict({options.column: list(standard_library())})
    if source.suffix in LOADERS:
        if not source.is_file():
            raise FileNotFoundError(f"--source {source}: no such file")
        loader = LOADERS[source.suffix]
        try:
            corpus = load_dataset(loader, data_files=str(source), split="train")
        except (DatasetGenerationError, StopIteration) as error:
            reason = error.__cause__ or "it is empty"
            raise ValueError(f"--source {source} cannot be read: {reason}") from None
    else:
        corpus = load_dataset(options.source, options.config, split=options.split)
    if options.column not in corpus.column_names:
        raise ValueError(
            f"--column {options.column}: {options.source} has the columns "
            f"{', '.join(corpus.column_names)}"
        )
    for row, text in enumerate(corpus[options.column]):
        if not isinstance(text, str):
            raise ValueError(
                f"{options.source}, row {row}: {options.column} = {text!r} is no text; remove the "
                f"row, or use --column with a column of text"
            )
    return corpus


def standard_library() -> Iterator[str]:
    """The interpreter's own Python sources, tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for file in sorted(root.rglob("*.py")):
        if not left_out & set(file.relative_to(root).parts):
            text = file.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield text


def split(corpus: Dataset, column: str, fraction: float) -> tuple[Dataset, Dataset]:
    """Training and validation documents; by content, so that equal ones stay together."""

    def held_out(text: str) -> bool:
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
        return int.from_bytes(digest) < fraction * 2**64

    chosen = [held_out(text) for text in corpus[column]]
    parts = [[i for i, held in enumerate(chosen) if held is which] for which in (False, True)]
    if not all(parts):
        raise ValueError(
            f"--validation-fraction {fraction} of {len(corpus)} documents leaves one part empty; "
            f"use more documents, and a fraction that leaves some for both parts"
        )
    return corpus.select(parts[0]), corpus.select(parts[1])


def make_tokenizer(options: argparse.Namespace, training: Dataset) -> PreTrainedTokenizerBase:
    """The named tokenizer, or a byte-level BPE trained on the training documents."""
    if options.tokenizer:
        return AutoTokenizer.from_pretrained(options.tokenizer)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training[options.column], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )


def tokenize(
    corpus: Dataset, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> Iterator[np.ndarray]:
    """The documents' token ids, each ended by the end-of-text token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"--tokenizer {options.tokenizer} has no end-of-text token")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(batch[options.column], add_special_tokens=False, verbose=False)
        return {"tokens": [[*ids, end] for ids in encoded["input_ids"]]}

    encoded = corpus.map(
        encode, batched=True, batch_size=64, remove_columns=corpus.column_names,
        num_proc=options.processes if options.processes > 1 else None,
    )  # fmt: skip
    for document in encoded.with_format("numpy"):
        yield document["tokens"]


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def parse_command_line() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        default="stdlib",
        help='"stdlib", a .jsonl, .parquet or .txt file, or a dataset of the Hugging Face hub',
    )
    parser.add_argument("--config", help="the hub dataset's configuration")
    parser.add_argument("--split", default="train", help="the hub dataset's split")
    parser.add_argument("--column", default="text", help="the column that holds the text")
    parser.add_argument(
        "--output", default="data/stdlib", help="folder to write, from the repository's root"
    )
    parser.add_argument("--tokenizer", help="a tokenizer that transformers loads; none: train one")
    parser.add_argument("--vocab-size", type=int, default=2048, help="of the tokenizer to train")
    parser.add_argument("--validation-fraction", type=float, default=0.1)
    parser.add_argument("--processes", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
