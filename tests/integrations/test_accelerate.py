"""Step-Tuned SGD in loops with accelerate, in one process and in two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variants

SCRIPT = Path(__file__).parent / "accelerate_on_ranks.py"


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps what an Accelerator was told."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def prepared(make=variants.plain, **options):
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(40, 4, generator=generator), torch.randn(40, 3, generator=generator)
    )
    opt = make(model.parameters())
    return accelerator, *accelerator.prepare(model, opt, DataLoader(data, batch_size=8))


def train(form, scheduled=False, make=variants.plain):
    accelerator, model, opt, loader = prepared(make)
    scheduler = (
        accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)) if scheduled else None
    )
    for i, (x, y) in enumerate(loader):
        torch.manual_seed(i)

        def backward(x=x, y=y):
            opt.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))

        form(opt, backward)
        if scheduler is not None:
            scheduler.step()
    return model, opt


def closure(opt, backward):
    opt.step(backward)


def passes(opt, backward):
    for _ in opt.optimizer.passes():
        backward()


def plain(scheduled=False, make=variants.plain):
    """The same without accelerate."""
    _, model, opt, loader = prepared(make)
    opt = opt.optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) if scheduled else None
    for i, (x, y) in enumerate(loader):
        torch.manual_seed(i)
        for _ in opt.passes():
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
        if scheduler is not None:
            scheduler.step()
    return model, opt


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("make", variants.VARIANTS)
@pytest.mark.parametrize("form", [closure, passes])
def test_a_prepared_optimizer_gives_the_numbers_of_a_plain_one(form, make):
    model, opt = train(form, make=make)
    expected, theirs = plain(make=make)
    assert torch.equal(flat(model), flat(expected))
    assert torch.equal(opt.optimizer.gamma, theirs.gamma)
    assert opt.optimizer.stats() == theirs.stats()


def test_a_prepared_scheduler_counts_iterations():
    model, opt = train(closure, scheduled=True)
    expected, _ = plain(scheduled=True)
    assert opt.param_groups[0]["lr"] == 0.3 * 0.9**5
    assert torch.equal(flat(model), flat(expected))


@pytest.mark.parametrize("make", variants.VARIANTS)
def test_a_prepared_optimizer_resumes_from_accelerates_checkpoint_bit_for_bit(tmp_path, make):
    def run(save=None, load=None):
        accelerator, model, opt, loader = prepared(make)
        for i, (x, y) in enumerate(loader):
            if save and i == 2:
                accelerator.save_state(save)
            if load and i == 2:
                accelerator.load_state(load)  # after the loader has drawn its seed
            if load and i < 2:
                continue

            def backward(x=x, y=y):
                opt.zero_grad()
                accelerator.backward(nn.functional.mse_loss(model(x), y))

            opt.step(backward)
        return flat(model), opt.optimizer.gamma

    through = run(save=str(tmp_path))
    torch.manual_seed(99)
    resumed = run(load=str(tmp_path))
    assert torch.equal(through[0], resumed[0])
    assert torch.equal(through[1], resumed[1])


def test_under_accumulate_a_closure_is_called_for_the_last_micro_batch_only():
    """Why the recipe does without ``accelerator.accumulate``."""
    accelerator, model, opt, loader = prepared(gradient_accumulation_steps=2)
    called = []
    for i, (x, y) in enumerate(loader):

        def backward(x=x, y=y, i=i):
            called.append(i)
            opt.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))

        with accelerator.accumulate(model):
            opt.step(backward)
    assert called == [1, 1, 3, 3, 4, 4]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """The script in one process and in two, at the same time."""
    folder = tmp_path_factory.mktemp("ranks")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    started = [
        subprocess.Popen([*launch, str(SCRIPT), str(folder)], env=env)
        for launch in (torchrun, [sys.executable])
    ]
    assert [process.wait() for process in started] == [0, 0]
    return [torch.load(folder / name) for name in ("1-0.pt", "2-0.pt", "2-1.pt")]


@pytest.mark.parametrize("how", ["closure", "passes", "trainer"])
def test_two_processes_give_the_numbers_of_one_on_the_joined_mini_batches(on_ranks, how):
    one, *two = (results[how] for results in on_ranks)
    assert torch.equal(two[0]["params"], two[1]["params"])
    assert torch.equal(two[0]["gamma"], two[1]["gamma"])
    torch.testing.assert_close(two[0]["params"], one["params"], rtol=0, atol=1e-10)
    assert one["iterations"] == two[0]["iterations"] == 8
