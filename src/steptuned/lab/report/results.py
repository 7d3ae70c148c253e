"""The results page in Markdown and its summary in the README, made from a folder of runs alone."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from steptuned.lab.claims.judging import PAPERS, TUNED, Claim
from steptuned.lab.claims.verdicts import Judgement, as_data, judge
from steptuned.lab.experiment import Experiment
from steptuned.lab.measures import BY_KEY
from steptuned.lab.paired_runs import PairedAtScales
from steptuned.lab.problems import PROBLEMS
from steptuned.lab.problems.image_problem import ImageProblem
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.report import figures, prose, provenance, tables
from steptuned.lab.report.gamma import has_relative_bounds
from steptuned.lab.report.tables import SYMBOLS, Table
from steptuned.lab.results import Results, TolerantResults, outcome_of, sources
from steptuned.lab.search import Outcome
from steptuned.lab.store import Store
from steptuned.lab.table2 import SIZES, Timings

OF_THE_PAPER = re.compile(r"figure-(?:[23]|[456][a-f]?)")
"""The names of the paper's own experiments."""
IMAGES = {
    "short": "All images, a tenth of the paper's epochs",
    "small": "A tenth of the images (a twentieth for Network in Network), all epochs",
}
LEGEND = (
    "✔ reproduced, ✘ not reproduced (at least 5 seeds, 20 instances or 15 rounds of timing); "
    "(✔) consistent, (✘) inconsistent (3 or 4 seeds); ± mixed: plain loss and J, or two scales, "
    "disagree; · not run."
)
WORDS = " ".join(
    (
        "On this page, J is the training loss with its regularization, and the plain loss is the "
        "training loss without it; J* is the lowest J that any method found. Gamma is the factor "
        "by which Step-Tuned SGD multiplies lr: the raw gamma, clipped to the bounds [m, M]. The "
        "raw gamma is measured from the curvature, and is nu where the curvature is not positive "
        "([equations](how-it-works.md)). In these experiments M is raised to nu if nu is larger: "
        "nu = 5 with the default bounds means [0.5, 5]. The gradient-variation (GV) methods use "
        "each mini-batch once, and differ in how they measure the change of the gradient between "
        "two iterations: Stochastic-GV from the gradients of two mini-batches, Exact-GV from full "
        "gradients, Expected-GV from the expected change. The problems are those of the paper's "
        "Table 1:",
        "; ".join(f"({letter}) {row['title']}" for letter, row in TABLE_1.items()) + ".",
        "At scale `paper`, the paper's experiments have the paper's sizes. At scale `short`, (a) "
        "to (f) use all images for a tenth of the epochs, and (a) to (c) at 16x16 pixels. At scale "
        "`small`, they use a tenth of the images ((c): a twentieth) for all epochs, at the same "
        "pixels as `short`. The sizes of `text` are given with its results. "
        "With T above 1, a [variant](variants.md) measures every T-th mini-batch only. "
        "[Reproducing the paper](reproducing.md) explains how hyper-parameters are chosen and how "
        "claims are judged.",
    )
)
CONTROLS = {"controls-a": "figure-4a", "controls-f": "figure-6f"}
"""The experiments with controls, and what the figure of gamma shows where they have no runs."""
VARIANTS = re.compile(r"beyond-.*|text")
"""The names of the experiments with variants of the method."""
PUBLISHED = "published.json"
"""The verdicts that come with the package, made from the project's own evidence."""
MARKER = "verdicts"


@dataclass(frozen=True)
class Section:
    """One figure with the outcomes that have runs."""

    name: str
    scale: str
    panels: list[Outcome]

    @property
    def stem(self) -> str:
        return figures.safe_name(f"{self.name}-{self.scale}")


