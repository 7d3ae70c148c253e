"""The code in the documents runs exactly as it is shown."""

import doctest
import functools
import importlib.metadata
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn

import steptuned
import steptuned.lab.claims
import steptuned.lab.methods
import steptuned.lab.problems
from steptuned.lab.claims import verdicts
from steptuned.lab.cli import app
from steptuned.lab.discovery import classes_in_package, modules_of
from steptuned.lab.experiment import load
from steptuned.lab.methods.base import Method
from steptuned.lab.problems.base import Problem
from steptuned.lab.report.figures import FIGURES
from steptuned.optim import flat, halves, tuning, wrapped

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {
    "scaling.md": "tests/optim/test_ranks.py",
    "lightning.md": "tests/integrations",
    "fabric.md": "tests/integrations",
    "huggingface.md": "tests/integrations",
    "skorch.md": "tests/integrations",
}
"""Pages whose Python needs ranks or frameworks, and what runs it."""


def blocks(path, language):
    """The blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


README = ROOT / "README.md"
TRAINING = ROOT / "docs" / "recipes" / "training.md"
VARIANTS = ROOT / "docs" / "variants.md"
TRAINS = [(path, block) for path in (README, TRAINING) for block in blocks(path, "python")]


def namespace():
    """The names that the code of the README expects."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    batches = list(zip(x.split(8), y.split(8), strict=True))
    return {
        "torch": torch,
        "StepTunedSGD": steptuned.StepTunedSGD,
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "loader": batches,
        "large_batches": [batches[:2], batches[2:4]],
        "device": "cpu",
        "opt": steptuned.StepTunedSGD(model.parameters(), lr=0.1),
    }


@pytest.fixture(scope="module", autouse=True)
def process_group():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_compiled_functions_left(monkeypatch):
    """A recipe replaces these functions by compiled ones, which no other test should see."""
    for name in ("first_pass", "second_pass"):
        monkeypatch.setattr(flat, name, getattr(flat, name))


@pytest.mark.parametrize(
    ("page", "block"),
    TRAINS,
    ids=[f"{page.name}: {block.splitlines()[0]}" for page, block in TRAINS],
)
def test_the_loops_run_and_move_the_parameters(page, block, monkeypatch):
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )  # needs no C++ compiler
    names = namespace()
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(compile(block, str(page), "exec"), names)
    trains = "for " in block
    moved = any(
        not torch.equal(a, b) for a, b in zip(before, names["model"].parameters(), strict=True)
    )
    assert moved == trains
    assert names["opt"].stats().iterations == (
        len(names["large_batches"] if "large" in block else names["loader"]) if trains else 0
    )


def test_the_readme_shows_the_three_forms_and_they_agree_to_the_bit():
    ends = []
    for block in blocks(README, "python"):
        if "for " not in block:
            continue
        names = namespace()
        torch.manual_seed(1)
        exec(compile(block, "README.md", "exec"), names)
        ends.append(torch.cat([p.detach().reshape(-1) for p in names["model"].parameters()]))
    assert len(ends) == 3
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_the_readme_shows_how_to_check_a_program(capsys):
    (block,) = (block for block in blocks(README, "python") if "steptuned.check" in block)
    exec(compile(block, "README.md", "exec"), namespace())
    assert capsys.readouterr().out == "both passes are the same function\n"


BY_HAND = [(page, block) for page, block in TRAINS if "noise" in block]


def masks_of(block):
    """The dropout masks of a recipe, pass after pass."""
    names = namespace()
    dropout = nn.Dropout(0.5)
    names["model"] = nn.Sequential(dropout, nn.Linear(4, 3))
    names["opt"] = steptuned.StepTunedSGD(names["model"].parameters(), lr=0.1)
    masks = []
    dropout.register_forward_hook(
        lambda module, args, out: masks.append(out == 0)
    )  # the inputs have no zeros
    exec(compile(block, "recipe", "exec"), names)
    return masks


@pytest.mark.parametrize(
    ("page", "block"), BY_HAND, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(BY_HAND)]
)
def test_recipes_by_hand_draw_the_same_dropout_masks_in_both_passes(page, block):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks = masks_of(block)
    assert len(masks) == 10
    assert all(map(torch.equal, masks[::2], masks[1::2]))
    assert not any(map(torch.equal, masks[1::2], masks[2::2])), "each mini-batch has its own masks"

    without = "\n".join(line for line in block.splitlines() if "noise" not in line)
    with pytest.warns(UserWarning, match="drew different random numbers"):
        masks = masks_of(without)
    assert not any(map(torch.equal, masks[::2], masks[1::2]))


