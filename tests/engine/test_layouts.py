"""One loss: the same recipe in every layout trains with the same losses, norms and weights.

`recipes/prove.py` runs all valid layouts of a recipe. The layouts of the tables below have every
pair of values that a recipe may have, such as ZeRO-2 and dropout, or "zb-v" and Muon. Each layout
is trained once, and the tests of this file compare its results.
"""

import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.conftest import GPT_SWITCHES, changed, in_turn, small_recipe
from tests.ranks import run_ranks
from threefold.config.deepspeed_json import build_deepspeed_config, zero_stage
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.data.dataset import TrainingData
from threefold.engine.engine import Engine, StepResult, held_values
from threefold.prove import training
from threefold.prove.compare import TrainingResult, compare
from threefold.prove.layouts import ProofCase
from threefold.prove.training import load_newest, many_cases, save, start, train_cases, train_step
from threefold.run_folder.folder import RunFolder

GPT = GPT_SWITCHES
ZERO2 = {"deepspeed": "ds_configs/zero2_fp32.json"}
ZERO3 = {"deepspeed": "ds_configs/zero3_fp32.json"}
PIPELINE2 = {"layout__pipeline": 2}
TENSOR2 = {"layout__tensor": 2}
SEQUENCE = {"layout__sequence_parallel": True}
FOLDED = PIPELINE2 | {"layout__schedule": "dualpipev", "batch__micro_sequences": 1}
INTERLEAVED = PIPELINE2 | {"layout__schedule": "interleaved"}
ZB_H1 = PIPELINE2 | {"layout__schedule": "zb-h1"}
ZB_V = PIPELINE2 | {"layout__schedule": "zb-v"}
FULL = {"layout__recompute": "full", "layout__recompute_interval": 2}
CLIPPED = {"optimizer__gradient_clipping": 0.5}  # below every norm of the run
DROPOUT = {"model__dropout": 0.1, "model__attention_dropout": 0.1}
DOCUMENTS = {"data__separate_documents": True}
EXPERTS = {
    "model__experts": {
        "count": 8, "per_token": 2, "ffn_hidden_size": 24, "shared": 2, "dense_layers": 1,
        "normalize": True, "balance_loss": 0.1, "z_loss": 0.01,
    },
    "model__initial_std": 0.1,  # so that the tokens of a sequence use different experts
}  # fmt: skip
BIASES = EXPERTS | {
    "model__bias": True,
    "model__experts": EXPERTS["model__experts"]
    | {"router": "softmax-after-topk", "normalize": False},
}
NORMS_AFTER = {
    "model__norm_placement": "after", "model__qk_norm": True, "model__qk_norm_over": "projection",
    "model__logit_soft_cap": 2.0, "model__z_loss": 0.01, "model__embedding_multiplier": 3.0,
    "model__tie_embeddings": True, "model__activation": "geglu",
}  # fmt: skip
WINDOWS = {
    "model__attention_pattern": ["window", "nope", "full"], "model__window": {"size": 5},
    "model__attention_sinks": True, "model__partial_rotary_factor": 0.5,
}  # fmt: skip
EXPERT2 = {"layout__expert": 2}
OVERLAP = {"layout__expert_overlap": True, "batch__micro_sequences": 1}
COLUMNS2 = TENSOR2 | {"layout__expert_tensor_parallel": True}
CONTEXT2 = {"layout__context": 2}
SHARD_GROUP1 = {"layout__dp_shard": 1}
ACCUMULATING = "zero2_bf16_throughout.json"  # bf16 gradients are also summed in bf16

