"""Time per back-propagation of an optimizer's arithmetic, compared with torch's fused optimizers.

    python benchmarks/step.py [--threads 1 2] [--rounds 40] [--sets resnet20 autoencoder 25M]
                              [--write docs/caveats.md] [--write-short README.md]

In every round the methods take turns, so that all of them see the same load of the machine: one
iteration warms up the caches, and the next ones are timed. The figures are ratios within a round,
as median and quartiles over the rounds. Back-propagation itself is not included: the gradients are
created beforehand. Memory is the peak of a process beyond parameters and one set of gradients, in
units of the parameters. Run it on an idle machine. On a busy one, ``--cpu-time`` measures the time
of the thread instead of the wall-clock time, for one thread.
"""

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from steptuned import StepTuned, StepTunedSGD, kernel_status
from steptuned.optim import bucket
from steptuned.optim.kernel import kernel_for
from steptuned.optim.two_passes import TwoPasses


def resnet20() -> list[tuple[int, ...]]:
    """The 59 tensors of a ResNet-20 for CIFAR-10: 269,722 elements."""
    shapes: list[tuple[int, ...]] = [(16, 3, 3, 3), (16,), (16,)]
    width = 16
    for new in (16, 32, 64):
        for _ in range(6):
            shapes += [(new, width, 3, 3), (new,), (new,)]
            width = new
    return [*shapes, (10, 64), (10,)]


def autoencoder() -> list[tuple[int, ...]]:
    """784-1000-500-250-30 and back: 2,837,314 elements in 16 tensors."""
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    return [shape for a, b in pairwise(widths) for shape in ((b, a), (b,))]


def about_25_million() -> list[tuple[int, ...]]:
    """Eight blocks of a transformer of width 512: 25.2 million elements in 96 tensors."""
    block: list[tuple[int, ...]] = [(512,), (512,), (1536, 512), (1536,), (512, 512), (512,)]
    block += [(512,), (512,), (2048, 512), (2048,), (512, 2048), (512,)]
    return block * 8


SETS = {"resnet20": resnet20, "autoencoder": autoencoder, "25M": about_25_million}

NAMES = {"resnet20": "ResNet-20", "autoencoder": "autoencoder", "25M": "transformer blocks"}

REPEATS = {"resnet20": 10, "autoencoder": 3, "25M": 1}
"""Timed iterations per turn."""

METHODS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=1e-6, fused=True),
    "Adam fused": lambda ps: torch.optim.Adam(ps, lr=1e-6, fused=True),
    "kernel": lambda ps: StepTunedSGD(ps, lr=1e-6),
    "kernel, weight decay": lambda ps: StepTunedSGD(ps, lr=1e-6, weight_decay=1e-4),
    "torch": lambda ps: StepTunedSGD(ps, lr=1e-6),
    "torch, weight decay": lambda ps: StepTunedSGD(ps, lr=1e-6, weight_decay=1e-4),
    "tune_every=8": lambda ps: StepTunedSGD(ps, lr=1e-6, tune_every=8),
    "relative": lambda ps: StepTunedSGD(ps, lr=1e-6, relative=True),
    "StepTuned(Adam)": lambda ps: StepTuned(torch.optim.Adam(ps, lr=1e-6, fused=True)),
}

MARKERS = "<!-- benchmarks/step.py: begin -->", "<!-- benchmarks/step.py: end -->"


@contextmanager
def path_of(method: str) -> Iterator[None]:
    """Turn the kernel off for the methods that measure the torch path."""
    with patch.object(
        bucket, "kernel_for", (lambda dtype: None) if method.startswith("torch") else kernel_for
    ):
        yield


def parameters(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in SETS[name]()]


