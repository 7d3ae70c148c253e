"""The data sets: their files with sizes and checksums, and where to download them.

Files and folders have the names of the official archives, so a folder that was filled by hand or by
another library works too.
"""

import math
from dataclasses import dataclass
from typing import Literal

Format = Literal["cifar-10", "cifar-100", "idx"]


class DataError(Exception):
    """A data set cannot be read or downloaded. The message says why and what to do."""


@dataclass(frozen=True)
class File:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Download:
    """A file to download, from the first of its addresses that has the right content.

    `files` are the names of the files it yields: itself, or members of a tar archive.
    """

    file: File
    urls: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def is_archive(self) -> bool:
        return self.files != (self.file.name,)


@dataclass(frozen=True)
class DataSet:
    """Images with labels 0 to classes - 1, in files in `folder`.

    For idx, `train` and `test` are (images, labels).
    """

    name: str
    folder: str
    format: Format
    shape: tuple[int, int, int]
    classes: int
    train_rows: int
    test_rows: int
    train: tuple[File, ...]
    test: tuple[File, ...]
    downloads: tuple[Download, ...]

    @property
    def files(self) -> tuple[File, ...]:
        return self.train + self.test

    @property
    def pixels(self) -> int:
        return math.prod(self.shape)


def find(name: str) -> DataSet:
    if name not in SETS:
        raise DataError(f"there is no data set {name!r}; valid: {', '.join(SETS)}")
    return SETS[name]


def _archive(file: File, contents: tuple[File, ...], *urls: str) -> tuple[Download, ...]:
    return (
        Download(
            file,
            tuple(url + file.name for url in urls),
            tuple(content.name for content in contents),
        ),
    )


def _single_files(files: tuple[File, ...], *urls: str) -> tuple[Download, ...]:
    return tuple(
        Download(file, tuple(url + file.name for url in urls), (file.name,)) for file in files
    )


_CIFAR_10_TRAIN = (
    File(
        "data_batch_1.bin",
        30_730_000,
        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    ),
    File(
        "data_batch_2.bin",
        30_730_000,
        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    ),
    File(
        "data_batch_3.bin",
        30_730_000,
        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    ),
    File(
        "data_batch_4.bin",
        30_730_000,
        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    ),
    File(
        "data_batch_5.bin",
        30_730_000,
        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    ),
)
_CIFAR_10_TEST = (
    File(
        "test_batch.bin",
        30_730_000,
        "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    ),
)
_CIFAR_10_ARCHIVE = File(
    "cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)

_CIFAR_100_TRAIN = (
    File(
        "train.bin", 153_700_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"
    ),
)
_CIFAR_100_TEST = (
    File(
        "test.bin", 30_740_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"
    ),
)
_CIFAR_100_ARCHIVE = File(
    "cifar-100-binary.tar.gz",
    168_513_733,
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)

_MNIST_TRAIN = (
    File(
        "train-images-idx3-ubyte.gz",
        9_912_422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    File(
        "train-labels-idx1-ubyte.gz",
        28_881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
)
_MNIST_TEST = (
    File(
        "t10k-images-idx3-ubyte.gz",
        1_648_877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    File(
        "t10k-labels-idx1-ubyte.gz",
        4_542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)

SETS: dict[str, DataSet] = {
    "cifar-10": DataSet(
        name="cifar-10",
        folder="cifar-10-batches-bin",
        format="cifar-10",
        shape=(3, 32, 32),
        classes=10,
        train_rows=50_000,
        test_rows=10_000,
        train=_CIFAR_10_TRAIN,
        test=_CIFAR_10_TEST,
        downloads=_archive(
            _CIFAR_10_ARCHIVE,
            _CIFAR_10_TRAIN + _CIFAR_10_TEST,
            "https://www.cs.toronto.edu/~kriz/",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
        ),
    ),
    "cifar-100": DataSet(
        name="cifar-100",
        folder="cifar-100-binary",
        format="cifar-100",
        shape=(3, 32, 32),
        classes=100,
        train_rows=50_000,
        test_rows=10_000,
        train=_CIFAR_100_TRAIN,
        test=_CIFAR_100_TEST,
        downloads=_archive(
            _CIFAR_100_ARCHIVE,
            _CIFAR_100_TRAIN + _CIFAR_100_TEST,
            "https://www.cs.toronto.edu/~kriz/",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR100/",
        ),
    ),
    "mnist": DataSet(
        name="mnist",
        folder="mnist",
        format="idx",
        shape=(1, 28, 28),
        classes=10,
        train_rows=60_000,
        test_rows=10_000,
        train=_MNIST_TRAIN,
        test=_MNIST_TEST,
        downloads=_single_files(
            _MNIST_TRAIN + _MNIST_TEST,
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
    ),
}
