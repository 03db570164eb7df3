"""Checkpoints of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX continue here."""

import importlib.util
import math
import os
import pickle
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.errors import UserError
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.parallel.micro_batch_info import MicroBatchInfo
from tests.commands import run_here
from tests.convert import foreign_checkpoints as foreign
from tests.convert.megatron_core import DECAY, RATE, STEPS, arguments, batch
from threefold.checkpoint.state import CheckpointReader
from threefold.commands.convert import main
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.convert import foreign_checkpoint
from threefold.convert.foreign_checkpoint import DistributedFiles, open_foreign, tensors_of


def imported(source: Path, output: Path, *options: object) -> CheckpointReader:
    """Import a checkpoint with the command."""
    recipe = output.with_suffix(".toml")
    done = run_here(main, "import", source, output, "--recipe", recipe, *options)
    assert done.returncode == 0, done.stderr
    return CheckpointReader.verified(output)


def same(reader: CheckpointReader, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Check that a checkpoint has these tensors bit for bit, and no others."""
    expected = {
        name if kind == "weights" else f"{kind}/{name}": tensor
        for kind, own in tensors.items()
        for name, tensor in own.items()
    }
    assert reader.manifest.tensors.keys() == expected.keys()
    for kind, own in tensors.items():
        for name, tensor in own.items():
            assert torch.equal(reader.tensor(kind, name), tensor), (kind, name)


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("llama", {}),
        ("llama", {"tensor": 2, "stages": 2}),
        ("gpt", {"tensor": 2, "stages": 2, "chunks": 2}),
        ("gpt", {}),
    ],
)
def test_a_checkpoint_of_megatron_continues(
    kind: str, axes: dict[str, int], tmp_path: Path
) -> None:
    tensors = foreign.random_tensors(foreign.CONFIGS[kind])
    args = arguments(kind, **axes)
    foreign.write_torch(tmp_path / "torch", foreign.CONFIGS[kind], tensors, args)
    reader = imported(tmp_path / "torch", tmp_path / "ours")
    same(reader, tensors)
    manifest = reader.manifest
    assert (manifest.step, manifest.updates, manifest.samples) == (3, 3, 6)
    recipe = load_recipe(tmp_path / "ours.toml")
    assert recipe.model == foreign.CONFIGS[kind]
    assert recipe.layout.tensor == axes.get("tensor", 1)
    assert recipe.layout.virtual_stages == axes.get("chunks", 1)
    assert manifest.recipe["optimizer"]["learning_rate"] == RATE
    foreign.write_distributed(tmp_path / "dist", foreign.CONFIGS[kind], tensors, args)
    same(imported(tmp_path / "dist", tmp_path / "again"), tensors)


def test_master_weights_replace_rounded_ones(tmp_path: Path) -> None:
    tensors = foreign.random_tensors(foreign.CONFIGS["llama"])
    args = arguments("llama", tensor=2)
    args.bf16 = True
    foreign.write_torch(
        tmp_path / "theirs", foreign.CONFIGS["llama"], tensors, args, precision=torch.bfloat16
    )
    same(imported(tmp_path / "theirs", tmp_path / "ours"), tensors)
    rounded = {name: x.bfloat16().float() for name, x in tensors["weights"].items()}
    reader = imported(tmp_path / "theirs", tmp_path / "weights", "--weights-only")
    assert reader.manifest.step == 0 and not reader.manifest.has_moments
    same(reader, {"weights": tensors["weights"]})
    assert not torch.equal(rounded["head.weight"], tensors["weights"]["head.weight"])
    recipe = load_recipe(tmp_path / "weights.toml")
    assert recipe.training.initial_weights == str((tmp_path / "weights").resolve())


def test_rows_of_padding_are_left_out_on_request(tmp_path: Path) -> None:
    tensors = foreign.random_tensors(foreign.CONFIGS["llama"])
    foreign.write_torch(
        tmp_path / "theirs", foreign.CONFIGS["llama"], tensors, arguments("llama", tensor=2)
    )
    reader = imported(tmp_path / "theirs", tmp_path / "ours", "--set", "model.vocab_size=120")
    for kind, own in tensors.items():
        for name in ("embedding.weight", "head.weight"):
            assert torch.equal(reader.tensor(kind, name), own[name][:120])


@pytest.mark.parametrize("version", [0, 1.0, 3.0])
def test_older_names_and_orders_of_megatron_are_known(version: float, tmp_path: Path) -> None:
    config = foreign.CONFIGS["gpt"]
    tensors = foreign.random_tensors(config)
    foreign.write_torch(tmp_path / "theirs", config, tensors, arguments("gpt", tensor=2))
    order = {0: (1, 0, 2), 1.0: (0, 2, 1), 3.0: (0, 1, 2)}[version]  # of heads, q|k|v, columns

    def older(content: dict[str, Any]) -> None:
        model: dict[str, Any] = {"embedding": {}, "encoder": {}}
        for name, x in content["model"].items():
            if "linear_qkv." in name:
                heads = x.unflatten(0, (2, 3, 8))
                x = heads.permute(*order, *range(3, heads.dim())).reshape(x.shape)
            if name.startswith("embedding."):
                model["embedding"][name.split(".")[1]] = {"weight": x}
                continue
            name = name.removeprefix("decoder.")
            for ours, (theirs, _) in foreign.CORE.items():
                name = name.replace(f".{theirs}", f".{foreign.LEGACY[ours]}")
            model["encoder"][name] = x
        content |= {"model": {"language_model": model}, "checkpoint_version": version}
        del content["optimizer"]

    for rank in (0, 1):
        _edit(older, rank=rank)(tmp_path / "theirs")
    reader = imported(tmp_path / "theirs", tmp_path / "ours")
    same(reader, {"weights": tensors["weights"]})


NEOX_YAML = """
num_layers: 4
hidden_size: 32
num_attention_heads: 4
seq_length: 16
max_position_embeddings: 16
train_iters: 10
train_micro_batch_size_per_gpu: 2
lr_decay_style: constant
make_vocab_size_divisible_by: 64
"""
NEOX = {
    "llama": "norm: rmsnorm\nrms_norm_epsilon: 1.0e-5\npos_emb: rotary\nno_weight_tying: true\n"
    "num_kv_heads: 2\nactivation: swiglu\nintermediate_size: 144\nuse_bias_in_mlp: false\n"
    "use_bias_in_norms: false\nuse_bias_in_attn_linear: false\n",
    "gpt": "pos_emb: learned\nno_weight_tying: false\n",
}


@pytest.mark.parametrize(("kind", "pipeline"), [("llama", True), ("gpt", False)])
def test_weights_of_gpt_neox_are_imported(kind: str, pipeline: bool, tmp_path: Path) -> None:
    weights = foreign.random_tensors(foreign.CONFIGS[kind])["weights"]
    folder = tmp_path / "theirs" / "global_step3"
    args = {"num_layers": 4, "hidden_size": 32, "padded_vocab_size": 128}
    foreign.write_layers(
        folder, foreign.CONFIGS[kind], weights, {"args": args, "iteration": 3},
        ranks=2, neox=True, pipeline=pipeline,
    )  # fmt: skip
    (folder / "configs").mkdir()
    (folder / "configs" / "model.yml").write_text(NEOX_YAML + NEOX[kind])
    reader = imported(tmp_path / "theirs", tmp_path / "ours")
    same(reader, {"weights": weights})
    assert load_recipe(tmp_path / "ours.toml").model == foreign.CONFIGS[kind]


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_weights_of_megatron_deepspeed_are_imported(kind: str, tmp_path: Path) -> None:
    weights = foreign.random_tensors(foreign.CONFIGS[kind])["weights"]
    args = arguments(kind, tensor=2)
    args.deepspeed = True
    args.normalization = args.normalization.lower()
    states = {"args": args, "iteration": 3, "checkpoint_version": 3.0}
    foreign.write_layers(
        tmp_path / "theirs" / "global_step3",
        foreign.CONFIGS[kind],
        weights,
        states,
        ranks=2,
        neox=False,
    )
    reader = imported(tmp_path / "theirs", tmp_path / "ours")
    same(reader, {"weights": weights})


class Harmful:
    """An object that would execute a command when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch harmed",)


def _edit(change: Callable[[dict[str, Any]], None], *, rank: int = 0) -> Callable[[Path], None]:
    """Return a function that changes the content of a file of a checkpoint."""

    def edit(root: Path) -> None:
        file = root / "iter_0000003" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)

    return edit


