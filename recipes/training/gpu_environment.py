"""Environment variables that CUDA reads when it starts; to be set before torch is imported."""

import os

VARIABLES = {
    # A kernel that is loaded at its first use waits for all streams, and with them for a posted
    # receive whose message may depend on that very kernel.
    "CUDA_MODULE_LOADING": "EAGER",
    # Streams share the hardware queues: with the default of 8, a transfer that waits for its peer
    # can hold up kernels of other streams that were launched after it. 32 is the maximum.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}


def set_gpu_environment() -> None:
    """Set what is not set; a value from the user's environment stays."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
