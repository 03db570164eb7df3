"""Every shipped recipe is the published model, fits its own cluster, and trains when shrunk.

The published values are repeated here, independently of the recipes, each with its source.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from models.cost import parameter_count
from tests.commands import run_here
from tests.conftest import DAYS, each_in_turn, shipped_recipes
from tests.ranks import run_ranks
from threefold.commands import plan
from threefold.config.deepspeed_json import (
    build_deepspeed_config,
    read_deepspeed_json,
    zero_stage,
)
from threefold.config.loading import (
    DEFAULT_RECIPE,
    REPOSITORY,
    load_recipe,
)
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.plan import catalogue
from threefold.plan.job import Machine, job_of, job_without_layout
from threefold.plan.search import NEAR_TIE, search
from threefold.plan.time.step import step_time
from threefold.prove.layouts import ProofCase, valid_cases
from threefold.prove.shrink import shrink, write_corpus
from threefold.prove.training import train_cases

FILES = [path for path in shipped_recipes() if path.parent != DEFAULT_RECIPE.parent]
NAMES = [f"{path.parent.name}-{path.stem}" for path in FILES]
GPUS = ("V100-32GB", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "MI300X")
STEPS = 1
VOCAB_SIZE = 192  # of the corpus: the smallest vocabulary that shrinking makes
COPIES = (  # recipes that have all features of the catalogue
    "completep-gpt-125m", "deepseek-v2-lite", "deepseek-v3", "dots-llm1", "gemma3-27b",
    "glm-4.5-air", "gpt-350m", "gpt-oss-20b", "kimi-k2", "llama-1b", "llama-405b", "llama-8b",
    "llama-8b-128k", "megatron-1.7b", "mistral-7b", "mixtral-8x7b", "olmo3-7b", "olmoe-1b-7b",
    "qwen2.5-7b", "qwen3-0.6b", "qwen3-32b", "qwen3-4b-128k", "smollm3-3b",
)  # fmt: skip
OTHERS = [name for name in NAMES if name not in COPIES]


@dataclass(frozen=True)
class Published:
    """A model as its source publishes it; `tokens` is the budget."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    ffn_hidden_size: int
    parameters: int
    tokens: float


@dataclass(frozen=True)
class Training:
    """A step of a small copy; `untouched` are the parameters that had no gradient."""

    losses: list[float]
    grad_norms: list[float]
    untouched: list[str]


def gpt(layers: int, hidden: int, heads: int, parameters: int, tokens: float) -> Published:
    return Published(layers, hidden, heads, heads, 4 * hidden, parameters, tokens)


