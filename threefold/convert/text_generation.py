"""Text that transformers generates with a checkpoint or an exported model, shown token by token."""

import contextlib
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoModelForCausalLM, TextStreamer, set_seed
from transformers.utils.logging import disable_progress_bar

from models.errors import FULL_DISK_ERRORS, UserError, reason_of
from threefold.checkpoint.state import WEIGHTS, CheckpointReader
from threefold.convert.files import model_of, open_checkpoint
from threefold.convert.to_hugging_face import (
    TOKENIZER_FILES,
    check_vocabulary,
    export,
    find_tokenizer,
)
from threefold.prepare_data.tokenizer import load_tokenizer

FEW_TOKENS = 2  # a text that ends after so few looks like a failure, so its end is reported


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rules for choosing the next token.

    Attributes:
        max_tokens: limit of the tokens after a prompt
        temperature: 0 chooses the most likely token
        top_p: sample from the most likely tokens that have this probability together
        seed: of the random choices, in 32 bits
    """

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' `generate`.

        top-k is not among them: that of the model's generation_config.json applies, or 50.
        """
        if not self.temperature:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}


@dataclass
class TextGenerator:
    """A model of transformers and its tokenizer.

    Attributes:
        tokenizer_source: the folder that the user named for the tokenizer, for messages
        chats: the prompts are turns of one conversation, in the tokenizer's chat template
        messages: the conversation so far
    """

    tokenizer_source: Path
    model: Any
    tokenizer: Any
    sampling: Sampling
    chats: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    def tokens_of(self, prompt: str, name: str) -> Tensor:
        """Return the tokens before the text to generate, [1, tokens].

        Args:
            prompt: a text to continue, or the next turn of the conversation
            name: what the user calls the prompt, for a message

        Raises:
            UserError: the prompt is not UTF-8 or has no tokens, the model has no position for a
                further token, or the chat template rejects the conversation.
        """
        positions = self.model.config.max_position_embeddings
        if not self.chats:
            return tokens_of_text(prompt, self.tokenizer, positions, name=name)
        _check_encoding(prompt, name)
        turns = [*self.messages, {"role": "user", "content": prompt}]
        try:
            tokens = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        except TemplateError as error:
            raise UserError(
                f"the chat template of {self.tokenizer_source} rejects the conversation: "
                f"{reason_of(error)}; omit --chat to continue a text"
            ) from None
        what, remedy = name, "use a text"
        if self.messages:
            what, remedy = f"{name} with the conversation before it", "rerun with a text"
        _check_length(tokens, positions, what, remedy)
        self.messages = turns
        return tokens.long()

    def write(self, tokens: Tensor, *, shows_prompt: bool) -> None:
        """Print the text after some tokens while it is generated, and remember it in a chat."""
        device, length = self.model.device, tokens.shape[1]
        room = self.model.config.max_position_embeddings - length
        limit = min(self.sampling.max_tokens, room)
        written = self.model.generate(
            input_ids=tokens.to(device),
            attention_mask=torch.ones_like(tokens, device=device),
            max_new_tokens=limit,
            pad_token_id=self.tokenizer.eos_token_id,
            streamer=TextStreamer(
                self.tokenizer, skip_prompt=not shows_prompt, skip_special_tokens=True
            ),
            **self.sampling.arguments(),
        )
        count = written.shape[1] - length
        if not self.chats and count <= FEW_TOKENS < limit:
            print(f"the model ended the text after {count} of {limit} tokens", file=sys.stderr)
        if count == room < self.sampling.max_tokens:
            print(
                f"the text reached the {length + count} positions of the model after {count} of "
                f"{self.sampling.max_tokens} tokens",
                file=sys.stderr,
            )
        if self.chats:
            answer = self.tokenizer.decode(written[0, length:], skip_special_tokens=True)
            self.messages.append({"role": "assistant", "content": answer})


def tokens_of_text(text: str, tokenizer: Any, positions: int, *, name: str) -> Tensor:
    """Return the tokens of a text to continue, [1, tokens].

    Args:
        positions: number of positions of the model
        name: what the user calls the text, for a message

    Raises:
        UserError: the text is not UTF-8 or has no tokens, or the model has no position for a
            further token.
    """
    _check_encoding(text, name)
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    _check_length(tokens, positions, name, "use a text")
    return tokens.long()


