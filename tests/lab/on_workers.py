"""Loaded by workers (`--preload`): they write what they do to files in STEPTUNED_TEST_FOLDER.

asked           a line "identity pid" for each run that a worker was given, before it waits for
                other workers to finish with it
steps-IDENTITY  a line "pid" for each back-propagation of that run
brake-PID       while it exists, that worker makes no back-propagation
deadly-SEED     if it is there, runs of that seed kill their process
"""

import os
import signal
import time
from pathlib import Path

from steptuned.lab import engine, run
from steptuned.lab.driver import Driver

FOLDER = Path(os.environ["STEPTUNED_TEST_FOLDER"])

execute, train, advance = run.execute, run._train, Driver.advance


def append(name, *words):
    with (FOLDER / name).open("a") as file:
        print(*words, os.getpid(), file=file)


def telling_execute(run, *arguments, **options):
    append("asked", run.spec.identity)
    return execute(run, *arguments, **options)


def telling_train(spec, *arguments):
    def telling_advance(self):
        append(f"steps-{spec.identity}")
        while (FOLDER / f"brake-{os.getpid()}").exists():
            time.sleep(0.02)
        advance(self)

    if (FOLDER / f"deadly-{spec.seed}").exists():
        append(f"steps-{spec.identity}")
        os.kill(os.getpid(), signal.SIGKILL)
    Driver.advance = telling_advance
    return train(spec, *arguments)


def dask_setup(worker):
    engine.execute, run._train = telling_execute, telling_train
