"""The bytes that tokens stand for: their sum over a text is the length of the text."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from models.errors import UserError
from threefold.data.corpus import token_bytes

TEXTS = ["def f(x):\n    return 'ä€😀'  # ▁ is no space\n", "x = 1\n" * 5, "\x00\x7f ÿ"]
SPECIAL, ADDED = "<|endoftext|>", "naïve token"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentence_piece(kind: str) -> Tokenizer:
    """Return a tokenizer with the parts of Llama 2's (BPE) or of T5's (Unigram)."""
    pieces = ["▁", "x", "▁x", "=", "1", "return", "e", "f", "ä", "\n"]
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((p, -1.0) for p in pieces)], 0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
        return tokenizer
    tokens = [SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "x")], byte_fallback=True, unk_token=None))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def table_of(tokenizer: Tokenizer, folder: Path, vocab_size: int = 400) -> np.ndarray | None:
    tokenizer.save(str(folder / "tokenizer.json"))
    return token_bytes(folder, vocab_size)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte-level", "sentence piece"])
def test_the_bytes_of_a_text_are_those_of_its_tokens(kind: str, text: str, tmp_path: Path) -> None:
    tokenizer = byte_level() if kind == "byte-level" else sentence_piece("bpe")
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([AddedToken(ADDED, normalized=False)])
    table = table_of(tokenizer, tmp_path)
    assert table is not None and table.dtype == np.int64 and table.shape == (400,)
    whole = f"{text}{ADDED}{text}"
    if kind == "sentence piece":  # the sign for a space has no bytes of its own in SentencePiece
        whole = whole.replace("▁", "")
    ids = tokenizer.encode(whole + SPECIAL).ids
    assert ids[-1] == tokenizer.token_to_id(SPECIAL) and table[ids[-1]] == 0
    assert tokenizer.token_to_id(ADDED) in ids
    assert table[ids].sum() == len(whole.encode())
    assert table[tokenizer.get_vocab_size() :].sum() == 0


def test_pieces_of_unigram_are_counted_as_text(tmp_path: Path) -> None:
    tokenizer = sentence_piece("unigram")
    table = table_of(tokenizer, tmp_path)
    assert table is not None
    ids = tokenizer.encode("e x = 1ä\n").ids
    assert table[ids].sum() == len("e x = 1ä\n".encode())


def test_other_vocabularies_have_no_bytes(tmp_path: Path) -> None:
    word_piece = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    word_piece.decoder = decoders.WordPiece()
    assert table_of(word_piece, tmp_path) is None
    word_piece.decoder = decoders.Replace(Regex("x"), " ")  # another one than SentencePiece's
    assert table_of(word_piece, tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"made": "for a proof"}')
    assert token_bytes(tmp_path, 10) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"decoder": {"type": "ByteLevel"}}'])
def test_a_broken_tokenizer_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match="is not a tokenizer of the tokenizers library"):
        token_bytes(tmp_path, 10)


def test_only_ids_of_the_model_count(tmp_path: Path) -> None:
    table = table_of(byte_level(), tmp_path, vocab_size=5)
    assert table is not None and table.tolist() == [0, 1, 1, 1, 1]
    assert json.loads((tmp_path / "tokenizer.json").read_text())["decoder"]["type"] == "ByteLevel"
