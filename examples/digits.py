"""SGD and Step-Tuned SGD on handwritten digits, at equal cost.

    python examples/digits.py [--out DIR]

Both methods get the same number of back-propagations, the same decay, the same grid of learning
rates and three seeds. The learning rate is chosen by the training loss after a tenth of the budget,
as in the paper. Writes digits.png and prints a table. Needs the extra `lab`.
"""

import argparse
import statistics
import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from steptuned import StepTunedSGD

matplotlib.use("agg")
import matplotlib.pyplot as plt

BATCH, EPOCHS, WEIGHT_DECAY, DELTA = 64, 40, 1e-4, 0.001
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
COLOURS = {"SGD": "#0072B2", "Step-Tuned SGD": "#D55E00"}


class Digits:
    """Scikit-learn's 8x8 digits: 1,437 training images and 360 test images."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        x = torch.tensor(images[order], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        y = torch.tensor(labels[order])
        self.x, self.y, self.x_test, self.y_test = x[:1437], y[:1437], x[1437:], y[1437:]

    def batches(self, seed: int) -> "list[Tensor]":
        """The rows of every mini-batch, reshuffled each epoch. The same for all methods."""
        generator = torch.Generator().manual_seed(seed)
        return [
            rows
            for _ in range(EPOCHS)
            for rows in torch.randperm(len(self.y), generator=generator).split(BATCH)
        ]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ELU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def evaluate(model: nn.Module, data: Digits) -> tuple[float, float]:
    """The training loss J, with its regularization, and the accuracy on the test set."""
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(data.x), data.y)
        loss += WEIGHT_DECAY / 2 * sum(p.square().sum() for p in model.parameters())
        accuracy = (model(data.x_test).argmax(1) == data.y_test).float().mean()
    model.train()
    return loss.item(), accuracy.item()


def train(method: str, lr: float, seed: int, data: Digits, budget: int) -> dict[str, list[float]]:
    """Train, and return the log: back-propagations, loss, accuracy and gamma, once per epoch."""
    model, batches = network(seed), data.batches(seed)
    per_epoch = -(-len(data.y) // BATCH)
    log: dict[str, list[float]] = {"back-propagations": [], "loss": [], "accuracy": [], "gamma": []}
    opt: torch.optim.Optimizer
    if method == "SGD":
        opt = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
    else:
        opt = StepTunedSGD(
            model.parameters(),
            lr=lr,
            decay_every=per_epoch / 2,
            delta=DELTA,
            weight_decay=WEIGHT_DECAY,
        )
    for done in range(budget):
        rows = batches[done if method == "SGD" else done // 2]
        opt.zero_grad()
        nn.functional.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
        if isinstance(opt, StepTunedSGD):
            opt.step() if done % 2 else opt.half_step()
        else:
            opt.param_groups[0]["lr"] = lr / (1 + done // per_epoch) ** (0.5 + DELTA)
            opt.step()
        if (done + 1) % per_epoch == 0:
            loss, accuracy = evaluate(model, data)
            gamma = opt.gamma.item() if isinstance(opt, StepTunedSGD) else 1.0
            for name, value in zip(log, (done + 1, loss, accuracy, gamma), strict=True):
                log[name].append(value)
    return log


def draw(
    results: dict[str, list[dict[str, list[float]]]], chosen: dict[str, float], path: Path
) -> None:
    figure, axes = plt.subplots(
        3, 1, figsize=(6, 7.5), sharex=True, height_ratios=(3, 2, 1.2), layout="constrained"
    )
    for method, logs in results.items():
        for i, (axis, name) in enumerate(zip(axes, ("loss", "accuracy", "gamma"), strict=True)):
            if name == "gamma" and method == "SGD":
                continue
            values = np.array([log[name] for log in logs])
            x = logs[0]["back-propagations"]
            label = f"{method}, lr {chosen[method]:g}" if i == 0 else None
            axis.fill_between(
                x, values.min(0), values.max(0), color=COLOURS[method], alpha=0.2, linewidth=0
            )
            axis.plot(x, values.mean(0), color=COLOURS[method], label=label)
    axes[0].set(
        yscale="log",
        ylabel="training loss J",
        title="Handwritten digits: mean and range of 3 seeds",
    )
    axes[0].legend(frameon=False)
    axes[1].set(ylabel="test accuracy", ylim=(0.8, 1.0))
    axes[2].set(ylabel="gamma", xlabel="back-propagations", ylim=(0, 2.2))
    figure.savefig(path, dpi=150)


def progress(text: str) -> None:
    """Update one line in a terminal; elsewhere, write one line per message."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:60}\r")
    elif text:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help="the budget; at most %(default)s"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    data = Digits()
    budget = arguments.epochs * -(-len(data.y) // BATCH)
    chosen: dict[str, float] = {}
    results: dict[str, list[dict[str, list[float]]]] = {}
    for method in COLOURS:
        trials = {}
        for lr in RATES:
            progress(f"{method}: trying lr {lr:g}")
            trials[lr] = train(method, lr, 0, data, max(budget // 10, 23))["loss"][-1]
        chosen[method] = min(trials, key=trials.__getitem__)
        results[method] = []
        for seed in range(3):
            progress(f"{method}: lr {chosen[method]:g}, seed {seed + 1} of 3")
            results[method].append(train(method, chosen[method], seed, data, budget))
    progress("")
    draw(results, chosen, arguments.out / "digits.png")

    print(f"after {budget} back-propagations, 3 seeds: mean (min to max)")
    print(f"{'':16}{'lr':>6}   {'training loss':32}{'test accuracy'}")
    for method, logs in results.items():
        cells = []
        for name, form in (("loss", ".6f"), ("accuracy", ".2%")):
            last = [log[name][-1] for log in logs]
            cells.append(
                f"{statistics.mean(last):{form}} ({min(last):{form}} to {max(last):{form}})"
            )
        print(f"{method:16}{chosen[method]:6g}   {cells[0]:32}{cells[1]}")
    print(f"picture: {arguments.out / 'digits.png'}")


if __name__ == "__main__":
    main()
