"""Export a checkpoint to a folder that transformers' `from_pretrained` can load."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from models.cost import parameter_count
from models.errors import UserError, counted, reason_of, why_missing
from models.hugging_face.config import hugging_face_config
from models.hugging_face.families import BY_NAME
from models.hugging_face.weights import counterparts
from models.layer_specs import logical_shapes
from threefold.checkpoint.format import (
    BYTES,
    FileRecord,
    TensorFileWriter,
    sha256,
    split_by_size,
)
from threefold.checkpoint.state import AVERAGE, WEIGHTS, CheckpointReader
from threefold.config.loading import parse_recipe
from threefold.config.phases import table_at
from threefold.config.sections import repository_path, short
from threefold.convert.files import AVERAGED_FROM, RESHAPED_FROM, OutputFiles, model_of
from threefold.data.corpus import document_starts
from threefold.data.manifest import tokenizer_hash
from threefold.prepare_data.tokenizer import document_start, load_tokenizer, vocabulary_size
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.json_lines import task_accuracies, validation_losses

DTYPES = {  # name in the command -> name in safetensors files, torch's dtype
    "fp32": ("F32", torch.float32),
    "bf16": ("BF16", torch.bfloat16),
    "fp16": ("F16", torch.float16),
}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
)

FILE_RECORDS = "threefold.json"  # size and SHA-256 of each file of an export
WRITTEN_BY = "convert.py to-hf"


def recorded_files(folder: Path) -> dict[str, FileRecord | None]:
    """Return the records of the files that an export wrote.

    Raises:
        UserError: threefold.json is damaged.
    """
    file = folder / FILE_RECORDS
    try:
        records = json.loads(file.read_bytes())["files"]
        files = {
            name: FileRecord(bytes=record["bytes"], sha256=record["sha256"])
            for name, record in records.items()
        }
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is damaged; use another folder, or delete {folder}") from None
    return {FILE_RECORDS: None, **files}


EXPORTED = OutputFiles(FILE_RECORDS, f'"written_by": "{WRITTEN_BY}"', recorded_files)


def export(
    source: CheckpointReader,
    folder: Path,
    *,
    dtype: str,
    tokenizer: Path | None,
    averaged: bool = False,
) -> None:
    """Write weights, config, generation config, tokenizer and model card.

    Args:
        tokenizer: folder of the tokenizer, from `find_tokenizer`
        averaged: export the average of the weights

    Raises:
        UserError: transformers has no class for the model, or cannot load the tokenizer; or the
            checkpoint has no average.
    """
    if averaged and not source.manifest.has_average:
        raise UserError(
            f"--averaged: {source.path} has no average of the weights; leave the option out, or "
            f"train with [optimizer.average]"
        )
    model = model_of(source)
    settings = hugging_face_config(model)
    family = BY_NAME[settings["model_type"]]
    if model.prediction is not None and not family.has_predictions:
        print(
            f"{family.class_name} has no place for the weights of [model.prediction]; the export "
            f"leaves them out, and the rest of the model is complete"
        )
    card = model_card(source, dtype, averaged=averaged, has_tokenizer=tokenizer is not None)
    for name in TOKENIZER_FILES:
        if tokenizer and (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    if tokenizer:
        begin_texts_as_in_training(source, folder, name=f"--tokenizer {tokenizer}")
    else:
        print("the export has no tokenizer; add one with --tokenizer FOLDER")
    special = special_tokens(tokenizer, source.manifest.special_tokens)
    config = their_config(settings | special)
    config.architectures = [family.class_name]
    config.dtype = DTYPES[dtype][1]
    config.save_pretrained(folder)
    GenerationConfig(**special, do_sample=True).save_pretrained(folder)
    records = write_weights(source, folder, dtype=dtype, stored=AVERAGE if averaged else WEIGHTS)
    (folder / "README.md").write_text(card, encoding="utf-8")
    # `--overwrite` replaces an export only if its files still match these records.
    for file in sorted(folder.iterdir()):
        if file.name not in records:  # a small file
            records[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    text = json.dumps({"written_by": WRITTEN_BY, "files": records}, indent=1) + "\n"
    (folder / FILE_RECORDS).write_text(text, encoding="utf-8")


def their_config(settings: dict[str, Any]) -> PreTrainedConfig:
    """Return transformers' config with settings of `hugging_face_config`.

    Raises:
        UserError: the class rejects a value.
    """
    try:
        return AutoConfig.for_model(**settings)
    except (StrictDataclassError, KeyError, ValueError) as error:
        raise UserError(
            f"transformers rejects this model as {BY_NAME[settings['model_type']].class_name}: "
            f"{reason_of(error)}; use another value in the recipe's [model] section"
        ) from None


def find_tokenizer(source: CheckpointReader, given: Path | None) -> Path | None:
    """Return the folder of the run's tokenizer, or None for imported weights without one.

    Raises:
        UserError: The folder has no tokenizer, a different one from the run's, or one with more
            tokens than the model.
    """
    expected = source.manifest.data.get("tokenizer")
    if given is None and "data" not in source.manifest.recipe:
        return None
    folder = given or repository_path(source.manifest.recipe["data"]["tokenizer"])
    if not (folder / "tokenizer.json").is_file():
        problem = why_missing(folder, "tokenizer.json")
        raise UserError(
            f"--tokenizer {given} {problem}; use the folder of the run's tokenizer, such as "
            f"data/NAME/tokenizer"
            if given
            else f"{short(folder)} {problem}; name the run's tokenizer with --tokenizer"
        )
    if expected and tokenizer_hash(folder) != expected:
        raise UserError(
            f"{folder} is not the tokenizer that the run was trained with; name the folder of the "
            f"tokenizer with SHA-256 {expected} with --tokenizer"
        )
    tokenizer = load_tokenizer(folder, f"--tokenizer {folder}")
    check_vocabulary(tokenizer, model_of(source).vocab_size, folder)
    return folder


def check_vocabulary(tokenizer: Any, size: int, folder: Path) -> None:
    """Raise a UserError if the tokenizer in a folder has ids that a model does not have.

    size: number of embeddings of the model
    """
    if (tokens := vocabulary_size(tokenizer)) > size:
        raise UserError(
            f"the tokenizer of {folder} needs {tokens:,} embeddings, and the model has {size:,}; "
            f"use --tokenizer FOLDER with the tokenizer that the model was trained with"
        )


def begin_texts_as_in_training(source: CheckpointReader, folder: Path, *, name: str) -> None:
    """Remove the BOS from the exported tokenizer if the run's documents did not begin with it.

    prepare_data.py begins documents as the tokenizer begins texts. Corpora from other tools or
    from older versions may have no BOS. The model has then never seen the token that the tokenizer
    would put before every prompt.

    Args:
        folder: the export, which has the tokenizer's files
        name: the option that names the tokenizer, with its value, for a message

    Raises:
        UserError: transformers cannot load the tokenizer, or it adds tokens in code.
    """
    start = document_start(load_tokenizer(folder, name))
    trained = source.manifest.data.get("document_starts")
    if trained is None and start:
        trained = _starts_of_corpora(source)
    if not start or trained is None or all(end == start for end in trained):
        return
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    text = json.dumps(settings | {"post_processor": None}, ensure_ascii=False, indent=2)
    file.write_text(text, encoding="utf-8")
    if document_start(load_tokenizer(folder, name)):
        raise UserError(
            f"the tokenizer adds {start} at the start of a text, but training documents began "
            f"with {trained}. Its class adds these tokens in code, which the export cannot turn "
            f"off; use --tokenizer with a tokenizer that adds none"
        )
    print(
        f"the tokenizer adds the tokens {start} at the start of a text, but training documents did "
        f"not begin with them; the exported tokenizer adds none"
    )


def _starts_of_corpora(source: CheckpointReader) -> list[list[int]] | None:
    """Return the first tokens of documents from the corpora of a run that did not record them."""
    try:
        recipe = parse_recipe(source.manifest.recipe, str(source.path))
        return document_starts(recipe)
    except (UserError, OSError) as problem:  # for example, the corpora are on another machine
        print(f"the exported tokenizer is unchanged, because the corpora cannot be read: {problem}")
        return None


def special_tokens(
    tokenizer: Path | None, imported: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end a text, for both configs.

    The configs name no padding token. The default of a class may be outside of the vocabulary, and
    transformers does not train the embedding of a padding token.

    Args:
        imported: `special_tokens` of the manifest, which have precedence over the tokenizer's
    """
    ids: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer, f"--tokenizer {tokenizer}")
        ids |= {"bos_token_id": loaded.bos_token_id, "eos_token_id": loaded.eos_token_id}
    known = {name: token for name, token in (imported or {}).items() if token is not None}
    return ids | known


