"""Compile every fused function for an H100, ahead of time and without a GPU: needs Triton.

    python -m tests.gpu.ahead_of_time

Traces of small and large recipes record the shapes and types with which the model calls its fused
functions. Each distinct call is then lowered by torch's compiler for a fake CUDA device, and its
kernels are compiled by Triton and NVIDIA's ptxas, which Triton brings along, to machine code for
sm_90. Nothing runs, so this finds kernels that do not compile, not kernels that are wrong.
"""

import argparse
import ast
import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from models.experts import layer
from models.kernels.compile import OPTIONS_FOR_ANY_ROWS, mark_rows
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.trace import fake_cluster, trace

GPT = (  # on top of recipes/tiny.toml
    'model.norm="layernorm"', 'model.positions="learned"', 'model.activation="gelu"',
    "model.bias=true", "model.tie_embeddings=true", "model.dropout=0.1",
    "model.attention_dropout=0.1",
)  # fmt: skip
PRECISION = 'deepspeed="ds_configs/zero1_{}.json"'
# The same calls in less time. Below, 128 ranks have a larger batch, and a pattern its four layers.
SMALL = ("model.layers=2", "batch.global_sequences=8")
RECIPES = {  # name -> (file in recipes/, ranks, changes on top of SMALL)
    "Llama, 1B": ("llama/1b.toml", 128, ("batch.global_sequences=256",)),
    "Llama, fp32": ("tiny.toml", 2, ()),
    "Qwen3 with dropout": ("tiny.toml", 1, ("layout.pipeline=1", "model.qk_norm=true",
                           "model.dropout=0.1", PRECISION.format("bf16"))),
    "GPT, bf16": ("tiny.toml", 2, (*GPT, PRECISION.format("bf16"))),
    "GPT, fp16": ("tiny.toml", 2, (*GPT, PRECISION.format("fp16"), "layout.pipeline=1",
                  "layout.tensor=2", "layout.sequence_parallel=true")),
    "GPT on context ranks": ("tiny.toml", 2, (*GPT, "layout.pipeline=1", "layout.context=2")),
    "experts": ("tiny-moe.toml", 2, (PRECISION.format("bf16"),)),
    "GPT with experts": ("tiny-moe.toml", 2, ('model.activation="gelu"',)),
    "norms of outputs": ("tiny-postnorm.toml", 2, (PRECISION.format("bf16"),
                         'model.activation="geglu"', "layout.pipeline=1", "layout.tensor=2")),
    "squared ReLU": ("tiny-postnorm.toml", 1, ("layout.pipeline=1",
                     'model.activation="squared_relu"')),
    "experts with biases": ("tiny-moe-bias.toml", 2, (PRECISION.format("bf16"),)),
    "partial rotation": ("tiny-window.toml", 2, (PRECISION.format("bf16"), "model.layers=4")),
    "latent attention": ("tiny-mla.toml", 2, (PRECISION.format("bf16"),)),
    "FP8": ("tiny-fp8.toml", 2, ()),
    "experts in FP8": ("tiny-moe.toml", 2, (PRECISION.format("bf16"),
                       "training.matmul_precision='fp8'")),
    "mup": ("tiny-mup-64.toml", 1, ()),
}  # fmt: skip
H100 = SimpleNamespace(  # as torch.cuda.get_device_properties describes it
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
    warp_size=32,
    gcnArchName="",
)
LAST_CHARACTERS = 600  # of an error
CAPABILITY = 90  # sm_90
CUDA_GUARD, META_GUARD = 1, 14  # indices in torch's registry of guards: c10/core/DeviceType.h


@dataclass(frozen=True)
class Layout:
    """Shape, strides and type of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """A call of a fused function.

    inputs: a `Layout` for each tensor, and the other inputs themselves
    any_rows: True for a function that is compiled once for any number of rows
    """

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    any_rows: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return everything that the kernels depend on except the sizes."""
        inputs = (
            (len(each.shape), each.dtype) if isinstance(each, Layout) else each
            for each in self.inputs
        )
        return self.function, self.any_rows, *inputs

    @property
    def name(self) -> str:
        """Return the function's name, with its module."""
        return f"{self.function.__module__}.{self.function.__name__}"

    def __str__(self) -> str:
        tensors = [each for each in self.inputs if isinstance(each, Layout)]
        texts = [f"{str(each.dtype).removeprefix('torch.')}{[*each.shape]}" for each in tensors]
        rows = ", any number of rows" if self.any_rows else ""
        return f"{self.name}({', '.join(texts)}){rows}"


def recorded_calls(names: Iterable[str]) -> list[Call]:
    """Trace the named recipes; return the first call of each kind, in order."""
    calls: dict[Any, Call] = {}
    one_kernel = fake_cluster.one_kernel

    def recording(function: Callable[..., Any], *, any_rows: bool = False) -> Callable[..., Any]:
        run = one_kernel(function)

        def recorded(*inputs: Any) -> Any:
            layouts = (
                Layout(tuple(each.shape), each.stride(), each.dtype)
                if isinstance(each, Tensor)
                else each
                for each in inputs
            )
            call = Call(function, tuple(layouts), any_rows)
            calls.setdefault(call.kind, call)
            return run(*inputs)

        return recorded

    def for_any_rows(_: object) -> Callable[..., Any]:
        return lambda function: recording(function, any_rows=True)

    with (
        mock.patch.object(fake_cluster, "one_kernel", recording),
        mock.patch.object(layer, "for_any_rows", for_any_rows),
        mock.patch.object(trace, "first_step"),  # the second one has the same calls
    ):
        for file, ranks, changes in map(RECIPES.__getitem__, names):
            recipe = load_recipe(REPOSITORY / "recipes" / file, (*SMALL, *changes))
            for rank in {0, ranks - 1} if recipe.layout.pipeline > 1 else {0}:
                trace.trace(recipe, ranks, min(ranks, 8), rank)
    return list(calls.values())


