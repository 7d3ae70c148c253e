"""Packed runs: restored byte for byte, readable by other tools, and protected by checksums."""

import json
import shutil
from pathlib import Path

import pandas
import pyarrow.parquet
import pytest

from made_up import fill, put, records_of
from specs import make_spec
from steptuned.lab.evidence import EvidenceError, opened, pack, unpack, verify
from steptuned.lab.experiment import load_all
from steptuned.lab.results import Results
from steptuned.lab.run import environment_now, execute, folder_of
from steptuned.lab.search import stages
from steptuned.lab.store import Run, Store, write_json
from test_cli import inside

EXPERIMENT = """
title = "small"
figure = "loss"
problem = "regression"
seeds = 2
budget = { iterations = 30 }
log_every = 5
[selection]
after = { iterations = 10 }
[methods.sgd]
lr = [0.1, 1.0, 1e9]
[methods.step-tuned-sgd]
lr = [0.1, 1.0]
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence")
    (folder / "small.toml").write_text(EXPERIMENT)
    (experiment,) = load_all(folder / "small.toml", "paper")
    results = Results(Store(folder / "store"))
    plan, environment = stages(experiment, results), environment_now("cpu", 1)
    try:
        while True:
            for spec in next(plan)[1]:
                execute(folder_of(results.store, spec), environment)
    except StopIteration:
        contents = [experiment.model_dump(mode="json")]
        results.store.remember("small", "paper", contents, "steptuned run small.toml")
    return folder / "store"


@pytest.fixture
def packed(store, tmp_path):
    pack(store, tmp_path / "evidence")
    return tmp_path / "evidence"


def files_of(store):
    return {path.parent.name: path.read_bytes() for path in store.glob("runs/*/*/log.jsonl")}


def test_logs_of_reported_runs_are_restored_byte_for_byte_and_trials_keep_bp_and_loss(
    store, packed, tmp_path
):
    assert unpack(packed, tmp_path / "again") == len(files_of(store)) == 9
    before, after = files_of(store), files_of(tmp_path / "again")
    assert before.keys() == after.keys()
    full = [name for name in before if before[name] == after[name]]
    assert len(full) == 4, "two methods, two seeds"
    assert all("bp=30" in name for name in full)
    for name in before.keys() - set(full):
        wanted = [
            {key: json.loads(line)[key] for key in ("bp", "loss")}
            for line in before[name].splitlines()
        ]
        assert [json.loads(line) for line in after[name].splitlines()] == wanted
    for path in store.glob("runs/*/*/environment.json"):
        assert json.loads((tmp_path / "again" / path.relative_to(store)).read_text()) == json.loads(
            path.read_text()
        )


def test_nothing_is_run_again_on_an_unpacked_store_and_the_numbers_are_the_same(
    store, packed, tmp_path
):
    unpack(packed, tmp_path / "again")
    logs = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "again").glob("runs/*/*/log.jsonl")
    }
    toml = store.parent / "small.toml"
    ended = inside("run", toml, "--out", tmp_path / "again", "--jobs", 1, "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "again").glob("runs/*/*/log.jsonl")
    } == logs
    finals = []
    for folder in (store, tmp_path / "again"):
        results = Results(Store(folder))
        finals.append({run.spec.identity: results.final(run.spec) for run in Store(folder).runs()})
    assert finals[0] == finals[1]


def test_packing_an_unpacked_store_gives_the_same_records(packed, tmp_path):
    unpack(packed, tmp_path / "again")
    manifest = pack(tmp_path / "again", tmp_path / "second")
    (name,) = manifest["files"]
    tables = [
        pyarrow.parquet.read_table(folder / name).drop_columns(["result"])
        for folder in (packed, tmp_path / "second")
    ]
    assert str(tables[0].to_pylist()) == str(tables[1].to_pylist()), "as text, where nan is nan"


def test_packing_an_unpacked_store_leaves_its_files_as_they_are(store, packed, tmp_path):
    unpack(packed, tmp_path / "again")
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    pack(tmp_path / "again", packed)
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before
    (target,) = packed.glob("*.parquet")
    target.write_bytes(before[target.name][:-100])
    pack(store, packed)
    assert target.read_bytes() == before[target.name], "a damaged file is written again"
    result = next((tmp_path / "again").glob("runs/*/*bp=30*/result.json"))
    content = json.loads(result.read_text())
    result.write_text(json.dumps(content | {"final": {"loss": 7.0}}))
    pack(tmp_path / "again", packed)
    assert target.read_bytes() != before[target.name], "another final value is not ignored"


def part_of(store, to, *experiments):
    """A copy of a store with only the experiments that the names begin with."""
    shutil.copytree(store, to)
    for path in (to / "experiments").iterdir():
        if not path.name.startswith(experiments):
            path.unlink()
    return to


@pytest.fixture
def two(store, tmp_path):
    """The store with a second experiment, of a network."""
    both = tmp_path / "two"
    shutil.copytree(store, both)
    outcome = fill(both, "figure-4d", network_records)
    contents = [outcome.experiment.model_dump(mode="json")]
    Store(both).remember("figure-4d", "demo", contents, "steptuned reproduce figure-4d")
    return both


def network_records(spec):
    gamma = {"gamma median": lambda share: 1 + share} if "step" in spec.method else {}
    plain = {"plain loss": lambda share: 2 - share}
    return records_of(spec, lambda share: 3 - share - spec.hyper["lr"], points=4, **plain, **gamma)


def test_files_of_experiments_that_the_store_lacks_stay(two, tmp_path):
    packed = tmp_path / "evidence"
    before = pack(two, packed)["files"]
    assert set(before) == {"small-paper.parquet", "figure-4d-demo.parquet"}
    for name in ("small", "figure-4d"):
        after = pack(part_of(two, tmp_path / f"only {name}", name), packed)["files"]
        assert after == before
        assert verify(packed)["files"] == before


def test_packing_refuses_to_lose_runs_and_writes_nothing(two, tmp_path):
    packed = tmp_path / "evidence"
    pack(two, packed)
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    fewer = part_of(two, tmp_path / "fewer", "small", "figure-4d")
    for seed in (1, 2):
        (lost,) = fewer.glob(f"runs/*/step-tuned-sgd*seed={seed}_bp=30*")
        shutil.rmtree(lost)
    said = (
        r"small-paper\.parquet would lose 2 of its 9 runs, .*: "
        r"first run `steptuned evidence unpack \S+evidence --to \S+fewer`"
    )
    with pytest.raises(EvidenceError, match=said):
        pack(fewer, packed)
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before
    unpack(packed, fewer)
    pack(fewer, packed)
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


def test_trials_of_networks_are_kept_whole_unless_they_are_thinned_already(two, tmp_path):
    packed, name = tmp_path / "evidence", "figure-4d-demo.parquet"
    entry = pack(two, packed)["files"][name]
    assert (entry["runs"] > 9, entry["thinned runs"]) == (True, 0)
    unpack(packed, tmp_path / "again")
    before, after = files_of(two), files_of(tmp_path / "again")
    trials = [folder for folder in before if "seed=0" in folder and "lr=0.01_" in folder]
    assert trials
    assert all(before[folder] == after[folder] for folder in trials)
    (trial,) = (tmp_path / "again").glob("runs/autoencoder/sgd*lr=0.01_*seed=0*")
    thinned = [{"bp": r["bp"], "loss": r["loss"]} for r in Run(trial).records()]
    put(Store(tmp_path / "again"), Run(trial).spec, thinned)
    result = json.loads((trial / "result.json").read_text())
    write_json(trial / "result.json", {**result, "thinned": True})
    manifest = pack(tmp_path / "again", tmp_path / "second")
    assert manifest["files"][name]["thinned runs"] == 1


def test_the_evidence_of_the_repository_is_under_20_megabytes():
    files = list((Path(__file__).parents[2] / "evidence").iterdir())
    assert len(files) > 5
    assert sum(path.stat().st_size for path in files) < 20e6


def test_a_store_that_has_the_experiment_keeps_one_copy_of_it(store, packed, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    before = {path.name: path.read_text() for path in (copy / "experiments").iterdir()}
    unpack(packed, copy)
    assert {path.name: path.read_text() for path in (copy / "experiments").iterdir()} == before


def test_a_file_is_readable_with_two_lines_of_pandas(packed):
    table = pandas.read_parquet(packed / "small-paper.parquet")
    last = table[~table.thinned].groupby(["method", "seed"]).loss.last()
    assert sorted(last.index) == [
        ("sgd", 1),
        ("sgd", 2),
        ("step-tuned-sgd", 1),
        ("step-tuned-sgd", 2),
    ]
    assert table["raw gamma median"].notna().any()


def test_the_manifest_has_checksums_counts_commits_and_criteria(packed):
    entry = verify(packed)["files"]["small-paper.parquet"]
    assert (entry["runs"], entry["thinned runs"]) == (9, 5)
    assert len(entry["sha256"]) == 64
    assert entry["commits"]
    assert len(entry["criteria"]) == 1


def test_damage_is_reported_in_one_sentence(packed, tmp_path):
    path = packed / "small-paper.parquet"
    sound = path.read_bytes()
    path.write_bytes(sound[:100] + bytes([sound[100] ^ 1]) + sound[101:])
    for read in (verify, lambda folder: unpack(folder, tmp_path / "again")):
        with pytest.raises(
            EvidenceError, match=r"small-paper\.parquet is not the file that was packed"
        ):
            read(packed)
    ended = inside("evidence", "verify", packed)
    assert ended.returncode == 1
    assert "is not the file that was packed" in ended.stderr
    path.unlink()
    with pytest.raises(EvidenceError, match="is missing"):
        verify(packed)
    path.write_bytes(sound)
    shutil.copy(path, packed / "other.parquet")
    with pytest.raises(EvidenceError, match=r"other\.parquet is not in MANIFEST\.json"):
        verify(packed)
    (packed / "other.parquet").unlink()
    manifest = json.loads((packed / "MANIFEST.json").read_text())
    manifest["files"]["small-paper.parquet"]["rows"] += 1
    (packed / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(EvidenceError, match="does not have the number of rows that is in MANIFEST"):
        verify(packed)


def test_a_log_that_was_edited_is_not_packed(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    run = next(run for run in Store(tmp_path / "store").runs() if run.spec.budget == 30)
    text = run.log_path.read_text()
    run.log_path.write_text(text.replace('"bp": 5', '"bp": 6', 1))
    with pytest.raises(EvidenceError, match="its log has changed since the run ended"):
        pack(tmp_path / "store", tmp_path / "evidence")


def test_a_store_without_runs_cannot_be_packed(tmp_path):
    with pytest.raises(EvidenceError, match="nothing to pack"):
        pack(tmp_path / "nothing", tmp_path / "evidence")


def test_a_packed_folder_opens_as_a_store(store, packed):
    with opened(packed) as found:
        assert len(Store(found).runs()) == 9
    with opened(store) as found:
        assert found == store


def test_timings_are_packed_too(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    (tmp_path / "store" / "table-2").mkdir()
    (tmp_path / "store" / "table-2" / "a-demo-cpu.json").write_text('{"problem": "a"}\n')
    pack(tmp_path / "store", tmp_path / "evidence")
    unpack(tmp_path / "evidence", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "table-2" / "a-demo-cpu.json").read_text()) == {
        "problem": "a"
    }
    (tmp_path / "store" / "table-2" / "a-demo-cpu.json").rename(
        tmp_path / "store" / "table-2" / "b-demo-cpu.json"
    )
    pack(tmp_path / "store", tmp_path / "evidence")
    packed = json.loads((tmp_path / "evidence" / "table-2.json").read_text())
    assert sorted(packed) == ["a-demo-cpu.json", "b-demo-cpu.json"], "timings are not lost"
    verify(tmp_path / "evidence")


def test_the_commands_pack_verify_and_unpack(store, tmp_path):
    ended = inside("evidence", "pack", store, "--to", tmp_path / "evidence")
    assert ended.returncode == 0, ended.stderr
    assert "9 runs, 5 of them thinned" in ended.stdout
    assert (
        "all unchanged since they were packed"
        in inside("evidence", "verify", tmp_path / "evidence").stdout
    )
    ended = inside("evidence", "unpack", tmp_path / "evidence", "--to", tmp_path / "again")
    assert "9 runs" in ended.stdout


def test_records_with_keys_in_different_orders_are_refused(tmp_path):
    """A log whose keys change their order could not be restored byte for byte."""
    store = Store(tmp_path / "store")
    spec = make_spec()
    records = records_of(spec, lambda share: 1.0, points=3, extra=lambda share: share)
    records[1] = dict(reversed(records[1].items()))
    put(store, spec, records)
    from steptuned.lab.evidence import _about, _records

    run = folder_of(store, spec)
    with pytest.raises(EvidenceError, match="not in one order"):
        _records(run, _about(run, spec, thinned=False))


def test_all_commands_read_a_packed_folder_like_a_store(store, packed, tmp_path, monkeypatch):
    for command in ("show", "claims"):
        there, here = (inside(command, folder) for folder in (store, packed))
        assert here.returncode == 0, here.stderr
        assert here.stdout.splitlines()[-1] == there.stdout.splitlines()[-1]
    assert inside("export", packed, "--csv", tmp_path / "all.csv").returncode == 0
    assert len((tmp_path / "all.csv").read_text().splitlines()) > 40
    ended = inside("report", packed, "--to", tmp_path / "page")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "page" / "index.html").exists()
    pages = []
    for folder in (store, packed):
        page = tmp_path / f"of {folder.name}" / "results.md"
        ended = inside("results", folder, "--to", page)
        assert ended.returncode == 0, ended.stderr
        pages.append(page.read_text().split("\n", 3)[3])
        assert (page.parent / "figures" / "small-paper.png").exists()
    assert pages[0] == pages[1], "except for the line with the command"
    assert "### small, scale paper" in pages[0]
    assert [path.name for path in packed.iterdir() if path.is_dir()] == [], (
        "nothing is written beside the evidence"
    )
