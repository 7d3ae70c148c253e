"""Step-Tuned SGD under the Trainer of transformers gives the numbers of a plain loop.

Options with which it could not are refused.
"""

import re
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from steptuned import StepTuned, StepTunedSGD
from steptuned.integrations.huggingface import StepTunedTrainer

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "huggingface.md"

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*'pin_memory' argument is set as true but no accelerator is found"
    ),
]


def language_model():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=40,
        n_positions=12,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)  # with dropout 0.1 in three places


def texts(n=14):
    """Sequences with different numbers of tokens that do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(40, (n, 10), generator=generator)
    labels = tokens.clone()
    for i in range(n):
        labels[i, : 1 + i % 7] = -100
    return [{"input_ids": t, "labels": target} for t, target in zip(tokens, labels, strict=True)]


class Seeds(TrainerCallback):
    """The noise of an update depends on its number only, so that a plain loop can draw the same."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)


def trainer_of(
    folder,
    model=None,
    callbacks=(Seeds,),
    dataset=None,
    optimizers=(None, None),
    choice=None,
    freeze_statistics=False,
    **options,
):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.2,
        "weight_decay": 0.01,
        "max_grad_norm": 0.3,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return StepTunedTrainer(
        model or language_model(),
        TrainingArguments(**settings | options),
        train_dataset=dataset or texts(),
        callbacks=list(callbacks),
        optimizers=optimizers,
        optimizer_cls_and_kwargs=choice,
        freeze_statistics=freeze_statistics,
    )


