"""Messages of a run: its nodes and ranks."""

from pathlib import Path
from unittest import mock

import pytest

from recipes.training.recipe.loading import DEFAULT_RECIPE, load_recipe
from recipes.training.recipe.topology import World
from recipes.training.run_folder.progress import Progress
from recipes.training.tracking.messages import announce


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (["a", "a"], "  1 node, 2 ranks: a"),
        (["a"], "  1 node, 1 rank: a"),
        (["b", "b", "a", "a"], "  2 nodes, 4 ranks: b, a"),
        (list("abcdefghij"), "  10 nodes, 10 ranks: a, b, c, d, e, f, g, h and 2 more"),
    ],
)
def test_a_run_prints_its_nodes_and_ranks(
    hosts: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["layout.pipeline=1", "batch.global_sequences=40", "batch.micro_sequences=1"]
    recipe = load_recipe(DEFAULT_RECIPE, settings)
    topology = recipe.topology(World(size=len(hosts), local_size=len(hosts)))
    found = mock.Mock(progress=Progress(), weights_only=False)
    announce(recipe, topology, hosts, mock.Mock(path=tmp_path), found)
    assert line == capsys.readouterr().out.splitlines()[1]
