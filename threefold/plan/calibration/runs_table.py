"""Tables of measured runs: each row describes a job and its measured time and memory."""

import csv
import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from models.config import AttentionKind, Experts, ModelConfig, Window
from models.cost import flops_per_token
from models.errors import UserError, reason_of
from threefold.config.layout import CONTEXT_ATTENTIONS, PAIRED_SCHEDULES
from threefold.gpus.datasheet import OTHER_BOARDS, Gpu, gpus_of_name
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.calibration.published_names import model_of_name, stack_of
from threefold.plan.job import Job, Machine, PlannedLayout
from threefold.plan.memory.peak import GIB, fullest_stage
from threefold.plan.software import Quantization, Software, quantization_of

DEFAULT_VOCABULARY = 51200  # Megatron's padded GPT-2 vocabulary
MAX_NUMBER = 10**12
MEMORY_TOLERANCE = 0.05  # relative difference of a GPU's nominal and its reported memory
REPORTED_MEMORY = 0.985  # share of the nominal memory that CUDA reports
# A published run did fit, so that its predicted peak may exceed the GPU's memory by this share. It
# is about the mean error of predicted peaks.
MAX_MEMORY_EXCESS = 0.05
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {  # prefix of `arch` -> fields of ModelConfig
    "llama": {
        "norm": "rmsnorm",
        "positions": "rope",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
    },
    "gpt": {
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
    },
}
EXPERT_COLUMNS = {  # column -> field of Experts
    "experts": "count",
    "experts_per_token": "per_token",
    "expert_ffn": "ffn_hidden_size",
    "shared_experts": "shared",
    "dense_layers": "dense_layers",
}
# Columns with the names of fields of ModelConfig, with which a model differs from its architecture:
# 0 or 1, one of a few words, and others.
YES_OR_NO_COLUMNS = (
    "tie_embeddings", "qk_norm", "bias", "qkv_bias", "attention_output_bias", "attention_sinks",
)  # fmt: skip
WORD_COLUMNS = ("activation", "norm_placement", "qk_norm_over")
SWITCH_COLUMNS = (*YES_OR_NO_COLUMNS, *WORD_COLUMNS, "attention_pattern", "window")
RECOMPUTATIONS = ("none", "selective", "full")  # from least to most
OPTIMIZERS = ("adamw", "muon")
STATES_NOTHING = ("", "n/a", "-", "none", "unstated")
YES, NO = ("1", "1.0", "yes", "true"), ("", "0", "0.0", "no", "false")
NUMBER = r"(\d{1,3}(?:,\d{3})+|\d*\.?\d+(?:[eE][+-]?\d+)?)"  # 1,024 and 1e3 too


def architecture_switches(arch: str) -> Mapping[str, Any]:
    """Return the fields of ModelConfig for an architecture.

    Raises:
        UserError: the architecture is not modelled.
    """
    for prefix, switches in ARCHITECTURES.items():
        if arch.startswith(prefix):
            return switches
    raise UserError(f"arch {arch} is not modelled")


@cache
def words_of(key: str) -> tuple[str, ...]:
    """Return the words that a field of ModelConfig may have; empty for other fields."""
    if key == "attention_pattern":
        return get_args(AttentionKind)
    return get_args(get_type_hints(ModelConfig)[key]) if key in WORD_COLUMNS else ()


def switch_cells(model: ModelConfig, arch: str) -> dict[str, Any]:
    """Return the cells of SWITCH_COLUMNS in which a model differs from an architecture."""
    usual = architecture_switches(arch)
    cells: dict[str, Any] = {}
    for key in SWITCH_COLUMNS:
        value, default = getattr(model, key), ModelConfig.__dataclass_fields__[key].default
        if value == usual.get(key, default):
            continue
        if isinstance(value, Window):
            cells[key] = value.size
        elif isinstance(value, tuple):
            cells[key] = " ".join(value)
        else:
            cells[key] = int(value) if key in YES_OR_NO_COLUMNS else value
    return cells


def number(cell: str | None) -> float | None:
    """Return the number at the beginning of a cell, such as "4 (best)"; None if there is none.

    "unstated (51200 presumed)" is 51200.
    """
    text = (cell or "").strip()
    match = re.match(rf"{NUMBER}(?![\w.,%-])", text) or re.search(rf"\({NUMBER} presumed\)", text)
    value = float(match[1].replace(",", "")) if match else None
    return value if value is None or value < MAX_NUMBER else None


