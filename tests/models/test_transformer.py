"""The model against transformers, and two tensor ranks against one: logits, loss and gradients."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from models import cost
from models.attention import Attention, Frequencies, ModelAxes, rotary_frequencies
from models.config import ModelConfig, RopeScaling, Window
from models.hugging_face.config import hugging_face_config
from models.hugging_face.families import Family
from models.hugging_face.weights import counterparts
from models.initialization import NormalRows, initialize, query_multiplier
from models.layer_specs import (
    SequentialModel,
    layer_specs,
    logical_parameters,
    run_layers,
)
from models.parallel.collectives import TensorAxis, gather_from_tensor_axis
from models.parallel.cross_entropy import vocab_parallel_loss
from models.parallel.micro_batch_info import Documents, MaskKey, MicroBatchInfo
from models.sharding import sharding_of
from tests.ranks import run_ranks

LLAMA = ModelConfig(
    layers=2,
    hidden_size=48,
    heads=6,
    kv_heads=2,
    ffn_hidden_size=80,
    vocab_size=151,
    sequence_length=24,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
    initial_std=0.2,  # far from flat, so that the logits tell models apart
)
SHAPES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tie_embeddings=True, rope_theta=500.0),
    "qwen3": replace(LLAMA, qk_norm=True, head_size=16, norm_epsilon=1e-6),
    "gpt2": replace(
        LLAMA,
        norm="layernorm",
        positions="learned",
        activation="gelu",
        bias=True,
        tie_embeddings=True,
        kv_heads=6,
    ),
}
STANDARD: dict[str, Any] = {"parametrization": "standard"} | dict.fromkeys(
    ("base_hidden_size", "base_layers", "base_head_size")
)
MUP: dict[str, Any] = {"parametrization": "mup", "base_hidden_size": 20}
COMPLETEP: dict[str, Any] = {
    "parametrization": "completep",
    "base_hidden_size": 20,
    "base_layers": 1,
    "base_head_size": 6,
}
PARAMETRIZED = {
    "llama, mup": replace(LLAMA, **MUP, base_head_size=5),
    "llama, tied, completep": replace(SHAPES["llama-tied"], **COMPLETEP),
    "qwen3, completep": replace(SHAPES["qwen3"], **COMPLETEP),
    "gpt2, completep": replace(SHAPES["gpt2"], **COMPLETEP),
}
SHAPES["bias-free gpt2, exact"] = replace(SHAPES["gpt2"], bias=False, activation="gelu_erf")
PLAIN_SHAPES = tuple(SHAPES)
SHAPES |= PARAMETRIZED
RECOMPUTE = {  # name -> (recompute attention cores, blocks recomputed at a time)
    "none": (False, 0),
    "selective": (True, 0),
    "full": (False, 1),
    "full, two blocks at a time": (False, 2),
}
VARIANTS = {  # of the model on two tensor ranks: recomputation, sequence parallelism
    "": ("none", False),
    "sequence-parallel": ("none", True),
    "selective": ("selective", False),
    "full, sequence-parallel": ("full", True),
}
FEW_VARIANTS = ("", "full, sequence-parallel")


def variants(shape: str) -> tuple[str, ...]:
    """Return the variants of a shape; a parametrization only scales initial weights and outputs."""
    if shape == "llama":
        return tuple(VARIANTS)
    return ("full, sequence-parallel",) if shape in PARAMETRIZED else ("", "sequence-parallel")


WITH_DROPOUT = replace(SHAPES["gpt2"], dropout=0.3, attention_dropout=0.2)
GROUPED_WITH_DROPOUT = replace(LLAMA, dropout=0.3, attention_dropout=0.2)
WINDOWED = replace(
    LLAMA,
    layers=3,
    attention_pattern=("window", "nope", "full"),
    window=Window(size=5, rope_theta=500.0),
    attention_sinks=True,
    attention_scale=0.5,
    partial_rotary_factor=0.5,
)
CAPPED = replace(
    LLAMA,
    attention_pattern=("window", "full"),
    window=Window(size=11),
    attention_soft_cap=1.5,
    parametrization="mup",
    base_hidden_size=24,
    base_head_size=4,
)
WINDOWED_WITH_DROPOUT = replace(WINDOWED, attention_soft_cap=2.0, attention_dropout=0.2)
KEY = MaskKey(seed=7, samples=range(40, 42))
DOCUMENTS = Documents(((9, 15), (4, 1, 7, 12)))
PLAIN, DROPPING = MicroBatchInfo(), MicroBatchInfo(dropout=KEY)
SEPARATE = MicroBatchInfo(documents=DOCUMENTS)
SPECIAL = {  # name -> model whose attention differs between layers, information
    "windows and sinks": (WINDOWED, PLAIN),
    "windows and sinks, documents": (WINDOWED, SEPARATE),
    "soft cap": (CAPPED, SEPARATE),
    "windows and sinks, dropout": (WINDOWED_WITH_DROPOUT, MicroBatchInfo(KEY, DOCUMENTS)),
}
MUTANTS = {  # seeded fault -> a shape on which it must show
    "copy without its all-reduce": "llama",
    "reduce without its all-reduce": "llama",
    "gather without its reduce-scatter": "llama",
    "a norm in the split region without its all-reduce": "qwen3",
    "a padded vocabulary that takes part in the loss": "llama",
    "labels found on every rank": "llama",
}

Outcome = tuple[Tensor, Tensor, dict[str, Tensor]]  # logits [b, s, v], loss, logical gradients


def run_model(
    config: ModelConfig,
    axis: TensorAxis | None = None,
    recompute: str = "none",
    info: MicroBatchInfo = PLAIN,
    *,
    weight: Callable[[str, tuple[int, ...]], Tensor] | None = None,
) -> Outcome:
    """Run a forward and a backward pass; return results gathered from the tensor ranks.

    weight: returns the logical tensor of a name and a shape; None: the usual initial weights
    """
    axis = axis or TensorAxis()
    cores, interval = RECOMPUTE[recompute]
    model = SequentialModel(
        layer_specs(config, ModelAxes(tensor=axis), recompute_core=cores),
        recompute_interval=interval,
    )
    parameters = dict(logical_parameters(model, config))
    if weight is None:
        initialize(parameters.items(), config, seed=3, tensor=axis)
    else:
        for name, p in parameters.items():
            p.data.copy_(sharding_of(p).local_part(weight(name, sharding_of(p).shape), axis))
    tokens = example_tokens(config)
    loss = model(tokens, labels_of(tokens), info)
    loss.backward()
    with torch.no_grad():
        logits = run_layers(model.layers, tokens, info=info)
    whole = gather_from_tensor_axis(logits, axis)[..., : config.vocab_size]
    gradients = {name: gathered(p.grad, sharding_of(p), axis) for name, p in parameters.items()}
    return whole.transpose(0, 1), loss.detach(), gradients


def example_tokens(config: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab_size, (2, config.sequence_length), generator=generator)


def labels_of(tokens: Tensor) -> Tensor:
    return tokens.roll(-1, dims=1)


def gathered(part: Tensor, sharding, axis: TensorAxis) -> Tensor:
    if axis.size == 1:
        return sharding.logical_tensor([part])
    parts = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(parts, part.contiguous(), group=axis.group)
    return sharding.logical_tensor(parts)


def two_rank_worker() -> dict[Any, Outcome]:
    """Run every shape in every variant, and every mutant, on two tensor ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cost.MAX_LOGITS["cpu"] = 1000  # of 12 tokens at a time
    cases: dict[Any, tuple[ModelConfig, MicroBatchInfo]] = {
        (shape, variant): (config, PLAIN)
        for shape, config in SHAPES.items()
        for variant in variants(shape)
    }
    for variant in FEW_VARIANTS:
        cases |= {
            (shape, variant, "documents"): (SHAPES[shape], SEPARATE) for shape in PLAIN_SHAPES
        }
        cases |= {(c, variant): (c, DROPPING) for c in (WITH_DROPOUT, GROUPED_WITH_DROPOUT)}
        cases |= {(name, variant): case for name, case in SPECIAL.items()}
    outcomes: dict[Any, Outcome] = {}
    for key, (config, info) in cases.items():
        recompute, split = VARIANTS[key[1]]
        axis = TensorAxis(dist.group.WORLD, dist.get_rank(), 2, split)
        outcomes[key] = run_model(config, axis, recompute, info)
    for fault, shape in MUTANTS.items():
        with seeded_fault(fault):
            axis = TensorAxis(dist.group.WORLD, dist.get_rank(), 2, "gather" in fault)
            outcomes["mutant", fault] = run_model(SHAPES[shape], axis)
    dist.barrier()
    return outcomes if os.environ["RANK"] == "0" else {}


