"""Colours and line styles of runs and metrics.

The colours are those of Okabe and Ito 2008, "Color universal design", without the yellow, which is
hard to see on paper. They can be told apart with every common colour-vision deficiency and, because
runs also differ in their line styles, in black and white.
"""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("solid", "dashed", "dotted", "dotdash")
MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "hex")
MAX_RUNS = len(COLOURS) * len(DASHES)
REFERENCE = "#555555"
PARTS = {  # of the wall time
    "kept": "#009E73",
    "between": "#56B4E9",
    "validating": "#0072B2",
    "starting": "#E69F00",
    "repeated": "#D55E00",
    "waiting": "#999999",
}


def colour(index: int) -> str:
    """Return the colour of a run, or of a metric of a single run."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """Return the line style of a metric, or of the runs that share a colour."""
    return DASHES[index % len(DASHES)]


def marker(index: int) -> str:
    """Return the marker of the points of a metric."""
    return MARKERS[index % len(MARKERS)]
