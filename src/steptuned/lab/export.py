"""All records of a store in one table, as CSV or Parquet."""

import csv
import json
from pathlib import Path
from typing import Any

from steptuned.lab.store import Store

Rows = list[dict[str, Any]]


def export(folder: Path, csv_file: Path | None, parquet_file: Path | None) -> list[str]:
    """Write every record of every run. Returns one sentence for each file."""
    rows = _rows(folder)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if csv_file is not None:
        _write_csv(rows, columns, csv_file)
    if parquet_file is not None:
        _write_parquet(rows, columns, parquet_file)
    files = [path for path in (csv_file, parquet_file) if path is not None]
    return [f"{len(rows)} records: {path}" for path in files]


def _rows(folder: Path) -> Rows:
    rows: Rows = []
    for run in Store(folder).runs():
        spec = run.spec
        about = {
            "run": spec.identity,
            "problem": spec.problem,
            "method": spec.method,
            "seed": spec.seed,
            "scale": spec.scale,
            "status": run.status(),
            "options": json.dumps(spec.options),
            "hyper": json.dumps(spec.hyper),
        }
        rows += [{**about, **record} for record in run.records()]
    return rows


def _write_csv(rows: Rows, columns: list[str], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(rows: Rows, columns: list[str], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({column: [row.get(column) for row in rows] for column in columns})
    pyarrow.parquet.write_table(table, path)
