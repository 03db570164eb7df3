"""Validation and tasks: equal in every layout, and to a plain forward pass of the export."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.parallel.micro_batch_info import MicroBatchInfo
from tests.conftest import in_turn_or_exhaustive, selected
from tests.engine.test_layouts import (
    COLUMNS2,
    DOCUMENTS,
    EXPERT2,
    EXPERTS,
    FOLDED,
    GPT,
    INTERLEAVED,
    PIPELINE2,
    SEQUENCE,
    TENSOR2,
    ZB_H1,
    ZB_V,
    ZERO2,
    ZERO3,
)  # fmt: skip
from tests.pretrain.evaluation.conftest import MODEL, STEPS, TrainedRun, score_once
from tests.pretrain.evaluation.text_corpus import SEQUENCE_LENGTH, evaluating_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment, ParallelDims
from threefold.data.dataset import TrainingData
from threefold.data.tasks import Tasks, open_tasks
from threefold.engine.engine import Engine
from threefold.pretrain.evaluation import Evaluator
from threefold.prove.training import load_newest, many_cases, start
from threefold.run_folder.folder import RunFolder

CONTEXT2 = {"layout__context": 2}
RING = {"layout__context_attention": "ring"}
ULYSSES = {"layout__context_attention": "ulysses"}
FEW = {"batch__micro_sequences": 4}  # micro-batches, which take less time than many
ONE = {"batch__micro_sequences": 8}
REFERENCES: dict[str, dict[str, Any]] = {
    "": ONE,
    "documents": DOCUMENTS | ONE,
    "gpt": GPT | ONE,
    "experts": EXPERTS | ONE,
}
QUICK: dict[str, dict[str, Any]] = {  # a layout of 4 ranks for each engine
    "pipeline 2 context 2": PIPELINE2 | CONTEXT2 | FEW,
    "gpt zero3 tensor 2 context 2": GPT | ZERO3 | TENSOR2 | CONTEXT2 | SEQUENCE | ONE,
}
OTHERS: dict[str, dict[str, Any]] = {  # layouts of 8 ranks
    "pipeline 2 tensor 2 context 2": PIPELINE2 | TENSOR2 | CONTEXT2 | SEQUENCE,
    "documents dualpipev ring 2 data 2": DOCUMENTS | FOLDED | CONTEXT2 | RING,
    "experts context 2 expert 2 expert tensor 2": EXPERTS | CONTEXT2 | EXPERT2 | COLUMNS2,
    "zero2 data 4 tensor 2": ZERO2 | TENSOR2 | SEQUENCE,
    "zero3 data 4 ulysses 2": ZERO3 | CONTEXT2 | ULYSSES,
    "interleaved tensor 2 data 2": INTERLEAVED | TENSOR2,
    "zb-h1 pipeline 4 context 2": ZB_H1 | CONTEXT2 | {"layout__pipeline": 4},
    "zero2 zb-v context 4": ZERO2 | ZB_V | {"layout__context": 4},
    "shard group 2": {"layout__dp_shard": 2, "batch__micro_sequences": 1},
    "documents zero3 context 4 ring": DOCUMENTS | ZERO3 | RING | {"layout__context": 4},
    "documents gpipe pipeline 2 tensor 2 context 2": DOCUMENTS
    | {"layout__pipeline": 2, "layout__schedule": "gpipe"}
    | TENSOR2
    | CONTEXT2,
    "gpt pipeline 4 tensor 2": GPT | TENSOR2 | {"layout__pipeline": 4},
    "experts zb-v expert 4": EXPERTS | ZB_V | {"layout__expert": 4},
    "experts zero3 tensor 2 context 2": EXPERTS | ZERO3 | TENSOR2 | CONTEXT2,
}
LONG = (  # in turn; the other layouts are exhaustive tests
    "pipeline 2 tensor 2 context 2",
    "documents dualpipev ring 2 data 2",
    "experts context 2 expert 2 expert tensor 2",
    "zero2 zb-v context 4",
    "zero3 data 4 ulysses 2",
    "shard group 2",
)
assert set(LONG) <= set(OTHERS)


def evaluate_worker(folder: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics and the scores of the requests of new models, by layout."""
    found = {}
    with many_cases() as begin:
        for name, changes in layouts.items():
            begin()
            found[name] = evaluation(folder, changes)
    return found