def groups(model, weight_decay=0.01):
    """Weight decay for all parameters except biases and norms, as in the Trainer."""
    decays = [p for name, p in model.named_parameters() if not re.search(r"bias|ln_|norm", name)]
    rest = [p for name, p in model.named_parameters() if re.search(r"bias|ln_|norm", name)]
    return [{"params": decays, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def plain(accumulate=1, epochs=2, opt=None, model=None):
    """The same training as a loop: the model, the optimizer and the log."""
    model = (model or language_model()).train()
    opt = opt or StepTunedSGD(groups(model), lr=0.2, max_grad_norm=0.3)
    updates = [batches(14)[i : i + accumulate] for i in range(0, 7, accumulate)]
    scheduler = get_linear_schedule_with_warmup(opt, 0, epochs * len(updates))
    log = []
    for _ in range(epochs):
        for micro_batches in updates:
            n = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in micro_batches)
            torch.manual_seed(len(log))
            losses = []
            for _ in opt.passes():
                opt.zero_grad()
                for batch in micro_batches:
                    loss = model(**batch, num_items_in_batch=n).loss
                    loss.backward()
                    losses.append(loss.item())
            loss = sum(losses[: len(micro_batches)])
            log.append(
                {
                    "loss": loss,
                    "learning_rate": scheduler.get_last_lr()[0],
                    "gamma": opt.gamma.reshape(-1)[0].item(),
                }
            )
            scheduler.step()
    return model, opt, log


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same_run(trainer, model, opt):
    ours = trainer.optimizer.optimizer
    return (
        torch.equal(flat(trainer.model), flat(model))
        and torch.equal(ours.gamma, opt.gamma)
        and torch.equal(ours.curvature, opt.curvature)
        and ours.stats() == opt.stats()
    )


# --------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_trainer_gives_the_numbers_of_a_plain_loop(tmp_path, accumulate):
    """Seven mini-batches per epoch: with accumulation, the last update of an epoch has fewer."""
    trainer = trainer_of(
        tmp_path, gradient_accumulation_steps=accumulate, include_num_input_tokens_seen="all"
    )
    trainer.train()
    model, opt, expected = plain(accumulate)
    assert same_run(trainer, model, opt)
    assert trainer.state.global_step == len(expected) == opt.stats().iterations
    assert trainer.state.num_input_tokens_seen == 2 * 14 * 10
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == len(expected)
    for row, was in zip(logged, expected, strict=True):
        for name, value in was.items():
            assert row[name] == pytest.approx(value, rel=1e-5), name


VARIANTS = {
    "every third": {"tune_every": 3},
    "relative, every other": {"relative": True, "tune_every": 2},
    "per group": {"per_group": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_variant_under_the_trainer_equals_a_plain_loop(tmp_path, accumulate, variant):
    options = {"lr": 0.2, "bounds": (0.05, 20.0), "max_grad_norm": 0.3, **VARIANTS[variant]}
    trainer = trainer_of(
        tmp_path, choice=(StepTunedSGD, options), gradient_accumulation_steps=accumulate
    )
    trainer.train()
    twin = language_model()
    model, opt, expected = plain(accumulate, model=twin, opt=StepTunedSGD(groups(twin), **options))
    assert same_run(trainer, model, opt)
    assert trainer.state.global_step == len(expected) == opt.stats().iterations


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_resumes_from_a_checkpoint_of_the_trainer(tmp_path, variant):
    options = {
        "save_strategy": "steps",
        "save_steps": 5,
        "choice": (StepTunedSGD, {"lr": 0.2, **VARIANTS[variant]}),
    }
    through = trainer_of(tmp_path / "through", **options)
    through.train()
    resumed = trainer_of(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-5"))
    assert same_run(resumed, through.model, through.optimizer.optimizer)


def tuned_adamw(model):
    return StepTuned(torch.optim.AdamW(groups(model), lr=0.01), tune_every=3, max_grad_norm=0.3)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_any_optimizer_is_tuned_under_the_trainer(tmp_path, accumulate):
    model = language_model()
    trainer = trainer_of(
        tmp_path,
        model,
        optimizers=(tuned_adamw(model), None),
        gradient_accumulation_steps=accumulate,
    )
    trainer.train()
    twin = language_model()
    twin, opt, expected = plain(accumulate, model=twin, opt=tuned_adamw(twin))
    assert same_run(trainer, twin, opt)
    assert trainer.state.global_step == len(expected)


def test_a_tuned_optimizer_resumes_from_a_checkpoint_of_the_trainer(tmp_path):
    runs = []
    for folder, resume in (
        ("through", None),
        ("resumed", str(tmp_path / "through" / "checkpoint-5")),
    ):
        model = language_model()
        trainer = trainer_of(
            tmp_path / folder,
            model,
            optimizers=(tuned_adamw(model), None),
            save_strategy="steps",
            save_steps=5,
        )
        trainer.train(resume_from_checkpoint=resume)
        runs.append(trainer)
    assert same_run(runs[1], runs[0].model, runs[0].optimizer.optimizer)


def test_the_optimizer_is_made_from_the_arguments(tmp_path):
    opt = trainer_of(
        tmp_path, learning_rate=0.7, weight_decay=0.02, max_grad_norm=0.4
    ).create_optimizer()
    assert isinstance(opt, StepTunedSGD)
    options = [
        (group["lr"], group["weight_decay"], group["max_grad_norm"], group["decay_every"])
        for group in opt.param_groups
    ]
    assert options == [(0.7, 0.02, 0.4, None), (0.7, 0.0, 0.4, None)]
    assert (
        trainer_of(tmp_path, max_grad_norm=0.0).create_optimizer().param_groups[0]["max_grad_norm"]
        is None
    )


@pytest.mark.parametrize("way", ["optimizers", "optimizer_cls_and_kwargs"])
def test_an_optimizer_with_other_options_can_be_passed_as_usual(tmp_path, way):
    options = {"lr": 0.1, "nu": 1.5, "bounds": (0.05, 20.0)}
    model = language_model()
    if way == "optimizers":
        opt = StepTunedSGD(groups(model), max_grad_norm=0.2, **options)
        trainer = trainer_of(
            tmp_path, model, optimizers=(opt, get_linear_schedule_with_warmup(opt, 0, 14))
        )
    else:
        trainer = trainer_of(
            tmp_path, model, choice=(StepTunedSGD, options | {"max_grad_norm": 0.2})
        )
    trainer.train()
    twin = language_model()
    twin, opt, _ = plain(model=twin, opt=StepTunedSGD(groups(twin), max_grad_norm=0.2, **options))
    assert same_run(trainer, twin, opt)


class Regression(nn.Module):
    """A model that knows nothing of num_items_in_batch: the Trainer divides its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(10, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, input_ids, labels):
        return {
            "loss": (
                self.layer(self.dropout(input_ids / 40)).squeeze(-1) - labels.float().mean(-1) / 40
            )
            .square()
            .mean()
        }


def batches(n):
    data = texts(n)
    return [
        {name: torch.stack([d[name] for d in data[i : i + 2]]) for name in data[0]}
        for i in range(0, n, 2)
    ]


def regress(updates):
    """Updates of (mini-batch, divisor of its loss, seed to begin with or None)."""
    model = Regression()
    opt = StepTunedSGD(groups(model, 0.0), lr=0.2, max_grad_norm=0.3)
    for update in updates:
        for _ in opt.passes():
            opt.zero_grad()
            for batch, divisor, seed in update:
                if seed is not None:
                    torch.manual_seed(seed)
                (model(**batch)["loss"] / divisor).backward()
    return model, opt


def in_updates(parts):
    return [
        [(batch, len(part), k if i == 0 else None) for i, batch in enumerate(part)]
        for k, part in enumerate(parts)
    ]


def regression_trainer(folder, **options):
    return trainer_of(
        folder, Regression(), lr_scheduler_type="constant", weight_decay=0.0, **options
    )


def test_a_model_whose_loss_the_trainer_divides_gives_the_same_numbers(tmp_path):
    trainer = regression_trainer(tmp_path, gradient_accumulation_steps=3)
    trainer.train()
    parts = [
        part for _ in range(2) for part in (batches(14)[:3], batches(14)[3:6], batches(14)[6:])
    ]
    assert same_run(trainer, *regress(in_updates(parts)))


def test_micro_batches_left_over_by_an_epoch_are_in_both_passes_of_the_next_update(tmp_path):
    """Micro-batches left over by an epoch of unknown length go to the first update of the next."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(texts(6))

    trainer = regression_trainer(
        tmp_path, gradient_accumulation_steps=2, max_steps=2, dataset=Stream()
    )
    trainer.train()
    first, second, third = batches(6)
    assert same_run(
        trainer,
        *regress(
            [[(first, 2, 0), (second, 2, None)], [(third, 1, 1), (first, 2, 1), (second, 2, None)]]
        ),
    )


# -------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "step", [2, 4, 6], ids=["middle", "end of an epoch", "middle of a later epoch"]
)
def test_a_resumed_run_is_bit_identical_with_dropout_and_shuffling(tmp_path, step):
    options = {
        "save_strategy": "steps",
        "save_steps": 2,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "random",
    }
    through = trainer_of(tmp_path / "through", callbacks=(), **options)
    through.train()
    trainer = trainer_of(tmp_path / "resumed", callbacks=(), **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "through" / f"checkpoint-{step}"))
    assert trainer.state.global_step == through.state.global_step == 8
    assert same_run(trainer, through.model, through.optimizer.optimizer)


@pytest.mark.parametrize("where", ["on_substep_end", "on_pre_optimizer_step"])
def test_an_aborted_run_can_be_started_again(tmp_path, where):
    """Between micro-batches nothing has moved yet; after both passes the half step is dropped."""

    class Breaks(TrainerCallback):
        broken = False

        def fall(self, *args, **kwargs):
            if not self.broken:
                self.broken = True
                raise ArithmeticError

    setattr(Breaks, where, Breaks.fall)
    trainer = regression_trainer(tmp_path, callbacks=(Seeds, Breaks), gradient_accumulation_steps=2)
    with pytest.raises(ArithmeticError):
        trainer.train()
    trainer.train()
    assert trainer.optimizer.optimizer.stats().iterations == trainer.state.global_step == 8
    if where == "on_substep_end":
        parts = [batches(14)[i : i + 2] for _ in range(2) for i in range(0, 7, 2)]
        assert same_run(trainer, *regress(in_updates(parts)))


# ------------------------------------------------------------------------------------------ the log


def test_the_log_has_the_diagnostics_at_its_interval_only(tmp_path, monkeypatch):
    """They need a synchronisation with the device."""
    calls, stats = [], StepTunedSGD.stats
    monkeypatch.setattr(StepTunedSGD, "stats", lambda opt: calls.append(opt) or stats(opt))
    trainer = trainer_of(tmp_path, logging_steps=7)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [7, 14]
    assert len(calls) == 2
    opt = trainer.optimizer.optimizer
    for name in ("negative", "at_lower", "at_upper", "ignored", "skipped"):
        assert rows[-1][name] == getattr(opt.stats(), name), name
    assert rows[-1]["raw_gamma"] == opt.stats().raw_gamma[1]
    assert rows[-1]["gamma"] == opt.gamma.item()
    assert rows[-1]["curvature"] == opt.curvature.item()
    for i, group in enumerate(opt.param_groups, start=1):
        assert rows[-1][f"effective_lr/pg{i}"] == group["effective_lr"].item()
        assert rows[-1][f"effective_lr/pg{i}"] != rows[-1]["learning_rate"]


def test_after_100_updates_the_log_shows_the_bound_that_gamma_is_at(tmp_path):
    choice = (StepTunedSGD, {"lr": 0.1, "bounds": (1e-4, 1e-3), "nu": 1e-3})
    trainer = regression_trainer(tmp_path, choice=choice, max_steps=120, logging_steps=50)
    with pytest.warns(UserWarning, match="at its upper bound 0.001 for 100 iterations"):
        trainer.train()
    row = next(row for row in trainer.state.log_history if row["step"] == 100)
    assert row["at_upper"] > 0.9
    assert row["at_lower"] < 0.1
    assert row["raw_gamma"] > 1e-3
    assert row["effective_lr/pg1"] == pytest.approx(1e-4)


# --------------------------------------------------------------------------------------- schedulers


def test_decay_every_with_the_default_scheduler_warns(tmp_path):
    """The default is linear."""
    trainer = regression_trainer(tmp_path, choice=(StepTunedSGD, {"lr": 0.1, "decay_every": 5}))
    trainer.args.lr_scheduler_type = TrainingArguments.lr_scheduler_type
    advice = "leave decay_every out, or use lr_scheduler_type='constant'"
    with pytest.warns(UserWarning, match=advice) as caught:
        trainer.train()
    ours = [str(warning.message) for warning in caught if "decay_every" in str(warning.message)]
    assert ours == [f"decay_every=5 and lr_scheduler_type='linear' both lower the step: {advice}"]


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup"])
def test_decay_every_works_with_a_constant_scheduler(tmp_path, schedule):
    """Warnings are errors here."""
    choice = (StepTunedSGD, {"lr": 0.2, "decay_every": 5, "max_grad_norm": 0.3})
    trainer = regression_trainer(tmp_path, choice=choice)
    trainer.args.lr_scheduler_type = schedule
    trainer.train()
    assert trainer.optimizer.optimizer.stats().iterations == 14


def test_decay_every_with_a_custom_scheduler_warns(tmp_path):
    model = Regression()
    opt = StepTunedSGD(model.parameters(), lr=0.2, decay_every=5)
    scheduler = get_linear_schedule_with_warmup(opt, 0, 14)
    trainer = trainer_of(tmp_path, model, optimizers=(opt, scheduler))
    with pytest.warns(UserWarning, match="decay_every=5 and a learning-rate scheduler both lower"):
        trainer.train()


# ---------------------------------------------------------------------------------------- BatchNorm


class Normalised(Regression):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, input_ids, labels):
        return super().forward(self.norm(input_ids.float()), labels)


@pytest.mark.parametrize("freeze", [False, True])
def test_the_second_pass_can_leave_the_statistics_of_batchnorm_alone(tmp_path, freeze):
    options = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    trainer = trainer_of(tmp_path, Normalised(), freeze_statistics=freeze, **options)
    trainer.train()
    model = Normalised()
    opt = StepTunedSGD(groups(model), lr=0.2, max_grad_norm=0.3)
    parts = [batches(14)[i : i + 2] for _ in range(2) for i in range(0, 7, 2)]
    for k, part in enumerate(parts):
        torch.manual_seed(k)
        for _ in opt.passes(freeze=model if freeze else None):
            opt.zero_grad()
            for batch in part:
                (model(**batch)["loss"] / len(part)).backward()
    assert same_run(trainer, model, opt)
    for ours, theirs in zip(trainer.model.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert model.norm.num_batches_tracked == (14 if freeze else 28)


# ----------------------------------------------------------------------------- sequence to sequence


class StepTunedSeq2SeqTrainer(StepTunedTrainer, Seq2SeqTrainer):
    pass


def translator():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, vocab_size=40, decoder_start_token_id=0, pad_token_id=0)
    return T5ForConditionalGeneration(config)


def test_the_trainer_mixin_works_with_seq2seqtrainer(tmp_path):
    """Two passes to train, generation to evaluate."""
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        num_train_epochs=2,
        learning_rate=0.2,
        max_grad_norm=0.3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        save_strategy="no",
        predict_with_generate=True,
        generation_max_length=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    seen = []
    trainer = StepTunedSeq2SeqTrainer(
        translator(),
        args,
        train_dataset=texts(),
        eval_dataset=texts(4),
        callbacks=[Seeds],
        compute_metrics=lambda predicted: seen.append(predicted.predictions) or {},
        freeze_statistics=True,
    )
    trainer.train()
    trainer.evaluate()
    assert seen[0].ndim == 2  # tokens, not logits

    model = translator().train()
    opt = StepTunedSGD(groups(model, 0.0), lr=0.2, max_grad_norm=0.3)
    for k, batch in enumerate(batches(14) * 2):
        torch.manual_seed(k)
        for _ in opt.passes():
            opt.zero_grad()
            model(**batch).loss.backward()
    assert same_run(trainer, model, opt)
    assert trainer.optimizer.optimizer.stats().iterations == trainer.state.global_step == 14


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp16": True}, "use bf16=True"),
        ({"deepspeed": "config.json"}, "does not support DeepSpeed"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "use FSDP 2"),
        ({"_n_gpu": 2}, "one process per GPU"),
        ({"optim": "sgd"}, "optimizer_cls_and_kwargs"),
        ({"optim_args": "nu=3"}, "optimizer_cls_and_kwargs"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "context parallelism"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_work_are_refused_in_one_sentence(tmp_path, change, message):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    for (
        name,
        value,
    ) in change.items():  # TrainingArguments itself refuses some of these without a GPU
        setattr(args, name, value)
    with pytest.raises(ValueError, match=message) as error:
        StepTunedTrainer(language_model(), args, train_dataset=texts())
    assert "\n" not in str(error.value)


def test_another_optimizer_is_refused(tmp_path):
    model = language_model()
    with pytest.raises(TypeError, match="got AdamW"):
        trainer_of(tmp_path, model, optimizers=(torch.optim.AdamW(model.parameters()), None))
    with pytest.raises(TypeError, match="got SGD"):
        trainer_of(tmp_path, model, choice=(torch.optim.SGD, {"lr": 0.1})).train()


# ----------------------------------------------------------------------------------------- the page


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_the_code_of_the_page_runs(tmp_path, monkeypatch, block):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, str(PAGE), "exec"), names)
    opt = names["trainer"].optimizer if "trainer" in names else names["opt"]
    assert opt.optimizer.stats().iterations > 0
