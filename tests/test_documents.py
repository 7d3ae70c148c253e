"""What the documents show runs, as it stands there."""

import doctest
import importlib.metadata
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import steptuned
from steptuned.lab.experiment import load
from steptuned.lab.report.figures import FIGURES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def namespace():
    """What a reader of the README has before the first line."""
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


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_the_code_of_the_readme_runs_and_moves_the_parameters(block):
    names = namespace()
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(compile(block, "README.md", "exec"), names)
    trains = "for " in block
    moved = any(not torch.equal(a, b) for a, b in zip(before, names["model"].parameters(), strict=True))
    assert moved == trains
    assert names["opt"].stats().iterations == (
        len(names["large_batches"] if "large" in block else names["loader"]) if trains else 0
    )


def test_the_readme_shows_the_three_forms_and_they_agree_to_the_bit():
    assert len(BLOCKS) >= 3
    ends = []
    for block in BLOCKS[:3]:
        names = namespace()
        torch.manual_seed(1)
        exec(compile(block, "README.md", "exec"), names)
        ends.append(torch.cat([p.detach().reshape(-1) for p in names["model"].parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_accumulation_as_the_readme_has_it_equals_the_large_batch():
    block = next(block for block in BLOCKS if "micro_batches" in block)
    names = namespace()
    names["model"].double().eval()
    names["large_batches"] = [[(x.double(), y) for x, y in batches] for batches in names["large_batches"]]
    exec(compile(block, "README.md", "exec"), names)
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
def test_the_examples_of_the_docstrings_are_right(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_the_quick_start_example_learns(capsys):
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", capsys.readouterr().out)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_digits_example_compares_and_draws(tmp_path):
    command = [sys.executable, ROOT / "examples" / "digits.py", "--epochs", "3", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "Step-Tuned SGD" in done.stdout
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_importing_the_package_needs_torch_only_and_is_light():
    """Everything else that is installed is hidden; nothing is imported that torch itself does not import."""
    code = """
import sys, torch
before = {name.split(".")[0] for name in sys.modules}
import steptuned
print(sorted({name.split(".")[0] for name in sys.modules} - before - {"steptuned"} - set(sys.stdlib_module_names)))
print("torch._dynamo" in sys.modules, "torch.distributed.checkpoint" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.splitlines() == ["[]", "False False"]


def test_the_public_names_are_all_there():
    assert all(hasattr(steptuned, name) for name in steptuned.__all__)
    assert steptuned.__version__ == importlib.metadata.version("steptuned")
    assert (Path(steptuned.__file__).parent / "py.typed").exists()


def test_the_experiment_of_the_readme_is_valid(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    experiment = load(path, "paper")
    assert len(experiment.entries) == 2
    assert experiment.figure in FIGURES
