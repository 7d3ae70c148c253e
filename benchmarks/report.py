"""The size of a report of 500 runs with 1,000 records each, and the time to open its page.

    python benchmarks/report.py

Opens the page several times in Chromium, each time with a new profile. The time is from the request
to the first plot on the screen.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from steptuned.lab.experiment import load
from steptuned.lab.report import writing
from steptuned.lab.results import Results
from steptuned.lab.run import folder_of
from steptuned.lab.search import stages
from steptuned.lab.store import Log, Store

RECORDS, OPENINGS = 1_000, 7
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
EXPERIMENT = """
title = "a large store"
figure = "loss, accuracy and gamma"
problem = "digits"
seeds = 125
budget = { epochs = 500 }
log_every = 11
[methods.sgd]
[methods.rmsprop]
[methods.adam]
[methods.step-tuned-sgd]
"""


def fill(folder: Path) -> int:
    """Write synthetic runs. Returns their number."""
    (folder / "large.toml").write_text(EXPERIMENT)
    experiment = load(folder / "large.toml", "paper")
    results = Results(Store(folder))
    contents = [experiment.model_dump(mode="json")]
    results.store.remember("large", "paper", contents, "steptuned run large.toml")
    for _, specs in stages(experiment, results):
        for spec in specs:
            run = folder_of(results.store, spec)
            if run.result() is None:
                log = Log(run.log_path)
                for i in range(RECORDS):
                    log.append(record := record_of(i, spec.seed))
                run.finish("finished", log, record)
                log.close()
    return len(results.store.runs())


def record_of(i: int, seed: int) -> dict[str, float]:
    share = i / RECORDS
    loss = 1 / (1 + share * (9 + seed / 50))
    return {
        "bp": 11 * i,
        "batches": 11 * i,
        "samples": 704 * i,
        "seconds": i / 7,
        "loss": loss,
        "plain loss": loss,
        "accuracy": share,
        "gamma": 1 + share / 3,
        "curvature": share / 7,
        "negative": share / 9,
    }


def seconds_to_open(page: Path) -> list[float]:
    times = []
    with sync_playwright() as playwright:
        for _ in range(OPENINGS):
            chromium = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            tab = browser.new_page()
            start = time.perf_counter()
            tab.goto(page.resolve().as_uri())
            tab.locator(".plot").first.scroll_into_view_if_needed()
            tab.wait_for_selector(".plot .main-svg")
            times.append(time.perf_counter() - start)
            browser.close()
    return times


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = fill(folder)
        start = time.perf_counter()
        page = writing.write(folder, folder / "report", "steptuned report large")
        made = time.perf_counter() - start
        files = [path for path in (folder / "report").rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e6
        print(f"{runs} runs of {RECORDS} records: made in {made:.1f} s, {size:.1f} MB")
        times = seconds_to_open(page)
    spread = f"{statistics.median(times):.2f} s [{min(times):.2f}, {max(times):.2f}]"
    print(f"opened in {spread}, n = {OPENINGS}")


if __name__ == "__main__":
    main()
