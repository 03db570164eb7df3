"""The packages that the checks need. They are checked before anything starts, and not installed."""

import importlib.util
import sys

NEEDED = {  # module -> name in the package index
    "torch": "torch",
    "numpy": "numpy",
    "deepspeed": "deepspeed",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "hjson": "hjson",
    "tomli_w": "tomli_w",
    "safetensors": "safetensors",
    "tqdm": "tqdm",
    "psutil": "psutil",
    "packaging": "packaging",
    "einops": "einops",
    "msgpack": "msgpack",
    "cpuinfo": "py-cpuinfo",
}
OPTIONAL = {"transformers": "transformers", "tokenizers": "tokenizers"}  # else parts are skipped
HOW = """\
`make gpu` installs nothing. On a machine with a network and a checkout of this repository, run

    grep -E '^({pattern})==' requirements.txt > missing.txt
    DS_BUILD_OPS=0 python3 -m pip wheel --no-deps -w .whl -r missing.txt

with the same Python, {python}, and operating system. (With another Python or system, use
`pip download --only-binary=:all:` with --python-version and --platform.) Copy .whl to this machine
and run

    {executable} -m pip install --no-index --no-deps --target .site .whl/*.whl
    PYTHONPATH=$PWD/.site make gpu PYTHON={executable}"""


def missing(modules: dict[str, str]) -> list[str]:
    """Return the packages whose modules cannot be found."""
    return [name for module, name in modules.items() if importlib.util.find_spec(module) is None]


def how_to_bring(packages: list[str]) -> str:
    """Return a message with the missing packages and how to install them without a network."""
    text = HOW.format(
        pattern="|".join(packages),
        executable=sys.executable,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
    )
    return f"{sys.executable} lacks {', '.join(packages)}.\n{text}"