def fused_functions() -> set[str]:
    """Return module.name of each function that the source code of models/ passes to `fuse`."""
    names = set()
    for file in (REPOSITORY / "models").rglob("*.py"):
        module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or len(node.args) != 1:
                continue
            called, (function,) = node.func, node.args
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name == "fuse" and isinstance(function, ast.Name):
                names.add(f"{module}.{function.id}")
    return names


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Let torch's compiler and Triton compile for an H100 that this machine does not have."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, scheduler
    from torch._inductor.fx_passes import joint_graph, post_grad
    from triton import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        """The part of Triton's CUDA driver that compilation asks."""

        is_active = staticmethod(lambda: True)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", CAPABILITY, H100.warp_size))
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))

    def answer(value: Any) -> Any:
        return staticmethod(lambda *_, **__: value)

    nvidia = backends.Backend(compiler=backends.backends["nvidia"].compiler, driver=Driver)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_properties", H100),
            (torch.cuda, "get_device_capability", (H100.major, H100.minor)),
            (torch.cuda, "current_device", 0),
            (CudaInterface, "get_compute_capability", CAPABILITY),
            (CudaInterface, "get_device_properties", H100),
            (CudaInterface, "is_bf16_supported", True),
            (CudaInterface, "is_triton_capable", True),
            (CudaInterface.Worker, "get_device_properties", H100),
            (CudaInterface.Worker, "current_device", 0),
            (scheduler, "has_triton", True),
            # They trace pattern matchers with tensors on the device, which does not exist here.
            (joint_graph, "lazy_init", None),
            (post_grad, "lazy_init", None),
        ):
            stack.enter_context(mock.patch.object(owner, name, answer(value)))
        stack.enter_context(
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", answer(0), create=True)
        )
        stack.enter_context(mock.patch.dict(backends.backends, {"nvidia": nvidia}))
        # Folding would compute constants on the device.
        stack.enter_context(
            config.patch(
                joint_graph_constant_folding=False, force_disable_caches=True, compile_threads=1
            )
        )
        allow_cuda_tensors()
        driver.set_active(Driver())
        try:
            yield
        finally:
            driver.reset_active()


def allow_cuda_tensors() -> None:
    """Let fake CUDA tensors exist in this process, also in a build of torch for CPUs.

    Some operations on them ask for a device guard of CUDA. torch replaces a guard that counts no
    devices by one that does nothing. Builds for CPUs have no guard of CUDA to replace, so the guard
    of meta tensors, which also counts no devices, is registered in its place first.
    """
    if torch.version.cuda is None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * (META_GUARD + 1)).in_dll(
            library, "_ZN3c104impl26device_guard_impl_registryE"
        )
        guards[CUDA_GUARD] = guards[META_GUARD]
    torch._C._ensureCUDADeviceGuardSet()


def compile_call(call: Call) -> list[str]:
    """Compile a call to machine code; return the names of its kernels. Inside `without_a_gpu`."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.compile_fx import compile_fx

    kernels: list[str] = []

    def compile_kernel(_: AsyncCompile, name: str, source: str, *__: Any, **___: Any) -> Any:
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)  # every configuration; loads nothing onto a device
        assert kernel.compile_results, name
        kernels.append(name)
        return kernel

    def compile_only(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compile_fx(graph, inputs, config_patches=OPTIONS_FOR_ANY_ROWS if call.any_rows else None)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(call.function, dynamic=False, backend=compile_only, fullgraph=True)
    with mock.patch.object(AsyncCompile, "triton", compile_kernel), FakeTensorMode():
        inputs = [
            torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device="cuda")
            if isinstance(each, Layout)
            else each
            for each in call.inputs
        ]
        if call.any_rows:
            mark_rows(inputs)
        run(*inputs)
    return kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the recorded calls and print a line for each; return 1 if one is missing or fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.ahead_of_time")
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: all of them")
    parser.add_argument("--only", default="", help="compile functions with this in their names")
    parser.add_argument(
        "--portion", metavar="I/N", default="0/1", help="compile every Nth call, from number I"
    )
    options = parser.parse_args(arguments)
    first, step = map(int, options.portion.split("/"))
    calls = recorded_calls(options.recipe or RECIPES)
    problems = []
    with without_a_gpu():
        for call in calls[first::step]:
            if options.only not in call.name:
                continue
            try:
                kernels = len(compile_call(call))
                print(f"{call}: {kernels} kernel{'s' if kernels != 1 else ''}", flush=True)
            except Exception as error:  # of torch's compiler or Triton, of any kind
                problems.append(f"{call} does not compile: {str(error).strip()[-LAST_CHARACTERS:]}")
    reached = {call.name for call in calls}
    problems += [f"no traced recipe calls {name}" for name in sorted(fused_functions() - reached)]
    versions = f"torch {torch.__version__}, Triton {version('triton')}"
    portion = f", portion {options.portion}" if step > 1 else ""
    print(
        *(
            problems
            or [f"every fused function of models/ compiles for sm_90 ({versions}{portion})"]
        ),
        sep="\n",
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
