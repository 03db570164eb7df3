"""Importing this module makes DeepSpeed use the backend that enforces NCCL's rules."""

from typing import Any

import deepspeed
import torch.distributed as dist

from tests.nccl_rules.backend import NAME, create

init_distributed = deepspeed.init_distributed


def init_with_rules(dist_backend: str, **settings: Any) -> None:
    """Join the ranks with this backend instead of the requested one."""
    init_distributed(dist_backend=NAME, **settings)


dist.Backend.register_backend(NAME, create, extended_api=True, devices="cpu")
deepspeed.init_distributed = init_with_rules
