"""The arithmetic of `flat` on the CPU in one pass over the memory: kernel.c, compiled at first use.

The kernel and the torch path agree to rounding. The kernel's own results are bit-identical for any
number of threads. If it cannot be compiled or loaded, the torch path is used without a warning;
`kernel_status` tells.
"""

import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

COMPILERS = ("cc", "gcc", "clang")

UNIT = 32768
"""Elements whose sums are stored together."""

# No -ffast-math: the kernel tests for infinities. No -march=native: machines may share the cache.
# No contraction: the same rounding on every processor.
FLAGS = (
    f"-DUNIT={UNIT}",
    "-std=c11",
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-w",
    "-Wno-psabi",
    "-x",
    "c",
    "-",
)
REALS = {torch.float32: "float", torch.float64: "double"}

DATA_PTR: Callable[[Any], int] = Tensor.data_ptr

CANNOT_BUILD = (OSError, subprocess.SubprocessError, AttributeError, IndexError, UnicodeError)

SMALL = 1 << 19
"""A model with at most this many elements has its own memory for g0."""

PARALLEL = 1 << 19
"""Minimum number of elements that makes several threads worthwhile.

With fewer, they save little and at times wait longer for each other than one thread needs.
"""


PROCESS = os.getpid()
"""The process that imported this module. OpenMP's threads do not survive a fork."""


class KernelStatus(NamedTuple):
    """Whether the CPU kernel is used, and why it is or is not."""

    active: bool
    reason: str


def kernel_status() -> KernelStatus:
    """Whether steps on the CPU use the compiled kernel, and why. Compiles it if necessary.

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
        *((name, ctypes.c_double) for name in ("step", "beta", "share", "scale")),
        *((name, ctypes.c_void_p) for name in ("along", "square")),
        ("next", ctypes.c_int64),
    )


class RawGradient(NamedTuple):
    """How to compute g0 from the unmodified gradient of the first pass.

    ``sign`` also unscales a gradient that was scaled by a GradScaler.

    theta_{k+1/2} = theta_k - step g0 and g0 = sign gradient + decay theta_k, so that
    g0 = ratio (sign gradient + decay theta_{k+1/2}): g0 needs no memory of its own.
    """

    sign: float
    decay: float
    ratio: float

    def g0(self, gradient: Tensor, half: Tensor) -> Tensor:
        """g0, rounded as the kernel rounds it. ``half`` is theta_{k+1/2}."""
        if not self.decay:
            return gradient if self.sign == 1 else gradient * self.sign
        return half.detach().mul(self.decay).add_(gradient, alpha=self.sign).mul_(self.ratio)


COMPLETE = RawGradient(1.0, 0.0, 1.0)


class Kernel:
    """kernel.c, compiled for one precision."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.first_pass, self.second_pass, self.square = (
            getattr(library, name) for name in ("first_pass", "second_pass", "square")
        )
        for function in (self.first_pass, self.second_pass, self.square):
            function.argtypes, function.restype = [ctypes.POINTER(_Call)], None


