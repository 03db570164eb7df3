"""The command recipes/convert.py: checkpoints to other formats and layouts, foreign recipes."""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from models.errors import UserError, a_few
from threefold.runtime.command_line import add_overrides, count, file_path
from threefold.runtime.exits import REJECTED, exit_at_signals, raise_at_interrupt
from threefold.runtime.output import escape_output, progress_lines

if TYPE_CHECKING:
    from threefold.convert.files import OutputFiles

NEW_TOKENS, TEMPERATURE = 60, 0.7  # of the text generated after --prompt


def main(description: str | None = None) -> None:
    """Run the command; its options are checked before torch is imported, which takes seconds."""
    escape_output()
    options = parse_command_line(description)
    try:
        options.command(options)
    except UserError as problem:
        print(f"convert.py: {problem}", file=sys.stderr)
        sys.exit(REJECTED)


def to_hf(options: argparse.Namespace) -> None:
    """Convert a checkpoint to a folder that transformers can load."""
    from threefold.checkpoint.state import AVERAGE, WEIGHTS
    from threefold.convert.files import open_checkpoint
    from threefold.convert.to_hugging_face import EXPORTED, export, find_tokenizer

    source = open_checkpoint(options.checkpoint, (AVERAGE if options.averaged else WEIGHTS,))
    tokenizer = find_tokenizer(source, options.tokenizer)
    if options.prompt is not None:
        # These imports take seconds, and most conversions do not need them.
        from threefold.convert.text_generation import Sampling, check_prompt, generator_of

        check_prompt(options.prompt, source, tokenizer)
    with output(options, source.path, EXPORTED) as folder:
        export(source, folder, dtype=options.dtype, tokenizer=tokenizer, averaged=options.averaged)
    exported = f"{'the averaged weights of ' * options.averaged}{source.path}"
    print(
        f"exported {exported} to {options.output}; load it with "
        f"AutoModelForCausalLM.from_pretrained"
    )
    if options.prompt is not None:
        sampling = Sampling(max_tokens=NEW_TOKENS, temperature=TEMPERATURE)
        generator = generator_of(options.output, sampling)
        tokens = generator.tokens_of(options.prompt, "--prompt")
        print(f"\ntext generated after {options.prompt!r}:\n")
        generator.write(tokens, shows_prompt=True)


def from_hf(options: argparse.Namespace) -> None:
    """Convert a folder of transformers to a checkpoint from which a run can start."""
    from threefold.convert.files import IMPORTED
    from threefold.convert.from_hugging_face import import_model, read_config
    from threefold.convert.translation import without_defaults

    with output(options, options.folder, IMPORTED) as folder:
        model = import_model(options.folder, folder)
    if read_config(options.folder)[0].tie_embeddings and not model.tie_embeddings:
        print(
            f"{options.folder}: config.json has tie_word_embeddings = true, and lm_head.weight "
            f"differs from the embedding; the head is kept, with model.tie_embeddings = false"
        )
    print(
        f"imported {options.folder} into {options.output}; a recipe that starts from these weights "
        f"needs:\n"
    )
    start = {"initial_weights": str(options.output.resolve())}
    print(tomli_w.dumps({"model": without_defaults(model), "training": start}))


