"""The command, on small data sets. Started by torchrun: on_ranks.py PICKLE ARGUMENTS..."""

import os
import pickle
import sys
from pathlib import Path

import small_data

if __name__ == "__main__":
    small_data.use(*pickle.loads(Path(sys.argv.pop(1)).read_bytes()), os.environ)
    from steptuned.__main__ import main

    main()