@cache
def with_memory(gpu: Gpu, stated: float) -> Gpu:
    """Return the GPU, with the stated memory in GB if that differs from its datasheet's.

    CUDA reports 1 to 2 % less than the nominal size.
    """
    if abs(gpu.memory_gib / stated - 1) < MEMORY_TOLERANCE:
        return gpu
    return replace(gpu, memory_gib=REPORTED_MEMORY * stated)


def may_have_fitted(job: Job) -> bool:
    """Return True if the predicted peak of a published run exceeds the memory by little or not."""
    memory = job.machine.gpu.memory_gib * GIB
    return fullest_stage(job).total <= (1 + MAX_MEMORY_EXCESS) * memory


def with_selective_share(job: Job, share: float) -> Job:
    """Return the job with another share of activations kept by selective recomputation."""
    footprint = replace(job.footprint, selective=share)
    footprints = {**job.software.footprint, job.precision: footprint}
    return replace(job, software=replace(job.software, footprint=footprints))


def is_yes(cell: str | None) -> bool:
    """Return True for 1, yes or true."""
    return (cell or "").strip().lower() in YES


def is_no(cell: str | None) -> bool:
    """Return True for 0, no, false or an empty cell."""
    return (cell or "").strip().lower() in NO


class RowReader:
    """Reader of a row's cells, which records the values that it assumes for unstated cells."""

    def __init__(self, cells: dict[str, str]):
        self.cells = {key: (value or "").strip() for key, value in cells.items() if key}
        self.assumed: list[str] = []

    def job(self) -> Job:
        """Return the job of the row.

        Raises:
            UserError: a cell is missing, cannot be read, or describes an unsupported feature.
        """
        software, machine, model = self.software(), self.machine(), self.model()
        precision, quantization = self.precision()
        peaks = machine.gpu.peak_tflops
        narrow = quantization.format.peak if quantization else precision
        for name in (precision, narrow):
            if name not in peaks:
                raise UserError(f"precision {name} is not modelled on {machine.gpu.name}")
        if quantization and quantization.format.needs not in ("", *peaks):
            kind = quantization.kind
            raise UserError(f"precision {kind}: {machine.gpu.name} has no matmuls of this format")
        if software.megatron_columns and (model.prediction or self.divides_unevenly(model)):
            software = replace(software, balances_stages=True)
        job = Job(
            model=model,
            machine=machine,
            layout=self.layout(model, machine.gpus, software),
            quantization=quantization,
            global_sequences=self.whole("gbs"),
            precision=precision,
            software=software.on_device(machine.gpu.device),
            optimizer=self.one_of("optimizer_kind", OPTIMIZERS),
            limits_logits=is_yes(self.one_of("qk_clip", (*NO, *YES))),
            average_every=self.whole_or_none("average_every"),
            separate_documents=is_yes(self.one_of("separate_documents", (*NO, *YES))),
        )
        together = job.layout.data * job.layout.micro_sequences
        if job.global_sequences < together:
            raise UserError(f"gbs = {job.global_sequences} is less than dp x mbs = {together}")
        if job.global_sequences % together:
            self.assumed.append(f"{job.micro_batches} micro-batches (gbs over {together}, rounded)")
        return self.with_recomputation(job)

    def divides_unevenly(self, model: ModelConfig) -> bool:
        """Return True if the blocks do not divide equally over the pipeline's virtual stages."""
        stages = self.whole("pp") * self.virtual_stages(self.whole("pp"))
        return model.layers % stages > 0 and (model.layers + 2) % stages > 0

    def virtual_stages(self, pipeline: int) -> int:
        """Return the number of chunks of each stage."""
        if self.cell("vpp").lower() in STATES_NOTHING:
            return 1
        chunks = self.whole("vpp")
        if pipeline == 1 and chunks > 1:
            raise UserError(f"vpp = {chunks} needs pp > 1; leave vpp empty")
        return chunks

    def cell(self, key: str) -> str:
        """Return a cell; empty if there is no such column."""
        return self.cells.get(key, "")

    def one_of(self, key: str, words: Sequence[str]) -> str:
        """Return a cell that has one of some words; the first word if it is empty."""
        word = self.cell(key).lower() or words[0]
        if word not in words:
            raise UserError(
                f"{key} is {self.cell(key)}; use one of {', '.join(filter(None, words))}"
            )
        return word

    def whole(self, key: str, usual: int | None = None, why: str = "usual") -> int:
        """Return a whole number of at least 1; without a `usual` value, the cell is required."""
        value = self.positive(key, usual, why)
        if value != int(value):
            raise UserError(f"{key} is {self.cell(key)}")
        return int(value)

    def whole_or_none(self, key: str) -> int:
        """Return a whole number; 0 if the cell is empty or 0."""
        return 0 if is_no(self.cell(key)) else self.whole(key)

    def positive(self, key: str, usual: float | None = None, why: str = "usual") -> float:
        """Return a number above 0; without a `usual` value, the cell is required."""
        text, value = self.cell(key), number(self.cell(key))
        if value is None and usual is not None and (not text or "unstated" in text):
            self.assumed.append(f"{key} = {usual:g} ({why})")
            return usual
        if value is None or value <= 0:
            raise UserError(f"{key} is {text}" if text else f"{key} is empty; fill it in")
        return value

    def format_name(self) -> str:
        """Return the format of matmuls in 8 or 4 bits, such as "mxfp8"; otherwise the cell."""
        quantization = quantization_of(self.cell("precision"))
        return quantization.kind if quantization else self.cell("precision")

    def precision(self) -> tuple[str, Quantization | None]:
        """Return the precision outside of quantized matmuls, and their quantization."""
        if not self.cell("precision"):
            raise UserError("precision is empty; fill it in")
        text = re.sub(r"b(rain)?float16", "bf16", self.cell("precision").lower())
        quantization = quantization_of(text)
        precision = next((name for name in ("bf16", "fp16", "fp32") if name in text), None)
        if precision is None and quantization is None:
            stated = self.cell("precision")
            raise UserError(f"precision {stated} is not modelled; use a name such as bf16 or mxfp8")
        return precision or "bf16", quantization

    def software(self) -> Software:
        """Return the software stack of the framework, with the row's attention kernel."""
        framework, kernel = self.cell("framework"), self.cell("attention_kernel")
        if not framework:
            raise UserError("framework is empty; fill it in")
        stage = self.zero_stage(0) if self.cell("zero_stage") else None
        stack, only_nearest = stack_of(self.cells | {"precision": self.format_name()}, stage)
        if only_nearest:
            self.assumed.append(f"framework = {stack.name} (nearest to {framework})")
        if "unfused" in kernel:
            return replace(stack, fused_attention=False, attention_dropout=True)
        return replace(stack, fused_attention=True) if "flash" in kernel else stack

    def gpu(self) -> Gpu:
        """Return the GPU of the row."""
        name = self.cell("gpu")
        without_rack = re.sub(r"NVL[ _-]?\d{2,3}\b", "", name, flags=re.IGNORECASE).lower()
        if any(board.split()[-1].lower() in without_rack for board in OTHER_BOARDS):
            raise UserError(f"gpu {name} is another board and has no datasheet")
        gpus = gpus_of_name(name)
        size = re.search(r"(\d+) ?gb", name.lower())
        stated = float(size[1]) if size else number(self.cell("gpu_mem_gb"))
        if len(gpus) <= 1:
            if not gpus:
                raise UserError(f"gpu {name or 'empty'} has no datasheet")
            return gpus[0] if stated is None else with_memory(gpus[0], stated)
        for gpu in gpus:
            if stated is not None and abs(gpu.memory_gib - stated) < 4:
                return gpu
        if stated is not None:
            raise UserError(f"gpu {name} with {stated:g} GB has no datasheet")
        largest = max(gpus, key=lambda gpu: gpu.memory_gib)
        self.assumed.append(f"gpu = {largest.name} (no memory is stated)")
        return largest

    def machine(self) -> Machine:
        """Return the GPUs and their links."""
        gpu = self.gpu()
        usual = Machine.of(
            gpu,
            gpus=self.whole("gpus"),
            gpus_per_node=self.whole("gpus_per_node", gpu.gpus_per_node),
        )
        why = f"a usual {gpu.name} node's"
        return replace(
            usual,
            node_link_gigabytes_per_second=self.positive(
                "intra_gbps_unidir", usual.node_link_gigabytes_per_second, why
            ),
            network_gigabytes_per_second=self.positive(
                "inter_gbps_per_gpu", usual.network_gigabytes_per_second, why
            ),
        )

    def model(self) -> ModelConfig:
        """Return the shape of the model, which the row may only name."""
        if "layers" not in self.cells and not self.cell("model"):
            raise UserError("model is empty; fill it in")
        if not self.cell("layers") and self.cell("model"):
            named = model_of_name(self.cell("model"))
            return replace(named, sequence_length=self.whole("seq"), dropout=0.0)
        switches = architecture_switches(self.cell("arch") or "gpt")
        heads = self.whole("heads")
        return ModelConfig(
            layers=self.whole("layers"),
            hidden_size=self.whole("hidden"),
            heads=heads,
            kv_heads=self.whole("kv_heads", heads, "as many as heads"),
            ffn_hidden_size=self.whole("ffn"),
            vocab_size=self.whole("vocab", DEFAULT_VOCABULARY, "Megatron's GPT-2 vocabulary"),
            sequence_length=self.whole("seq"),
            head_size=self.whole("head_size") if self.cell("head_size") else None,
            experts=self.experts(),
            **{**switches, **self.model_switches()},
        )

    def experts(self) -> Experts | None:
        """Return the experts of the model; None if it is dense."""
        if not self.cell("experts"):
            return None
        sizes: dict[str, Any] = {
            key: self.whole(name)
            for name, key in EXPERT_COLUMNS.items()
            if self.cell(name) not in ("", "0")
        }
        return Experts(**sizes)

    def model_switches(self) -> dict[str, Any]:
        """Return the switches of the model that the row states in columns of their own."""
        switches: dict[str, Any] = {}
        stated = {key: self.cell(key) for key in SWITCH_COLUMNS if self.cell(key)}
        for key, text in stated.items():
            words, allowed = tuple(text.split()), words_of(key)
            if key in YES_OR_NO_COLUMNS and (is_yes(text) or is_no(text)):
                switches[key] = is_yes(text)
            elif key in WORD_COLUMNS and text in allowed:
                switches[key] = text
            elif key == "attention_pattern" and set(words) <= set(allowed):
                switches[key] = words
            elif key == "window":
                switches[key] = Window(size=self.whole(key))
            else:
                raise UserError(f"{key} is {text}")
        return switches

    def layout(self, model: ModelConfig, count: int, software: Software) -> PlannedLayout:
        """Return the layout, without recomputation."""
        tensor, pipeline = self.whole("tp"), self.whole("pp")
        zero_stage = self.zero_stage(software.usual_zero_stage)
        context = self.whole("cp", 1, "none") if self.cell("cp") else 1
        data = self.whole("dp", max(1, count // (tensor * pipeline * context)), "remaining ranks")
        ranks = tensor * pipeline * context * data
        if ranks != count:
            raise UserError(f"tp x pp x cp x dp = {ranks} and gpus = {count}")
        parts = self.expert_tensor_ranks(tensor, software)
        expert = self.expert_ranks(
            tensor if parts == 1 else 1, software, has_experts=model.experts is not None
        )
        if data * context % expert:
            raise UserError(f"ep = {expert} does not divide cp x dp = {context * data}")
        if expert > 1 and zero_stage == 0:
            raise UserError(f"ep = {expert} with zero_stage = 0 is not modelled; use 1, 2 or 3")
        if parts not in (1, tensor):
            raise UserError(f"etp = {parts} with tp = {tensor} is not modelled")
        if model.experts is None and parts > 1:
            raise UserError(f"etp = {parts} without experts")
        if model.experts and model.experts.ffn_hidden_size % parts:
            width = model.experts.ffn_hidden_size
            raise UserError(f"expert_ffn = {width} over etp = {parts} is not modelled")
        ranks = expert * tensor // parts
        if model.experts and model.experts.count % ranks:
            over = "ep" if parts > 1 else "ep x tp"
            raise UserError(f"experts = {model.experts.count} over {over} = {ranks}")
        for name, size in (("heads", model.heads), ("kv_heads", model.kv_heads)):
            if size % tensor:
                raise UserError(f"{name} = {size} over tp = {tensor} is not modelled")
        virtual_stages = self.virtual_stages(pipeline)
        schedule = self.schedule(virtual_stages) if pipeline > 1 else "1f1b"
        blocks = self.layers_per_stage(model, pipeline * virtual_stages, software)
        if pipeline * virtual_stages > model.layers and blocks is None:
            product = pipeline * virtual_stages
            raise UserError(f"pp x vpp = {product} is more than layers = {model.layers}")
        split = self.cell("seq_parallel")
        if not split and tensor > 1 and software.sequence_parallel:
            split = "1"
            self.assumed.append(f"seq_parallel = 1 (usual with {software.name})")
        if not (is_yes(split) or is_no(split)):
            raise UserError(f"seq_parallel is {split}")
        overlap = self.cell("ep_overlap")
        if not (is_yes(overlap) or is_no(overlap)):
            raise UserError(f"ep_overlap is {overlap}")
        exchanges = model.experts is not None and expert * tensor > parts
        can_overlap = exchanges and schedule in PAIRED_SCHEDULES
        if not overlap and software.usual_expert_overlap and can_overlap:
            overlap = "1"
            self.assumed.append(f"ep_overlap = 1 (usual with {software.name})")
        if is_yes(overlap) and not can_overlap:
            raise UserError(f"ep_overlap = {overlap} with ep = {expert} and schedule = {schedule}")
        return PlannedLayout(
            tensor=tensor,
            pipeline=pipeline,
            virtual_stages=virtual_stages,
            schedule=schedule,
            layers_per_stage=blocks,
            context=context,
            context_attention=self.context_attention(),
            data=data,
            expert=expert,
            expert_tensor=parts,
            expert_overlap=is_yes(overlap),
            zero_stage=zero_stage,
            dp_shard=self.dp_shard(),
            sequence_parallel=is_yes(split),
            recompute_interval=self.recompute_interval(),
            micro_sequences=self.micro_sequences(pipeline, software),
            reduce_every=self.whole_or_none("reduce_every"),
        )

    def micro_sequences(self, pipeline: int, software: Software) -> int:
        """Return the sequences of a micro-batch."""
        stated = self.whole("mbs", 1, "unstated")
        if pipeline == 1 or not software.divides_local_batch:
            return stated
        self.assumed.append("1 sequence per micro-batch (mbs is the local batch)")
        return 1

    def expert_tensor_ranks(self, tensor: int, software: Software) -> int:
        """Return the ranks that divide each expert."""
        if not self.cell("etp"):
            divides = software.divides_experts and self.cell("ep").lower() not in STATES_NOTHING
            return tensor if divides else 1
        return self.whole("etp")

    def expert_ranks(self, tensor: int, software: Software, *, has_experts: bool) -> int:
        """Return the ranks that divide the experts, without the tensor ranks."""
        if self.cell("ep").lower() in STATES_NOTHING:
            if has_experts:
                stated = self.cell("ep") or "empty"
                raise UserError(f"ep is {stated}; fill it in (1 if each rank has all experts)")
            return 1
        ranks = self.whole("ep")
        counts_tensor = software.megatron_columns and not self.cell("etp") and ranks % tensor == 0
        return ranks // tensor if counts_tensor else ranks

    def context_attention(self) -> str:
        """Return the algorithm of attention over context ranks; by default, Megatron-Core's."""
        kind = self.cell("cp_kind") or "ring"
        if kind not in CONTEXT_ATTENTIONS:
            raise UserError(f"cp_kind is {kind}; use one of {', '.join(CONTEXT_ATTENTIONS)}")
        return kind

    def schedule(self, virtual_stages: int) -> str:
        """Return the pipeline schedule; without a column, it follows from the number of chunks."""
        name = self.cell("schedule") or ("interleaved" if virtual_stages > 1 else "1f1b")
        if name not in SCHEDULES:
            raise UserError(f"schedule {name} is not modelled")
        if (expected := SCHEDULES[name].virtual_stages) not in (virtual_stages, None):
            raise UserError(f"schedule {name} needs vpp = {expected}, not {virtual_stages}")
        return name

    def recompute_interval(self) -> int:
        """Return the number of blocks that are recomputed together."""
        return self.whole("recompute_interval") if self.cell("recompute_interval") else 1

    def layers_per_stage(
        self, model: ModelConfig, stages: int, software: Software
    ) -> tuple[int, ...] | None:
        """Return the blocks of each virtual stage; None if the row does not state them."""
        text = self.cell("layers_per_stage")
        if not text:
            with_ends = model.layers + 2
            if not software.megatron_columns or model.layers % stages == 0 or with_ends % stages:
                return None
            equal = with_ends // stages
            self.assumed.append("layers_per_stage (the embedding and the head count as blocks)")
            return (equal - 1, *(stages - 2) * (equal,), equal - 1)
        if not re.fullmatch(r"[0-9]{1,6}( [0-9]{1,6})*", text):
            raise UserError(f"layers_per_stage is {text}")
        blocks = tuple(map(int, text.split()))
        if len(blocks) != stages or sum(blocks) != model.layers:
            raise UserError(f"layers_per_stage is {text}, for {stages} stages of {model.layers}")
        return blocks

    def zero_stage(self, usual: int) -> int:
        """Return the ZeRO stage, 0 .. 3; the cell may also say "ZeRO-1" or "FSDP".

        Args:
            usual: stage of a row that states neither a stage nor FSDP ranks
        """
        text = self.cell("zero_stage")
        if not text:
            if (number(self.cell("fsdp")) or 0) > 1:
                return 3
            if usual:
                self.assumed.append(f"zero_stage = {usual} (usual with this framework)")
                return usual
        match = re.match(r"(?:zero|stage)?[- ]*([0-9]{1,9})(?![\w.])", text, re.IGNORECASE)
        if match and int(match[1]) <= 3:
            return int(match[1])
        if "FSDP" in text:
            self.assumed.append(f"zero_stage = 3 ({text})")
            return 3
        if text and "unstated" not in text:
            raise UserError(f"zero_stage is {text}")
        presumed = number(text)
        self.assumed.append(f"zero_stage = {int(presumed or 0)} (unstated)")
        return int(presumed or 0)

    def dp_shard(self) -> int:
        """Return the number of ranks that shard the optimizer state; 0 for all data ranks."""
        match = re.search(r"zero[12]=([1-9][0-9]{0,8})(?![0-9])", self.cell("zero_stage"))
        return int(match[1]) if match else 0

    def with_recomputation(self, job: Job) -> Job:
        """Return the job with the row's recomputation; if unstated, with the least that fits.

        With FSDP, the share that "selective" keeps is a setting of the user. If the usual share
        does not fit, half of it is assumed.
        """
        stated = self.cell("recompute").lower()
        if "sac" in stated.split():  # torchtitan's selective activation checkpointing
            stated = "selective"
        choices = {
            kind: replace(job, layout=replace(job.layout, recompute=kind))
            for kind in RECOMPUTATIONS
        }
        for kind, choice in choices.items():
            if stated.startswith(kind):
                kept = choice.footprint.selective
                if kind == "selective" and kept and not may_have_fitted(choice):
                    self.assumed.append(f"selective recomputation keeps {kept / 2:.0%} (to fit)")
                    return with_selective_share(choice, kept / 2)
                return choice
        if stated not in STATES_NOTHING and "unstated" not in stated:
            stated = self.cell("recompute")
            raise UserError(
                f"recompute is {stated}; use none, selective or full, or leave it empty"
            )
        if usual := job.software.usual_recompute:
            self.assumed.append(f"recompute = {usual} (usual with {job.software.name})")
            return choices[usual]
        for kind in ("none", "selective"):
            if may_have_fitted(choices[kind]):
                self.assumed.append(f"recompute = {kind} (the least that fits)")
                return choices[kind]
        if job.software.megatron_columns:
            return self.with_least_recomputation(choices["selective"], choices["full"])
        self.assumed.append("recompute = full (the least that fits)")
        return choices["full"]

    def with_least_recomputation(self, modules: Job, full: Job) -> Job:
        """Return the job with as little offloading or recomputation of blocks as fits.

        Megatron-Core offloads activations if the link to the host is fast. It recomputes modules,
        or the first blocks of each stage.

        Args:
            modules: the job with recomputation of modules, which does not fit
            full: the job with recomputation of all blocks
        """
        if full.machine.gpu.host_link_gigabytes_per_second:
            for offloading in (replace(modules, offloaded_share=n / 16) for n in range(1, 16)):
                if may_have_fitted(offloading):
                    share = offloading.offloaded_share
                    self.assumed.append("recompute = selective (to fit)")
                    self.assumed.append(f"the host holds {share:.0%} of the activations (to fit)")
                    return offloading
        shares = (replace(full, recomputed_share=n / 16) for n in range(1, 17))
        job = next(filter(may_have_fitted, shares), full)
        self.assumed.append(f"recompute = {job.recomputed_share:.0%} (the least that fits)")
        return job


# Tables of measured runs: each row describes a job and its measured time and memory.
#
# A table is a CSV file with a line per run. These columns describe the job; columns in brackets
# are optional:
#
#     row_id               a name for the run
#     framework            begins with a `framework` of `software.py`, such as "Megatron-DeepSpeed"
#     [release]            of the framework; a stack may be limited to some releases, GPUs or models
#     [model]              a name in shapes.toml, instead of the following sizes
#     [arch]               begins with "gpt" (GPT-2's switches) or "llama"
#     layers hidden heads [kv_heads] [head_size] ffn [vocab] seq
#     [tie_embeddings] [qk_norm] [bias] [qkv_bias] [attention_output_bias] [attention_sinks]
#                          0 or 1
#     [activation] [norm_placement] [qk_norm_over]  as in a recipe
#     [attention_pattern] [window]  "window full"; keys that a query of a window sees
#     [params_b]           billions of parameters, only to label pictures
#     gpu [gpu_mem_gb]     contains a name of `gpus/`, such as "A100"; memory selects the variant
#     gpus [gpus_per_node]
#     [intra_gbps_unidir]  gigabytes/s between GPUs of a node, each GPU, one direction
#     [inter_gbps_per_gpu] gigabytes/s between nodes, each GPU, one direction
#     precision            contains "bf16", "fp16" or "fp32", or names 8 or 4 bits (software.py)
#     [attention_kernel]   contains "flash" or "unfused"
#     tp pp [vpp] [cp] [dp]  tensor, pipeline, chunks, context, data ranks
#     [experts] [experts_per_token] [expert_ffn] [shared_experts] [dense_layers] [ep] [etp]
#     [ep_overlap]         mixture of experts, the ranks that divide the experts, the tensor ranks
#                          that divide each expert, and 1 if other passes hide the exchanges
#     [cp_kind]            "gather", "ring" (default) or "ulysses"
#     [schedule] [layers_per_stage]  a schedule of Threefold; blocks of each virtual stage, "3 4 4"
#     [fsdp]               more than one rank means ZeRO-3, if zero_stage is not stated
#     [zero_stage] [seq_parallel] [recompute]  0 .. 3; 0 or 1; "none", "selective" or "full"
#     [recompute_interval]  blocks that are recomputed together
#     mbs gbs              sequences of a micro-batch and of a step
#     optimizer_kind       adamw (default) or muon
#     qk_clip              1 if the largest attention logits are limited
#     average_every        updates between two averagings of the weights
#     separate_documents   1 if attention does not cross the ends of documents
#     reduce_every         micro-batches between two reductions of gradients
#
# The optional columns step_time_s, mfu_pct, mem_gb (GiB) and oom hold the measurements;
# predictions do not read them. If a row has an MFU and no time, the time is computed from the MFU
# with the FLOPs of `models.cost.flops_per_token`. If mem_kind says "reserved" or "allocated",
# mem_gb excludes the memory of CUDA and NCCL. round_times_s has the step times of the rounds of a
# sweep ("1.21 1.24 1.22"), which tell noise from differences. usable_for_time = 0 excludes a row's
# time from the comparison. A number may be followed by words. A row with a cell that cannot be read
# is skipped. Other columns, such as notes, are ignored, but names that resemble these are rejected.

SHAPE_COLUMNS = {"layers", "hidden", "heads", "ffn"}  # or `model`, the name of a known model
REQUIRED_COLUMNS = {
    "row_id", "framework", "precision", "gpu", "gpus", "seq", "tp", "pp", "mbs", "gbs",
}  # fmt: skip
MEASUREMENTS = ("step_time_s", "mfu_pct", "mem_gb", "gpu_peak_tflops", "params_b")
COLUMNS = {
    *REQUIRED_COLUMNS, *SHAPE_COLUMNS, *MEASUREMENTS, *EXPERT_COLUMNS, *SWITCH_COLUMNS,
    "release", "model", "arch", "kv_heads", "head_size", "vocab", "gpu_mem_gb", "gpus_per_node",
    "intra_gbps_unidir", "inter_gbps_per_gpu", "attention_kernel", "vpp", "cp", "dp", "ep", "etp",
    "ep_overlap", "cp_kind", "schedule", "layers_per_stage", "fsdp", "zero_stage", "seq_parallel",
    "recompute", "recompute_interval", "oom", "mem_kind", "round_times_s", "usable_for_time",
    "outcome", "reason", "optimizer_kind", "qk_clip", "average_every", "separate_documents",
    "reduce_every",
}  # fmt: skip
# Columns of published tables that resemble these but are ignored.
UNREAD_COLUMNS = {"peak_tflops", "hfu_pct"}


@dataclass(frozen=True)
class MeasuredRow:
    """A row of a table and its job.

    Attributes:
        measured: the result columns, for comparison only
        job: the described job; None if the row is skipped
        assumed: values assumed for unstated cells
        skipped: reason why the row cannot be predicted; empty otherwise
        parameters: the number of parameters that the row states; None if it states none
    """

    row_id: str
    measured: "Measured"
    job: Job | None = None
    assumed: tuple[str, ...] = ()
    skipped: str = ""
    parameters: int | None = None


@dataclass(frozen=True)
class Measured:
    """The result columns of a row; None for an empty cell.

    Attributes:
        by_allocator: True if the memory is that of the caching allocator, without CUDA and NCCL
        round_seconds: the seconds of a step in each round of a sweep; empty for a single round
    """

    step_seconds: float | None
    memory_gib: float | None
    out_of_memory: bool
    by_allocator: bool = False
    round_seconds: tuple[float, ...] = ()


def read_table(path: Path) -> list[MeasuredRow]:
    """Read all rows of a table.

    Raises:
        UserError: the file is not a table, lacks a column, has two of the same name, or has one
            whose name looks misspelt.
    """
    columns = columns_of(path)
    if missing := missing_columns(columns):
        names = ", ".join(sorted(missing))
        raise UserError(f"{path}: missing columns: {names}; it is not a table of runs")
    check_column_names(path, columns)
    return [read_row(cells) for cells in read_cells(path)]


def read_cells(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as dictionaries column -> cell; missing cells are empty.

    Raises:
        UserError: the file is not valid CSV, two columns have the same name, or a row has more
            cells than there are columns.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            for name, count in Counter(reader.fieldnames).items():
                if name and count > 1:
                    raise UserError(f"{path}: two columns are named {name}; rename or delete one")
            rows = []
            for row in reader:
                if any(row.pop(None, [])):
                    raise UserError(
                        f"{path}: line {reader.line_num} has more cells than there are columns; "
                        f"put a cell that contains a comma in quotation marks"
                    )
                rows.append(row)
            return rows
    except csv.Error as error:
        raise UserError(
            f"{path}: this is not valid CSV: {reason_of(error)}; check its quotation marks"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: this is not valid CSV: {reason_of(error)}") from None


def is_table_of_runs(path: Path) -> bool:
    """Return True if a file has the required columns of a table of runs."""
    return not missing_columns(columns_of(path))


def missing_columns(columns: set[str]) -> set[str]:
    """Return the columns that a file lacks to be a table of runs."""
    shape = set() if "model" in columns and not SHAPE_COLUMNS & columns else SHAPE_COLUMNS
    return (REQUIRED_COLUMNS | shape) - columns


def check_column_names(path: Path, columns: set[str]) -> None:
    """Raise a UserError if a column's name resembles that of a column that the table lacks."""
    absent = sorted(COLUMNS - columns)
    for name in sorted(columns - COLUMNS - UNREAD_COLUMNS):
        if close := difflib.get_close_matches(name, absent, n=1, cutoff=0.7):
            raise UserError(
                f"{path}: unknown column {name!r}; did you mean {close[0]}? If not, rename your "
                f"column, because the names are too similar"
            )


def columns_of(path: Path) -> set[str]:
    """Return the columns of a CSV file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return set(next(csv.reader(file), []))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; use a .csv file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: this is not valid CSV: {reason_of(error)}") from None


def read_row(cells: dict[str, str]) -> MeasuredRow:
    """Read one row; it is marked as skipped if it does not describe a job."""
    reader = RowReader(cells)
    usable = not (cells.get("usable_for_time") and is_no(cells["usable_for_time"]))
    measured = Measured(
        step_seconds=(number(cells.get("step_time_s")) or None) if usable else None,
        memory_gib=number(cells.get("mem_gb")) or None,
        out_of_memory=is_yes(cells.get("oom")),
        by_allocator=any(word in cells.get("mem_kind", "") for word in ("reserved", "allocated")),
        round_seconds=tuple(
            seconds for each in cells.get("round_times_s", "").split() if (seconds := number(each))
        ),
    )
    try:
        if reader.cell("outcome") == "rejected":
            raise UserError(f"the sweep rejected the trial: {reader.cell('reason')}")
        job = reader.job()
        for name in MEASUREMENTS:
            stated = reader.cell(name)
            nothing = stated.lower() in STATES_NOTHING or "unstated" in stated
            if not nothing and not number(stated):
                raise UserError(f"{name} is {stated}")
    except UserError as error:
        return MeasuredRow(reader.cell("row_id"), measured, None, tuple(reader.assumed), str(error))
    if usable and measured.step_seconds is None:
        measured = replace(measured, step_seconds=seconds_of_mfu(job, cells))
    billions = number(cells.get("params_b"))
    return MeasuredRow(
        reader.cell("row_id"),
        measured,
        job,
        tuple(reader.assumed),
        parameters=round(1e9 * billions) if billions else None,
    )


def seconds_of_mfu(job: Job, cells: dict[str, str]) -> float | None:
    """Return the step time that corresponds to the row's MFU; None if the row has no MFU.

    The FLOPs are those of the model without recomputation: 6 per weight of a matmul and token, and
    12 layers x hidden x sequence per token for attention, as nanotron and Megatron count them.

    Args:
        cells: mfu_pct, and gpu_peak_tflops if the MFU refers to another peak than the datasheet's
    """
    share = number(cells.get("mfu_pct"))
    if not share:
        return None
    peak = number(cells.get("gpu_peak_tflops")) or job.peak_tflops
    flops = flops_per_token(job.model) * job.tokens_per_step
    return flops / (share / 100 * peak * 1e12 * job.machine.gpus)
