"""The proof: shrinking, valid layouts, comparison, detection of faults, and reports."""

import argparse
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from models.attention import rotary_table
from models.context_parallel.tiles import Tile, tiles_of
from models.errors import UserError
from models.initialization import depth_ratio, query_multiplier, width_ratio
from models.kernels.attention_parts import Limits, merge_sinks
from models.layer_specs import SequentialModel, layer_specs, logical_parameters, run_layers
from models.parallel.collectives import TensorAxis
from models.parallel.layers import Deferral
from models.parallel.micro_batch_info import MicroBatchInfo, attention_rows
from models.sharding import MatrixPart, Sharding
from tests.conftest import GPT_SWITCHES, changed, each_in_turn, shipped_recipes, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.checkpoint.state import AVERAGE, WEIGHTS
from threefold.commands import prove
from threefold.config.loading import REPOSITORY, load_recipe, parse_recipe
from threefold.config.parallel_dims import ParallelDims
from threefold.config.recipe import Recipe
from threefold.data.dataset import TrainingData
from threefold.engine.build import build_from_recipe
from threefold.engine.deepspeed_overrides import sum_of_squares
from threefold.engine.engine import Engine
from threefold.engine.experts import is_marked
from threefold.engine.muon_exchange import MatrixExchange, update_scale
from threefold.engine.optimizer import Muon, orthogonalize
from threefold.pipeline.gradients import FlatGradients, ShardedReduction
from threefold.pipeline.stage import Stage
from threefold.prove import compare as compare_module
from threefold.prove import layouts as layouts_module
from threefold.prove import picture, training
from threefold.prove import ranks as proof_ranks
from threefold.prove.compare import (
    BAND_FACTOR,
    MIN_BAND,
    PERTURBED_RUNS,
    Quantity,
    TrainingResult,
    compare,
    derive_bands,
)
from threefold.prove.layouts import (
    ProofCase,
    only,
    perturbed,
    reference,
    sample,
    settings_beyond,
    simpler,
    valid_cases,
)
from threefold.prove.naming import Cause, first_difference, smallest, tensor_difference
from threefold.prove.ranks import run_cases
from threefold.prove.recording import next_float
from threefold.prove.report import CaseResult, as_json, failures, table, table_of_bands, verdict
from threefold.prove.shrink import larger_micro_batch, shrink, write_corpus
from threefold.prove.training import logical_state, start, train_cases, train_step
from threefold.runtime import exits
from threefold.runtime.ranks import CPU_VARIABLES

SHIPPED = shipped_recipes()
MARKS = {"odd": [pytest.mark.exhaustive], "gpt with dropout": [pytest.mark.long]}
UNSEEN = {  # recipes that are not shipped; each is proven in the layouts of two ranks
    "odd": {
        "model__layers": 5,
        "model__vocab_size": 251,
        "model__heads": 6,
        "model__kv_heads": 2,
        "model__hidden_size": 66,
        "model__head_size": 10,
        "model__qk_norm": True,
        "model__bias": True,
        "model__tie_embeddings": True,
        "batch__micro_sequences": 3,
        "batch__global_sequences": 12,
        "optimizer__gradient_clipping": 0.5,
    },
    "gpt with dropout": GPT_SWITCHES
    | {"model__dropout": 0.1, "model__attention_dropout": 0.1, "model__layers": 3},
}


def recipe_of(corpus: Path, changes: dict[str, Any]) -> Recipe:
    return parse_recipe(changed(small_recipe(corpus), **changes), "test")


def further(recipe: Recipe, samples: range) -> range:
    """Return the samples that follow those of a micro-batch."""
    count = recipe.batch.micro_sequences
    return range(samples.start + count, samples.stop + count)


def made_small(recipe: Recipe, corpus: Path, *, ranks: int = 2, steps: int = 4) -> Recipe:
    return shrink(recipe, ranks=ranks, layers=4, steps=steps, corpus=corpus)