# Brown et al. 2020, table 2.1, but 16 heads for 1.3B's 24 and 5,120 columns for 13B's 5,140, which
# their heads do not make; 300 B tokens. The counts are not published; GPT-2's checkpoint of the
# first shape has 124,439,808 parameters with 1,024 positions, and these are its formula's.
GPT3 = {
    "gpt-125m": gpt(12, 768, 12, 124_439_808 + 1024 * 768, 10e9),  # its own budget
    "gpt-350m": gpt(24, 1024, 16, 355_871_744, 300e9),
    "gpt-760m": gpt(24, 1536, 16, 760_300_032, 300e9),
    "gpt-1.3b": gpt(24, 2048, 16, 1_315_723_264, 300e9),
    "gpt-2.7b": gpt(32, 2560, 32, 2_651_553_280, 300e9),
    "gpt-6.7b": gpt(32, 4096, 32, 6_658_404_352, 300e9),
    "gpt-13b": gpt(40, 5120, 40, 12_853_386_240, 300e9),
    "gpt-175b": gpt(96, 12288, 96, 174_604_259_328, 300e9),
}
# The same table: parameters, batch in tokens, learning rate.
GPT3_TRAINING = {
    "gpt-125m": (125e6, 0.5e6, 6e-4),
    "gpt-350m": (350e6, 0.5e6, 3e-4),
    "gpt-760m": (760e6, 0.5e6, 2.5e-4),
    "gpt-1.3b": (1.3e9, 1e6, 2e-4),
    "gpt-2.7b": (2.7e9, 1e6, 1.6e-4),
    "gpt-6.7b": (6.7e9, 2e6, 1.2e-4),
    "gpt-13b": (13.0e9, 2e6, 1e-4),
    "gpt-175b": (175.0e9, 3.2e6, 0.6e-4),
}
# The same shapes in the parametrization CompleteP, with 20 tokens per parameter of the largest one.
COMPLETEP = {
    f"completep-{name}": replace(GPT3[name], tokens=20 * GPT3["gpt-1.3b"].parameters)
    for name in ("gpt-125m", "gpt-350m", "gpt-760m", "gpt-1.3b")
}
# Narayanan et al. 2021, table 1: parameters in units of 1e9, heads, hidden size, layers, tensor,
# pipeline, GPUs, global batch; and the tokens of its section 5.1.
MEGATRON = {
    "megatron-1.7b": (1.7, 24, 2304, 24, 1, 1, 32, 512, 300e9),
    "megatron-3.6b": (3.6, 32, 3072, 30, 2, 1, 64, 512, 300e9),
    "megatron-7.5b": (7.5, 32, 4096, 36, 4, 1, 128, 512, 300e9),
    "megatron-18b": (18.4, 48, 6144, 40, 8, 1, 256, 1024, 300e9),
    "megatron-39b": (39.1, 64, 8192, 48, 8, 2, 512, 1536, 300e9),
    "megatron-76b": (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 300e9),
    "megatron-145b": (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 300e9),
    "megatron-310b": (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 300e9),
    "megatron-530b": (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 300e9),
    "megatron-1t": (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 450e9),
}


def equation_2(layers: int, hidden: int, vocab: int = 51200, sequence: int = 2048) -> int:
    """Narayanan et al. 2021: 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh); without the final norm."""
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + sequence) * hidden