def test_the_fp16_recipe_is_one_of_those_by_hand():
    assert sum("GradScaler" in block for _, block in BY_HAND) == 1


@pytest.mark.parametrize(
    "block",
    [block for block in blocks(TRAINING, "python") if "micro_batches" in block],
    ids=["passes", "closure"],
)
def test_accumulation_equals_the_large_batch(block):
    names = namespace()
    names["model"].double().eval()
    names["large_batches"] = [
        [(x.double(), y) for x, y in batches] for batches in names["large_batches"]
    ]
    exec(compile(block, str(TRAINING), "exec"), names)
    other = namespace()
    other["model"].double().eval()
    for batches in names["large_batches"]:
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        for _ in other["opt"].passes():
            other["opt"].zero_grad()
            other["criterion"](other["model"](x), y).backward()
    for a, b in zip(names["model"].parameters(), other["model"].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(names["opt"].gamma, other["opt"].gamma, rtol=1e-9, atol=0)


MODULES = [m.name for m in pkgutil.walk_packages(steptuned.__path__, "steptuned.")]


@pytest.mark.parametrize("module", MODULES)
def test_the_docstring_examples_are_correct(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_the_quick_start_example_learns(capsys):
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", capsys.readouterr().out)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_digits_example_compares_and_draws(tmp_path, monkeypatch, capsys):
    path = str(ROOT / "examples" / "digits.py")
    monkeypatch.setattr(sys, "argv", [path, "--epochs", "1", "--out", str(tmp_path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    runpy.run_path(path, run_name="__main__")
    assert "Step-Tuned SGD" in capsys.readouterr().out
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_importing_the_package_needs_torch_only_and_is_light():
    """The import adds no module that torch itself does not import."""
    code = """
import sys, torch
before = {name.split(".")[0] for name in sys.modules}
import steptuned
added = {name.split(".")[0] for name in sys.modules} - before - {"steptuned"}
print(sorted(added - set(sys.stdlib_module_names)))
print("torch._dynamo" in sys.modules, "torch.distributed.checkpoint" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.splitlines() == ["[]", "False False"]


def test_all_public_names_exist():
    assert all(hasattr(steptuned, name) for name in steptuned.__all__)
    assert steptuned.__version__ == importlib.metadata.version("steptuned")
    assert (Path(steptuned.__file__).parent / "py.typed").exists()


def other_pages():
    done = {README, TRAINING, VARIANTS}
    return [
        path
        for path in PAGES
        if path not in done and path.name not in ELSEWHERE and "extending" not in path.parts
    ]


@pytest.mark.parametrize("page", other_pages(), ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, capsys):
    names = namespace()
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*The `srun` command is available",
    "ignore:.*LeafSpec",
    "ignore:.*The number of training batches .* is smaller than the logging interval",
    "ignore:.*'pin_memory' argument is set as true but no accelerator is found",
    "ignore:It is recommended to use .*sync_dist=True",  # the group of one rank above
)
def test_the_variants_train_in_every_framework(tmp_path, monkeypatch):
    """From top to bottom. The frameworks write into the current folder."""
    monkeypatch.chdir(tmp_path)
    names, finished = namespace(), []
    count = tuning.finish

    def finish(opt, *rest):
        finished.append(type(opt).__name__)
        count(opt, *rest)

    for module in (halves, wrapped):
        monkeypatch.setattr(module, "finish", finish)
    text = VARIANTS.read_text()
    frameworks = text[text.index("## In frameworks") : text.index("## Older checkpoints")]
    measured = {}
    for block in blocks(VARIANTS, "python"):
        finished.clear()
        exec(compile(block, str(VARIANTS), "exec"), names)
        if block in frameworks:
            title = frameworks[: frameworks.index(block)].rsplit("\n### ", 1)[-1].splitlines()[0]
            measured[title] = {*finished}
    assert measured.pop("## In frameworks") == set()
    assert measured.pop("Hugging Face") == {"StepTunedSGD", "StepTuned"}
    assert len(measured) == 6
    assert all(found == {"StepTuned"} for found in measured.values()), measured


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_left_to_be_filled_in(page):
    assert not re.search(r"^[A-Z]{3,}$", page.read_text(), re.MULTILINE)


def test_pages_tested_elsewhere_are_named_there():
    for name, where in ELSEWHERE.items():
        tests = [ROOT / where] if where.endswith(".py") else list((ROOT / where).glob("test_*.py"))
        assert any(name in test.read_text() for test in tests), f"{where} does not run {name}"


@pytest.mark.parametrize(
    "page", [path for path in PAGES if "extending" in path.parts], ids=lambda page: page.stem
)
def test_the_worked_example_of_an_extension_runs(page, tmp_path):
    """As a reader would do it: write the files of the page, then run its commands."""
    for text in (*blocks(page, "python"), *blocks(page, "toml")):
        (tmp_path / re.match(r"# (\S+)\n", text)[1]).write_text(text)
    (commands,) = blocks(page, "sh")
    for command in commands.splitlines():
        jobs = ["--jobs", "1"] if " run " in command else []
        done = subprocess.run(
            [sys.executable, "-m", *command.split(), *jobs],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (picture,) = (tmp_path / "results" / "figures").glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = blocks(page, "console")
    assert len(shown) == (page.stem == "claim"), "the page on claims shows a verdict"
    for text in shown:
        assert " ".join(text.split()) in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("page", "package", "base", "name"),
    [
        ("method", steptuned.lab.methods, Method, "nadam"),
        ("problem", steptuned.lab.problems, Problem, "moons"),
    ],
    ids=["method", "problem"],
)
def test_an_extension_file_needs_no_change_in_the_package(
    page, package, base, name, tmp_path, monkeypatch
):
    (text,) = blocks(ROOT / "docs" / "extending" / f"{page}.md", "python")
    (tmp_path / f"{name}.py").write_text(text)
    before = classes_in_package(package.__name__, base)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    found = classes_in_package(package.__name__, base)
    del sys.modules[f"{package.__name__}.{name}"]
    assert found.keys() - before.keys() == {name}


def test_a_file_with_a_claim_needs_no_change_in_the_package(tmp_path, monkeypatch):
    (text,) = blocks(ROOT / "docs" / "extending" / "claim.md", "python")
    (tmp_path / "of_the_page.py").write_text(text)
    package, before = steptuned.lab.claims, verdicts.CLAIMS.keys()
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(verdicts, "CLAIMS", found := {})
    for module in modules_of(package.__name__):
        verdicts.add_claims(module)
    del sys.modules[f"{package.__name__}.of_the_page"]
    assert found.keys() - before == {verdicts.OWN}


COMMANDS = [
    (path, line.split("#")[0].strip())
    for path in PAGES
    for block in blocks(path, "sh")
    for line in block.splitlines()
    if re.search(r"(^|-m )steptuned ", line)
]


@pytest.mark.parametrize(
    ("page", "line"), COMMANDS, ids=[f"{page.name}: {line}" for page, line in COMMANDS]
)
def test_the_commands_in_the_documents_are_valid(page, line):
    """Parsed by the command itself, which knows its options and their values; nothing is run."""
    words = shlex.split(line)
    group = typer.main.get_command(app)
    with group.make_context("steptuned", words[words.index("steptuned") + 1 :]) as context:
        name, command, rest = group.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        while hasattr(command, "commands"):
            name, command, rest = rest[0], command.commands[rest[0]], rest[1:]
        command.make_context(name, rest, parent=context)


def test_the_make_targets_named_in_the_documents_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    quoted = [
        word
        for page in PAGES
        for word in re.findall(r"`[^`\n]+`|^make .*", page.read_text(), re.MULTILINE)
    ]
    named = {target for word in quoted for target in re.findall(r"\bmake (\w+)", word)}
    assert named
    assert named <= targets


TOML = [
    (path, text) for path in PAGES for text in blocks(path, "toml") if "extending" not in path.parts
]


@pytest.mark.parametrize(("page", "text"), TOML, ids=[page.name for page, _ in TOML])
def test_the_experiments_of_the_documents_are_valid(page, text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    experiment = load(path, "paper")
    assert len(experiment.entries) == 2
    assert experiment.figure in FIGURES


def test_the_site_builds_strictly_and_its_formulas_need_no_script(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "how-it-works" / "index.html").read_text()
    assert page.count("<math") > 10
    for path in tmp_path.rglob("*.html"):
        assert "arithmatex" not in path.read_text(), f"a formula of {path.name} was not converted"
        assert not re.search(r"<(script|link)[^>]*https?://(?!127)", path.read_text()), (
            f"{path.name} asks another site"
        )
    assert "StepTunedSGD" in (tmp_path / "reference" / "index.html").read_text()
