"""Run recipes/prove.py with every rank on the backend that enforces NCCL's rules.

python -m tests.nccl_rules.prove recipes/tiny.toml --ranks 4 [--relay]
"""

import os

from recipes import prove
from recipes.proving import worlds
from tests.nccl_rules.device import Rules
from tests.nccl_rules.slots import LaunchRule

RULES = Rules(slots=4, launch=LaunchRule.POSTING_ORDER, patience=120)


def main() -> None:
    """Let the processes of a proof import the backend before anything else, then prove."""
    os.environ.update(RULES.environment())
    worlds.PRELOADED.insert(0, "tests.nccl_rules.install")
    prove.main()


if __name__ == "__main__":
    main()