# Shapes: the models' config.json; counts: the elements of their released weights; tokens: Touvron
# et al. 2023, table 1; the model cards of Llama 3.1 and 3.2; Dubey et al. 2024, sections 3 and
# 3.4.2; the Qwen3 report's section 3.1, but our own for 4b-128k.
RELEASED = {
    "llama-1b": Published(16, 2048, 32, 8, 8192, 1_235_814_400, 9e12),
    "llama-3b": Published(28, 3072, 24, 8, 8192, 3_212_749_824, 9e12),
    "llama-7b": Published(32, 4096, 32, 32, 11008, 6_738_415_616, 2e12),
    "llama-8b": Published(32, 4096, 32, 8, 14336, 8_030_261_248, 15e12),
    "llama-8b-128k": Published(32, 4096, 32, 8, 14336, 8_030_261_248, 800e9),
    "llama-13b": Published(40, 5120, 40, 40, 13824, 13_015_864_320, 2e12),
    "llama-70b": Published(80, 8192, 64, 8, 28672, 70_553_706_496, 15e12),
    "llama-405b": Published(126, 16384, 128, 8, 53248, 405_853_388_800, 15.6e12),
    "qwen3-0.6b": Published(28, 1024, 16, 8, 3072, 596_049_920, 36e12),
    "qwen3-1.7b": Published(28, 2048, 16, 8, 6144, 1_720_574_976, 36e12),
    "qwen3-4b": Published(36, 2560, 32, 8, 9728, 4_022_468_096, 36e12),
    "qwen3-4b-128k": Published(36, 2560, 32, 8, 9728, 4_022_468_096, 100e9),
    "qwen3-8b": Published(36, 4096, 32, 8, 12288, 8_190_735_360, 36e12),
    "qwen3-14b": Published(40, 5120, 40, 8, 17408, 14_768_307_200, 36e12),
    "qwen3-32b": Published(64, 5120, 64, 8, 25600, 32_762_123_264, 36e12),
}
# As above; the count of OLMoE is 61,440 below that of its released weights, because each head has
# its own norm of queries and keys.
MIXTURES = {
    "mixtral-8x7b": Published(32, 4096, 32, 8, 14336, 46_702_792_704, 2e12),  # our own tokens
    "qwen3-30b-a3b": Published(48, 2048, 32, 4, 6144, 30_532_122_624, 36e12),
    "dots-llm1": Published(62, 4096, 32, 32, 10944, 142_774_381_696, 11.2e12),
    "olmoe-1b-7b": Published(16, 2048, 16, 16, 1024, 6_919_161_856 - 61_440, 5.1e12),
}
# `test_released_models.py` compares these with transformers' classes. Tokens: the Qwen2.5 report's
# section 3; the blog post on SmolLM3; the OLMo 3 report; the Gemma 3 report's section 2.2; the
# GLM-4.5 report's section 2; our own for Mistral and GPT-OSS.
VARIANTS = {
    "mistral-7b": Published(32, 4096, 32, 8, 14336, 7_241_732_096, 2e12),
    "qwen2.5-7b": Published(28, 3584, 28, 4, 18944, 7_615_616_512, 18e12),
    "smollm3-3b": Published(36, 2048, 16, 4, 11008, 3_075_098_624, 11.2e12),
    "olmo3-7b": Published(32, 4096, 32, 32, 11008, 7_298_011_136, 5.93e12),
    "olmo3-32b": Published(64, 5120, 40, 8, 27648, 32_233_522_176, 5.5e12),
    "gemma3-27b": Published(62, 5376, 32, 16, 21504, 27_009_346_304, 14e12),
    "gpt-oss-20b": Published(24, 2880, 64, 8, 2880, 20_914_757_184, 4e12),
    "gpt-oss-120b": Published(36, 2880, 64, 8, 2880, 116_829_156_672, 8e12),
    "glm-4.5-air": Published(46, 4096, 96, 8, 10944, 106_852_251_264, 22e12),
    "deepseek-v3": Published(61, 7168, 128, 128, 18432, 682_636_487_424, 14.8e12),
    "deepseek-v2-lite": Published(27, 2048, 16, 16, 10944, 15_706_484_224, 5.7e12),
    "kimi-k2": Published(61, 7168, 64, 64, 18432, 1_026_408_232_448, 15.5e12),
}
PUBLISHED = (
    GPT3
    | COMPLETEP
    | {
        name: gpt(layers, hidden, heads, equation_2(layers, hidden) + 2 * hidden, tokens)
        for name, (_, heads, hidden, layers, *_, tokens) in MEGATRON.items()
    }
    | RELEASED
    | MIXTURES
    | VARIANTS
)
# Touvron et al. 2023, table 1; Dubey et al. 2024, table 3.
LLAMA_RATES = {"7b": 3e-4, "13b": 3e-4, "8b": 3e-4, "70b": 1.5e-4, "405b": 8e-5}


@cache
def shipped(name: str) -> Recipe:
    return load_recipe(FILES[NAMES.index(name)])


def test_the_catalogue_lists_every_shipped_recipe() -> None:
    assert set(NAMES) == set(PUBLISHED) and len(NAMES) == len(PUBLISHED)


