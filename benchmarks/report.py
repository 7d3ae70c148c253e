"""How large the report of a large store is, and how long its page takes to open in Chromium: 500 runs with 1,000 records each.

    python benchmarks/report.py

The page is opened several times in a new browser profile; the time is from the address to the first plot on the screen.
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
    """Made-up runs; how many."""
    (folder / "large.toml").write_text(EXPERIMENT)
    experiment = load(folder / "large.toml", "paper")
    results = Results(Store(folder))
    results.store.remember("large", "paper", [experiment.model_dump(mode="json")], "steptuned run large.toml")
    for _, specs in stages(experiment, results):
        for spec in specs:
            run = folder_of(results.store, spec)
            if run.result() is not None:
                continue
            log = Log(run.log_path)
            for i in range(RECORDS):
                share = i / RECORDS
                record = {
                    "bp": 11 * i,
                    "batches": 11 * i,
                    "samples": 704 * i,
                    "seconds": i / 7,
                    "loss": 1 / (1 + share * (9 + spec.seed / 50)),
                }
                record |= {
                    "plain loss": record["loss"],
                    "accuracy": share,
                    "gamma": 1 + share / 3,
                    "curvature": share / 7,
                    "negative": share / 9,
                }
                log.append(record)
            run.finish("finished", log, record)
            log.close()
    return len(results.store.runs())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = fill(folder)
        start = time.perf_counter()
        page = writing.write(folder, folder / "report", "steptuned report large")
        made = time.perf_counter() - start
        size = sum(path.stat().st_size for path in (folder / "report").rglob("*") if path.is_file())
        print(f"{runs} runs of {RECORDS} records: made in {made:.1f} s, {size / 1e6:.1f} MB")
        times = []
        with sync_playwright() as playwright:
            for _ in range(OPENINGS):
                flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
                tab = browser.new_page()
                start = time.perf_counter()
                tab.goto(page.resolve().as_uri())
                tab.locator(".plot").first.scroll_into_view_if_needed()
                tab.wait_for_selector(".plot .main-svg")
                times.append(time.perf_counter() - start)
                browser.close()
        print(f"opened in {statistics.median(times):.2f} s [{min(times):.2f}, {max(times):.2f}], n = {OPENINGS}")


if __name__ == "__main__":
    main()
