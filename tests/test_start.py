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
from data.run import warmup
from data.run.config import with_knobs
from data.run.log import Stopwatch
from data.run.machine import Runtime
from data.run.program import UserError
from data.run.warmup import can_only_compile, compile_kernels, modules_apart, require_codes, steps_with_new_keys
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


@pytest.fixture
def make_trainer(corpus):  # noqa: F811
    """make_trainer(*arguments) -> a small Trainer of four stages with other lengths and windows."""
    def make(*arguments):
        config = T.parse_config([*corpus.args, "--fp8_mlp=false", "--fp8_qkv=false", "--bigram_normal=false",
                                 "--micro_batches=1", "--model_dim=64", "--num_heads=2", *arguments])
        ops, _ = tk.choose_ops(CPU, config.system.kernels)
        return T.Trainer(config, Runtime(0, 1, CPU), SimpleNamespace(line=print), ops, Stopwatch(0.0))
    return make


def test_a_warm_up_says_where_its_time_goes(make_trainer):
    """Its steps are the first of each kind. That it leaves no trace: test_checkpoint."""
    trainer = make_trainer("--preset=record74", "--kernels=torch")
    steps = steps_with_new_keys(trainer.plans[:-1], set())
    T.warm_up(trainer)
    assert len(steps) > 4
    assert list(trainer.watch) == ["imports", "data", "model", "compilation", *(f"step {s}" for s in steps),
                                   "evaluation"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the launches of the interpreter")
@pytest.mark.parametrize("preset", ["short", "record74"])
def test_kernels_are_compiled_ahead(make_trainer, monkeypatch, poisoned_empty, preset):
    """`compile_kernels` launches every kernel that steps and validations launch. No kernel has run, and weights,
    gradients and the optimizer's state are as before. That their compiled variants are the same: test_arch."""
    launched = []
    monkeypatch.setattr(type(tk._mlp_kernel), "run", lambda self, *args, **options: launched.append(self.fn.__name__))
    monkeypatch.setattr(warmup, "only_compiling", contextlib.nullcontext)
    trainer = make_trainer(f"--preset={preset}", "--candidates=8" if preset == "short" else "--ngram_rows=0",
                           "--kernels=" + ",".join(f"{op}:triton" for op in tk.IMPLEMENTATIONS))

    def state():
        parts = (part for parts in trainer.optimizer.state.values() for part in parts.values())
        return [x.clone() for x in (*trainer.model.parameters(), *parts) if x is not None]
    before = state()
    compile_kernels(trainer)
    ahead, changed = {*launched}, [not torch.equal(*pair) for pair in zip(before, state(), strict=True)]
    assert not any(changed) and not any(
        param.grad.any() for param in trainer.model.parameters() if param.grad is not None)
    launched.clear()
    for step in steps_with_new_keys(trainer.plans[:-1], set()):
        trainer.step(trainer.loader, trainer.plans[step], 1)
    T.validate(trainer.summed_loss, trainer.validation, trainer.attn[-1], trainer.rt)
    assert ahead == {*launched} and len(ahead) > 20
