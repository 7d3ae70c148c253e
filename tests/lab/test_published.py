"""The published pages match the raw logs in evidence/, so they cannot become stale."""

import json
import re
import subprocess
from pathlib import Path

import pandas
import pyarrow.parquet
import pytest
from matplotlib.figure import Figure

from steptuned.lab.evidence import opened
from steptuned.lab.report import provenance, results

ROOT = Path(__file__).parents[2]
EVIDENCE, DOCS, README = ROOT / "evidence", ROOT / "docs", ROOT / "README.md"
RENEW = "run `make results` and commit what it changes"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page, the README and the verdicts, computed from the evidence."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "README.md").write_text(README.read_text())
    command = "steptuned results evidence --to docs/results.md"
    page, verdicts = folder / "docs" / "results.md", folder / results.PUBLISHED
    with opened(EVIDENCE) as store, pytest.MonkeyPatch.context() as patch:
        # The tests compare the numbers of the figures. The pictures only take time.
        patch.setattr(Figure, "savefig", lambda self, path, **options: Path(path).touch())
        results.write(store, page, command, folder / "README.md", verdicts)
    return folder


def test_the_results_page_matches_the_evidence(made):
    assert (made / "docs" / "results.md").read_text() == (DOCS / "results.md").read_text(), RENEW


def test_every_figure_is_described_in_words(made):
    """Each picture of an experiment is followed by two to five sentences for each panel."""
    text = (made / "docs" / "results.md").read_text()
    sections = [section for section in text.split("\n### ")[1:] if "![" in section]
    assert len(sections) > 5
    for section in sections:
        told = [
            line
            for line in section.split("![")[1].split("\n\n")[1:]
            if not line.startswith(
                ("|", "From best to worst", "#", "Not an experiment of the paper")
            )
            and not re.fullmatch(r"\*\*.*\*\*\n\n?\|.*|\*\*[^*]*\*\*", line, re.DOTALL)
        ]
        name = section.split(",")[0]
        assert told, f"{name} has no sentence"
        assert 2 <= len(re.findall(r"\.(?: |$)", told[0].removeprefix("**"))) <= 5, told[0]


def test_commits_of_the_evidence_are_in_the_history_or_said_not_to_be():
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a clone with its whole history")
    manifest = json.loads((EVIDENCE / "MANIFEST.json").read_text())["files"]
    commits = {commit for entry in manifest.values() for commit in entry.get("commits", [])}
    timings = json.loads((EVIDENCE / "table-2.json").read_text()).values()
    commits |= {timing["environment"]["commit"] for timing in timings}
    missing = {c for c in commits if git("merge-base", "--is-ancestor", c, "HEAD").returncode}
    assert missing <= set(provenance.REWRITTEN)


def test_the_table_in_the_readme_matches_the_evidence(made):
    assert (made / "README.md").read_text() == README.read_text(), RENEW


README_TEXT = " ".join(README.read_text().split())


def rows_of(name):
    """The section of an experiment, and the cells of its table by method, without the choices."""
    section = (DOCS / "results.md").read_text().split(f"**{name} (short): ")[1].split("\n\n")[1]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines()]
    return {cells[0].split(" (")[0]: [cell.strip() for cell in cells] for cells in lines}


def mean(cell):
    """The mean in a cell such as "0.15 (0.14 to 0.16)"."""
    return float(cell.split()[0].rstrip("%"))


def sentences_of(name):
    return (DOCS / "results.md").read_text().split(f"### {name}, scale short")[1]


def test_the_readme_says_of_the_autoencoder_what_the_results_say():
    section, rows = sentences_of("figure-4d"), rows_of("figure-4d")
    upper = re.search(r"at the upper bound in (\d+)%", section)[1]
    ratio = float(re.search(r"\(median ratio ([\d.]+) ", section)[1])
    tuned, adam, rmsprop = (mean(rows[m][6]) for m in ("Step-Tuned SGD", "Adam", "RMSprop"))
    assert f"gamma was at its upper bound in {upper} % of the iterations" in README_TEXT
    assert f"ended {100 * (1 - ratio):.1f} % below SGD's: at {tuned:.2g}, " in README_TEXT
    assert f"with {adam:.2g} for Adam and {rmsprop:.2g} for RMSprop" in README_TEXT


def test_the_readme_says_of_lenet_what_the_results_say():
    rows = rows_of("controls-f")
    sgd, tuned = mean(rows["SGD"][6]), mean(rows["Step-Tuned SGD"][6])
    one, two = (mean(rows[f"Step-Tuned SGD, gamma = {gamma}"][6]) for gamma in (1, 2))
    assert f"training loss ({sgd:.3f}) than Step-Tuned SGD ({tuned:.3f})" in README_TEXT
    assert f"gammas of 1 ({one:.3f}) and 2 ({two:.3f}) did as well or better" in README_TEXT