CHANGES: dict[str, dict[str, dict[str, Any]]] = {  # column -> value -> changes of the small recipe
    "model": {"llama": {}, "gpt": GPT | CLIPPED, "experts": EXPERTS},
    "schedule": {"-": {}, "1f1b": PIPELINE2, "interleaved": INTERLEAVED, "zb-h1": ZB_H1,
                 "zb-v": ZB_V, "dualpipev": FOLDED},
    "zero": {"zero1": {}, "zero2": {}, "zero3": {}},  # part of the DeepSpeed config's name
    "precision": {"fp32": {}, "bf16": {}},
    "tensor": {"-": {}, "tensor": TENSOR2, "sequence": TENSOR2 | SEQUENCE},
    "context": {"-": {}, "gather": CONTEXT2,
                "ring": CONTEXT2 | {"layout__context_attention": "ring"},
                "ulysses": CONTEXT2 | {"layout__context_attention": "ulysses"}},
    "expert": {"-": {}, "expert": EXPERT2},
    "expert-tensor": {"-": {}, "columns": COLUMNS2},
    "recompute": {"-": {}, "selective": {"layout__recompute": "selective"}, "full": FULL},
    "dropout": {"-": {}, "dropout": DROPOUT},
    "documents": {"-": {}, "documents": DOCUMENTS},
    "optimizer": {"adamw": {}, "muon": {"optimizer__kind": "muon"}},
    "data": {"-": {}, "data": {}},  # the size of the world follows from the sizes of the axes
    "shards": {"-": {}, "group": SHARD_GROUP1},
    "more": {"-": {}, "accumulating": {"deepspeed": ACCUMULATING}, "overlap": OVERLAP,
             "three-chunks": {"layout__virtual_stages": 3},
             "by-hand": {"layout__layers_per_stage": [3, 1]}},
}  # fmt: skip
OF_THE_MODEL = ("model", "precision", "dropout", "documents", "optimizer")  # not of the layout
QUICK = """
experts zero2 fp32 sequence gather expert columns full muon
experts zero3 bf16 tensor columns selective dropout documents adamw data
gpt zero3 fp32 tensor ring full dropout muon
llama dualpipev zero2 fp32 ulysses selective muon group
llama zb-v zero2 bf16 full dropout documents muon data group
gpt interleaved zero2 fp32 sequence dropout documents adamw
gpt 1f1b zero1 bf16 adamw data group
experts zb-v zero1 bf16 gather expert documents adamw
gpt zb-h1 zero2 bf16 tensor documents adamw accumulating
"""
LONG = """
llama 1f1b zero1 fp32 sequence full documents adamw
experts dualpipev zero1 bf16 expert selective dropout adamw data overlap
experts zb-h1 zero1 fp32 sequence columns selective dropout muon by-hand
gpt zb-v zero1 fp32 selective muon data
llama interleaved zero1 bf16 ring dropout muon group three-chunks
experts interleaved zero1 fp32 tensor columns full documents muon
experts 1f1b zero1 fp32 gather expert selective dropout muon
llama zero3 bf16 ring documents muon data
experts dualpipev zero1 bf16 sequence columns documents adamw
llama zb-h1 zero1 fp32 ring full muon group
llama zero1 bf16 tensor full dropout documents muon data group
experts zero2 bf16 sequence columns selective documents adamw data group
experts interleaved zero2 fp32 expert selective adamw data
gpt dualpipev zero1 bf16 tensor full dropout muon
experts 1f1b zero2 bf16 tensor columns dropout documents muon
experts zb-v zero2 fp32 tensor columns full dropout adamw
experts zb-h1 zero2 bf16 expert dropout documents adamw data
llama zero3 fp32 sequence selective muon
experts zero2 bf16 tensor expert full documents muon data
experts zb-v zero1 fp32 sequence dropout documents muon
"""
# (world size, name) -> changes; all are long, in turn
MORE_LAYOUTS: dict[tuple[int, str], dict[str, Any]] = {
    (1, "micro-batch 4"): {"batch__micro_sequences": 4},
    (1, "experts zero3, micro-batch 4"): EXPERTS | ZERO3 | FULL | {"batch__micro_sequences": 4},
    (2, "zero2, alone, tensor 2"): ZERO2 | TENSOR2,
    (2, "shard group 1"): SHARD_GROUP1,
    (2, "gpipe"): PIPELINE2 | {"layout__schedule": "gpipe"},
    (4, "pipeline 4"): DOCUMENTS | {"layout__pipeline": 4},
    (4, "zb-h1, pipeline 4"): GPT | DROPOUT | ZB_H1 | {"layout__pipeline": 4},
    (4, "shard group 2 of 4"): DROPOUT | ZERO2 | {"layout__dp_shard": 2},
    (4, "expert 2, expert tensor 2"): EXPERTS | COLUMNS2 | EXPERT2,
    (4, "interleaved, expert overlap"): EXPERTS | INTERLEAVED | EXPERT2 | OVERLAP,
    (4, "context 2, expert 4"): EXPERTS | CONTEXT2 | {"layout__expert": 4},
    (4, "context 2, expert 2, expert tensor 2"): EXPERTS | COLUMNS2 | EXPERT2 | CONTEXT2
    | {"layout__recompute": "full"},
    (2, "norms after, zero3"): NORMS_AFTER | ZERO3 | TENSOR2 | FULL,
    (4, "norms after, zb-v"): NORMS_AFTER | ZB_V | TENSOR2 | SEQUENCE,
    (2, "biases, zb-h1"): BIASES | ZB_H1,
    (4, "biases, expert 2, expert tensor 2"): BIASES | ZERO2 | COLUMNS2 | EXPERT2,
    (2, "biases, zero3, expert tensor 2"): BIASES | ZERO3 | COLUMNS2 | SEQUENCE,
    (2, "windows, zero3, tensor 2"): WINDOWS | ZERO3 | TENSOR2 | FULL,
    (4, "windows, zb-v, context 2"): WINDOWS | ZB_V | CONTEXT2 | DOCUMENTS,
    (4, "windows, tensor 2, context 2"): WINDOWS | TENSOR2 | SEQUENCE | CONTEXT2
    | {"layout__context_attention": "ring", "layout__recompute": "selective"},
}  # fmt: skip
STEPS, SAVED_AFTER = 2, 1
Row = dict[str, str]  # column -> value
Key = tuple[int, str]  # world size and name of a layout


