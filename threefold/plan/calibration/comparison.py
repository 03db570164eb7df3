"""Comparison of predictions with one table of measurements, or with all tables of a folder."""

from pathlib import Path
from typing import Any

from models.errors import UserError
from threefold.plan.calibration import compare as closed_forms
from threefold.plan.calibration import evaluation
from threefold.plan.calibration.calibration import Calibration
from threefold.plan.calibration.table import is_table_of_runs, read_table


def compare(path: Path, factors: Calibration) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Predict the runs of a table, or of all tables in a folder.

    Returns:
        name -> rows and errors of each table, and the files that are not tables

    Raises:
        UserError: there is no table, or a table cannot be read.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    left_out = [file for file in files if path.is_dir() and not is_table(file)]
    results = {file.stem: compared(file, factors) for file in files if file not in left_out}
    if not results:
        raise UserError(f"--table {path}: the folder has no table of runs; use another folder")
    return results, left_out


def compared(path: Path, factors: Calibration) -> dict[str, Any]:
    """Return the rows and the errors of a table."""
    if closed_forms.is_closed_form(path):
        return closed_forms.evaluate(path)
    rows = read_table(path)
    predictions = evaluation.predict(rows, factors)
    return {
        "rows": [evaluation.row_table(each) for each in predictions],
        "summary": evaluation.summary(rows, predictions),
    }


def is_table(path: Path) -> bool:
    """Return True if a file is a table of runs or of memory by formula."""
    return closed_forms.is_closed_form(path) or is_table_of_runs(path)