def evaluation(folder: str, changes: dict[str, Any]) -> tuple[Any, ...]:
    recipe = parse_recipe(evaluating_recipe(Path(folder), **changes), "test")
    evaluator = Evaluator(*start(recipe, LaunchEnvironment.from_environment(os.environ)))
    metrics = evaluator.validate()
    tasks, *scores = score_once(evaluator)
    return metrics | tasks, *scores


@pytest.fixture(scope="module")
def alone(text_corpus: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the evaluations of the selected tests on one rank, by the kind of model."""
    names = selected(request, test_evaluations_do_not_depend_on_the_layout, "name")
    names += selected(request, test_evaluations_do_not_depend_on_the_layout_either, "name")
    kinds = {"", *map(kind_of, names)}
    references = {kind: changes for kind, changes in REFERENCES.items() if kind in kinds}
    (found,) = run_ranks(1, evaluate_worker, str(text_corpus), references)
    return found


@pytest.fixture(scope="module")
def of_quick_layouts(text_corpus: Path) -> list[dict[str, Any]]:
    return run_ranks(4, evaluate_worker, str(text_corpus), QUICK)


@pytest.fixture(scope="module")
def of_other_layouts(text_corpus: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the evaluations in the layouts of the selected tests."""
    names = selected(request, test_evaluations_do_not_depend_on_the_layout_either, "name")
    return run_ranks(8, evaluate_worker, str(text_corpus), {name: OTHERS[name] for name in names})


def kind_of(name: str) -> str:
    """Return the kind of model of a layout."""
    kind = name.partition(" ")[0]
    return kind if kind in REFERENCES else ""


def check_layout(name: str, alone: dict[str, Any], of_ranks: list[dict[str, Any]]) -> None:
    """Compare the evaluation in a layout with the one in one process."""
    expected, *scores_alone = alone[kind_of(name)]
    metrics, *scores = of_ranks[0][name]
    assert all(str(each[name]) == str(of_ranks[0][name]) for each in of_ranks)
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        # The perplexity of new models is exp of a large mean, which multiplies its error.
        is_perplexity = key.endswith("perplexity")
        got, value = (np.log(x) if is_perplexity else x for x in (metrics[key], value))
        assert got == pytest.approx(value, rel=1e-6), key
    assert scores[0] == pytest.approx(scores_alone[0], rel=1e-6)
    assert (scores[1] == scores_alone[1]).all()


@pytest.mark.parametrize("name", QUICK)
def test_evaluations_do_not_depend_on_the_layout(
    name: str, alone: dict[str, Any], of_quick_layouts: list[dict[str, Any]]
) -> None:
    check_layout(name, alone, of_quick_layouts)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=in_turn_or_exhaustive(name, LONG, pytest.mark.long),
        )
        for name in OTHERS
    ],
)
def test_evaluations_do_not_depend_on_the_layout_either(
    name: str, alone: dict[str, Any], of_other_layouts: list[dict[str, Any]]
) -> None:
    check_layout(name, alone, of_other_layouts)


FAULTS: dict[str, contextlib.AbstractContextManager] = {
    "slices of a sequence are taken for its beginning": mock.patch(
        "threefold.pretrain.evaluation.positions",
        lambda slices, length: np.arange(sum(map(len, slices)) if slices else length),
    ),
    "all tensor ranks count": mock.patch.object(Engine, "_on_host", lambda _, scores: scores),
    "requests of a window see each other": mock.patch.object(
        TrainingData, "info", lambda data, lengths, dropout=None: without_documents(data)
    ),
    "requests belong to other positions": mock.patch.object(
        Tasks,
        "requests_at",
        lambda tasks, rows, slices: np.roll(REQUESTS_AT(tasks, rows, slices), 1, axis=1),
    ),
}
REQUESTS_AT = Tasks.requests_at