def write_weights(
    source: CheckpointReader, folder: Path, *, dtype: str, stored: str
) -> dict[str, FileRecord]:
    """Write model.safetensors, or numbered files and an index, one tensor in memory at a time.

    stored: WEIGHTS or AVERAGE

    Returns:
        The records of the safetensors files.
    """
    model = model_of(source)
    table, shapes = counterparts(model), logical_shapes(model)
    kind, torch_dtype = DTYPES[dtype]
    groups: dict[str, list[str]] = {}  # name of their first tensor -> names of ours
    for name, counterpart in table.items():
        groups.setdefault(counterpart.names[0], []).append(name)
    shapes_of_groups = {
        first: {
            theirs: shape if (expert := table[names[0]].expert) is None else (expert[1], *shape)
            for theirs, shape in table[names[0]].shapes(shapes[names[0]]).items()
        }
        for first, names in groups.items()
    }
    files = split_by_size(
        {
            first: (sum(torch.Size(shape).numel() for shape in theirs.values()),)
            for first, theirs in shapes_of_groups.items()
        },
        dtype=kind,
    )
    index: dict[str, str] = {}
    records: dict[str, FileRecord] = {}
    total = 0

    def parts(name: str) -> Iterator[tuple[str, memoryview]]:
        for theirs, tensor in table[name].split(source.tensor(stored, name)):
            yield theirs, _bytes(tensor.to(torch.float32 if is_in_fp32(theirs) else torch_dtype))

    for number, firsts in enumerate(files, start=1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        firsts = sorted(firsts, key=is_in_fp32, reverse=True)  # readers need aligned tensors
        theirs = {k: v for first in firsts for k, v in shapes_of_groups[first].items()}
        index |= dict.fromkeys(theirs, name)
        other_dtypes = dict.fromkeys(filter(is_in_fp32, theirs), "F32")
        for key, shape in theirs.items():
            total += math.prod(shape) * BYTES[other_dtypes.get(key, kind)]
        with TensorFileWriter(
            folder / name, theirs, dtype=kind, other_dtypes=other_dtypes, metadata={"format": "pt"}
        ) as writer:
            for first in firsts:
                if len(groups[first]) == 1:
                    for part, data in parts(groups[first][0]):
                        writer.write(part, data)
                else:  # one joined tensor
                    experts = groups[first]
                    writer.write_parts(first, (data for ours in experts for _, data in parts(ours)))
        records[name] = writer.record
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        text = json.dumps(content, indent=1) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return records


def is_in_fp32(name: str) -> bool:
    """Return True if transformers stores a tensor in fp32 in any model: biases of routers."""
    return name.endswith(".e_score_correction_bias")


def _bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes. The view as uint8 is needed because numpy has no bf16."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def model_card(
    source: CheckpointReader, dtype: str, *, averaged: bool = False, has_tokenizer: bool
) -> str:
    """Return the README.md of the exported model: its architecture and its training."""
    manifest, model = source.manifest, model_of(source)
    facts = {
        "parameters": f"{parameter_count(model):,}",
        "architecture": f"{counted(model.layers, 'layer')}, hidden size {model.hidden_size}, "
        f"{counted(model.heads, 'head')} on {model.kv_heads}, vocabulary {model.vocab_size}, "
        f"{model.sequence_length} positions",
        "training": f"{counted(manifest.step, 'step')}, {counted(manifest.tokens, 'token')}",
    }
    if "data" in manifest.recipe:
        sources = table_at(manifest.recipe, manifest.step)["data"]["train"]
        facts["corpus"] = ", ".join(f"{s['path']} (weight {s.get('weight', 1):g})" for s in sources)
        facts["seed"] = str(manifest.recipe["seed"])
        if averaged:
            settings = table_at(manifest.recipe, manifest.step)["optimizer"]["average"]
            facts["weights"] = f"exponential moving average, decay {settings['decay']}"
        if sources := manifest.layout.get(AVERAGED_FROM):
            facts["weights"] = f"mean of {', '.join(sources)}"
        else:
            facts["layout"] = ", ".join(
                f"{key} {value}"
                for key, value in manifest.layout.items()
                if key not in ("deepspeed_json", RESHAPED_FROM)
            )
    is_of_run = source.path.parent.name == "checkpoints"  # not a mean or imported weights near it
    if is_of_run and AVERAGED_FROM not in manifest.layout:
        facts |= _losses(source, averaged=averaged)
    facts["precision here"] = f"{dtype}, from fp32 master weights"
    facts["versions"] = ", ".join(f"{k} {v}" for k, v in manifest.versions.items() if v)
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    name = manifest.recipe.get("name", "model")
    classes, loading = "AutoModelForCausalLM", ""
    if has_tokenizer:
        classes += ", AutoTokenizer"
        loading = 'tokenizer = AutoTokenizer.from_pretrained(".")\n'
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        "tags: [threefold]\n---\n\n"
        f"# {name}\n\nPretrained with Threefold.\n\n| | |\n|---|---|\n{rows}\n\n"
        f"```python\nfrom transformers import {classes}\n\n"
        f'model = AutoModelForCausalLM.from_pretrained(".")\n{loading}```\n'
    )


def _losses(source: CheckpointReader, *, averaged: bool) -> dict[str, str]:
    """Return the losses at the checkpoint's step if its run folder exists.

    averaged: the validation losses of the averaged weights, and no accuracies
    """
    lines = RunFolder(source.path.parent.parent).read_metrics()
    metrics: dict[str, str] = {}
    for line in lines:
        if line["step"] <= source.manifest.step and "loss" in line:
            metrics["training loss"] = f"{line['loss']:.4f} nats per token at step {line['step']}"
            for name, loss in validation_losses(line, averaged=averaged).items():
                key = f"validation loss{f' on {name}' if name else ''}"
                metrics[key] = f"{loss:.4f} nats per token at step {line['step']}"
            for name, accuracy in task_accuracies({} if averaged else line).items():
                metrics[f"accuracy in {name}"] = f"{accuracy:.1%} at step {line['step']}"
    return metrics