def rows_of(table: str) -> Iterator[Row]:
    """Yield the rows of a table. A column whose value is not named has the value "-"."""
    for line in table.split("\n")[1:-1]:
        words = line.split()
        row = {
            column: next((word for word in words if word in values), "-")
            for column, values in CHANGES.items()
        }
        assert [word for word in row.values() if word != "-"] == words, line
        yield row


def key_of(row: Row) -> Key:
    """Return the world size of a row, and its values as a name."""
    axes = sum(row[axis] != "-" for axis in ("schedule", "tensor", "context", "data"))
    return 2**axes, " ".join(word for word in row.values() if word != "-")


def changes_of(row: Row, *, only: tuple[str, ...] = tuple(CHANGES)) -> dict[str, Any]:
    """Return the changes of the small recipe that some columns of a row make."""
    zero = row["zero"] if "zero" in only else "zero1"
    changes = {"deepspeed": f"ds_configs/{zero}_{row['precision']}.json"}
    for column in only:
        changes |= CHANGES[column][row[column]]
    batch = {"batch__micro_sequences": micro_sequences_of(row)}
    return changes | batch | {"model__layers": layers_of(row)}


def layers_of(row: Row) -> int:
    """Return a number of layers: two for each chunk or group of recomputed layers, or seven."""
    if row["more"] == "three-chunks":
        return 7
    chunks = {"-": 1, "1f1b": 2, "zb-h1": 2}.get(row["schedule"], 4)
    return max(chunks, 4 if row["more"] == "by-hand" else 2)


def micro_sequences_of(row: Row) -> int:
    """Return the largest number for which each of two stages has enough of the 8 sequences."""
    micro_batches = 4 if row["schedule"] == "dualpipev" else 2
    return 8 // micro_batches // (1 if row["data"] == "-" else 2)


def reference_key(row: Row) -> str:
    """Return a name for the run on one rank that a row is compared with."""
    return " ".join([*(row[column] for column in OF_THE_MODEL), f"{layers_of(row)} layers"])


ROWS = {key_of(row): row for table in (QUICK, LONG) for row in rows_of(table)}
QUICK_KEYS = [key_of(row) for row in rows_of(QUICK)]


def cases(quick_keys: Iterable[Key]) -> list[Any]:
    """Return all layouts as values of a parameter; those that are not quick are long in turn."""
    quick_keys = list(quick_keys)
    return [
        pytest.param(
            key,
            marks=[] if key in quick_keys else in_turn(number, pytest.mark.long),
            id=f"{key[0]} {key[1]}",
        )
        for number, key in enumerate((*ROWS, *MORE_LAYOUTS))
    ]


