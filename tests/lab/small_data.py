"""Small data sets in the official formats, with images of the official shapes."""

import gzip
import hashlib
from dataclasses import replace

import numpy as np

from steptuned.lab.data.sets import SETS, File

TRAIN, TEST = 300, 60


def write(folder):
    """Write all small data sets. Returns the value of :data:`SETS` that :func:`use` needs."""
    described = {}
    for name, official in SETS.items():
        parts = (
            ("train", official.train[:1] if "cifar" in name else official.train, TRAIN),
            ("test", official.test, TEST),
        )
        files = {}
        for seed, (part, there, rows) in enumerate(parts):
            contents = _cifar(rows, official, seed) if "cifar" in name else _mnist(rows, seed)
            files[part] = tuple(
                _put(folder / official.folder / f.name, c)
                for f, c in zip(there, contents, strict=True)
            )
        described[name] = replace(official, train_rows=TRAIN, test_rows=TEST, **files)
    return described


def use(sets, folder, environment):
    """Let the laboratory read these data sets."""
    SETS.update(sets)
    environment["STEPTUNED_DATA"] = str(folder)


def _put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return File(path.name, len(content), hashlib.sha256(content).hexdigest())


def _images(rows, channels, size, classes, seed):
    """Noise whose brightness depends on the class, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    noise = rng.integers(0, 120, (rows, channels, size, size))
    return (noise + (130 * labels / classes).astype(int)[:, None, None, None]).astype(
        np.uint8
    ), labels.astype(np.uint8)


def _cifar(rows, official, seed):
    images, labels = _images(rows, 3, 32, official.classes, seed)
    columns = (
        [labels[:, None]] if official.classes == 10 else [labels[:, None] // 5, labels[:, None]]
    )
    return [np.concatenate([*columns, images.reshape(rows, -1)], 1).astype(np.uint8).tobytes()]


def _mnist(rows, seed):
    images, labels = _images(rows, 1, 28, 10, seed)
    return [gzip.compress(_header(a) + a.tobytes()) for a in (images[:, 0], labels)]


def _header(values):
    return (2048 + values.ndim).to_bytes(4, "big") + b"".join(
        size.to_bytes(4, "big") for size in values.shape
    )
