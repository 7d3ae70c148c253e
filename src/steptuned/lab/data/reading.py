"""Read data sets into tensors. Checksums are verified first, and nothing is unpickled."""

import functools
import gzip
import hashlib
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steptuned.lab.data.sets import DataError, DataSet, File, find

LABEL_BYTES = {"cifar-10": 1, "cifar-100": 2}
IDX_DIMENSIONS = {2049: 1, 2051: 3}
MISSING = "is missing"


@dataclass(frozen=True, eq=False)
class Images:
    """A data set in memory: images uint8 [N, C, H, W], labels int64 [N], on the CPU.

    All callers of `load` share it, so change only copies.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def folder() -> Path:
    """The folder of the data sets: STEPTUNED_DATA, or else the cache folder of this system."""
    chosen = os.environ.get("STEPTUNED_DATA")
    if chosen:
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("steptuned"))


def load(name: str) -> Images:
    """A data set of `folder()`. It is verified and read once, then kept in memory."""
    return _load(find(name), folder().resolve())


def fault(path: Path, file: File) -> str | None:
    """What is wrong with a file, as the rest of a sentence after its name. None if it is intact."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            return "is not a file"
        if size < file.size:
            return f"is truncated: {size} of {file.size} bytes"
        if size > file.size:
            return f"is too long: {size} bytes, not {file.size}"
        if sha256(path) != file.sha256:
            return "is not the official file (sha256 differs)"
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------ formats


def read_cifar(path: Path, label_bytes: int, pixels: int, classes: int) -> tuple[Tensor, Tensor]:
    """Pixels [N, pixels] and labels [N] of CIFAR's binary format.

    Each row has its label bytes, the finest label last, and then the pixels.
    """
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    length = label_bytes + pixels
    if not len(content) or len(content) % length:
        raise _foreign(
            path, f"{len(content)} bytes are not a whole number of rows of {length} bytes"
        )
    rows = torch.from_numpy(content).reshape(-1, length)
    labels = rows[:, label_bytes - 1].long()
    _check_labels(path, labels, classes)
    return rows[:, label_bytes:].contiguous(), labels


def read_idx(path: Path) -> Tensor:
    """The bytes of a gzipped idx file: magic number and sizes, big-endian, then the values."""
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _foreign(path, f"it is not gzip ({error})") from None
    except EOFError:
        raise _foreign(path, "it is truncated") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    magic = int.from_bytes(content[:4], "big")
    if magic not in IDX_DIMENSIONS:
        raise _foreign(
            path, f"its magic number is {magic}, not one of {', '.join(map(str, IDX_DIMENSIONS))}"
        )
    start = 4 + 4 * IDX_DIMENSIONS[magic]
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) != start + math.prod(sizes):
        raise _foreign(
            path,
            f"{len(content)} bytes are not a header of {start} "
            f"and {' x '.join(map(str, sizes))} values",
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(sizes).copy())


def _check_labels(path: Path, labels: Tensor, classes: int) -> None:
    if len(labels) and labels.max() >= classes:
        raise _foreign(path, f"label {int(labels.max())} is not below {classes}")


def _foreign(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is not in the format of its data set: {reason}; replace it with the official file"
    )


# ---------------------------------------------------------------------------------------- data sets


@functools.cache
def _load(data: DataSet, where: Path) -> Images:
    way_out = f"run `steptuned data get {data.name}`, or set STEPTUNED_DATA to a folder that has it"
    for file in data.files:
        path = where / data.folder / file.name
        wrong = fault(path, file)
        if wrong == MISSING and not os.path.isdir(path.parent):
            raise DataError(
                f"there is no {data.name} in {where} (no folder {data.folder}); {way_out}"
            )
        if wrong:
            raise DataError(f"{path} {wrong}; {way_out}")
    return Images(
        *_part(data, where, data.train, data.train_rows),
        *_part(data, where, data.test, data.test_rows),
    )


def _part(data: DataSet, where: Path, files: tuple[File, ...], rows: int) -> tuple[Tensor, Tensor]:
    paths = [where / data.folder / file.name for file in files]
    if data.format == "idx":
        images, labels = read_idx(paths[0]).unsqueeze(1), read_idx(paths[1]).long()
        _check_labels(paths[1], labels, data.classes)
    else:
        parts = [
            read_cifar(path, LABEL_BYTES[data.format], data.pixels, data.classes) for path in paths
        ]
        images = torch.cat([pixels for pixels, _ in parts]).reshape(-1, *data.shape)
        labels = torch.cat([labels for _, labels in parts])
    for path, tensor, shape in (
        (paths[0], images, (rows, *data.shape)),
        (paths[-1], labels, (rows,)),
    ):
        if tensor.shape != shape:
            raise _foreign(path, f"its shape is {list(tensor.shape)}, not {list(shape)}")
    return images, labels