def case(corpus: Path, world_size: int, changes: dict[str, Any]) -> ProofCase:
    """Return the case of the small recipe with changes, on `world_size` ranks."""
    settings = {
        "model__layers": 4,
        "training__evaluation_batches": 1,
        "optimizer__learning_rate": 2e-3,  # Adam's first steps enlarge the rounding of gradients
        "optimizer__schedule__warmup_steps": STEPS - 1,
        "training__steps": STEPS,
        "training__evaluate_every": STEPS,
    }
    if changes.get("deepspeed") == ACCUMULATING:
        changes = changes | {"deepspeed": str(corpus / ACCUMULATING)}
    recipe = parse_recipe(changed(small_recipe(corpus), **(settings | changes)), "test")
    dims = recipe.parallel_dims(LaunchEnvironment(size=world_size, local_size=world_size))
    return ProofCase(recipe, dims, zero_stage(build_deepspeed_config(recipe, dims)))


def layout_of(key: Key) -> tuple[int, dict[str, Any]]:
    """Return the world size and the changes of the small recipe of a layout."""
    return key[0], changes_of(ROWS[key]) if key in ROWS else MORE_LAYOUTS[key]


@dataclass(frozen=True)
class Trained:
    """The results of training a layout.

    outcome: outcome of all steps; a checkpoint is saved after step SAVED_AFTER
    resumed: loss and gradient norm of the later steps, of a new engine that resumed from it;
        None if no selected test needs it, as for `reports`
    reports: diverged replicas, after the last step and with a flipped bit on rank 1
    """

    outcome: TrainingResult
    resumed: list[tuple[float, float]] | None = None
    reports: list[list[str]] | None = None


def step_and_save(folder: RunFolder, engine: Engine, data: TrainingData, step: int) -> StepResult:
    """Run a step, and save after step SAVED_AFTER."""
    result = train_step(engine, data, step)
    if step == SAVED_AFTER:
        save(engine, data, folder, step=step)
    return result


def train_worker(
    corpus: str, layouts: dict[Key, dict[str, Any]], resumed: set[Key]
) -> dict[Key, Trained]:
    """Train every layout; resume some, and change a replica; return the results on rank 0."""
    world, results = LaunchEnvironment.from_environment(os.environ), {}
    with many_cases() as begin_case:
        for key, changes in layouts.items():
            begin_case()
            this = case(Path(corpus), world.size, changes)
            if key not in resumed:
                results[key] = Trained(training.train(this, world))
                continue
            folders = [tempfile.mkdtemp() if world.rank == 0 else ""]
            dist.broadcast_object_list(folders)
            folder = RunFolder(Path(folders[0]))
            with mock.patch.object(training, "train_step", partial(step_and_save, folder)):
                outcome = training.train(this, world)
            dist.barrier()
            begin_case()
            results[key] = Trained(outcome, *resume(key, this, folder, world))
            dist.barrier()
            if world.rank == 0:
                shutil.rmtree(folder.path)
    return results


def resume(
    key: Key, this: ProofCase, folder: RunFolder, world: LaunchEnvironment
) -> tuple[list[tuple[float, float]], list[list[str]]]:
    """Resume a layout in a new engine and flip bits; return `resumed` and `reports` of Trained."""
    engine, data = start(this.recipe, world)
    assert load_newest(engine, data, folder) == SAVED_AFTER
    steps = [train_step(engine, data, step) for step in range(SAVED_AFTER + 1, STEPS + 1)]
    reports = [engine.diverged_replicas()]
    for name, parameter in engine.parameters():
        if world.rank == 1 and name in DISTURBED.get(key, {}):
            flip_a_bit(held_values(parameter, data_rank=0).data)
    reports.append(engine.diverged_replicas())
    return [(result.loss, result.grad_norm) for result in steps], reports


def flip_a_bit(values: torch.Tensor) -> None:
    """Flip the lowest bit of the last value."""
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    bits.view(-1)[-1] ^= 1


