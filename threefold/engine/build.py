"""Build the model of a rank, in shards for ZeRO-3, its optimizer and its engine.

    axes = build_axes(recipe, dims)
    model = build_model(recipe, axes, config=config)
    optimizer = build_optimizer(model, recipe, config=config)
    engine = build_engine(recipe, axes, config=config, model=model, optimizer=optimizer)

`build_from_recipe` makes these four calls. `release` frees the memory of an engine that is no
longer needed.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import nn

from models.experts.layer import expert_layers
from models.initialization import initialize
from models.kernels.compile import compile_kernels
from models.layer_specs import (
    SequentialModel,
    compute_in_fp8,
    expect_gradient_scale,
    layer_names,
    layer_specs,
    logical_parameters,
)
from models.parallel.collectives import TensorAxis
from threefold.config.deepspeed_json import precision, zero_stage
from threefold.config.parallel_dims import ParallelDims
from threefold.config.recipe import Recipe
from threefold.engine.axes import ParallelAxes, build_axes
from threefold.engine.deepspeed_overrides import (
    allow_muon,
    import_muon,
    override_optimizer,
    replace_timers,
    without_memory_reports,
)
from threefold.engine.engine import Engine, StageEngine, Zero3Engine, is_partitioned
from threefold.engine.experts import mark_experts
from threefold.engine.muon_exchange import MatrixExchange
from threefold.engine.optimizer import Muon, parameter_groups, rules_of
from threefold.pipeline.balance import pass_proportions
from threefold.pipeline.channels import Boundary
from threefold.pipeline.engine import ScheduledEngine
from threefold.pipeline.schedules import Pipeline
from threefold.pipeline.stage import Stage
from threefold.runtime.cpu_matmuls import replace_slow_cpu_matmuls
from threefold.runtime.processes import on_gpu, quiet, should_compile
from threefold.supervision.hang_report import Breadcrumb

# Create the weights of ZeRO-3 as shards, so that no rank ever holds the whole model.
#
# DeepSpeed would partition a model that every rank has built and initialized. Here each layer is
# partitioned before the next one is created, and each rank draws only its own part of the initial
# values.


class ShardedCreation:
    """Initializes and partitions the weights of a layer, as `SequentialModel` calls it.

    Args:
        axes: the parallel axes; a weight is divided among the data ranks
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        config: dict[str, Any],
        axes: ParallelAxes,
        dtype: torch.dtype,
    ):
        self.recipe, self.tensor, self.dtype = recipe, axes.tensor, dtype
        self.names = layer_names(recipe.model)
        self.zero = deepspeed.zero.Init(
            data_parallel_group=axes.data_group,
            config_dict_or_path=config,
            mpu=axes.grid,
        )
        # torch's F.linear would keep every gathered weight until the backward pass.
        self.zero._enable_mem_efficient_linear()

    def __call__(self, number: int, layer: nn.Module) -> None:
        """Partition layer `number`."""
        for rest, parameter in layer.named_parameters():
            self._partition(f"{self.names[number]}.{rest}", parameter)

    def _partition(self, name: str, parameter: nn.Parameter) -> None:
        """Fill this rank's part of a parameter, and free the rest.

        On a CPU, `torch.empty` takes no physical memory until it is written. On a GPU it takes the
        memory of one whole parameter, which `partition` frees.
        """
        zero = self.zero
        parameter.data = torch.empty_like(parameter, dtype=self.dtype, device=zero.local_device)
        zero._convert_to_deepspeed_param(parameter)
        partitioned: Any = parameter
        share = zero._aligned_size(parameter) // zero._partition_world_size(parameter)
        first = min(share * zero._partition_rank(parameter), parameter.numel())
        own = range(first, min(first + share, parameter.numel()))
        initialize(
            [(name, parameter)],
            self.recipe.model,
            seed=self.recipe.seed,
            tensor=self.tensor,
            elements=own,
        )
        partitioned.partition()
        partitioned.ds_tensor[len(own) :].zero_()  # padding


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TORCH_LINEAR = nn.functional.linear  # a model with ZeRO-3 replaces it, the next model restores it


