"""Data sets: small ones in the official formats, from a real server.

The official ones are tested too if STEPTUNED_DATA has them.
"""

import errno
import gzip
import hashlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from processes import PATIENCE
from specs import on_real_data
from steptuned.lab.data import commands, fetching
from steptuned.lab.data.fetching import fetch
from steptuned.lab.data.reading import folder, load, read_cifar, read_idx
from steptuned.lab.data.sets import SETS, DataError, DataSet, Download, File

LONG = np.random.default_rng(9).bytes(300_000)  # so that a download has a middle


# ---------------------------------------------------------------------------------- small data sets


def file_of(name, content):
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def cifar_bytes(rows, label_bytes, classes, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, min(classes, 20), (rows, label_bytes))
    labels[:, -1] = rng.integers(0, classes, rows)
    pixels = rng.integers(0, 256, (rows, 3 * 4 * 4))
    return np.concatenate([labels, pixels], 1).astype(np.uint8).tobytes()


def idx_bytes(values):
    header = (2048 + values.ndim).to_bytes(4, "big") + b"".join(
        size.to_bytes(4, "big") for size in values.shape
    )
    return gzip.compress(header + values.astype(np.uint8).tobytes(), mtime=0)


def tar_bytes(*members):
    """A .tar.gz of (name, content) pairs and ready TarInfos."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for member in members:
            info, content = (
                (member, b"")
                if isinstance(member, tarfile.TarInfo)
                else (tarfile.TarInfo(member[0]), member[1])
            )
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(output.getvalue(), mtime=0)


class Small:
    """A small data set: its description, and the bytes of its files and downloads."""

    def __init__(self, name, form, folder_name, shape, train, test, classes, rows):
        self.name, self.folder = name, folder_name
        self.files = {**train, **test}
        self.data = DataSet(
            name=name,
            folder=folder_name,
            format=form,
            shape=shape,
            classes=classes,
            train_rows=rows[0],
            test_rows=rows[1],
            train=tuple(file_of(*item) for item in train.items()),
            test=tuple(file_of(*item) for item in test.items()),
            downloads=(),
        )
        self.archive = tar_bytes(
            *((f"{folder_name}/{file}", content) for file, content in self.files.items()),
            ("readme", LONG),
        )

    def write(self, where):
        (where / self.folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (where / self.folder / name).write_bytes(content)

    def paths(self, where):
        return {where / self.folder / name: content for name, content in self.files.items()}

    def offer(self, *urls, archive=None):
        """Downloads from these addresses: the archive, or each file for the format of MNIST."""
        if self.data.format == "idx":
            offers = [
                Download(file_of(*f), tuple(url + f[0] for url in urls), (f[0],))
                for f in self.files.items()
            ]
        else:
            offers = [
                Download(file_of("small.tar.gz", archive or self.archive), urls, tuple(self.files))
            ]
        SETS[self.name] = replace(self.data, downloads=tuple(offers))


def small_cifar(name):
    label_bytes, classes = {"cifar-10": (1, 10), "cifar-100": (2, 100)}[name]
    train = {f"batch_{i}.bin": cifar_bytes(5, label_bytes, classes, i) for i in (1, 2)}
    test = {"test.bin": cifar_bytes(3, label_bytes, classes, 3)}
    return Small(name, name, f"{name}-bin", (3, 4, 4), train, test, classes, (10, 3))


def small_mnist():
    rng = np.random.default_rng(0)
    parts = []
    for part, rows in (("train", 6), ("t10k", 2)):
        images, labels = rng.integers(0, 256, (rows, 5, 4)), rng.integers(0, 10, rows)
        parts.append(
            {f"{part}-images.gz": idx_bytes(images), f"{part}-labels.gz": idx_bytes(labels)}
        )
    return Small("mnist", "idx", "mnist", (1, 5, 4), *parts, 10, (6, 2))


@pytest.fixture(params=["cifar-10", "cifar-100", "mnist"])
def small(request, monkeypatch):
    made = small_mnist() if request.param == "mnist" else small_cifar(request.param)
    monkeypatch.setitem(SETS, made.name, made.data)
    return made


@pytest.fixture
def cifar(monkeypatch):
    made = small_cifar("cifar-10")
    monkeypatch.setitem(SETS, made.name, made.data)
    return made


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder of data sets, to which STEPTUNED_DATA is set."""
    monkeypatch.setenv("STEPTUNED_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def only_whole_files(small, home):
    """Check that the folder of a data set has only complete files and the lock."""
    left = {path for path in (home / small.folder).rglob("*") if path.name != ".lock"}
    return all(path.read_bytes() == small.paths(home).get(path) for path in left)


# ------------------------------------------------------------------------------------------ reading


def test_small_sets_are_read_value_for_value(small, home):
    small.write(home)
    images = load(small.name)
    for part, x, y in (
        ("train", images.train, images.train_labels),
        ("test", images.test, images.test_labels),
    ):
        if small.name == "mnist":
            raw = [gzip.decompress(small.files[file.name]) for file in getattr(small.data, part)]
            pixels, labels = list(raw[0][16:]), list(raw[1][8:])
        else:
            extra = {"cifar-10": 1, "cifar-100": 2}[small.name]
            raw = b"".join(small.files[file.name] for file in getattr(small.data, part))
            rows = [raw[i : i + extra + 48] for i in range(0, len(raw), extra + 48)]
            pixels, labels = (
                [value for row in rows for value in row[extra:]],
                [row[extra - 1] for row in rows],
            )
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64
        assert x.shape == (len(labels), *small.data.shape)
        assert x.flatten().tolist() == pixels
        assert y.tolist() == labels


def test_a_data_set_is_read_once_per_folder(small, home, tmp_path, monkeypatch):
    small.write(home)
    first = load(small.name)
    shutil.rmtree(home)
    assert load(small.name) is first
    small.write(tmp_path / "other")
    monkeypatch.setenv("STEPTUNED_DATA", str(tmp_path / "other"))
    assert load(small.name) is not first


def test_the_folder_is_steptuned_data_or_the_cache_of_the_user(monkeypatch):
    monkeypatch.setenv("STEPTUNED_DATA", "~/somewhere")
    assert folder() == Path.home() / "somewhere"
    for unset in (
        lambda: monkeypatch.setenv("STEPTUNED_DATA", ""),
        lambda: monkeypatch.delenv("STEPTUNED_DATA"),
    ):
        unset()
        assert folder() == Path(pooch.os_cache("steptuned"))


def cut(path):
    path.write_bytes(path.read_bytes()[:20])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_a_folder_of_it(path):
    path.unlink()
    path.mkdir()


def make_a_loop_of_it(path):
    path.unlink()
    path.symlink_to(path.name)


DAMAGES = [
    (cut, r"is truncated: 20 of \d+ bytes"),
    (lengthen, r"is too long: \d+ bytes, not \d+"),
    (flip_one_bit, r"is not the official file \(sha256 differs\)"),
    (Path.unlink, "is missing"),
    (make_a_folder_of_it, "is not a file"),
    (make_a_loop_of_it, "cannot be read: Too many levels of symbolic links"),
]


@pytest.mark.parametrize(("damage", "diagnosis"), DAMAGES)
def test_a_damaged_file_is_reported_with_the_fault_and_a_solution(damage, diagnosis, small, home):
    small.write(home)
    path = home / small.folder / list(small.files)[-1]
    damage(path)
    with pytest.raises(DataError) as caught:
        load(small.name)
    way_out = (
        f"; run `steptuned data get {small.name}`, or set STEPTUNED_DATA to a folder that has it"
    )
    assert re.fullmatch(re.escape(f"{path} ") + diagnosis + re.escape(way_out), str(caught.value))


def test_a_folder_without_the_data_set_is_reported(cifar, home, monkeypatch):
    for where in (home, home / "nowhere"):
        monkeypatch.setenv("STEPTUNED_DATA", str(where))
        with pytest.raises(
            DataError,
            match=rf"^there is no cifar-10 in {where} \(no folder cifar-10-bin\); "
            "run `steptuned data get",
        ):
            load("cifar-10")


def test_a_failed_load_is_tried_again(cifar, home):
    with pytest.raises(DataError):
        load("cifar-10")
    cifar.write(home)
    assert len(load("cifar-10").train) == 10


def test_an_unknown_data_set_lists_the_valid_names(tmp_path):
    for use in (load, lambda name: fetch(name, tmp_path)):
        with pytest.raises(
            DataError, match=r"^there is no data set 'imagenet'; valid: cifar-10, cifar-100, mnist$"
        ):
            use("imagenet")


FOREIGN_CIFAR = {
    "0 bytes are not a whole number of rows of 49 bytes": b"",
    "48 bytes are not a whole number of rows of 49 bytes": bytes(48),
    "label 10 is not below 10": bytes(49) + b"\x0a" + bytes(48),
}


@pytest.mark.parametrize("reason", FOREIGN_CIFAR)
def test_a_cifar_file_in_another_format_is_refused(reason, tmp_path):
    (tmp_path / "a.bin").write_bytes(FOREIGN_CIFAR[reason])
    with pytest.raises(
        DataError,
        match=f"a.bin is not in the format of its data set: {reason}; "
        "replace it with the official file",
    ):
        read_cifar(tmp_path / "a.bin", 1, 48, 10)


GOOD_IDX = idx_bytes(np.arange(24).reshape(2, 3, 4))
FOREIGN_IDX = {
    "its magic number is 0, not one of 2049, 2051": b"",
    "it is not gzip (Not a gzipped file": b"plain text",
    "it is truncated": GOOD_IDX[:-9],
    "it is not gzip (Error -3 while decompressing": GOOD_IDX[:10] + b"\xff\xff" + GOOD_IDX[12:],
    "it is not gzip (CRC check failed": GOOD_IDX[:-5] + bytes([GOOD_IDX[-5] ^ 1]) + GOOD_IDX[-4:],
    "its magic number is 3331": gzip.compress(b"\x00\x00\x0d\x03" + bytes(12)),
    "4 bytes are not a header of 8 and 0 values": gzip.compress(b"\x00\x00\x08\x01"),
    "39 bytes are not a header of 16 and 2 x 3 x 4 values": gzip.compress(
        gzip.decompress(GOOD_IDX)[:-1]
    ),
    "41 bytes are not a header of 16 and 2 x 3 x 4 values": gzip.compress(
        gzip.decompress(GOOD_IDX) + b"x"
    ),
}


@pytest.mark.parametrize("reason", FOREIGN_IDX)
def test_an_idx_file_in_another_format_is_refused(reason, tmp_path):
    (tmp_path / "a.gz").write_bytes(FOREIGN_IDX[reason])
    with pytest.raises(
        DataError, match=re.escape(f"a.gz is not in the format of its data set: {reason}")
    ):
        read_idx(tmp_path / "a.gz")


def test_a_good_idx_file_is_read(tmp_path):
    (tmp_path / "a.gz").write_bytes(GOOD_IDX)
    assert read_idx(tmp_path / "a.gz").flatten().tolist() == list(range(24))


@pytest.mark.parametrize("read", [read_idx, lambda path: read_cifar(path, 1, 48, 10)])
def test_a_file_that_cannot_be_opened_is_reported(read, tmp_path):
    with pytest.raises(
        DataError, match=f"^{tmp_path}/a cannot be read: No such file or directory$"
    ):
        read(tmp_path / "a")
    with pytest.raises(DataError, match=f"^{tmp_path} cannot be read: Is a directory$"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"train_rows": 9}, r"its shape is \[10, 3, 4, 4\], not \[9, 3, 4, 4\]"),
        ({"test_rows": 4}, r"its shape is \[3, 3, 4, 4\], not \[4, 3, 4, 4\]"),
        ({"classes": 2}, r"label \d is not below 2"),
    ],
)
def test_files_that_do_not_match_their_data_set_are_refused(change, reason, cifar, home):
    cifar.write(home)
    SETS["cifar-10"] = replace(cifar.data, **change)
    with pytest.raises(DataError, match=reason):
        load("cifar-10")


