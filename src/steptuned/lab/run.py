"""One run, from its spec to its log. Killed at any moment and started again, it ends with the very same numbers."""

import functools
import math
import os
import platform
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import steptuned
from steptuned.lab.methods import METHODS, Driver
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.spec import RunSpec, derive_seed
from steptuned.lab.store import COMPLETE, Log, Run, Status, Store
from steptuned.replay import Replay

CHECKPOINT_SECONDS = 60.0


def name_of(spec: RunSpec) -> str:
    return spec.name(PROBLEMS[spec.problem].defaults, METHODS[spec.method].defaults)


def folder_of(store: Store, spec: RunSpec) -> Run:
    return store.run(spec, name_of(spec))


def execute(
    run: Run,
    environment: dict[str, Any],
    device: str = "cpu",
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    tensorboard: Path | None = None,
) -> Status:
    """Run it to its end, from its checkpoint if there is one. Returns how it ended."""
    with run.claim(environment):
        status = run.status()
        if status in COMPLETE:
            return status
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="gamma has been at")  # the log has every gamma
            return _train(run, run.spec, torch.device(device), checkpoint_seconds, tensorboard)


def _train(run: Run, spec: RunSpec, device: torch.device, checkpoint_seconds: float, tensorboard: Path | None) -> Status:
    torch.manual_seed(derive_seed("noise", spec.problem, spec.seed))
    problem = PROBLEMS[spec.problem](spec.options, spec.seed, device)
    driver = Driver(spec.method, problem, spec.hyper)
    done, seconds, next_record = 0, 0.0, 0
    checkpoint = run.load_checkpoint()
    if checkpoint is not None:
        problem.load_state_dict(checkpoint["problem"])
        driver.load_state_dict(checkpoint["driver"])
        noise = Replay([device])
        noise.load_state_dict(checkpoint["rng"])
        noise.rewind()
        done, seconds, next_record = checkpoint["done"], checkpoint["seconds"], checkpoint["next record"]

    begun_at = done
    log = Log(run.log_path)
    live = None if tensorboard is None else _Live(tensorboard / run.folder.name, next_record)
    started = saved = time.monotonic()
    record: dict[str, Any] = {}
    try:
        while True:
            if done >= next_record or done == spec.budget:
                synchronise(device)
                seconds += time.monotonic() - started
                counts = {"bp": done, "batches": driver.batches, "samples": driver.samples, "seconds": round(seconds, 6)}
                record = {**counts, **problem.evaluate(), **driver.diagnostics()}
                log.append(record)
                if live is not None:
                    live.show(record)
                next_record = max(done + spec.log_every, math.ceil(done * spec.log_growth))
                if done == spec.budget or not math.isfinite(record["loss"]):
                    break
                started = time.monotonic()
            if time.monotonic() - saved >= checkpoint_seconds:
                synchronise(device)
                now = time.monotonic()
                state = {
                    "problem": problem.state_dict(),
                    "driver": driver.state_dict(),
                    "rng": Replay([device]).state_dict(),
                    "done": done,
                    "seconds": seconds + now - started,
                    "next record": next_record,
                }
                run.save_checkpoint(state, log)
                if done > begun_at:
                    run.forget_deaths()
                saved = time.monotonic()
                seconds, started = seconds + now - started, saved
            driver.advance()
            done += 1
        status: Status = "finished" if math.isfinite(record["loss"]) else "diverged"
        run.finish(status, log, record)
    finally:
        log.close()
        if live is not None:
            live.writer.close()
    return status


class _Live:
    """The records as TensorBoard's scalars, for people who watch. What was written beyond a checkpoint is taken back."""

    def __init__(self, folder: Path, begins_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=begins_at)

    def show(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "bp":
                self.writer.add_scalar(name.replace(" ", "_"), value, record["bp"])
        self.writer.flush()


def synchronise(device: torch.device) -> None:
    """Wait until an accelerator has done what it was asked, so that a clock can be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def environment_now(device: str, threads: int) -> dict[str, Any]:
    """With what, and on what, a run is made."""
    return {
        "steptuned": steptuned.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": device,
        "threads": threads,
    }


@functools.cache
def _commit() -> str | None:
    """The commit of the checkout that the package lies in, if it lies in one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
