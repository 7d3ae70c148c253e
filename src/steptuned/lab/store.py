"""Runs on disk, one folder per run. A folder is usable at whatever moment its writer is killed.

    spec.json          what the run is
    environment.json   the versions and the machine with which it was started
    log.jsonl          one line per record, only ever appended to
    checkpoint.pt      where to resume, with the length of the log at that moment
    result.json        written last: how the run ended, with length and checksum of the log
    failed.json        why the run failed
    running.json       the process that executes it, and how many processes died during it before
    lock               held by that process

Next to the runs, `experiments` keeps the experiments as they were run.

Files are replaced, never changed. Before a run resumes, its log is cut to the length that the
checkpoint has stored, so anything that a killed process wrote after it is dropped.
"""

import hashlib
import json
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import filelock
import torch

from steptuned.lab.measures import COUNTS
from steptuned.lab.spec import RunSpec, canonical

Status = Literal["finished", "diverged", "failed", "running", "unfinished", "not begun", "corrupt"]

COMPLETE: tuple[Status, ...] = ("finished", "diverged")
ENDED: tuple[Status, ...] = (*COMPLETE, "failed")
TRIES = 3
RELEVANT = ("commit", "sources", "torch", "python", "cpu", "device", "threads", "kernel")
"""Keys of the environment that may change the numbers of a run."""


class Died(Exception):  # noqa: N818 - says what happened
    """Too many processes died during a run without any progress, so it is not started again."""

    def __init__(self) -> None:
        super().__init__(f"its process died {TRIES} times")


def reason_of(error: Exception) -> str:
    """The reason for a failure, in one sentence."""
    return str(error) if isinstance(error, Died) else f"{type(error).__name__}: {error}"


