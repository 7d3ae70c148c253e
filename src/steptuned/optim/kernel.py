"""The arithmetic of `flat` on the CPU in one pass over the memory: kernel.c, compiled at first use.

The kernel and the torch path agree to rounding. The kernel's own results are bit-identical for any
number of threads. Where it cannot be compiled or loaded, the torch path is used, without a word;
`kernel_status` says so.
"""

import ctypes
import functools
import hashlib
import operator
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: infinities are looked for. No -march=native: the cache may be shared by machines.
# No contraction: the same rounding on every processor.
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-w", "-x", "c", "-")
REALS = {torch.float32: "float", torch.float64: "double"}

UNIT = 16384
"""As in kernel.c: elements that are measured together."""

SHARE = 1 << 18
"""Elements per thread below which another thread does not pay."""


class KernelStatus(NamedTuple):
    """Whether the CPU kernel is used, and why it is or is not."""

    active: bool
    reason: str


def kernel_status() -> KernelStatus:
    """Whether steps on the CPU use the compiled kernel, and why. Compiles it, if that is still to do.

    The environment variable ``STEPTUNED_KERNEL=off`` turns the kernel off.

    Examples:
        >>> import steptuned
        >>> status = steptuned.kernel_status()
        >>> status.active in (True, False)
        True
    """
    kernel, reason = _load(torch.float32)
    return KernelStatus(kernel is not None, reason)


# ------------------------------------------------------------------------------------ calling


class _Call(ctypes.Structure):
    """``struct call`` of kernel.c."""

    _fields_ = (
        ("tensors", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("starts", "p", "g", "g0", "G")),
        *((name, ctypes.c_double) for name in ("sign", "decay", "sign0", "decay0", "ratio0")),
        *((name, ctypes.c_double) for name in ("step", "beta", "share")),
        *((name, ctypes.c_void_p) for name in ("along", "square")),
        ("next", ctypes.c_int64),
    )


class RawGradient(NamedTuple):
    """What turns a gradient of the first pass, held as backward left it, into g0.

    theta_{k+1/2} = theta_k - step g0 and g0 = sign gradient + decay theta_k, so that
    g0 = ratio (sign gradient + decay theta_{k+1/2}): g0 needs no memory of its own.
    """

    sign: float
    decay: float
    ratio: float

    def g0(self, gradient: Tensor, half: Tensor) -> Tensor:
        """g0 as a tensor of its own, rounded as the kernel rounds it. ``half`` is theta_{k+1/2}."""
        if not self.decay:
            return gradient * self.sign
        return half.mul(self.decay).add_(gradient, alpha=self.sign).mul_(self.ratio)


COMPLETE = RawGradient(1.0, 0.0, 1.0)


class Kernel:
    """kernel.c, compiled for one precision."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._first_pass, self._second_pass, self._square = (
            getattr(library, name) for name in ("first_pass", "second_pass", "square")
        )
        for function in (self._first_pass, self._second_pass, self._square):
            function.argtypes, function.restype = [ctypes.POINTER(_Call)], None

    def first_pass(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        step: float,
        *,
        sign: float,
        decay: float,
    ) -> None:
        """theta -= step g0, where g0 = sign gradient + decay theta, kept in ``copies`` if asked."""
        work = _Work(params, grads, sign, decay)
        work.point("g0", copies)
        work.call.step = step
        work.run(self._first_pass)
        torch.autograd.graph.increment_version(params)

    def second_pass(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        held: Sequence[Tensor],
        G: Sequence[Tensor],
        step: float,
        *,
        sign: float,
        decay: float,
        raw: RawGradient,
        beta: float,
        scale: float = 1.0,
    ) -> tuple[float, float]:
        """theta -= step g1 and G = beta G + (1 - beta) scale (g1 - g0). <G, g0> and |g0|^2.

        ``raw`` says how g0 comes from what is held. Where the square of g1 - g0 is not finite over
        a unit, it counts as zero in that unit's G, and the inner product is nan.
        """
        work = _Work(params, grads, sign, decay)
        work.point("g0", held)
        work.point("G", G)
        call = work.call
        call.sign0, call.decay0, call.ratio0 = raw
        call.step, call.beta, call.share = step, beta, (1 - beta) * scale
        work.run(self._second_pass)
        torch.autograd.graph.increment_version([*params, *G])
        return work.total("along"), work.total("square")

    def square(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], *, sign: float, decay: float
    ) -> float:
        """|sign gradient + decay theta|^2."""
        work = _Work(params, grads, sign, decay)
        work.run(self._square)
        return work.total("square")


class _Work:
    """The arguments of one call, and what must stay in memory as long as a thread works on it."""

    def __init__(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], sign: float, decay: float
    ) -> None:
        self._alive: dict[str, Any] = {}
        starts = array("q", (0, *accumulate([p.numel() for p in params])))
        self.elements = starts[-1]
        self.call = _Call(len(params), self._keep("starts", starts), sign=sign, decay=decay)
        self.point("p", params)
        self.point("g", grads)
        empty = bytes(8 * -(-self.elements // UNIT))
        self.call.along = self._keep("along", array("d", empty))
        self.call.square = self._keep("square", array("d", empty))

    def point(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        addresses = array("Q", [0 if t is None else t.data_ptr() for t in tensors])
        setattr(self.call, name, self._keep(name, addresses))
        self._alive[f"{name} tensors"] = tensors

    def _keep(self, name: str, values: "array[Any]") -> int:
        self._alive[name] = values
        return values.buffer_info()[0]

    def run(self, function: Any) -> None:
        """In as many threads as torch would use, as far as there is work for them."""
        others = min(torch.get_num_threads(), self.elements // SHARE) - 1
        started = []
        if others > 0:
            try:
                pool = _pool(others)
                started = [pool.submit(self._work, function) for _ in range(others)]
            except RuntimeError:  # the interpreter is going down, or has no room for a thread
                pass
        self._work(function)
        for future in started:
            if not future.cancel():
                future.result()

    def _work(self, function: Any) -> None:
        function(self.call)  # without the GIL, until all units are taken

    def total(self, name: str) -> float:
        """The units' sums, added up in order. (The built-in sum rounds differently since 3.12.)"""
        return functools.reduce(operator.add, self._alive[name], 0.0)


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="steptuned")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


