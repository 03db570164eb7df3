"""One loss: the same recipe in every layout trains with the same losses, norms and weights.

`recipes/prove.py` runs all valid layouts. These tests run some of each kind and the cases that it
leaves out: bf16, clipping at every step, resuming, diverging replicas.
"""

import json
import math
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.proving.compare import Outcome
from recipes.proving.layouts import ProofCase
from recipes.proving.relay import load_newest, save
from recipes.proving.trial import start, train_step, try_cases
from recipes.training.data.dataset import TrainingData
from recipes.training.engine.engine import Engine, held_values
from recipes.training.recipe.deepspeed_config import build_deepspeed_config, zero_stage
from recipes.training.recipe.loading import parse_recipe
from recipes.training.recipe.topology import World
from recipes.training.run_folder.folder import RunFolder
from tests.conftest import GPT_SWITCHES, changed, small_recipe
from tests.ranks import join_world, run_ranks

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
THREE_CHUNKS = INTERLEAVED | {"layout__chunks": 3}
SEVEN = {"model__layers": 7}  # an odd number, and enough for three chunks of two stages
FULL = {"layout__recompute": "full", "layout__recompute_interval": 2}
CLIPPED = {"optimizer__gradient_clipping": 0.5}  # below every norm of the run
DROPOUT = {"model__dropout": 0.1, "model__attention_dropout": 0.1}
DROPPING_GPT = GPT | CLIPPED | DROPOUT
DOCUMENTS = {"data__separate_documents": True}
EXPERTS = {
    "model__experts": {
        "count": 8, "per_token": 2, "ffn_hidden_size": 24, "shared": 2, "dense_layers": 1,
        "normalize": True, "balance_loss": 0.1, "z_loss": 0.01,
    },
    "model__initial_std": 0.1,  # so that the tokens of a sequence use different experts
}  # fmt: skip
EXPERT2 = {"layout__expert": 2}
OVERLAP = EXPERT2 | {"layout__expert_overlap": True, "batch__micro_sequences": 1}
COLUMNS2 = TENSOR2 | {"layout__expert_tensor_parallel": True}
BF16 = {"deepspeed": "ds_configs/zero1_bf16.json"}
ACCUMULATING_BF16 = {"deepspeed": "zero1_bf16_throughout.json"}  # the test writes it

