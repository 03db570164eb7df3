"""The tokenizer of a corpus: an existing one, or one trained on its documents."""

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from models.errors import UserError, reason_of, why_no_folder
from threefold.config.sections import repository_path
from threefold.data.corpus import tokenizer_advice
from threefold.data.manifest import folder_hash
from threefold.prepare_data.formats import Format, NumberedPiece
from threefold.prepare_data.tokenization import is_held_out, new_folder, texts_of
from threefold.runtime.output import progress_lines

END_OF_TEXT = "<|endoftext|>"
SECONDS_TO_END_READING = 2  # after Ctrl-C
TRAINING_CHARACTERS = 2**29  # approximate number, taken evenly from all pieces


def copy_tokenizer(name: str, workspace: Path) -> Path:
    """Copy an existing tokenizer into the workspace, and return its folder.

    Raises:
        UserError: The tokenizer does not exist, or has no end-of-text token or no tokenizer.json.
    """
    path = repository_path(name)
    is_folder = path.is_dir()
    if (path / "tokenizer").is_dir() and not (path / "tokenizer.json").exists():
        raise UserError(f"--tokenizer {name} is a corpus; use its tokenizer, {name}/tokenizer")
    if path.is_file():
        raise UserError(
            f"--tokenizer {name} is a file; use its folder, {name.rpartition('/')[0] or '.'}"
        )
    if not is_folder and "/" in name and (name.count("/") > 1 or path.parent.is_dir()):
        raise UserError(
            f"--tokenizer {name} {why_no_folder(path)}; {tokenizer_advice(name)} (or give the name "
            f"of a tokenizer on the hub)"
        )
    tokenizer = load_tokenizer(path if is_folder else name, f"--tokenizer {name}")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--tokenizer {name} has no end-of-text token; use a tokenizer with one, such as gpt2"
        )
    with tempfile.TemporaryDirectory() as room:
        save_tokenizer(tokenizer, Path(room))
        if not (Path(room) / "tokenizer.json").is_file():
            raise UserError(
                f"--tokenizer {name} has no tokenizer.json, because it is implemented in Python; "
                f"use a fast tokenizer, such as gpt2"
            )
        folder = workspace / f"tokenizer-{folder_hash(Path(room))[:24]}"
        if not folder.is_dir():
            with new_folder(folder) as fresh:
                shutil.copytree(room, fresh, dirs_exist_ok=True)
    return folder


def load_tokenizer(source: Path | str, name: str) -> Any:
    """Load a tokenizer with transformers, without running code that comes with it.

    Args:
        source: a folder, or a name on the hub
        name: the option or key that names the tokenizer, with its value, for a message

    Raises:
        UserError: transformers cannot load the tokenizer, or only with code of its own.
    """
    try:
        # Without the argument, transformers asks on the terminal whether to run the code.
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers and the hub's client raise many classes
        raise UserError(
            f"{name} cannot be loaded: {reason_of(error).rstrip('.')}; use a folder written by "
            f"save_pretrained, or a name on the hub, of a tokenizer without code of its own"
        ) from None


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer, so that `load_tokenizer` can load it from the folder.

    Raises:
        OSError: a file cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises plain exceptions
        if not (code := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(folder / "tokenizer.json")) from None


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of embeddings that the ids of a tokenizer need."""
    return max(tokenizer.get_vocab().values()) + 1


def document_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that a tokenizer puts before every text, such as its BOS token.

    Raises:
        UserError: These ids cannot be distinguished from the ids of the text.
    """
    examples = ("a", "0", ".", *tokenizer.get_vocab())
    known = (text for text in examples if tokenizer(text, add_special_tokens=False)["input_ids"])
    example = next(known, "a")
    text = tokenizer(example, add_special_tokens=False)["input_ids"]
    whole = tokenizer(example)["input_ids"]
    for start in range(len(whole) - len(text) + 1):
        if whole[start : start + len(text)] == text:
            return whole[:start]
    raise UserError(
        f"{tokenizer.name_or_path}: {example!r} is tokenized as {text} without and {whole} with "
        f"special tokens, and the second does not contain the first; use a tokenizer that adds "
        f"special tokens only at the start and end"
    )


def train_tokenizer(
    formats: Sequence[Format],
    pieces: Sequence[NumberedPiece],
    workspace: Path,
    *,
    vocab_size: int,
    validation_fraction: float,
    skip: frozenset[str],
) -> Path:
    """Train a byte-level BPE on the training documents, and return its folder in the workspace.

    Raises:
        UserError: A row is not a document.
    """
    columns = [reader.column for reader in formats]
    decides = [asdict(piece) for _, piece in pieces], columns, vocab_size, validation_fraction
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:24]
    folder = workspace / f"tokenizer-{key}"
    if folder.is_dir():
        print("using the tokenizer that the interrupted preparation has trained", flush=True)
        return folder
    share = TRAINING_CHARACTERS // max(1, len(pieces))
    documents = (text for n, piece in pieces for text in texts_of(formats[n], piece, skip))
    first_two = list(islice(documents, 2))
    read, is_reading = 0, True

    def texts() -> Iterator[str]:
        nonlocal read, is_reading
        if len(first_two) == 1:  # the join divides a single document by tokens
            (text,) = first_two
            read = round(len(text) * (1 - validation_fraction))
            yield text[:read]
        else:
            for number, piece in pieces:
                enough = read + share
                for text in texts_of(formats[number], piece, skip):
                    if not is_held_out(text, validation_fraction):
                        yield text
                        read += len(text)
                    if read > enough:
                        break
        is_reading = False

    def describe() -> str:
        if is_reading:
            return f"{read:,} characters read for the tokenizer"
        return f"training the tokenizer on {read:,} characters"

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stdout.isatty(),
    )
    print(f"training a tokenizer of {vocab_size:,} tokens on the training documents", flush=True)
    with progress_lines(describe):
        _train(tokenizer, texts(), trainer)
    with new_folder(folder) as room:
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
        )
        save_tokenizer(fast, room)
    return folder


def _train(tokenizer: Tokenizer, texts: Iterator[str], trainer: trainers.BpeTrainer) -> None:
    """Train a tokenizer; Ctrl-C ends the reading of the texts, and does not wait for the training.

    The library reads them in threads of its own while the calling thread waits outside of Python,
    where it could not handle a signal. The main thread therefore waits here. The other thread is
    a daemon, because nothing can interrupt it once the texts are read.
    """
    is_interrupted = threading.Event()
    training = Future[None]()

    def until_interrupted() -> Iterator[str]:
        for text in texts:
            if is_interrupted.is_set():
                raise KeyboardInterrupt
            yield text

    def train() -> None:
        try:
            tokenizer.train_from_iterator(until_interrupted(), trainer)
            training.set_result(None)
        except BaseException as problem:  # raised by `result` below
            training.set_exception(problem)

    threading.Thread(target=train, daemon=True).start()
    try:
        training.result()
    except KeyboardInterrupt:
        is_interrupted.set()
        wait([training], SECONDS_TO_END_READING)
        raise
