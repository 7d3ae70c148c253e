"""The report shows what the store has. It is opened in a real browser if one is installed."""

import functools
import html
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from made_up import fill, put, records_of
from processes import PATIENCE
from steptuned.lab.claims.verdicts import CLAIMS
from steptuned.lab.experiment import load_all
from steptuned.lab.report import figures, writing
from steptuned.lab.report.results import published, tally_of
from steptuned.lab.report.tables import SYMBOLS
from steptuned.lab.report.view import thin, view_of
from steptuned.lab.results import Results
from steptuned.lab.run import execute, folder_of
from steptuned.lab.search import stages
from steptuned.lab.store import Store
from steptuned.lab.table2 import TIMED, Timing, Timings
from test_cli import inside
from test_timing import made_up

HOSTILE = "<script>window.hacked = 1</script>"
QUOTES = "\"'><img src=x onerror='window.hacked=1'> &amp; ${1} {{ 7*7 }} $x_1$"
LONG = "né-日本語-" + "long" * 60

EXPERIMENT = f"""
title = {json.dumps(QUOTES)}
figure = "loss, accuracy and gamma"
problem = "digits"
seeds = 2
budget = {{ epochs = 3 }}
log_every = 23
[selection]
after = {{ epochs = 1 }}
[methods.sgd]
label = {json.dumps(HOSTILE)}
lr = [0.01, 0.1, 1.0]
[methods.step-tuned-sgd]
label = {json.dumps(LONG)}
lr = 0.1
"""
METHODS = ("sgd", "step-tuned-sgd")


def loss_of(spec):
    end = (
        {"sgd": 0.3, "step-tuned-sgd": 0.2}[spec.method]
        + 0.01 * spec.seed
        + 0.1 * abs(math.log10(spec.hyper["lr"]) + 1)
    )
    return lambda share: end + math.exp(-5 * share)


def fill_own(folder, text=EXPERIMENT, name="mine", points=30):
    path = folder / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (experiment,) = load_all(path, "paper")
    results = Results(Store(folder))
    plan = stages(experiment, results)
    try:
        while True:
            for spec in next(plan)[1]:
                more = (
                    {"gamma": lambda s: 1 + s, "negative": lambda s: s / 2}
                    if spec.method == "step-tuned-sgd"
                    else {}
                )
                put(
                    results.store,
                    spec,
                    records_of(spec, loss_of(spec), points, accuracy=lambda s: 0.5 + s / 4, **more),
                )
    except StopIteration:
        results.store.remember(
            name, "paper", [experiment.model_dump(mode="json")], f"steptuned run {name}.toml"
        )
    return experiment


@pytest.fixture
def folder(tmp_path):
    fill_own(tmp_path / "out")
    return tmp_path / "out"


