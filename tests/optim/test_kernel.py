"""The compiled kernel gives the results of the torch path, for any number of threads.

Many processes can compile it at the same time.
"""

import copy
import ctypes
import itertools
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

import steptuned
from compare import same
from processes import PATIENCE
from steptuned import StepTunedSGD
from steptuned.optim import bucket, kernel, record, tuning
from steptuned.optim.bucket import fits_kernel
from steptuned.optim.state import fresh_scalars

pytestmark = pytest.mark.skipif(
    not steptuned.kernel_status().active, reason=f"no kernel: {steptuned.kernel_status().reason}"
)

SHAPES = [(3, 5), (), (70_001,), (0, 4), (2, 3, 4, 4), (16_384,), (1,)]

OPTIONS = {
    "plain": {},
    "weight decay": {"weight_decay": 0.1},
    "much weight decay": {"weight_decay": 8.0},
    "maximize": {"maximize": True},
    "maximize with weight decay": {"maximize": True, "weight_decay": 0.1},
    "clipping": {"max_grad_norm": 0.5, "weight_decay": 0.1},
    "beta 0": {"beta": 0.0},
}


@pytest.fixture
def off(monkeypatch):
    """A function that turns the kernel off."""

    def turn_off():
        monkeypatch.setenv("STEPTUNED_KERNEL", "off")
        kernel._load.cache_clear()

    yield turn_off
    monkeypatch.undo()
    kernel._load.cache_clear()


