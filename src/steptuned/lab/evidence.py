"""Runs packed for a repository: one Parquet file per experiment, one row per log record.

    evidence/NAME-SCALE.parquet   all complete runs of an experiment
    evidence/table-2.json         the timings of Table 2
    evidence/MANIFEST.json        the SHA-256 of every file; rows, runs, commits and criteria of
                                  every experiment

A packed folder can be read with any Parquet reader, or unpacked into a store in which nothing has
to be run again. The regression has thousands of runs with a record for every iteration. Those that
only served to choose hyper-parameters or to find J* keep just the columns ``bp`` and ``loss``,
because nothing else of them is read. They are marked as thinned, and stay thinned if they are
packed again. The logs of all other runs are restored byte for byte.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from steptuned.lab.experiment import Experiment
from steptuned.lab.results import Results, outcome_of
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import COMPLETE, Run, Store, write_json

MANIFEST = "MANIFEST.json"
TABLE_2 = "table-2.json"
ABOUT = b"steptuned"
"""The metadata key under which a Parquet file stores its experiments."""
RUN_COLUMNS = (
    "run",
    "problem",
    "method",
    "seed",
    "scale",
    "status",
    "thinned",
    "hyper",
    "spec",
    "environment",
    "result",
    "keys",
)
WHOLE_NUMBERS = ("bp", "batches", "samples", "evaluations")
READ_OF_TRIALS = ("bp", "loss")
THINNED = ("regression",)
"""The problems whose trials are thinned, because whole they would be too large."""
Chosen = tuple[Run, RunSpec, bool]
"""A run to pack, its spec, and whether it is thinned."""


class EvidenceError(ValueError):
    """A folder that cannot be packed, or a packed one that cannot be trusted. One sentence."""


# ------------------------------------------------------------------------------------------ packing


def pack(store: Path, folder: Path) -> dict[str, Any]:
    """Pack all complete runs of the experiments of a store. Returns the manifest.

    No packed run is ever lost: files of experiments that the store lacks stay as they are, and so
    do timings. If the store lacks runs of a file that would be written, nothing is written.
    """
    asked = [json.loads(path.read_text()) for path in Store(store).experiment_files()]
    names = _names(Store(store).experiment_files(), asked)
    chosen = {}
    for name, about in sorted(zip(names, asked, strict=True), key=lambda pair: pair[0]):
        runs = _runs_to_pack(store, [Experiment(**content) for content in about["experiments"]])
        if runs:
            chosen[folder / f"{name}.parquet"] = about, runs
    timings = {
        path.name: json.loads(path.read_text())
        for path in sorted((store / "table-2").glob("*.json"))
    }
    if not chosen and not timings:
        raise EvidenceError(f"{store} has no complete runs of any experiment: nothing to pack")
    for target, (_, runs) in chosen.items():
        _check_that_none_is_lost(target, {spec.identity for _, spec, _ in runs}, store)

    folder.mkdir(parents=True, exist_ok=True)
    manifest = _manifest(folder) if is_packed(folder) else {"files": {}}
    for target, (about, runs) in chosen.items():
        manifest["files"][target.name] = _write(target, about, runs)
    if timings:
        write_json(folder / TABLE_2, {**_timings(folder), **timings})
        manifest["files"][TABLE_2] = {"sha256": _sha256(folder / TABLE_2)}
    manifest["files"] = dict(sorted(manifest["files"].items()))
    write_json(folder / MANIFEST, manifest)
    return manifest


def _write(target: Path, about: dict[str, Any], runs: list[Chosen]) -> dict[str, Any]:
    """Write the file of an experiment, unless it is there already. Returns its entry."""
    described = [_about(run, spec, thinned) for run, spec, thinned in runs]
    rows = [
        row
        for (run, _, _), words in zip(runs, described, strict=True)
        for row in _records(run, words)
    ]
    table = _table(rows).replace_schema_metadata({ABOUT: json.dumps(about)})
    if not (target.exists() and _has_the_runs_of(target, table)):
        temporary = target.with_suffix(".tmp")
        pyarrow.parquet.write_table(table, temporary, compression="zstd", compression_level=19)
        os.replace(temporary, target)
    environments = [words["environment"] for words in described]
    return {
        "sha256": _sha256(target),
        "rows": len(rows),
        "runs": len(runs),
        "thinned runs": sum(words["thinned"] for words in described),
        "commits": sorted({str(e.get("commit")) for e in environments}),
        "criteria": sorted({str(e.get("criteria")) for e in environments}),
    }


def _check_that_none_is_lost(target: Path, runs: set[str], store: Path) -> None:
    """Raise if a file has runs that are not among these. A file that is damaged has none."""
    try:
        packed = set(pyarrow.parquet.read_table(target, columns=["run"]).column("run").to_pylist())
    except (OSError, pyarrow.ArrowException):
        return
    if lost := len(packed - runs):
        raise EvidenceError(
            f"{target} would lose {lost} of its {len(packed)} runs, which the experiment in "
            f"{store} lacks: first run `steptuned evidence unpack {target.parent} --to {store}`, "
            "or delete the file if its experiment has changed"
        )


def _timings(folder: Path) -> dict[str, Any]:
    """The packed timings; none if there are none, or if they cannot be read."""
    try:
        found: dict[str, Any] = json.loads((folder / TABLE_2).read_text())
    except (OSError, ValueError):
        return {}
    return found


def _has_the_runs_of(target: Path, table: pyarrow.Table) -> bool:
    """Whether a file has the same runs and records, so that it can stay as it is.

    Checksums of logs may differ: a thinned log that was unpacked has its own.
    """
    try:
        old = pyarrow.parquet.read_table(target)
    except (OSError, pyarrow.ArrowException):
        return False
    return old.column_names == table.column_names and _content(old) == _content(table)


def _content(table: pyarrow.Table) -> bytes:
    """All columns as bytes, in which nan equals nan, without the checksums of logs."""

    @functools.cache
    def without_checksum(result: str) -> str:
        kept = json.loads(result)
        return json.dumps({key: kept[key] for key in kept if key not in ("sha256", "thinned")})

    results = [without_checksum(result) for result in table.column("result").to_pylist()]
    place = table.column_names.index("result")
    sink = pyarrow.BufferOutputStream()
    compared = table.set_column(place, "result", pyarrow.array(results, pyarrow.string()))
    pyarrow.parquet.write_table(compared.combine_chunks(), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _names(paths: list[Path], asked: list[dict[str, Any]]) -> list[str]:
    """Figure and scale. If two experiments share both: the names of their files in the store."""
    plain = [f"{about['figure']}-{about['scale']}" for about in asked]
    return [
        name if plain.count(name) == 1 else path.stem
        for name, path in zip(plain, paths, strict=True)
    ]


def _runs_to_pack(store: Path, experiments: list[Experiment]) -> list[Chosen]:
    """All complete runs of these experiments."""
    results = Results(Store(store))
    reported: dict[str, RunSpec] = {}
    others: dict[str, RunSpec] = {}
    for experiment in experiments:
        outcome = outcome_of(experiment, results)
        reported |= {
            spec.identity: spec for group in outcome.groups for spec in group.specs.values()
        }
        others |= {
            trial.spec.identity: trial.spec for group in outcome.groups for trial in group.trials
        }
        others |= {spec.identity: spec for spec in outcome.star_specs}
    found = []
    for identity, spec in {**others, **reported}.items():
        run = results.run(spec)
        if run.status() not in COMPLETE:
            continue
        if not run.is_sound():
            raise EvidenceError(
                f"{run.folder}: its log has changed since the run ended; "
                "delete the folder and run it again"
            )
        found.append((run, spec, spec.problem in THINNED and identity not in reported))
    return found


def _about(run: Run, spec: RunSpec, thinned: bool) -> dict[str, Any]:
    result = run.result()
    assert result is not None, "only complete runs are packed"
    return {
        "run": spec.identity,
        "problem": spec.problem,
        "method": spec.method,
        "seed": spec.seed,
        "scale": spec.scale,
        "status": result["status"],
        "thinned": thinned or bool(result.get("thinned")),
        "hyper": spec.hyper,
        "spec": spec.model_dump(mode="json"),
        "environment": run.environment() or {},
        "result": {key: value for key, value in result.items() if key not in ("bytes",)},
    }


def _records(run: Run, about: dict[str, Any]) -> list[dict[str, Any]]:
    records = run.records()
    longest = max(records, key=len)  # the first and the last one may lack some keys
    keys = [key for key in longest if not about["thinned"] or key in READ_OF_TRIALS]
    if (
        not about["thinned"]
        and hashlib.sha256(_log_bytes(records, keys)).hexdigest() != about["result"]["sha256"]
    ):
        raise EvidenceError(
            f"{run.log_path} has records whose keys are not in one order: "
            "it cannot be packed without loss"
        )
    words = {name: json.dumps(about[name]) for name in ("hyper", "spec", "environment", "result")}
    whole = {**about, **words, "keys": json.dumps(keys)}
    return [{**whole, **{key: record[key] for key in keys if key in record}} for record in records]


def _table(rows: list[dict[str, Any]]) -> pyarrow.Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def kind(name: str) -> Any:
        if name == "thinned":
            return pyarrow.bool_()
        if name in RUN_COLUMNS:
            return pyarrow.int64() if name == "seed" else pyarrow.string()
        return pyarrow.int64() if name in WHOLE_NUMBERS else pyarrow.float64()

    return pyarrow.table(
        {name: pyarrow.array([row.get(name) for row in rows], kind(name)) for name in columns}
    )


# ------------------------------------------------------------------------------------------ reading


def is_packed(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def verify(folder: Path) -> dict[str, Any]:
    """The manifest. Raises :class:`EvidenceError` if a file is not the one that was packed."""
    manifest = _manifest(folder)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.exists():
            raise EvidenceError(f"{path} is missing")
        if _sha256(path) != entry["sha256"]:
            raise EvidenceError(
                f"{path} is not the file that was packed: "
                f"its SHA-256 differs from the one in {MANIFEST}"
            )
        if "rows" in entry and pyarrow.parquet.read_metadata(path).num_rows != entry["rows"]:
            raise EvidenceError(f"{path} does not have the number of rows that is in {MANIFEST}")
    stray = sorted(
        path.name for path in folder.glob("*.parquet") if path.name not in manifest["files"]
    )
    if stray:
        raise EvidenceError(f"{folder / stray[0]} is not in {MANIFEST}")
    return manifest


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        manifest["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(f"{folder / MANIFEST} cannot be read: {error}") from None
    return manifest


def unpack(folder: Path, store: Path) -> int:
    """Unpack a folder into a store. Returns the number of runs.

    Runs and experiments that the store already has stay as they are.
    """
    runs: dict[str, Path] = {}
    for name in verify(folder)["files"]:
        if name == TABLE_2:
            (store / "table-2").mkdir(parents=True, exist_ok=True)
            for file, timing in json.loads((folder / name).read_text()).items():
                write_json(store / "table-2" / file, timing)
            continue
        table = pyarrow.parquet.read_table(folder / name)
        asked = json.loads(table.schema.metadata[ABOUT])
        if not Store(store).remembers(asked["figure"], asked["scale"], asked["experiments"]):
            Store(store).remember(**asked)
        for about, records in _runs_of(table):
            runs[about["run"]] = _restore(Store(store), about, records)
    return len(runs)


@contextmanager
def opened(folder: Path) -> Iterator[Path]:
    """A folder as a store. A packed folder is unpacked for the duration of the block."""
    if not is_packed(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="steptuned-", dir=_memory(folder)) as name:
        store = Path(name) / folder.resolve().name
        unpack(folder, store)
        yield store


def _memory(folder: Path) -> Path | None:
    """``/dev/shm`` if the unpacked runs fit, else None: the default temporary folder.

    Unpacked runs take about 10 times the space of the packed files; 40 times leaves a margin.
    Removing thousands of files from a disk can take a minute.
    """
    memory, packed = Path("/dev/shm"), sum(path.stat().st_size for path in folder.iterdir())
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK | os.X_OK):
        return None
    return memory if shutil.disk_usage(memory).free > 40 * packed else None


def _runs_of(table: pyarrow.Table) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each run of a file with its records."""
    names = table.column("run").to_pylist()
    start = 0
    for end in range(1, len(names) + 1):
        if end < len(names) and names[end] == names[start]:
            continue
        part = table.slice(start, end - start)
        about = {name: part.column(name)[0].as_py() for name in RUN_COLUMNS}
        about |= {
            name: json.loads(about[name])
            for name in ("hyper", "spec", "environment", "result", "keys")
        }
        yield about, part.select(about["keys"]).to_pylist()
        start = end


def _restore(store: Store, about: dict[str, Any], records: list[dict[str, Any]]) -> Path:
    spec = RunSpec(**about["spec"])
    run = Results(store).run(spec)
    if run.result() is not None:
        return run.folder
    run.folder.mkdir(parents=True, exist_ok=True)
    there = [{key: value for key, value in r.items() if value is not None} for r in records]
    log = _log_bytes(there, about["keys"])
    run.log_path.write_bytes(log)
    result = {
        **about["result"],
        "bytes": len(log),
        "sha256": hashlib.sha256(log).hexdigest(),
    }
    if about["thinned"]:
        result["thinned"] = True
    elif result["sha256"] != about["result"]["sha256"]:
        raise EvidenceError(
            f"run {about['run']} cannot be restored: its log differs from the one that was packed"
        )
    write_json(run.folder / "spec.json", about["spec"])
    write_json(run.folder / "environment.json", about["environment"])
    write_json(run.folder / "result.json", result)
    return run.folder


def _log_bytes(records: list[dict[str, Any]], keys: list[str]) -> bytes:
    return b"".join(
        json.dumps({key: r[key] for key in keys if key in r}).encode() + b"\n" for r in records
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
