"""A corpus of text, and a run on it with evaluations, checkpoints and an export."""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.pretrain.evaluation.text_corpus import evaluating_recipe, write_text_corpus
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.convert.files import open_checkpoint
from threefold.convert.to_hugging_face import export
from threefold.pretrain.evaluation import Evaluator
from threefold.prove.training import save, start, train_step
from threefold.run_folder.folder import RunFolder

STEPS = 20
MODEL = {"model__layers": 2, "optimizer__learning_rate": 1.5e-2}


@dataclass(frozen=True)
class TrainedRun:
    """A trained model: its recipe, run folder and export, and its own evaluation."""

    recipe: Recipe
    folder: Path
    export: Path
    metrics: dict[str, float]
    log_likelihoods: np.ndarray
    are_greedy: np.ndarray


def training_worker(corpus: str, run: str) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Train on two ranks, save, and return the scores of the tasks."""
    engine, data = start(recipe_of(Path(corpus)), join_world())
    for step in range(1, STEPS + 1):
        train_step(engine, data, step)
    save(engine, data, RunFolder(Path(run)), step=STEPS)
    return score_once(Evaluator(engine, data))


def score_once(evaluator: Evaluator) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Return the scores of the tasks and of their requests, from one pass over the requests."""
    scores = evaluator.score_requests()
    with mock.patch.object(evaluator, "score_requests", return_value=scores):
        return evaluator.score_tasks(), *scores


def recipe_of(corpus: Path) -> Recipe:
    steps = {"training__steps": STEPS, "training__evaluate_every": STEPS}
    table = evaluating_recipe(corpus, layout__tensor=2, batch__micro_sequences=8, **MODEL, **steps)
    return parse_recipe(table, "test")


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "data"
    write_text_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def trained(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder, exported = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("export")
    scores = run_ranks(2, training_worker, str(text_corpus), str(folder))[0]
    tokenizer = text_corpus / "tokenizer"
    export(open_checkpoint(folder), exported, dtype="fp32", tokenizer=tokenizer)
    return TrainedRun(recipe_of(text_corpus), folder, exported, *scores)