def _set(**values: Any) -> Callable[[Path], None]:
    return _edit(lambda content: vars(content["args"]).update(values))


def _moment(content: dict[str, Any]) -> None:
    content["optimizer"]["state"][3]["exp_avg"] = torch.zeros(1)


def _flip(root: Path) -> None:
    """Change a byte of the largest tensor, which torch does not notice."""
    file = root / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt"
    with zipfile.ZipFile(file) as archive:
        tensors = [member for member in archive.infolist() if "/data/" in member.filename]
    largest = max(tensors, key=lambda member: member.file_size)
    content = bytearray(file.read_bytes())
    content[largest.header_offset + largest.file_size // 2] ^= 16
    file.write_bytes(content)


def _nan(content: dict[str, Any]) -> None:
    content["model"]["decoder.final_layernorm.weight"][2] = math.nan


REJECTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (
        _edit(lambda content: content.update(extra=Harmful())),
        "mp_rank_00/model_optim_rng.pt needs posix.system; this class is not in the list",
    ),
    "rank": (
        lambda root: (root / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt").unlink(),
        "mp_rank_01/model_optim_rng.pt is missing; copy all files",
    ),
    "damaged": (
        lambda root: (root / "iter_0000003/mp_rank_01/model_optim_rng.pt").write_bytes(b"PK" * 9),
        "mp_rank_01/model_optim_rng.pt cannot be read",
    ),
    "tracker": (
        lambda root: (root / "latest_checkpointed_iteration.txt").write_text("../other"),
        "'../other', which is not an iteration; name the folder of an iteration",
    ),
    "layers": (_set(num_layers=6), "tensors of the recipe's model: blocks.4"),
    "sizes": (_set(ffn_hidden_size=64), "linear_fc1.weight has the shape (96, 32), and the"),
    "heads": (
        _set(num_attention_heads=2, num_query_groups=2, kv_channels=16),
        "linear_qkv.weight has",
    ),
    "interleaved": (_set(rotary_interleaved=True), "args.rotary_interleaved = True is not"),
    "alibi": (_set(position_embedding_type="alibi"), "position-embedding-type = alibi is not"),
    "no args": (_edit(lambda content: content.pop("args")), "name their files with --config"),
    "unknown": (
        _edit(lambda content: content["model"].update({"embedding.norm.weight": torch.zeros(2)})),
        "1 tensor that no model of this program has: embedding.norm.weight",
    ),
    "moments": (_edit(_moment), "optimizer.state[3].exp_avg has the shape (1,), and"),
    "groups": (
        _edit(lambda content: content["optimizer"]["param_groups"][0]["params"].pop()),
        "optimizer.param_groups[0] has",
    ),
    "byte": (_flip, "in it differs from its checksum; copy the file again from its source"),
    "iterations": (
        _edit(lambda content: content.update(iteration=9)),
        "theirs/iter_0000003 are of several iterations, 3, 9; copy all files of one iteration",
    ),
    "no optimizer": (
        _edit(lambda content: content.update(optimizer=None)),
        "mp_rank_00/model_optim_rng.pt has no state of the optimizer, unlike the files of other",
    ),
    "not finite": (_edit(_nan), "final_layernorm.weight (master): 1 of the 32 values are NaN"),
    "empty": (
        lambda root: (root / "latest_checkpointed_iteration.txt").write_text("7"),
        "iter_0000007 has no checkpoint of Megatron-LM",
    ),
}


@pytest.mark.filterwarnings("ignore:Detected pickle")
def test_damaged_bytes_of_a_file_cause_an_error_that_names_it(tmp_path: Path) -> None:
    """Files in torch's format before 1.6 have no checksums."""
    file, random = tmp_path / "old.pt", Random(1)
    saved = {"model": {"a": torch.ones(4), "b": [1, {"c": torch.zeros(3)}]}, "iteration": 5}
    torch.save(saved, file, _use_new_zipfile_serialization=False)
    content, rejected = file.read_bytes(), 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[random.randrange(len(damaged))] = random.randrange(256)
        file.write_bytes(damaged)
        try:
            foreign_checkpoint.load(file)
        except UserError as error:
            rejected += 1
            assert "old.pt" in str(error)
    assert rejected > 150


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two tensor ranks."""
    root = tmp_path_factory.mktemp("foreign") / "theirs"
    config = foreign.CONFIGS["llama"]
    foreign.write_torch(root, config, foreign.random_tensors(config), arguments("llama", tensor=2))
    return root


@pytest.mark.parametrize("case", REJECTED)
def test_an_unreadable_checkpoint_is_rejected_and_nothing_is_written(
    case: str, valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["cp", "-r", str(valid), "theirs"], check=True)
    damage, message = REJECTED[case]
    damage(tmp_path / "theirs")
    done = run_here(main, "import", "theirs", "ours")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
    if "--weights-only" in done.stderr:
        imported(Path("theirs"), Path("ours"), "--weights-only")


def test_metadata_cannot_execute_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = foreign.CONFIGS["llama"]
    tensors = foreign.random_tensors(config)
    foreign.write_distributed(tmp_path / "theirs", config, tensors, arguments("llama"))
    monkeypatch.chdir(tmp_path)
    file = Path("theirs/iter_0000003/.metadata")
    content = file.read_bytes()
    file.write_bytes(pickle.dumps(Harmful()))
    done = run_here(main, "import", "theirs", "ours")
    assert done.returncode == 2 and ".metadata needs posix.system; this class" in done.stderr
    file.write_bytes(content[:-9])
    assert ".metadata cannot be read" in run_here(main, "import", "theirs", "ours").stderr
    file.write_bytes(content)
    Path("theirs/iter_0000003/__0_0.distcp").unlink()
    done = run_here(main, "import", "theirs", "ours")
    assert "__0_0.distcp is missing; copy all files of the checkpoint" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_diverged_replicas_are_averaged_and_reported(valid: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", str(valid), str(tmp_path / "theirs")], check=True)
    name = "decoder.layers.1.input_layernorm.weight"
    _edit(lambda content: content["model"][name].add_(0.5), rank=1)(tmp_path / "theirs")
    done = run_here(main, "import", tmp_path / "theirs", tmp_path / "ours")
    assert "different values of blocks.1.attention_norm.weight; took the mean" in done.stdout
    whole = foreign.random_tensors(foreign.CONFIGS["llama"])["weights"][
        "blocks.1.attention_norm.weight"
    ]
    held = CheckpointReader.verified(tmp_path / "ours").tensor(
        "weights", "blocks.1.attention_norm.weight"
    )
    torch.testing.assert_close(held, whole + 0.25)


# Compared with megatron-core itself, where it is installed.


def losses_here(reader: CheckpointReader, config: ModelConfig) -> list[float]:
    """Return the losses of the next two steps after a checkpoint, with AdamW in between."""
    model = SequentialModel(layer_specs(config))
    parameters = dict(logical_parameters(model, config))
    groups = [
        {"params": [x for x in parameters.values() if (x.dim() > 1) is decays],
         "weight_decay": DECAY * decays}
        for decays in (True, False)
    ]  # fmt: skip
    adam = torch.optim.AdamW(groups, lr=RATE)
    for name, x in parameters.items():
        x.data.copy_(reader.tensor("weights", name))
        moments = {kind: reader.tensor(kind, name) for kind in ("exp_avg", "exp_avg_sq")}
        adam.state[x] = {"step": torch.tensor(float(reader.manifest.updates)), **moments}
    losses = []
    for step in (STEPS, STEPS + 1):
        loss = model(*batch(step), MicroBatchInfo())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def layout_of(root: Path) -> dict[str, Any]:
    """Return the names, shapes and order of what a checkpoint holds, without its values."""
    found: dict[str, Any] = {}
    for file in sorted(root.rglob("model_optim_rng.pt")):
        content = torch.load(file, weights_only=False)
        models = {key: content[key] for key in sorted(content) if key.startswith("model")}
        optimizer = content["optimizer"]
        found[file.parent.name] = (
            [(key, [(name, x.shape) for name, x in tensors_of(models[key])]) for key in models],
            [(group["params"], group["wd_mult"]) for group in optimizer["param_groups"]],
            {n: {k: x.shape for k, x in s.items()} for n, s in optimizer["state"].items()},
        )
    if (root / "iter_0000003" / ".metadata").is_file():
        checkpoint = open_foreign(root)
        assert isinstance(checkpoint, DistributedFiles)
        content = checkpoint.content
        for key, saved in content.state_dict_metadata.items():
            if "_extra_state" not in key:
                chunks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in saved.chunks)
                found[key] = tuple(saved.size), chunks
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what megatron-core writes."""
    if given := os.environ.get("THREEFOLD_MEGATRON_CORE"):  # a folder of earlier outputs
        return Path(given)
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    output = tmp_path_factory.mktemp("megatron")
    command = [sys.executable, "-m", "tests.convert.megatron_core", str(output)]
    variables = {"TMPDIR": str(output)}  # of W&B, which megatron-core imports
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | variables, check=True)
    return output


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_megatron_core_agrees(kind: str, written: Path, tmp_path: Path) -> None:
    theirs = written / kind
    expected = torch.load(theirs / "expected.pt")["losses"]
    config, tensors = foreign.CONFIGS[kind], foreign.random_tensors(foreign.CONFIGS[kind])
    chunks = 2 if kind == "gpt" else 1
    for name, axes in {"torch": {}, "torch4": {"tensor": 2, "stages": 2, "chunks": chunks}}.items():
        args: Namespace = arguments(kind, **axes)
        foreign.write_torch(tmp_path / name, config, tensors, args)
        foreign.write_distributed(tmp_path / name.replace("torch", "dist"), config, tensors, args)
        for form in (name, name.replace("torch", "dist")):
            assert layout_of(tmp_path / form) == layout_of(theirs / form), form
            losses = losses_here(imported(theirs / form, tmp_path / f"our-{form}"), config)
            assert losses == pytest.approx(expected, abs=1e-6), form
