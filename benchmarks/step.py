"""What an optimizer's own arithmetic costs per back-propagation, beside torch's SGD and Adam.

    python benchmarks/step.py [--threads 2] [--rounds 40] [--sets resnet20 autoencoder 25M]

Every round times one iteration of every method, one after the other, so that all of them meet the same machine; the figures
are ratios within a round, as median and quartiles over the rounds. Back-propagation itself is left out: the gradients are
made beforehand. Memory is what a process needs at its peak beyond parameters and one set of gradients, in units of the parameters.
"""

import argparse
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from steptuned import StepTuned, StepTunedSGD
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

METHODS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD for-loop": lambda ps: torch.optim.SGD(ps, lr=1e-6, foreach=False),
    "SGD foreach": lambda ps: torch.optim.SGD(ps, lr=1e-6, foreach=True),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=1e-6, fused=True),
    "Adam for-loop": lambda ps: torch.optim.Adam(ps, lr=1e-6, foreach=False),
    "Adam foreach": lambda ps: torch.optim.Adam(ps, lr=1e-6, foreach=True),
    "Adam fused": lambda ps: torch.optim.Adam(ps, lr=1e-6, fused=True),
    "StepTunedSGD": lambda ps: StepTunedSGD(ps, lr=1e-6),
    "StepTunedSGD foreach": lambda ps: StepTunedSGD(ps, lr=1e-6, foreach=True),
    "StepTunedSGD every 8th": lambda ps: StepTunedSGD(ps, lr=1e-6, tune_every=8),
    "StepTunedSGD relative": lambda ps: StepTunedSGD(ps, lr=1e-6, relative=True),
    "StepTuned(Adam fused)": lambda ps: StepTuned(torch.optim.Adam(ps, lr=1e-6, fused=True)),
    "StepTunedSGD weight decay": lambda ps: StepTunedSGD(ps, lr=1e-6, weight_decay=1e-4),
}


def parameters(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in SETS[name]()]


def iteration(opt: torch.optim.Optimizer, params: list[Tensor], gradients: list[list[Tensor]]) -> float:
    """Seconds per back-propagation, over two of them; over 1 + T where every T-th mini-batch is measured."""
    seconds, passes = 0.0, opt.param_groups[0].get("tune_every", 1) + 1
    for i in range(passes):
        for p, g in zip(params, gradients[i % 2], strict=True):
            p.grad = g
        act = opt.half_step if isinstance(opt, TwoPasses) and i == 0 else opt.step
        start = time.perf_counter()
        act()
        seconds += time.perf_counter() - start
    return seconds / passes


def measure_time(name: str, rounds: int) -> dict[str, list[float]]:
    runs = {}
    for method, make in METHODS.items():
        params = parameters(name)
        runs[method] = make(params), params
    gradients = [[torch.randn_like(p) * 1e-3 for p in parameters(name)] for _ in range(2)]
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for r in range(rounds + 3):
        for method, (opt, params) in runs.items():
            seconds = iteration(opt, params, gradients)
            if r >= 3:  # the first rounds make the state and warm up
                times[method].append(seconds)
    return times


def measure_memory(name: str, method: str) -> None:
    """Print the peak beyond parameters and gradients; for a process of its own."""
    params = parameters(name)
    tiny = [torch.ones(1, requires_grad=True)]
    iteration(METHODS[method](tiny), tiny, [[torch.ones(1)], [torch.ones(1)]])  # load what is lazy
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


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:5.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--memory-of", nargs=2, metavar=("SET", "METHOD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        measure_memory(*arguments.memory_of)
        return
    print(f"torch {torch.__version__}, {platform.machine()}, {arguments.threads} threads, n = {arguments.rounds} rounds")
    for name in arguments.sets:
        shapes = SETS[name]()
        elements = sum(math.prod(shape) for shape in shapes)
        print(f"\n{name}: {len(shapes)} tensors, {elements:,} elements, float32; per back-propagation, median [quartiles]")
        print(f"{'':27}{'ms':>9}   {'x Adam fused':20} {'x SGD fused':20} memory / parameters")
        times = measure_time(name, arguments.rounds)
        for method, seconds in times.items():
            adam, sgd = ([a / b for a, b in zip(seconds, times[other], strict=True)] for other in ("Adam fused", "SGD fused"))
            command = [sys.executable, __file__, "--threads", str(arguments.threads), "--memory-of", name, method]
            memory = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            print(f"{method:27}{statistics.median(seconds) * 1e3:9.3f}   {spread(adam):20} {spread(sgd):20} {memory:5.2f}")


if __name__ == "__main__":
    main()
