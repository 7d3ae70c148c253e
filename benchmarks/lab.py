"""The overhead of the laboratory, and how it grows with the size of a store.

    python benchmarks/lab.py

Overhead: the same back-propagations and evaluations, bare and in the laboratory, interleaved.
Growth: the time to check that a store of finished runs is complete, and to read a log, by size.
Opening: `steptuned list` and `steptuned show` on 10,000 runs, and what `import steptuned` adds to
`import torch`. These are interleaved, and the minimum is reported, since other processes only add
time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from steptuned.lab.driver import Driver
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.run import execute, folder_of
from steptuned.lab.spec import RunSpec
from steptuned.lab.store import Log, Store, write_json

RUNS, SEEDS, RECORDS = 10_000, 5, 11
"""Runs, seeds per set and records per run of the store that is opened."""


def make_spec(problem: str, budget: int, log_every: int, seed: int = 0) -> RunSpec:
    method = METHODS["step-tuned-sgd"]
    options = PROBLEMS[problem].defaults
    return RunSpec(
        problem=problem,
        options=options,
        method="step-tuned-sgd",
        hyper=method.defaults,
        seed=seed,
        scale="bench",
        budget=budget,
        log_every=log_every,
    )


def bare(spec: RunSpec) -> float:
    """Seconds for training and evaluation alone."""
    start = time.perf_counter()
    problem = PROBLEMS[spec.problem].from_dict(spec.options, spec.seed, torch.device("cpu"))
    driver = Driver(spec.method, problem, spec.hyper)
    for done in range(spec.budget + 1):
        if done % spec.log_every == 0:
            problem.evaluate()
        if done < spec.budget:
            driver.advance()
    return time.perf_counter() - start


def through_the_laboratory(spec: RunSpec, checkpoint_seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        execute(folder_of(Store(Path(folder)), spec), {}, checkpoint_seconds=checkpoint_seconds)
        return time.perf_counter() - start


def overhead(rounds: int) -> None:
    what = "overhead of log, checkpoints and store, as a share of the bare run"
    print(f"{what}: median [quartiles], n = {rounds}")
    specs = {
        "regression, 2,500 back-propagations, one record per 10": make_spec("regression", 2500, 10),
        "digits, 230 back-propagations, one record per 23": make_spec("digits", 230, 23),
    }
    for name, spec in specs.items():
        for every in (60.0, 1.0):
            shares = [through_the_laboratory(spec, every) / bare(spec) - 1 for _ in range(rounds)]
            low, middle, high = statistics.quantiles(shares, n=4)
            spread = f"{middle:.1%} [{low:.1%}, {high:.1%}]"
            print(f"  {name}, a checkpoint every {every:g} s: {spread}")


def growth() -> None:
    print("time to check that all runs of a store are finished")
    for size in (1_000, 3_000, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            seconds = seconds_to_see_finished(Store(Path(folder)), size)
        print(f"  {size:6,} runs: {seconds:.2f} s, {seconds / size * 1e6:.0f} us per run")
    print("time to read the log of a run")
    record = {"bp": 100, "loss": 0.5, "gamma": 1.0, "seconds": 0.123}
    for length in (1_000, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            run = folder_of(Store(Path(folder)), make_spec("regression", 100, 10))
            run.log_path.write_bytes((json.dumps(record) + "\n").encode() * length)
            start = time.perf_counter()
            run.records()
            seconds = time.perf_counter() - start
        print(f"  {length:7,} records: {seconds:.3f} s, {seconds / length * 1e6:.1f} us per record")


def seconds_to_see_finished(store: Store, size: int) -> float:
    record = {"bp": 100, "loss": 0.5}
    line = json.dumps(record).encode() + b"\n"
    result = {"status": "finished", "bytes": len(line), "sha256": "", "last": record}
    specs = [make_spec("regression", 100, 10, seed) for seed in range(size)]
    for spec in specs:
        run = folder_of(store, spec)
        run.log_path.write_bytes(line)
        write_json(run.folder / "result.json", result)
    start = time.perf_counter()
    finished = sum(folder_of(store, spec).result() is not None for spec in specs)
    seconds = time.perf_counter() - start
    assert finished == size
    return seconds


def opening(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        fill(Store(Path(name)))
        commands = {
            "import torch": ("-c", "import torch"),
            "steptuned list": ("-m", "steptuned", "list"),
            f"steptuned show, {RUNS:,} runs": ("-m", "steptuned", "show", name),
        }
        found: dict[str, list[tuple[float, float]]] = {label: [] for label in commands}
        for _ in range(rounds):
            for label, arguments in commands.items():
                found[label].append(seconds_of(arguments))
    print(f"time to open, minimum of n = {rounds}, interleaved")
    for label, times in found.items():
        cpu, wall = (min(values) for values in zip(*times, strict=True))
        print(f"  {label}: {cpu:.2f} s of processor time, {wall:.2f} s of wall-clock time")
    cpu, wall = (min(v) for v in zip(*(import_times() for _ in range(rounds)), strict=True))
    print(f"  import steptuned after torch: {cpu:.0f} ms of processor time")
    print(f"    (-X importtime, which is wall-clock time: {wall:.0f} ms)")


def fill(store: Store) -> None:
    """Write synthetic runs, in sets of seeds."""
    for i in range(RUNS):
        spec = make_spec("regression", 100, 10, i % SEEDS)
        hyper = {**spec.hyper, "lr": 0.001 * (1 + i // SEEDS)}
        run = folder_of(store, spec.model_copy(update={"hyper": hyper}))
        log = Log(run.log_path)
        for k in range(RECORDS):
            record = {"bp": 10 * k, "batches": 5 * k, "samples": 50 * k, "loss": 1 / (1 + k)}
            log.append(record)
        run.finish("finished", log, record)
        log.close()


def seconds_of(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Processor time and wall-clock time of a Python process, in seconds."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system
    return cpu - before.children_user - before.children_system, wall


def import_times() -> tuple[float, float]:
    """Milliseconds that `import steptuned` adds: processor time, and by `-X importtime`."""
    code = "import time, torch; t = time.process_time(); import steptuned"
    code += "; print(time.process_time() - t)"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in done.stderr.splitlines() if line.endswith("| steptuned"))
    return 1000 * float(done.stdout), int(line.split("|")[1]) / 1000


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="gamma has been at")  # as in a run of the laboratory
    overhead(arguments.rounds)
    growth()
    opening(arguments.rounds)


if __name__ == "__main__":
    main()