def test_swapped_images_and_labels_of_mnist_are_refused(home, monkeypatch):
    small = small_mnist()
    small.write(home)
    monkeypatch.setitem(SETS, "mnist", replace(small.data, train=small.data.train[::-1]))
    with pytest.raises(DataError, match="is not in the format of its data set"):
        load("mnist")


def test_reading_does_not_load_the_downloader():
    imports = "import sys, steptuned.lab.data.reading, steptuned.lab.data.fetching"
    code = f"{imports}; assert not {{'pooch', 'requests'}} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "STEPTUNED_DATA": "/"}
    )


# ----------------------------------------------------------------------------------------- a server


class Site:
    """A server whose pages are (status, body, announced length, seconds between blocks)."""

    def __init__(self):
        self.pages = {}
        self.asked = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.asked.append(self.path)
                status, body, length, pause = site.pages.get(self.path, (404, b"not here", 8, 0))
                self.send_response(status)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                step = len(body) if not pause else 30_000
                try:
                    for start in range(0, len(body), step or 1):
                        self.wfile.write(body[start : start + step])
                        time.sleep(pause)
                except OSError:
                    self.close_connection = True  # the client is gone

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.thread.start()

    def page(self, path, body, status=200, length=None, pause=0.0):
        self.pages[path] = (status, body, len(body) if length is None else length, pause)
        return self.url + path

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    site = Site()
    yield site
    site.close()