def import_command(options: argparse.Namespace) -> None:
    """Convert a checkpoint of another program to one from which its run continues."""
    from threefold.convert.foreign_checkpoint import open_foreign
    from threefold.convert.from_megatron import (
        FOREIGN,
        foreign_settings,
        import_checkpoint,
        recipe_of,
    )
    from threefold.convert.translation import ASSUMED, UNKNOWN

    target = options.recipe
    check_recipe_name("--recipe", target)
    if target is not None and target.exists():
        raise UserError(f"--recipe {target}: the file exists; use another name")
    checkpoint = open_foreign(options.checkpoint, weights_only=options.weights_only)
    foreign = foreign_settings(checkpoint, options.config)
    translated = recipe_of(
        checkpoint, foreign, target or options.output, ranks=options.ranks, overrides=options.set
    )
    with output(options, options.checkpoint, FOREIGN) as folder:
        diverged = import_checkpoint(checkpoint, translated, folder)
    if not checkpoint.resumes:
        start = {"initial_weights": str(options.output.resolve())}
        translated.table["training"] = {**translated.table["training"], **start}
    kind = "weights and moments" if checkpoint.resumes else "weights without moments"
    reason = "" if checkpoint.resumes else f" ({checkpoint.note})"
    print(
        f"imported {checkpoint.path}, step {checkpoint.step}, into {options.output}: {kind}{reason}"
    )
    if diverged:
        print(f"the tensor ranks had different values of {a_few(sorted(diverged))}; took the mean")
    for line in translated.lines:
        if line.status == ASSUMED or (line.changes_loss and line.status != UNKNOWN):
            print(f"  {'LOSS  ' if line.changes_loss else '      '}{line}")
    if target is not None:
        written = translated.write(target, [checkpoint.path])
        print(f"wrote {', '.join(map(str, written))}; set [data] in {target}, then:")
    else:
        print(f"\n{translated.text([checkpoint.path])}\nset [data] in this recipe, then:")
    resume = f" --resume {options.output}" if checkpoint.resumes else ""
    ranks = translated.recipe.layout.ranks_per_data_rank
    command = f"deepspeed --num_gpus {ranks} recipes/pretrain.py"
    print(f"  {command} {target or 'RECIPE.toml'}{resume}")


def check_recipe_name(key: str, target: Path | None) -> None:
    """Check the name of a recipe to write, if there is one."""
    if target is None:
        return
    if target.suffix != ".toml":
        raise UserError(f"{key} {target}: a recipe ends in .toml; use {target.stem}.toml")
    if not (folder := target.absolute().parent).is_dir():
        raise UserError(f"{key} {target}: the folder {folder} does not exist; create it")


def average_command(options: argparse.Namespace) -> None:
    """Average the weights of several checkpoints."""
    from threefold.convert.files import AVERAGED
    from threefold.convert.reshape import average, sources_of

    sources = sources_of(options.sources, options.last)
    with output(options, [source.path for source in sources], AVERAGED) as folder:
        average(sources, folder)
    print(
        f"averaged {len(sources)} checkpoints, steps "
        f"{', '.join(str(source.manifest.step) for source in sources)}, into {options.output}; "
        f"export it with to-hf, or start a run from it with training.initial_weights"
    )


def reshape_command(options: argparse.Namespace) -> None:
    """Convert a checkpoint to another layout."""
    from threefold.convert.files import RESHAPED, open_checkpoint
    from threefold.convert.reshape import new_recipe, reshape

    source = open_checkpoint(options.checkpoint)
    recipe, dims = new_recipe(source, options.set, ranks=options.ranks)
    with output(options, source.path, RESHAPED) as folder:
        reshape(source, folder, recipe=recipe, dims=dims)
    print(
        f"converted {source.path} to {options.output}: "
        f"{dims}; resume it with "
        f"--resume {options.output}"
    )


def recipe_command(options: argparse.Namespace) -> None:
    """Translate the configuration of another program into a recipe."""
    # The YAML reader and the tables of all programs are needed here only.
    from threefold.convert.foreign_files import read_foreign
    from threefold.convert.foreign_programs import PROGRAMS
    from threefold.convert.translation import translate

    target = options.output
    check_recipe_name("--output", target)
    foreign = read_foreign(options.files)
    program = PROGRAMS[foreign.program]
    translated = translate(
        foreign,
        program,
        name=(target or options.files[0]).stem,
        ranks=options.ranks,
        overrides=options.set,
        folder=None if target is None else target.parent,
    )
    if target is not None:
        written = translated.write(target, options.files)
    print(f"{', '.join(map(str, options.files))}: a configuration of {program.name}")
    for line in translated.lines:
        print(f"  {'LOSS  ' if line.changes_loss else '      '}{line}")
    if count := len(translated.warnings):
        lines = "The line" if count == 1 else f"The {count} lines"
        print(f"{lines} marked LOSS: the source trains something else than this recipe.")
    if target is not None:
        ranks = options.ranks or foreign.ranks or translated.recipe.layout.ranks_per_data_rank
        gpus = max(count for count in range(1, 9) if ranks % count == 0)
        print(
            f"wrote {', '.join(map(str, written))}; next, with the name of your GPU: python "
            f"recipes/plan.py {target} --gpu H100 --nodes {ranks // gpus} --gpus-per-node {gpus}"
        )
        return
    print(f"\n{translated.text(options.files)}", end="")
    if translated.deepspeed is not None:
        print(f"\n# DeepSpeed's JSON:\n{json.dumps(translated.deepspeed, indent=2)}")


