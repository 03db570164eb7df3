"""Run recipes/prove.py with every rank on the backend that enforces NCCL's rules.

python -m tests.nccl_rules.prove recipes/tiny.toml --ranks 4 [--relay] [--slots 4]
"""

import os
import sys

from tests.nccl_rules.device import Rules
from tests.nccl_rules.slots import LaunchRule
from threefold.commands import prove
from threefold.prove import ranks

SLOTS = "--slots"


def main() -> None:
    """Run a proof whose processes import the backend before anything else."""
    slots, patience = 4, 120.0
    if SLOTS in sys.argv:
        place = sys.argv.index(SLOTS)
        slots, patience = int(sys.argv[place + 1]), 5.0
        del sys.argv[place : place + 2]
    rules = Rules(slots=slots, launch=LaunchRule.POSTING_ORDER, patience=patience)
    os.environ.update(rules.environment())
    ranks.PRELOADED_MODULES.insert(0, "tests.nccl_rules.install")
    prove.main()


if __name__ == "__main__":
    main()