@pytest.fixture
def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # The port is bound but nobody listens, so nobody else can use it and nobody answers.
        yield f"http://127.0.0.1:{free.getsockname()[1]}/"


# ----------------------------------------------------------------------------------------- fetching


def test_a_downloaded_data_set_can_be_loaded(small, home, site, capfd):
    for name, content in small.files.items():
        site.page("/" + name, content)
    small.offer(site.url + "/" if small.name == "mnist" else site.page("/a.tar.gz", small.archive))
    assert fetch(small.name, home, progress=False) == list(small.files)
    assert {path: path.read_bytes() for path in small.paths(home)} == small.paths(home)
    assert only_whole_files(small, home)
    assert len(load(small.name).train) == small.data.train_rows
    assert capfd.readouterr() == ("", "")


def test_the_first_mirror_with_the_right_file_is_used(cifar, home, site, closed_port):
    wrong = site.page("/wrong", cifar.archive[:-1] + b"x")
    cut_short = site.page("/short", cifar.archive[:100], length=len(cifar.archive))
    broken = site.page("/broken", b"", status=500)
    right = site.page("/right", cifar.archive)
    cifar.offer(
        site.url + "/none", closed_port, wrong, cut_short, broken, right, site.url + "/not-asked"
    )
    assert fetch("cifar-10", home, progress=False) == list(cifar.files)
    assert site.asked == ["/none", "/wrong", "/short", "/broken", "/right"]
    assert only_whole_files(cifar, home)
    assert len(load("cifar-10").train) == 10


