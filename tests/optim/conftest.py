"""Fixtures for the two implementations of a step on the CPU."""

import pytest

from steptuned.optim import kernel


@pytest.fixture(scope="module", params=["kernel", "small", "torch"])
def path(request):
    """Run a module's tests with the kernel, as for large and for small models, and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPTUNED_KERNEL", "off" if request.param == "torch" else "on")
        if request.param == "kernel":
            patch.setattr(kernel, "SMALL", 0)  # gradients are held, not copied
        kernel._load.cache_clear()
        active, reason = kernel.kernel_status()
        if request.param != "torch" and not active:
            pytest.skip(f"no kernel: {reason}")
        assert active == (request.param != "torch")
        yield request.param
    kernel._load.cache_clear()


@pytest.fixture
def torch_path(monkeypatch):
    """For tests of the torch path itself."""
    monkeypatch.setenv("STEPTUNED_KERNEL", "off")
    kernel._load.cache_clear()
    yield
    monkeypatch.undo()
    kernel._load.cache_clear()