@dataclass
class Page:
    """A folder of runs as a page: what is read, and where the figures go."""

    store: Path
    pictures: Path
    results: TolerantResults
    runs: PairedAtScales
    sections: list[Section]
    judged: list[tuple[Claim, Judgement]]
    written: list[Path]

    def draw(self, name: str, panels: list[Outcome], stem: str) -> str:
        """Draw a figure and write its numbers as JSON. Returns the link for the page."""
        figure = figures.make(name, panels, self.results)
        data = self.pictures / f"{stem}.json"
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(json.dumps(figures.data_of(figure), separators=(",", ":")) + "\n")
        self.written += [data, *figures.save(figure, self.pictures / stem, [".png"])]
        return f"![{name} at scale {panels[0].experiment.scale}](figures/{stem}.png)"


def write(
    store: Path,
    page: Path,
    command: str,
    readme: Path | None = None,
    verdicts: Path | None = None,
) -> list[Path]:
    """Write the page with its figures beside it. Returns the files that were written.

    Args:
        store: the folder of runs.
        page: the page to write.
        command: the command that made the page, which the page shows.
        readme: a page whose table of verdicts is updated.
        verdicts: the file to write the packaged verdicts to.
    """
    results = TolerantResults(Store(store), [])
    runs = PairedAtScales(store, results)
    made = Page(
        store,
        page.parent / "figures",
        results,
        runs,
        _sections(store, results),
        judge(store, runs=runs),
        [page],
    )
    parts = [
        "# Results",
        f"Made by `{command}` from the logs of the runs; nothing here is written by hand.",
        *_verdicts(made.judged),
        *_gamma(made),
        *_figures(made),
        *_table_2(store),
        *_variants(made),
        *_checking(made),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n")
    if readme is not None:
        readme.write_text(with_verdicts(readme.read_text(), made.judged))
        made.written.append(readme)
    if verdicts is not None:
        verdicts.write_text(as_published(made.judged), encoding="utf-8")
        made.written.append(verdicts)
    return made.written


def _sections(store: Path, results: TolerantResults) -> list[Section]:
    found = []
    for source in sources(store)[0]:
        panels = [outcome_of(experiment, results) for experiment in source.experiments]
        panels = [outcome for outcome in panels if has_runs(outcome, results)]
        if panels:
            found.append(Section(source.name, source.scale, panels))
    return sorted(found, key=lambda section: (section.name, section.scale))


# ----------------------------------------------------------------------------------------- verdicts


def verdict_table(judged: list[tuple[Claim, Judgement]]) -> Table:
    """One line per claim."""
    table = Table("", ["", "#", "claim", "verdict", "problems", "n", "scale"])
    for claim, j in judged:
        row = [SYMBOLS[j.verdict], str(claim.number), claim.text, j.verdict]
        table.rows.append([*row, j.problems, j.size, ", ".join(j.scales)])
    return table


def tally(judged: list[tuple[Claim, Judgement]]) -> str:
    """The number of claims with each verdict, in a sentence or two."""
    return tally_of({claim.number: judgement.verdict for claim, judgement in judged})


def tally_of(of_claims: Mapping[int, str]) -> str:
    """The same of verdicts by the numbers of their claims."""
    told = []
    for whose, is_the_papers in (("the paper's", True), ("our own", False)):
        verdicts = [v for number, v in of_claims.items() if (number <= PAPERS) == is_the_papers]
        counts = [f"{verdicts.count(v)} {v}" for v in SYMBOLS if v in verdicts]
        if verdicts:
            told.append(f"Of {whose} {len(verdicts)} claims: {', '.join(counts)}.")
    return " ".join(told)


def _verdicts(judged: list[tuple[Claim, Judgement]]) -> list[str]:
    if all(judgement.verdict == "not run" for _, judgement in judged):
        return []
    return ["## Verdicts", tally(judged), verdict_table(judged).markdown(), LEGEND, WORDS]


def with_verdicts(readme: str, judged: list[tuple[Claim, Judgement]]) -> str:
    """The README with an updated table between its two markers."""
    begin, end = f"<!-- {MARKER} -->", f"<!-- end of {MARKER} -->"
    if begin not in readme or end not in readme:
        raise ValueError(
            f"the README has no lines '{begin}' and '{end}' to write the verdicts between"
        )
    content = "\n\n".join((begin, tally(judged), verdict_table(judged).markdown(), LEGEND, end))
    return re.sub(
        f"{re.escape(begin)}.*{re.escape(end)}", lambda _: content, readme, flags=re.DOTALL
    )


def as_published(judged: list[tuple[Claim, Judgement]]) -> str:
    """The verdicts as they are packaged: JSON, one claim per line."""
    left_out = ("criterion", "thresholds", "comparisons", "criteria")
    rows = [
        {key: value for key, value in one.items() if key not in left_out} for one in as_data(judged)
    ]
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


def published() -> list[dict[str, Any]]:
    """The packaged verdicts, on the project's own evidence."""
    return json.loads(files("steptuned.lab.report").joinpath(PUBLISHED).read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------- what gamma does


def _gamma(page: Page) -> list[str]:
    columns = [
        "experiment",
        "scale",
        "method",
        "bounds",
        "inside",
        "at lower",
        "at upper",
        "negative curvature",
    ]
    table = Table("", [*columns, "raw gamma, first tenth", "raw gamma, last tenth"])
    found = []
    for section in page.sections:
        names = {
            outcome.experiment.name
            for other in page.sections
            for outcome in other.panels
            if other.scale == section.scale
        }
        for outcome in section.panels:
            if outcome.experiment.instances > 1:
                continue
            name = outcome.experiment.name
            for group in outcome.groups:
                tuning = prose.tuning_of(group, page.results)
                if tuning is None:
                    continue
                shares = (tuning.inside, tuning.at_lower, tuning.at_upper, tuning.negative)
                bounds = f"{tuning.bounds[0]:g} to {tuning.bounds[1]:g}"
                bounds += ", relative" * has_relative_bounds(group)
                row = [
                    name,
                    section.scale,
                    group.entry.label,
                    bounds,
                    *(f"{share:.0%}" for share in shares),
                ]
                row += [f"{tuning.early:.3g}", f"{tuning.late:.3g}"]
                # The controls share runs with a figure, which has the same row.
                if name in CONTROLS and CONTROLS[name] in names:
                    continue
                table.rows.append(row)
                if group.entry.name == TUNED and _has_images(outcome.experiment):
                    found.append((outcome, tuning))
    if not table.rows:
        return []
    intro = (
        "The raw gamma is the inverse of the curvature along the gradient, and nu where the "
        "curvature is negative. Where gamma is inside its bounds and the curvature is "
        "positive, the step is tuned. At a bound the method is SGD with a constant factor, except "
        "that mini-batches are used twice."
    )
    about = (
        "Gamma of the winner of each grid search, over all iterations and seeds. Relative bounds "
        "limit the raw gamma divided by its running reference, not the raw gamma itself. "
        "Iterations with negative curvature, where gamma is nu, are also counted as inside or at a "
        "bound."
    )
    few_and_many = prose.few_and_many(found, page.runs)
    return [
        "## What gamma does",
        intro,
        *_control_figure(page),
        *(["### Few and many images", *few_and_many] if few_and_many else []),
        "### Where gamma was",
        about,
        table.markdown(),
    ]


def _control_figure(page: Page) -> list[str]:
    """Loss, gamma and raw gamma next to the controls, if they were run."""
    parts = []
    for scale in ("short", "small", "paper"):
        panels = _control_panels(page, scale)
        if not panels:
            continue
        controls = [outcome for outcome in panels if outcome.experiment.name in CONTROLS]
        others = [o.experiment.name for o in panels if o not in controls]
        title, what = "gamma", "Gamma of Step-Tuned SGD and its effect on the loss"
        if controls:
            title = "gamma and its controls"
            what += ", compared with constant gammas, a finer grid for SGD, and SGD that uses each "
            what += "mini-batch twice"
        without = f" (the controls of {', '.join(others)} have not been run)" if others else ""
        parts.append(f"{what}, at scale {scale}{without}:")
        parts.append(page.draw(title, panels, f"gamma-{scale}"))
        for outcome in panels:
            said = " ".join(prose.sentences(outcome, page.runs[scale]))
            parts += [f"**{outcome.experiment.name}.** {said}" if len(panels) > 1 else said]
        for outcome in controls:
            environments = provenance.environments_of([outcome], page.results)
            made = [*provenance.sentences(environments), provenance.other_criteria(environments)]
            about = " ".join(filter(None, [sizes([outcome]), *made]))
            parts += [f"{outcome.experiment.name}: {about}"]
            parts += [table.markdown() for table in tables.summary(outcome, page.results)]
            parts += _against_sgd(page, outcome)
    return parts


def _control_panels(page: Page, scale: str) -> list[Outcome]:
    """The experiments with controls, or SGD and Step-Tuned SGD alone where those have no runs."""
    found = {o.experiment.name: o for s in page.sections if s.scale == scale for o in s.panels}
    panels = []
    for name, instead in CONTROLS.items():
        if name in found:
            panels.append(found[name])
        elif instead in found:
            groups = [g for g in found[instead].groups if g.entry.name in ("sgd", TUNED)]
            panels.append(replace(found[instead], groups=groups))
    return [outcome for outcome in panels if has_runs(outcome, page.results)]


def _against_sgd(page: Page, outcome: Outcome) -> list[str]:
    measure = BY_KEY[prose.measure_of(outcome, page.results)]
    found = tables.against_sgd(outcome, page.runs[outcome.experiment.scale], measure)
    return [table.markdown() for table in found]


def _against_base(page: Page, outcome: Outcome) -> list[str]:
    measure = BY_KEY[prose.measure_of(outcome, page.results)]
    found = tables.against_base(outcome, page.runs[outcome.experiment.scale], measure)
    return [table.markdown() for table in found]


# -------------------------------------------------------------------------------------- the figures


def _figures(page: Page) -> list[str]:
    chosen = [s for s in page.sections if s.name not in CONTROLS and not VARIANTS.fullmatch(s.name)]
    return (
        ["## Figures", *(part for section in chosen for part in _section(page, section))]
        if chosen
        else []
    )


def _section(page: Page, section: Section) -> list[str]:
    name, scale, panels = section.name, section.scale, section.panels
    environments = provenance.environments_of(panels, page.results)
    made = [*provenance.sentences(environments), provenance.other_criteria(environments)]
    parts = [f"### {name}, scale {scale}", " ".join(filter(None, [sizes(panels), *made]))]
    parts.append(page.draw(name, panels, section.stem))
    for outcome in panels:
        parts += [outcome.experiment.note] if outcome.experiment.note else []
        said = prose.sentences(outcome, page.runs[scale])
        letter = f"**{outcome.experiment.name}.** " if len(panels) > 1 else ""
        parts += [letter + " ".join(said)] if said else []
        parts += [table.markdown() for table in tables.summary(outcome, page.results)]
        parts += [order] if (order := tables.ranking(outcome, page.results)) else []
    return parts


def _table_2(store: Path) -> list[str]:
    parts = []
    for (scale, where), timings in Timings(store).sets().items():
        measured = {one.problem for one in timings}
        missing = ", ".join(f"({letter})" for letter in TABLE_1 if letter not in measured)
        note = f" Not measured: {missing}." if missing else ""
        made_in = [one.environment for one in timings]
        machine = " ".join(
            filter(None, [*provenance.sentences(made_in), provenance.other_criteria(made_in)])
        )
        length = "an epoch" if SIZES[scale].seconds is None else "a few seconds"
        size = "The networks and images have the paper's sizes. In each round, the methods are "
        size += f"timed in turn, each for {length}. "
        parts.append(f"## Table 2, {where}\n\n{size}{machine}{note}")
        parts += [table.markdown() for table in tables.wall_clock(timings)]
        parts.append(prose.time_per_epoch(timings))
    return parts


def _variants(page: Page) -> list[str]:
    chosen = [section for section in page.sections if VARIANTS.fullmatch(section.name)]
    if not chosen:
        return []
    return [
        "## Variants",
        "[Variants](variants.md) describes them. All methods have the same number of "
        "back-propagations.",
        *(
            part
            for section in chosen
            for part in (
                *_section(page, section),
                *(
                    table
                    for outcome in section.panels
                    for table in (*_against_sgd(page, outcome), *_against_base(page, outcome))
                ),
            )
        ),
    ]


# ------------------------------------------------------------------------------------- how to check


def _checking(page: Page) -> list[str]:
    known = [
        (claim, judgement) for claim, judgement in page.judged if judgement.verdict != "not run"
    ]
    open_ = ", ".join(str(claim.number) for claim, j in page.judged if j.verdict == "not run")
    parts = ["## The claims in detail", f"Not judged (runs missing): {open_ or 'none'}."]
    parts += [table.markdown() for table in tables.claims(page.judged)] if known else []
    parts += [table.markdown() for table in tables.profiles(page.runs)]
    environments = provenance.environments_of(
        [outcome for section in page.sections for outcome in section.panels], page.results
    )
    timed = [t.environment for timings in Timings(page.store).sets().values() for t in timings]
    rewritten = provenance.rewritten_history([*environments, *timed])
    parts.append(FEW_PAIRS)
    return [*parts, "## How to check this page", CHECKING, *([rewritten] if rewritten else [])]


FEW_PAIRS = (
    "With few pairs, a 95 % interval is narrower than its name says. An interval within the range "
    "of n values contains the true median with a probability of at most 1 - 2^(1 - n): 75 % for "
    "n = 3, 94 % for n = 5."
)
CHECKING = """\
The logs are in `evidence/`, one Parquet file per experiment and scale, one row per log record:

```python
import pandas

records = pandas.read_parquet("evidence/figure-3-paper.parquet")
```

Of most grid trials of the regression, and of some of the networks, the files keep only the
back-propagations and J of each record; the column `thinned` says so.

`steptuned evidence verify evidence` compares the files with the checksums in \
`evidence/MANIFEST.json`,
`steptuned claims evidence` computes the verdicts again, and \
`steptuned results evidence --to docs/results.md` generates this
page again. The tests compare both with the published files. To run an experiment again, use
`steptuned reproduce NAME --scale SCALE`."""


def has_runs(outcome: Outcome, results: Results) -> bool:
    return any(
        results.final(spec) is not None for group in outcome.groups for spec in group.specs.values()
    )


def sizes(panels: list[Outcome]) -> str:
    """The sizes of the problems and the lengths of the runs, in a sentence or two."""
    experiments = [outcome.experiment for outcome in panels]
    scale = experiments[0].scale
    said = dict.fromkeys(map(figures.size_of, experiments))
    if len(said) > 1:
        said = dict.fromkeys(f"{e.name}: {figures.size_of(e)}" for e in experiments)
    sentences = [f"{'; '.join(said)}."]
    pixels = {e.options.get("size", 32) for e in experiments if _has_images(e)}
    if scale == "demo":
        sentences.append("Much smaller than scale paper.")
    elif scale == "paper" and all(OF_THE_PAPER.fullmatch(e.name) for e in experiments):
        sentences.append("These are the paper's own sizes.")
    elif scale in IMAGES and pixels:
        small = "; the paper's have 32x32 pixels" if 16 in pixels else ""
        sentences.append(f"{IMAGES[scale]}{small}.")
    others = {e.instances - 1 for e in experiments if e.tune == "first" and e.instances > 1}
    sentences += [
        f"Hyper-parameters are chosen on the first instance; the other {n} are compared."
        for n in others
    ]
    return " ".join(sentences)


def _has_images(experiment: Experiment) -> bool:
    return issubclass(PROBLEMS[experiment.problem], ImageProblem)
