"""The command, as a user types it.

It is started as a process where it runs experiments, and called here where it only prints.
"""

import csv
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import typer
from typer.testing import CliRunner

from specs import on_real_data
from steptuned.lab import terminal
from steptuned.lab.cli import app
from steptuned.lab.store import Store

REAL = os.environ.get("STEPTUNED_DATA")

EXPERIMENT = """
title = "a small comparison"
figure = "loss"
problem = "regression"
seeds = 2
budget = { epochs = 6 }
log_every = 10
[methods.sgd]
decay = "iteration"
lr = 10.0
[methods.step-tuned-sgd]
decay = "iteration"
lr = [1.0, 10.0]
"""


def steptuned(*arguments, **environment):
    command = [sys.executable, "-m", "steptuned", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def inside(*arguments):
    done = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "mine.toml").write_text(EXPERIMENT)
    done = steptuned("run", folder / "mine.toml", "--jobs", "2", "--out", folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out", done.stdout


def test_run_announces_executes_and_summarises_an_experiment(results):
    out, said = results
    assert "at most 6 runs, about" in said
    assert "Step-Tuned SGD (lr" in said
    assert "2/2" in said
    for suffix in (".png", ".svg"):
        assert (out / "figures" / f"mine{suffix}").stat().st_size > 1000
    assert (out / "figures" / "mine.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(out / "figures" / "mine.svg")


def test_show_lists_the_runs_and_highlights_incomplete_seed_sets(results):
    out, _ = results
    said = inside("show", out).stdout
    assert "step-tuned-sgd" in said
    assert "2/2 seeds" in said
    assert "incomplete" not in said
    run = next(run for run in Store(out).runs() if run.spec.seed == 1)
    kept = run.log_path.read_bytes()
    run.log_path.write_bytes(kept[:-10])
    said = inside("show", out).stdout
    assert "1/2, incomplete" in said
    assert "unfinished" in said
    run.log_path.write_bytes(kept)


def test_export_writes_every_record(results, tmp_path):
    out, _ = results
    expected = sum(len(run.records()) for run in Store(out).runs())
    done = inside("export", out, "--csv", tmp_path / "a.csv", "--parquet", tmp_path / "a.parquet")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert len(rows) == table.num_rows == expected
    assert {"run", "method", "seed", "bp", "loss", "gamma"} <= set(table.column_names)
    assert float(rows[-1]["loss"]) == table.column("loss")[-1].as_py()


def test_list_names_problems_methods_and_experiments():
    said = inside("list").stdout
    for name in (
        "regression",
        "digits",
        "step-tuned-sgd",
        "armijo",
        "figure-1",
        "figure-3",
        "rate",
        "images",
        "figure-4",
        "ResNet-20",
        "table-2",
    ):
        assert name in said


def test_figure_1_needs_no_run(tmp_path):
    done = inside("reproduce", "figure-1", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures" / "figure-1.png").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reproduce", "figure-99"], "there is no experiment 'figure-99'; valid: all, figure-1"),
        (["run", "nothing.toml"], "nothing.toml: cannot be read: No such file or directory"),
        (["show", "nowhere"], "there is no folder nowhere"),
        (["results", "nowhere", "--to", "page.md"], "there is no folder nowhere"),
        (["reproduce", "figure-4z"], "or a panel such as activations-relu"),
        (
            ["data", "get", "imagenet"],
            "there is no data set 'imagenet'; valid: all, cifar-10, cifar-100, mnist",
        ),
        (["export", "."], "nothing to write: give --csv FILE or --parquet FILE"),
        (["reproduce", "figure-1", "--device", "warp"], "device 'warp' cannot be used here"),
    ],
)
def test_a_mistake_gives_one_sentence_and_a_nonzero_exit_code(arguments, sentence, tmp_path):
    done = inside(*arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    done = inside("reproduce", "figure-1", "--out", tmp_path / "file" / "out")
    assert done.returncode == 1
    assert "choose another folder with --out" in done.stderr


@pytest.mark.parametrize("name", ["figure-6", "figure-4d", "table-2"])
def test_an_image_experiment_without_data_says_how_to_download_them_and_runs_nothing(
    name, tmp_path, monkeypatch
):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("STEPTUNED_DATA", "elsewhere")
    done = inside(
        "reproduce",
        name,
        "--scale",
        "demo",
        "--out",
        tmp_path / "out",
        "--data",
        tmp_path / "empty",
    )
    assert done.returncode == 1
    assert "steptuned data get" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "runs").exists()