def test_the_readme_says_of_resnet_20_what_the_results_say():
    section, rows = sentences_of("figure-4a"), rows_of("figure-4a")
    methods = ("SGD", "Step-Tuned SGD", "Adam", "RMSprop")
    sgd, tuned, adam, rmsprop = ([mean(rows[m][i]) for i in (4, 6, 8)] for m in methods)
    lower = re.search(r"at the lower bound in (\d+)%", section)[1]
    assert f"gamma was at its lower bound in {lower} % of the iterations" in README_TEXT
    assert f"ended at {tuned[1]:.2g}, far above SGD's {sgd[1]:.2g} but below" in README_TEXT
    assert f"below Adam's {adam[1]:.2g} and RMSprop's {rmsprop[1]:.2g}" in README_TEXT
    assert "winner at the edge of the grid: lr" in rows["SGD"][1]
    assert "winner at the edge of the grid: nu" in rows["Step-Tuned SGD"][1]
    assert f"{tuned[2]:.0f} % instead of SGD's {sgd[2]:.0f} %" in README_TEXT
    assert tuned[2] < min(sgd[2], adam[2], rmsprop[2])
    assert tuned[0] / sgd[0] == pytest.approx(1, abs=0.05)


def test_the_packaged_verdicts_match_the_evidence(made):
    assert json.loads((made / results.PUBLISHED).read_text()) == results.published(), RENEW


def test_the_figures_show_the_numbers_of_the_evidence(made):
    drawn = sorted((made / "docs" / "figures").glob("*.json"))
    assert drawn
    for path in drawn:
        kept = DOCS / "figures" / path.name
        assert kept.exists(), RENEW
        assert kept.with_suffix(".png").exists(), RENEW
        for new, old in zip(
            json.loads(path.read_text()), json.loads(kept.read_text()), strict=True
        ):
            assert new["axis"] == old["axis"], RENEW
            for drawn_as in ("lines", "areas"):
                for shape, before in zip(new[drawn_as], old[drawn_as], strict=True):
                    assert shape.get("label") == before.get("label"), RENEW
                    for key in ("x", "y"):
                        assert shape[key] == pytest.approx(before[key], rel=1e-3), RENEW


def test_every_published_figure_is_still_drawn_or_linked(made):
    """Only figure-1 and figures of pages that are written by hand have no numbers here."""
    made_now = {path.name for path in (made / "docs" / "figures").iterdir()}
    pages = [path.read_text() for path in DOCS.rglob("*.md") if path.name != "results.md"]
    for path in (DOCS / "figures").iterdir():
        linked = any(f"figures/{path.name})" in page for page in pages)
        assert path.name in made_now or linked, f"{path.name} is no longer drawn: delete it"


def test_every_column_of_the_evidence_is_documented():
    text = (DOCS / "reproducing.md").read_text().split("## The raw logs")[1]
    told = {name for row in re.findall(r"^\|(.*?)\|", text, re.MULTILINE) for name in names(row)}
    columns = {
        column
        for path in EVIDENCE.glob("*.parquet")
        for column in pyarrow.parquet.read_schema(path).names
    }
    assert columns == told


def names(row):
    """The columns in the first cell of a row."""
    found = re.findall(r"`([^`]+)`", row)
    if "the same of" in row:
        *quartiles, other = found
        return [*quartiles, *(name.replace("gamma", other) for name in quartiles)]
    return found


def test_the_page_of_variants_says_of_text_what_the_logs_say():
    """Its explanation of why Step-Tuned SGD fails there is about trials with lr = 0.3."""
    records = pandas.read_parquet(EVIDENCE / "text-short.parquet")
    hyper = pandas.DataFrame(records["hyper"].map(json.loads).tolist())
    records["lr"] = hyper["lr"]
    trials = records[(records["seed"] == 0) & (records["lr"] == 0.3)]
    tuned = trials[trials["method"].isin(["step-tuned-sgd", "step-tuned-variant"])]
    ends = trials[trials["bp"] == 250].set_index("method")["plain loss"]
    assert ends["sgd"] == pytest.approx(2.72, abs=0.005)
    assert (ends[["step-tuned-sgd", "step-tuned-variant"]].dropna() > ends["sgd"]).all()
    nu_2 = tuned[hyper["nu"].loc[tuned.index] == 2]
    assert nu_2["effective lr"].max() == pytest.approx(0.6, rel=0.01)
    early = nu_2[(nu_2["bp"] > 4) & (nu_2["bp"] <= 48)]
    assert early["raw gamma median"].max() > 1
    assert early["plain loss"].min() < 3.4
    assert early["plain loss"].max() > 4
    chosen = records[(records["seed"] == 1) & records["method"].isin(tuned["method"].unique())]
    assert set(chosen["lr"]) == {0.1}
    sgd = records[(records["method"] == "sgd") & (records["lr"] == 1.0)]
    assert set(sgd["status"]) == {"diverged"}


@pytest.mark.parametrize("base", ["momentum", "AdamW"])
@pytest.mark.parametrize("bounds", ["relative", "absolute"])
def test_the_page_of_variants_has_the_ratios_of_the_results(base, bounds):
    """Of the table of optimizers with a tuned step."""
    page = (DOCS / "results.md").read_text()
    alone = {"momentum": "SGD with momentum", "AdamW": "AdamW"}[base]
    tuned = f"{base[0].upper()}{base[1:]}, step-tuned, {'absolute, ' * (bounds == 'absolute')}"
    rows = [
        re.search(rf"\| {re.escape(tuned)}T = {every} / {alone} \| 5 \| ([\d.]+) ", page)
        for every in (1, 4, 16)
    ]
    ratios = " | ".join(row[1] for row in rows)
    assert f"| {base}, {bounds} bounds | {ratios} |" in (DOCS / "variants.md").read_text()
