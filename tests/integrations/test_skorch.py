"""Step-Tuned SGD in a net of skorch: the numbers of a plain loop, and the code of skorch.md."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import variants

skorch = pytest.importorskip("skorch")

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "skorch.md"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, inputs):
        return self.layers(inputs)


@pytest.mark.parametrize("make", variants.VARIANTS)
def test_skorch_gives_the_numbers_of_a_plain_loop(make):
    from skorch.callbacks import LRScheduler

    generator = np.random.default_rng(0)
    x, y = (generator.normal(size=(40, n)).astype(np.float32) for n in (4, 1))
    decay = {"policy": torch.optim.lr_scheduler.ExponentialLR, "gamma": 0.9, "step_every": "batch"}
    net = skorch.NeuralNetRegressor(
        Net,
        optimizer=lambda groups, lr: make([p for group in groups for p in group["params"]]),
        batch_size=8,
        max_epochs=2,
        train_split=None,
        callbacks=[("decay", LRScheduler(**decay))],
        verbose=0,
    )
    torch.manual_seed(0)
    net.initialize()
    expected = Net()
    expected.load_state_dict(net.module_.state_dict())
    torch.manual_seed(1)
    net.partial_fit(x, y)

    opt = make(expected.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    torch.manual_seed(1)
    batches = list(zip(torch.from_numpy(x).split(8), torch.from_numpy(y).split(8), strict=True))
    losses = []
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws a seed for its workers
        for inputs, targets in batches:
            passes = []
            for _ in opt.passes():
                opt.zero_grad()
                passes.append(nn.functional.mse_loss(expected(inputs), targets))
                passes[-1].backward()
            losses.append(passes[0].item())
            scheduler.step()
    for ours, theirs in zip(net.module_.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert net.optimizer_.stats() == opt.stats()
    assert net.history[:, "train_loss"] == pytest.approx([np.mean(losses[:5]), np.mean(losses[5:])])


def test_the_code_of_the_page_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": "page"}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["stats"].iterations > 0
    assert set(names["search"].best_params_) == {"lr", "optimizer__nu"}
