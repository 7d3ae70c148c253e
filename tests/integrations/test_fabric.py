"""Step-Tuned SGD under Lightning Fabric: the numbers of a plain loop, and the code of fabric.md."""

import re
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from variants import VARIANTS, plain

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "fabric.md"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*The `srun` command is available"),
]


def prepared(fabric=None, make=plain):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    model = nn.Sequential(first, nn.Dropout(0.3), nn.Linear(8, 3))
    opt = make(model.parameters())
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(40, n, generator=generator) for n in (4, 3))
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    if fabric is not None:
        model, opt = fabric.setup(model, opt)
        loader = fabric.setup_dataloaders(loader)
    return model, opt, loader


def train(form, precision="32-true", freeze=False, make=plain):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, opt, loader = prepared(fabric if form != "plain" else None, make)
    torch.manual_seed(2)
    losses = []
    for x, y in loader:

        def backward(x=x, y=y):
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            if form == "plain":
                loss.backward()
            else:
                fabric.backward(loss)
            return loss

        if form == "closure":
            losses.append(opt.step(backward))
        else:
            first, *_ = [backward() for _ in opt.passes(freeze=model if freeze else None)]
            losses.append(first)
    return model, opt, torch.stack(losses).detach()


def state(model):
    return torch.cat([t.detach().reshape(-1).float() for t in model.state_dict().values()])


FORMS = [("closure", False), ("passes", False), ("passes", True)]


@pytest.mark.parametrize("make", VARIANTS)
@pytest.mark.parametrize(("form", "freeze"), FORMS)
def test_fabric_gives_the_numbers_of_a_plain_loop(form, freeze, make):
    model, opt, losses = train(form, freeze=freeze, make=make)
    expected, theirs, their_losses = train("plain", freeze=freeze, make=make)
    assert torch.equal(state(model), state(expected))
    assert torch.equal(losses, their_losses)
    assert opt.stats() == theirs.stats()
    assert opt.stats().iterations == 5


def test_bf16_works_in_both_passes():
    _, opt, losses = train("closure", precision="bf16-mixed")
    assert opt.stats().iterations == 5
    assert losses.isfinite().all()


@pytest.mark.parametrize("make", VARIANTS)
def test_a_checkpoint_of_fabric_contains_the_measurement(tmp_path, make):
    fabric = Fabric(accelerator="cpu", devices=1)
    model, opt, _ = train("closure", make=make)
    fabric.save(tmp_path / "state.ckpt", {"model": model, "opt": opt})
    fresh, other, loader = prepared(fabric, make)
    fabric.load(tmp_path / "state.ckpt", {"model": fresh, "opt": other})
    assert other.stats() == opt.stats()
    for x, y in loader:
        for net, optimizer in ((model, opt), (fresh, other)):
            torch.manual_seed(3)

            def backward(net=net, optimizer=optimizer, x=x, y=y):
                optimizer.zero_grad()
                fabric.backward(nn.functional.mse_loss(net(x), y))

            optimizer.step(backward)
    assert torch.equal(state(model), state(fresh))
    assert torch.equal(opt.gamma, other.gamma)


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["closure", "passes"])
def test_the_code_of_the_page_runs(tmp_path, monkeypatch, block):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["opt"].stats().iterations == len(names["loader"])