def iteration(
    opt: torch.optim.Optimizer,
    params: list[Tensor],
    gradients: list[list[Tensor]],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds per back-propagation, over the 1 + T of a cycle of T = tune_every mini-batches."""
    seconds, passes = 0.0, opt.param_groups[0].get("tune_every", 1) + 1
    for i in range(passes):
        for p, g in zip(params, gradients[i % 2], strict=True):
            p.grad = g
        act = opt.half_step if isinstance(opt, TwoPasses) and i == 0 else opt.step
        start = clock()
        act()
        seconds += clock() - start
    return seconds / passes


def measure_time(name: str, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds per back-propagation of each method in each round."""
    runs = {}
    for method, make in METHODS.items():
        params = parameters(name)
        runs[method] = make(params), params
    gradients = [[torch.randn_like(p) * 1e-3 for p in parameters(name)] for _ in range(2)]
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for r in range(rounds + 3):
        for method, (opt, params) in runs.items():
            with path_of(method):
                iteration(opt, params, gradients)
                taken = [iteration(opt, params, gradients, clock) for _ in range(REPEATS[name])]
            if r >= 3:  # the first rounds create the state and warm up
                times[method].append(statistics.mean(taken))
    return times


def measure_memory(name: str, method: str) -> None:
    """Print the peak memory beyond parameters and gradients. Runs in its own process."""
    with path_of(method):
        tiny = [torch.ones(1, requires_grad=True)]
        # Load what is loaded lazily.
        iteration(METHODS[method](tiny), tiny, [[torch.ones(1)], [torch.ones(1)]])
        params = parameters(name)
        size = sum(p.numel() * p.element_size() for p in params)
        opt = METHODS[method](params)

        def backward() -> None:
            opt.zero_grad()
            for p in params:
                p.grad = torch.full_like(p, 1e-3)

        backward()
        baseline = status("VmRSS")
        for _ in range(3):
            if isinstance(opt, TwoPasses) and opt.needs_second_pass:
                opt.half_step()
                backward()
            opt.step()
            backward()
        print((status("VmHWM") - baseline) / size)


def status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def memory_of(name: str, method: str) -> float:
    command = [sys.executable, __file__, "--threads", "1", "--memory-of", name, method]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def processor() -> str:
    """The processor's name, if the system provides it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.machine()


def table(sets: list[str], threads: list[int], rounds: int, cpu_time: bool) -> str:
    """The figures of all sets as Markdown."""
    clock = time.thread_time if cpu_time else time.perf_counter
    lines = [
        f"Measured on {date.today()} on {processor()} ({os.cpu_count()} cores), "
        f"torch {torch.__version__}, float32, with the checks for non-finite gradients; "
        f"{'CPU time of the thread, ' if cpu_time else ''}"
        f"median [quartiles] of n = {rounds} interleaved rounds.",
        "",
        "| parameters | threads | path | ms | / fused Adam | / fused SGD "
        "| peak memory / parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sets:
        shapes = SETS[name]()
        elements = sum(math.prod(shape) for shape in shapes)
        what = f"{NAMES[name]}: {elements:,} in {len(shapes)} tensors"
        memory = {method: memory_of(name, method) for method in METHODS}
        for n in threads:
            torch.set_num_threads(n)
            times = measure_time(name, rounds, clock)
            for method, seconds in times.items():
                adam, sgd = (
                    [a / b for a, b in zip(seconds, times[of], strict=True)]
                    for of in ("Adam fused", "SGD fused")
                )
                milliseconds = f"{statistics.median(seconds) * 1e3:.3f}"
                cells = (
                    what,
                    n,
                    method,
                    milliseconds,
                    spread(adam),
                    spread(sgd),
                    f"{memory[method]:.2f}",
                )
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def short(text: str) -> str:
    """The rows of the kernel only, without time and memory."""
    about, _, *lines = text.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kept = rows[:2] + [row for row in rows[2:] if row[2] in ("kernel", "kernel, weight decay")]
    cells = [row[:3] + row[4:6] for row in kept]
    return "\n".join((about, "", *(f"| {' | '.join(row)} |" for row in cells)))


def write(path: Path, text: str) -> None:
    """Write the table between its markers in a document."""
    begin, end = MARKERS
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the table between its markers in FILE"
    )
    parser.add_argument(
        "--write-short", type=Path, metavar="FILE", help="the same for the rows of the kernel only"
    )
    parser.add_argument("--memory-of", nargs=2, metavar=("SET", "METHOD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "gamma has been at its")  # these gradients are made up
    torch.set_num_threads(arguments.threads[0])
    if arguments.memory_of:
        measure_memory(*arguments.memory_of)
        return
    active, reason = kernel_status()
    if not active:
        sys.exit(f"the kernel is not available: {reason}")
    text = table(arguments.sets, arguments.threads, arguments.rounds, arguments.cpu_time)
    print(text)
    if arguments.write:
        write(arguments.write, text)
    if arguments.write_short:
        write(arguments.write_short, short(text))


if __name__ == "__main__":
    main()
