"""Validation and tasks: equal in every layout, and to a plain forward pass of the export."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.proving.trial import many_cases, start
from recipes.training.evaluation.evaluator import Evaluator
from recipes.training.recipe.loading import parse_recipe
from recipes.training.recipe.topology import World
from tests.ranks import run_ranks
from tests.training.engine.test_layouts import (
    COLUMNS2,
    DOCUMENTS,
    EXPERT2,
    EXPERTS,
    FOLDED,
    GPT,
    PIPELINE2,
    SEQUENCE,
    TENSOR2,
    ZERO3,
)  # fmt: skip
from tests.training.evaluation.text_corpus import evaluating_recipe, write_text_corpus

CONTEXT2 = {"layout__context": 2}
RING = {"layout__context_attention": "ring"}
REFERENCES = {"": {}, "documents": DOCUMENTS, "gpt": GPT, "experts": EXPERTS}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    8: {
        "pipeline 2 tensor 2 context 2": PIPELINE2 | TENSOR2 | CONTEXT2 | SEQUENCE,
        "documents dualpipev context 2 data 2": DOCUMENTS | FOLDED | CONTEXT2 | RING,
        "experts context 2 expert 2 expert tensor 2": EXPERTS | CONTEXT2 | EXPERT2 | COLUMNS2,
        "gpt zero3 tensor 2 context 2": GPT | ZERO3 | TENSOR2 | CONTEXT2 | SEQUENCE,
    },
}


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "data"
    write_text_corpus(folder)
    return folder


def evaluate_worker(folder: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics and the scores of the requests of new models, by layout."""
    found = {}
    with many_cases() as begin:
        for name, changes in layouts.items():
            begin()
            recipe = parse_recipe(evaluating_recipe(Path(folder), **changes), name)
            evaluator = Evaluator(*start(recipe, World.from_environment(os.environ)))
            metrics = evaluator.validate() | evaluator.score_tasks()
            found[name] = (metrics, *evaluator.score_requests())
    return found


@pytest.fixture(scope="module")
def alone(text_corpus: Path) -> dict[str, Any]:
    (found,) = run_ranks(1, evaluate_worker, str(text_corpus), REFERENCES)
    return found


@pytest.fixture(scope="module")
def in_layouts(text_corpus: Path) -> dict[str, Any]:
    of_ranks = run_ranks(8, evaluate_worker, str(text_corpus), LAYOUTS[8])
    assert all(str(each) == str(of_ranks[0]) for each in of_ranks)  # the same on all ranks
    return of_ranks[0]


@pytest.mark.parametrize("name", LAYOUTS[8])
def test_evaluations_do_not_depend_on_the_layout(
    name: str, alone: dict[str, Any], in_layouts: dict[str, Any]
) -> None:
    kind = name.split()[0] if name.split()[0] in REFERENCES else ""
    (expected, likelihoods, greedy), (metrics, *scores) = alone[kind], in_layouts[name]
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        print(
            name,
            key,
            value,
            metrics[key],
            np.max(np.abs(np.array(metrics[key]) / np.array(value) - 1)),
        )
        assert metrics[key] == pytest.approx(value, rel=1e-6), key
    print("LL", np.abs(scores[0] / likelihoods - 1).max())
    assert scores[0] == pytest.approx(likelihoods, rel=1e-6)
    assert (scores[1] == greedy).all()
