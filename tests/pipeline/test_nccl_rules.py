"""The engine obeys NCCL's rules: it trains on a backend that enforces them, and mutants hang."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.parallel.collectives import NcclSettings, create_groups
from tests.conftest import DAYS, GPT_SWITCHES, TODAY, changed, small_recipe
from tests.nccl_rules.device import Rules
from tests.nccl_rules.slots import LaunchRule
from tests.ranks import REPOSITORY, join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.prove.layouts import SCHEDULES

STRICT = Rules(slots=2, launch=LaunchRule.POSTING_ORDER, patience=60)
RULES = {
    "posting order": STRICT,
    "one hardware queue": replace(STRICT, one_queue=True),
    "any order": Rules(slots=4, launch=LaunchRule.ANY_ORDER, patience=60),
}
HANGS = 2.0  # seconds of patience where a hang is expected
ZERO_2 = "ds_configs/zero2_fp32.json"
FLOAT32, BFLOAT16 = "ds_configs/zero1_fp32.json", "ds_configs/zero1_bf16.json"
EXPERTS = {
    "model__experts": {
        "count": 8, "per_token": 2, "ffn_hidden_size": 24, "shared": 2, "balance_loss": 0.1,
    },
    "model__initial_std": 0.1,
}  # fmt: skip
MUON = {"optimizer__kind": "muon"}
SPLIT = {"tensor": 2, "sequence_parallel": True}
FOUR_STAGES = ("zb-v",)  # the exhaustive tests run all schedules, with eight stages
EXHAUSTIVE = [
    (4, "posting order"),
    (4, "one hardware queue"),
    (4, "any order"),
    (8, "posting order"),
    (8, "one hardware queue"),
]


def join_with_rules(rules: Rules) -> LaunchEnvironment:
    """Join the world with the backend that enforces the rules."""
    os.environ.update(rules.environment())
    from tests.nccl_rules import install  # noqa: F401

    return join_world()


def recipe_of(corpus: str, layout: dict[str, Any], **changes: Any) -> Recipe:
    """Return a small recipe of two stages, or of the layout's number of stages."""
    stages, is_folded = layout.get("pipeline", 2), layout.get("schedule") in ("zb-v", "dualpipev")
    sequences = 2 * stages * changes.pop("data", 1)
    defaults = {
        "model__layers": stages * (2 if is_folded else layout.get("virtual_stages", 1)),
        "layout": {"pipeline": stages, **layout},
        "batch": {"global_sequences": sequences, "micro_sequences": 1},
    }
    return parse_recipe(changed(small_recipe(Path(corpus)), **(defaults | changes)), "test")


def train(recipe: Recipe, world: LaunchEnvironment, *, watched: bool = False) -> list[float]:
    """Train two steps with a validation in between; return losses and gradient norms.

    watched: fail if an operation runs for the first time while a receive is outstanding
    """
    from threefold.prove.training import start, train_step

    engine, data = start(recipe, world)
    found = []
    varies = recipe.model.experts is not None or recipe.data.separate_documents
    with watch_first_uses(watched, sizes=not varies):
        for step in (1, 2):
            result = train_step(engine, data, step)
            found += [result.loss, result.grad_norm]
            if step == 1:
                found.append(engine.evaluate(data.evaluation()))
    return found


def watch_first_uses(watched: bool, *, sizes: bool) -> Any:
    if not watched:
        return contextlib.nullcontext()
    from tests.nccl_rules.backend import DEVICE
    from tests.nccl_rules.first_uses import FirstUses

    return FirstUses(DEVICE, sizes=sizes)