def check_prompt(prompt: str, source: CheckpointReader, tokenizer: Path | None) -> None:
    """Check a prompt before a checkpoint is exported, which may take long.

    Raises:
        UserError: no tokenizer is found, or the prompt is empty, too long or not in UTF-8.
    """
    if tokenizer is None:
        raise UserError(
            "--prompt needs a tokenizer, and these weights have none; name one with --tokenizer"
        )
    loaded = load_tokenizer(tokenizer, f"--tokenizer {tokenizer}")
    tokens_of_text(prompt, loaded, model_of(source).sequence_length, name="--prompt")


def _check_encoding(text: str, name: str) -> None:
    if any("\udc80" <= letter <= "\udcff" for letter in text):
        raise UserError(f"{name} has bytes that are not UTF-8; use a text in UTF-8")


def _check_length(tokens: Tensor, positions: int, name: str, remedy: str) -> None:
    length = tokens.shape[1]
    if not 0 < length < positions:
        raise UserError(
            f"{name} has {length} tokens and the model has {positions} positions; {remedy} of 1 "
            f"to {positions - 1} tokens"
        )


def generator_of(
    path: Path, sampling: Sampling, *, chat: bool = False, tokenizer: Path | None = None
) -> TextGenerator:
    """Load an exported model, or export a checkpoint to a temporary folder and load that.

    The temporary folder is deleted before this function returns: the tensors are mapped files,
    whose content stays until they are freed.

    Args:
        path: a run folder, a checkpoint, or a folder that transformers can load
        chat: prompts are turns of a conversation
        tokenizer: folder of the tokenizer; None: that of the run or the export

    Raises:
        UserError: the model cannot be loaded, its tokenizer or (for `chat`) its chat template is
            missing or too large, or the temporary folder is too small.
    """
    tokenizer_source = tokenizer or path
    if (path / "config.json").is_file():
        loaded = _load_tokenizer(tokenizer_source, tokenizer_source, chat=chat), _load(path, path)
        return _generator(*loaded, tokenizer_source, sampling, chat=chat)
    source = open_checkpoint(path, (WEIGHTS,))
    tokenizer = find_tokenizer(source, tokenizer)
    if tokenizer is None:
        raise UserError(f"{path} has weights but no tokenizer; add --tokenizer FOLDER")
    try:
        with tempfile.TemporaryDirectory(prefix="threefold-generate-") as name:
            folder = Path(name)
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for the text
                export(source, folder, dtype="fp32", tokenizer=tokenizer)
            loaded = _load_tokenizer(folder, tokenizer_source, chat=chat), _load(folder, path)
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS:
            raise
        raise UserError(
            f"{tempfile.gettempdir()} has no room for an export of {path}; name a larger folder in "
            f"the variable TMPDIR"
        ) from None
    return _generator(*loaded, tokenizer_source, sampling, chat=chat)


def _load_tokenizer(folder: Path, source: Path, *, chat: bool) -> Any:
    """Load a tokenizer of transformers.

    source: the folder that the user named, for messages
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{source} has no file of a tokenizer, such as tokenizer.json; use --tokenizer FOLDER "
            f"with a folder that has one"
        )
    tokenizer = load_tokenizer(folder, f"the tokenizer in {source}")
    if chat and not tokenizer.chat_template:
        raise UserError(
            f"--chat needs a chat template, and the tokenizer of {source} has none "
            f"(chat_template in tokenizer_config.json, or chat_template.jinja); omit --chat to "
            f"continue a text"
        )
    return tokenizer


def _load(folder: Path, path: Path) -> Any:
    """Load a model of transformers from a folder, without running code from it.

    path: what the user named, for messages
    """
    disable_progress_bar()
    try:
        # Without the argument, transformers asks on the terminal whether to run the code.
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and safetensors raise many classes
        raise UserError(
            f"{path} cannot be loaded: {reason_of(error).rstrip('.')}; use a run folder such as "
            f"runs/tiny, or an output of convert.py to-hf"
        ) from None


def _generator(
    tokenizer: Any, model: Any, tokenizer_source: Path, sampling: Sampling, *, chat: bool
) -> TextGenerator:
    """Return the generator of a model and its tokenizer.

    Raises:
        UserError: the tokenizer has tokens that the model does not have.
    """
    check_vocabulary(tokenizer, model.config.get_text_config().vocab_size, tokenizer_source)
    set_seed(sampling.seed)
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return TextGenerator(tokenizer_source, model, tokenizer, sampling, chat)