ROUTER, EXPERT = "blocks.1.mlp.router.weight", "blocks.1.mlp.experts.up_5"
NORM, UP, EMBEDDING = "final_norm.weight", "blocks.0.mlp.up.weight", "embedding.weight"
DISTURBED: dict[Key, dict[str, list[str]]] = {  # layout -> weight changed on rank 1 -> reports
    (4, "gpt zero3 fp32 tensor ring full dropout muon"): {
        NORM: [f"{NORM} differs between tensor ranks: rank 0 against rank 1"],
        UP: [],  # divided among all ranks
    },
    (4, "gpt 1f1b zero1 bf16 adamw data group"): {
        UP: [f"{UP} differs between data ranks: rank 0 against rank 1"],
        EMBEDDING: [
            f"{EMBEDDING} differs between data ranks: rank 0 against rank 1",
            f"{EMBEDDING} differs between stages: rank 1 against rank 3",
        ],
    },
    (4, "experts zero2 fp32 sequence gather expert columns full muon"): {
        ROUTER: [
            f"{ROUTER} differs between data ranks: rank 1 against rank 3",
            f"{ROUTER} differs between tensor ranks: rank 0 against rank 1",
        ],
        EXPERT: [],  # divided among expert ranks, and its columns among tensor ranks
    },
}


def reference_worker(
    corpus: str, references: dict[str, dict[str, Any]]
) -> dict[str, TrainingResult]:
    """Return the outcomes on one rank."""
    cases = [case(Path(corpus), 1, changes) for changes in references.values()]
    return dict(zip(references, train_cases(cases), strict=True))


@pytest.fixture(scope="session")
def layout_corpus(corpus: Path) -> Path:
    """Return the folder of the small corpus and of a DeepSpeed config that layouts name."""
    config = json.loads(Path("ds_configs/zero2_bf16.json").read_text(encoding="utf-8"))
    del config["data_types"]["grad_accum_dtype"]
    (corpus / ACCUMULATING).write_text(json.dumps(config), encoding="utf-8")
    return corpus


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> dict[Key, dict[str, Any]]:
    """Return the changes of the layouts of the selected tests."""
    keys = selected_keys(request, *RESUMED, test_losses_are_those_of_one_rank)
    return {key: layout_of(key)[1] for key in (*ROWS, *MORE_LAYOUTS) if key in keys}