def layouts_of(world_size: int) -> dict[str, dict[str, Any]]:
    """Return the layouts to train with this number of ranks: name -> changes of the recipe."""
    two_stages = world_size == 2
    found: dict[str, dict[str, Any]] = {
        name: {"layout": {**layout, "pipeline": min(world_size, 8)}}
        for name, layout in SCHEDULES.items()
        if world_size != 4 or name in FOUR_STAGES
    }
    if two_stages:
        found["tied, bf16"] = {"layout": {}, "deepspeed": BFLOAT16, **GPT_SWITCHES}
        return found
    across = {"tensor": 2} if world_size == 8 else {}
    contexts = {"context": world_size // 2}
    return found | {
        "context, gather": {"layout": {**contexts, "schedule": "zb-v"}},
        "context, ring": {
            "layout": {
                **contexts,
                "context_attention": "ring",
                "schedule": "interleaved",
                "virtual_stages": 2,
            },
        },
        "context, ulysses": {
            "layout": {**contexts, "context_attention": "ulysses", "schedule": "zb-h1"},
            **GPT_SWITCHES,
        },
        "experts": {
            "layout": {"expert": world_size // 2, "schedule": "zb-v"},
            "data": world_size // 2,
            **EXPERTS,
        },
        "experts, overlap, ZeRO-2": {
            "layout": {
                "expert": world_size // 2,
                "schedule": "interleaved",
                "virtual_stages": 2,
                "expert_overlap": True,
            },
            "data": world_size // 2,
            "deepspeed": ZERO_2,
            **EXPERTS,
        },
        "experts, tensor, bf16": {
            "layout": {"tensor": 2, "expert": world_size // 4},
            "data": world_size // 4,
            "deepspeed": BFLOAT16,
            **EXPERTS,
        },
        "tensor": {"layout": {"tensor": 2}, "data": world_size // 4},
        "Muon, bf16": {
            "layout": {"schedule": "zb-v", **across},
            "data": 2,
            "deepspeed": BFLOAT16,
            **MUON,
        },
        "Muon, tensor": {
            "layout": {"tensor": 2, "schedule": "interleaved", "virtual_stages": 2},
            "data": world_size // 4,
            **MUON,
        },
        "sequence parallel, recomputed": {
            "layout": {**SPLIT, "schedule": "zb-v", "recompute": "full"},
            "data": world_size // 4,
        },
        "data, bf16": {
            "layout": {"schedule": "interleaved", "virtual_stages": 2, **across},
            "deepspeed": BFLOAT16,
            "data": 2,
        },
        "ZeRO-2": {"layout": across, "data": 2, "deepspeed": ZERO_2},
        "ZeRO-2, interleaved": {
            "layout": {"schedule": "interleaved", "virtual_stages": 2, **across},
            "data": 2,
            "deepspeed": ZERO_2,
        },
        "ZeRO-2, zb-v, tied": {
            "layout": {"schedule": "zb-v", **across},
            "data": 2,
            "deepspeed": ZERO_2,
            **GPT_SWITCHES,
        },
        "ZeRO-2, shard groups": {
            "layout": {"schedule": "zb-v", "dp_shard": world_size // 4},
            "data": world_size // 2,
            "deepspeed": ZERO_2,
        },
        "data, fp32": {"layout": {"schedule": "zb-h1", **across}, "data": 2},
        "data, fp32, tied": {
            "layout": {"schedule": "dualpipev", **across},
            "data": 2,
            **GPT_SWITCHES,
        },
    }


def layouts_worker(
    corpus: str, rules: Rules | None, layouts: dict[str, dict[str, Any]]
) -> dict[str, list[float]]:
    """Train layouts of one world size.

    rules: NCCL's rules; None: train the reference, on one process with gloo
    """
    world = join_world() if rules is None else join_with_rules(rules)
    recipes = {name: recipe_of(corpus, **changes) for name, changes in layouts.items()}
    if rules is None:
        recipes = {
            name: recipe.model_copy(update={"layout": type(recipe.layout)()})
            for name, recipe in recipes.items()
        }
    watched = rules == RULES["posting order"]
    trained = {
        recipe: train(recipe, world, watched=watched) for recipe in dict.fromkeys(recipes.values())
    }
    return {name: trained[recipe] for name, recipe in recipes.items()}


@pytest.mark.parametrize(
    ("size", "rules"),
    [
        pytest.param(2, "posting order", marks=pytest.mark.long),
        pytest.param(2, "one hardware queue", marks=pytest.mark.long),
        *(pytest.param(size, each, marks=pytest.mark.exhaustive) for size, each in EXHAUSTIVE),
    ],
)
def test_every_layout_trains_under_the_rules_with_the_numbers_of_one_process(
    size: int, rules: str, corpus: Path
) -> None:
    compare_with_one_process(size, rules, layouts_of(size), corpus)


@pytest.mark.long
def test_some_layouts_of_four_ranks_train_under_the_rules(corpus: Path) -> None:
    """Some of the layouts each day; an exhaustive test trains all of them."""
    layouts = dict(list(layouts_of(4).items())[TODAY % DAYS :: DAYS])
    compare_with_one_process(4, "posting order", layouts, corpus)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "rules"),
    [(4, "posting order"), (4, "one hardware queue"), (8, "posting order")],
)
def test_context_ranks_train_under_the_rules_in_every_schedule(
    size: int, rules: str, corpus: Path
) -> None:
    layouts = {
        f"{name}, {kind}": {
            "layout": {**layout, "context": size // 2, "context_attention": kind},
            "model__kv_heads": 4,
        }
        for name, layout in SCHEDULES.items()
        for kind in ("gather", "ring", "ulysses")
    }
    compare_with_one_process(size, rules, layouts, corpus)


def compare_with_one_process(
    size: int, rules: str, layouts: dict[str, dict[str, Any]], corpus: Path
) -> None:
    (expected,) = run_ranks(1, layouts_worker, str(corpus), None, layouts)
    found = run_ranks(size, layouts_worker, str(corpus), RULES[rules], layouts)
    for name, numbers in expected.items():
        close = pytest.approx(numbers, rel=2e-2 if "bf16" in name else 2e-6)
        assert all(each[name] == close for each in found), name


def mutant_worker(corpus: str, mutant: str) -> str:
    """Train a step with a mutant of the engine; return the error that ended it."""
    rules = Rules(slots=1 if mutant == "one kernel" else 100, patience=HANGS)
    world = join_with_rules(rules)
    from threefold.engine.engine import StageEngine
    from threefold.pipeline import channels
    from threefold.pipeline import engine as engine_module

    def leave_out(*arguments: Any, **settings: Any) -> None:
        pass

    def only_reduce(engine: Any, *_: Any) -> None:
        for kind, chunk in engine.gradients.buckets_by_pass if torch.is_grad_enabled() else ():
            engine.gradients.begin_reducing_pass(kind, chunk, is_last=True)
            engine.gradients.end_reducing_pass()

    if mutant == "no connections":
        channels.Channels.connect = leave_out
        engine_module._run_passes = only_reduce
    if mutant == "no passes":
        engine_module._run_passes = only_reduce
    if mutant == "no warm-up":
        engine_module.warm_up = leave_out
    if mutant == "one kind":
        all_kinds = StageEngine._infos_of_all_kinds
        StageEngine._infos_of_all_kinds = lambda *arguments: all_kinds(*arguments)[:1]
    if mutant == "order of need":
        from tests.pipeline.test_communication import ReceivesByNeed
        from threefold.pipeline import schedules

        schedules._Receives = ReceivesByNeed
    schedule = "zb-v" if mutant == "order of need" else "1f1b"
    changes = {"data__separate_documents": True} if mutant in ("one kind", "none") else {}
    watched = mutant in ("no passes", "one kind", "none")
    try:
        train(recipe_of(corpus, {"schedule": schedule}, **changes), world, watched=watched)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "trained"


@pytest.mark.parametrize(
    ("mutant", "expected"),
    [
        ("no connections", "the first use of"),
        ("no passes", "DeviceWideSynchronization"),
        ("order of need", "met receive"),
        ("one kind", "DeviceWideSynchronization"),
        pytest.param("no warm-up", "the first use of", marks=pytest.mark.long),
        pytest.param("one kernel", "Hang", marks=pytest.mark.long),
    ],
)
def test_a_mutant_of_the_engine_is_caught(mutant: str, expected: str, corpus: Path) -> None:
    found = run_ranks(2, mutant_worker, str(corpus), mutant)
    assert any(expected in each for each in found), found


def test_kernels_of_both_kinds_of_micro_batches_run_before_the_first_step(corpus: Path) -> None:
    """The windows of a micro-batch may have one document each, or several."""
    assert run_ranks(2, mutant_worker, str(corpus), "none") == ["trained"] * 2


def rules_worker() -> dict[str, str]:
    """Break one rule after the other on two ranks; return the resulting error by rule."""
    world = join_with_rules(Rules(patience=2.0))
    from tests.nccl_rules.backend import DEVICE

    rank, other, token = world.rank, 1 - world.rank, torch.ones(1)

    def split() -> None:
        settings = NcclSettings(high_priority=True, max_ctas=4)
        pair, alone = create_groups([[0, 1]], settings), create_groups([[1]], settings)
        assert pair is not None and pair.size() == 2 and (alone is None) == (rank == 0)
        options = pair.options  # type: ignore[attr-defined]
        assert options.is_high_priority_stream and options.config.max_ctas == 4
        assert dist.group.WORLD.options.config.max_ctas is None
        summed = token.clone()
        dist.all_reduce(summed, group=pair)
        assert summed == 2
        create_groups([[0, 1]] if rank == 0 else [[0], [1]])  # the ranks disagree

    def first_send() -> None:
        groups = two_groups()
        dist.irecv(token, other, group=groups[0])  # blocks, since the peer sends only later
        dist.isend(token, other, group=groups[0])

    def first_collective() -> None:
        for group in two_groups()[:: 1 - 2 * rank]:
            dist.all_reduce(token, group=group, async_op=True)

    def order() -> None:
        groups = two_groups()
        connect(groups, token, rank)
        tags = (1, 2) if rank == 0 else (2, 1)
        for each in [post(rank == 0, token, other, groups[0], tag) for tag in tags]:
            each.wait()

    def slots() -> None:
        groups = two_groups()
        connect(groups, token, rank)
        DEVICE.rules = replace(DEVICE.rules, slots=1)
        expected = dist.irecv(token, other, group=groups[rank])  # takes the only slot
        dist.isend(token, other, group=groups[other])
        expected.wait()

    def one_queue() -> None:
        DEVICE.rules = replace(DEVICE.rules, slots=100)
        groups = two_groups()
        connect(groups, token, rank)
        DEVICE.rules = replace(DEVICE.rules, one_queue=True)
        dist.irecv(token, other, group=groups[rank])
        dist.irecv(token, other, group=groups[rank])  # blocks the sends that both wait for
        for _ in range(2):
            dist.isend(token, other, group=groups[other])

    def synchronization() -> None:
        DEVICE.rules = replace(DEVICE.rules, one_queue=False)
        groups = two_groups()
        connect(groups, token, rank)
        dist.irecv(token, other, group=groups[rank])
        DEVICE.synchronize_all("a first use")

    found = {}
    for rule in (split, first_send, first_collective, order, slots, one_queue, synchronization):
        try:
            rule()
            found[rule.__name__] = "nothing"
        except Exception as problem:
            found[rule.__name__] = f"{type(problem).__name__}: {problem}"
    return found


def two_groups() -> list[dist.ProcessGroup]:
    return [dist.new_group([0, 1]) for _ in range(2)]


def connect(groups: list[dist.ProcessGroup], token: torch.Tensor, rank: int) -> None:
    """Exchange a message in both directions of both groups."""
    for group in groups:
        for sender in (0, 1):
            post(rank == sender, token, 1 - rank, group, 0).wait()


def post(
    sends: bool, token: torch.Tensor, other: int, group: dist.ProcessGroup, tag: int
) -> dist.Work:
    transfer = dist.isend if sends else dist.irecv
    return transfer(token.clone(), other, group=group, tag=tag)


@pytest.mark.long
def test_the_backend_enforces_each_rule() -> None:
    results = run_ranks(2, rules_worker)
    for rule, expected in (
        ("split", "into other groups"),
        ("first_send", "the first use of"),
        ("first_collective", "the first use of"),
        ("order", "message 1 met receive 2"),
        ("slots", "Hang: rank"),
        ("one_queue", "is not launched"),
        ("synchronization", "DeviceWideSynchronization: "),
    ):  # a rank that gives up sets the other one free
        assert any(expected in found[rule] for found in results), (rule, results)


@pytest.mark.exhaustive
@pytest.mark.parametrize("relay", [[], ["--relay"]], ids=["layouts", "relay"])
def test_proofs_pass_under_the_rules(relay: list[str]) -> None:
    command = [sys.executable, "-m", "tests.nccl_rules.prove", "--ranks", "2", "--json", *relay]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.exhaustive
def test_a_proof_with_one_kernel_fails() -> None:
    """This shows that the processes of a proof run on the backend."""
    command = [sys.executable, "-m", "tests.nccl_rules.prove", "--ranks", "2", "--slots", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1 and "Hang" in done.stdout + done.stderr
