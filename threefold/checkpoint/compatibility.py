"""Compare a checkpoint with the recipe and the data of the run that starts or resumes from it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from models.config import SCALING_KEYS, ModelConfig, shortest_pattern
from models.errors import UserError, why_missing
from threefold.checkpoint.format import Manifest, manifest_damage
from threefold.config.deepspeed_json import leaves
from threefold.config.loading import value_text
from threefold.config.phases import table_at
from threefold.config.recipe import Recipe
from threefold.config.sections import repository_path
from threefold.data.manifest import is_corpus
from threefold.run_folder.history import Progress, published

# Keys of [model] that do not affect the shape or meaning of weights. A run may change them when it
# starts from initial weights.
TRAINING_ONLY = (
    *("dropout", "attention_dropout", "initial_std", "z_loss"),
    *("experts.balance_loss", "experts.z_loss", "experts.bias_update", "prediction.loss_weight"),
)
# With rotary positions, a run may also change these keys, to continue on longer sequences.
ROTARY_KEYS = (
    *("sequence_length", "rope_theta", "rope_scaling"),
    *("window.rope_theta", "window.rope_scaled"),
)
REMEDY_FOR_DAMAGED_WEIGHTS = "use another checkpoint, or write it again with recipes/convert.py"


def check_same_run(
    checkpoint: Path, manifest: Manifest, recipe: Recipe, data: dict[str, Any]
) -> None:
    """Check that a run may resume from a checkpoint.

    Raises:
        UserError: the checkpoint has another model, seed, tokenizer or corpus; the message names
            each key that differs.
    """
    if not manifest.has_moments or "seed" not in manifest.recipe:
        raise UserError(
            f"{checkpoint} has only weights and no run to resume; start a run from it with "
            f'--set training.initial_weights="{checkpoint}"'
        )
    saved, now = manifest.recipe, recipe.model_dump(mode="json")
    kind = saved["optimizer"].get("kind", "adamw")
    if kind != recipe.optimizer.kind:
        raise UserError(
            f'{checkpoint} has the optimizer state of optimizer.kind = "{kind}", not of '
            f'"{recipe.optimizer.kind}"; use optimizer.kind = "{kind}", or start a new run from '
            f"its weights with --run-dir and training.initial_weights"
        )
    # A checkpoint that convert.py imported from another program knows nothing about the data.
    read = manifest.data or data
    before, after = (_begun(fingerprint, manifest.step) for fingerprint in (read, data))
    # Older checkpoints do not record these two keys. Corpora are always compared by content.
    unrecorded = {"separate_documents": False, "document_starts": data.get("document_starts")}
    different = differences(
        {
            "model": spelled_out(saved["model"]),
            "seed": saved["seed"],
            "data": unrecorded | before.shared,
        },
        {"model": spelled_out(now["model"]), "seed": now["seed"], "data": after.shared},
    )
    if different:
        others = "another --run-dir for a new run, or start this run over with --resume never"
        if "data.tokenizer" in different:
            raise UserError(
                f"{checkpoint} was trained with another tokenizer, which cannot change during a "
                f"run; prepare the corpus again with the tokenizer of the run (option --tokenizer "
                f"of recipes/prepare_data.py), use {others}"
            )
        if all(key.startswith("data.") for key in different):
            raise UserError(
                f"{checkpoint} was trained on other data: {_sentence(different)}; use the same "
                f"data, change the data in a [[phase]] that begins after step {manifest.step}, use "
                f"{others}"
            )
        raise UserError(
            f"{checkpoint} was trained with {_sentence(different)}; use the same values, {others}"
        )
    _check_same_phases(checkpoint, manifest.step, before.phases, after.phases)
    check_parts_read(manifest.progress, manifest.data.get("parts", ()), data.get("parts", ()))


def check_parts_read(
    progress: Progress, before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]
) -> None:
    """Check that phases from which a run has rolled back still have the data that the run has read.

    Their names and first steps may change, because the run will reach them again.

    Args:
        before: fingerprints of the parts of the data from the second one on, as read
        now: fingerprints of the same parts of the recipe

    Raises:
        UserError: a part differs; the message names its phase.
    """
    for number in sorted({part - 1 for part, _ in progress.left_parts} & set(range(len(before)))):
        old, new = before[number], now[number] if number < len(now) else None
        about = f'the run has read data of phase "{old["phase"]}" and rolled back'
        if new is None:
            raise UserError(f"{about}, and this recipe lacks the phase; add it again")
        free = {key: old[key] for key in ("phase", "first_step")}
        if different := differences(old, new | free):
            raise UserError(
                f"{about}, so that the phase cannot change: {_sentence(different)}; use the same "
                f"values, or let a new phase begin after it"
            )


class _Fingerprint(NamedTuple):
    """A fingerprint: of the first phase, and of the later phases that have changed the data."""

    shared: dict[str, Any]
    phases: list[dict[str, Any]]


def _begun(data: dict[str, Any], step: int) -> _Fingerprint:
    """Return the fingerprint of the phases that have begun when a step is done."""
    parts = [part for part in data.get("parts", ()) if part["first_step"] <= step]
    return _Fingerprint({key: value for key, value in data.items() if key != "parts"}, parts)


def _check_same_phases(
    checkpoint: Path, step: int, before: list[dict[str, Any]], now: list[dict[str, Any]]
) -> None:
    """Check that a run has gone through the same phases, as far as they change the data.

    Raises:
        UserError: the phases differ; the message names the phase.
    """
    for number in range(max(len(before), len(now))):
        old = before[number] if number < len(before) else None
        new = now[number] if number < len(now) else None
        if old is None and new is not None:
            raise UserError(
                f'{checkpoint} was trained without phase "{new["phase"]}", which begins with step '
                f"{new['first_step']}; let the phase begin after step {step}, or use the recipe of "
                f"the checkpoint"
            )
        if old is not None and new is None:
            raise UserError(
                f'{checkpoint} was trained with phase "{old["phase"]}" from step '
                f"{old['first_step']} on, which this recipe lacks; add the phase, or resume from a "
                f"checkpoint before step {old['first_step']}"
            )
        assert old is not None and new is not None
        if different := differences(old, new | {"phase": old["phase"]}):
            raise UserError(
                f'{checkpoint} was trained with another phase "{old["phase"]}": '
                f"{_sentence(different)}; only phases that begin after step {step} may differ"
            )


def check_same_model(source: str, manifest: Manifest, recipe: Recipe) -> None:
    """Check that a run may start from the weights of a checkpoint.

    Args:
        source: the recipe's key that names the checkpoint, with its value, for a message

    Raises:
        UserError: the checkpoint has another model; the message names each key that differs.
    """
    theirs = spelled_out(table_at(manifest.recipe, manifest.step)["model"])
    ours = spelled_out(recipe.model_dump(mode="json")["model"])
    if recipe.model.prediction is None:  # the run does not read the modules
        theirs["prediction"] = None
    free = (*TRAINING_ONLY, *(ROTARY_KEYS if recipe.model.positions == "rope" else ()))
    different = {
        name: values
        for name, values in differences(theirs, ours).items()
        if not {name, name.partition(".")[0]} & set(free)
    }
    if different:
        raise UserError(
            f"{source} has {_sentence(different, 'model.')}; use the checkpoint's values"
        )


def check_initial_weights(recipe: Recipe) -> None:
    """Check the manifest of the weights that the recipe starts from, before ranks start.

    The ranks verify the other files when they read them.

    Raises:
        UserError: the checkpoint is missing, of another model, or its manifest is damaged.
    """
    if path := initial_weights(recipe):
        key = key_of_initial_weights(recipe)
        try:
            damage = manifest_damage(path)
        except OSError as error:
            damage = f"{error.filename} cannot be read ({error.strerror or error})"
        if damage:
            raise UserError(f"{key}: {damage}; {REMEDY_FOR_DAMAGED_WEIGHTS}")
        check_same_model(key, Manifest.read(path), recipe)


def initial_weights(recipe: Recipe, run: Path | None = None) -> Path | None:
    """Return the checkpoint with the weights that the recipe starts from, if it names one.

    Raises:
        UserError: the checkpoint is missing, or in the run's own folder.
    """
    setting = recipe.training.initial_weights
    if setting is None:
        return None
    path, key = repository_path(setting), key_of_initial_weights(recipe)
    if is_corpus(path):
        raise UserError(
            f"{key}: the path is a corpus of prepare_data.py, not a checkpoint; use a run's "
            f"checkpoint (runs/NAME/checkpoints/step-...)"
        )
    if not (path / "manifest.json").is_file():
        if saves := published(path / "checkpoints"):
            newest = saves[-1].relative_to(path)
            raise UserError(
                f"{key}: the path is a run folder, not a checkpoint; use {Path(setting) / newest}"
            )
        problem = why_missing(path, "checkpoint")
        raise UserError(
            f"{key}: the path {problem}; use a run's checkpoint "
            f"(runs/NAME/checkpoints/step-...) or the output of recipes/convert.py from-hf"
        )
    if run is not None and path.is_relative_to(run.resolve()):
        raise UserError(f"{key} is in the run's own folder; use --run-dir with another folder")
    return path


def key_of_initial_weights(recipe: Recipe) -> str:
    """Return the key that names the initial weights, with its value, for messages."""
    return f'training.initial_weights = "{recipe.training.initial_weights}"'


def changed_positions(manifest: Manifest, recipe: Recipe) -> str:
    """Describe the rotary positions of a run that differ from those of its initial weights.

    The weights do not show a mistake in these keys, and the run may change them on purpose.

    Returns:
        "model.rope_theta = 500000.0 (here 10000.0), ..."; empty if all are equal
    """
    if recipe.model.positions != "rope":
        return ""
    ours = recipe.model_dump(mode="json")["model"]
    theirs = table_at(manifest.recipe, manifest.step)["model"]
    is_scaled = any(table.get("rope_scaling") for table in (theirs, ours))
    before, now = (_positions(table, is_scaled=is_scaled) for table in (theirs, ours))
    return _sentence(differences(before, now), "model.")


def _positions(model: dict[str, Any], *, is_scaled: bool) -> dict[str, Any]:
    """Return the rotary keys of a [model] section that have an effect.

    is_scaled: the positions of one of the compared models are scaled
    """
    sections = {"": model, "window": model.get("window") or {}}
    rotary = {}
    for name in ROTARY_KEYS:
        section, _, key = name.rpartition(".")
        rotary[name] = sections[section].get(key)
    if scaling := rotary["rope_scaling"]:
        keys = ("type", "factor", *SCALING_KEYS[scaling["type"]])
        rotary["rope_scaling"] = {key: scaling.get(key) for key in keys}
    if not is_scaled:
        del rotary["window.rope_scaled"]
    return rotary


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Return section.key -> [before, now] for all differences between two nested tables."""
    old, new = dict(leaves(before)), dict(leaves(now))
    keys = sorted(old.keys() | new.keys())
    return {key: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}


