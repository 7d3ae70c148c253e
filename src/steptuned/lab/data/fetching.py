"""Download data sets.

Everything is downloaded and unpacked in a `.part` folder next to the files. A file gets its final
name once its checksum is right, so an interrupted download never leaves an incomplete file.
The next download removes what an interrupted one left behind; a lock protects those in progress.
"""

import errno
import gzip
import os
import shutil
import tarfile
import zlib
from pathlib import Path

import filelock

from steptuned.lab.data.reading import fault
from steptuned.lab.data.sets import DataError, DataSet, Download, File, find

TIMEOUT = 30.0
CHUNK = 1 << 16


def fetch(name: str, into: Path, progress: bool = True) -> list[str]:
    """Download a data set into a folder. Returns the names of the files that were downloaded."""
    data = find(name)
    home = into / data.folder
    if not _wanted(data, home):  # nothing to write: the folder may be read-only
        return []
    try:
        home.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(home / ".lock"):
            wanted = _wanted(data, home)
            work = home / ".part"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                _fetch(data, wanted, work, progress)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = (
            "no space is left there; free some"
            if full
            else f"{error.strerror or error}; make it writable"
        )
        raise DataError(
            f"{name} cannot be written to {into}: {reason}, or choose another folder with --data"
        ) from None
    return list(wanted)


def _wanted(data: DataSet, home: Path) -> dict[str, File]:
    return {file.name: file for file in data.files if fault(home / file.name, file)}


def _fetch(data: DataSet, wanted: dict[str, File], work: Path, progress: bool) -> None:
    downloads = [download for download in data.downloads if wanted.keys() & set(download.files)]
    _check_space(downloads, wanted, work)
    for download in downloads:
        files = [wanted[name] for name in download.files if name in wanted]
        _download(download, work, progress)
        if download.is_archive:
            _unpack(
                work / download.file.name,
                {f"{data.folder}/{file.name}": file for file in files},
                work,
            )
        for file in files:
            os.replace(work / file.name, work.parent / file.name)


def _check_space(downloads: list[Download], wanted: dict[str, File], work: Path) -> None:
    """Refuse before the download rather than in the middle of it."""
    need = sum(file.size for file in wanted.values()) + sum(
        download.file.size for download in downloads if download.is_archive
    )
    free = shutil.disk_usage(work).free
    if free < need:
        sizes = f"{need / 1e6:,.1f} MB are needed and {free / 1e6:,.1f} MB are free"
        raise DataError(
            f"{sizes} in {work.parent}; free some space, or choose another folder with --data"
        )


def _download(download: Download, work: Path, progress: bool) -> None:
    """Download from the first address that has the right file."""
    reasons: list[str] = []
    for url in download.urls:
        reason = _retrieve(url, download.file, work, progress)
        if reason is None:
            return
        reasons.append(f"{url}: {reason}")
    raise DataError(
        f"{download.file.name} could not be fetched ({'; '.join(reasons)}); "
        f"check the network and try again, "
        f"or put {', '.join(download.files)} into {work.parent} by hand"
    )


def _retrieve(url: str, file: File, work: Path, progress: bool) -> str | None:
    """Download a file from one address. Returns why that failed, or None."""
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(progressbar=progress, chunk_size=CHUNK, timeout=TIMEOUT)
    try:
        pooch.retrieve(url, f"sha256:{file.sha256}", file.name, work, downloader=downloader)
    except requests.HTTPError as error:
        return f"HTTP {error.response.status_code}" if error.response is not None else "HTTP error"
    except requests.Timeout:
        return f"no answer in {TIMEOUT:g} s"
    except requests.exceptions.ChunkedEncodingError:
        return "the connection broke off"
    except requests.exceptions.SSLError:
        return "no secure connection"
    except requests.ConnectionError:
        return "no connection"
    except requests.RequestException as error:
        return type(error).__name__
    except ValueError:  # pooch raises it for a wrong checksum
        return "not the official file (sha256 differs)"
    return None


def _unpack(archive: Path, members: dict[str, File], work: Path) -> None:
    """Copy members of a tar archive to their expected names. No path comes from the archive."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                file = members.get(member.name.removeprefix("./"))
                content = tar.extractfile(member) if file and member.isreg() else None
                if file and content:
                    with content, open(work / file.name, "wb") as output:
                        shutil.copyfileobj(content, output, CHUNK)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{archive.name} cannot be unpacked: {error}; run the same command again"
        ) from None
    for name, expected in members.items():
        wrong = fault(work / expected.name, expected)
        if wrong:
            raise DataError(
                f"{archive.name} cannot be used, since its {name} {wrong}; "
                "run the same command again"
            )