# world size -> name -> changes from the run on one rank that it is compared with
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "zero2, alone": ZERO2,
        "zero3": ZERO3,
        "micro-batch 4": {"batch__micro_sequences": 4},
        "full recomputation": FULL,
        "gpt zero3": GPT | CLIPPED | ZERO3,
        "dropout zero3, micro-batch 4": DROPOUT | ZERO3 | {"batch__micro_sequences": 4},
        "experts zero3, micro-batch 4, full recomputation": EXPERTS
        | ZERO3
        | FULL
        | {"batch__micro_sequences": 4},
    },
    2: {
        "pipeline 2": PIPELINE2,
        "tensor 2": TENSOR2,
        "data 2": {},
        "tensor 2 sequence-parallel": TENSOR2 | SEQUENCE,
        "zero2 data 2": ZERO2,
        "zero3 data 2": ZERO3,
        "zero2, alone, tensor 2": ZERO2 | TENSOR2,
        "zero3 tensor 2": ZERO3 | TENSOR2,
        "gpt pipeline 2": GPT | CLIPPED | PIPELINE2,
        "gpt tensor 2": GPT | CLIPPED | TENSOR2,
        "gpt zero3 data 2": GPT | CLIPPED | ZERO3,
        "gpt dualpipev": GPT | CLIPPED | FOLDED,
        "gpt interleaved": GPT | CLIPPED | INTERLEAVED,
        "seven interleaved x 3": SEVEN | DROPPING_GPT | THREE_CHUNKS,
        "seven zb-v full recomputation": SEVEN | DROPPING_GPT | ZB_V | FULL,
        "seven zb-h1, dealt by hand": SEVEN
        | DROPPING_GPT
        | ZB_H1
        | {"layout__layers_per_stage": [6, 1], "batch__micro_sequences": 1},
        "zb-h1": ZB_H1,
        "dropout pipeline 2": DROPOUT | PIPELINE2,
        "dropout dualpipev full recomputation": DROPOUT | FOLDED | FULL,
        "dropout zero2 data 2": DROPOUT | ZERO2,
        "dropout tensor 2": DROPOUT | TENSOR2,
        "dropout zero3 tensor 2 sequence-parallel": DROPOUT | ZERO3 | TENSOR2 | SEQUENCE,
        "documents-gpt dualpipev full recomputation": DOCUMENTS | DROPPING_GPT | FOLDED | FULL,
        "documents-gpt zero3 tensor 2 sequence-parallel": DOCUMENTS
        | DROPPING_GPT
        | ZERO3
        | TENSOR2
        | SEQUENCE,
        "experts expert 2": EXPERTS | EXPERT2,
        "experts tensor 2": EXPERTS | TENSOR2,
        "experts tensor 2 sequence-parallel selective": EXPERTS
        | TENSOR2
        | SEQUENCE
        | {"layout__recompute": "selective"},
        "experts expert tensor 2": EXPERTS | COLUMNS2,
        "experts zero3 expert tensor 2": EXPERTS | COLUMNS2 | ZERO3,
        "experts zero3 tensor 2 full recomputation": EXPERTS | TENSOR2 | ZERO3 | FULL,
        "experts zero2 data 2": EXPERTS | ZERO2,
        "bf16-experts expert 2": BF16 | EXPERTS | EXPERT2,
        "bf16 pipeline 2": BF16 | PIPELINE2,
        "bf16 tensor 2 sequence-parallel": BF16 | TENSOR2 | SEQUENCE,
        "bf16 data 2": BF16,
        "bf16 zero2 data 2": {"deepspeed": "ds_configs/zero2_bf16.json"},
        "shard group 1": {"layout__shard_group": 1},
        "bf16-gpt zero2 data 2, shard group 1": GPT
        | CLIPPED
        | {"deepspeed": "ds_configs/zero2_bf16.json", "layout__shard_group": 1},
        "bf16 zero3 data 2": {"deepspeed": "ds_configs/zero3_bf16.json"},
        "bf16 dualpipev": BF16 | FOLDED,
        "bf16 interleaved": BF16 | INTERLEAVED,
        "bf16-gpt zb-v": BF16 | GPT | CLIPPED | ZB_V,
        "bf16-gpt zb-h1, accumulating in bf16": ACCUMULATING_BF16 | GPT | CLIPPED | ZB_H1,
        "bf16-gpt pipeline 2": BF16 | GPT | CLIPPED | PIPELINE2,
        "bf16-gpt pipeline 2, accumulating in bf16": ACCUMULATING_BF16 | GPT | CLIPPED | PIPELINE2,
    },
    4: {
        "pipeline 2 tensor 2": PIPELINE2 | TENSOR2,
        "pipeline 2 data 2": PIPELINE2,
        "pipeline 2 tensor 2 sequence-parallel selective": PIPELINE2
        | TENSOR2
        | SEQUENCE
        | {"layout__recompute": "selective"},
        "dualpipev tensor 2 sequence-parallel": FOLDED | TENSOR2 | SEQUENCE,
        "gpt interleaved tensor 2": GPT | CLIPPED | INTERLEAVED | TENSOR2,
        "gpt zb-v data 2": GPT | CLIPPED | ZB_V,
        "zb-h1 tensor 2 sequence-parallel": ZB_H1 | TENSOR2 | SEQUENCE,
        "bf16-gpt interleaved data 2": BF16 | GPT | CLIPPED | INTERLEAVED,
        "bf16 zb-h1 pipeline 4": BF16 | ZB_H1 | {"layout__pipeline": 4},
        "zero2 tensor 2 data 2": ZERO2 | TENSOR2,
        "dropout zero2 shard group 2": DROPOUT | ZERO2 | {"layout__shard_group": 2},
        "gpt pipeline 2 tensor 2 sequence-parallel": GPT | CLIPPED | PIPELINE2 | TENSOR2 | SEQUENCE,
        "dropout pipeline 2 tensor 2 sequence-parallel selective": DROPOUT
        | PIPELINE2
        | TENSOR2
        | SEQUENCE
        | {"layout__recompute": "selective"},
        "experts zb-v expert 2": EXPERTS | ZB_V | EXPERT2,
        "experts zb-h1 tensor 2 sequence-parallel": EXPERTS | ZB_H1 | TENSOR2 | SEQUENCE,
        "experts tensor 2 expert 2": EXPERTS | TENSOR2 | EXPERT2,
        "experts expert 2 expert tensor 2": EXPERTS | COLUMNS2 | EXPERT2,
        "experts interleaved expert overlap": EXPERTS | INTERLEAVED | OVERLAP,
        "experts dualpipev expert overlap full recomputation": EXPERTS | FOLDED | OVERLAP | FULL,
        "experts zb-h1 expert tensor 2 sequence-parallel": EXPERTS | ZB_H1 | COLUMNS2 | SEQUENCE,
        "experts context 2 expert 2 expert tensor 2": EXPERTS
        | COLUMNS2
        | EXPERT2
        | {"layout__context": 2, "layout__recompute": "full"},
        "experts context 2 expert 4": EXPERTS | {"layout__context": 2, "layout__expert": 4},
        "bf16-experts interleaved expert 2": BF16 | EXPERTS | INTERLEAVED | EXPERT2,
        "documents pipeline 4": DOCUMENTS | {"layout__pipeline": 4},
        "documents dualpipev tensor 2 sequence-parallel selective": DOCUMENTS
        | FOLDED
        | TENSOR2
        | SEQUENCE
        | {"layout__recompute": "selective"},
    },
}
REFERENCES = {
    "": {},
    "gpt": GPT | CLIPPED,
    "dropout": DROPOUT,
    "documents": DOCUMENTS,
    "documents-gpt": DOCUMENTS | DROPPING_GPT,
    "seven": SEVEN | DROPPING_GPT,
    "bf16": BF16,
    "bf16-gpt": BF16 | GPT | CLIPPED,
    "experts": EXPERTS,
    "bf16-experts": BF16 | EXPERTS,
}
QUICK = {  # each engine, axis, ZeRO stage, precision and schedule once; the others are long
    1: ("gpt zero3", "dropout zero3, micro-batch 4"),
    2: (
        "data 2",
        "tensor 2 sequence-parallel",
        "zero2 data 2",
        "zero3 tensor 2",
        "gpt dualpipev",
        "seven interleaved x 3",
        "seven zb-h1, dealt by hand",
        "dropout pipeline 2",
        "documents-gpt zero3 tensor 2 sequence-parallel",
        "bf16 data 2",
        "bf16-gpt zb-v",
        "bf16-gpt pipeline 2",
        "bf16-gpt pipeline 2, accumulating in bf16",
        "experts expert 2",
        "experts tensor 2 sequence-parallel selective",
        "bf16-experts expert 2",
        "experts expert tensor 2",
    ),
    4: (
        "experts zb-v expert 2",
        "experts tensor 2 expert 2",
        "experts expert 2 expert tensor 2",
        "experts interleaved expert overlap",
        "gpt zb-v data 2",
        "zero2 tensor 2 data 2",
        "dropout zero2 shard group 2",
        "dropout pipeline 2 tensor 2 sequence-parallel selective",
        "documents dualpipev tensor 2 sequence-parallel selective",
    ),
}
CASES = [
    pytest.param(size, name, marks=[] if name in QUICK[size] else pytest.mark.long)
    for size, layouts in LAYOUTS.items()
    for name in layouts
]