@contextlib.contextmanager
def seeded_fault(fault: str) -> Iterator[None]:
    """Break the model in one way."""
    collectives = "models.parallel.collectives"
    faults: dict[str, dict[str, Any]] = {
        "copy without its all-reduce": {
            "models.parallel.layers.begin_sum_of_copies": lambda grad, axis: lambda: grad
        },
        "reduce without its all-reduce": {
            f"{collectives}._Reduce.forward": staticmethod(lambda ctx, x, axis: x.clone())
        },
        "gather without its reduce-scatter": {
            "models.parallel.layers.begin_sum_of_copies": (
                lambda x, axis: lambda: x.chunk(2)[axis.rank].contiguous()
            )
        },
        "a norm in the split region without its all-reduce": {
            "models.parallel.layers.copy_to_tensor_axis": lambda x, axis: x
        },
        "a padded vocabulary that takes part in the loss": {
            "models.layer_specs.vocab_parallel_loss": (
                lambda *tensors, vocab_size, **rest: vocab_parallel_loss(
                    *tensors, vocab_size=10**6, **rest
                )
            )
        },
        "labels found on every rank": {
            "models.parallel.layers.VocabParallelEmbedding.embed": (
                lambda self, tokens: torch.nn.functional.embedding(
                    tokens.t() % self.weight.shape[0], self.weight
                )
            )
        },
    }
    with contextlib.ExitStack() as stack:
        for target, broken in faults[fault].items():
            stack.enter_context(mock.patch(target, broken))
        yield


