"""Checkpoints that megatron-core itself writes, to compare with those that the tests write.

    pip install --no-deps --target FOLDER megatron_core==0.16.1
    PYTHONPATH=FOLDER python -m tests.convert.megatron_core OUTPUT

For each kind of model, one rank trains three steps in fp32 on CPU, writes the checkpoint in both
formats, and records the losses of the next two steps in `expected.pt`. Four ranks read it with two
tensor ranks and two stages, and write it again. The code around megatron-core's models follows
`generate_state_dict` and `get_checkpoint_name` of Megatron-LM's training/checkpointing.py, because
no package contains it.
"""

import argparse
import os
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

STEPS, SEQUENCES = 3, 2
RATE, DECAY = 1e-3, 0.1
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "num_query_groups": 2, "ffn_hidden_size": 48, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
    },
    "gpt": {"ffn_hidden_size": 128},
}  # fmt: skip


def arguments(kind: str, *, tensor: int = 1, stages: int = 1, chunks: int = 1) -> Namespace:
    """Return the options that Megatron-LM stores, as far as they describe model and optimizer."""
    llama = kind == "llama"
    values: dict[str, Any] = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 8,
        "group_query_attention": llama, "num_query_groups": 2 if llama else 1,
        "ffn_hidden_size": SIZES[kind]["ffn_hidden_size"], "swiglu": llama,
        "normalization": "RMSNorm" if llama else "LayerNorm", "norm_epsilon": 1e-5,
        "add_bias_linear": not llama, "bias_gelu_fusion": False, "add_qkv_bias": False,
        "position_embedding_type": "rope" if llama else "learned_absolute",
        "rotary_base": 10000, "rotary_percent": 1.0, "rotary_interleaved": False,
        "untie_embeddings_and_output_weights": llama, "seq_length": 16,
        "max_position_embeddings": 16, "padded_vocab_size": 128, "vocab_size": 120,
        "make_vocab_size_divisible_by": 64, "tokenizer_type": "NullTokenizer",
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.02, "seed": 7,
        "optimizer": "adam", "lr": RATE, "min_lr": RATE, "lr_decay_style": "constant",
        "lr_warmup_iters": 0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8,
        "weight_decay": DECAY, "start_weight_decay": DECAY, "end_weight_decay": DECAY,
        "clip_grad": 0.0, "train_iters": 10, "global_batch_size": SEQUENCES,
        "micro_batch_size": SEQUENCES, "consumed_train_samples": STEPS * SEQUENCES,
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "context_parallel_size": 1, "expert_model_parallel_size": 1, "num_experts": None,
        "world_size": tensor * stages, "use_distributed_optimizer": False, "bf16": False,
        "fp16": False, "params_dtype": torch.float32, "eval_interval": 1000, "eval_iters": 0,
        "moe_router_topk": 2, "data_path": None, "save_interval": 100,
    }  # fmt: skip
    return Namespace(**values)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of a step, [b, s] each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 120, (SEQUENCES, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    """Write the files of each kind of model, in forked ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # megatron-core compiles functions when it is imported

    for module in ("models.gpt.gpt_layer_specs", "dist_checkpointing", "optimizer.optimizer"):
        import_module(f"megatron.core.{module}")  # once for all ranks
    for kind, ranks in product(SIZES, (1, 4)):
        (output / kind).mkdir(parents=True, exist_ok=True)
        start_processes(_write, (ranks, kind, output / kind), nprocs=ranks, start_method="fork")


def _write(rank: int, ranks: int, kind: str, output: Path) -> None:
    """Write the files of a kind of model, on one of the ranks."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *device: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *device: tensor  # type: ignore[method-assign]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.enums import AttnBackend

    get_cuda_rng_tracker().fork = lambda *name: nullcontext()
    # megatron-core would start a new interpreter for the queue, which imports torch again.
    filesystem_async._results_queue = get_context("fork").Manager().Queue()
    store = dist.FileStore(str(output / f"store{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    tensor, stages = (1, 1) if ranks == 1 else (2, ranks // 2)
    chunks = 2 if kind == "gpt" and stages > 1 else 1
    parallel_state.initialize_model_parallel(
        tensor, stages, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    models = [_model(kind, tensor, stages, chunks, chunk) for chunk in range(chunks)]
    optimizer = _optimizer(models)
    args = arguments(kind, tensor=tensor, stages=stages, chunks=chunks)
    args.attention_backend = AttnBackend.auto
    if ranks == 1:
        for step in range(STEPS):
            _train_step(models[0], optimizer, step)
    else:
        optimizer.init_state_fn(optimizer.optimizer)
        wanted = _sharded(models, optimizer)
        loaded = dist_checkpointing.load(wanted, str(output / "dist" / "iter_0000003"))
        for number, model in enumerate(models):
            model.load_state_dict(loaded[_key(models, number)], strict=False)
        optimizer.load_state_dict(loaded["optimizer"])
    common = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    folder = output / ("dist" if ranks == 1 else "dist4") / "iter_0000003"
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(common | _sharded(models, optimizer), str(folder))
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if stages > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    path = output / ("torch" if ranks == 1 else "torch4") / "iter_0000003" / name
    path.mkdir(parents=True, exist_ok=True)
    states = {
        _key(models, number): model.state_dict_for_save_checkpoint()
        for number, model in enumerate(models)
    }
    content = common | states | {"optimizer": optimizer.state_dict()}
    torch.save(content, path / "model_optim_rng.pt")
    if rank == 0:
        for saved in (folder, path.parent):
            (saved.parent / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    if ranks == 1:
        weights = {name: x.detach().clone() for name, x in models[0].named_parameters()}
        losses = [_train_step(models[0], optimizer, step) for step in (STEPS, STEPS + 1)]
        torch.save({"losses": losses, "weights": weights}, output / "expected.pt")
        print(f"losses of the next two steps: {losses}")
    dist.barrier()
    dist.destroy_process_group()


def _model(kind: str, tensor: int, stages: int, chunks: int, chunk: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.transformer_config import (
        TransformerConfig,
    )

    torch.manual_seed(7)
    llama, number = kind == "llama", chunk if chunks > 1 else None
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, **SIZES[kind],
    )  # fmt: skip
    stage = {"ignore_virtual": False, "vp_stage": number}
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=128,
        max_sequence_length=16,
        position_embedding_type="rope" if llama else "learned_absolute",
        share_embeddings_and_output_weights=not llama,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=number,
    )


def _optimizer(models: list[Any]) -> Any:
    from megatron.core.optimizer import (
        OptimizerConfig,
        _get_param_groups,
    )
    from megatron.core.optimizer.optimizer import FP32Optimizer

    config = OptimizerConfig(optimizer="adam", lr=RATE, weight_decay=DECAY, clip_grad=0.0)
    adam = torch.optim.AdamW(_get_param_groups(models, config, None), lr=RATE, weight_decay=DECAY)
    for group in adam.param_groups:
        group["weight_decay"] = DECAY * group["wd_mult"]

    def initialize(optimizer: Any, _: Any = None) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }  # fmt: skip

    create = torch.tensor
    torch.tensor = lambda *args, device=None, **kwargs: create(*args, **kwargs)
    try:
        return FP32Optimizer(adam, config, partial(initialize))
    finally:
        torch.tensor = create


def _train_step(model: Any, optimizer: Any, step: int) -> float:
    tokens, labels = batch(step)
    length = tokens.shape[1]
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    positions = torch.arange(length).expand(len(tokens), -1)
    loss = model(tokens, positions, hidden, labels=labels).mean()
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.main_grad = parameter.grad
    optimizer.step()
    return loss.item()


def _key(models: list[Any], number: int) -> str:
    return "model" if len(models) == 1 else f"model{number}"


def _sharded(models: list[Any], optimizer: Any) -> dict[str, Any]:
    states = {_key(models, n): model.sharded_state_dict() for n, model in enumerate(models)}
    return states | {"optimizer": optimizer.sharded_state_dict(states)}


if __name__ == "__main__":
    main()
