"""Write a report of one or several runs: one HTML file that needs no network.

    python recipes/report.py runs/tiny
    python recipes/report.py runs/tiny runs/wide --output comparison.html
    python recipes/report.py runs/tiny --watch
    python recipes/report.py runs/7b --gpu H100

The report shows curves that can be zoomed and hovered, events, the plan, the goodput, the mixture
of the data, slow ranks, and the recipes with their differences. --watch serves it on this machine
until the run ends, and reloads it when the run has completed more steps.
Exit code 0: the report was written; 2: a run folder or an option is rejected.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

from threefold.commands.report import main

if __name__ == "__main__":
    main(__doc__)