class Run:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_path = folder / "log.jsonl"
        self._deaths = 0

    # -------------------------------------------------------------------------------------- reading

    @property
    def spec(self) -> RunSpec:
        return RunSpec.model_validate_json((self.folder / "spec.json").read_text())

    def result(self) -> dict[str, Any] | None:
        """How the run ended. None if it has not, or if the length of its log has changed since."""
        result = self.read("result.json")
        size = self.log_path.stat().st_size if self.log_path.exists() else None
        return result if is_result(result, size) else None

    def status(self) -> Status:
        result = self.result()
        if result is not None:
            status: Status = result["status"]
            return status
        if (self.folder / "failed.json").exists():
            return "failed"
        if not self.folder.exists():
            return "not begun"
        if not (self.folder / "spec.json").exists():
            return "corrupt"
        return "running" if self.is_locked() else "unfinished"

    def failure(self) -> dict[str, Any] | None:
        return self.read("failed.json")

    def environment(self) -> dict[str, Any] | None:
        return self.read("environment.json")

    def records(self) -> list[dict[str, Any]]:
        """The records of the log.

        An incomplete last line is left out. A line that cannot be read is an error.
        """
        if not self.log_path.exists():
            return []
        lines = self.log_path.read_bytes().split(b"\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise ValueError(
                f"{self.log_path} cannot be read ({error}): delete {self.folder} and run it again"
            ) from None

    def last_record(self) -> dict[str, Any] | None:
        """The last complete record. Reads only the end of the log."""
        try:
            with open(self.log_path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 4096))
                lines = file.read().split(b"\n")
            return json.loads(lines[-2]) if len(lines) > 1 else None
        except (OSError, ValueError):
            return None

    def is_sound(self) -> bool:
        """Whether the run is complete and its log still has the stored checksum."""
        result = self.result()
        return (
            result is not None
            and hashlib.sha256(self.log_path.read_bytes()).hexdigest() == result["sha256"]
        )

    def is_locked(self) -> bool:
        try:
            with filelock.FileLock(self.folder / "lock", blocking=False):
                return False
        except filelock.Timeout:
            return True

    def read(self, name: str) -> Any:
        """One of its JSON files; None if it does not exist or cannot be read."""
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None
        except ValueError:  # damaged, for instance by a power failure
            return None

    # -------------------------------------------------------------------------------------- writing

    @contextmanager
    def claim(self, environment: dict[str, Any]) -> Iterator[None]:
        """Make this process the only one that writes this run; others wait.

        Raises :class:`Died` if too many processes died during this run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.folder / "lock"):
            before = self.claimant()
            self._deaths = 0 if before is None else before.get("deaths", 0) + 1
            try:
                if self._deaths >= TRIES and self.result() is None:
                    raise Died
                self._write_running()
                self._keep_environment(environment)
                yield
            except Exception as error:
                self.fail(reason_of(error))
                raise
            finally:
                (self.folder / "running.json").unlink(missing_ok=True)

    def _write_running(self) -> None:
        write_json(
            self.folder / "running.json",
            {"host": socket.gethostname(), "pid": os.getpid(), "deaths": self._deaths},
        )

    def claimant(self) -> dict[str, Any] | None:
        """The process that executes this run, or that died during it."""
        claimant = self.read("running.json")
        return claimant if isinstance(claimant, dict) else None

    def forget_deaths(self) -> None:
        """Called by the process that executes the run once it has made progress."""
        if self._deaths:
            self._deaths = 0
            self._write_running()

    def clear_failures(self) -> None:
        """Forget past deaths and failures, unless a process is executing the run."""
        with suppress(filelock.Timeout), filelock.FileLock(self.folder / "lock", blocking=False):
            for name in ("running.json", "failed.json"):
                (self.folder / name).unlink(missing_ok=True)

    def _keep_environment(self, environment: dict[str, Any]) -> None:
        """Store the first environment, and later ones in which the numbers may differ."""
        kept = self.environment()
        if not isinstance(kept, dict):
            write_json(self.folder / "environment.json", environment)
            return
        later = kept.get("resumed in", [])
        before = later[-1] if later else kept
        if any(before.get(key) != environment.get(key) for key in RELEVANT):
            write_json(
                self.folder / "environment.json", {**kept, "resumed in": [*later, environment]}
            )

    def was_interrupted(self) -> bool:
        """Whether the process that executed this run died before the run ended."""
        return (self.folder / "running.json").exists() and not self.is_locked()

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The checkpoint, if there is one that matches the log. The log is cut to its length.

        Without a checkpoint the log is emptied.
        """
        (self.folder / "failed.json").unlink(missing_ok=True)
        (self.folder / "result.json").unlink(missing_ok=True)
        checkpoint: dict[str, Any] | None = None
        try:
            checkpoint = torch.load(self.folder / "checkpoint.pt", weights_only=True)
            with open(self.log_path, "rb") as file:
                begun = file.read(checkpoint["log bytes"])
            if (
                hashlib.sha256(begun).hexdigest() != checkpoint["log sha256"]
                or "ranks" not in checkpoint
            ):
                checkpoint = None
        except Exception:  # missing or not readable: the run starts again
            checkpoint = None
        length = checkpoint["log bytes"] if checkpoint else 0
        with open(self.log_path, "ab") as file:
            file.truncate(length)
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], log: "Log") -> None:
        path = self.folder / "checkpoint.pt"
        temporary = path.with_suffix(".tmp")
        torch.save(
            {**checkpoint, "log bytes": log.bytes, "log sha256": log.hash.hexdigest()}, temporary
        )
        os.replace(temporary, path)

    def finish(self, status: Status, log: "Log", last: dict[str, Any]) -> None:
        checked = {"bytes": log.bytes, "sha256": log.hash.hexdigest()}
        result = {"status": status, **checked, "last": last, "final": final_of(self.records())}
        write_json(self.folder / "result.json", result)
        (self.folder / "checkpoint.pt").unlink(missing_ok=True)

    def fail(self, reason: str) -> None:
        write_json(self.folder / "failed.json", {"reason": reason})


