"""Tokens of a context and its continuation, split as lm-evaluation-harness splits them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from models.errors import UserError, reason_of


@dataclass(frozen=True)
class Request:
    """A continuation whose log-likelihood is computed.

    Attributes:
        tokens: context and continuation: int32 [n + 1]; the model reads the first n tokens
        predicted: number of tokens of the continuation, which are the last ones
        is_cut: True if the start of the context was cut off
    """

    tokens: np.ndarray
    predicted: int
    is_cut: bool = False

    @property
    def length(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.tokens) - 1


class TaskTokenizer:
    """Encodes contexts and continuations with the tokenizer of a recipe.

    Args:
        folder: folder of the tokenizer
        name: the recipe's key that names the tokenizer, with its value, for messages
        start: tokens that begin each document in training, such as BOS

    Raises:
        UserError: the tokenizer cannot be loaded.
    """

    def __init__(self, folder: Path, name: str, start: Sequence[int]):
        self.name, self.start = name, list(start)
        self.settings = _read_settings(folder / "tokenizer_config.json")
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises Exception itself
                raise
            raise UserError(
                f"{name} cannot encode the tasks of evaluation.tasks ({reason_of(error)}); use a "
                f"tokenizer that prepare_data.py has written"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = bool(self.settings.get("split_special_tokens"))

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of each (context, continuation).

        As in `TemplateLM._encode_pair` of lm-evaluation-harness 0.4.13 (lm_eval/api/model.py),
        spaces at the end of the context belong to the continuation. If the context alone has n
        tokens, the continuation's tokens are those of the whole text without the first n. In place
        of an empty context, the model reads the BOS token, or the end-of-text token if there is no
        BOS (`TemplateLM.loglikelihood`).

        Raises:
            UserError: a context is empty, and the tokenizer has neither of the two tokens.
        """
        contexts = [context.rstrip() for context, _ in pairs]
        wholes = [context + continuation for context, continuation in pairs]
        distinct = list(dict.fromkeys(contexts))  # choices share their context
        encoded = dict(zip(distinct, self._ids(distinct), strict=True))
        found = []
        for context, whole in zip(contexts, self._ids(wholes), strict=True):
            before = encoded[context]
            if before or self.start:
                found.append((self.start + before, whole[len(before) :]))
            elif whole and whole[0] == self._prefix:
                found.append((whole[:1], whole[1:]))
            else:
                found.append(([self._prefix], whole))
        return found

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @property
    def _prefix(self) -> int:
        """The token that the model reads in place of an empty context."""
        for key in ("bos_token", "eos_token"):
            token = self.settings.get(key)
            content = token.get("content") if isinstance(token, dict) else token
            number = self.tokenizer.token_to_id(content) if content else None
            if number is not None:
                return number
        raise UserError(
            f"{self.name} has neither a BOS nor an end-of-text token, one of which must precede "
            f"the choices of an item with an empty prompt; give each item a prompt"
        )


def _read_settings(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json; empty if there is none.

    Raises:
        UserError: the file is not a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} is damaged ({reason_of(error)}); write the tokenizer again"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(f"{file} is damaged (not a JSON object); write the tokenizer again")
    return settings