def selected_keys(request: pytest.FixtureRequest, *tests: Callable[..., None]) -> set[Key]:
    """Return the layouts of the selected ones of some tests."""
    return {
        item.callspec.params["key"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function in tests
    }


@pytest.fixture(scope="session")
def references(
    layout_corpus: Path, selected: dict[Key, dict[str, Any]]
) -> dict[str, TrainingResult]:
    rows = [ROWS[key] for key in selected if key in ROWS]
    wanted = {reference_key(row): changes_of(row, only=OF_THE_MODEL) for row in rows}
    wanted |= {
        name: {k: v for k, v in MORE_LAYOUTS[size, name].items() if k.startswith(("model", "data"))}
        for size, name in selected
        if (size, name) in MORE_LAYOUTS
    }
    return run_ranks(1, reference_worker, str(layout_corpus), wanted | PLAIN)[0]


@pytest.fixture(scope="session")
def trained(
    layout_corpus: Path, selected: dict[Key, dict[str, Any]], request: pytest.FixtureRequest
) -> dict[Key, Trained]:
    """Return the trainings of the selected layouts, with one world per world size."""
    found = {}
    resumed = selected_keys(request, *RESUMED)
    for size in (1, 2, 4):
        layouts = {key: changes for key, changes in selected.items() if key[0] == size}
        if layouts:
            found |= run_ranks(size, train_worker, str(layout_corpus), layouts, resumed)[0]
    return found


@pytest.mark.parametrize("key", cases(QUICK_KEYS))
def test_losses_are_those_of_one_rank(
    key: Key,
    layout_corpus: Path,
    trained: dict[Key, Trained],
    references: dict[str, TrainingResult],
) -> None:
    expected = references[reference_key(ROWS[key]) if key in ROWS else key[1]]
    got = trained[key].outcome
    if "bf16" in key[1]:  # which has 8 bits
        assert got.losses == pytest.approx(expected.losses, rel=2e-3)
        assert got.grad_norms == pytest.approx(expected.grad_norms, rel=2e-2)
        assert got.diverged == []
    else:
        difference = compare(got, expected, case(layout_corpus, *layout_of(key)).recipe.model)
        assert difference.loss < 2e-6 and difference.grad_norm < 1e-5, difference
        assert difference.weights < 1e-4 and difference.moments < 1e-4, difference
        assert difference.evaluation < 1e-5, difference  # of a few tokens
        assert not difference.diverged and not difference.rerouted, difference


@pytest.mark.parametrize("key", cases(QUICK_KEYS[::2]))
def test_resuming_continues_bit_for_bit(key: Key, trained: dict[Key, Trained]) -> None:
    outcome, resumed = trained[key].outcome, trained[key].resumed
    later = slice(SAVED_AFTER, STEPS)
    assert resumed == list(zip(outcome.losses[later], outcome.grad_norms[later], strict=True))


@pytest.mark.parametrize("key", DISTURBED, ids=lambda key: key[1])
def test_one_flipped_bit_of_a_replica_is_noticed(key: Key, trained: dict[Key, Trained]) -> None:
    after_a_step, disturbed = trained[key].reports
    assert after_a_step == []
    assert disturbed == sorted(itertools.chain(*DISTURBED[key].values()))


RESUMED = (test_resuming_continues_bit_for_bit, test_one_flipped_bit_of_a_replica_is_noticed)


PLAIN = {  # on one rank: switches that a layout and its reference might both ignore
    "plain": {},
    "dropout": DROPOUT,
    "documents": DOCUMENTS,
    "bf16": {"deepspeed": "ds_configs/zero2_bf16.json"},
    "bf16 throughout": {"deepspeed": ACCUMULATING},
}


def test_the_references_learn_and_clip_and_drop_and_separate(
    references: dict[str, TrainingResult],
) -> None:
    plain, dropout, documents, bf16, throughout = (references[name].losses for name in PLAIN)
    assert max(abs(a / b - 1) for a, b in zip(documents, plain, strict=True)) > 5e-4
    assert max(abs(a / b - 1) for a, b in zip(dropout, plain, strict=True)) > 5e-4
    assert throughout != bf16
    for name, reference in references.items():
        if "expert" not in name:  # whose initial weights are larger
            assert reference.losses[0] == pytest.approx(math.log(250), rel=0.02)
            assert reference.losses[-1] < 0.998 * reference.losses[0]  # the validation loss
        if "gpt" in name:
            assert min(reference.grad_norms) > 0.5


def pairs(keys: Iterable[Key]) -> set[frozenset[str]]:
    """Return the pairs of values in the rows; the kinds of context attention count as one."""
    rows = (
        {
            f"{column} {'used' if column == 'context' and value != '-' else value}"
            for column, value in ROWS[key].items()
            if column != "more"
        }
        for key in keys
    )
    return {frozenset(pair) for row in rows for pair in itertools.combinations(row, 2)}


REJECTED = {  # pairs that the checks of a recipe reject
    *itertools.product(("model llama", "model gpt"), ("expert expert", "expert-tensor columns")),
    *(
        ("zero zero3", f"schedule {schedule}")
        for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev")
    ),
    *(("zero zero3", "expert expert"), ("zero zero3", "shards group")),
    *(("expert expert", "shards group"), ("tensor -", "expert-tensor columns")),
}


def test_the_table_has_every_pair_of_values() -> None:
    """Four of five pairs are in QUICK, and the others in LONG."""
    all_pairs = pairs(ROWS)
    for one, other in itertools.combinations(sorted(set().union(*all_pairs)), 2):
        if one.split()[0] != other.split()[0]:
            is_rejected = (one, other) in REJECTED or (other, one) in REJECTED
            assert is_rejected != (frozenset((one, other)) in all_pairs), (one, other)
    assert len(pairs(QUICK_KEYS)) > 4 / 5 * len(all_pairs)


def test_the_padding_of_a_shard_is_dropped() -> None:
    """Six values on three data ranks with four slots each: DeepSpeed never writes the padding."""
    parameter = SimpleNamespace(ds_tensor=torch.arange(4.0), ds_numel=6)
    shares = [len(held_values(parameter, data_rank)) for data_rank in range(3)]
    assert shares == [4, 2, 0]
