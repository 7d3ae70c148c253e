"""Claims that are not in the package's criteria: from a file given as --with."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from made_up import ENVIRONMENT, OnePointGrids, fill, records_of
from steptuned.lab import paired_runs
from steptuned.lab.claims import verdicts
from steptuned.lab.claims.criteria import CRITERIA, criteria_hash
from steptuned.lab.claims.judging import problem_letter
from steptuned.lab.cli import app
from steptuned.lab.extensions import ExtensionError, extend
from steptuned.lab.store import Store, write_json

JUDGE = """
@judges(Criterion({number}, "Ours: {text}.", "Its final J is below Adam's.", {{"factor": 2.0}}))
def judge_{name}(runs, limits, measure):
    assert limits == {{"factor": 2.0}}
    pairs = runs.pairs(("sgd", "adam"), "figure-4d")
    return all_hold([final_below(runs, "figure-4d", "sgd", "adam", pairs, measure)])
"""
IMPORTS = """
from steptuned.lab.claims.criteria import Criterion
from steptuned.lab.claims.judging import all_hold, final_below, judges
"""
NOT_COVERED = r"fixed before the runs \(56837eeee9e5, which does not cover [\d, ]*101\)"


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """The table of claims, of which other tests see a copy without those that are added here."""
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids())
    monkeypatch.setattr(verdicts, "CLAIMS", copy := dict(verdicts.CLAIMS))
    return copy


@pytest.fixture
def file(tmp_path):
    """Write a file with claims of these numbers."""

    def write(*numbers, start=""):
        path = tmp_path / "mine.py"
        judges = [
            JUDGE.format(number=number, text=f"claim {number}", name=f"{i}")
            for i, number in enumerate(numbers)
        ]
        path.write_text(start + IMPORTS + "".join(judges))
        return path

    return write


def store(folder, sgd):
    """Runs in which the final loss of Adam is 0.2, and that of SGD is given."""

    def records(spec):
        end = sgd if spec.method == "sgd" else 0.2
        return records_of(spec, lambda share: 1 - (1 - end) * share, accuracy=lambda share: share)

    fill(folder, "figure-4d", records, "small")
    return folder


@pytest.mark.parametrize(("sgd", "verdict"), [(0.1, "reproduced"), (0.4, "not reproduced")])
def test_a_claim_of_ones_own_is_judged_with_the_others(tmp_path, file, added, sgd, verdict):
    before = set(added)
    extend([file(102, 101)])
    assert added.keys() - before == {101, 102}
    judged = verdicts.judge(store(tmp_path / "out", sgd))
    assert [claim.number for claim, _ in judged] == [*sorted(before), 101, 102]
    claim, judgement = judged[-2]
    assert (claim.text, judgement.verdict, judgement.n) == ("Ours: claim 101.", verdict, 5)
    assert [one.what for one in judgement.comparisons] == ["(d) SGD / Adam"]


def test_a_claim_of_ones_own_does_not_change_the_hash(tmp_path, file):
    hashed = criteria_hash()
    extend([file(101)])
    assert criteria_hash() == hashed == "56837eeee9e5"
    data = verdicts.as_data(verdicts.judge(store(tmp_path / "out", 0.1)))
    covered = {one["number"] for one in data if one["criteria"] == hashed}
    assert covered == {criterion.number for criterion in CRITERIA}
    assert data[-1]["criteria"] is None


def test_runs_made_under_other_criteria_are_marked_for_ones_own_claim_too(tmp_path, file, added):
    extend([file(101)])
    folder = store(tmp_path / "out", 0.1)
    for run in Store(folder).runs():
        if run.spec.method == "adam":
            write_json(run.folder / "environment.json", {**ENVIRONMENT, "criteria": "another"})
    ((_, judgement),) = verdicts.judge(folder, [added[101]])
    assert judgement.other_criteria == 5


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((102, 7), r"there is a claim 7 already \('Step-Tuned SGD has .*'\); .* such as 103"),
        ((101, 101), r"there is a claim 101 already \('Ours: claim 101\.'\); .* such as 102"),
        ((7,), r"there is a claim 7 already .*; choose another number, such as 101$"),
    ],
)
def test_a_number_that_is_taken_is_an_error_and_nothing_is_added(file, added, numbers, said):
    before, modules = dict(added), set(sys.modules)
    path = file(*numbers)
    with pytest.raises(ExtensionError, match=f"^--with {path}: {said}"):
        extend([path])
    assert added == before
    assert set(sys.modules) == modules
    extend([file(101)])
    assert added.keys() - before.keys() == {101}, "the file can be corrected and loaded again"


def test_a_claim_that_a_file_imports_is_not_added_again(file, added):
    before = set(added)
    extend([file(101, start="from steptuned.lab.claims.networks import lowest\n")])
    assert added.keys() - before == {101}


def test_the_commands_show_a_claim_of_ones_own(tmp_path, file):
    folder = str(store(tmp_path / "out", 0.1))
    path, written = str(file(101)), [str(tmp_path / name) for name in ("c.json", "c.md")]
    command = ["claims", folder, "--json", written[0], "--markdown", written[1]]
    done = CliRunner().invoke(app, ["--with", path, *command])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    block = lines.index("  ✔ 101. reproduced, 5 seeds, scale small")
    assert lines[block + 1].strip() == "Ours: claim 101."
    last = json.loads((tmp_path / "c.json").read_text())[-1]
    assert (last["number"], last["verdict"]) == (101, "reproduced")
    assert last["thresholds"] == {"factor": 2.0}
    text = (tmp_path / "c.md").read_text()
    assert "| 101 | reproduced | Ours: claim 101. |  | 5 seeds |" in text
    assert re.search(NOT_COVERED, text)

    report = ["report", folder, "--to", str(tmp_path / "report")]
    done = CliRunner().invoke(app, ["--with", path, *report])
    assert done.exit_code == 0, done.output
    page = " ".join((tmp_path / "report" / "index.html").read_text().split())
    assert "Ours: claim 101." in page
    assert re.search(NOT_COVERED, page)


def test_the_command_says_in_one_sentence_that_a_number_is_taken(tmp_path, file):
    done = CliRunner().invoke(app, ["--with", str(file(1)), "claims", str(tmp_path)])
    assert done.exit_code == 1
    assert "there is a claim 1 already" in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("name", "letter"),
    [
        ("figure-4a", "(a)"),
        ("controls-f", "(f)"),
        ("beyond-a", "(a)"),
        ("text", "text"),
        ("controls-mine", ""),
        ("figure-3", ""),
    ],
)
def test_problems_of_table_1_have_a_letter_and_the_text_its_name(name, letter):
    assert problem_letter(name) == letter