def test_if_all_mirrors_fail_each_is_reported_with_its_reason(cifar, home, site, closed_port):
    good, bad = list(cifar.paths(home))[:2]
    cifar.write(home)
    bad.write_bytes(b"damaged")
    before = good.read_bytes()
    urls = [
        site.url + "/none",
        site.page("/broken", b"", status=500),
        site.page("/wrong", b"<html>Please log in</html>"),
        site.page("/short", cifar.archive[:100], length=len(cifar.archive)),
        site.page("/empty", b""),
        closed_port,
        "http://nowhere.invalid/a",
        "nonsense://a",
    ]
    cifar.offer(*urls)
    with pytest.raises(DataError) as caught:
        fetch("cifar-10", home, progress=False)
    wrong = "not the official file (sha256 differs)"
    reasons = [
        "HTTP 404",
        "HTTP 500",
        wrong,
        "the connection broke off",
        wrong,
        "no connection",
        "no connection",
        "InvalidSchema",
    ]
    each = "; ".join(f"{url}: {reason}" for url, reason in zip(urls, reasons, strict=True))
    assert str(caught.value) == (
        f"small.tar.gz could not be fetched ({each}); check the network and try again, "
        f"or put batch_1.bin, batch_2.bin, test.bin into {home / 'cifar-10-bin'} by hand"
    )
    assert good.read_bytes() == before
    assert bad.read_bytes() == b"damaged"
    assert {path.name for path in good.parent.iterdir()} <= {".lock", *cifar.files}


