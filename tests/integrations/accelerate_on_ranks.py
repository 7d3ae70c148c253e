"""accelerate and the Trainer, on two ranks or in one process on the joined mini-batches.

Started by test_accelerate.py.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from steptuned import StepTunedSGD
from steptuned.integrations.huggingface import StepTunedTrainer

warnings.simplefilter("ignore")
RANKS = int(os.environ.get("WORLD_SIZE", 1))


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def loop(form):
    """A hand-written loop: the mini-batch of 8 is split over the ranks."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        *(torch.randn(64, n, generator=generator, dtype=torch.float64) for n in (4, 3))
    )
    plain = StepTunedSGD(model.parameters(), lr=0.3, bounds=(0.05, 20.0), max_grad_norm=0.5)
    wrapped, opt, loader = accelerator.prepare(
        model, plain, DataLoader(data, batch_size=8 // RANKS)
    )
    for x, y in loader:

        def backward(x=x, y=y):
            opt.zero_grad()
            accelerator.backward(nn.functional.mse_loss(wrapped(x), y))

        if form == "closure":
            opt.step(backward)
        else:
            for _ in opt.optimizer.passes():
                backward()
    return {"params": flat(model), "gamma": plain.gamma, "iterations": plain.stats().iterations}


def trainer(folder):
    """The Trainer: updates of 8 sequences, in 2 micro-batches on every rank."""
    torch.manual_seed(0)
    sizes = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 8,
        "vocab_size": 20,
        "n_positions": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).double()
    tokens = torch.randint(20, (32, 8), generator=torch.Generator().manual_seed(1))
    data = [
        {"input_ids": t, "labels": t.clone().index_fill(0, torch.tensor(0), -100)} for t in tokens
    ]
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    args = TrainingArguments(
        per_device_train_batch_size=4 // RANKS,
        gradient_accumulation_steps=2,
        learning_rate=0.3,
        max_grad_norm=0.5,
        num_train_epochs=2,
        train_sampling_strategy="sequential",
        **options,
    )
    mine = StepTunedTrainer(model, args, train_dataset=data)
    mine.train()
    return {
        "params": flat(model),
        "gamma": mine.optimizer.optimizer.gamma,
        "iterations": mine.state.global_step,
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    results = {form: loop(form) for form in ("closure", "passes")} | {"trainer": trainer(out)}
    torch.save(results, out / f"{RANKS}-{os.environ.get('RANK', 0)}.pt")
