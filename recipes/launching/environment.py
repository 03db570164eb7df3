"""The environment of the ranks on the nodes: variables, and a container."""

from collections.abc import Mapping

FORWARDED = (  # beginnings of the names of environment variables that the ranks get
    "CUBLAS_", "CUDA_", "DEEPSPEED_TIMEOUT", "DS_", "FI_", "GLOO_", "HF_", "LD_LIBRARY_PATH",
    "MKL_", "NCCL_", "NETRC", "OMP_", "PATH", "PYTHON", "PYTORCH_", "TORCH", "TRITON_", "UCX_",
    "WANDB_", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
FORWARDED_NAMES = ("CC", "CXX")
OF_CONTAINERS = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", *FORWARDED_NAMES)


def in_container(image: str) -> list[str]:
    """Return the command that starts Python in an Apptainer image, with the GPUs of its host."""
    return ["apptainer", "exec", "--nv", image, "python"]


def forwarded(environment: Mapping[str, str], *, container: bool = False) -> dict[str, str]:
    """Return the environment variables that the ranks on all nodes get.

    They travel through the input of the agents, so they appear in no process list and no log.

    Args:
        environment: the environment of launch.py
        container: True if the ranks run in a container, which has programs and libraries of its own
    """
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(FORWARDED) or name in FORWARDED_NAMES)
        and not (container and name in OF_CONTAINERS)
    }