def test_recipes_are_the_published_models_and_fit_their_clusters() -> None:
    for name in NAMES:
        recipe, published = shipped(name), PUBLISHED[name]
        model, text = recipe.model, FILES[NAMES.index(name)].read_text()
        for size in ("layers", "hidden_size", "heads", "kv_heads", "ffn_hidden_size"):
            assert getattr(model, size) == getattr(published, size), (name, size)
        assert parameter_count(model) == published.parameters, name
        assert recipe.name == name, name
        comment = " ".join(line.removeprefix("# ") for line in text.split("\n\n")[0].split("\n"))
        assert f"{published.parameters:,} parameters" in comment, name
        assert len(text.splitlines()) <= 90, name
        # It trains on its budget of tokens.
        assert recipe.training.steps == math.ceil(published.tokens / recipe.tokens_per_step), name
        assert recipe.optimizer.schedule.warmup_steps < recipe.training.steps / 20, name
        # It fits its own cluster.
        local = recipe.cluster.gpus_per_node
        dims = recipe.parallel_dims(
            LaunchEnvironment(size=recipe.cluster.nodes * local, local_size=local)
        )
        config = build_deepspeed_config(recipe, dims)
        # No stage idles throughout.
        assert config["gradient_accumulation_steps"] >= dims.pipeline, name
        assert recipe.cluster.gpu in GPUS, name
        assert ("bf16" in config) == (
            recipe.cluster.gpu[:4] != "V100" and "megatron" not in name
        ), name


def test_gpt_3_training_matches_its_table() -> None:
    for name in GPT3:
        recipe = shipped(name)
        parameters, batch, rate = GPT3_TRAINING[name]
        assert parameter_count(recipe.model) == pytest.approx(parameters, rel=0.02), name
        assert recipe.tokens_per_step == pytest.approx(batch, rel=0.05), name  # 0.5 M: 2^19
        assert recipe.optimizer.learning_rate == rate, name
        assert recipe.optimizer.schedule.minimum_learning_rate == pytest.approx(rate / 10), name
        model = recipe.model
        assert (model.vocab_size, model.sequence_length) == (50257, 2048), name


def test_the_completep_recipes_differ_only_in_the_size_of_the_model() -> None:
    base, *larger = map(shipped, COMPLETEP)
    model = replace(base.model, parametrization="standard", base_hidden_size=None,
                    base_layers=None, base_head_size=None)  # fmt: skip
    assert model == shipped("gpt-125m").model
    for recipe in larger:
        assert (recipe.optimizer, recipe.batch, recipe.training) == (
            base.optimizer,
            base.batch,
            base.training,
        )
        ours = recipe.model
        assert ours.parametrization == "completep"
        assert (ours.base_hidden_size, ours.base_layers, ours.base_head_size) == (
            base.model.hidden_size,
            base.model.layers,
            base.model.attention_head_size,
        )


def test_megatron_matches_its_table() -> None:
    for name in MEGATRON:
        recipe = shipped(name)
        billions, *_, tensor, pipeline, gpus, batch, _ = MEGATRON[name]
        model, layout, cluster = recipe.model, recipe.layout, recipe.cluster
        assert round(parameter_count(model) / 1e9, 1) == billions, name
        assert (layout.tensor, layout.pipeline) == (tensor, pipeline), name
        assert (cluster.nodes * cluster.gpus_per_node, cluster.gpu) == (gpus, "A100-80GB"), name
        assert recipe.batch.global_sequences == batch, name
        assert (layout.schedule, layout.recompute) == ("1f1b", "full"), name
        assert layout.recompute_interval == 1 and not layout.sequence_parallel, name
        assert recipe.deepspeed == "ds_configs/zero1_fp16.json", name
        assert (model.vocab_size, model.sequence_length) == (51200, 2048), name


