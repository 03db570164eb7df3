"""The tasks of a run, scored by lm-evaluation-harness on the export of the run."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pretrain.evaluation.conftest import TrainedRun
from tests.pretrain.evaluation.text_corpus import write_lines
from threefold.data.tasks import Item, read_items
from threefold.prepare_data.tasks import items_of_samples

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm_eval is not installed: requirements-lm-eval.txt",
    ),
]
YAML = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
doc_to_text: "{{{{prompt}}}}"
{kind}"""
CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: "\\n"
metric_list:
  - metric: acc
  - metric: acc_norm
  - metric: acc_bytes
"""
CLOZE = """output_type: loglikelihood
doc_to_target: "{{(' ' if delimiter is none else delimiter) + answer}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
"""


@pytest.fixture(scope="module")
def harness(trained: TrainedRun, text_corpus: Path, tmp_path_factory: Any) -> Path:
    """Run the harness without network, and return the folder of its results."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "tasks").mkdir()
    for name, kind in (("choice", CHOICE), ("cloze", CLOZE)):
        text = YAML.format(name=name, file=text_corpus / f"{name}.jsonl", kind=kind)
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"),
        *("--model_args", f"pretrained={trained.export},dtype=float32,logits_cache=False"),
        *("--tasks", "choice,cloze", "--include_path", folder / "tasks", "--batch_size", "4"),
        *("--log_samples", "--output_path", folder / "results"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | offline | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "results"


def test_scores_equal_those_of_the_harness(harness: Path, trained: TrainedRun) -> None:
    (file,) = harness.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    for ours, task, theirs in (
        ("choice/accuracy", "choice", "acc"),
        ("choice/accuracy_per_byte", "choice", "acc_bytes"),
        ("choice/accuracy_per_byte", "choice", "acc_norm"),  # the same for ASCII
        ("cloze/accuracy", "cloze", "acc"),
        ("cloze/perplexity", "cloze", "perplexity"),
    ):
        print(ours, trained.metrics[f"tasks/{ours}"], results[task][f"{theirs},none"])
        expected = pytest.approx(results[task][f"{theirs},none"], rel=1e-4)
        assert trained.metrics[f"tasks/{ours}"] == expected, ours


def test_log_likelihoods_equal_those_of_the_harness(harness: Path, trained: TrainedRun) -> None:
    expected = []
    for name in ("choice", "cloze"):
        for sample in samples_of(harness, name):
            responses = sample["resps"]
            for (pair,) in responses if isinstance(responses[0][0], list) else [responses]:
                expected.append(pair)
    likelihoods = np.array([float(value) for value, _ in expected])
    difference = np.abs(trained.log_likelihoods - likelihoods).max()
    print(f"largest difference of {len(likelihoods)} log-likelihoods: {difference:.1e}")
    assert trained.log_likelihoods == pytest.approx(likelihoods, rel=1e-4)
    assert trained.are_greedy.tolist() == [str(greedy) == "True" for _, greedy in expected]


@pytest.mark.parametrize("name", ["choice", "cloze"])
def test_samples_are_converted_to_the_same_task(
    name: str, harness: Path, text_corpus: Path, tmp_path: Path
) -> None:
    (file,) = harness.rglob(f"samples_{name}_*.jsonl")
    items = items_of_samples(file, "\n" if name == "choice" else None)
    write_lines(tmp_path / "again.jsonl", items)
    original, again = (
        read_items(text_corpus / f"{name}.jsonl"),
        read_items(tmp_path / "again.jsonl"),
    )
    assert [texts(item) for item in again] == [texts(item) for item in original]
    assert [item.answer for item in again] == [item.answer for item in original]


def texts(item: Item) -> list[str]:
    """Return the prompt and the continuations, with the delimiter."""
    return [item.prompt, *(item.delimiter + choice for choice in item.choices)]


def samples_of(harness: Path, name: str) -> list[dict[str, Any]]:
    (file,) = harness.rglob(f"samples_{name}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])
