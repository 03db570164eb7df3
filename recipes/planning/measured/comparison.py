"""Tables, read and predicted: one, or all of a folder."""

from pathlib import Path
from typing import Any

from models.errors import UserError
from recipes.planning.measured import closed_forms, evaluation
from recipes.planning.measured.calibration import Calibration, calibrate, evenly_spread
from recipes.planning.measured.table import Row, is_table_of_runs, read_table


def compare(path: Path, factors: Calibration) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Name -> rows and errors of a table, or of all in a folder, and the files that are none.

    Raises:
        UserError: there is no table, or one cannot be read.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    left_out = [file for file in files if path.is_dir() and not is_table(file)]
    results = {file.stem: compared(file, factors) for file in files if file not in left_out}
    if not results:
        raise UserError(f"--table {path}: there is no table of runs")
    return results, left_out


def compared(path: Path, factors: Calibration) -> dict[str, Any]:
    """A table's rows and its errors."""
    if closed_forms.is_closed_form(path):
        return closed_forms.evaluate(path)
    rows = read_table(path)
    predictions = evaluation.predict(rows, factors)
    return {
        "rows": [evaluation.row_table(each) for each in predictions],
        "summary": evaluation.summary(rows, predictions),
    }


def is_table(path: Path) -> bool:
    """Whether a file holds runs, or memory by formula."""
    return closed_forms.is_closed_form(path) or is_table_of_runs(path)


def calibration_from(path: Path | None) -> tuple[Calibration, list[Row]]:
    """The factors of a table's runs, and the rows that they are from; none without a table.

    Raises:
        UserError: no row was measured.
    """
    if path is None:
        return Calibration(), []
    rows = [row for row in read_table(path) if row.job and row.measured.step_seconds]
    if not rows:
        raise UserError(f"--calibrate {path}: no row has a layout and a measured step_time_s")
    chosen = [rows[index] for index in evenly_spread(len(rows))]
    return calibrate([(row.job, row.measured.step_seconds) for row in chosen]), chosen