def test_a_mirror_that_does_not_answer_times_out(cifar, home, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT", 0.2)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cifar.offer(f"http://127.0.0.1:{silent.getsockname()[1]}/a")
        began = time.monotonic()
        with pytest.raises(DataError, match=r"/a: no answer in 0\.2 s\)"):
            fetch("cifar-10", home, progress=False)
        assert time.monotonic() - began < 4


def test_intact_files_are_not_downloaded_again_and_nothing_is_written(small, home, site):
    small.write(home)
    small.offer(site.url + "/")

    def state():
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in home.rglob("*")}

    before = state()
    assert fetch(small.name, home, progress=False) == []
    assert site.asked == []
    assert state() == before


def test_only_what_is_missing_or_damaged_is_replaced(small, home, site):
    for name, content in small.files.items():
        site.page("/" + name, content)
    small.offer(site.url + "/" if small.name == "mnist" else site.page("/a.tar.gz", small.archive))
    small.write(home)
    first, second, *others = small.paths(home)
    first.unlink()
    flip_one_bit(second)
    before = {path: path.stat().st_ino for path in others}
    assert fetch(small.name, home, progress=False) == [first.name, second.name]
    assert {path: path.stat().st_ino for path in others} == before
    assert {path: path.read_bytes() for path in small.paths(home)} == small.paths(home)
    assert len(site.asked) == (2 if small.name == "mnist" else 1)


def link(name, kind, target):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_a_hostile_archive_does_no_harm(cifar, home, site, tmp_path):
    cifar.write(home)
    good = home / cifar.folder / "batch_1.bin"
    (home / cifar.folder / "batch_2.bin").unlink()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    expected = f"{cifar.folder}/batch_2.bin"
    hostile = [
        ("../evil", b"evil"),
        (f"{cifar.folder}/../../evil", b"evil"),
        (str(tmp_path / "evil"), b"evil"),
        ("../batch_1.bin", b"evil"),
        ("../batch_2.bin", b"evil"),
        ("batch_2.bin", b"evil"),
        (f"{cifar.folder}/batch_1.bin", b"evil"),
        link(expected, tarfile.SYMTYPE, str(victim)),
        link(expected, tarfile.LNKTYPE, f"{cifar.folder}/batch_1.bin"),
        link(expected, tarfile.DIRTYPE, ""),
        link(expected, tarfile.FIFOTYPE, ""),
    ]
    for members, reason in (
        (hostile, "is missing"),
        ([*hostile, (expected, b"evil")], "is truncated"),
        ([*hostile, (expected, bytes(len(cifar.files["batch_2.bin"])))], "sha256 differs"),
        ([*hostile, (expected, bytes(10_000))], "is too long"),
    ):
        archive = tar_bytes(*members)
        cifar.offer(site.page("/a", archive), archive=archive)
        with pytest.raises(
            DataError, match=rf"small.tar.gz cannot be used, since its {expected} .*{reason}"
        ):
            fetch("cifar-10", home, progress=False)
        assert good.read_bytes() == cifar.files["batch_1.bin"]
        assert not (home / expected).exists()
        assert only_whole_files(cifar, home)
        assert {path.name for path in tmp_path.iterdir()} == {"data", "victim"}
        assert victim.read_bytes() == b"precious"
    archive = tar_bytes(*hostile, (f"./{expected}", cifar.files["batch_2.bin"]))
    cifar.offer(site.page("/a", archive), archive=archive)
    assert fetch("cifar-10", home, progress=False) == ["batch_2.bin"]
    assert only_whole_files(cifar, home)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "victim"}


