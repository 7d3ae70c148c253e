"""Train a network with BatchNorm briefly and evaluate it, on all ranks and then on each alone.

Started by torchrun.
"""

import json
import os
import pickle
import sys
from pathlib import Path

import small_data


def main():
    import torch

    from steptuned.lab.driver import Driver
    from steptuned.lab.methods import METHODS
    from steptuned.lab.problems import PROBLEMS
    from steptuned.lab.ranks import Ranks, Torchrun

    ranks = Torchrun("cpu")
    options = {"network": "lenet-batchnorm", "batch": 32}
    problem = PROBLEMS["images"].from_dict(options, 0, torch.device("cpu"))
    problem.divide(ranks)
    driver = Driver("sgd", problem, METHODS["sgd"].defaults)
    for _ in range(3):
        driver.advance()
    together = problem.evaluate()
    problem.ranks = Ranks()
    said = ranks.gather((together, problem.evaluate()))
    if ranks.index == 0:
        Path(sys.argv[2]).write_text(json.dumps(said))


if __name__ == "__main__":
    small_data.use(*pickle.loads(Path(sys.argv[1]).read_bytes()), os.environ)
    from steptuned.lab.ranks import closing_process_group

    with closing_process_group():
        main()
