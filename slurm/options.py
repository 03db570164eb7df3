"""Print the sbatch options for the nodes and GPUs of a recipe's [cluster] section.

slurm/submit.sh calls this command. To add sbatch options of your own, call sbatch yourself:

    sbatch $(python slurm/options.py RECIPE) --qos=high slurm/pretrain.slurm RECIPE
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from slurm/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse

from models.errors import UserError
from threefold.config.loading import load_recipe, origin
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import is_cpu
from threefold.launch.attempt import resume_option
from threefold.launch.hosts import check_before_hosts
from threefold.launch.replanning import Replanner
from threefold.runtime.command_line import add_overrides, file_path, filled, seconds_to_wait
from threefold.runtime.exits import REJECTED


def main() -> None:
    """Parse the command line and print the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=file_path, help="TOML file, as for pretrain.py")
    add_overrides(parser)
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="also request cluster.spare_nodes, keep the job when a node dies, and reject what "
        "launch.py would reject",
    )
    parser.add_argument(
        "--resume",
        type=filled,
        default="auto",
        help="as for pretrain.py; a warning is printed if the checkpoint does not exist",
    )
    for name in ("--run-dir", "--resume-once"):
        parser.add_argument(name, type=filled, help="ignored; for pretrain.py")
    parser.add_argument("--wait-for-folder", type=seconds_to_wait, help="ignored; for pretrain.py")
    parser.add_argument(
        "--forget-failures", action="store_true", help="with --elastic, as for launch.py"
    )
    options = parser.parse_args()
    if options.forget_failures and not options.elastic:
        parser.error("--forget-failures is for launch.py; add --elastic")
    resume = options.resume
    if resume not in ("auto", "never") and not Path(resume, "manifest.json").is_file():
        choices = "auto" if options.elastic else "auto, never"  # launch.py rejects never
        print(
            f"warning: --resume {resume}: the path is not a checkpoint; if that is still so when "
            f"the job starts, the job ends with an error. Use {choices} or a checkpoint such as "
            f"runs/NAME/checkpoints/step-0000200",
            file=sys.stderr,
        )
    try:
        recipe, name = load_recipe(options.recipe, options.set), origin(options.recipe, options.set)
        job = sbatch_options(recipe, name, elastic=options.elastic)
        if options.elastic:  # as launch.py, so that no job is queued that it rejects
            check_before_hosts(recipe, name)
            Replanner(options.recipe, options.set).require_layout(name)
            resume_option(options.resume, recipe)
        print(" ".join(job))
    except UserError as problem:
        print(f"options.py: {problem}", file=sys.stderr)
        sys.exit(REJECTED)


def sbatch_options(recipe: Recipe, name: str, *, elastic: bool) -> list[str]:
    """Return the sbatch options, none of which needs quotes.

    Args:
        name: the recipe's file and the overrides, for messages
        elastic: request the spare nodes too, and keep the job when a node dies

    Raises:
        UserError: the recipe has no [cluster] section, or its layout does not fit that cluster.
    """
    if recipe.cluster is None:
        raise UserError(
            f"{name} has no [cluster] section, which gives the size of the job; "
            f'add one, for example nodes = 4, gpus_per_node = 8, gpu = "H100"'
        )
    nodes, gpus = recipe.cluster.nodes, recipe.cluster.gpus_per_node
    try:
        recipe.parallel_dims(LaunchEnvironment(size=nodes * gpus, local_size=gpus))
    except UserError as problem:
        raise UserError(f"{name}: {problem}") from None
    return [
        f"--job-name={recipe.name}",
        f"--nodes={nodes + (recipe.cluster.spare_nodes if elastic else 0)}",
        f"--ntasks-per-node={gpus}",
        *([] if is_cpu(recipe.cluster.gpu) else [f"--gpus-per-node={gpus}"]),
        *(["--no-kill"] if elastic else []),
    ]


if __name__ == "__main__":
    main()
