"""The cluster that a job is planned for: the recipe's own or one that options describe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.errors import UserError
from threefold.config.layout import Cluster
from threefold.config.loading import load_recipe, parse_recipe
from threefold.config.recipe import Recipe

MAX_GPUS = 10**6
DEFAULT_CLUSTER: dict[str, Any] = {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"}


def recipe_on_cluster(
    path: Path,
    overrides: Sequence[str],
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
) -> tuple[Recipe, Cluster]:
    """Load a recipe and set keys of its [cluster] section.

    A value of None keeps the recipe's value, or that of DEFAULT_CLUSTER if the recipe has none.

    Args:
        path: TOML file of the recipe
        overrides: values of --set
        nodes: number of nodes
        gpus_per_node: number of GPUs in each node
        gpu: name of the GPU

    Raises:
        UserError: the recipe or the cluster is not valid.
    """
    recipe = load_recipe(path, overrides)
    table = recipe.model_dump(mode="json", exclude_none=True)
    options = {"nodes": nodes, "gpus_per_node": gpus_per_node, "gpu": gpu}
    given = {key: value for key, value in options.items() if value is not None}
    cluster = table["cluster"] = DEFAULT_CLUSTER | table.get("cluster", {}) | given
    if cluster["nodes"] * cluster["gpus_per_node"] > MAX_GPUS:
        raise UserError(
            f"cluster.nodes = {cluster['nodes']} x cluster.gpus_per_node = "
            f"{cluster['gpus_per_node']} are more than {MAX_GPUS:,} GPUs; use fewer"
        )
    recipe = parse_recipe(table, str(path))  # validates the new cluster
    assert recipe.cluster is not None
    return recipe, recipe.cluster
