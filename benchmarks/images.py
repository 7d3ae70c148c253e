"""Mini-batches from memory and from a DataLoader, and the memory layouts of the networks.

Both are measured over the same tensors, interleaved in one process; compare the ratios within a
round, not the times. Needs STEPTUNED_DATA.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from steptuned.lab.data.batches import mean_and_deviation
from steptuned.lab.data.reading import load
from steptuned.lab.driver import Driver
from steptuned.lab.methods import METHODS
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.table1 import TABLE_1

ROUNDS = 15
CPU = torch.device("cpu")


def seconds(work: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def rounds(
    works: dict[str, tuple[Callable[[], object], int]], count: int = ROUNDS
) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of each work in each round. The rounds start with different works."""
    for work, _ in works.values():
        work()
    names = list(works)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for i in range(count):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            measured[name].append(seconds(*works[name]))
    return {name: np.array(values) for name, values in measured.items()}


def spread(values: np.ndarray[Any, Any], form: str = ".3f") -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def problem_of(letter: str, **changes: Any) -> Any:
    setting = TABLE_1[letter]
    problem = PROBLEMS[setting["problem"]]
    return problem.from_dict({**setting["options"], **changes}, 0, CPU)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def batches() -> None:
    """The cost of a mini-batch, relative to a step of SGD on LeNet, where it matters most."""
    images = load("cifar-10")
    mean, deviation = (t.view(-1, 1, 1) for t in mean_and_deviation(images.train))
    problem = problem_of("e")
    augmented = problem_of("e", augmentation="standard")
    driver = Driver("sgd", problem, METHODS["sgd"].defaults)
    loader = DataLoader(TensorDataset(images.train, images.train_labels), 128, shuffle=True)
    stream = endless(loader)

    def from_loader() -> object:
        x, _ = next(stream)
        return (x.float() / 255 - mean) / deviation

    works: dict[str, tuple[Callable[[], object], int]] = {
        "a step of SGD on LeNet, with its mini-batch": (driver.advance, 20),
        "a mini-batch from memory": (lambda: problem.inputs(problem.draw()), 20),
        "a mini-batch from memory, augmented": (lambda: augmented.inputs(augmented.draw()), 20),
        "a mini-batch from a DataLoader over the same tensors": (from_loader, 20),
    }
    measured = rounds(works)
    step = measured["a step of SGD on LeNet, with its mini-batch"]
    print(
        f"mini-batches of 128 CIFAR-10 images, {torch.get_num_threads()} threads, "
        f"n = {ROUNDS} rounds, median [quartiles]"
    )
    for name, values in measured.items():
        print(
            f"  {name:55} {1e3 * np.median(values):7.3f} ms   "
            f"share of the step {spread(values / step)}"
        )


def layouts() -> None:
    print("channels_last / contiguous: time per back-propagation, ratio, median [quartiles]")
    for letter, times, count in (("a", 2, 7), ("c", 1, 5), ("e", 20, ROUNDS), ("f", 20, ROUNDS)):
        drivers = {
            layout: Driver("sgd", problem_of(letter, layout=layout), METHODS["sgd"].defaults)
            for layout in ("contiguous", "channels_last")
        }
        measured = rounds(
            {layout: (driver.advance, times) for layout, driver in drivers.items()}, count
        )
        ratio = spread(measured["channels_last"] / measured["contiguous"])
        ms = 1e3 * np.median(measured["contiguous"])
        print(f"  ({letter}) {TABLE_1[letter]['title']:40} {ms:9.2f} ms contiguous   {ratio}")


if __name__ == "__main__":
    batches()
    layouts()
