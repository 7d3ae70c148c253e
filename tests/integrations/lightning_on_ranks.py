"""Two ranks under Lightning, started by test_lightning.py.

First a deterministic network in float64, then one with dropout that is stopped and resumed.
"""

import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steptuned import StepTunedSGD
from steptuned.integrations.lightning import StepTuned

warnings.simplefilter("ignore")


class Module(pl.LightningModule):
    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
        ).double()

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return StepTunedSGD(self.parameters(), lr=0.3, bounds=(0.05, 20.0))


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        *(torch.randn(32, n, generator=generator, dtype=torch.float64) for n in (4, 3))
    )


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def fit(folder, dropout, epochs, ckpt_path=None):
    module = Module(dropout)
    save = ModelCheckpoint(folder, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    ranks = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    trainer = pl.Trainer(
        max_epochs=epochs, callbacks=[StepTuned(), save], gradient_clip_val=0.5, **ranks, **quiet
    )
    torch.manual_seed(10 + trainer.global_rank + (0 if ckpt_path is None else 5))
    mine = range(trainer.global_rank, 32, 2)
    trainer.fit(module, DataLoader(data(), batch_size=4, sampler=mine), ckpt_path=ckpt_path)
    return trainer, module


def joined():
    """One process on the joined mini-batches."""
    module = Module(0.0)
    opt = StepTunedSGD(module.parameters(), lr=0.3, bounds=(0.05, 20.0), max_grad_norm=0.5)
    for _ in range(2):
        for x, y in DataLoader(data(), batch_size=8):
            for _ in opt.passes():
                opt.zero_grad()
                nn.functional.mse_loss(module.net(x), y).backward()
    return flat(module)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    _, steady = fit(out / "steady", 0.0, 2)
    through, noisy = fit(out / "noisy", 0.4, 2)
    resumed, again = fit(out / "again", 0.4, 2, ckpt_path=out / "noisy" / "epoch=0.ckpt")
    if through.is_global_zero:
        torch.save(joined(), out / "joined.pt")
        torch.save(
            {"steady": flat(steady), "noisy": flat(noisy), "gamma": through.optimizers[0].gamma},
            out / "through.pt",
        )
        torch.save({"noisy": flat(again), "gamma": resumed.optimizers[0].gamma}, out / "resumed.pt")
