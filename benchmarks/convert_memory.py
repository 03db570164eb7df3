"""Measure the peak memory of converting a model, in sizes of its largest tensor.

A Llama of a billion random parameters is converted from transformers' files to a checkpoint and
back, each in a separate process. The memory of the interpreter and its libraries, measured by
converting a tiny model, is subtracted.

    python benchmarks/convert_memory.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
import subprocess
import tempfile

import numpy as np
from transformers import AutoConfig

from models.config import ModelConfig
from models.cost import parameter_count
from models.hugging_face.config import imported_model
from models.hugging_face.weights import counterparts
from models.layer_specs import logical_shapes
from threefold.checkpoint.format import TensorFileWriter
from threefold.config.loading import REPOSITORY

SIZES = {  # of Llama 3.2 1B, without its tied table
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 14,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
LARGE = (SIZES, SIZES | {"vocab_size": 4_000})  # in the latter, a joined tensor is the largest
SMALL = dict.fromkeys(SIZES, 8) | {"num_attention_heads": 2, "num_key_value_heads": 2}
MEASURE = (
    "import resource, runpy, sys; sys.argv = sys.argv[1:]; code = 0\n"
    "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    "except SystemExit as end: code = end.code or 0\n"
    "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    "sys.exit(code)"
)


def write_their_model(folder: Path, sizes: dict[str, int]) -> ModelConfig:
    """Write a folder like save_pretrained does, without holding the model in memory."""
    config = AutoConfig.for_model("llama", **sizes)
    config.save_pretrained(folder)
    model = imported_model(config.to_dict())
    table, shapes = counterparts(model), logical_shapes(model)
    theirs = {k: v for n in table for k, v in table[n].shapes(shapes[n]).items()}
    numbers = np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)
    file = folder / "model.safetensors"
    with TensorFileWriter(file, theirs, dtype="F32", metadata={"format": "pt"}) as writer:
        for name, shape in theirs.items():
            writer.write(name, np.resize(numbers, math.prod(shape)).data)
    return model


def peak(*arguments: object) -> int:
    """Return the peak resident bytes of a command."""
    command = [sys.executable, "-c", MEASURE, "recipes/convert.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return int(done.stdout.split("peak")[-1])


def convert(folder: Path, sizes: dict[str, int]) -> tuple[ModelConfig, dict[str, int]]:
    """Convert in both directions, and return the peak memory of each."""
    theirs, ours, back = folder / "theirs", folder / "ours", folder / "back"
    theirs.mkdir(parents=True)
    model = write_their_model(theirs, sizes)
    peaks = {"from-hf": peak("from-hf", theirs, ours)}
    peaks["to-hf"] = peak("to-hf", ours, back)
    peaks["to-hf --dtype bf16"] = peak("to-hf", ours, back, "--overwrite", "--dtype", "bf16")
    return model, peaks


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, alone = convert(Path(folder) / "small", SMALL)
        print("| GB | largest tensor | | peak | interpreter | the rest in largest tensors |")
        print("|---|---|---|---|---|---|")
        for number, sizes in enumerate(LARGE):
            model, peaks = convert(Path(folder) / f"large{number}", sizes)
            shapes = {name: 4 * math.prod(s) for name, s in logical_shapes(model).items()}
            largest = max(shapes, key=shapes.__getitem__)
            size = shapes[largest]
            for name, peak_bytes in peaks.items():
                print(
                    f"| {4 * parameter_count(model) / 1e9:.2f} | {largest}, {size / 1e9:.3f} | "
                    f"{name} | {peak_bytes / 1e9:.3f} | {alone[name] / 1e9:.3f} | "
                    f"{(peak_bytes - alone[name]) / size:.2f} |"
                )


if __name__ == "__main__":
    main()