def build_from_recipe(
    recipe: Recipe,
    dims: ParallelDims,
    config: dict[str, Any],
    crumb: Breadcrumb | None = None,
    lap: Callable[[str], None] = lambda part: None,
) -> Engine:
    """Build the process groups, the model, the optimizer and the engine; collective.

    Args:
        config: the DeepSpeed configuration of `build_deepspeed_config`
        lap: called with "model" when the model is built
    """
    axes = build_axes(recipe, dims)
    model = build_model(recipe, axes, config=config)
    lap("model")
    optimizer = build_optimizer(model, recipe, config=config)
    return build_engine(recipe, axes, config=config, model=model, optimizer=optimizer, crumb=crumb)


def build_model(
    recipe: Recipe, axes: ParallelAxes, *, config: dict[str, Any]
) -> Stage | SequentialModel:
    """Build and initialize this rank's part of the model.

    Returns:
        A stage of the pipeline under ZeRO-1 and 2; all layers, partitioned, under ZeRO-3. This
        choice decides the kind of engine, too.
    """
    nn.functional.linear = TORCH_LINEAR
    if precision(config) != "fp32" and not on_gpu():
        replace_slow_cpu_matmuls()
    recompute = recipe.layout.recompute
    interval = recipe.layout.recompute_interval if recompute == "full" else 0
    specs = layer_specs(recipe.model, axes, recompute_core=recompute == "selective")
    model: Stage | SequentialModel
    with quiet():
        if zero_stage(config) <= 2:
            model = Stage(
                specs,
                pipeline=pipeline_of(recipe, axes.dims, zero_stage(config)),
                grid=axes.grid,
                layers_of_virtual_stages=layers_of_virtual_stages(recipe),
                recompute_interval=interval,
            )
            initialize(
                logical_parameters(model, recipe.model),
                recipe.model,
                seed=recipe.seed,
                tensor=axes.tensor,
            )
        else:
            dtype = DTYPES[precision(config)]
            model = SequentialModel(
                specs,
                recompute_interval=interval,
                created=ShardedCreation(recipe, config=config, axes=axes, dtype=dtype),
            )
    mark_experts(model, axes)
    if recipe.training.matmul_precision == "fp8":
        compute_in_fp8(model)
    if should_compile(recipe.training.compile):
        compile_kernels(model)
    return model


def build_optimizer(
    model: Stage | SequentialModel, recipe: Recipe, *, config: dict[str, Any]
) -> torch.optim.Optimizer:
    """Build the optimizer of a rank, with the groups of `parameter_groups`."""
    settings = recipe.optimizer
    rules = rules_of(logical_parameters(model, recipe.model), recipe.model, settings)
    groups = parameter_groups(model, rules, bucket=bucket_elements(config))
    rate, betas = settings.learning_rate, settings.betas
    if settings.kind == "muon":
        return Muon(groups, lr=rate, betas=betas, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)


def bucket_elements(config: dict[str, Any]) -> int:
    """Return the maximum number of elements of a bucket of gradients."""
    return int(config["zero_optimization"].get("reduce_bucket_size", sys.maxsize))


def build_engine(
    recipe: Recipe,
    axes: ParallelAxes,
    *,
    config: dict[str, Any],
    model: Stage | SequentialModel,
    optimizer: torch.optim.Optimizer,
    crumb: Breadcrumb | None = None,
) -> Engine:
    """Build the DeepSpeed engine of a model, with our overrides, and wrap it."""
    import_muon()
    allow_muon()
    kind: type[Engine]
    with quiet(), without_memory_reports():
        if isinstance(model, Stage):
            kind = StageEngine
            wrapped = ScheduledEngine(
                model,
                optimizer,
                config_of_stage(config),
                boundary=boundary(recipe, axes.tensor, config),
                shard_gradients=zero_stage(config) == 2,
            )
        else:
            kind = Zero3Engine
            wrapped, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, mpu=axes.grid
            )
    override_optimizer(wrapped.optimizer)
    replace_timers(wrapped)
    if precision(config) == "fp16":
        expect_gradient_scale(wrapped.module, partial(loss_gradient, wrapped))
    for layer in expert_layers(wrapped.module):
        layer.gradient_scale = partial(loss_gradient, wrapped)
    engine = kind(wrapped, recipe, axes, crumb or Breadcrumb())
    if isinstance(optimizer, Muon):
        optimizer.exchange = MatrixExchange(
            engine.state,
            axes.grid.optimizer_group,
            tensor=axes.tensor,
            dtype=torch.bfloat16 if precision(config) == "bf16" else torch.float32,
        )
    return engine