SPOILT = [
    lambda archive: b"no archive",
    lambda archive: archive[:150],
    lambda archive: archive[:60] + b"\xff" * 300,
    lambda archive: gzip.compress(gzip.decompress(archive)[:700]) + b"garbage",
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_an_archive_that_cannot_be_unpacked_changes_nothing(spoil, cifar, home, site):
    archive = spoil(cifar.archive)
    cifar.offer(site.page("/a", archive), archive=archive)
    with pytest.raises(
        DataError, match=r"^small.tar.gz cannot be unpacked: .*; run the same command again$"
    ):
        fetch("cifar-10", home, progress=False)
    assert only_whole_files(cifar, home)


def test_a_folder_that_cannot_be_written_is_reported(cifar, home, site):
    cifar.offer(site.page("/a", cifar.archive))
    (home / "file").write_text("mine")
    way_out = "make it writable, or choose another folder with --data$"
    for into in (home / "file", home / "file" / "below"):
        with pytest.raises(
            DataError, match=f"^cifar-10 cannot be written to {into}: Not a directory; {way_out}"
        ):
            fetch("cifar-10", into, progress=False)
    assert (home / "file").read_text() == "mine"
    cifar.write(home)
    make_a_folder_of_it(home / cifar.folder / "test.bin")
    with pytest.raises(
        DataError, match=f"^cifar-10 cannot be written to {home}: Is a directory; {way_out}"
    ):
        fetch("cifar-10", home, progress=False)
    with pytest.raises(
        DataError, match=r"^cifar-10 cannot be written to /proc: No such file or directory; "
    ):
        fetch("cifar-10", Path("/proc"), progress=False)


def test_too_little_space_is_reported_before_the_download(cifar, home, site, monkeypatch):
    cifar.offer(site.page("/a", cifar.archive))
    need = len(cifar.archive) + sum(map(len, cifar.files.values()))
    usage = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need - 1))
    with pytest.raises(
        DataError,
        match=r"MB are needed and .* MB are free in .*cifar-10-bin; "
        "free some space, or choose another",
    ):
        fetch("cifar-10", home, progress=False)
    assert site.asked == []
    assert only_whole_files(cifar, home)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need))
    assert fetch("cifar-10", home, progress=False) == list(cifar.files)


def test_space_that_runs_out_while_unpacking_changes_nothing(cifar, home, site, monkeypatch):
    cifar.offer(site.page("/a", cifar.archive))
    cifar.write(home)
    (home / cifar.folder / "test.bin").write_bytes(b"old")

    def full(source, output, length):
        output.write(source.read(10))
        output.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(
        DataError,
        match=f"cifar-10 cannot be written to {home}: no space is left there; free some, or choose",
    ):
        fetch("cifar-10", home, progress=False)
    assert (home / cifar.folder / "test.bin").read_bytes() == b"old"
    assert (home / cifar.folder / "batch_1.bin").read_bytes() == cifar.files["batch_1.bin"]
    assert not (home / cifar.folder / ".part").exists()