def page_of(folder, formats=(".png",)):
    """The page. Other formats of the figures take time, and few tests look at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", functools.partial(figures.save, formats=formats))
        return writing.write(folder, folder / "report", "steptuned report out").read_text()


def data_of(folder):
    text = (folder / "report" / "data.js").read_text()
    return json.loads(text.removeprefix("window.STEPTUNED = ").removesuffix(";\n"))


def test_the_report_is_self_contained_and_needs_no_network(folder):
    page = page_of(folder, figures.FORMATS)
    links = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    for link in links:
        if link.startswith("#"):
            assert f'id="{link[1:]}"' in page, link
        elif not link.startswith("data:"):
            assert (folder / "report" / link).is_file(), link
    assert not re.search(r"https?://", page)
    for suffix in ("png", "svg", "pdf"):
        assert (folder / "report" / "figures" / f"mine-paper.{suffix}").stat().st_size > 1000


def test_the_numbers_on_the_page_are_those_of_the_store(folder):
    page = page_of(folder)
    (panel,) = data_of(folder)["panels"]
    found = Results(Store(folder))
    runs = {
        (run.spec.method, run.spec.seed): run
        for run in Store(folder).runs()
        if run.spec.budget == 69
    }
    for line in panel["lines"]:
        for seed, y in zip(line["seeds"], line["y"], strict=True):
            records = runs[line["name"], seed].records()
            assert y["loss"] == pytest.approx([record["loss"] for record in records], rel=1e-6)
    for method in METHODS:
        mean = sum(found.final(runs[method, seed].spec)["loss"] for seed in (1, 2)) / 2
        assert f'<data value="{mean}">{mean:.4g}</data>' in page


def test_what_is_unfinished_missing_or_diverged_is_marked(folder):
    runs = {(r.spec.method, r.spec.seed): r for r in Store(folder).runs() if r.spec.budget == 69}
    half = runs["step-tuned-sgd", 2]
    (half.folder / "result.json").unlink()
    half.log_path.write_bytes(
        b"".join(line + b"\n" for line in half.log_path.read_bytes().split(b"\n")[:16])
    )
    put(
        Store(folder),
        runs["sgd", 1].spec,
        [*runs["sgd", 1].records()[:9], {**runs["sgd", 1].records()[9], "loss": math.nan}],
        "diverged",
    )
    page = page_of(folder)
    assert "1/2 seeds; the slowest of the others is at 1.478 of 3 epochs" in page
    assert "1 of 2 seeds diverged" in page
    assert "1 of them not finished" in page
    (panel,) = data_of(folder)["panels"]
    tuned = next(line for line in panel["lines"] if line["name"] == "step-tuned-sgd")
    assert tuned["note"] == "1/2 seeds"
    assert [sum(v is not None for v in y["loss"]) for y in tuned["y"]] == [31, 16]


def test_a_method_without_finished_seeds_is_shown_with_its_progress(folder):
    for run in Store(folder).runs():
        if run.spec.method == "step-tuned-sgd":
            (run.folder / "result.json").unlink()
    assert "0 of 2 seeds" in page_of(folder) or "0/2" in page_of(folder)
    for run in Store(folder).runs():
        if run.spec.method == "sgd" and run.spec.budget == 69:
            put(Store(folder), run.spec, run.records(), "diverged")
    assert "2 of 2 seeds diverged" in page_of(folder)


def test_a_grid_that_has_not_started_is_not_called_corrupt(tmp_path):
    experiment = fill_own(tmp_path)
    other = experiment.model_copy(update={"name": "other", "options": {"batchnorm": False}})
    Store(tmp_path).remember(
        "mine",
        "paper",
        [e.model_dump(mode="json") for e in (experiment, other)],
        "steptuned run mine.toml",
    )
    page = page_of(tmp_path)
    assert "not begun" in page
    assert "corrupt" not in page


def test_names_with_dots_or_other_scripts_get_different_files(tmp_path):
    names = ["lr0.1", "lr0.2", "图一", "图二"]
    for name in names:
        fill_own(tmp_path, name=name)
    page = page_of(tmp_path)
    pictures = re.findall(r'src="(figures/[^"]*)"', page)
    assert len(set(pictures)) == 4
    assert all((tmp_path / "report" / picture).is_file() for picture in pictures)


def test_an_experiment_on_several_instances_shows_its_own_figure_and_counts_all_of_them(tmp_path):
    fill(
        tmp_path,
        "figure-3-instances",
        lambda spec: records_of(spec, lambda s: 1 - s / 2, gamma=lambda s: 1.0),
    )
    lost = next(run for run in Store(tmp_path).runs() if run.spec.options["instance"] == 2)
    (lost.folder / "result.json").unlink()
    page = page_of(tmp_path)
    assert 'class="still shown"' in page
    assert "smaller than SGD on" in page
    assert "instance 2: " in page
    assert "500 rows, " in page
    assert "instances" in page


def test_figure_1_is_copied_into_the_report(folder):
    from steptuned.lab.report.illustration import curvature_illustration

    curvature_illustration(folder / "figures")
    page = page_of(folder)
    assert 'id="figure-1"' in page
    assert (folder / "report" / "figures" / "figure-1.pdf").is_file()


def test_a_winner_on_the_edge_of_the_grid_gives_a_warning_and_the_grid_is_shown(tmp_path):
    fill_own(tmp_path, EXPERIMENT.replace("lr = [0.01, 0.1, 1.0]", "lr = [0.1, 1.0, 10.0]"))
    page = page_of(tmp_path)
    assert "the winner lies on the edge of the grid (lr)" in page
    assert page.count('class="winner"') == 1
    assert len(re.findall(r"<td>loss 0\.\d+</td>", page)) == 3, "a score has its unit"
    for value in ("lr 0.1", "lr 1.0", "lr 10.0"):
        assert f">{value}" in page
    fill_own(tmp_path / "inside")
    assert "on the edge" not in page_of(tmp_path / "inside")


def test_names_are_escaped(folder):
    page = page_of(folder)
    assert HOSTILE not in page
    assert "&lt;script&gt;window.hacked" in page
    assert "<img src=x" not in page
    assert "{{ 7*7 }}" in page
    assert LONG in page


def test_a_damaged_run_is_reported_and_the_rest_is_shown(folder):
    runs = [r for r in Store(folder).runs() if r.spec.budget == 69]
    first, second, third = runs[:3]
    first.log_path.write_bytes(b"not json\n" + first.log_path.read_bytes())
    (second.folder / "spec.json").write_text("{")
    content = bytearray(third.log_path.read_bytes())
    content[20] = ord("9") if content[20] != ord("9") else ord("8")
    third.log_path.write_bytes(content)
    (folder / "experiments" / "other-demo.json").write_text("[]")
    longer = runs[3]
    longer.log_path.write_bytes(longer.log_path.read_bytes() + b"{}\n")
    page = page_of(folder)
    assert "What could not be read" in page
    assert f"{second.folder.name}: its spec.json cannot be read" in page
    assert "its log has changed since the run ended" in page
    assert "other-demo.json cannot be read" in page
    assert "the length of its log has changed since it ended" in page
    assert LONG in page


def test_a_store_without_stored_experiments_shows_those_of_the_package(tmp_path):
    fill(
        tmp_path,
        "figure-6e",
        lambda spec: records_of(spec, lambda s: 1 - s / 2, accuracy=lambda s: s),
    )
    shown = view_of(tmp_path).figures
    assert [(figure.name, figure.scale) for figure in shown] == [("figure-6", "demo")]
    assert shown[0].panels[0].size == "2,000 training images, 20 epochs, 2 seeds"
    assert "demo scale, smaller than scale paper" in page_of(tmp_path)


def test_an_empty_store_gives_a_page_that_says_so(tmp_path):
    (tmp_path / "runs").mkdir()
    page = page_of(tmp_path)
    assert "0 runs" in page
    assert page.count('class="verdict not-run"') == len(CLAIMS) + 1, "and the count of them"


def test_verdicts_have_symbols_and_the_packaged_ones_are_beside_them(tmp_path):
    (tmp_path / "runs").mkdir()
    page = page_of(tmp_path)
    for one in published():
        symbol = f"{SYMBOLS[one['verdict']]} {one['verdict']}"
        words = (one["problems"], f"{one['n']} {one['pairs']}", *one["scales"])
        size = f"({', '.join(filter(None, words))})" if one["n"] else ""
        row = next(row for row in page.split("<tr>") if row.startswith(f"<td>{one['number']}<"))
        packaged = re.sub("<.*?>", "", row.split('<td class="packaged">')[1].split("</td>")[0])
        assert " ".join(packaged.split()) == f"{symbol} {size}".strip()
    own = " ".join(page.split()).count('not-run">· not run</span>')
    assert own == len(CLAIMS) + 1, "the verdicts on this store have symbols too"
    told = tally_of({one["number"]: one["verdict"] for one in published()})
    assert told in html.unescape(page)


def test_table_2_and_the_claims_are_on_the_page_and_beside_it(folder):
    seconds = {name: [1.0, 2.0] for name in TIMED}
    Timings(folder).save(
        Timing("a", "small", 10, seconds, made_up().optimizer, [0.1], {"threads": 1})
    )
    page = page_of(folder)
    assert "1.000 (1.000 to 1.000) [1.67]" in page
    assert len(json.loads((folder / "report" / "claims.json").read_text())) == len(CLAIMS)
    assert "| 17 | not run |" in (folder / "report" / "claims.md").read_text()


def test_thinning_keeps_the_ends_and_the_extremes_of_every_curve():
    losses = [
        [math.sin(i / 7) + (5 if i == 613 else 0) for i in range(1000)],
        [math.cos(i / 5) - (5 if i == 101 else 0) for i in range(900)],
    ]
    kept = thin(losses, 1000, 100)
    assert kept == sorted(set(kept))
    assert len(kept) <= 102
    assert {0, 999, 613, 101} <= set(kept)
    assert thin(losses, 1000, 1000) == list(range(1000))
    assert thin([[None, math.nan, 1.0] * 100], 300, 20)[-1] == 299


def test_a_large_store_gives_a_small_page_marked_as_thinned(tmp_path):
    seeds = EXPERIMENT.replace("seeds = 2", "seeds = 60").replace("epochs = 3", "epochs = 50")
    fill_own(tmp_path, seeds, points=1000)
    page = page_of(tmp_path, figures.FORMATS)
    assert re.search(
        r"curves of up to 1001 records are drawn with up to \d+ of them, extremes kept", page
    )
    size = sum(path.stat().st_size for path in (tmp_path / "report").rglob("*") if path.is_file())
    assert size < 15e6


def test_the_command_writes_the_report(folder, tmp_path):
    done = inside("report", folder, "--to", tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "elsewhere" / "index.html")
    assert "steptuned report out" in (tmp_path / "elsewhere" / "index.html").read_text()
    (tmp_path / "file").write_text("")
    done = inside("report", folder, "--to", tmp_path / "file" / "below")
    assert done.returncode == 1
    assert "choose another folder with --to" in done.stderr


def test_watch_rewrites_the_page_during_runs_until_ctrl_c(folder):
    run = next(
        run
        for run in Store(folder).runs()
        if run.spec.method == "step-tuned-sgd" and run.spec.seed == 1
    )
    result = (run.folder / "result.json").read_bytes()
    (run.folder / "result.json").unlink()
    page = folder / "report" / "index.html"
    command = [sys.executable, "-m", "steptuned", "report", str(folder), "--watch", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _wait(lambda: page.exists() and "1 of them not finished" in page.read_text())
    assert 'http-equiv="refresh" content="1"' in page.read_text()
    (run.folder / "result.json").write_bytes(result)
    _wait(lambda: "not finished</strong>" not in page.read_text() and "</html>" in page.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0
    assert "http-equiv" not in page.read_text(), "what is left does not refresh itself"


def _wait(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_tensorboard_has_the_records_of_a_resumed_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from specs import make_spec

    run = folder_of(Store(tmp_path), make_spec(budget=60, log_every=20))
    execute(run, {}, tensorboard=tmp_path / "live")
    events = EventAccumulator(str(tmp_path / "live" / run.folder.name)).Reload()
    losses = [(e.step, e.value) for e in events.Scalars("loss")]
    assert losses == [(r["bp"], pytest.approx(r["loss"], rel=1e-6)) for r in run.records()]
    assert "gamma" in events.Tags()["scalars"]


# ------------------------------------------------------------------------------------- in a browser

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here to try the page in")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def server(folder):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    page_of(folder)
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder / "report"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()
    server.server_close()


def opened(browser, address, **context):
    page = browser.new_context(**context).new_page()
    page.troubles = []
    page.on(
        "console",
        lambda message: (
            page.troubles.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.goto(address)
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.wait_for_selector(".plot .main-svg")
    return page


PLOTTED = "(key) => document.querySelector('.plot').data.map((trace) => trace[key])"
LAYOUT = "(key) => document.querySelector('.plot').layout[key]"


@pytest.mark.parametrize("how", ["file", "server"])
def test_the_page_opens_without_errors_or_warnings(browser, server, folder, how):
    address = server if how == "server" else (folder / "report" / "index.html").resolve().as_uri()
    page = opened(browser, address)
    assert page.troubles == []
    assert page.evaluate("window.hacked") is None, "names are not executed"
    assert page.locator("article").count() == 1
    assert HOSTILE in page.locator("fieldset").inner_text()
    assert HOSTILE in page.locator("table.finals").inner_text()
    page.context.close()


def test_the_controls_change_the_plots(browser, server, folder):
    page = opened(browser, server)
    band = len(page.evaluate(PLOTTED, "y"))
    assert page.evaluate(LAYOUT, "yaxis")["type"] == "log"
    page.select_option("[name=y]", "linear")
    assert page.evaluate(LAYOUT, "yaxis")["type"] == "linear"
    assert page.evaluate(PLOTTED, "x")[0][-1] == 69
    for key, last in (("epochs", 3), ("samples", 69), ("seconds", 1)):
        page.select_option("[name=x]", key)
        assert page.evaluate(PLOTTED, "x")[0][-1] == pytest.approx(last)
    page.select_option("[name=draw]", "seeds")
    seeds = page.evaluate(PLOTTED, "y")
    assert (band, len(seeds)) == (18, 12), "band and mean of six curves; two seeds of each"
    records = [
        r["loss"]
        for r in next(
            r for r in Store(folder).runs() if r.spec.method == "sgd" and r.spec.budget == 69
        ).records()
    ]
    assert any(values == pytest.approx(records, rel=1e-6) for values in seeds), (
        "what is drawn is what was logged"
    )
    page.locator("[name=method]").first.uncheck()
    assert len(page.evaluate(PLOTTED, "y")) < len(seeds)
    page.reload()
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.wait_for_selector(".plot .main-svg")
    assert page.locator("[name=draw]").input_value() == "seeds", (
        "the controls keep their state when the page is rewritten"
    )
    assert page.troubles == []
    page.context.close()


def test_the_page_works_with_keyboard_phone_dark_mode_and_print(browser, server):
    page = opened(browser, server, viewport={"width": 360, "height": 740}, color_scheme="dark")
    wide = page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert wide <= 0, "nothing sticks out"
    assert page.evaluate(LAYOUT, "font")["color"] == "#e6edf3"
    page.evaluate("window.scrollTo(0, 0)")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("[name=method]").first.focus()
    page.keyboard.press("Space")
    assert not page.locator("[name=method]").first.is_checked()
    assert all(
        page.locator("img").nth(i).get_attribute("alt") for i in range(page.locator("img").count())
    )
    assert page.locator(".plot").first.get_attribute("aria-label")
    page.emulate_media(media="print")
    assert page.locator(".still").first.is_visible()
    assert not page.locator(".plot").first.is_visible()
    page.context.close()
