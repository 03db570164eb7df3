"""The command recipes/generate.py: text and conversations with a model, in the terminal."""

import argparse
import io
import sys
from collections.abc import Iterator

from models.errors import UserError
from threefold.runtime.command_line import count, file_path, number_type
from threefold.runtime.exits import REJECTED, one_interrupt
from threefold.runtime.output import escape_output

MAX_SEED = 2**32 - 1  # of numpy's generator, which transformers seeds too
LEFT_BY_CTRL_C = 130  # as shells report an interrupted program
PROMPT = "> "


def main(description: str | None = None) -> None:
    """Run the command; its options are checked before torch is imported, which takes seconds."""
    escape_output()
    options = parse_command_line(description)
    try:
        with one_interrupt():
            generate(options)
    except UserError as problem:
        print(f"generate.py: {problem}", file=sys.stderr)
        sys.exit(REJECTED)
    except KeyboardInterrupt:
        print()
        sys.exit(LEFT_BY_CTRL_C)


def generate(options: argparse.Namespace) -> None:
    """Load the model, and continue --prompt, or each line of standard input.

    Raises:
        UserError: the model or --prompt is rejected. For a rejected line, the message is printed
            and the next line is read.
    """
    from threefold.convert.text_generation import Sampling, generator_of

    sampling = Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    generator = generator_of(
        options.model, sampling, chat=options.chat, tokenizer=options.tokenizer
    )
    if options.prompt is not None:
        tokens = generator.tokens_of(options.prompt, "--prompt")
        generator.write(tokens, shows_prompt=not options.chat)
        return
    for prompt in prompts():
        try:
            generator.write(generator.tokens_of(prompt, "the prompt"), shows_prompt=False)
        except UserError as problem:
            print(f"generate.py: {problem}", file=sys.stderr)


def prompts() -> Iterator[str]:
    """Yield the lines of standard input that are not empty; on a terminal, ask with `PROMPT`."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a prompt that is not UTF-8 is rejected
    while True:
        try:
            line = input(PROMPT if is_terminal else "")
        except EOFError:  # Ctrl-D
            if is_terminal:
                print()
            return
        if line:
            yield line


temperature = number_type("temperature", lambda t: 0 <= t <= 100, "0 to 100, such as 0.7")
top_p = number_type("share", lambda p: 0 < p <= 1, "more than 0 and at most 1, such as 0.9")


def seed(text: str) -> int:
    """Parse the seed of the random choices."""
    if not text.isdecimal() or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(
            f"invalid seed {text}: expected 0 to {MAX_SEED}, such as 7"
        )
    return int(text)


def parse_command_line(description: str | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", type=file_path, help="run folder, checkpoint, or folder of an exported model"
    )
    parser.add_argument("--prompt", help="text to continue; default: read prompts")
    parser.add_argument(
        "--chat", action="store_true", help="answer prompts in the tokenizer's chat template"
    )
    parser.add_argument(
        "--tokenizer", type=file_path, metavar="FOLDER",
        help="folder of the tokenizer; default: that of the run or the exported model",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=count, default=200, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--temperature", type=temperature, default=0.7, metavar="T",
        help="0: always the most likely token; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=top_p, default=1.0, metavar="P",
        help="sample from the most likely tokens of this total probability; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="default: %(default)s")
    return parser.parse_args()
