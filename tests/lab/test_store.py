"""Damage on disk is detected and repaired."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import steptuned
from specs import make_spec
from steptuned.lab.run import execute, folder_of
from steptuned.lab.store import TRIES, Died, Run, Store

ENVIRONMENT = {"torch": "of this test"}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def numbers(run):
    """Everything that is logged, except seconds."""
    return [
        {key: value for key, value in record.items() if key != "seconds"}
        for record in run.records()
    ]


def finished(store, **spec):
    run = folder_of(store, make_spec(**spec))
    assert execute(run, ENVIRONMENT) == "finished"
    return run


def test_a_run_leaves_spec_log_environment_and_result(store):
    run = finished(store)
    assert sorted(os.listdir(run.folder)) == [
        "environment.json",
        "lock",
        "log.jsonl",
        "result.json",
        "spec.json",
    ]
    assert run.spec == make_spec()
    assert run.environment() == ENVIRONMENT
    records = run.records()
    assert [record["bp"] for record in records] == list(range(0, 201, 10))
    wanted = {
        "bp",
        "batches",
        "samples",
        "seconds",
        "loss",
        "gamma",
        "curvature",
        "effective lr",
        "raw gamma median",
        "at lower",
    }
    assert wanted <= records[-1].keys()
    assert records[-1]["batches"] == 100
    assert records[-1]["samples"] == 200 * 50
    assert run.status() == "finished"
    assert run.is_sound()
    assert run.last_record() == records[-1]


def test_a_finished_run_is_not_run_again(store):
    run = finished(store)
    before = run.log_path.stat().st_mtime_ns
    assert execute(run, ENVIRONMENT) == "finished"
    assert run.log_path.stat().st_mtime_ns == before


def test_a_diverged_run_is_a_result_and_stops_early(store, monkeypatch):
    from steptuned.lab.problems.regression import Regression

    evaluate = Regression.evaluate
    calls = []

    def broken(self):
        calls.append(1)
        return {**evaluate(self), "loss": float("nan")} if len(calls) > 5 else evaluate(self)

    monkeypatch.setattr(Regression, "evaluate", broken)
    run = folder_of(store, make_spec())
    assert execute(run, ENVIRONMENT) == "diverged"
    assert run.status() == "diverged"
    assert len(run.records()) == 6


def spoil_half_a_line(run):
    with open(run.log_path, "ab") as file:
        file.write(b'{"bp": 9999, "loss": 0.')


def spoil_cut(run):
    with open(run.log_path, "ab") as file:
        file.truncate(run.log_path.stat().st_size - 7)


def spoil_result(run):
    (run.folder / "result.json").write_text('{"status": "fini')


def spoil_gone(run):
    run.log_path.unlink()


@pytest.mark.parametrize("spoil", [spoil_half_a_line, spoil_cut, spoil_result, spoil_gone])
def test_a_damaged_result_is_detected_and_the_run_is_repeated(store, spoil):
    run = finished(store)
    expected = numbers(run)
    spoil(run)
    assert run.status() == "unfinished"
    assert execute(run, ENVIRONMENT) == "finished"
    assert numbers(run) == expected
    assert run.is_sound()


def test_a_log_changed_at_the_same_length_is_not_sound(store):
    run = finished(store)
    content = run.log_path.read_bytes()
    run.log_path.write_bytes(content.replace(b'"bp": 1', b'"bp": 2', 1))
    assert not run.is_sound()


def test_an_incomplete_last_line_is_ignored(store):
    run = finished(store)
    expected = run.records()
    spoil_half_a_line(run)
    assert run.records() == expected
    assert run.last_record() == expected[-1]


def test_an_unreadable_line_is_reported_with_a_solution(store):
    run = finished(store)
    run.log_path.write_bytes(b"{broken\n" + run.log_path.read_bytes())
    with pytest.raises(ValueError, match=r"cannot be read .*: delete .* and run it again"):
        run.records()


class Stop(KeyboardInterrupt):
    pass


def interrupted(store, monkeypatch, after, **spec):
    """A run that saved a checkpoint before every back-propagation and was then killed."""
    from steptuned.lab.driver import Driver

    run = folder_of(store, make_spec(**spec))
    advance, calls = Driver.advance, []

    def until(self):
        calls.append(1)
        if len(calls) > after:
            raise Stop
        advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "advance", until)
        with pytest.raises(Stop):
            execute(run, ENVIRONMENT, checkpoint_seconds=0.0)
    return run


@pytest.mark.parametrize("after", [1, 2, 57, 58, 199])
@pytest.mark.parametrize(
    "method", ["step-tuned-sgd", "sgd", "adam", "expected-gv", "armijo", "step-tuned-gd"]
)
def test_a_run_resumes_with_the_same_numbers_even_between_the_passes(
    store, tmp_path, monkeypatch, method, after
):
    expected = numbers(finished(Store(tmp_path / "undisturbed"), method=method))
    run = interrupted(store, monkeypatch, after, method=method)
    assert run.status() == "unfinished"
    assert execute(run, ENVIRONMENT) == "finished"
    assert numbers(run) == expected
    assert not (run.folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("key", ["sources", "commit", "torch", "kernel", "threads"])
def test_a_run_continued_by_other_code_says_so(store, key):
    begun, other = ENVIRONMENT | {key: "first", "platform": "A"}, ENVIRONMENT | {key: "second"}
    run = folder_of(store, make_spec())
    for environment in (begun, begun | {"platform": "B"}, other, other):
        with run.claim(environment):
            pass
    assert run.environment() == {**begun, "resumed in": [other]}


def test_the_environment_tells_apart_edits_that_no_commit_has(tmp_path):
    edited = tmp_path / "edited"
    shutil.copytree(Path(steptuned.__file__).parent, edited / "steptuned")
    ask = (
        "from steptuned.lab.run import environment_now; print(environment_now('cpu', 1)['sources'])"
    )

    def sources():
        environment = {**os.environ, "PYTHONPATH": str(edited), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", ask]
        return subprocess.run(command, env=environment, check=True, capture_output=True).stdout

    before = sources()
    assert before == sources()
    with open(edited / "steptuned" / "rule.py", "a") as file:
        file.write("# another line\n")
    assert before != sources()


@pytest.mark.parametrize("problem", ["digits"])
@pytest.mark.parametrize("after", [25, 26])
def test_a_network_resumes_with_the_same_numbers(store, tmp_path, monkeypatch, problem, after):
    spec = {"problem": problem, "budget": 46, "log_every": 5}
    expected = numbers(finished(Store(tmp_path / "undisturbed"), **spec))
    run = interrupted(store, monkeypatch, after, **spec)
    assert execute(run, ENVIRONMENT) == "finished"
    assert numbers(run) == expected


@pytest.mark.parametrize("what", ["cut", "foreign", "log behind", "log changed"])
def test_a_checkpoint_that_does_not_match_is_not_used(store, tmp_path, monkeypatch, what):
    expected = numbers(finished(Store(tmp_path / "undisturbed")))
    run = interrupted(store, monkeypatch, 120)
    path = run.folder / "checkpoint.pt"
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "foreign":
        torch.save({"weights": torch.ones(2)}, path)
    elif what == "log behind":
        with open(run.log_path, "ab") as file:
            file.truncate(20)
    else:
        run.log_path.write_bytes(run.log_path.read_bytes().replace(b'"bp": 10', b'"bp": 11', 1))
    assert execute(run, ENVIRONMENT) == "finished"
    assert numbers(run) == expected


def test_untrusted_bytes_are_never_unpickled(store, tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    run = interrupted(store, monkeypatch, 50)
    torch.save({"problem": Evil()}, run.folder / "checkpoint.pt")
    assert execute(run, ENVIRONMENT) == "finished"
    assert not (tmp_path / "evil").exists()


def _execute(folder):
    torch.set_num_threads(1)
    execute(Run(folder), ENVIRONMENT)


def test_two_processes_never_write_the_same_run(store, tmp_path, processes):
    spec = {"budget": 2000}
    expected = numbers(finished(Store(tmp_path / "alone"), **spec))
    run = folder_of(store, make_spec(**spec))
    children = [processes.Process(target=_execute, args=(run.folder,)) for _ in range(3)]
    for child in children:
        child.start()
    seen = set()
    while any(child.is_alive() for child in children):
        seen.add(run.status())
        time.sleep(0.02)
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert numbers(run) == expected
    assert run.is_sound()
    assert "running" in seen


def _die(folder):
    with Run(folder).claim(ENVIRONMENT):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("forgiven", [False, True])
def test_a_run_whose_process_died_three_times_is_given_up_until_its_failures_are_cleared(
    store, processes, forgiven
):
    run = folder_of(store, make_spec())
    for deaths in range(TRIES):
        child = processes.Process(target=_die, args=(run.folder,))
        child.start()
        child.join()
        assert run.claimant() == {"host": socket.gethostname(), "pid": child.pid, "deaths": deaths}
    if forgiven:
        run.fail("for whatever reason")
        run.clear_failures()
        assert run.failure() is None
    else:
        with pytest.raises(Died, match="its process died 3 times"):
            execute(run, ENVIRONMENT)
    assert execute(run, ENVIRONMENT) == "finished"


def test_a_complete_run_is_never_given_up(store):
    run = finished(store)
    (run.folder / "running.json").write_text(
        '{"pid": 1, "deaths": 2}'
    )  # killed between its result and its end
    assert execute(run, ENVIRONMENT) == "finished"
    assert run.claimant() is None


def test_the_failures_of_a_running_run_are_not_cleared(store):
    run = folder_of(store, make_spec())
    with run.claim(ENVIRONMENT):
        run.clear_failures()
        assert run.claimant()["pid"] == os.getpid()


def test_files_are_replaced_atomically(store):
    run = finished(store)
    result = json.loads((run.folder / "result.json").read_text())
    assert result["sha256"] == hashlib.sha256(run.log_path.read_bytes()).hexdigest()
    assert not list(run.folder.glob("*.tmp"))


def test_different_experiments_of_one_name_are_kept_and_more_seeds_replace(tmp_path):
    store = Store(tmp_path)
    content = {"name": "figure-9", "seeds": 3, "options": {}, "title": "old"}
    store.remember("figure-9", "demo", [content], "first")
    store.remember("figure-9", "demo", [{**content, "seeds": 5, "title": "new"}], "second")
    assert [json.loads(path.read_text())["command"] for path in store.experiment_files()] == [
        "second"
    ]
    store.remember("figure-9", "demo", [{**content, "options": {"precision": "bfloat16"}}], "third")
    assert [json.loads(path.read_text())["command"] for path in store.experiment_files()] == [
        "second",
        "third",
    ]


def test_an_experiment_stored_under_its_older_name_is_replaced(tmp_path):
    store = Store(tmp_path)
    content = {"name": "figure-9", "seeds": 3}
    for scale in ("demo", "paper"):
        write_json_in(
            tmp_path / "experiments" / f"figure-9-{scale}.json",
            {"experiments": [content], "command": "older"},
        )
    store.remember("figure-9", "demo", [content], "newer")
    assert sorted(json.loads(path.read_text())["command"] for path in store.experiment_files()) == [
        "newer",
        "older",
    ]


def write_json_in(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