# A separate process that downloads the small data set: it can be killed, and given limits.
FETCH = """
import pathlib, resource, sys
sys.path[:0] = {tests!r}
import test_data
from steptuned.lab.data.fetching import fetch
from steptuned.lab.data.sets import DataError
test_data.small_cifar("cifar-10").offer({url!r})
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    fetch("cifar-10", pathlib.Path({home!r}), progress={progress})
except DataError as error:
    sys.exit(str(error))
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


def fetching_process(url, home, limit=0, progress=False):
    tests = [str(folder) for folder in Path(__file__).parents[:2]]
    code = FETCH.format(tests=tests, url=url, home=str(home), limit=limit, progress=progress)
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_a_refused_write_is_reported(cifar, home, site):
    with fetching_process(site.page("/a", cifar.archive), home, limit=300) as process:
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert said.strip().startswith(f"cifar-10 cannot be written to {home}: File too large; ")
    assert only_whole_files(cifar, home)


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:  # gone since it was listed
        return 0


def half_way(url, cifar, home):
    """A process in the middle of a slow download, into a folder where one file is missing."""
    cifar.write(home)
    (home / cifar.folder / "test.bin").write_bytes(b"old")
    process = fetching_process(url, home)
    deadline = time.monotonic() + PATIENCE
    while not any(size_of(path) for path in (home / cifar.folder / ".part").glob("*")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


def test_a_killed_download_changes_no_file_and_the_next_one_succeeds(cifar, home, site):
    with half_way(site.page("/slow", cifar.archive, pause=0.5), cifar, home) as process:
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (home / cifar.folder / ".part").exists()
    assert (home / cifar.folder / "test.bin").read_bytes() == b"old"
    assert (home / cifar.folder / "batch_1.bin").read_bytes() == cifar.files["batch_1.bin"]
    cifar.offer(site.page("/a", cifar.archive))
    assert fetch("cifar-10", home, progress=False) == ["test.bin"]
    assert only_whole_files(cifar, home)
    assert len(load("cifar-10").test) == 3


def test_an_interrupted_download_leaves_nothing_behind(cifar, home, site):
    with half_way(site.page("/slow", cifar.archive, pause=0.5), cifar, home) as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert said.strip() == "interrupted"
    assert not (home / cifar.folder / ".part").exists()
    assert (home / cifar.folder / "test.bin").read_bytes() == b"old"


def test_a_second_download_waits_for_the_first_and_downloads_nothing(cifar, home, site):
    url = site.page("/slow", cifar.archive, pause=0.2)
    with half_way(url, cifar, home) as process:
        cifar.offer(url)
        assert fetch("cifar-10", home, progress=False) == []
        _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (0, "")
    assert site.asked == ["/slow"]
    assert only_whole_files(cifar, home)


def test_progress_is_shown_if_requested(cifar, home, site):
    with fetching_process(site.page("/a", cifar.archive), home, progress=True) as process:
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "100%" in said
    assert "Downloading" not in said


# -------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(commands, "console", Console(width=200))

    def run(*arguments):
        return CliRunner().invoke(commands.app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def all_small(monkeypatch):
    made = [small_cifar("cifar-10"), small_cifar("cifar-100"), small_mnist()]
    for one in made:
        monkeypatch.setitem(SETS, one.name, one.data)
    return made


def test_status_lists_present_missing_and_damaged_data_sets(all_small, home, command, tmp_path):
    ten, hundred, _ = all_small
    ten.write(home)
    hundred.write(home)
    cut(home / hundred.folder / "batch_2.bin")
    (home / hundred.folder / "test.bin").unlink()
    for arguments in (["status"], ["status", "--data", home]):
        done = command(*arguments)
        assert done.exit_code == 0
        lines = {line.split()[0]: " ".join(line.split()) for line in done.stdout.splitlines()}
        assert lines["cifar-10"].startswith("cifar-10 13 ")
        assert lines["cifar-10"].endswith(" MB present")
        assert lines["cifar-100"].endswith(
            "damaged: batch_2.bin is truncated: 20 of 250 bytes; test.bin is missing"
        )
        assert lines["mnist"].endswith(" MB missing")
        assert lines["folder:"] == f"folder: {home}"
    done = command("status", "--data", tmp_path / "[red]nowhere")
    assert done.exit_code == 0
    assert done.stdout.count("missing") == 3
    assert f"folder: {tmp_path}/[red]nowhere" in done.stdout


def test_get_downloads_the_named_data_sets_and_prints_their_folder(
    all_small, home, site, command, tmp_path
):
    ten, hundred, _ = all_small
    for one in (ten, hundred):
        one.offer(site.page(f"/{one.name}", one.archive))
    done = command("get", "cifar-100", "--data", tmp_path / "other")
    assert (done.exit_code, done.stdout) == (
        0,
        f"cifar-100: downloaded, {tmp_path}/other/cifar-100-bin\n",
    )
    done = command("get", "cifar-100", "cifar-10", "cifar-10", "--data", tmp_path / "other")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        f"cifar-100: already present, {tmp_path}/other/cifar-100-bin",
        f"cifar-10: downloaded, {tmp_path}/other/cifar-10-bin",
    ]
    assert only_whole_files(ten, tmp_path / "other")
    assert only_whole_files(hundred, tmp_path / "other")
    assert list(home.iterdir()) == []


def test_get_all_downloads_the_others_if_one_fails_and_exits_with_1(all_small, home, site, command):
    ten, hundred, mnist = all_small
    ten.offer(site.url + "/none")
    hundred.offer(site.page("/hundred", hundred.archive))
    for name, content in mnist.files.items():
        site.page("/" + name, content)
    mnist.offer(site.url + "/")
    done = command("get", "all")
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        f"{name}: downloaded, {home / SETS[name].folder}" for name in ("cifar-100", "mnist")
    ]
    assert done.stderr.startswith(
        f"steptuned: small.tar.gz could not be fetched ({site.url}/none: HTTP 404); "
        "check the network"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("names", [["imagenet"], ["all", "imagenet"], ["mnist", "imagenet"]])
def test_get_of_an_unknown_data_set_lists_the_valid_names_and_downloads_nothing(
    names, home, command
):
    done = command("get", *names)
    assert done.exit_code == 1
    assert (
        done.stderr
        == "steptuned: there is no data set 'imagenet'; valid: all, cifar-10, cifar-100, mnist\n"
    )
    assert list(home.iterdir()) == []


def test_an_interrupted_get_is_reported(cifar, home, command, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "fetch", interrupted)
    done = command("get", "cifar-10")
    assert done.exit_code == 130
    assert (
        done.stderr
        == "steptuned: stopped; complete files are kept, and the same command downloads the rest\n"
    )


# -------------------------------------------------------------------------------- the official data


def test_the_catalogue_of_data_sets_is_consistent():
    for name, data in SETS.items():
        assert data.name == name
        assert sorted(file for download in data.downloads for file in download.files) == sorted(
            file.name for file in data.files
        )
        for download in data.downloads:
            assert all(url.endswith("/" + download.file.name) for url in download.urls)
            assert download.is_archive == download.file.name.endswith(".tar.gz")
        for file in [*data.files, *(download.file for download in data.downloads)]:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
    for name, label_bytes in (("cifar-10", 1), ("cifar-100", 2)):
        data = SETS[name]
        assert sum(file.size for file in data.train) == data.train_rows * (
            label_bytes + data.pixels
        )
        assert sum(file.size for file in data.test) == data.test_rows * (label_bytes + data.pixels)


@on_real_data
@pytest.mark.parametrize(
    ("name", "shape", "first_train", "first_test"),
    [
        ("cifar-10", (3, 32, 32), [6, 9, 9, 4, 1, 1, 2, 7, 8, 3], [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]),
        ("cifar-100", (3, 32, 32), [19, 29, 0, 11, 1], [49, 33, 72, 51, 71]),
        ("mnist", (1, 28, 28), [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]),
    ],
)
def test_the_official_data_have_their_known_shapes_and_labels(name, shape, first_train, first_test):
    images, data = load(name), SETS[name]
    assert data.shape == shape
    for x, y, rows, first in (
        (images.train, images.train_labels, data.train_rows, first_train),
        (images.test, images.test_labels, data.test_rows, first_test),
    ):
        assert x.shape == (rows, *shape)
        assert x.dtype == torch.uint8
        assert (x.min(), x.max()) == (0, 255)
        assert y.dtype == torch.int64
        assert y[: len(first)].tolist() == first
        assert y.unique().tolist() == list(range(data.classes))
        if name != "mnist":
            assert y.bincount().tolist() == [rows // data.classes] * data.classes
    assert load(name) is images


@on_real_data
def test_official_images_are_the_right_way_up_and_their_colours_in_order():
    cifar = load("cifar-10").train
    assert cifar[0, :, 0, 0].tolist() == [59, 62, 63]  # the frog's corner: red, green, blue
    assert cifar[0, :, 0, 1].tolist() == [43, 46, 45]
    assert cifar[0, :, 31, 31].tolist() == [123, 92, 72]
    means = load("cifar-10").train.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(
        means, torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64), atol=5e-5, rtol=0
    )
    mnist = load("mnist").train
    assert mnist[0, 0, 5, 12:16].tolist() == [3, 18, 18, 18]
    assert mnist.double().mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    assert load("mnist").train_labels.bincount().tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