def is_result(result: Any, log_bytes: int | None) -> bool:
    """Whether this is the content of a result.json that belongs to a log of this size."""
    if not isinstance(result, dict) or not {"status", "bytes", "sha256", "last"} <= result.keys():
        return False
    return bool(result["bytes"] == log_bytes)


def final_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Final values of a run: means over its last 5 % of records, and the counts of the last one."""
    tail = records[-max(1, round(0.05 * len(records))) :]
    means = {
        key: sum(record.get(key, math.nan) for record in tail) / len(tail)
        for key in tail[-1]
        if key not in COUNTS
    }
    return {key: means.get(key, value) for key, value in tail[-1].items()}


class Log:
    """The log of a run, open for appending. Records are written without buffering."""

    def __init__(self, path: Path) -> None:
        begun = path.read_bytes() if path.exists() else b""
        self._file = path.open("ab", buffering=0)
        self.bytes = len(begun)
        self.hash = hashlib.sha256(begun)

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        self._file.write(line)
        self.hash.update(line)
        self.bytes += len(line)

    def close(self) -> None:
        self._file.close()


class Store:
    """A folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs"

    def find(self, spec: RunSpec, name: str) -> Run:
        """The run of this spec, which may not exist yet."""
        return Run(self.folder / spec.problem / name)

    def run(self, spec: RunSpec, name: str) -> Run:
        """The run of this spec. Its folder is created if it does not exist."""
        run = self.find(spec, name)
        if not (run.folder / "spec.json").exists():
            run.folder.mkdir(parents=True, exist_ok=True)
            write_json(run.folder / "spec.json", spec.model_dump(mode="json"))
        return run

    def remember(
        self, figure: str, scale: str, experiments: list[dict[str, Any]], command: str
    ) -> None:
        """Store the experiments of a figure, for the commands that read this folder.

        The same experiments with another number of seeds replace them.
        """
        content = {"figure": figure, "scale": scale, "experiments": experiments, "command": command}
        path = self._experiment_file(figure, scale, experiments)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
        older = path.with_name(f"{figure}-{scale}.json")  # before the mark was part of the name
        if older.exists() and _mark(json.loads(older.read_text())["experiments"]) == _mark(
            experiments
        ):
            older.unlink()

    def remembers(self, figure: str, scale: str, experiments: list[dict[str, Any]]) -> bool:
        """Whether these experiments are stored, with any number of seeds."""
        return self._experiment_file(figure, scale, experiments).exists()

    def _experiment_file(self, figure: str, scale: str, experiments: list[dict[str, Any]]) -> Path:
        folder = self.folder.parent / "experiments"
        return folder / f"{figure}-{scale}-{_mark(experiments)}.json"

    def experiment_files(self) -> list[Path]:
        """The files of the stored experiments, the oldest first."""
        found = (self.folder.parent / "experiments").glob("*.json")
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))

    def present(self) -> set[tuple[str, str]]:
        """The problems and scales that have runs."""
        found = set()
        for run in self.runs():
            content = run.read("spec.json")
            if isinstance(content, dict):
                found.add((content.get("problem", ""), content.get("scale", "")))
        return found

    def runs(self) -> list[Run]:
        return [Run(Path(folder)) for folder in self.run_folders()]

    def run_folders(self) -> list[str]:
        """The folders of all runs, sorted. Much faster than pathlib for thousands of runs."""
        problems = [problem.path for problem in _folders(self.folder)]
        folders = [run.path for problem in problems for run in _folders(problem)]
        return [folder for folder in sorted(folders) if os.path.exists(f"{folder}/spec.json")]


def _folders(folder: str | Path) -> list[os.DirEntry[str]]:
    """The folders in a folder; none if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _mark(experiments: list[dict[str, Any]]) -> str:
    """A hash of the experiments without their texts and their number of seeds."""
    words = ("title", "note", "seeds", "figure")
    return hashlib.sha256(
        canonical([{k: v for k, v in e.items() if k not in words} for e in experiments]).encode()
    ).hexdigest()[:8]


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)