def spelled_out(model: dict[str, Any]) -> dict[str, Any]:
    """Return the [model] section with every default filled in, in the form of JSON.

    Checkpoints of older versions lack the keys that have been added since: they have the defaults.
    """
    config = ModelConfig.from_table(model)
    kinds = [config.attention_kind(layer) for layer in range(config.layers)]
    filled = {
        "head_size": config.attention_head_size,
        "qkv_bias": config.has_qkv_bias,
        "attention_output_bias": config.has_attention_output_bias,
        "attention_pattern": list(shortest_pattern(kinds)),
    }
    if config.parametrization != "standard":
        filled["base_head_size"] = config.base_head_size or config.attention_head_size
    return asdict(config) | filled


def _sentence(different: dict[str, list[Any]], prefix: str = "") -> str:
    return ", ".join(_difference(f"{prefix}{key}", *different[key]) for key in different)


def _difference(key: str, before: Any, now: Any) -> str:
    """Return a difference in words; a SHA-256 is shortened."""
    if key.endswith(".content") and isinstance(before, str) and isinstance(now, str):
        return (
            f"the content of {key.removesuffix('.content')} differs ({before[:8]}, here {now[:8]})"
        )
    texts = ["not set" if value is None else value_text(value) for value in (before, now)]
    return f"{key} = {texts[0]} (here {texts[1]})"