def case(corpus: Path, world_size: int, changes: dict[str, Any]) -> ProofCase:
    """Return the case of the small recipe with changes, on `world_size` ranks."""
    settings = {
        "model__layers": 4,  # two for each stage, chunk or group of recomputed blocks
        "training__steps": 6,  # the learning rate warms up for five of them
        "training__evaluate_every": 6,
    }
    recipe = parse_recipe(changed(small_recipe(corpus), **(settings | changes)), "test")
    topology = recipe.topology(World(size=world_size, local_size=world_size))
    return ProofCase(recipe, topology, zero_stage(build_deepspeed_config(recipe, topology)))


def train_worker(corpus: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    """Return the outcome of every layout."""
    size = int(os.environ["WORLD_SIZE"])
    cases = [case(Path(corpus), size, changes) for changes in layouts.values()]
    return dict(zip(layouts, try_cases(cases), strict=True))


def resume_worker(corpus: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train and save after step 2; load the checkpoint into a new engine and continue."""
    world = join_world()
    results: dict[str, Any] = {}
    for name, changes in layouts.items():
        this = case(Path(corpus), world.size, changes)
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        engine, data = start(this.recipe, world)
        train_steps(engine, data, range(1, 3))
        save(engine, data, RunFolder(Path(folders[0])), step=2)
        undisturbed = train_steps(engine, data, range(3, 5))
        dist.barrier()
        again, data = start(this.recipe, world)
        assert load_newest(again, data, RunFolder(Path(folders[0]))) == 2
        results[name] = (undisturbed, train_steps(again, data, range(3, 5)))
    dist.barrier()
    return results


def drift_worker(corpus: str, layouts: dict[str, dict[str, Any]]) -> dict[str, list[list[str]]]:
    """Return the reports of diverged replicas: after a step, then with a rank's weights changed."""
    world = join_world()
    results = {}
    for name, changes in layouts.items():
        engine, data = start(case(Path(corpus), world.size, changes).recipe, world)
        train_steps(engine, data, range(1, 2))
        sentences = [engine.differing_replicas()]
        for disturbed, parameter in engine.parameters():
            if world.rank == 1 and disturbed in DISTURBED[name]:
                flip_a_bit(held_values(parameter, data_rank=0).data)
        sentences.append(engine.differing_replicas())
        results[name] = sentences
    dist.barrier()
    return results


def flip_a_bit(values: torch.Tensor) -> None:
    """Flip the lowest bit of the last value."""
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    bits.view(-1)[-1] ^= 1


DISTURBED = {  # change on rank 1, in layouts of two ranks -> expected reports
    "tensor 2": {
        "blocks.1.mlp_norm.weight": "blocks.1.mlp_norm.weight differs between tensor ranks: "
        "rank 0 against rank 1",
        "blocks.1.mlp.up.weight": None,  # split: no other rank has a replica
    },
    "zero3 tensor 2": {
        "final_norm.weight": "final_norm.weight differs between tensor ranks: rank 0 against rank 1"
    },
    "data 2": {
        "blocks.0.mlp.up.weight": "blocks.0.mlp.up.weight differs between data ranks: rank 0 "
        "against rank 1",
        "head.weight": "head.weight differs between data ranks: rank 0 against rank 1",
    },
    "experts expert 2": {
        "blocks.1.mlp.router.weight": "blocks.1.mlp.router.weight differs between data ranks: rank "
        "0 against rank 1",
        "blocks.1.mlp.experts.up_5": None,  # no other rank has this expert
    },
    "experts expert tensor 2": {
        "blocks.1.mlp_norm.weight": "blocks.1.mlp_norm.weight differs between tensor ranks: rank 0 "
        "against rank 1",
        "blocks.1.mlp.experts.up_5": None,  # split
    },
    "bf16 gpt pipeline 2": {
        "embedding.weight": "embedding.weight differs between stages: rank 0 against rank 1"
    },
}


def train_steps(engine: Engine, data: TrainingData, steps: range) -> list[tuple[float, float]]:
    results = [train_step(engine, data, step) for step in steps]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.fixture(scope="session")
def layout_corpus(corpus: Path) -> Path:
    """Return the folder of the small corpus and of the files that the layouts name."""
    config = json.loads(Path("ds_configs/zero1_bf16.json").read_text())
    del config["data_types"]["grad_accum_dtype"]
    (corpus / ACCUMULATING_BF16["deepspeed"]).write_text(json.dumps(config))
    return corpus


def located(corpus: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return layouts whose DeepSpeed config, if this test has written it, is named by its path."""
    own = ACCUMULATING_BF16["deepspeed"]
    return {
        name: changes | ({"deepspeed": str(corpus / own)} if own in changes.values() else {})
        for name, changes in layouts.items()
    }


@pytest.fixture(scope="session")
def references(layout_corpus: Path) -> dict[str, Outcome]:
    return run_ranks(1, train_worker, str(layout_corpus), REFERENCES)[0]


@pytest.fixture(scope="session")
def trained(layout_corpus: Path, request: pytest.FixtureRequest) -> dict[tuple[int, str], Outcome]:
    """Return the outcomes of the selected tests' layouts, with one world per world size."""
    marks = [
        mark.kwargs["layouts"]
        for item in request.session.items
        for mark in item.iter_markers("trains")
    ]
    parameters = [
        item.callspec.params
        for item in request.session.items
        if getattr(item, "originalname", "") == test_losses_are_those_of_one_rank.__name__
    ]
    selected = {(each["world_size"], each["name"]) for each in parameters}.union(*marks)
    return {
        (size, name): outcome
        for size, layouts in LAYOUTS.items()
        if (wanted := {n: each for n, each in layouts.items() if (size, n) in selected})
        for name, outcome in run_ranks(
            size, train_worker, str(layout_corpus), located(layout_corpus, wanted)
        )[0].items()
    }


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_losses_are_those_of_one_rank(
    world_size: int,
    name: str,
    trained: dict[tuple[int, str], Outcome],
    references: dict[str, Outcome],
) -> None:
    first = name.split()[0]
    expected = references[first if first in references else ""]
    got = trained[world_size, name]
    loss, norm = (2e-3, 2e-2) if first.startswith("bf16") else (1e-5, 1e-4)  # bf16 has 8 bits
    assert got.losses == pytest.approx(expected.losses, rel=loss)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=norm)
    assert got.drifted == []
    if first == "experts":
        assert got.expert_counts == expected.expert_counts
    for weight, values in expected.weights.items():
        distance = float((got.weights[weight] - values).norm() / values.norm().clamp(min=1e-6))
        assert first.startswith("bf16") or weight.endswith("bias") or distance < 1e-3, weight


def test_the_references_learn_and_clip_and_drop_and_separate(
    references: dict[str, Outcome],
) -> None:
    for name, reference in references.items():
        if not name.endswith("experts"):  # whose initial weights are larger
            assert reference.losses[0] == pytest.approx(math.log(250), rel=0.02)
        assert reference.losses[-2] < 0.985 * reference.losses[0]  # after a warm-up and one step
    assert min(references["gpt"].grad_norms) > 0.5
    apart = zip(references["documents"].losses, references[""].losses, strict=True)
    assert max(abs(separate / across - 1) for separate, across in apart) > 5e-4
    assert references["dropout"].losses[-2] > 1.001 * references[""].losses[-2]


THROUGHOUT = [(2, "bf16-gpt pipeline 2"), (2, "bf16-gpt pipeline 2, accumulating in bf16")]


@pytest.mark.trains(layouts=THROUGHOUT)
def test_bf16_throughout_is_another_path(trained: dict[tuple[int, str], Outcome]) -> None:
    fp32, bf16 = (trained[each] for each in THROUGHOUT)
    assert fp32.losses != bf16.losses


def test_resuming_continues_bit_for_bit(corpus: Path) -> None:
    layouts = {
        "pipeline 2": PIPELINE2,
        "bf16": BF16 | PIPELINE2,
        "zero2": ZERO2,
        "zero2, shard group 1": ZERO2 | {"layout__shard_group": 1},
        "zero3, gpt with dropout": GPT | ZERO3 | DROPOUT,
        "gpt with dropout": GPT | PIPELINE2 | DROPOUT,
        "tensor 2, gpt with dropout": GPT | TENSOR2 | DROPOUT,
        "dualpipev": FOLDED,
        "interleaved": INTERLEAVED,
        "bf16 zb-v": BF16 | ZB_V,
        "bf16 experts": BF16 | EXPERTS | EXPERT2,
        "bf16 expert tensor 2": BF16 | EXPERTS | COLUMNS2,
    }
    results = run_ranks(2, resume_worker, str(corpus), layouts)[0]
    for name, (undisturbed, resumed) in results.items():
        assert resumed == undisturbed, name


@pytest.fixture(scope="session")
def drifted(corpus: Path) -> dict[str, list[list[str]]]:
    layouts = {
        "tensor 2": TENSOR2,
        "zero3 tensor 2": ZERO3 | TENSOR2,
        "data 2": {},
        "experts expert 2": EXPERTS | EXPERT2,
        "experts expert tensor 2": EXPERTS | COLUMNS2,
        "bf16 gpt pipeline 2": BF16 | GPT | PIPELINE2,
    }
    results = run_ranks(2, drift_worker, str(corpus), layouts)
    assert results[0] == results[1]  # every rank knows, so that all stop
    return results[0]


@pytest.mark.parametrize("name", DISTURBED)
def test_one_flipped_bit_of_a_replica_is_noticed(
    name: str, drifted: dict[str, list[list[str]]]
) -> None:
    after_a_step, disturbed = drifted[name]
    assert after_a_step == []
    assert disturbed == sorted(filter(None, DISTURBED[name].values()))


def test_the_padding_of_a_shard_is_dropped() -> None:
    """Six values on three data ranks with four slots each: DeepSpeed never writes the padding."""
    parameter = SimpleNamespace(ds_tensor=torch.arange(4.0), ds_numel=6)
    shares = [len(held_values(parameter, data_rank)) for data_rank in range(3)]
    assert shares == [4, 2, 0]