def test_llama_and_qwen3_have_their_features() -> None:
    for name in RELEASED:
        recipe = shipped(name)
        family, size, *context = name.split("-")
        model = recipe.model
        if family == "qwen3":
            tied, theta, vocab, sequence, epsilon = (
                size in ("0.6b", "1.7b", "4b"),
                1e6,
                151936,
                4096,
                1e-6,
            )
            assert model.qk_norm and model.head_size == 128, name
        elif size in ("7b", "13b"):
            tied, theta, vocab, sequence, epsilon = False, 1e4, 32000, 4096, 1e-5
        else:
            tied, theta, vocab, sequence, epsilon = size in ("1b", "3b"), 5e5, 128256, 8192, 1e-5
        if context:
            sequence = 2**17
            scaling = model.rope_scaling
            # factor, and length that the released weights were trained on
            expected = {"llama": ("llama3", 8, 8192), "qwen3": ("yarn", 4, 32768)}[family]
            found = (scaling.type, scaling.factor, scaling.original_sequence_length)
            assert found == expected, name
            assert recipe.training.initial_weights, name
        else:
            assert model.rope_scaling is None, name
        found = (model.tie_embeddings, model.rope_theta, model.norm_epsilon)
        assert found == (tied, theta, epsilon), name
        assert (model.vocab_size, model.sequence_length) == (vocab, sequence), name
        assert (model.norm, model.positions, model.activation) == ("rmsnorm", "rope", "swiglu"), (
            name
        )
        assert not model.bias and model.qk_norm == (family == "qwen3"), name
        if family == "llama" and size in LLAMA_RATES and not context:
            assert recipe.optimizer.learning_rate == LLAMA_RATES[size], name


def test_llama_405b_training_matches_its_report() -> None:
    recipe = shipped("llama-405b")
    schedule = recipe.optimizer.schedule
    assert recipe.tokens_per_step == 16 * 2**20
    assert (schedule.warmup_steps, schedule.minimum_learning_rate) == (8000, 8e-7)


def small_variant(name: str, corpus: Path) -> ProofCase:
    """Return the shrunk recipe on one process, with the recipe's ZeRO stage and recomputation."""
    recipe = shipped(name)
    small = shrink(recipe, ranks=2, layers=2, steps=STEPS, corpus=corpus)
    stage = zero_stage(read_deepspeed_json(recipe.deepspeed))
    stage = 1 if stage == 2 else stage  # on one process, ZeRO-2 is ZeRO-1
    (case,) = (
        case
        for case in valid_cases(small, ranks=1, micro_sequences=(1,))
        if case.zero_stage == stage and case.recipe.layout.recompute == recipe.layout.recompute
    )
    return case


def train_worker(corpus: str, names: Sequence[str]) -> dict[str, Training]:
    """Train each shrunk recipe and return the results."""
    outcomes = train_cases(small_variant(name, Path(corpus)) for name in names)
    return {
        name: Training(
            outcome.losses,
            outcome.grad_norms,
            [
                parameter
                for parameter, moment in outcome.moments.items()
                if not moment.any() and not parameter.endswith("router.bias")
            ],
        )
        for name, outcome in zip(names, outcomes, strict=True)
    }


def features(name: str) -> tuple[object, ...]:
    """Return the switches of a recipe's architecture and its recomputation."""
    recipe = shipped(name)
    model = recipe.model
    scaling, experts = model.rope_scaling, model.experts
    return (
        model.norm, model.positions, model.activation, model.tie_embeddings, model.qk_norm,
        model.parametrization, scaling and scaling.type,
        experts and (experts.router, experts.shared > 0, experts.dense_layers > 0),
        experts and experts.groups > 1, model.latent and model.latent.query_rank is None,
        frozenset(model.attention_pattern), model.attention_sinks, model.norm_placement,
        model.has_qkv_bias, model.qk_norm_over, model.partial_rotary_factor != 1,
        recipe.layout.recompute,
    )  # fmt: skip


def test_the_trained_copies_have_all_features_of_the_catalogue() -> None:
    assert {features(name) for name in COPIES} == {features(name) for name in NAMES}


