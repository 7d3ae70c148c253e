"""Runs the command on small data sets and records how each rank ends.

Started by torchrun: ending_on_ranks.py PICKLE FOLDER HOW ARGUMENTS... HOW is

well          nothing happens to it
error         rank 1 fails during a run, with a collective pending that no other rank joins
error of 0    the lead does
interrupt     rank 1 gets Ctrl-C there

At its regular end, rank N writes into FOLDER/ended-N which threads of gloo it still has.
"""

import atexit
import os
import pickle
import signal
import sys
from pathlib import Path

import small_data

RANK = int(os.environ["RANK"])


def threads():
    return [
        name
        for task in Path("/proc/self/task").iterdir()
        if "gloo" in (name := (task / "comm").read_text().strip())
    ]


def disturb(how):
    import torch
    import torch.distributed as dist

    from steptuned.lab.driver import Driver

    advance, talk = Driver.advance, dist.new_group

    def keep_group(*arguments, **options):
        disturb.group = talk(*arguments, **options)
        return disturb.group

    def disturbed(driver):
        if driver.batches == 2 and driver.problem.ranks.world_size > 1:
            disturb.pending = dist.all_reduce(torch.zeros(1), group=disturb.group, async_op=True)
            if how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            raise ArithmeticError("made up by the test")
        advance(driver)

    dist.new_group, Driver.advance = keep_group, disturbed


if __name__ == "__main__":
    small, folder, how = sys.argv[1:4]
    del sys.argv[1:4]
    small_data.use(*pickle.loads(Path(small).read_bytes()), os.environ)
    from steptuned.__main__ import main

    if {"well": None, "error": 1, "error of 0": 0, "interrupt": 1}[how] == RANK:
        disturb(how)
    atexit.register(lambda: (Path(folder) / f"ended-{RANK}").write_text(" ".join(threads())))
    main()
