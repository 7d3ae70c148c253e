"""Processes that tests have started, orphans included, found by a mark in their environment."""

import os
import time
from pathlib import Path

MARK = "STEPTUNED_TEST_MARK"
PATIENCE = 1800.0
"""Seconds after which a test gives up on a process that hangs. A busy machine needs far less."""
HELPERS = ("loky", "forkserver", "resource_tracker")
"""Processes that Python keeps for reuse and that end with their parent."""


def marked(mark):
    """The other live processes with this mark, and their commands."""
    wanted = f"{MARK}={mark}".encode()
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    commands = {
        pid: _read(pid, "cmdline")
        for pid in pids
        if pid != os.getpid() and wanted in _read(pid, "environ")
    }
    return {
        pid: b" ".join(words).decode() for pid, words in commands.items() if words != [b""]
    }  # a zombie has none


def _read(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile, or is not ours
        return [b""]


def left_behind(mark):
    """Those that would outlive this process, or that it no longer tracks."""
    return {
        pid: command
        for pid, command in marked(mark).items()
        if not (is_descendant(pid) and any(name in command for name in HELPERS))
    }


def workers_of(sweep, mark):
    """The worker processes of a sweep.

    A process that a worker has just forked, to start a compiler for instance, carries the
    worker's command line until it executes its own, so only the sweep's children count.
    """
    return [
        pid
        for pid, command in marked(mark).items()
        if "LokyProcess" in command and parent_of(pid) == sweep
    ]


def parent_of(pid):
    """The parent's process ID; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_descendant(pid):
    while pid > 1:
        pid = parent_of(pid)
        if pid == os.getpid():
            return True
    return False


def wait_until_none(found):
    """Wait until there is no such process. Returns those that are left."""
    deadline = time.monotonic() + PATIENCE
    while (left := found()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