@functools.cache
def reference(config: ModelConfig, documents: Documents | None = None) -> Outcome:
    """Return the results of transformers with the same weights, with gradients under our names.

    documents: True runs each document alone
    """
    keywords = hugging_face_config(config)
    theirs = AutoConfig.for_model(**keywords, attn_implementation="eager")
    theirs.pad_token_id = None  # the embedding of a padding token would have no gradient
    model = AutoModelForCausalLM.from_config(theirs).eval()
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert keywords.get(key, 0) == 0
    ours = SequentialModel(layer_specs(config))
    parameters = dict(logical_parameters(ours, config))
    initialize(parameters.items(), config, seed=3)
    weights = {
        name: sharding_of(p).logical_tensor([p.detach()]).clone() for name, p in parameters.items()
    }
    missing, unexpected = model.load_state_dict(to_hugging_face(config, weights), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    tokens = example_tokens(config)
    lengths = documents.lengths if documents else ((config.sequence_length,),) * len(tokens)
    logits = torch.stack(
        [
            torch.cat([model(document[None]).logits[0] for document in row.split(each)])
            for row, each in zip(tokens, lengths, strict=True)
        ]
    )
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_of(tokens).flatten())
    loss.backward()
    gradients = {name: torch.as_tensor(p.grad) for name, p in model.named_parameters()}
    return logits.detach(), loss.detach(), gradients_from_hugging_face(config, gradients)