@pytest.mark.parametrize(
    "names",
    each_in_turn([COPIES, *(OTHERS[part::DAYS] for part in range(DAYS))]),
    ids=lambda names: names[0],
)
def test_a_small_copy_trains(names: Sequence[str], tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", VOCAB_SIZE)
    trained = run_ranks(1, train_worker, str(tmp_path / "corpus"), names)[0]
    for name, training in trained.items():
        assert len(training.losses) == STEPS + 1 and len(training.grad_norms) == STEPS, name
        # Wide models are drawn wider when made small, and begin further above a uniform guess.
        # Gemma's tied embeddings are large, and predict the token that they stand for.
        assert all(-0.5 < loss - math.log(VOCAB_SIZE) < 2.5 for loss in training.losses), name
        assert all(0 < norm < math.inf for norm in training.grad_norms), name
        assert training.untouched == [], name


@pytest.mark.parametrize("name", each_in_turn(["llama/13b", "llama/70b", "gpt/175b"]))
def test_a_comment_states_how_much_less_time_the_planners_layout_takes(name: str) -> None:
    path = REPOSITORY / "recipes" / f"{name}.toml"
    comment = " ".join(line.strip("# ") for line in path.read_text().splitlines() if "#" in line)
    (stated,) = re.findall(r"takes (\d+) % less time", comment)
    own, best = own_and_best_seconds(path)
    assert int(stated) == round(100 * (1 - best / own))


@pytest.mark.parametrize("name", each_in_turn(["gpt/13b", "llama/8b", "qwen3/32b"]))
def test_a_layout_that_is_said_to_be_the_planners_is_within_its_error(name: str) -> None:
    path = REPOSITORY / "recipes" / f"{name}.toml"
    assert "the planner's fastest layout" in path.read_text()
    own, best = own_and_best_seconds(path)
    assert own <= (1 + NEAR_TIE) * best


def own_and_best_seconds(path: Path) -> tuple[float, float]:
    """Return the predicted step times of a recipe's layout and of the layout that a plan lists."""
    recipe = load_recipe(path)
    job = job_of(recipe, Machine.of_cluster(recipe.cluster))
    (plan,) = search(job_without_layout(recipe, job.machine), 1).plans
    return step_time(job).total, plan.time.total


def test_a_row_of_the_catalogue_has_the_tokens_and_days_of_all_steps() -> None:
    """The batch grows from a quarter of its size in the first half of the samples."""
    path = REPOSITORY / "recipes" / "llama" / "7b.toml"
    whole = load_recipe(path)
    size = whole.batch.global_sequences
    sizes = f"start_sequences={size // 4},increment={3 * size // 4}"
    ramp = f"batch.ramp={{{sizes},samples={whole.training.steps * size // 8}}}"
    rows = [
        catalogue.recipe_row(path, recipe, Machine.of_cluster(recipe.cluster)).split(" | ")
        for recipe in (whole, load_recipe(path, [ramp]))
    ]
    tokens, days = ([float(row[column].strip("T |")) for row in rows] for column in (2, -1))
    assert tokens[1] == pytest.approx(0.625 * tokens[0], rel=0.01)
    assert 0.6 < days[1] / days[0] < 0.8


def test_broken_and_untracked_recipes_are_left_out_of_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shipped recipe that is not valid or cannot be planned hides no other one.

    A recipe that git does not track is skipped without a message.
    """
    good = REPOSITORY / "recipes" / "llama" / "1b.toml"
    broken, unplanned = tmp_path / "broken.toml", tmp_path / "unplanned.toml"
    broken.write_text(good.read_text().replace("[model]", "[modell]"))
    unplanned.write_text(good.read_text().replace('gpu = "', 'gpu = "X'))
    untracked = tmp_path / "untracked.toml"
    untracked.write_text(good.read_text())
    monkeypatch.setattr(
        catalogue, "recipes_in_repository", lambda: [broken, untracked, unplanned, good]
    )
    monkeypatch.setattr(catalogue, "untracked_files", lambda _: {untracked})
    monkeypatch.setattr(catalogue, "ZERO_STAGE_ROWS", ())
    done = run_here(plan.main, "catalogue")
    assert done.returncode == 2 and done.stdout.count("\n| llama/1b |") == 1
    assert str(tmp_path) not in done.stdout
    first, second = done.stderr.splitlines()
    assert first.startswith(f"plan.py: left out {broken}: ") and "modell" in first
    assert second.startswith(f"plan.py: left out {unplanned}: ") and "X" in second
