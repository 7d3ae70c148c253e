"""What the laboratory costs: logging, checkpoints and the store beside the training itself, and how that grows.

    python benchmarks/lab.py

Overhead: the same back-propagations and evaluations, bare and through the laboratory, interleaved. Growth: the time to find
out that nothing is to be done in a store of finished runs, and to read a log, for several sizes.
"""

import argparse
import json
import statistics
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
from steptuned.lab.store import Store, write_json


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
    """Training and evaluation alone. Seconds."""
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
    print(f"overhead of log, checkpoints and store, as a share of the bare run: median [quartiles], n = {rounds}")
    for name, spec in (
        ("regression, 2,500 back-propagations, a record every 10", make_spec("regression", 2500, 10)),
        ("digits, 230 back-propagations, a record every 23", make_spec("digits", 230, 23)),
    ):
        for checkpoint_seconds in (60.0, 1.0):
            shares = [through_the_laboratory(spec, checkpoint_seconds) / bare(spec) - 1 for _ in range(rounds)]
            low, middle, high = statistics.quantiles(shares, n=4)
            print(f"  {name}, a checkpoint every {checkpoint_seconds:g} s: {middle:.1%} [{low:.1%}, {high:.1%}]")


def growth() -> None:
    print("time to see that all runs of a store are finished")
    record = {"bp": 100, "loss": 0.5}
    for size in (1_000, 3_000, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder))
            specs = [make_spec("regression", 100, 10, seed) for seed in range(size)]
            for spec in specs:
                run = folder_of(store, spec)
                line = json.dumps(record).encode() + b"\n"
                run.log_path.write_bytes(line)
                write_json(run.folder / "result.json", {"status": "finished", "bytes": len(line), "sha256": "", "last": record})
            start = time.perf_counter()
            finished = sum(folder_of(store, spec).result() is not None for spec in specs)
            seconds = time.perf_counter() - start
            assert finished == size
            print(f"  {size:6,} runs: {seconds:.2f} s, {seconds / size * 1e6:.0f} us a run")
    print("time to read the log of a run")
    for length in (1_000, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            run = folder_of(Store(Path(folder)), make_spec("regression", 100, 10))
            run.log_path.write_bytes((json.dumps({**record, "gamma": 1.0, "seconds": 0.123}) + "\n").encode() * length)
            start = time.perf_counter()
            run.records()
            seconds = time.perf_counter() - start
            print(f"  {length:7,} records: {seconds:.3f} s, {seconds / length * 1e6:.1f} us a record")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="gamma has been at")  # as in a run of the laboratory
    overhead(arguments.rounds)
    growth()


if __name__ == "__main__":
    main()