def test_data_status_lists_the_data_sets(tmp_path):
    done = inside("data", "status", "--data", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("cifar-10", "cifar-100", "mnist", str(tmp_path)):
        assert name in done.stdout


IMAGES = """
figure = "loss, accuracy and gamma"
seeds = 1
log_every = { epochs = 1 }
budget = { epochs = 2 }
selection = { after = { epochs = 1 } }
options = { rows = 256, test_rows = 100 }
[panels.e]
setting = "e"
[panels.d]
setting = "d"
[methods.sgd]
lr = 0.1
[methods.step-tuned-sgd]
lr = [0.01, 0.1]
"""


@on_real_data
def test_an_experiment_on_real_images_from_command_to_report(tmp_path):
    (tmp_path / "mine.toml").write_text(IMAGES)
    out = tmp_path / "out"
    command = ("run", tmp_path / "mine.toml", "--out", out, "--data", REAL, "--jobs", 1)
    done = steptuned(*command, STEPTUNED_DATA=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "minee (paper): CIFAR-10, LeNet without BatchNorm" in done.stdout
    assert "test loss" in done.stdout
    assert (out / "figures" / "mine.png").exists()
    for run in Store(out).runs():
        last = run.result()["last"]
        assert last["bp"] in (2, 4)
        assert last["samples"] <= 512
        assert ("accuracy" in last) == (run.spec.problem == "images")
        assert ("gamma" in last) == (run.spec.method == "step-tuned-sgd")
    (tmp_path / "mine.toml").write_text(IMAGES.replace('[panels.d]\nsetting = "d"\n', ""))
    changed = steptuned(*command, "--bf16")
    assert changed.returncode == 0, changed.stdout + changed.stderr
    assert {run.spec.options["precision"] for run in Store(out).runs()} == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["reproduce"],
        ["run"],
        ["show"],
        ["export"],
        ["list"],
        ["results"],
        ["data"],
        ["data", "get"],
    ],
)
def test_every_command_has_help(command):
    done = inside(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_run_and_reproduce_have_the_same_options():
    commands = typer.main.get_command(app).commands
    own = {"names", "files", "scale"}
    shared = [
        {p.name: (p.opts, p.default, p.help) for p in commands[name].params if p.name not in own}
        for name in ("run", "reproduce")
    ]
    assert shared[0] == shared[1]
    assert {"jobs", "dask", "device", "out", "data", "autocast", "tensorboard"} <= shared[0].keys()


def test_a_long_table_has_the_same_cells_as_a_short_one(monkeypatch):
    columns = {"method": "left", "bp": "right"}
    rows = [["[red]sgd[/]", "5"], ["adam", "123"]]
    printed = []
    for longest in (10, 1):
        monkeypatch.setattr(terminal, "LONG", longest)
        with terminal.console.capture() as capture:
            terminal.print_rows(columns, rows)
        printed.append([line.rstrip() for line in capture.get().splitlines()])
    assert printed[0] == printed[1] == ["method   bp", "sgd       5", "adam    123"]


def test_plan_counts_runs_time_arithmetic_and_disk_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = inside("plan", "figure-1", "figure-2", "digits", "--scale", "demo")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert rows["figure-2"][1:3] == ["44", "20,000"]
    assert float(rows["figure-2"][-2]) == 0, "a regression by hand has no layers"
    assert float(rows["digits"][-2]) > 0
    assert int(rows["all"][1]) == int(rows["figure-2"][1]) + int(rows["digits"][1])
    assert not list(tmp_path.iterdir())
    assert "there is no experiment 'figure-9'" in inside("plan", "figure-9").stderr


def test_the_command_says_how_to_install_missing_packages():
    code = "import sys; sys.modules['typer'] = None; from steptuned.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr == "steptuned: the laboratory needs more packages (typer is missing): "
        "pip install 'steptuned[lab]'\n"
    )
