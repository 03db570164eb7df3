"""Bytes of text per token, for losses in bits per byte."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import UserError, reason_of

SPACE = "\u2581"  # SentencePiece's sign for a space
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of one byte, with SentencePiece's byte fallback


def token_bytes(tokenizer: Path, vocab_size: int) -> np.ndarray | None:
    """Return the number of bytes of UTF-8 text of each token id: int64 [vocab_size].

    A token of a byte-level vocabulary has as many bytes as characters. A token of SentencePiece has
    the bytes of its text, in which U+2581 is a space. Special tokens, such as the one between
    documents, and ids without a token have 0 bytes. The sum over a document
    without special tokens is the length of its text after the tokenizer's normalisation; if
    SentencePiece puts a space before a text, that space counts.

    Args:
        tokenizer: folder with tokenizer.json
        vocab_size: number of ids

    Returns:
        None if the vocabulary is neither byte-level nor SentencePiece's (for example WordPiece,
        which loses spaces), so that its tokens do not determine the text.

    Raises:
        UserError: tokenizer.json is not valid.
    """
    file = tokenizer / "tokenizer.json"
    try:
        settings = json.loads(file.read_bytes())
        decoders = set(_decoders(settings.get("decoder")))
        vocabulary = _vocabulary(settings["model"]) if decoders else {}
        added = {int(each["id"]): each for each in settings.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file} is not a tokenizer of the tokenizers library ({reason_of(error)}); use a "
            f"folder written by save_pretrained"
        ) from None
    if "ByteLevel" in decoders:
        sizes = {number: len(token) for token, number in vocabulary.items()}
    elif decoders & {"Metaspace", "Replace"}:
        falls_back = "ByteFallback" in decoders
        sizes = {
            number: 1
            if falls_back and BYTE.fullmatch(token)
            else len(token.replace(SPACE, " ").encode(errors="surrogatepass"))
            for token, number in vocabulary.items()
        }
    else:
        return None
    sizes |= {
        number: 0 if token["special"] else len(token["content"].encode(errors="surrogatepass"))
        for number, token in added.items()
    }
    table = np.zeros(vocab_size, np.int64)
    for number, size in sizes.items():
        if number < vocab_size:
            table[number] = size
    return table


def _decoders(decoder: Any) -> list[str]:
    """Return the types of a decoder and of its parts; a `Replace` only if it makes spaces."""
    if decoder is None:
        return []
    found = [part for each in decoder.get("decoders", ()) for part in _decoders(each)]
    if decoder["type"] != "Replace" or decoder["pattern"] == {"String": SPACE}:
        found.append(decoder["type"])
    return found


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Return token -> id; Unigram lists [token, score] by id."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {token: number for number, (token, _) in enumerate(vocabulary)}
    return vocabulary