@contextmanager
def output(
    options: argparse.Namespace, reading: Path | Sequence[Path], files: "OutputFiles"
) -> Iterator[Path]:
    """Yield the folder to write, which gets its name when it is complete."""
    from threefold.convert.files import output_folder

    raise_at_interrupt()
    exit_at_signals(signal.SIGTERM, signal.SIGHUP)
    with (
        output_folder(
            options.output, reading=reading, files=files, overwrite=options.overwrite
        ) as folder,
        progress_lines(lambda: f"writing {options.output}"),
    ):
        yield folder


def parse_command_line(description: str | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(
        required=True, metavar="to-hf | from-hf | import | average | reshape | recipe"
    )
    export_parser = commands.add_parser("to-hf", help="checkpoint -> transformers")
    export_parser.add_argument("checkpoint", type=file_path, help="a checkpoint or a run folder")
    export_parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32"
    )
    export_parser.add_argument("--tokenizer", type=file_path, help="default: the recipe's")
    export_parser.add_argument("--prompt", help="print a continuation of this text")
    export_parser.add_argument(
        "--averaged", action="store_true", help="the average of the weights (optimizer.average)"
    )
    export_parser.set_defaults(command=to_hf)
    import_parser = commands.add_parser(
        "from-hf", help="transformers -> a checkpoint to start from"
    )
    import_parser.add_argument("folder", type=file_path, help="written by save_pretrained")
    import_parser.set_defaults(command=from_hf)
    foreign_parser = commands.add_parser(
        "import", help="Megatron-LM, Megatron-DeepSpeed or GPT-NeoX -> a checkpoint"
    )
    foreign_parser.add_argument(
        "checkpoint", type=file_path, help="a folder of checkpoints, or that of an iteration"
    )
    foreign_parser.add_argument(
        "--config",
        type=file_path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="configuration of the run; default: the settings in the checkpoint",
    )
    foreign_parser.add_argument(
        "--recipe", type=file_path, metavar="FILE", help="recipe to write; default: print it"
    )
    foreign_parser.add_argument(
        "--weights-only", action="store_true", help="leave out the optimizer's state"
    )
    foreign_parser.add_argument(
        "--ranks", type=count, metavar="N", help="GPUs, if the source's batch depends on them"
    )
    add_overrides(foreign_parser)
    foreign_parser.set_defaults(command=import_command)
    average_parser = commands.add_parser("average", help="mean of the weights of several saves")
    average_parser.add_argument(
        "sources",
        type=file_path,
        nargs="+",
        help="a run folder with --last, or two or more checkpoints",
    )
    average_parser.add_argument(
        "--last", type=count, metavar="N", help="average the newest N checkpoints of the run"
    )
    average_parser.add_argument("--output", type=file_path, required=True, help="folder to write")
    average_parser.set_defaults(command=average_command)
    reshape_parser = commands.add_parser("reshape", help="checkpoint -> another layout")
    reshape_parser.add_argument("checkpoint", type=file_path, help="a checkpoint or a run folder")
    reshape_parser.add_argument("--ranks", type=count, required=True, help="in the new layout")
    add_overrides(reshape_parser)
    reshape_parser.set_defaults(command=reshape_command)
    recipe_parser = commands.add_parser(
        "recipe", help="configuration of another program -> a recipe"
    )
    recipe_parser.add_argument(
        "files",
        type=file_path,
        nargs="+",
        help="GPT-NeoX or nanotron YAML, a Megatron script or argument list, torchtitan TOML, or "
        "a config.json of transformers",
    )
    recipe_parser.add_argument(
        "--output", type=file_path, help="recipe to write; default: print it"
    )
    recipe_parser.add_argument(
        "--ranks", type=count, metavar="N", help="GPUs, if the source's batch depends on them"
    )
    add_overrides(recipe_parser)
    recipe_parser.set_defaults(command=recipe_command)
    for subparser in (export_parser, import_parser, foreign_parser, average_parser, reshape_parser):
        if subparser is not average_parser:  # which takes several folders to read
            subparser.add_argument("output", type=file_path, help="folder to write")
        subparser.add_argument(
            "--overwrite", action="store_true", help="replace an unchanged earlier output"
        )
    return parser.parse_args()