# ------------------------------------------------------------------- compiling and loading


def kernel_for(dtype: torch.dtype) -> Kernel | None:
    """The kernel for tensors of this precision, if there is one."""
    return _load(dtype)[0]


@functools.cache
def _load(dtype: torch.dtype) -> tuple[Kernel | None, str]:
    wish = os.environ.get("STEPTUNED_KERNEL", "on")
    if wish not in ("on", "off", ""):
        raise ValueError(f"STEPTUNED_KERNEL must be on or off, got {wish!r}")
    if wish == "off":
        return None, "STEPTUNED_KERNEL=off"
    if dtype not in REALS:
        return None, f"there is no kernel for {dtype}"
    if os.name != "posix":
        return None, f"there is no kernel for {platform.system()}"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None, f"no C compiler was found (looked for {', '.join(COMPILERS)})"
    reason = "no folder for it that only this user can write to"
    for folder in filter(_is_private, _folders()):
        try:
            version = _output(compiler, "--version").splitlines()[0]
            return Kernel(_library(folder, compiler, version, REALS[dtype])), (
                f"compiled by {version}, in {folder}"
            )
        except (OSError, subprocess.SubprocessError, AttributeError, IndexError) as error:
            reason = f"it could not be compiled or loaded: {error}"
    return None, reason


def _folders() -> Iterator[Path]:
    """The user's cache, and a temporary folder should that be read-only or without a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    cache = cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache, "steptuned", "kernel")
    yield Path(tempfile.gettempdir(), f"steptuned-kernel-{os.getuid()}")


def _is_private(folder: Path) -> bool:
    """Whether this folder, made if it is not there, is the user's alone: what it holds is executed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return own and not found.st_mode & 0o077 and os.access(folder, os.W_OK | os.X_OK)


def _library(folder: Path, compiler: str, version: str, real: str) -> Path:
    """The compiled kernel in the cache. Its name ends in its checksum; what does not match is removed."""
    source = files("steptuned.optim").joinpath("kernel.c").read_bytes()
    about = (version, compiler, *FLAGS, real, platform.system(), platform.machine())
    key = hashlib.sha256(b"\0".join((source, *map(str.encode, about)))).hexdigest()[:16]
    for path in sorted(folder.glob(f"{key}-*.so")):
        if path.name == _named(key, path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        output = Path(work, "kernel.so")
        _output(compiler, f"-DREAL={real}", *FLAGS, "-o", str(output), given=source)
        path = folder / _named(key, output.read_bytes())
        os.replace(output, path)  # several processes may do this at once: each leaves a whole file
    return path


def _named(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()}.so"


def _output(*command: str, given: bytes = b"") -> str:
    done = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"{command[0]} failed: {lines[0] if lines else done.returncode}")
    return done.stdout.decode(errors="replace")