def without_documents(data: TrainingData) -> MicroBatchInfo:
    one_each = ((data.sequence_length,),)
    return MicroBatchInfo.of_windows(one_each, data.context_rank, data.context_size)


def faulty_worker(folder: str) -> dict[str, Any]:
    """Return the evaluation in a layout without and with faults."""
    found = {}
    with many_cases() as begin:
        for name, fault in ({"": contextlib.nullcontext()} | FAULTS).items():
            begin()
            with fault:
                found[name] = evaluation(folder, TENSOR2 | CONTEXT2)
    return found


@pytest.mark.long
def test_faults_are_noticed(alone: dict[str, Any], text_corpus: Path) -> None:
    of_ranks = run_ranks(4, faulty_worker, str(text_corpus))
    check_layout("", alone, [{"": each[""]} for each in of_ranks])
    for name in FAULTS:
        with pytest.raises(AssertionError):
            check_layout("", alone, [{"": each[name]} for each in of_ranks])


# A plain forward pass of the export


@torch.no_grad()
def test_scores_equal_a_plain_forward_pass_of_the_export(trained: TrainedRun) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained.export).eval()
    for number, request in enumerate(open_tasks(trained.recipe).requests):
        tokens = torch.from_numpy(request.tokens).long()
        logits = model(tokens[None, :-1]).logits[0, -request.predicted :].double()
        labels = tokens[-request.predicted :]
        expected = -float(F.cross_entropy(logits, labels, reduction="sum"))
        assert trained.log_likelihoods[number] == pytest.approx(expected, rel=1e-5)
        assert trained.are_greedy[number] == bool((logits.argmax(dim=-1) == labels).all())
    assert 0 < trained.are_greedy.sum() < len(trained.are_greedy)


@torch.no_grad()
def test_validation_equals_a_plain_forward_pass_of_the_export(
    trained: TrainedRun, text_corpus: Path
) -> None:
    """Losses, bits per byte and losses by position, from logits and decoded text."""
    model = AutoModelForCausalLM.from_pretrained(trained.export).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained.export)
    (metrics,) = run_ranks(1, validate_worker, str(text_corpus), str(trained.folder))
    data = TrainingData(trained.recipe, ParallelDims(pipeline=1, data=1, tensor=1), 0)
    for name in ("long", "short"):
        windows = [data.validation[name].read(n) for n in data.validation_windows(name)]
        tokens = torch.from_numpy(np.stack(windows).astype(np.int64))
        logits = model(tokens[:, :-1]).logits.double()
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        key = f"validation/{name}/"
        assert metrics[key + "loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
        by_position = losses.view(len(windows), 6, SEQUENCE_LENGTH // 6).mean(dim=(0, 2))
        assert metrics[key + "position_losses"] == pytest.approx(by_position.tolist(), rel=1e-6)
        ids = tokens[:, 1:].flatten().tolist()
        # Parts of a character are decoded as U+FFFD: join them by decoding all labels together.
        text = tokenizer.decode(ids, skip_special_tokens=True)
        bits = float(losses.sum()) / math.log(2) / len(text.encode())
        assert metrics[key + "bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def validate_worker(corpus: str, run: str) -> dict[str, Any]:
    """Return the validation of a saved run, on one rank."""
    steps = {"training__steps": STEPS, "training__evaluate_every": STEPS}
    table = evaluating_recipe(Path(corpus), **MODEL, **steps)
    engine, data = start(parse_recipe(table, "test"), join_world())
    assert load_newest(engine, data, RunFolder(Path(run))) == STEPS
    return Evaluator(engine, data).validate()
