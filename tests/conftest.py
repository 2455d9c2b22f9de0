"""Shared by all tests. Without a GPU the Triton kernels run in Triton's interpreter, which has to be asked for before
triton is imported; the trainer's own CPU path (the references) is triton_kernels.INTERPRETED = False."""

import gc
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Started in the background of a script, where processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)  # the tensors are small


def patch_once_per_launch():
    """Triton's interpreter patches triton.language at each call in a kernel; once per launch is enough, and faster."""
    from triton.runtime import interpreter
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_new(function):
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()  # of no changes
        patched.add(module)
        return patch(function)
    def launch_anew(self, *args, **options):
        patched.clear()
        return launch(self, *args, **options)
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew


def pytest_configure(config):
    # pytest-xdist would begin with the files of the most tests. An xdist without this option keeps our order.
    config.option.loadscopereorder = False
    # These names are not public: without them the tests are only slower.
    with suppress(ImportError, AttributeError):
        if os.environ.get("TRITON_INTERPRET") == "1":
            patch_once_per_launch()


def pytest_collection_modifyitems(items):
    """The files that take longest come first: else one core would wait for the other at the end."""
    items.sort(key=lambda item: not re.search("_(arch|checkpoint|faults|guard|run).py", item.path.name))


def pytest_collection_finish():
    """The trainer collects garbage in every pause of a run; gc.freeze spares the collector all imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_reference(request, monkeypatch):
    """The references that a test file names in NO_REFERENCE are missing: a wrapper that falls back to one fails."""
    for name in getattr(request.module, "NO_REFERENCE", ()):
        monkeypatch.setattr("triton_kernels." + name, None)


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=["best", "plain"])
def either_kernel(request, monkeypatch):
    """On Hopper, also run the kernel of other GPUs."""
    if request.param == "plain":
        if not torch.cuda.is_available():
            pytest.skip("the interpreter runs only this kernel")
        import triton
        triton.runtime.driver.active.get_current_target()  # else Triton's driver would keep the function below
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    return request.param


@pytest.fixture
def fp8_training(monkeypatch):
    """The trainer takes this machine for a GPU with FP8 and our kernels, so it trains in FP8, by the references."""
    import train_gpt as T
    from data.run import machine
    choose = T.kernels.choose_ops
    fake = dict(hardware="fake", hardware_fp8="yes", hardware_tma="no")
    monkeypatch.setattr(machine, "capability", lambda device: fake)
    monkeypatch.setattr(T.kernels, "choose_ops", lambda *args: (
        choose(*args)[0], dict.fromkeys(T.kernels.IMPLEMENTATIONS, "triton")))


@pytest.fixture
def poisoned_empty():
    """torch.empty returns NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # some sums of a GPU are not
    yield
    torch.use_deterministic_algorithms(False)
