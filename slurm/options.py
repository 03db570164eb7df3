"""Print the sbatch options that a recipe's [cluster] asks for, so that nothing is typed twice.

sbatch $(python slurm/options.py recipes/llama/7b.toml) slurm/pretrain.slurm recipes/llama/7b.toml
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not slurm/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse

from models.errors import UserError
from recipes.training.recipe.loading import load_recipe, origin
from recipes.training.recipe.topology import World


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="as for pretrain.py")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as for pretrain.py"
    )
    for name in ("--run-dir", "--resume", "--resume-once", "--wait-for-folder"):
        parser.add_argument(name, help="for pretrain.py")
    options = parser.parse_args()
    try:
        print(" ".join(sbatch_options(options.recipe, options.set)))
    except UserError as problem:
        sys.exit(f"options.py: {problem}")


def sbatch_options(path: Path, overrides: list[str]) -> list[str]:
    """The options, none of which needs quotes.

    Raises:
        UserError: the recipe has no [cluster], or cannot run on it.
    """
    recipe = load_recipe(path, overrides)
    if recipe.cluster is None:
        raise UserError(
            f"{origin(path, overrides)} has no [cluster]; add one with nodes, gpus_per_node and gpu"
        )
    nodes, gpus = recipe.cluster.nodes, recipe.cluster.gpus_per_node
    try:
        recipe.topology(World(size=nodes * gpus, local_size=gpus))
    except UserError as problem:
        raise UserError(f"{origin(path, overrides)}: {problem}") from None
    return [
        f"--job-name={recipe.name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={gpus}",
        f"--gpus-per-node={gpus}",
    ]


if __name__ == "__main__":
    main()
