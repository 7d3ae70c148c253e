"""Stores with made-up runs, for what is read from them."""

from steptuned.lab.claims import _experiment
from steptuned.lab.experiment import stages
from steptuned.lab.run import folder_of
from steptuned.lab.store import Log, Store, write_json
from steptuned.lab.sweep import Results


def records_of(spec, loss, points=40, **more):
    """A log with this loss, a function of the share of the budget done; likewise whatever else there is."""
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


def put(store, spec, records, status="finished"):
    run = folder_of(store, spec)
    run.log_path.unlink(missing_ok=True)
    log = Log(run.log_path)
    for record in records:
        log.append(record)
    environment = {"steptuned": "0", "commit": "abc", "torch": "2", "python": "3", "cpu": "made up", "device": "cpu", "threads": 1}
    write_json(run.folder / "environment.json", environment)
    run.finish(status, log, records[-1])
    log.close()
    return run


def fill(folder, name, records, scale="demo"):
    """Play an experiment with the records that a function gives for each spec."""
    results = Results(Store(folder))
    plan = stages(_experiment(name, scale), results)
    try:
        while True:
            for spec in next(plan)[1]:
                put(results.store, spec, records(spec))
    except StopIteration as end:
        return end.value
