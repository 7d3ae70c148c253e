"""Stores with made-up runs, for tests of what reads stores."""

import math

from steptuned.lab import paired_runs
from steptuned.lab.claims.criteria import criteria_hash
from steptuned.lab.experiment import Entry
from steptuned.lab.results import Results
from steptuned.lab.run import folder_of
from steptuned.lab.search import stages
from steptuned.lab.store import Log, Store, write_json

ENVIRONMENT = {
    "steptuned": "0",
    "commit": "abc",
    "criteria": criteria_hash(),
    "torch": "2",
    "python": "3",
    "cpu": "made up",
    "device": "cpu",
    "threads": 1,
}


def records_of(spec, loss, points=40, **more):
    """A log whose loss, and whatever else is given, is a function of the share of the budget."""
    shares = [i / points for i in range(points + 1)]
    return [
        {
            "bp": round(share * spec.budget),
            "batches": round(share * spec.budget),
            "samples": round(share * spec.budget),
            "seconds": share,
            "loss": loss(share),
            **{key: value(share) for key, value in more.items()},
        }
        for share in shares
    ]


def put(store, spec, records, status="finished", environment=ENVIRONMENT):
    run = folder_of(store, spec)
    run.log_path.unlink(missing_ok=True)
    log = Log(run.log_path)
    for record in records:
        log.append(record)
    write_json(run.folder / "environment.json", environment)
    run.finish(status, log, records[-1])
    log.close()
    return run


def diverge(folder, run, at=1.0, **last):
    """Let a run diverge at this share of its log, with these values in its last record."""
    records = run.records()
    records = records[: round(at * len(records))]
    end = {**records[-1], "loss": math.nan, **last}
    end = {key: value for key, value in end.items() if value is not None}
    put(Store(folder), run.spec, [*records, end], "diverged")


def fill(folder, name, records, scale="demo"):
    """Store the runs of an experiment, with the records that a function returns for each spec.

    If it returns none, the run is left out.
    """
    results = Results(Store(folder))
    plan = stages(paired_runs.experiment_named(name, scale), results)
    try:
        while True:
            for spec in next(plan)[1]:
                if (made := records(spec)) is not None:
                    put(results.store, spec, made)
    except StopIteration as end:
        return end.value


CONTROLS = {
    "sgd": ("sgd", {}),
    "step-tuned-sgd": ("step-tuned-sgd", {}),
    "constant-05": ("step-tuned-sgd", {"bounds": [[0.5, 0.5]], "nu": [0.5]}),
    "constant-2": ("step-tuned-sgd", {"bounds": [[2.0, 2.0]]}),
    "finer": ("sgd", {"lr": [0.03]}),
    "twice": ("sgd", {"uses": [2]}),
}


class OnePointGrids:
    """An experiment of the package with one point in every grid, so that stores are small.

    Use it instead of :func:`steptuned.lab.paired_runs.experiment_named`.
    """

    def __init__(self, seeds=5, instances=20):
        self.seeds, self.instances, self.seeds_per_instance = seeds, instances, 1
        self._named = paired_runs.experiment_named

    def __call__(self, name, scale):
        real = self._named(
            name.replace("controls-f", "figure-6f").replace("controls-a", "figure-4a"), scale
        )
        entries = [self._one_point(entry) for entry in real.entries]
        if name.startswith("controls"):
            entries = [self._control(real.entries[0], control) for control in CONTROLS]
        counts = {"seeds": self.seeds, "first_seed": 1}
        if real.instances > 1:
            instances = self.instances + (real.tune == "first")
            counts = {"seeds": self.seeds_per_instance, "first_seed": 1, "instances": instances}
        return real.model_copy(update={"name": name, "entries": entries, **counts})

    def _one_point(self, entry):
        return entry.model_copy(
            update={"axes": {key: values[:1] for key, values in entry.axes.items()}}
        )

    def _control(self, like, name):
        from steptuned.lab.methods import METHODS

        method, axes = CONTROLS[name]
        defaults = {key: [value] for key, value in METHODS[method].defaults.items()}
        return Entry(name=name, method=method, label=name, axes={**defaults, "lr": [0.1], **axes})
