"""Phases of a run: which recipe each step follows, and which phases are rejected."""

import re
import tomllib
from copy import deepcopy
from typing import Any

import pytest

from models.errors import UserError
from threefold.config.loading import apply_overrides, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan, recipe_at, table_at
from threefold.pretrain.experiment import check_phases

LONG = {"name": "long", "start_step": 9, "model": {"sequence_length": 64}}
DECAY: dict[str, Any] = {
    "name": "decay",
    "start_step": 15,
    "optimizer": {
        "learning_rate": 1e-3,
        "schedule": {"warmup_steps": 0, "decay": "wsd", "decay_steps": 6, "decay_shape": "sqrt"},
    },
}


def staged(small: dict[str, Any], *phases: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's table with phases, and a constant learning rate in the first one."""
    table = deepcopy(small)
    table["optimizer"]["schedule"] = {"warmup_steps": 5, "decay": "constant"}
    return table | {"phase": deepcopy(list(phases))}


def plan_of(table: dict[str, Any]) -> PhasePlan:
    return PhasePlan(parse_recipe(table, "test"))


def test_a_recipe_without_phases_is_its_own_plan(small: dict[str, Any]) -> None:
    recipe = parse_recipe(small, "test")
    (segment,) = PhasePlan(recipe).segments
    assert (segment.first, segment.last, segment.phase) == (1, 20, "first")
    assert segment.recipe is recipe
    assert recipe_at(recipe, 7) is recipe


def test_changes_are_cumulative(small: dict[str, Any]) -> None:
    batch = {**LONG, "name": "batch", "start_step": 12, "batch": {"global_sequences": 16}}
    del batch["model"]
    plan = plan_of(staged(small, LONG, batch, DECAY))
    found = [
        (s.phase, s.first, s.last, s.recipe.model.sequence_length, s.recipe.batch.global_sequences)
        for s in plan.segments
    ]
    assert found == [
        ("first", 1, 8, 32, 8),
        ("long", 9, 11, 64, 8),
        ("batch", 12, 14, 64, 16),
        ("decay", 15, 20, 64, 16),
    ]
    assert all(not segment.recipe.phase for segment in plan.segments)
    assert [plan.tokens_before(step) for step in (1, 9, 10, 12, 13)] == [
        0,
        8 * 8 * 32,
        8 * 8 * 32 + 8 * 64,
        8 * 8 * 32 + 3 * 8 * 64,
        8 * 8 * 32 + 3 * 8 * 64 + 16 * 64,
    ]
    assert plan.samples_before(21) == 11 * 8 + 9 * 16


@pytest.mark.parametrize(("tokens", "step"), [(2047, 9), (2048, 9), (2049, 10), (2304, 10)])
def test_tokens_are_converted_exactly(small: dict[str, Any], tokens: int, step: int) -> None:
    """A step of the first phase reads 256 tokens: 8 steps read 2048."""
    phase = {"name": "long", "start_tokens": tokens, "model": {"sequence_length": 64}}
    plan = plan_of(staged(small, phase))
    assert plan.steps_of("long")[0] == step
    assert plan.tokens_before(step) >= tokens > plan.tokens_before(step - 1)


def test_a_phase_begins_after_trillions_of_tokens(small: dict[str, Any]) -> None:
    tokens = 14_800_000_000_000
    late = {"name": "late", "start_tokens": tokens, "optimizer": {"weight_decay": 0}}
    table = staged(small, late)
    table["model"]["sequence_length"] = 2**17
    table["training"]["steps"] = 10**9
    step = plan_of(table).steps_of("late")[0]
    assert step == tokens // (8 * 2**17) + 2


def test_tokens_count_over_earlier_phases(small: dict[str, Any]) -> None:
    late = {"name": "late", "start_tokens": 2048 + 3 * 512, "batch": {"global_sequences": 16}}
    assert plan_of(staged(small, LONG, late)).steps_of("late")[0] == 12


def test_the_schedule_of_a_phase_counts_its_own_steps(small: dict[str, Any]) -> None:
    plan = plan_of(staged(small, LONG, DECAY))
    rates = {step: plan.at(step).learning_rate(step) for step in range(1, 21)}
    peak = small["optimizer"]["learning_rate"]
    assert rates[1] == pytest.approx(peak / 5)
    assert {rates[step] for step in range(5, 15)} == {peak}  # the phase "long" changes no schedule
    expected = [1e-3 * (1 - (n / 6) ** 0.5) for n in range(1, 7)]
    assert [rates[step] for step in range(15, 21)] == pytest.approx(expected, abs=1e-12)


def test_a_schedule_with_steps_is_not_stretched_to_its_phase(small: dict[str, Any]) -> None:
    table = staged(small, DECAY)
    table["optimizer"]["schedule"] = {
        "warmup_steps": 2,
        "decay": "linear",
        "steps": 10,
        "minimum_learning_rate": 1e-4,
    }
    first, later = plan_of(table).phases
    assert (first.schedule_end, first.last) == (10, 14)
    assert first.learning_rate(9) > first.learning_rate(10) == first.learning_rate(14) == 1e-4
    assert later.schedule_end == 20

    table["phase"][0]["optimizer"] = {"learning_rate": 1e-3}  # with the shape of the old schedule
    later = plan_of(table).phases[-1]
    assert later.schedule_end == 20 and later.learning_rate(19) > later.learning_rate(20)

    table["phase"][0]["optimizer"] = {"weight_decay": 0.0}  # the old schedule continues
    later = plan_of(table).phases[-1]
    assert later.schedule_end == 10 and later.learning_rate(19) == 1e-4


def test_a_schedule_ends_before_the_next_one(small: dict[str, Any]) -> None:
    table = staged(small, LONG, DECAY)
    table["optimizer"]["schedule"] = {"warmup_steps": 0, "decay": "linear"}
    plan = plan_of(table)
    assert plan.at(14).learning_rate(14) == 0.0
    assert plan.at(7).learning_rate(7) == pytest.approx(small["optimizer"]["learning_rate"] / 2)


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_decay_shapes_fall_from_the_peak_to_the_minimum(small: dict[str, Any], shape: str) -> None:
    table = staged(small)
    table["optimizer"] |= {"learning_rate": 1e-3}
    table["optimizer"]["schedule"] = {
        "warmup_steps": 0,
        "decay": "wsd",
        "decay_steps": 10,
        "decay_shape": shape,
        "minimum_learning_rate": 1e-4,
    }
    (segment,) = plan_of(table).segments
    rates = [segment.learning_rate(step) for step in range(10, 21)]
    assert rates[0] == 1e-3
    assert rates[-1] == pytest.approx(1e-4)
    assert rates == sorted(rates, reverse=True)
    half = {"linear": 0.5, "cosine": 0.5, "sqrt": 1 - 0.5**0.5}[shape]
    assert rates[5] == pytest.approx(1e-4 + 9e-4 * half)


def test_the_ramp_is_that_of_megatron(small: dict[str, Any]) -> None:
    """Compare with Megatron's formula, from the samples consumed before each step."""
    small["batch"] |= {"ramp": {"start_sequences": 2, "increment": 2, "samples": 30}}
    plan = plan_of(small)
    consumed = 0
    for step in range(1, 21):
        size = 2 + 2 * int(consumed / (30 / 3)) if consumed < 30 else 8
        assert plan.at(step).recipe.batch.global_sequences == size
        assert plan.samples_before(step) == consumed
        consumed += size
    assert plan.names == ["first"]


def test_another_schedule_of_the_pipeline_drops_the_old_virtual_stages(
    small: dict[str, Any],
) -> None:
    small["model"]["layers"] = 4
    small["layout"] = {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}
    phase = {"name": "plain", "start_step": 9, "layout": {"schedule": "1f1b"}}
    assert plan_of(staged(small, phase)).at(9).recipe.layout.virtual_stages == 1


def test_only_some_changes_need_another_engine(small: dict[str, Any]) -> None:
    def last(**changes: Any) -> int:
        plan = plan_of(staged(small, {"name": "a", "start_step": 9, **changes}))
        return plan.last_step_of_engine(1)

    assert last(batch={"global_sequences": 16}) == 20
    assert last(optimizer={"learning_rate": 1e-4}) == 20
    assert last(data={"train": [{"path": "other"}]}) == 20
    assert last(data={"separate_documents": True}) == 8
    assert last(batch={"micro_sequences": 1}) == 8
    assert last(model={"rope_theta": 5e5}) == 8
    assert last(layout={"recompute": "full"}) == 8
    assert last(optimizer={"weight_decay": 0.0}) == 8


def test_overrides_name_a_phase(small: dict[str, Any]) -> None:
    table = staged(small, LONG)
    apply_overrides(table, ["phase.long.model.sequence_length=128", "phase.long.start_step=5"])
    assert plan_of(table).at(5).recipe.model.sequence_length == 128
    with pytest.raises(UserError, match=r"the recipe has no phase short; .* long"):
        apply_overrides(table, ["phase.short.start_step=5"])


def test_a_resolved_recipe_keeps_its_phases(small: dict[str, Any]) -> None:
    recipe = parse_recipe(staged(small, LONG, DECAY), "test")
    again = parse_recipe(tomllib.loads(recipe.toml()), "again")
    assert [s.recipe for s in PhasePlan(again).segments] == [
        s.recipe for s in PhasePlan(recipe).segments
    ]
    table = recipe.model_dump(mode="json")
    lengths = [table_at(table, step)["model"]["sequence_length"] for step in (0, 8, 9, 20)]
    assert lengths == [32, 32, 64, 64]
    assert table_at({"model": {}}, 3) == {"model": {}}


SCHEDULE = {"warmup_steps": 0, "decay": "wsd", "decay_steps": 9}
REJECTED = {
    "an architecture key": (
        [{**LONG, "model": {"hidden_size": 64}}],
        "phase.long.model.hidden_size cannot change during a run; the keys of [phase.model] are "
        "sequence_length, rope_theta, rope_scaling, prediction",
    ),
    "another section": (
        [{**LONG, "training": {"steps": 9}}],
        "unknown section [phase.long.training]",
    ),
    "a number in place of a phase": (
        [1, {**LONG, "start_step": "x"}],
        'phase.long.start_step = "x"',
    ),
    "an unknown layout key": (
        [{**LONG, "layout": {"tensr": 2}}],
        'phase "long": unknown key layout.tensr = 2; did you mean layout.tensor?',
    ),
    "no start": ([{"name": "a", "model": {"rope_theta": 1.0}}], "phase.a has neither of"),
    "two starts": ([{**LONG, "start_tokens": 9}], "phase.long has both of start_step"),
    "no change": ([{"name": "a", "start_step": 5}], "phase.a changes nothing"),
    "the wrong order": (
        [LONG, {**DECAY, "start_step": 9}],
        'phase.decay.start_step = 9 does not come after phase "long", which begins with step 9',
    ),
    "a late start": ([{**LONG, "start_step": 21}], "comes after training.steps = 20"),
    "a name twice": ([LONG, {**LONG, "start_step": 12}], 'phase.name = "long" is used by another'),
    "the first name": ([{**LONG, "name": "first"}], 'phase.name = "first" is the name of'),
    "an impossible recipe": (
        [{**LONG, "layout": {"tensor": 3}}],
        'phase "long": model.heads = 4 is not divisible by layout.tensor = 3',
    ),
    "a long decay": (
        [{**DECAY, "optimizer": {"schedule": SCHEDULE}}],
        'phase "decay": optimizer.schedule.warmup_steps = 0 and decay_steps = 9 do not fit into '
        "the steps of its schedule = 6",
    ),
    "a long decay of another shape": (
        [{**DECAY, "optimizer": {"schedule": SCHEDULE | {"decay_shape": "sqrt"}}}],
        'schedule = { warmup_steps = 0, decay = "wsd", decay_steps = 6, decay_shape = "sqrt" }',
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_impossible_phases_are_rejected(small: dict[str, Any], name: str) -> None:
    phases, message = REJECTED[name]
    with pytest.raises(UserError) as raised:
        parse_recipe(staged(small, *phases), "test")
    assert message in str(raised.value)


def test_no_phase_validates_on_what_an_earlier_one_has_trained_on(small: dict[str, Any]) -> None:
    train, validation = small["data"]["train"][0]["path"], small["data"]["validation"]
    swapped = {"train": [{"path": validation}], "validation": train}
    with pytest.raises(UserError) as raised:
        parse_recipe(staged(small, {"name": "late", "start_step": 9, "data": swapped}), "test")
    assert str(raised.value) == (
        f'test: phase "late": data.validation = "{train}" is also a training corpus of phase '
        f'"first"; use a file of its own, as prepare_data.py writes it'
    )
    swapped["validation"] = f"{validation}-2"
    parse_recipe(staged(small, {"name": "late", "start_step": 9, "data": swapped}), "test")


def test_a_phase_changes_the_weight_of_predictions_but_not_their_depth(
    small: dict[str, Any],
) -> None:
    small["model"]["prediction"] = {"depth": 2, "loss_weight": 0.3}
    later = {"name": "later", "start_step": 9, "model": {"prediction": {"depth": 2}}}
    later["model"]["prediction"]["loss_weight"] = 0.1
    plan = plan_of(staged(small, later))
    predictions = [plan.at(step).recipe.model.prediction for step in (8, 9)]
    assert [each.loss_weight for each in predictions if each] == [0.3, 0.1]
    assert plan.last_step_of_engine(1) == 8
    later["model"]["prediction"]["depth"] = 1
    message = r'phase "later": model.prediction.depth = 1, but \[model.prediction\] has depth = 2'
    with pytest.raises(UserError, match=message):
        parse_recipe(staged(small, later), "test")


def test_learned_positions_cannot_become_longer(small: dict[str, Any]) -> None:
    small["model"] |= {"positions": "learned"}
    del small["model"]["rope_theta"]
    with pytest.raises(UserError, match=r'phase "long": model.sequence_length = 64 needs other'):
        parse_recipe(staged(small, LONG), "test")


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ({"start_sequences": 8, "increment": 2, "samples": 30}, "is not below"),
        ({"start_sequences": 2, "increment": 4, "samples": 30}, "does not divide"),
        ({"start_sequences": 2, "increment": 2, "samples": 300}, "between; use .*samples = 22"),
        (
            {"start_sequences": 2, "increment": 2, "samples": 40},
            "and phase.long begins with step 9, .* begin the phase at step 15 or later, or",
        ),
        ({"start_sequences": 1, "increment": 1, "samples": 30}, "start_sequences = 1 is not divis"),
        ({"start_sequences": 2, "increment": 3, "samples": 30}, "increment = 3 is not divisible"),
    ],
)
def test_impossible_ramps_are_rejected(
    small: dict[str, Any], ramp: dict[str, int], message: str
) -> None:
    small["batch"] |= {"ramp": ramp}
    with pytest.raises(UserError, match=message):
        parse_recipe(staged(small, LONG), "test")


@pytest.mark.parametrize(
    ("batch", "increment", "advice"),
    [
        ((8, 2), 2, "for example batch.ramp.start_sequences = 6"),
        ((8, 2), 3, "start_sequences = 2 and batch.ramp.increment = 6"),
        ((8, 8), 2, "leave batch.ramp out"),
        ((8, 2), 8, "leave batch.ramp out"),
    ],
)
def test_the_advice_for_a_ramp_that_begins_with_the_full_batch_works(
    small: dict[str, Any], batch: tuple[int, int], increment: int, advice: str
) -> None:
    ramp = {"start_sequences": 8, "increment": increment, "samples": 16}
    small["batch"] = {"global_sequences": batch[0], "micro_sequences": batch[1], "ramp": ramp}
    with pytest.raises(UserError, match=r"start_sequences = 8 is not below") as raised:
        plan_of(small)
    message = str(raised.value)
    assert message.endswith(advice)
    if "leave" in advice:
        del small["batch"]["ramp"]
    for key, value in re.findall(r"(batch[.\w]+) = (\d+)", message.partition("for example ")[2]):
        apply_overrides(small, [f"{key}={value}"])
    plan_of(small)


@pytest.mark.parametrize("start_step", [2, 3, 9])
def test_the_advised_length_of_a_ramp_is_the_longest_that_fits_before_a_phase(
    small: dict[str, Any], start_step: int
) -> None:
    ramp = {"start_sequences": 2, "increment": 2, "samples": 90}
    small["batch"] = {"global_sequences": 8, "micro_sequences": 2, "ramp": ramp}
    table = staged(small, {**LONG, "start_step": start_step})
    with pytest.raises(UserError, match=r"must come in between; .*samples|leave.* out$") as raised:
        plan_of(table)
    if start_step == 2:  # the only step before the phase needs the full batch
        assert str(raised.value).endswith("leave batch.ramp out")
        return
    advised = int(re.findall(r"batch.ramp.samples = (\d+)$", str(raised.value))[0])
    apply_overrides(table, [f"batch.ramp.samples={advised}"])
    last = plan_of(table).segments_of("first")[-1]
    assert (last.first, last.last) == (start_step - 1, start_step - 1)
    apply_overrides(table, [f"batch.ramp.samples={advised + 1}"])
    with pytest.raises(UserError, match="must come in between"):
        plan_of(table)


def test_a_phase_that_does_not_fit_the_ranks_is_named(small: dict[str, Any]) -> None:
    table = staged(small, {**LONG, "layout": {"tensor": 2}})
    plan = plan_of(table)
    check_phases(LaunchEnvironment(size=2, local_size=2), plan, "test")
    with pytest.raises(UserError, match=r'phase "long": layout.tensor = 2'):
        check_phases(LaunchEnvironment(size=1, local_size=1), plan, "test")
    table = staged(small, {**LONG, "batch": {"global_sequences": 10}})
    with pytest.raises(UserError, match=r'phase "long": batch.global_sequences = 10'):
        check_phases(LaunchEnvironment(size=4, local_size=4), plan_of(table), "test")


PIPELINE = {"pipeline": 2, "schedule": "dualpipev"}  # needs four micro-batches


@pytest.mark.parametrize(
    ("sizes", "layout", "wrong", "advice"),
    [
        ((2, 2, 8), {}, r"the batch of 2 sequences is not", "start_sequences = 4 .*increment = 4"),
        ((4, 2, 8), {}, r"the batch of 6 sequences is not", "start_sequences = 4 .*increment = 4"),
        ((4, 6, 16), {}, r"the batch of 10 seq", "start_sequences = 4 .*increment = 4"),
        ((2, 2, 6), {}, r"the batch of 2 seq", "global_sequences = 8, batch.ramp.start"),
        ((6, 2, 8), {}, r"the batch of 6 seq", "a constant batch, and leave batch.ramp out"),
        ((2, 2, 16), PIPELINE, r"batch of 2 sequences makes 1", "start_sequences = 8 .* = 2"),
        ((2, 2, 6), PIPELINE, r"batch of 2 sequences makes 1", "sequences = 8, and leave"),
    ],
)
def test_a_ramp_that_does_not_fit_the_ranks_is_named(
    sizes: tuple[int, int, int], layout: dict[str, Any], wrong: str, advice: str,
    small: dict[str, Any],
) -> None:  # fmt: skip
    """The advice about a step of the ramp is about the ramp, and a recipe that follows it fits."""
    start, increment, full = sizes
    ramp = {"start_sequences": start, "increment": increment, "samples": 30}
    small["batch"] = {"global_sequences": full, "micro_sequences": 2, "ramp": ramp}
    small["layout"] = layout
    small["model"]["layers"] = 4
    world = LaunchEnvironment(size=2, local_size=2)
    with pytest.raises(UserError, match=rf"steps \d+ .. \d+ of batch.ramp.*{wrong}") as raised:
        check_phases(world, plan_of(small), "test")
    assert re.search(f"; use .*{advice}", str(raised.value)), str(raised.value)
    advised = str(raised.value).partition("; use ")[2]
    if "leave batch.ramp out" in advised:
        del small["batch"]["ramp"]
    for key, value in re.findall(r"(batch[.\w]+) = (\d+)", advised):
        apply_overrides(small, [f"{key}={value}"])
    check_phases(world, plan_of(small), "test")


def test_a_group_of_micro_batches_is_compared_with_the_full_batch(small: dict[str, Any]) -> None:
    ramp = {"start_sequences": 8, "increment": 8, "samples": 16}
    small |= {
        "batch": {"global_sequences": 16, "micro_sequences": 2, "ramp": ramp},
        "deepspeed": "ds_configs/zero2_fp32.json",
        "layout": {"reduce_every": 5},
    }
    world = LaunchEnvironment(size=2, local_size=2)
    with pytest.raises(UserError, match=r"than the 4 micro-batches .*reduce_every = 4"):
        check_phases(world, plan_of(small), "test")
    small["layout"]["reduce_every"] = 4
    check_phases(world, plan_of(small), "test")


def test_validation_may_begin_with_a_later_phase(small: dict[str, Any]) -> None:
    path = small["data"].pop("validation")
    small["checkpoint"] |= {"every": 20, "keep_best": 1}
    later = {"name": "later", "start_step": 9, "data": {"validation": path}}
    plan = plan_of(small | {"phase": [later]})
    sets = [segment.recipe.data.validation_sets for segment in plan.segments]
    assert sets == [{}, {"": path}]
    with pytest.raises(UserError, match=r"no data.validation; use checkpoint.keep_best = 0"):
        plan_of(small | {"phase": [LONG]})
    small["checkpoint"]["keep_best"] = 0
    with pytest.raises(UserError, match=r"no effect .*; use training.evaluate_every = 0"):
        plan_of(small | {"phase": [LONG]})
    small["training"]["evaluate_every"] = 0
    plan_of(small | {"phase": [LONG]})


WSD = {"warmup_steps": 5, "decay": "wsd", "decay_steps": 8}
RATE: dict[str, Any] = {"name": "rate", "optimizer": {"learning_rate": 1e-3}}
SEQUENCES = {"warmup_steps": 8, "decay": "cosine", "counts": "sequences", "steps": 64}
LONGER: dict[str, Any] = {"name": "long", "model": {"sequence_length": 64}}
CONSTANT = {"warmup_steps": 5, "decay": "constant"}


@pytest.mark.parametrize(
    ("schedule", "phases", "advice"),
    [
        (  # the decay needs 13 steps before and after the start, and the run has 30
            WSD, [{**RATE, "start_step": 20}],
            ("phase.rate.start_step = 18,", "phase.rate.optimizer.schedule = {"),
        ),
        (WSD, [{**RATE, "start_tokens": 19 * 256}], ("start_step = 18 in place of start_tokens,",)),
        (WSD, [{**RATE, "start_step": 5}], ("use for example optimizer.schedule = {",)),
        (
            WSD, [{**RATE, "start_step": 15}, {**RATE, "name": "last", "start_step": 28}],
            ("use for example phase.last.optimizer.schedule = {",),
        ),
        (
            CONSTANT, [{**LONGER, "start_step": 17},
                       {"name": "late", "start_step": 19, "optimizer": {"schedule": WSD}}],
            ("phase.late.start_step = 18,", "decay_steps = 12 }"),
        ),
        (
            CONSTANT, [{**LONGER, "start_step": 18},
                       {"name": "late", "start_step": 19, "optimizer": {"schedule": WSD}}],
            ("use for example phase.late.optimizer.schedule = {",),
        ),
        (SEQUENCES, [{**RATE, "start_step": 15}], ('steps = 64', 'counts = "sequences"')),
        (
            SEQUENCES | {"decay": "wsd", "decay_steps": 8}, [{**RATE, "start_step": 15}],
            ("decay_steps = 8",),
        ),
        (
            CONSTANT,
            [{**LONGER, "start_tokens": 1}, {**LONGER, "name": "more", "start_tokens": 2}],
            ("use phase.more.start_step = 3 or more in place of start_tokens",),
        ),
        (CONSTANT, [{**LONGER, "start_step": 30}, {**LONGER, "name": "more", "start_step": 30}],
         ("; leave the phase out",)),
    ],
)  # fmt: skip
def test_the_advice_for_the_schedule_and_the_start_of_a_phase_works(
    small: dict[str, Any], schedule: dict[str, Any], phases: list[dict[str, Any]],
    advice: tuple[str, ...],
) -> None:  # fmt: skip
    small["optimizer"]["schedule"] = schedule
    small["training"]["steps"] = 30
    table = small | {"phase": phases}
    with pytest.raises(UserError) as raised:
        plan_of(table)
    message = str(raised.value)
    assert all(words in message for words in advice), message
    if "leave the phase out" in message:
        plan_of(table | {"phase": phases[:-1]})
        return
    for alternative in message.partition("; use ")[2].split(", or "):
        followed = deepcopy(table)
        if "in place of start_tokens" in alternative:
            del followed["phase"][-1]["start_tokens"]
        ((key, value),) = re.findall(r"(\S+) = ({.*}|\d+)", alternative)
        apply_overrides(followed, [f"{key}={value}"])
        plan_of(followed)
