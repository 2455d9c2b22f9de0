"""The start: what is compiled ahead, what is checked, and that the log says where its time went."""

import contextlib
import operator
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train_gpt as T
import triton_kernels as tk
from data.run.config import with_knobs
from data.run.log import Stopwatch
from data.run.machine import Runtime
from data.run.program import UserError
from data.run.warmup import can_only_compile, modules_apart, require_codes, steps_with_new_keys
from test_run import corpus  # noqa: F401 (a fixture)

CPU = torch.device("cpu")


@pytest.mark.parametrize("wrong", [False, True])
def test_wrong_codes_end_the_start_in_one_line(monkeypatch, wrong):
    """One byte of the second layout differs, as when a compiler reads a register too early."""
    codes = torch.randn(16, 128).to(torch.float8_e5m2)
    codes_t = codes.view(torch.uint8).T.contiguous()
    codes_t[7, 3] += wrong
    monkeypatch.setattr(tk, "relu_square_codes", lambda *_: (codes, codes_t.view(codes.dtype)))
    monkeypatch.setattr(tk, "project_backward", lambda *_: None)  # leaves zeros in both layouts
    trainer = SimpleNamespace(config=with_knobs(T.RECORD74, fp8_mlp=True, fp8_qkv=True), rt=Runtime(0, 1, CPU))
    message = "^the FP8 kernels of the MLP store wrong codes .*--fp8_qkv=false$"
    with pytest.raises(UserError, match=message) if wrong else contextlib.nullcontext():
        require_codes(trainer)
    monkeypatch.setattr(tk, "project_backward", Mock(side_effect=AssertionError("attention is not in FP8")))
    trainer.config = with_knobs(trainer.config, fp8_qkv=False)
    with pytest.raises(UserError, match=message) if wrong else contextlib.nullcontext():
        require_codes(trainer)
    monkeypatch.setattr(tk, "relu_square_codes", Mock(side_effect=AssertionError("no MLP is in FP8")))
    trainer.config = with_knobs(trainer.config, fp8_mlp=False)
    require_codes(trainer)


@pytest.mark.parametrize("missing", ["JITFunction.run", "AsyncCompileMode", "runtime.build._load_module_from_path"])
def test_without_the_private_names_kernels_compile_at_their_launch(monkeypatch, missing):
    """`only_compiling` needs names of Triton that another version may lack."""
    assert can_only_compile()
    triton = SimpleNamespace(JITFunction=SimpleNamespace(run=1), AsyncCompileMode=1,
                             runtime=SimpleNamespace(build=SimpleNamespace(_load_module_from_path=1)))
    monkeypatch.setattr(tk, "triton", triton)
    assert can_only_compile()
    *path, name = missing.split(".")
    delattr(operator.attrgetter(".".join(path))(triton) if path else triton, name)
    assert not can_only_compile()


def test_threads_do_not_exchange_launchers(monkeypatch):
    """Python fills one module object again and again, as for extension modules of one name that it loads twice."""
    module = ModuleType("launcher")

    def load(name, path):
        module.launch = path
        time.sleep(0.002)
        return module
    build = SimpleNamespace(_load_module_from_path=load)
    monkeypatch.setattr(tk, "triton", SimpleNamespace(runtime=SimpleNamespace(build=build)))

    def launcher(path):
        found = build._load_module_from_path("launcher", path)
        time.sleep(0.002)
        return found.launch
    paths = [str(i) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(launcher, paths)) != paths
        with modules_apart():
            assert list(pool.map(launcher, paths)) == paths
    assert build._load_module_from_path is load


def test_a_warm_up_says_where_its_time_goes(corpus):  # noqa: F811
    """Its steps are the first of each kind. That it leaves no trace: test_checkpoint."""
    config, (ops, _) = T.parse_config([*corpus.args, "--micro_batches=1"]), tk.choose_ops(CPU, "torch")
    trainer = T.Trainer(config, Runtime(0, 1, CPU), SimpleNamespace(line=print), ops, Stopwatch(0.0))
    steps = steps_with_new_keys(trainer.plans[:-1], set())
    T.warm_up(trainer)
    assert len(steps) > 4
    assert list(trainer.watch) == ["imports", "data", "model", "compilation", *(f"step {s}" for s in steps),
                                   "evaluation"]
