"""Check that a trained model, exported for transformers, gives the same logits there."""

import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from models.layer_specs import SequentialModel, layer_specs, logical_parameters, run_layers
from models.parallel.collectives import TensorAxis
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import sharding_of
from tests.gpu.runs import Failure, device_environment, overrides, start, vocab_size
from tests.gpu.setting import Result, Setting
from threefold.checkpoint.state import CheckpointReader
from threefold.config.loading import REPOSITORY
from threefold.convert.files import model_of, open_checkpoint

SAME = 1e-4  # of the largest logit, in fp32


def export(setting: Setting) -> Result:
    """Train, export with recipes/convert.py, and compare logits on the device."""
    tokenizer = make_tokenizer(setting)
    settings = overrides(setting, training__steps=4, data__tokenizer=tokenizer)
    run = start(setting, "exported", settings)
    run.finish()
    folder = setting.output / "hugging_face"
    source = open_checkpoint(run.folder)
    command = [sys.executable, "recipes/convert.py", "to-hf", str(run.folder), str(folder)]
    done = subprocess.run(
        [*command, "--overwrite"],
        cwd=REPOSITORY,
        env=device_environment("cpu"),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failure(f"convert.py ended with {done.returncode}:\n{done.stderr[-2000:]}")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(setting.device)
    config = model_of(source)
    generator = torch.Generator().manual_seed(0)
    shape = (2, config.sequence_length)
    tokens = torch.randint(config.vocab_size, shape, generator=generator).to(setting.device)
    with torch.no_grad():
        found, expected = our_logits(source, tokens, setting.device), theirs(tokens).logits
    difference = float((found - expected).abs().max() / expected.abs().max())
    result = Result()
    result.check(
        difference <= SAME,
        f"logits of {type(theirs).__name__} on {setting.device} are ours: {difference:.1e} of the "
        f"largest",
    )
    return result


def our_logits(source: CheckpointReader, tokens: torch.Tensor, device: str) -> torch.Tensor:
    """Return the logits [b, s, v] of a checkpoint's weights; tokens [b, s]."""
    config = model_of(source)
    model = SequentialModel(layer_specs(config))
    for name, parameter in logical_parameters(model, config):
        parameter.copy_(
            sharding_of(parameter).local_part(source.tensor("weights", name), TensorAxis())
        )
    logits = run_layers(model.to(device).layers, tokens, info=MicroBatchInfo())  # [s, b, v]
    return logits.transpose(0, 1)[..., : config.vocab_size]


def make_tokenizer(setting: Setting) -> Path:
    """Write a tokenizer with one word per token that transformers can load; return its folder."""
    folder = setting.output / "tokenizer"
    words = {f"t{number}": number for number in range(vocab_size(setting))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t1", eos_token="t1")
    fast.save_pretrained(folder)
    return folder