# Shrinking


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shrinking_keeps_the_structure(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    model, small = recipe.model, made_small(recipe, tmp_path, ranks=8).model
    for switch in (
        *("norm", "positions", "activation", "bias", "tie_embeddings", "qk_norm", "dropout"),
        *("attention_dropout", "rope_theta", "rope_scaling", "norm_epsilon"),
        *("attention_sinks", "attention_soft_cap", "norm_placement", "qk_norm_over", "qkv_bias"),
        *("attention_output_bias", "logit_soft_cap", "z_loss"),
    ):
        assert getattr(small, switch) == getattr(model, switch), switch
    assert (small.heads == small.kv_heads) == (model.heads == model.kv_heads)
    assert small.layers % 2 == model.layers % 2
    for tensor in range(1, 9):
        for size in ("kv_heads", "ffn_hidden_size", "sequence_length"):
            if getattr(model, size) % 168 == 0 and tensor > 6:
                continue  # of 21,504 columns, only the divisors up to 6 stay
            valid = getattr(model, size) % tensor == 0
            assert (getattr(small, size) % tensor == 0) == valid, (size, tensor)
    assert set(small.attention_pattern) == set(model.attention_pattern)
    if model.window is not None and small.window is not None:
        assert replace(small.window, size=model.window.size) == model.window
        share = model.window.size / model.sequence_length
        least = max(share, 2 / small.sequence_length)  # windows of one key would be no attention
        assert small.window.size / small.sequence_length == pytest.approx(least, rel=0.3)
        assert (share < 1) == (small.window.size < small.sequence_length)
    assert (small.embedding_multiplier == 1) == (model.embedding_multiplier == 1)
    if model.embedding_multiplier != 1:  # the embedded tokens have the same size
        size = model.initial_std * model.embedding_multiplier
        assert small.initial_std * small.embedding_multiplier == pytest.approx(size)
    if model.latent is None:
        assert small.latent is None
        assert (small.rotary_columns < 8) == (model.partial_rotary_factor < 1)
    else:
        assert small.latent is not None and small.score_size == 12
        assert (small.latent.query_rank is None) == (model.latent.query_rank is None)
    assert small.parametrization == model.parametrization
    if model.base_hidden_size is not None:
        assert width_ratio(small) == pytest.approx(width_ratio(model), rel=0.1)
    if model.base_layers is not None:
        assert depth_ratio(small) == depth_ratio(model)
    assert query_multiplier(small) == pytest.approx(query_multiplier(model), rel=0.1)
    assert small.hidden_size <= 40 * 8 and small.vocab_size < 256  # 40: heads for 5 and 8 ranks


def small_steps(name: str, folder: str) -> tuple[Recipe, list[float], float, float]:
    """Train a small recipe that clips logits and averages weights, both with usual settings.

    Returns:
        The small recipe, the largest logit of each step, and the largest distances of the average
        from the weights, after the update that begins it and at the end.
    """
    world, corpus = join_world(), Path(folder) / "corpus"
    settings = ["optimizer.qk_clip=100.0", 'deepspeed="ds_configs/zero1_fp32.json"']
    average = "optimizer.average={ decay = 0.9999, start_step = 1000, every = 10 }"
    small = made_small(load_recipe(REPOSITORY / name, [*settings, average]), corpus)
    write_corpus(corpus, small.model.vocab_size)
    logits, distances = [], []
    engine, data = start(small, world)
    for step in range(1, small.training.steps + 1):
        logits.append(train_step(engine, data, step).largest_logit or 0)
        state = logical_state(engine)
        pairs = ((state[WEIGHTS][key], mean) for key, mean in state[AVERAGE].items())
        distances.append(max(float((mean - weight).abs().max()) for weight, mean in pairs))
    return small, logits, distances[0], distances[-1]


@pytest.mark.parametrize("name", ["recipes/kimi/k2.toml", "recipes/tiny-muon.toml"])
def test_small_models_clip_logits_and_average_weights(name: str, tmp_path: Path) -> None:
    small, logits, first, last = run_ranks(1, small_steps, name, str(tmp_path))[0]
    limit, average = small.optimizer.qk_clip, small.optimizer.average
    assert limit and limit < min(logits)
    assert average and (average.decay, average.start_step, average.every) == (0.8, 1, 2)
    assert first == 0
    assert last > 0


@pytest.mark.parametrize(("micro", "small"), [(1, 2), (2, 2), (3, 3), (4, 2), (5, 5), (11, 2)])
def test_the_larger_micro_batch_is_possible(micro: int, small: int, corpus: Path) -> None:
    batch = {"batch__micro_sequences": micro, "batch__global_sequences": 12 * micro}
    recipe = recipe_of(corpus, batch)
    assert larger_micro_batch(recipe) == small
    for ranks in (1, 2, 8):
        sequences = made_small(recipe, corpus, ranks=ranks).batch.global_sequences
        assert sequences % small == 0 and 8 <= sequences <= 120


@pytest.mark.parametrize(
    ("count", "groups", "most", "per_token"), [(256, 8, 4, 8), (96, 6, 1, 8), (16, 8, 3, 2)]
)
def test_shrinking_keeps_groups_of_experts(
    count: int, groups: int, most: int, per_token: int, corpus: Path
) -> None:
    experts = {
        "count": count, "per_token": per_token, "ffn_hidden_size": 64, "router": "sigmoid",
        "groups": groups, "groups_per_token": most,
    }  # fmt: skip
    recipe = recipe_of(corpus, {"model__experts": experts})
    for ranks in (1, 2, 4, 8):
        small = made_small(recipe, corpus, ranks=ranks).model.experts
        assert small is not None and small.count <= 24
        assert (small.groups, small.groups_per_token) == (groups, most)
        assert small.per_token < small.count // groups * most or small.per_token == per_token == 1
        assert all((small.count % n == 0) == (count % n == 0) for n in range(1, ranks + 1))


def test_a_large_common_multiple_is_made_small(corpus: Path) -> None:
    sizes = {"batch__global_sequences": 1680, "model__ffn_hidden_size": 16800}
    small = made_small(recipe_of(corpus, sizes | {"model__sequence_length": 1680}), corpus, ranks=8)
    assert max(small.batch.global_sequences, small.model.sequence_length) <= 64
    assert small.model.ffn_hidden_size <= 128


def test_the_recipes_own_interval_is_proven(corpus: Path, tmp_path: Path) -> None:
    options = argparse.Namespace(
        ranks=1, layers=4, steps=1, relay=False, sample=None, only=[], precision="fp32"
    )
    for interval, proven in ((1, {1, 2}), (2, {2}), (3, {2, 3}), (40, {2, 4})):
        layout = {"layout__recompute": "full", "layout__recompute_interval": interval}
        recipe = recipe_of(corpus, layout | {"model__layers": 4})
        _, cases = prove.plan(recipe, options, tmp_path / str(interval))
        full = [v.recipe.layout for v in cases if v.recipe.layout.recompute == "full"]
        assert {layout.recompute_interval for layout in full} == proven


def test_shrinking_keeps_a_head_size_of_its_own(corpus: Path, tmp_path: Path) -> None:
    small = made_small(recipe_of(corpus, UNSEEN["odd"]), tmp_path)
    assert small.model.head_size * small.model.heads != small.model.hidden_size
    assert small.model.layers == 5 and small.model.vocab_size % 64 == 251 % 64
    assert larger_micro_batch(recipe_of(corpus, UNSEEN["odd"])) == 3
    assert larger_micro_batch(recipe_of(corpus, {})) == 2


@pytest.mark.parametrize(
    "name", each_in_turn(["tiny", "tiny-moe", "tiny-mla", "llama/70b"], ["tiny", "tiny-moe"])
)
def test_fp8_is_proven_over_every_axis(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts_module, "ZERO_STAGES", (1,))  # a third of the layouts
    recipe = load_recipe(
        REPOSITORY / "recipes" / f"{name}.toml", ['training.matmul_precision="fp8"']
    )
    options = argparse.Namespace(
        ranks=4, layers=1, steps=1, relay=False, sample=None, only=[], precision=None
    )
    small, cases = prove.plan(recipe, options, tmp_path / "fp8")
    assert small.training.matmul_precision == "fp8" and {v.precision for v in cases} == {"bf16"}
    assert prove.model_text(small, cases).endswith(", bf16 with matmuls in FP8")
    assert max(v.dims.tensor for v in cases) == max(v.dims.context for v in cases) == 2
    assert any(v.dims.tensor * v.dims.context == 4 for v in cases)
    wide = shrink(recipe, ranks=4, layers=1, steps=1, corpus=tmp_path)  # as with --precision fp32
    assert wide.training.matmul_precision == "weights" and wide.model.hidden_size < 256


# Valid layouts


@pytest.fixture(scope="module")
def of_four_ranks(corpus: Path) -> list[ProofCase]:
    """Return the layouts of a model of four layers on up to four ranks."""
    small = made_small(recipe_of(corpus, {"model__layers": 4}), corpus, ranks=4)
    return valid_cases(small, ranks=4, micro_sequences=(1, 2))


def test_the_layouts_are_those_that_the_recipe_accepts(of_four_ranks: list[ProofCase]) -> None:
    cases = of_four_ranks
    names = {f"{case.axes}: {case.method}" for case in cases}
    assert len(names) == len(cases) == 408 + 569  # counted by hand, without and with context
    for name in (
        "tensor 1 x pipeline 1 x data 1: zero3, recompute full by 2, micro-batch 2",
        "tensor 1 x pipeline 3 x data 1: zero1, 1f1b, micro-batch 1",  # four layers, three stages
        "tensor 2 x pipeline 2 x data 1: zero1, dualpipev, sequence-parallel, micro-batch 1",
        "tensor 1 x pipeline 2 x data 2: zero1, interleaved x 2, micro-batch 2",
        "tensor 1 x pipeline 4 x data 1: zero1, zb-h1, micro-batch 1",
        "tensor 1 x pipeline 1 x context 2 x data 2: zero3, ulysses, recompute full by 2, "
        "micro-batch 2",
        "tensor 1 x pipeline 2 x context 2 x data 1: zero1, zb-v, ring, micro-batch 1",
        "tensor 2 x pipeline 1 x context 2 x data 1: zero2, reduce every 2, sequence-parallel, "
        "gather, micro-batch 1",
        "tensor 1 x pipeline 2 x data 2: zero2, interleaved x 2, reduce every 4, micro-batch 1",
        "tensor 2 x pipeline 1 x data 2: zero2, sequence-parallel, recompute selective, "
        "micro-batch 2",
    ):
        assert name in names
    for name in names:
        assert "tensor 4" not in name and "tensor 3" not in name  # two key-value heads
        assert "zero3" not in name or "pipeline 1" in name
        assert "zero2" not in name or "data 1:" not in name or "context" in name
        assert "ulysses" not in name or ("context 2" in name and "tensor 1" in name)
        assert "context 3" not in name  # sequences of 16 tokens
        if "dualpipev" in name or "zb-v" in name or "interleaved" in name:
            assert "pipeline 2" in name  # there are four blocks
        assert "interleaved x 3" not in name


def test_only_some_layouts_are_chosen(of_four_ranks: list[ProofCase]) -> None:
    cases = of_four_ranks

    def chosen(*texts: str) -> list[ProofCase]:
        return only(cases, dict(prove.setting(text) for text in texts))

    some = chosen("zero=2", "schedule=zb-v,zb-h1", "sequence_parallel=false")
    assert some == [
        case
        for case in cases
        if case.zero_stage == 2
        and case.recipe.layout.pipeline > 1
        and case.recipe.layout.schedule in ("zb-v", "zb-h1")
        and not case.recipe.layout.sequence_parallel
    ]
    assert {case.recipe.layout.schedule for case in some} == {"zb-v", "zb-h1"}
    assert only(cases, {}) == cases
    assert chosen("schedule=none") == [case for case in cases if case.dims.pipeline == 1]
    for texts, message in {
        ("foo=1",): "a layout has no setting foo; use one of tensor, pipeline, context, data",
        ("context=2,9",): "--only context=9: no layout has it; use 1, 2, 4",
        ("zero=3", "pipeline=2"): "--only zero=3 --only pipeline=2: no layout has all of these",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            chosen(*texts)
    for text in ("zero", "=1", "zero=", "zero=1,"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a form like zero=1,2"):
            prove.setting(text)


def test_the_smallest_layout_that_fails_names_the_axes(of_four_ranks: list[ProofCase]) -> None:
    """A fault of sequence parallelism with two data ranks stays in two tensor and data ranks."""
    first = reference(of_four_ranks[0].recipe)
    (case,) = only(
        [one for one in of_four_ranks if one.recipe.layout.dp_shard == 0],
        {
            "tensor": ["2"], "data": ["2"], "zero": ["2"], "reduce_every": ["2"],
            "recompute": ["selective", "none"], "sequence_parallel": ["true"],
            "micro_sequences": ["2"],
        },
    )  # fmt: skip

    def failing(cases: Sequence[ProofCase]) -> list[ProofCase]:
        split = [one for one in cases if one.recipe.layout.sequence_parallel]
        return [one for one in split if one.dims.data == 2]

    found = smallest(case, first, failing)
    assert settings_beyond(found, first) == ["tensor", "data", "sequence_parallel"]
    assert smallest(case, first, lambda cases: []) == case
    assert settings_beyond(smallest(case, first, list), first) == []
    names = {f"{one.axes}, {one.method}" for one in simpler(case)}
    assert len(names) == len(simpler(case)) and f"{case.axes}, {case.method}" not in names
    assert simpler(first) == []


@pytest.fixture(scope="module")
def in_bf16(corpus: Path) -> dict[ProofCase, Any]:
    """Train and record one process, perturbed runs and two layouts in bf16."""
    small = made_small(recipe_of(corpus, {"model__layers": 2}), corpus, steps=2)
    first = reference(small, "bf16")
    cases = valid_cases(small, ranks=2, micro_sequences=(1,), precision="bf16")
    some = only(cases, {"tensor": ["2"], "zero": ["1"], "recompute": ["none"]})
    some += only(cases, {"data": ["2"], "zero": ["1"], "recompute": ["none"], "dp_shard": ["0"]})
    runs = [first, *perturbed(first, 4), *some]
    runs += [replace(case, recorded=True) for case in runs[:2] + some]
    results = dict(run_cases(runs, ranks=2, seconds=300))
    return {case: results[case] for case in runs}


def test_layouts_in_bf16_are_within_the_bands(in_bf16: dict[ProofCase, Any]) -> None:
    results = {case: result for case, result in in_bf16.items() if not case.recorded}
    (first, expected), *_ = results.items()
    model = first.recipe.model
    runs = [result for case, result in results.items() if case.perturbation is not None]
    layouts = [result for case, result in results.items() if case.world_size == 2]
    bands = derive_bands(runs, expected, model)
    assert len(runs) == 4 and len(layouts) == 3
    for run in (*runs, *layouts):
        found = compare(run, expected, model, bands)
        assert found.passes
        assert found.ratio > 0.02 or run is layouts[-1]  # data ranks round as one process does
    assert not compare(layouts[0], expected, model).passes  # the limits of fp32
    assert 1e-4 < bands[Quantity("grad_norm", "", 2)] < 0.05
    wrong = replace(layouts[0], grad_norms=[1.1 * norm for norm in layouts[0].grad_norms])
    assert not compare(wrong, expected, model, bands).passes


def test_recordings_have_the_logical_tensors_of_every_layout(
    in_bf16: dict[ProofCase, Any],
) -> None:
    recordings = {case: result for case, result in in_bf16.items() if case.recorded}
    (first, expected), (_, perturbed_run), *layouts = recordings.items()
    assert first.world_size == 1 and len(layouts) == 3
    names = [f"{value.module} {value.phase}" for value in expected.values]
    order = [
        *("embedding forward", "blocks.0.attention_norm forward", "blocks.0.attention.qkv forward"),
        *(
            "blocks.0.attention.core forward",
            "blocks.0.mlp.down forward",
            "blocks.1.mlp.up forward",
        ),
        *("final_norm forward", "head forward", "head backward", "blocks.1.mlp.down backward"),
        *("blocks.0.attention.qkv backward", "gradient norm update", "embedding update"),
    ]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    for recording in (perturbed_run, *(recording for _, recording in layouts)):
        assert recording.values.keys() == expected.values.keys()
        differences = [tensor_difference(recording, expected, value) for value in expected.values]
        assert max(differences) < 0.2
        assert sum(each > 0 for each in differences) > 30 or recording is layouts[-1][1]
    limits = dict.fromkeys(expected.values, 0.2)
    case, recording = layouts[0]
    assert first_difference(recording, expected, limits, case, ()).module == ""
    late = next(value for value in expected.values if value.module == "blocks.0.mlp.up")
    changed = {late: [2 * copy for copy in recording.values[late]], list(limits)[-1]: []}
    broken = replace(recording, values=recording.values | changed)
    cause = first_difference(broken, expected, limits, case, ("tensor",))
    assert (cause.module, cause.phase) == ("blocks.0.mlp.up", "forward")
    assert str(cause).startswith("tensor, blocks.0.mlp.up, forward: output differs by ")
    assert tensor_difference(broken, expected, list(limits)[-1]) == math.inf  # not computed
    cause = replace(cause, difference=math.inf)
    assert "blocks.0.mlp.up, forward: output is missing or not a number" in str(cause)


def test_a_perturbation_is_one_unit_in_the_last_place() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.cat([torch.randn(1000, dtype=dtype), torch.zeros(10, dtype=dtype)])
        above, below = (torch.nextafter(x, torch.full_like(x, end)) for end in (1e9, -1e9))
        moved = next_float(x, generator)
        steps = torch.stack([moved == x, moved == above, moved == below]).float()
        assert steps.any(0).all() and (moved[-10:] == 0).all()
        assert (steps[:, :1000].mean(1) - 1 / 3).abs().max() < 0.06


# Comparison


def outcome(
    loss: float = 2.0, norm: float = 1.0, weight: float = 1.0, moment: float = 1.0
) -> TrainingResult:
    moments = {"head.weight": torch.full((4, 4), moment)}
    return TrainingResult([2.5, loss], [norm], {"head.weight": torch.full((4, 4), weight)}, moments)


@pytest.mark.parametrize(
    ("other", "passes"),
    [
        (outcome(), True),
        (outcome(loss=2.0 * (1 + 1.9e-6)), True),
        (outcome(loss=2.0 * (1 + 2.1e-6)), False),
        (outcome(norm=1 + 0.9e-5), True),
        (outcome(norm=1 + 1.1e-5), False),
        (outcome(weight=1 + 0.9e-5), True),
        (outcome(weight=1 + 1.1e-5), False),
        (outcome(loss=math.nan), False),
        (outcome(norm=math.nan), False),
        (outcome(weight=math.nan), False),
        (outcome(moment=1 + 0.9e-4), True),
        (outcome(moment=1 + 1.1e-4), False),
        (outcome(moment=math.nan), False),
        (replace(outcome(), diverged=["head.weight is different on ..."]), False),
    ],
)
def test_tolerances(other: TrainingResult, passes: bool, corpus: Path) -> None:
    assert compare(other, outcome(), recipe_of(corpus, {}).model).passes == passes


def test_bands_are_multiples_of_the_largest_perturbation(corpus: Path) -> None:
    """They grow with the steps, and are at least a rounding error.

    Without a perturbation that gives a token another expert, no layout may do so.
    """
    model = recipe_of(corpus, {}).model
    runs = [outcome(loss=2 * (1 + error), weight=1 - 2 * error) for error in (1e-5, -3e-5)]
    bands = derive_bands(runs, outcome(), model)
    assert bands[Quantity("loss", "", 1)] == MIN_BAND
    assert bands[Quantity("loss", "of the validation", 1)] == pytest.approx(BAND_FACTOR * 3e-5)
    assert bands[Quantity("weights", "head.weight")] == pytest.approx(BAND_FACTOR * 6e-5, rel=1e-3)
    assert bands[Quantity("grad_norm", "", 1)] == MIN_BAND
    assert bands[Quantity("rerouted")] == 0.0
    for error, passes in ((0.9, True), (1.1, False)):
        other = outcome(loss=2 * (1 + error * BAND_FACTOR * 3e-5))
        found = compare(other, outcome(), model, bands)
        assert found.passes == passes and found.ratio == pytest.approx(error, rel=1e-3)
        assert found.worst == "loss of the validation of step 1"
    assert "do not show" not in table_of_bands(bands)
    wide = derive_bands([outcome(weight=1.25)], outcome(), model)
    assert "do not show; also run prove.py with --precision fp32" in table_of_bands(wide)
    first = TrainingResult([2.0, 1.0], [1.0, 1.0], {}, {})
    early = TrainingResult([2.0002, 1.0], [1.0, 1.0], {}, {})
    bands = derive_bands([early], first, model)
    assert bands[Quantity("loss", "", 2)] == bands[Quantity("loss", "", 1)] > 1e-4


def test_the_factor_of_a_band_makes_false_alarms_rare() -> None:
    """Integrate the probability over the largest of the perturbed differences, all normal."""
    normal, width = statistics.NormalDist(), 0.005
    total = 0.0
    for largest in (width * step for step in range(1200)):
        below = 2 * normal.cdf(largest) - 1
        density = PERTURBED_RUNS * below ** (PERTURBED_RUNS - 1) * 2 * normal.pdf(largest)
        total += density * width * 2 * normal.cdf(-BAND_FACTOR * largest)
    assert total == pytest.approx(7e-8, rel=0.1)


def test_a_near_tie_of_experts_selects_another_seed(
    corpus: Path, capsys: pytest.CaptureFixture
) -> None:
    """The margins of the reference are 1e-6, then 1e-4; the cases follow its seed."""
    small = recipe_of(corpus, {})
    margins = {small.seed: 1e-6, small.seed + 1: 1e-4}
    trained: list[int] = []

    def run(cases: list[ProofCase], **_: Any) -> Iterator[tuple[ProofCase, TrainingResult]]:
        for case in cases:
            trained.append(case.recipe.seed)
            yield case, replace(outcome(), margin=margins[case.recipe.seed])

    with mock.patch.object(prove, "run_cases", run):
        (finding,) = prove.Proof(small, [reference(small)], ranks=1).run()
    assert finding.passes and finding.case.recipe.seed == small.seed + 1
    assert trained == [small.seed, small.seed + 1, small.seed + 1]
    assert "differ by only 1.0e-06" in capsys.readouterr().err


def test_another_expert_of_a_token_is_described(corpus: Path) -> None:
    expected = replace(outcome(), expert_counts=[[[4, 4]]])
    got = replace(outcome(), expert_counts=[[[6, 2]]], margin=2e-7)
    case = reference(recipe_of(corpus, {}))
    assert compare(expected, expected, case.recipe.model).passes
    text = failures([CaseResult(case, compare(got, expected, case.recipe.model))])
    assert "2 tokens or more have another expert than in one process" in text and "2.0e-07" in text


def test_only_the_key_bias_of_plain_attention_is_noise(corpus: Path) -> None:
    gpt = recipe_of(corpus, GPT_SWITCHES).model
    queries_keys_values = torch.ones(3 * 64)
    expected = TrainingResult(
        [1.0], [1.0], {"blocks.0.attention.qkv.bias": queries_keys_values}, {}
    )
    for first, noisy in ((0, False), (64, True), (128, False)):
        moved = queries_keys_values.clone()
        moved[first + 5] += 1
        got = TrainingResult([1.0], [1.0], {"blocks.0.attention.qkv.bias": moved}, {})
        difference = compare(got, expected, gpt)
        assert difference.passes == noisy and (difference.noise > 0) == noisy
    experts = {"mlp.experts.up_5_bias": torch.ones(2), "mlp.experts.up_5": 100 * torch.ones(2, 2)}
    close = experts | {"mlp.experts.up_5_bias": torch.tensor([1.0, 1.0 + 1e-4])}
    expected, got = (TrainingResult([1.0], [1.0], each, {}) for each in (experts, close))
    assert compare(got, expected, gpt).passes  # relative to the weight of the expert
    name = "blocks.0.attention.qkv.bias"
    for switches in ({}, GPT_SWITCHES | {"model__qk_norm": True}):
        other = recipe_of(corpus, {"model__bias": True, "model__kv_heads": 4} | switches).model
        assert compare_module.split_noise(name, other) == {name: slice(None)}


def test_columns_without_rotation_of_a_key_bias_are_noise(corpus: Path) -> None:
    """Sinks and caps give the whole bias a gradient; layers without positions, no part of it."""
    rope = {"model__bias": True, "model__kv_heads": 4}  # 4 heads of 16 columns
    name = "blocks.{}.attention.qkv.bias"
    model = recipe_of(corpus, rope | {"model__partial_rotary_factor": 0.5}).model
    parts = compare_module.split_noise(name.format(0), model)
    noise = [64 + 16 * head + column for head in range(4) for column in range(8, 16)]
    assert parts[name.format(0) + compare_module.NOISE_SUFFIX] == noise
    rows = torch.cat([torch.arange(3 * 64)[each] for each in parts.values()])
    assert torch.equal(rows.sort().values, torch.arange(3 * 64))
    model = recipe_of(corpus, rope | {"model__attention_pattern": ["full", "nope"]}).model
    assert [len(compare_module.split_noise(name.format(n), model)) for n in (0, 1)] == [1, 3]
    for change in ({"model__attention_sinks": True}, {"model__attention_soft_cap": 2.0}):
        model = recipe_of(corpus, GPT_SWITCHES | change).model
        assert len(compare_module.split_noise(name.format(0), model)) == 1


def test_a_key_bias_has_no_gradient_of_its_own(corpus: Path) -> None:
    """It is left out because its gradient in fp64 is below 1e-12, unlike all others."""
    partly = {"model__positions": "rope", "model__partial_rotary_factor": 0.5}
    for changes, noise in (
        (GPT_SWITCHES, True),
        (GPT_SWITCHES | partly, True),
        (GPT_SWITCHES | {"model__positions": "rope"}, False),
        (GPT_SWITCHES | {"model__attention_sinks": True}, False),
        (GPT_SWITCHES | {"model__attention_soft_cap": 2.0}, False),
        ({"model__bias": True}, False),
    ):
        config = recipe_of(corpus, changes).model
        torch.manual_seed(0)
        model = SequentialModel(layer_specs(config))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.double()
        tokens = torch.randint(config.vocab_size, (2, 16))
        run_layers(model.layers, tokens, info=MicroBatchInfo()).sin().mean().backward()
        bias = dict(logical_parameters(model, config))["blocks.0.attention.qkv.bias"]
        parts = compare_module.split_noise("blocks.0.attention.qkv.bias", config)
        sizes = {name: float(bias.grad[rows].norm()) for name, rows in parts.items()}
        quiet = [name for name, size in sizes.items() if size < 1e-12]
        assert bool(quiet) == noise
        assert all(name.endswith(compare_module.NOISE_SUFFIX) for name in quiet)


def test_a_sample_has_every_pair_of_settings(of_four_ranks: list[ProofCase]) -> None:
    cases = of_four_ranks[::4]

    def pairs(some: Iterable[ProofCase]) -> set[Any]:
        return {pair for case in some for pair in itertools.combinations(case.settings.items(), 2)}

    few, many = sample(cases, 30), sample(cases, 100)
    assert (len(few), len(many)) == (30, 100) and set(few) <= set(many) <= set(cases)
    assert [case for case in cases if case in set(many)] == many  # in the order of the cases
    assert pairs(many) == pairs(cases)
    assert len(pairs(few)) > 1.1 * len(pairs(cases[:: len(cases) // 30][:30]))
    assert sample(cases, 10_000) == cases


# Detection of faults

EXPERTS = {
    "model__experts": {
        "count": 8, "per_token": 2, "ffn_hidden_size": 32, "balance_loss": 0.1, "z_loss": 0.01,
    },
    "model__layers": 2,
}  # fmt: skip
WINDOWS = {
    "model__attention_pattern": ["window", "nope", "full"],
    "model__window": {"size": 9, "rope_theta": 100.0},
    "model__attention_sinks": True,
    "model__layers": 3,
}
MUON = {"optimizer__kind": "muon"}
# seeded fault -> changes of the recipe, the layout it must show in
MUTANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the tied gradients are not added up": (GPT_SWITCHES, {"pipeline": 2}),
    "q, k and v are declared as one block": ({}, {"tensor": 2}),
    "column-parallel inputs keep partial gradients": ({}, {"tensor": 2}),
    "norms in the split region keep partial gradients": (
        {},
        {"tensor": 2, "sequence_parallel": True},
    ),
    "the loss is divided by one micro-batch too many": ({}, {}),
    "data ranks read one place further": ({}, {}),
    "replicated parameters count on every tensor rank": ({}, {"tensor": 2}),
    "the masks of attention dropout start at head 0 on all ranks": (
        {"model__attention_dropout": 0.2},
        {"tensor": 2},
    ),
    "the last stage attends across documents": (
        {"data__separate_documents": True},
        {"pipeline": 2},
    ),
    "the last deferred weight gradient is dropped": (
        {},
        {"pipeline": 2, "schedule": "zb-h1"},
    ),
    "context ranks count positions from 0": ({}, {"context": 2}),
    "the loss is that of the tokens of one context rank": ({}, {"context": 2}),
    "keys get no gradient from other context ranks": ({}, {"context": 2}),
    "other context ranks attend across documents": (
        {"data__separate_documents": True},
        {"context": 2},
    ),
    "gradients of experts are divided by the ranks with the same experts": (EXPERTS, {"expert": 2}),
    "experts count twice in the gradient norm": (EXPERTS, {"expert": 2}),
    "the balance loss is not divided by the micro-batches": (EXPERTS, {"expert": 2}),
    "the balance loss has the counts of one rank": (EXPERTS, {"context": 2}),
    "the router keeps partial gradients": (EXPERTS, {"tensor": 2, "sequence_parallel": True}),
    "a bucket is reduced twice": ({}, {"zero": 2, "reduce_every": 2}),
    "the last group of micro-batches is lost": ({}, {"zero": 2, "reduce_every": 2}),
    "a bucket does not count in the gradient norm": ({}, {"zero": 2, "reduce_every": 1}),
    "tied gradients are added up after they were sharded": (
        GPT_SWITCHES,
        {"pipeline": 2, "zero": 2, "reduce_every": 2, "ranks": 4},
    ),
    "gradients are not summed over the shard groups": (
        {},
        {"zero": 2, "reduce_every": 2, "dp_shard": 1},
    ),
    "each shard group counts in the gradient norm": ({}, {"dp_shard": 1}),
    "Muon orthogonalizes the part of a tensor rank": (MUON, {"tensor": 2}),
    "Muon takes q, k and v for one matrix": (MUON, {"zero": 2, "reduce_every": 1}),
    "Muon has the momentum of another rank": (MUON, {"zero": 2, "reduce_every": 1}),
    "Muon scales updates by the shape of a part": (MUON, {"tensor": 2}),
    "windows of received keys end a key early": (WINDOWS, {"context": 2}),
    "sinks are counted by both context ranks": (WINDOWS, {"context": 2}),
    "windows have the rotary base of other layers": (WINDOWS, {"tensor": 2}),
    # too little of the gradient norm to show there, and Adam's steps hide a factor
    "the last norm's gradient is a thousandth too large": ({}, {"tensor": 2}),
}
QUICK_FAULTS = {  # one for each mechanism; the others are long, in turn
    "the tied gradients are not added up",
    "q, k and v are declared as one block",
    "data ranks read one place further",
    "the last deferred weight gradient is dropped",
    "experts count twice in the gradient norm",
    "a bucket does not count in the gradient norm",
    "each shard group counts in the gradient norm",
    "Muon has the momentum of another rank",
}
DRIFTING = (  # faults that make replicas of one weight diverge
    "the tied gradients are not added up",
    "tied gradients are added up after they were sharded",
    "column-parallel inputs keep partial gradients",
    "norms in the split region keep partial gradients",
    "the router keeps partial gradients",
    "gradients are not summed over the shard groups",
)
AGGREGATE = PipelineEngine._aggregate_total_loss
ADD_MOMENTUM, PIECE = Muon._add_momentum, Tile.piece
TAKE_MICRO_BATCH_INFOS, TAKE, WINDOWS, FINISH, BEGIN, TAKE_SUM, FINISH_STEP = (
    Stage.take_micro_batch_infos,
    Deferral.take,
    TrainingData._windows,
    ShardedReduction.finish,
    ShardedReduction.begin,
    ShardedReduction._take,
    FlatGradients.finish,
)


def scaled(engine: Engine, name: str, factor: float) -> Engine:
    dict(engine.parameters())[name].register_hook(lambda gradient: gradient * factor)
    return engine


def with_shorter_window(tile: Tile) -> Tile:
    """Return a tile whose window has a key less."""
    window = tile.limits and tile.limits.window
    return replace(tile, limits=Limits(window - 1)) if window else tile


def divided_by_group(self: ShardedReduction) -> list[torch.Tensor]:
    """Return shards that are divided by the size of their own groups."""
    shards = FINISH(self)
    for shard, size in zip(shards, self.sizes, strict=True):
        shard.mul_(self.divisor / size)
    return shards


def twice(self: ShardedReduction, number: int, flat: torch.Tensor, **settings: bool) -> None:
    """Begin the sum of a bucket, and that of the first one again."""
    BEGIN(self, number, flat.clone(), **settings)
    if number == 0:
        BEGIN(self, number, flat, **settings)


def first_only(self: ShardedReduction, number: int, flat: torch.Tensor, **settings: bool) -> None:
    """Begin the sum of a bucket, but only for the first group of micro-batches."""
    if number not in self.shards and all(each.number != number for each in self.running):
        BEGIN(self, number, flat, **settings)


def sharded_first(self: FlatGradients) -> None:
    """Add tied gradients up over the stages only after their buckets were reduced."""
    groups = list(self.module.get_tied_weights_and_groups())
    whole = {weight: self.sum_of(weight).clone() for weight, _ in groups}
    with mock.patch.object(self.module, "get_tied_weights_and_groups", list):
        FINISH_STEP(self)
    for weight, group in groups:
        torch.distributed.all_reduce(whole[weight], group=group)


def loss_of_one_rank(self: PipelineEngine) -> torch.Tensor:
    """Return the loss of this rank's tokens, instead of the mean over all data ranks."""
    with mock.patch.object(self, "is_data_parallel", False):
        return AGGREGATE(self)


def own_group_only(
    self: ShardedReduction, number: int, total: torch.Tensor, *, is_last: bool
) -> None:
    """Take a sum without adding those of the other shard groups."""
    TAKE_SUM(self, number, total, is_last=False)


def experts_twice(
    parts: Iterable[tuple[torch.Tensor, torch.nn.Parameter]],
) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
    """Yield each gradient, and that of an expert again."""
    for gradient, parameter in parts:
        yield gradient, parameter
        if is_marked(parameter):
            yield gradient, parameter


def orthogonalized_parts(
    self: MatrixExchange, flats: dict[int, torch.Tensor], meanwhile: Callable[[], None]
) -> None:
    """Orthogonalize the parts of this tensor rank, which holds them as a whole."""
    meanwhile()
    held = {self.flats[key]: values for key, values in flats.items()}
    for matrix in self.matrices:
        for piece in matrix.pieces:
            if piece.rank == self.rank and piece.flat in held:
                values = held[piece.flat][piece.offset : piece.offset + piece.length]
                part = values.view(1, len(piece.part.rows), len(piece.part.columns))
                values.copy_(orthogonalize(part).flatten() * update_scale(matrix.shape))


def as_one_matrix(self: Sharding, tensor: TensorAxis) -> list[MatrixPart]:
    """Return the whole parameter as one matrix; without tensor ranks."""
    rows, columns = self.shape
    return [MatrixPart(self.shape, range(rows * columns), range(rows), range(columns))]


def momentum_of_rank_0(self: Muon, weights: torch.Tensor, beta: float) -> torch.Tensor:
    """Add the gradient to the momentum of the first rank."""
    if self.state[weights]:
        torch.distributed.broadcast(self.state[weights]["momentum_buffer"], 0)
    return ADD_MOMENTUM(self, weights, beta)


@contextlib.contextmanager
def seeded_fault(fault: str) -> Iterator[None]:
    """Break the training in one way."""
    zero = "deepspeed.runtime.zero.stage_1_and_2"
    target, broken = {
        "the tied gradients are not added up": (
            "deepspeed.pipe.PipelineModule.get_tied_weights_and_groups",
            lambda self: [],
        ),
        "q, k and v are declared as one block": (
            "models.parallel.layers.Sharding",
            lambda shape, dimension=None, blocks=(), *rows, **others: Sharding(
                shape, dimension, (sum(blocks),) if blocks else (), *rows, **others
            ),
        ),
        "column-parallel inputs keep partial gradients": (
            "models.parallel.layers.begin_sum_of_copies",
            lambda grad, axis: lambda: grad,
        ),
        "norms in the split region keep partial gradients": (
            "models.parallel.layers.copy_to_tensor_axis",
            lambda x, axis: x,
        ),
        "the loss is divided by one micro-batch too many": (
            "deepspeed.runtime.engine.DeepSpeedEngine._scale_loss_by_gas",
            lambda self, loss, eval_micro_batches=None: loss / (self.micro_batches + 1),
        ),
        "data ranks read one place further": (
            "threefold.data.dataset.TrainingData._windows",
            lambda self, samples, step: WINDOWS(self, further(self.recipe, samples), step),
        ),
        "replicated parameters count on every tensor rank": (
            f"{zero}.is_model_parallel_parameter",
            lambda parameter: True,
        ),
        "the masks of attention dropout start at head 0 on all ranks": (
            "models.context_parallel.attention.attention_rows",
            lambda x, *, first_head, **settings: attention_rows(x, first_head=0, **settings),
        ),
        "the last stage attends across documents": (
            "threefold.pipeline.stage.Stage.take_micro_batch_infos",
            lambda self, micro_batch_infos: TAKE_MICRO_BATCH_INFOS(
                self,
                [replace(each, documents=None) for each in micro_batch_infos]
                if self.stage_id
                else micro_batch_infos,
            ),
        ),
        "the last deferred weight gradient is dropped": (
            "models.parallel.layers.Deferral.take",
            lambda self: TAKE(self)[:-1],
        ),
        "the loss is that of the tokens of one context rank": (
            "deepspeed.runtime.pipe.engine.PipelineEngine._aggregate_total_loss",
            loss_of_one_rank,
        ),
        "context ranks count positions from 0": (
            "models.attention.rotary_table",
            lambda slices, *rest: rotary_table((range(sum(map(len, slices))),), *rest),
        ),
        "keys get no gradient from other context ranks": (
            "models.context_parallel.attention.reduce_scatter",
            lambda x, axis, order: torch.zeros_like(x.chunk(axis.size, dim=-2)[0]),
        ),
        "other context ranks attend across documents": (
            "models.attention.tiles_of",
            lambda slices, lengths, limits: tiles_of(slices, None, limits),
        ),
        "windows of received keys end a key early": (
            "models.context_parallel.tiles.Tile.piece",
            lambda tile, *rest: PIECE(with_shorter_window(tile), *rest),
        ),
        "sinks are counted by both context ranks": (
            "models.context_parallel.tiles.merge_sinks",
            lambda part, sinks: merge_sinks(merge_sinks(part, sinks), sinks),
        ),
        "windows have the rotary base of other layers": (
            "models.attention.rotary_table_of_windows",
            lambda slices, frequencies, *rest: rotary_table(
                slices, replace(frequencies, theta=10_000.0), *rest
            ),
        ),
        "gradients of experts are divided by the ranks with the same experts": (
            "threefold.pipeline.gradients.ShardedReduction.finish",
            divided_by_group,
        ),
        "experts count twice in the gradient norm": (
            "threefold.engine.deepspeed_overrides.sum_of_squares",
            lambda parts, *rest: sum_of_squares(experts_twice(parts), *rest),
        ),
        "the balance loss is not divided by the micro-batches": (
            "threefold.engine.build.loss_gradient",
            lambda wrapped: 1.0,
        ),
        "the balance loss has the counts of one rank": (
            "models.experts.routing.sum_over_sequence",
            lambda counts, axis: counts,
        ),
        "the router keeps partial gradients": (
            "models.experts.layer.copy_to_tensor_axis",
            lambda x, axis: x,
        ),
        "tied gradients are added up after they were sharded": (
            "threefold.pipeline.gradients.FlatGradients.finish",
            sharded_first,
        ),
        "a bucket is reduced twice": (
            "threefold.pipeline.gradients.ShardedReduction.begin",
            twice,
        ),
        "the last group of micro-batches is lost": (
            "threefold.pipeline.gradients.ShardedReduction.begin",
            first_only,
        ),
        "a bucket does not count in the gradient norm": (
            "threefold.engine.deepspeed_overrides.sum_of_squares",
            lambda parts, *rest: sum_of_squares(itertools.islice(parts, 1, None), *rest),
        ),
        "gradients are not summed over the shard groups": (
            "threefold.pipeline.gradients.ShardedReduction._take",
            own_group_only,
        ),
        "each shard group counts in the gradient norm": (
            "threefold.engine.deepspeed_overrides.sum_of_squares",
            lambda *arguments: 2 * sum_of_squares(*arguments),
        ),
        "Muon orthogonalizes the part of a tensor rank": (
            "threefold.engine.muon_exchange.MatrixExchange.__call__",
            orthogonalized_parts,
        ),
        "Muon takes q, k and v for one matrix": (
            "models.sharding.Sharding.matrix_parts",
            as_one_matrix,
        ),
        "Muon has the momentum of another rank": (
            "threefold.engine.optimizer.Muon._add_momentum",
            momentum_of_rank_0,
        ),
        "Muon scales updates by the shape of a part": (
            "threefold.engine.muon_exchange.update_scale",
            lambda shape: update_scale((shape[0] // 2, shape[1])),
        ),
        "the last norm's gradient is a thousandth too large": (
            "threefold.prove.training.build_from_recipe",
            lambda *arguments: scaled(build_from_recipe(*arguments), "final_norm.weight", 1.001),
        ),
    }[fault]
    with mock.patch(target, broken, create=target.endswith(".range")):
        yield


@functools.cache
def mutant_case(corpus: Path, fault: str) -> ProofCase:
    changes, layout = MUTANTS[fault]
    small = made_small(recipe_of(corpus, changes), corpus, steps=2)
    ranks = layout.get("ranks", 2)
    found = valid_cases(small, ranks=ranks, micro_sequences=(1,))
    wanted = {
        "tensor": 1, "pipeline": 1, "context": 1, "context_attention": "gather",
        "expert": 1, "schedule": "1f1b", "sequence_parallel": False, "recompute": "none",
        "reduce_every": 0, "dp_shard": 0, "expert_tensor_parallel": False,
        "expert_overlap": False,
    }  # fmt: skip
    wanted |= layout
    zero = wanted.pop("zero", 1)
    wanted.pop("ranks", None)
    (case,) = (
        case
        for case in found
        if case.world_size == ranks
        and case.zero_stage == zero
        and all(getattr(case.recipe.layout, key) == value for key, value in wanted.items())
    )
    return case


def mutant_worker(cases: dict[str, ProofCase]) -> dict[str, tuple[TrainingResult, TrainingResult]]:
    """Return the outcome of each mutant's layout without and with the fault."""
    healthy = train_once(cases)
    outcomes = {}
    for fault, case in cases.items():
        with seeded_fault(fault):
            (faulty,) = train_cases([case])
        outcomes[fault] = healthy[fault], faulty
    return outcomes


def train_once(cases: dict[str, ProofCase]) -> dict[str, TrainingResult]:
    """Return the outcome of each case; equal cases are trained only once."""
    different = dict.fromkeys(cases.values())
    outcomes = dict(zip(different, train_cases(different), strict=True))
    return {name: outcomes[case] for name, case in cases.items()}


@pytest.fixture(scope="session")
def mutants(
    corpus: Path, request: pytest.FixtureRequest
) -> dict[str, tuple[TrainingResult, TrainingResult, TrainingResult]]:
    assert MUTANTS.keys() >= QUICK_FAULTS
    items: list[Any] = request.session.items
    faults = [
        item.callspec.params["fault"]
        for item in items
        if getattr(item, "function", None) is test_a_seeded_fault_fails_the_proof
    ]
    cases = {fault: mutant_case(corpus, fault) for fault in faults}
    references = {fault: reference(case.recipe) for fault, case in cases.items()}
    expected = run_ranks(1, train_once, references)[0]
    outcomes = {}
    for ranks in {case.world_size for case in cases.values()}:
        some = {fault: case for fault, case in cases.items() if case.world_size == ranks}
        outcomes |= run_ranks(ranks, mutant_worker, some)[0]
    return {fault: (expected[fault], *outcomes[fault]) for fault in faults}


@pytest.mark.parametrize("fault", each_in_turn(MUTANTS, QUICK_FAULTS))
def test_a_seeded_fault_fails_the_proof(
    fault: str,
    mutants: dict[str, tuple[TrainingResult, TrainingResult, TrainingResult]],
    corpus: Path,
) -> None:
    expected, healthy, faulty = mutants[fault]
    model = mutant_case(corpus, fault).recipe.model
    assert compare(healthy, expected, model).passes
    assert not compare(replace(faulty, diverged=[]), expected, model).passes  # by the numbers
    assert healthy.diverged == []
    assert bool(faulty.diverged) == (fault in DRIFTING)


# The command and its reports


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in UNSEEN])
def test_unseen_recipes_pass(name: str, corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, UNSEEN[name])
    small = made_small(recipe, tmp_path / "corpus")
    write_corpus(tmp_path / "corpus", small.model.vocab_size)
    cases = valid_cases(small, ranks=2, micro_sequences=(1, larger_micro_batch(recipe)))
    some = cases[:: len(cases) // 6]
    findings = list(prove.Proof(small, some, ranks=2).run())
    assert len(findings) == len(some) >= 6
    assert failures(findings) == ""


def test_a_layout_that_fails_is_a_finding_and_the_others_continue(
    corpus: Path, tmp_path: Path
) -> None:
    small = made_small(recipe_of(corpus, {}), corpus, steps=1)
    good = [v for v in valid_cases(small, ranks=2, micro_sequences=(1,)) if v.world_size == 2][:2]
    lost = changed(small.model_dump(mode="json", exclude_none=True), data__validation="nowhere")
    bad = ProofCase(parse_recipe(lost, "test"), good[0].dims, 1)
    results = dict(run_cases([good[0], bad, good[1]], ranks=2, seconds=60))
    assert isinstance(results[good[0]], TrainingResult) and isinstance(
        results[good[1]], TrainingResult
    )
    assert "nowhere" in results[bad]
    findings = [CaseResult(bad, results[bad])]
    assert "failed: tensor 1 x pipeline 1 x data 2" in failures(findings)
    assert "| 1 x 1 x 1 x 2 | 2 | 0 of 1 | inf | inf | inf | inf |" in table(findings)
    assert verdict(findings).startswith("0 of 1 layouts")
    assert as_json(findings)["passed"] is False and json.dumps(as_json(findings), allow_nan=False)


def test_a_layout_that_hangs_is_a_finding(corpus: Path, tmp_path: Path) -> None:
    good = reference(made_small(recipe_of(corpus, {}), corpus, steps=1))
    os.mkfifo(pipe := tmp_path / "zero1.json")  # a reader waits until it is written
    endless = replace(good, recipe=good.recipe.model_copy(update={"deepspeed": str(pipe)}))
    started = time.monotonic()
    list(run_cases([good], ranks=1, seconds=60))  # which also starts the fork server
    limit = max(5, math.ceil(4 * (time.monotonic() - started)))
    children = len(multiprocessing.active_children())
    results = dict(run_cases([good, endless, good], ranks=1, seconds=limit))
    assert isinstance(results[good], TrainingResult)
    assert results[endless].startswith(f"no result within {limit} seconds")
    assert len(multiprocessing.active_children()) == children


def test_runs_of_one_size_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    started = []

    class Pool:
        """A `RankPool` whose results are ready at once."""

        def __init__(self, cases: Sequence[ProofCase], **_: Any):
            started.append(list(cases))
            self.cases, self.size = cases, cases[0].world_size
            self.finished, self.failure = True, None
            self.ranks = mock.Mock(pipes={})

        def results(self) -> Iterator[Any]:
            return zip(self.cases, range(len(self.cases)), strict=True)

    monkeypatch.setattr(proof_ranks, "RankPool", Pool)
    monkeypatch.setattr(proof_ranks, "wait", lambda *_, **__: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    first = reference(recipe_of(corpus, {}))
    runs = [first, *perturbed(first, 4)]
    assert {case for case, _ in run_cases(runs, ranks=8, seconds=1)} == set(runs)
    assert started == [runs[::3], runs[1::3], [runs[2]]]
    pair = replace(first, dims=ParallelDims(data=2))
    for cases, ranks, relay, worlds in (
        (runs, 1, None, 1),
        ([pair] * 2, 8, None, 1),  # three cores have room for one world of two ranks
        (runs, 8, tmp_path, 1),  # each case resumes from the checkpoint of the one before
        ([*runs, pair], 8, None, 2),
    ):
        started.clear()
        assert len(list(run_cases(cases, ranks=ranks, seconds=1, relay=relay))) == len(cases)
        assert len(started) == worlds


class SentMessages:
    """Messages that ranks have sent, of which those of rank 0 arrive late."""

    def __init__(self, *_: Any, **__: Any):
        self.messages = {0: [(0, mock.sentinel.result)], 1: [(1, "ValueError: a lost tensor")]}
        self.pipes = {0: mock.Mock(), 1: mock.Mock()}
        self.pipes[0].poll = lambda seconds: seconds > 0 and bool(self.messages[0])
        self.pipes[1].poll = lambda _: bool(self.messages[1])

    def receive(self, rank: int) -> Any:
        return self.messages[rank].pop(0)


def test_a_failure_does_not_hide_the_result_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_ranks, "ForkedRanks", SentMessages)
    first, second = mock.Mock(world_size=2), mock.Mock(world_size=2)
    pool = proof_ranks.RankPool([first, second], folder=tmp_path, seconds=60, relay=None)
    assert list(pool.results()) == [(first, mock.sentinel.result)]
    assert (pool.done, pool.failure) == (1, "rank 1: ValueError: a lost tensor")


def test_a_loss_that_is_not_finite_is_named_without_a_traceback(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, data = mock.Mock(), mock.Mock()
    engine.train_step.return_value.loss = math.nan
    monkeypatch.setattr(training, "train_cases", lambda _: [training.train_step(engine, data, 1)])
    receiver, sender = multiprocessing.Pipe(duplex=False)
    proof_ranks._run_cases(sender, [], None)
    index, text = pickle.loads(receiver.recv_bytes())
    assert index == 0 and text.startswith("the loss of step 1 is nan, so")
    assert "Traceback" not in capsys.readouterr().err
    small = made_small(recipe_of(corpus, {}), corpus, steps=1)
    monkeypatch.setattr(prove, "run_cases", lambda cases, **_: [(cases[0], text)])
    (finding,) = prove.Proof(small, [reference(small)], ranks=1).run()
    assert finding.result == f"the single process that layouts are compared with: {text}"


@pytest.fixture
def other_folder(tmp_path: Path) -> Path:
    """Return a folder with a package of the name of ours, which must not be imported."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise SystemExit('not this one')")
    return tmp_path


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | CPU_VARIABLES,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


PROVE = str(REPOSITORY / "recipes" / "prove.py")
TWO_LAYOUTS = (
    *("--ranks", "1", "--steps", "1", "--json", "--heatmap", "proof.png", "--curves", "curves.svg"),
    *("--only", "recompute=none", "--only", "micro_sequences=1"),
)


def check_proof_of_two_layouts(folder: Path, printed: str) -> None:
    """Check what the command with TWO_LAYOUTS has printed, and drawn in a folder."""
    assert (folder / "proof.png").read_bytes().startswith(b"\x89PNG")
    assert "2 layouts, one loss curve" in (folder / "curves.svg").read_text()
    proof = json.loads(printed)
    assert proof["passed"] and len(proof["layouts"]) == 2
    assert {row["zero"] for row in proof["layouts"]} == {1, 3}
    assert max(row["loss"] for row in proof["layouts"]) <= proof["tolerances"]["loss"]


def test_the_command_draws_and_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prove.py", *TWO_LAYOUTS])
    with pytest.raises(SystemExit, match="0"):
        prove.main()
    check_proof_of_two_layouts(tmp_path, capsys.readouterr().out)


@pytest.mark.long
def test_the_command_runs_anywhere(other_folder: Path) -> None:
    done = command(PROVE, *TWO_LAYOUTS, cwd=other_folder)
    assert done.returncode == 0, done.stderr
    check_proof_of_two_layouts(other_folder, done.stdout)


def test_the_command_and_its_ranks_import_from_this_checkout(other_folder: Path) -> None:
    done = command(PROVE, "recipes/none.toml", cwd=other_folder)
    assert done.returncode == 2 and "recipes/none.toml: no such recipe" in done.stderr
    # As the fork server of the ranks starts, which then imports the preloaded modules.
    done = command("-c", "import models; print(models.__file__)", cwd=other_folder)
    assert done.stdout.strip() == str(REPOSITORY / "models" / "__init__.py"), done.stderr


def test_the_curves_show_every_layout_and_its_difference(corpus: Path) -> None:
    case = reference(made_small(recipe_of(corpus, {}), corpus))
    same = compare(outcome(), outcome(), case.recipe.model)
    losses = [(4.0, 2.0, 9.0), (4.0, 2.0, 9.0), (4.0, 2.000002, 9.0)]
    findings = [CaseResult(case, replace(same, loss=1e-6), each) for each in losses]
    figure = picture.curves([*findings, CaseResult(case, "an error")], "tiny")
    upper, lower = figure.axes
    assert [list(line.get_ydata()) for line in upper.lines] == [list(each[:2]) for each in losses]
    apart = [line.get_ydata()[1] for line in lower.lines]
    assert apart == [0, 0, pytest.approx(1e-6)] and lower.get_ylim()[1] == 2e-6
    assert "3 layouts" in upper.get_title() and "1.0e-06" in upper.get_title()


def test_a_failed_layout_is_black(corpus: Path) -> None:
    case = reference(made_small(recipe_of(corpus, {}), corpus))
    same = compare(outcome(), outcome(), case.recipe.model)
    close = replace(same, ratio=0.1)
    results = (same, close, replace(same, ratio=2.0), replace(same, diverged=["x"]), "an error")
    colours = [picture._colour(CaseResult(case, result)) for result in results]
    assert colours == [picture.MIN_COLOUR, pytest.approx(-1), *(3 * [picture.FAILED])]


def test_the_exit_code_is_the_verdict(capsys: pytest.CaptureFixture) -> None:
    arguments = ["prove.py", "--ranks", "1", "--steps", "1", "--layouts"]
    arguments += ["--only", "zero=3", "--only", "recompute=full"]
    found = partial(Cause, settings=("zero",), module="head", phase="forward", tensor="loss")
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(compare_module, "_ratio", lambda value, limit: 2.0),
        mock.patch.object(prove, "find_cause", lambda case, *_, **__: found(case)),
        pytest.raises(SystemExit) as ended,
    ):
        prove.main()
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "first difference: zero, head, forward: loss differs by" in printed
    assert "differs: tensor 1 x pipeline 1 x data 1, zero3, recompute full by 2" in printed
    assert "0 of 2 layouts train like one process" in printed


@pytest.mark.parametrize("finished", [0, 5])
@pytest.mark.parametrize("as_one_object", [False, True])
def test_an_interrupted_proof_reports_what_is_finished(
    capsys: pytest.CaptureFixture, finished: int, as_one_object: bool
) -> None:
    closed = []

    def interrupted(proof: prove.Proof) -> Iterator[CaseResult]:
        try:
            same = compare(outcome(), outcome(), proof.small.model)
            yield from (CaseResult(case, same) for case in proof.cases[:finished])
            raise SystemExit(130)  # as the handler of SIGINT
        finally:
            closed.append(proof.ranks)

    arguments = ["prove.py", "--ranks", "1", *(["--json"] if as_one_object else [])]
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(prove.Proof, "run", interrupted),
        pytest.raises(SystemExit) as ended,
    ):
        prove.main()
    assert ended.value.code == 130 and closed == [1]
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == f"interrupted after {finished} of 12 layouts"
    if not finished:
        assert not printed.out
    elif as_one_object:
        found = json.loads(printed.out)
        assert len(found["layouts"]) == 5 and not found["complete"] and not found["passed"]
    else:
        assert "5 of 5 layouts train like one process" in printed.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_does_not_interrupt_the_cleanup(
    number: int, capsys: pytest.CaptureFixture
) -> None:
    cleaned = []
    signal.signal(signal.SIGHUP, lambda *_: None)  # it may be ignored, or end the tests

    def interrupted(proof: prove.Proof) -> Iterator[CaseResult]:
        try:
            signal.raise_signal(number)
            yield from finished(proof)
        finally:
            signal.raise_signal(number)
            cleaned.append(proof.ranks)

    with (
        mock.patch.object(sys, "argv", ["prove.py", "--ranks", "1"]),
        mock.patch.object(prove.Proof, "run", interrupted),
        pytest.raises(SystemExit, match=str(128 + number)),
    ):
        prove.main()
    assert cleaned == [1]
    with mock.patch.object(exits, "ECHO_SECONDS", 0):
        signal.raise_signal(number)  # during the exit handlers
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted after 0 of 12 layouts"


def finished(proof: prove.Proof) -> Iterator[CaseResult]:
    """Take the place of `Proof.run`: every layout agrees."""
    same = compare(outcome(), outcome(), proof.small.model)
    yield from (CaseResult(case, same) for case in proof.cases)


def test_a_finished_proof_whose_picture_cannot_be_written_is_printed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    full = UserError("a.png cannot be written")
    arguments = ["prove.py", "--ranks", "1", "--heatmap", str(tmp_path / "a.png")]
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(prove.Proof, "run", finished),
        mock.patch.object(picture, "save_figure", side_effect=full),
        pytest.raises(SystemExit) as ended,
    ):
        prove.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "12 of 12 layouts train like one process" in printed.out
    assert printed.err.splitlines()[-1] == "prove.py: a.png cannot be written"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_finished_proof_whose_report_cannot_be_written_says_so(
    options: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "a.svg"
    arguments = ["prove.py", "--ranks", "1", "--heatmap", str(file), *options]
    with (
        open("/dev/full", "w") as full,
        contextlib.redirect_stdout(full),
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(prove.Proof, "run", finished),
        pytest.raises(SystemExit) as ended,
    ):
        prove.main()
    assert ended.value.code == 2 and file.exists()
    said = "prove.py: standard output cannot be written (No space left on device)"
    assert capsys.readouterr().err.splitlines()[-1] == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/none.toml"], "recipes/none.toml: no such recipe"),
        (["--set", "model.heads=7"], "use heads = 6 or 8"),
        (["--ranks", "0"], "invalid number 0: expected 1 to 1024"),
        (["--steps", "many"], "many"),
        (
            [
                *("--ranks", "1", "--relay", "--only", "zero=1", "--only", "recompute=none"),
                *("--only", "micro_sequences=1"),
            ],
            "choose at least 2 layouts",
        ),
    ],
)
def test_an_invalid_recipe_or_option_is_rejected_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with (
        mock.patch.object(sys, "argv", ["prove.py", *arguments]),
        pytest.raises(SystemExit, match="2"),
    ):
        prove.main()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err.splitlines()[-1]
