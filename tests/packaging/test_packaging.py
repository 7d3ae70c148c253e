"""The wheel and the sdist that `python -m build` makes.

`make dist` also installs the wheel into an empty environment: see smoke.py.
"""

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in str(path)
    }
    assert {name for name in names if ".dist-info/" not in name} == source
    assert "steptuned/py.typed" in names
    assert sum(info.file_size for info in zipfile.ZipFile(built[0]).infolist()) < 2_000_000


def test_the_sdist_has_the_sources_and_no_tests_data_or_figures(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    beside = {name for name in names if not name.startswith("src/")}
    assert beside <= {
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "pyproject.toml",
        "PKG-INFO",
        ".gitignore",
    }
    assert {"README.md", "LICENSE", "pyproject.toml"} <= beside


def test_the_metadata_are_correct_and_the_readme_renders(built):
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *built],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
        told = email.message_from_bytes(wheel.read(name))
    assert told["Name"] == "steptuned"
    assert told["Requires-Python"] == ">=3.10"
    assert told["License-Expression"] == "MIT"
    assert [need for need in told.get_all("Requires-Dist") if "extra ==" not in need] == [
        "torch>=2.6"
    ]
    assert set(told.get_all("Provides-Extra")) == {
        "lab",
        "dask",
        "lightning",
        "huggingface",
        "docs",
        "dev",
        "all",
        "tensorboard",
    }