def run(options, iterations=6, dtype=torch.float64, shapes=SHAPES, groups=2):
    """The full state of an optimizer after some iterations with made-up, bounded gradients."""
    generator = torch.Generator().manual_seed(0)

    def new(shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    params = [new(shape).requires_grad_() for shape in shapes]
    params[4] = (
        params[4].detach().to(memory_format=torch.channels_last).requires_grad_()
        if len(params) > 4
        else params[-1]
    )
    opt = StepTunedSGD(
        [{"params": params[i::groups], "lr": 0.1 + 0.02 * i} for i in range(groups)],
        bounds=(1e-3, 1e3),
        **options,
    )
    shifts = [[new(p.shape) for p in params] for _ in range(iterations)]
    gammas = []
    for shift in shifts:
        for _ in opt.passes():
            for p, c in zip(params, shift, strict=True):
                p.grad = torch.empty_like(p).copy_(torch.tanh(p.detach() - c))
        gammas.append(opt.gamma.item())
    return [p.detach() for p in params], [opt.state[p]["G"] for p in params], gammas, opt.stats()


# --------------------------------------------------------------------------------- the same results


@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernel_and_the_torch_path_agree(name, off):
    by_kernel = run(OPTIONS[name])
    off()
    for a, b in zip(by_kernel[:2], run(OPTIONS[name])[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("openmp", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_bit_identical_for_any_number_of_threads(dtype, openmp, monkeypatch):
    monkeypatch.setattr(kernel, "PARALLEL", 1)
    used = []
    parallel = kernel._openmp()
    if openmp and parallel is None:
        pytest.skip("torch has no OpenMP library with GOMP_parallel here")

    def run_in_openmp(function, call, threads, flags):
        used.append(threads)
        parallel(function, call, threads, flags)

    def run_in_pool(task, others, run=kernel._run_in_pool):
        used.append(others + 1)
        run(task, others)

    monkeypatch.setattr(kernel, "_openmp", lambda: run_in_openmp if openmp else None)
    monkeypatch.setattr(kernel, "_run_in_pool", run_in_pool)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(run({"weight_decay": 0.1, "max_grad_norm": 0.5}, dtype=dtype))
    finally:
        torch.set_num_threads(before)
    assert {*used} == {2, 3, 8}
    for other in results[1:]:
        assert same(results[0], other)


def test_a_forked_process_has_its_own_threads(monkeypatch):
    monkeypatch.setattr(kernel, "PARALLEL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    expected = run({})

    def in_child():
        torch.set_num_threads(1)  # for torch's own operations
        alike = same(run({}), expected)
        sys.exit(
            0
            if alike
            and any(thread.name.startswith("steptuned") for thread in threading.enumerate())
            else 1
        )

    child = multiprocessing.get_context("fork").Process(target=in_child, daemon=True)
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_gcc_and_clang_give_the_same_bits(compiler, tmp_path, monkeypatch):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    expected = run({"weight_decay": 0.1, "max_grad_norm": 0.5}, dtype=torch.float32)
    monkeypatch.setattr(kernel, "COMPILERS", (compiler,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel._load.cache_clear()
    try:
        assert str(tmp_path) in steptuned.kernel_status().reason
        assert same(run({"weight_decay": 0.1, "max_grad_norm": 0.5}, dtype=torch.float32), expected)
    finally:
        monkeypatch.undo()
        kernel._load.cache_clear()


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
def test_gamma_computed_in_floats_has_the_bits_of_the_tensors(beta):
    """Both forms of `_tune`, over measurements of all kinds."""
    options = {"beta": beta, "nu": 1.7, "bounds": (0.3, 5.0), "relative": False, "divided": False}
    opt = StepTunedSGD([torch.zeros(1, requires_grad=True)])
    counts = {"k": 0, "single": 0}
    floats, tensors = (
        {**options, **counts, **fresh_scalars(torch.device("cpu"))} for _ in range(2)
    )
    generator = torch.Generator().manual_seed(1)
    kinds = [
        torch.tensor((c, s), dtype=torch.float64)
        for c in (0.0, -0.0, torch.nan, torch.inf)
        for s in (0.0, 2.0, torch.inf)
    ]
    for sums in [*torch.randn(300, 2, generator=generator, dtype=torch.float64), *kinds]:
        sums[1].abs_()
        tuning._tune(opt, floats, sums, None)
        tuning._tune(opt, tensors, sums, torch.tensor(True))
        assert same(floats["gamma"], tensors["gamma"])
        for group in (floats, tensors):
            group["k"] += 1
        assert same(record.last(floats)[:2], record.last(tensors)[:2])


# ----------------------------------------------------------------------------------- held gradients


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"maximize": True}, {"maximize": True, "weight_decay": 0.1}],
)
def test_a_large_gradient_is_held_without_a_copy_and_saved_with_decay_and_sign(
    options, monkeypatch
):
    monkeypatch.setattr(kernel, "SMALL", 49)
    theta = torch.randn(
        50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    start = theta.detach().clone()
    opt = StepTunedSGD([theta], lr=0.1, **options)
    theta.grad = g = torch.linspace(-1, 1, 50, dtype=torch.float64)
    opt.half_step()
    assert opt.state[theta]["g0"].data_ptr() == g.data_ptr()
    saved = opt.state_dict()["state"][0]
    expected = (-g if "maximize" in options else g) + options.get("weight_decay", 0.0) * start
    torch.testing.assert_close(saved["g0"], expected, rtol=1e-13, atol=1e-13)
    assert saved["held"] == 1
    assert opt.state[theta]["g0"].data_ptr() == g.data_ptr(), "saving changes nothing"


def test_a_small_gradient_is_copied_and_may_be_overwritten():
    ends = []
    for spoil in (False, True):
        theta = torch.ones(10, dtype=torch.float64, requires_grad=True)
        opt = StepTunedSGD([theta], lr=0.1, weight_decay=0.1)
        for _ in range(3):
            theta.grad = mine = torch.linspace(1, 2, 10, dtype=torch.float64)
            opt.half_step()
            if spoil:
                mine.fill_(torch.nan)
            theta.grad = torch.linspace(2, 3, 10, dtype=torch.float64)
            opt.step()
        ends.append((theta.detach(), opt.gamma))
    assert same(*ends)


def test_no_gradient_is_kept_after_its_pass():
    theta = torch.ones(10, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    for _ in range(3):
        for _ in opt.passes():
            theta.grad = torch.ones(10)
            grad = weakref.ref(theta.grad)
        theta.grad = None
        assert grad() is None


def test_a_run_saved_between_the_passes_resumes_bit_for_bit():
    def iterate(theta, opt, halves):
        for i in halves:
            theta.grad = torch.tanh(theta.detach() - 0.01 * (i // 2))
            opt.half_step() if i % 2 == 0 else opt.step()

    def make(values):
        theta = values.clone().requires_grad_()
        return theta, StepTunedSGD([theta], lr=0.3, weight_decay=0.05, maximize=True)

    start = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    theta, opt = make(start)
    iterate(theta, opt, range(7))
    other, loaded = make(theta.detach())
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each in ((theta, opt), (other, loaded)):
        iterate(*each, range(7, 14))
    assert same((theta, opt.state_dict()), (other, loaded.state_dict()))


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("what", ["saved", "no second gradient"])
def test_a_scaled_gradient_that_is_held_is_unscaled_when_it_is_read(what, options, off):
    """g0 is read if the state is saved between the passes, or if a parameter has no g1."""

    def ends():
        params = [torch.full((3,), 1.0 + i, dtype=torch.float64).requires_grad_() for i in (0, 1)]
        opt = StepTunedSGD(params, lr=0.1, bounds=(1e-3, 1e3), **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in (opt.first_pass, opt):
            used = params if what == "saved" or step is opt.first_pass else params[:1]
            scaler.scale(sum((p**3).sum() for p in used)).backward()
            scaler.step(step)
            scaler.update()
            if what == "saved" and opt.pending:
                saved = copy.deepcopy(opt.state_dict())
                opt.load_state_dict(saved)
        return [opt.gamma, opt.curvature, *params, *(opt.state[p]["G"] for p in params)]

    by_kernel = ends()
    off()
    for ours, theirs in zip(by_kernel, ends(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_weight_decay_changed_between_the_passes_counts_for_the_second_only():
    theta = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, weight_decay=0.5, beta=0.0)
    theta.grad = torch.tensor([1.0], dtype=torch.float64)
    opt.half_step()  # g0 = 2
    opt.param_groups[0]["weight_decay"] = 0.0
    theta.grad = torch.tensor([3.0], dtype=torch.float64)
    opt.step()
    torch.testing.assert_close(opt.state[theta]["G"].item(), 1.0)


def test_autograd_detects_that_the_kernel_wrote_to_a_parameter():
    theta = torch.ones(3, requires_grad=True)
    loss = (theta**3).sum()
    opt = StepTunedSGD([theta], lr=0.1)
    theta.grad = torch.ones(3)
    opt.half_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_overflowing_measurement_does_not_spoil_G_for_any_number_of_threads(
    monkeypatch,
):
    monkeypatch.setattr(kernel, "PARALLEL", 1)
    results = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        theta = torch.ones(5 * kernel.UNIT, requires_grad=True)
        opt = StepTunedSGD([theta], lr=0.1)
        for k in range(3):
            for i in opt.passes():
                theta.grad = torch.full_like(theta, 1.0 + 0.1 * i)
                if (k, i) == (1, 1):
                    theta.grad[2 * kernel.UNIT + 5] = torch.inf
                    theta.grad[2 * kernel.UNIT + 6] = 1e15
        assert opt.stats().ignored == 1
        G = opt.state[theta]["G"]
        assert G.abs().max() < 1
        results.append((G, opt.gamma))
    assert same(*results)


@pytest.mark.parametrize("sizes", [(5000,), (700, 1500, 2800)])
@pytest.mark.parametrize("place", [0, 2500, 4999])
def test_an_infinity_fades_G_in_its_own_block_only(sizes, place):
    """A block has up to 1,024 elements of one tensor."""

    def G_after(infinite):
        params = [torch.ones(n, dtype=torch.float64, requires_grad=True) for n in sizes]
        opt = StepTunedSGD(params, lr=0.1)
        for k in range(2):
            for i in opt.passes():
                joined = torch.full((5000,), 1.0 + 0.1 * i, dtype=torch.float64)
                if infinite and (k, i) == (1, 1):
                    joined[place] = torch.inf
                for p, g in zip(params, joined.split(sizes), strict=True):
                    p.grad = g.clone()
        return torch.cat([opt.state[p]["G"] for p in params])

    starts = [
        start + i
        for start, n in zip((0, *itertools.accumulate(sizes)), sizes, strict=False)
        for i in range(0, n, 1024)
    ]
    first = max(start for start in starts if start <= place)
    last = min([start for start in starts if start > place], default=5000)
    found, expected = G_after(infinite=True), G_after(infinite=False)
    assert torch.equal(found[:first], expected[:first])
    assert torch.equal(found[last:], expected[last:])
    # After the first iteration G is 0.01; the second one adds nothing here.
    assert found[first:last].tolist() == pytest.approx([0.009] * (last - first), rel=1e-10)


@pytest.mark.parametrize("change", ["another memory", "a transposed view", "another precision"])
def test_a_parameter_whose_memory_changes_is_followed(change, off):
    def follow():
        theta = torch.arange(16.0).reshape(4, 4).requires_grad_()
        opt = StepTunedSGD([theta], lr=0.1, beta=0.5)
        for k in range(6):
            if k == 3 and change == "another memory":
                theta.data = theta.data.clone()
            if k == 3 and change == "a transposed view":
                theta.data = theta.data.t()
            if k == 3 and change == "another precision":
                theta.data = theta.data.double()
            for _ in opt.passes():
                theta.grad = torch.tanh(theta.detach()).contiguous()
        return theta.detach()

    by_kernel = follow()
    off()
    torch.testing.assert_close(by_kernel, follow())


# ---------------------------------------------------------------------------------------- the cache


def _load_at_once(cache, all_started, said):
    os.environ["XDG_CACHE_HOME"] = str(cache)
    os.environ.pop("STEPTUNED_KERNEL", None)
    kernel._load.cache_clear()  # it was loaded to import this file
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    all_started.wait(PATIENCE)
    sys.exit(not steptuned.kernel_status().active)


def libraries(cache):
    return sorted((Path(cache) / "steptuned" / "kernel").iterdir())


def test_eight_processes_that_start_at_once_leave_one_whole_file(tmp_path, processes):
    cache, all_started = tmp_path / "cache", processes.Barrier(8)
    said = [tmp_path / f"{i}.txt" for i in range(8)]
    children = [
        processes.Process(target=_load_at_once, args=(cache, all_started, path)) for path in said
    ]
    for child in children:
        child.start()
    for child, path in zip(children, said, strict=True):
        child.join(PATIENCE)
        assert (child.exitcode, path.read_text()) == (0, "")
    assert [path.suffix for path in libraries(cache)] == [".so"]
    assert stat.S_IMODE((cache / "steptuned" / "kernel").stat().st_mode) == 0o700


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that loads the kernel from a separate cache.

    It returns the path of the library and checks that it works.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel.tempfile, "gettempdir", lambda: str(tmp_path))

    def load():
        kernel._load.cache_clear()
        status = steptuned.kernel_status()
        run({}, iterations=1, dtype=torch.float32)
        return status

    yield load
    monkeypatch.undo()
    kernel._load.cache_clear()


@pytest.mark.parametrize("damage", ["truncated", "one byte", "another library", "empty"])
def test_a_damaged_or_unknown_file_is_rebuilt_and_never_loaded(
    damage, tmp_path, cache, monkeypatch
):
    cache()
    (path,) = libraries(tmp_path / "cache")
    content = path.read_bytes()
    bad = {
        "truncated": content[:-100],
        "one byte": content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        "another library": Path(sys.executable).read_bytes(),
        "empty": b"",
    }[damage]
    path.unlink()
    path.write_bytes(bad)
    opened = []
    monkeypatch.setattr(
        ctypes,
        "CDLL",
        lambda name, load=ctypes.CDLL: (opened.append(Path(name).read_bytes()), load(name))[1],
    )
    assert cache().active
    assert opened == [content], "the same source makes the same library"
    assert libraries(tmp_path / "cache") == [path]


def test_a_second_start_compiles_nothing(cache, monkeypatch):
    cache()
    commands = []
    output = kernel._output
    monkeypatch.setattr(
        kernel,
        "_output",
        lambda *command, **given: (commands.append(command[1:]), output(*command, **given))[1],
    )
    assert cache().active
    assert commands == [("--version",)] * len(commands)


@pytest.mark.parametrize("what", ["source", "compiler", "version", "flags", "machine"])
def test_another_source_compiler_or_machine_uses_another_file(what, tmp_path, cache, monkeypatch):
    cache()
    before = libraries(tmp_path / "cache")
    if what == "source":
        source = kernel.files("steptuned.optim").joinpath("kernel.c").read_bytes() + b"\n"
        (tmp_path / "kernel.c").write_bytes(source)
        monkeypatch.setattr(kernel, "files", lambda package: tmp_path)
    elif what == "compiler":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "cc").symlink_to(shutil.which("cc"))
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    elif what == "version":
        output = kernel._output
        monkeypatch.setattr(
            kernel,
            "_output",
            lambda *command, **given: "2" * ("--version" in command) + output(*command, **given),
        )
    elif what == "flags":
        monkeypatch.setattr(kernel, "FLAGS", (*kernel.FLAGS, "-O1"))
    else:
        monkeypatch.setattr(kernel.platform, "machine", lambda: "another")
    cache()
    assert len(libraries(tmp_path / "cache")) == 2 * len(before)


def test_a_temporary_folder_replaces_a_cache_that_cannot_be_written(tmp_path, cache):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    status = cache()
    assert status.active
    assert str(tmp_path / f"steptuned-kernel-{os.getuid()}") in status.reason


@pytest.mark.parametrize("kind", ["of others", "open to others", "a link"])
def test_a_folder_that_others_could_write_to_is_not_used(kind, tmp_path, cache, monkeypatch):
    folder = tmp_path / "cache" / "steptuned" / "kernel"
    folder.mkdir(parents=True, mode=0o700)
    if kind == "open to others":
        folder.chmod(0o777)
    elif kind == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(kernel.os, "getuid", lambda: 12345)
    status = cache()
    assert str(folder) not in status.reason
    assert status.active == (kind != "of others")
    assert not list(folder.iterdir())


def test_without_a_compiler_or_with_a_broken_one_the_torch_path_is_used_silently(
    tmp_path, cache, monkeypatch
):
    monkeypatch.setattr(kernel, "COMPILERS", ("no-such-compiler",))
    assert cache() == (False, "no C compiler was found (looked for no-such-compiler)")
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho it is broken >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(kernel, "COMPILERS", (str(broken),))
    active, reason = cache()
    assert not active
    assert "it is broken" in reason


def test_the_environment_turns_the_kernel_off_and_a_mistake_in_it_is_an_error(cache, monkeypatch):
    monkeypatch.setenv("STEPTUNED_KERNEL", "off")
    assert cache() == (False, "STEPTUNED_KERNEL=off")
    monkeypatch.setenv("STEPTUNED_KERNEL", "of")
    with pytest.raises(ValueError, match="must be on or off, got 'of'"):
        cache()


def test_the_kernel_compiles_without_warnings(tmp_path):
    source = Path(kernel.__file__).with_name("kernel.c")
    for compiler in filter(shutil.which, ("gcc", "clang")):
        for real in kernel.REALS.values():
            flags = [flag for flag in kernel.FLAGS if flag not in ("-w", "-x", "c", "-")]
            command = [
                compiler,
                *flags,
                "-Wall",
                "-Wextra",
                f"-DREAL={real}",
                source,
                "-o",
                tmp_path / "out.so",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert "warning" not in done.stderr


# ----------------------------------------------------------------------------- channels_last


def train_convolutions(memory_format, monkeypatch, other_gradients=False, create_graph=False):
    """Parameters and gamma after some iterations, and how often buckets were gathered anew."""
    gathered = []
    monkeypatch.setattr(
        bucket, "fits_kernel", lambda *a, fits=fits_kernel: gathered.append(1) or fits(*a)
    )
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ELU(), torch.nn.Conv2d(4, 5, 1)]
    model = torch.nn.Sequential(*layers).double().to(memory_format=memory_format)
    opt = StepTunedSGD(model.parameters(), lr=0.1, weight_decay=0.01)
    generator, counts = torch.Generator().manual_seed(1), []
    for k in range(8):
        x = torch.randn(6, 3, 7, 7, generator=generator, dtype=torch.float64)
        for _ in opt.passes():
            opt.zero_grad()
            model(x.contiguous(memory_format=memory_format)).square().mean().backward(
                create_graph=create_graph
            )
            if other_gradients and k == 5:
                model[0].weight.grad = model[0].weight.grad.contiguous()
        counts.append(len(gathered))
    return [p.detach().clone() for p in model.parameters()] + [opt.gamma], counts


@pytest.mark.parametrize("small", [0, kernel.SMALL], ids=["held", "copied"])
def test_channels_last_parameters_are_gathered_once(small, monkeypatch):
    monkeypatch.setattr(kernel, "SMALL", small)
    expected, _ = train_convolutions(torch.contiguous_format, monkeypatch)
    found, counts = train_convolutions(torch.channels_last, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert counts[-1] == counts[1], "a bucket was gathered again"


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("small", [0, kernel.SMALL], ids=["held", "copied"])
def test_gradients_with_a_graph_are_gathered_once(small, monkeypatch):
    monkeypatch.setattr(kernel, "SMALL", small)
    expected, _ = train_convolutions(torch.contiguous_format, monkeypatch)
    found, counts = train_convolutions(torch.contiguous_format, monkeypatch, create_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert counts[-1] == counts[1], "a bucket was gathered again"


def test_every_pass_gathers_anew_if_torch_cannot_compare_layouts(monkeypatch):
    expected, counts = train_convolutions(torch.contiguous_format, monkeypatch)
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", lambda *tensors: None)
    assert not bucket.has_layouts()
    monkeypatch.setattr(bucket, "HAS_LAYOUTS", False)
    found, anew = train_convolutions(torch.contiguous_format, monkeypatch)
    assert all(map(torch.equal, expected, found))
    assert anew[-1] > counts[-1]


def test_a_gradient_with_other_strides_than_its_parameter_is_noticed(monkeypatch):
    expected, _ = train_convolutions(torch.channels_last, monkeypatch)
    found, counts = train_convolutions(torch.channels_last, monkeypatch, other_gradients=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert counts[5] > counts[4]