def config_of_stage(config: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a pipeline stage: its ZeRO-1, to which we add ZeRO-2.

    DeepSpeed's pipelines reject stage 2.
    """
    zero = config["zero_optimization"]
    return config | {"zero_optimization": zero | {"stage": 1, "overlap_comm": False}}


def loss_gradient(wrapped: deepspeed.DeepSpeedEngine) -> float:
    """Return the gradient of a micro-batch's loss: loss scale of fp16 / number of micro-batches."""
    loss_scale = getattr(wrapped.optimizer, "loss_scale", 1.0)  # BF16_Optimizer has none
    return loss_scale / wrapped.gradient_accumulation_steps()


def pipeline_of(recipe: Recipe, dims: ParallelDims, zero_stage: int = 1) -> Pipeline:
    """Return the pipeline of a recipe, which orders the passes of each stage."""
    return Pipeline(
        stages=dims.pipeline,
        virtual_stages=recipe.layout.virtual_stages,
        micro_batches=recipe.micro_batches(dims.data),
        schedule=recipe.layout.schedule,
        proportions=pass_proportions(recipe.model, recipe.layout.recompute),
        reduce_every=recipe.layout.micro_batches_per_reduction(zero_stage),
        paired=recipe.layout.expert_overlap,
    )


def layers_of_virtual_stages(recipe: Recipe) -> list[int]:
    """Return the number of layers of each virtual stage.

    The first and the last one also hold the layers before and after the blocks.
    """
    names = layer_names(recipe.model)
    layers = list(recipe.blocks_of_virtual_stages)
    layers[0] += names.index("blocks.0")
    layers[-1] += len(names) - 1 - names.index(f"blocks.{recipe.model.layers - 1}")
    return layers


def boundary(recipe: Recipe, tensor: TensorAxis, config: dict[str, Any]) -> Boundary:
    """Return the shape and type of the activations between virtual stages."""
    length = recipe.tokens_per_rank // (tensor.size if tensor.sequence_parallel else 1)
    shape = (length, recipe.batch.micro_sequences, recipe.model.hidden_size)
    return Boundary(shape, DTYPES[precision(config)], tensor)


# Removal of an engine, so that its process can build another one.


def release(engine: Engine) -> None:
    """Remove the hooks and the compiled code of an engine, so that the collector can free it.

    C++ objects, which the collector cannot see, refer to gradient hooks, which refer to the engine.
    """
    if engine.compiled:  # otherwise torch stops compiling after several shapes
        from torch import _dynamo  # takes 2 s, for which the start of a run need not wait

        _dynamo.reset()
    with quiet():
        engine.wrapped.destroy()
    for _, parameter in engine.parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks:
                hooks.clear()
    if any(is_partitioned(parameter) for _, parameter in engine.parameters()):
        # References to ZeRO-3's optimizer remain, so at least free the memory of its tensors.
        shards = [vars(parameter)["ds_tensor"] for _, parameter in engine.parameters()]
        optimizer = engine.wrapped.optimizer
        for tensor in tensors_in([vars(optimizer), dict(optimizer.optimizer.state), shards]):
            with contextlib.suppress(RuntimeError):  # memory that torch has not allocated
                tensor.untyped_storage().resize_(0)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples.

    Args:
        value: a tensor, a container or anything else
        seen: ids of the containers that were already visited
    """
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_in(item, seen)