class Workspace:
    """The parameters of a kernel call, in order, their memory addresses, and memory for g0."""

    def __init__(self, kernel: Kernel, params: Sequence[Tensor]) -> None:
        self._kernel = kernel
        self._params = params
        self._places = places(params)
        self._addresses = array("Q", self._places)
        self._starts = array("q", (0, *accumulate(p.numel() for p in params)))
        self._elements = self._starts[-1]
        self._remembered: tuple[Sequence[Tensor], array[int]] | None = None
        self._joined: Tensor | None = None
        sums = bytes(8 * -(-self._elements // UNIT))
        self._along, self._square = array("d", sums), array("d", sums)
        self._call = _Call(
            len(params), *map(_address, (self._starts, self._addresses)), ratio0=1.0, sign0=1.0
        )
        self._call.along, self._call.square = _address(self._along), _address(self._square)

    def is_current(self) -> bool:
        """Whether the parameters are still at the same addresses."""
        return places(self._params) == self._places

    @functools.cached_property
    def own_g0(self) -> list[Tensor] | None:
        """Memory for g0, for small models; else None.

        Copying the gradients of a small model takes less time than it takes to find out whether
        they can be kept.
        """
        if self._elements > SMALL:
            return None
        # Not on torch's default device, which the user may have set.
        self._joined = joined = torch.empty(
            self._elements, dtype=self._params[0].dtype, device="cpu"
        )
        parts = zip(self._params, self._starts, strict=False)
        g0 = [joined.as_strided(p.shape, p.stride(), start) for p, start in parts]
        self._own_addresses, self._joined_at = addresses(g0), joined.data_ptr()
        return g0

    def remember(self, tensors: Sequence[Tensor], places: list[int]) -> None:
        """The addresses of a list of tensors. Before a call, the caller checks that they hold."""
        self._remembered = tensors, array("Q", places)

    def _addresses_of(self, tensors: Sequence[Tensor | None]) -> "array[int]":
        """The addresses of tensors in this call.

        Those of the workspace's own g0 are kept from call to call, while its memory, which sharing
        a tensor with another process moves, is where it was.
        """
        if self._remembered is not None and tensors is self._remembered[0]:
            return self._remembered[1]
        joined = self._joined
        if joined is not None and tensors is self.own_g0 and DATA_PTR(joined) == self._joined_at:
            return self._own_addresses
        return addresses(tensors)

    def first_pass(
        self,
        grads: Sequence[Tensor],
        copies: Sequence[Tensor] | None,
        step: float,
        *,
        sign: float,
        decay: float,
    ) -> None:
        """theta -= step g0, where g0 = sign gradient + decay theta; stored in any ``copies``."""
        tensors = {"g": grads, "g0": [None] * len(grads) if copies is None else copies}
        self._run(self._kernel.first_pass, tensors, sign, decay, step=step)
        torch.autograd.graph.increment_version(self._params)

    def second_pass(
        self,
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
        """theta -= step g1 and G = beta G + (1 - beta) scale (g1 - g0).

        Returns <G, g0> and |g0|^2. ``raw`` says how to compute g0 from ``held``. If the square of
        scale (g1 - g0) is not finite over a block of kernel.c, the difference counts as zero in G
        there, and the inner product is nan.
        """
        call = self._call
        call.sign0, call.decay0, call.ratio0 = raw
        call.beta, call.share, call.scale = beta, (1 - beta) * scale, scale
        tensors = {"g": grads, "g0": held, "G": G}
        self._run(self._kernel.second_pass, tensors, sign, decay, step=step)
        call.decay0 = 0.0
        torch.autograd.graph.increment_version(self._params)
        return _sum(self._along), _sum(self._square)

    def square(self, grads: Sequence[Tensor], *, sign: float, decay: float) -> float:
        """|sign gradient + decay theta|^2."""
        self._run(self._kernel.square, {"g": grads}, sign, decay)
        return _sum(self._square)

    def _run(
        self,
        function: Any,
        tensors: Mapping[str, Sequence[Tensor | None]],
        sign: float,
        decay: float,
        step: float = 0.0,
    ) -> None:
        """Call the kernel, in up to as many threads as torch uses."""
        call = self._call
        call.sign, call.decay, call.step, call.next = sign, decay, step, 0
        lists = [self._addresses_of(each) for each in tensors.values()]
        for name, each in zip(tensors, lists, strict=True):
            setattr(call, name, _address(each))
        threads = torch.get_num_threads()
        if threads > 1 and self._elements >= PARALLEL:
            units = len(self._along)
            _run_in_threads(_Task(function, call, units, (self, tensors, lists)), threads)
        else:
            function(call)


def _address(values: "array[Any]") -> int:
    return values.buffer_info()[0]


def _sum(values: "array[float]") -> float:
    """The sum in a fixed order. Python's own differs between its versions."""
    return functools.reduce(operator.add, values, 0.0)


def places(tensors: Sequence[Tensor]) -> list[int]:
    """The addresses of tensors as a list, which compares faster than an array."""
    return [*map(DATA_PTR, tensors)]


def addresses(tensors: Sequence[Tensor | None]) -> "array[int]":
    """The addresses of tensors for the kernel. All tensors may be None."""
    if tensors and tensors[0] is None:
        return array("Q", bytes(8 * len(tensors)))
    return array("Q", [*map(DATA_PTR, tensors)])


class _Task(NamedTuple):
    function: Any
    call: _Call
    units: int
    alive: Any
    """Objects that must stay in memory while a thread uses them."""

    def run(self) -> None:
        self.function(self.call)  # without the GIL, until all units are done


def _run_in_threads(task: "_Task", threads: int) -> None:
    """Run in torch's OpenMP threads, or in threads of our own if torch's cannot be used.

    OpenMP's threads keep spinning for a moment after each operation of torch. Threads of our own
    would compete with them for the cores.
    """
    parallel = _openmp()
    if parallel is None:
        _run_in_pool(task, threads - 1)
    else:
        # As many threads as torch uses, even if there are fewer units: libgomp would end the
        # surplus threads, and torch's next operation would have to start them again.
        parallel(task.function, task.call, threads, 0)


def _openmp() -> Any | None:
    """``GOMP_parallel``, or None in a forked process, where it would deadlock.

    A process that was forked before it imported this module is not recognized. There, torch's own
    operations deadlock as well.
    """
    return _gomp_parallel() if os.getpid() == PROCESS else None


@functools.cache
def _gomp_parallel() -> Any | None:
    """``GOMP_parallel`` of torch's OpenMP library, which LLVM's and Intel's have, too."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    # void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)
    parallel.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Call), ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _run_in_pool(task: "_Task", others: int) -> None:
    """Run in this thread and in those others that start before the work is done."""
    started: list[Future[None]] = []
    try:
        pool = _pool(others)
        started = [pool.submit(task.run) for _ in range(min(others, task.units - 1))]
    except RuntimeError:  # the interpreter is shutting down, or no thread can be started
        pass
    task.run()
    for future in started:
        if not future.cancel():
            future.result()


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="steptuned")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


# ------------------------------------------------------------------- compiling and loading


def kernel_for(dtype: torch.dtype) -> Kernel | None:
    """The kernel for tensors of this precision, if available."""
    return _load(dtype)[0]


@functools.cache
def _load(dtype: torch.dtype) -> tuple[Kernel | None, str]:
    setting = os.environ.get("STEPTUNED_KERNEL", "on")
    if setting not in ("on", "off", ""):
        raise ValueError(f"STEPTUNED_KERNEL must be on or off, got {setting!r}")
    if setting == "off":
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
        except CANNOT_BUILD as error:  # noqa: PERF203
            reason = f"it could not be compiled or loaded: {error}"
    return None, reason


def _folders() -> Iterator[Path]:
    """The user's cache folder and, in case it cannot be used, a temporary folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    cache = cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache, "steptuned", "kernel")
    with contextlib.suppress(OSError):  # there is no folder for temporary files
        yield Path(tempfile.gettempdir(), f"steptuned-kernel-{os.getuid()}")


def _is_private(folder: Path) -> bool:
    """Whether only this user can access the folder, whose content is executed. Creates it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return own and not found.st_mode & 0o077 and os.access(folder, os.W_OK | os.X_OK)


def _library(folder: Path, compiler: str, version: str, real: str) -> Path:
    """The compiled kernel in the cache. Removes files that do not match their name's checksum."""
    source = files("steptuned.optim").joinpath("kernel.c").read_bytes()
    about = (version, compiler, *FLAGS, real, platform.system(), platform.machine())
    key = hashlib.sha256(b"\0".join((source, *map(os.fsencode, about)))).hexdigest()[:16]
    for path in sorted(folder.glob(f"{key}-*.so")):
        if path.name == _named(key, path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        output = Path(work, "kernel.so")
        _output(compiler, f"-DREAL={real}", *FLAGS, "-o", str(output), given=source)
        path = folder / _named(key, output.read_bytes())
        os.replace(output, path)  # atomic: several processes may do this at once
    return path


def _named(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()}.so"


def _output(*command: str, given: bytes = b"") -> str:
    done = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"{command[0]} failed: {lines[0] if lines else done.returncode}")
    return done.stdout.decode(errors="replace")
