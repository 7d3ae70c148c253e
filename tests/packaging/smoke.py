"""Install a wheel into an empty environment with torch alone, and train with it.

`make dist` runs this. The training happens outside of the checkout.

python tests/packaging/smoke.py dist
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch
from steptuned import StepTunedSGD
import steptuned

theta = torch.tensor([3.0, -2.0], requires_grad=True)
opt = StepTunedSGD([theta], lr=0.4)
for _ in range(200):
    for _ in opt.passes():
        opt.zero_grad()
        (theta**2).sum().backward()
assert theta.abs().max() < 1e-3, theta
print("steptuned", steptuned.__version__, "from", steptuned.__file__)
"""


def smoke(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"

        def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                [str(python), *arguments], cwd=folder, text=True, capture_output=True, check=False
            )

        def must(*arguments: str) -> str:
            done = run(*arguments)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        must("-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel))
        said = must("-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", PROGRAM)
        assert str(ROOT) not in said, said
        print(said, end="")
        installed = {
            line.split("==")[0].lower() for line in must("-m", "pip", "freeze").splitlines()
        }
        assert not installed & {"numpy", "typer", "matplotlib", "lightning", "transformers"}, (
            installed
        )
        asked = run("-m", "steptuned", "list")
        assert asked.returncode == 1, asked.stdout
        assert "pip install 'steptuned[lab]'" in asked.stderr, asked.stderr
        print("the command says what it needs:", asked.stderr.strip())


if __name__ == "__main__":
    (found,) = Path(sys.argv[1]).resolve().glob("*.whl")
    smoke(found)