def to_hugging_face(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split our logical tensors, and multiply them by the model's multipliers.

    They may be weights, or without multipliers other tensors of the same shapes.
    """
    theirs: dict[str, Tensor] = {}
    for name, counterpart in counterparts(config).items():
        for their_name, tensor in counterpart.split(tensors[name]):
            if counterpart.expert is None:
                theirs[their_name] = tensor
            else:
                number, count = counterpart.expert
                joined = theirs.setdefault(their_name, tensor.new_empty(count, *tensor.shape))
                joined[number] = tensor
    return theirs


def from_hugging_face(
    config: ModelConfig, theirs: Mapping[str, Tensor], family: Family | None = None
) -> dict[str, Tensor]:
    """Join and rename transformers' tensors into our logical tensors.

    family: the class that has the tensors; None: the one that an export uses
    """
    return {
        name: counterpart.join(
            theirs[part] if counterpart.expert is None else theirs[part][counterpart.expert[0]]
            for part in counterpart.names
        )
        for name, counterpart in counterparts(config, family).items()
    }


def gradients_from_hugging_face(
    config: ModelConfig, theirs: Mapping[str, Tensor], family: Family | None = None
) -> dict[str, Tensor]:
    """Return gradients under our names: where their weight is m times ours, m times theirs."""
    gradients = from_hugging_face(config, theirs, family)  # divided by m, like weights
    for name, each in counterparts(config, family).items():
        gradients[name] = gradients[name] - each.offset / each.multiplier
        gradients[name][: each.multiplied_rows] *= each.multiplier**2
    return gradients


def largest_difference(one: Outcome, other: Outcome) -> float:
    """Return the largest relative difference of logits, loss and gradients.

    It is relative to the largest entry of each tensor. The exact gradient of a key's bias is zero,
    because softmax ignores it; its tensor also has the query's bias, whose gradient is larger.
    """
    assert one[2].keys() == other[2].keys()
    differences = {"logits": relative(one[0], other[0]), "loss": relative(one[1], other[1])}
    differences |= {name: relative(one[2][name], other[2][name]) for name in one[2]}
    worst = max(differences, key=differences.__getitem__)
    print(f"largest difference: {worst}")  # pytest shows it if the test fails
    return differences[worst]


def relative(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest entry; 0 if both are zero."""
    assert one.shape == other.shape
    if not one.any() and not other.any():
        return 0.0
    return float((one - other).abs().max() / other.abs().max())


@pytest.fixture(scope="module")
def plain() -> dict[str, Outcome]:
    return {shape: run_model(config) for shape, config in SHAPES.items()}


@pytest.fixture(scope="module")
def two_ranks() -> dict[Any, Outcome]:
    return run_ranks(2, two_rank_worker)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_agrees_with_transformers(shape: str, plain: dict[str, Outcome]) -> None:
    assert largest_difference(plain[shape], reference(SHAPES[shape])) < 1e-5


@pytest.mark.parametrize("shape", PLAIN_SHAPES)
def test_separate_documents_are_as_if_each_were_alone(
    shape: str, two_ranks: dict[Any, Outcome], plain: dict[str, Outcome]
) -> None:
    expected = reference(SHAPES[shape], DOCUMENTS)
    assert largest_difference(run_model(SHAPES[shape], info=SEPARATE), expected) < 1e-5
    for variant in FEW_VARIANTS:
        assert largest_difference(two_ranks[shape, variant, "documents"], expected) < 1e-5
    assert largest_difference(plain[shape], expected) > 1e-2


@pytest.mark.parametrize(
    ("shape", "variant"), [(shape, variant) for shape in SHAPES for variant in variants(shape)]
)
def test_two_tensor_ranks_agree_with_transformers(
    shape: str, variant: str, two_ranks: dict[Any, Outcome]
) -> None:
    assert largest_difference(two_ranks[shape, variant], reference(SHAPES[shape])) < 1e-5


@pytest.mark.parametrize(("fault", "shape"), MUTANTS.items())
def test_a_seeded_fault_is_noticed(
    fault: str, shape: str, two_ranks: dict[Any, Outcome], plain: dict[str, Outcome]
) -> None:
    assert not largest_difference(two_ranks["mutant", fault], plain[shape]) < 1e-3


@pytest.mark.parametrize("variant", FEW_VARIANTS)
@pytest.mark.parametrize("config", [WITH_DROPOUT, GROUPED_WITH_DROPOUT])
def test_two_ranks_drop_what_one_rank_drops(
    config: ModelConfig, variant: str, two_ranks: dict[Any, Outcome]
) -> None:
    assert largest_difference(two_ranks[config, variant], run_model(config, info=DROPPING)) < 1e-5


@pytest.mark.parametrize("name", SPECIAL)
def test_two_ranks_agree_on_attention_that_differs_between_layers(
    name: str, two_ranks: dict[Any, Outcome]
) -> None:
    config, info = SPECIAL[name]
    expected = run_model(config, info=info)
    assert expected[2]["blocks.0.attention.qkv.weight"].any()
    for variant in FEW_VARIANTS:
        assert largest_difference(two_ranks[name, variant], expected) < 1e-5, variant


def test_each_kind_of_attention_has_its_rotary_frequencies() -> None:
    scaling = RopeScaling(type="linear", factor=8.0)
    config = replace(WINDOWED, rope_scaling=scaling, rope_theta=1e6)
    full = Frequencies(4, 1e6, scaling)  # half of the columns of a head
    assert rotary_frequencies(config, "nope") is None
    assert rotary_frequencies(config, "full") == full
    assert rotary_frequencies(config, "window") == Frequencies(4, 500.0, scaling)
    unscaled = replace(config, window=Window(size=5, rope_scaled=False))
    assert rotary_frequencies(unscaled, "window") == Frequencies(4, 1e6)
    blocks = [Attention(config, ModelAxes(), name="", kind=kind) for kind in ("window", "full")]
    assert [block.has_table_of_its_own for block in blocks] == [True, False]


def test_the_scale_of_the_scores_replaces_that_of_the_head_size() -> None:
    assert query_multiplier(WINDOWED) * 8**-0.5 == pytest.approx(0.5)
    mup = replace(CAPPED, attention_scale=0.25)  # whose base model has heads of four columns
    assert query_multiplier(mup) * 8**-0.5 == pytest.approx(0.25 * (4 / 8) ** 0.5)
    for config in (WINDOWED, CAPPED):
        assert (
            largest_difference(run_model(replace(config, attention_scale=0.7)), run_model(config))
            > 1e-3
        )


@pytest.mark.parametrize("recompute", ["selective", "full", "full, two blocks at a time"])
def test_recomputation_changes_nothing(recompute: str) -> None:
    config = replace(LLAMA, layers=3)
    outcome = run_model(config, recompute=recompute)
    assert largest_difference(outcome, run_model(config)) == 0


@pytest.mark.parametrize("recompute", ["selective", "full", "full, two blocks at a time"])
def test_recomputation_replays_the_dropout_mask(recompute: str) -> None:
    config = replace(WITH_DROPOUT, layers=3)
    outcome = run_model(config, info=DROPPING)
    replayed = run_model(config, recompute=recompute, info=DROPPING)
    assert largest_difference(replayed, outcome) == 0


def test_masks_depend_on_seed_and_samples_and_are_optional() -> None:
    outcome = run_model(WITH_DROPOUT, info=DROPPING)
    others = [replace(KEY, seed=8), replace(KEY, samples=range(41, 43)), None]
    for info in map(MicroBatchInfo, others):
        assert largest_difference(run_model(WITH_DROPOUT, info=info), outcome) > 1e-3
    plain = replace(WITH_DROPOUT, dropout=0.0, attention_dropout=0.0)
    unmasked = run_model(WITH_DROPOUT)
    assert largest_difference(unmasked, run_model(plain, info=DROPPING)) == 0


def test_the_first_weights_have_the_stated_spread() -> None:
    config = replace(LLAMA, layers=3, hidden_size=480, ffn_hidden_size=800, initial_std=0.02)
    model = SequentialModel(layer_specs(config))
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=1)
    scaled = 0.02 / 6**0.5  # GPT-2: over the square root of the residual layers
    for name, std in {
        "blocks.0.attention.qkv.weight": 0.02,
        "blocks.0.mlp.up.weight": 0.02,
        "blocks.2.attention.output.weight": scaled,
        "blocks.2.mlp.down.weight": scaled,
        "head.weight": 0.02,
    }.items():
        rows = parameters[name].detach()[: config.vocab_size if name == "head.weight" else None]
        assert float(rows.std()) == pytest.approx(std, rel=0.02), name
    assert torch.equal(parameters["final_norm.weight"], torch.ones(480))
    assert not torch.equal(*(parameters[f"blocks.{i}.mlp.up.weight"] for i in (0, 1)))


def test_the_first_weights_depend_on_seed_and_name_alone() -> None:
    draws = [
        NormalRows((7, 5), name=name, seed=seed)(0, 7)
        for name, seed in (("a", 1), ("a", 1), ("b", 1), ("a", 2))
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[3])
