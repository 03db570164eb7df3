"""Importing this module makes DeepSpeed use the backend that enforces NCCL's rules."""

from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from tests.nccl_rules.backend import NAME, create

init_distributed, split_group = deepspeed.init_distributed, dist.split_group


def init_with_rules(dist_backend: str, **settings: Any) -> None:
    """Join the ranks with this backend instead of the requested one."""
    init_distributed(dist_backend=NAME, **settings)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # lets torch split it


def split_without_an_accelerator(**settings: Any) -> dist.ProcessGroup | None:
    """Call torch's `split_group`, which asks for the accelerator's backend."""
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cpu")),
    ):
        return split_group(**settings)


dist.Backend.register_backend(NAME, create, extended_api=True, devices="cpu")
deepspeed.init_distributed = init_with_rules
dist.split_group = split_without_an_accelerator
