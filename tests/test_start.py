"""The start: how many graphs are compiled, what is checked, and that the log says where its time went."""

import contextlib
import operator
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import oracles
import train_gpt as T
import triton_kernels as tk
from data.run.kept import KeptFunction
from data.run.log import Stopwatch
from data.run.machine import Runtime
from data.run.program import UserError
from data.run.warmup import can_only_compile, compile_ahead, modules_apart, require_codes, steps_with_new_keys

CPU = torch.device("cpu")


@pytest.mark.parametrize("wrong", [False, True])
def test_wrong_codes_end_the_start_in_one_line(monkeypatch, wrong):
    """One byte of the second layout differs, as when a compiler reads a register too early."""
    codes = torch.randn(16, 128).to(torch.float8_e5m2)
    codes_t = codes.view(torch.uint8).T.contiguous()
    codes_t[7, 3] += wrong
    monkeypatch.setattr(tk, "relu_square_codes", lambda *_: (codes, codes_t.view(codes.dtype)))
    monkeypatch.setattr(tk, "project_backward", lambda *_: None)  # leaves zeros in both layouts
    model = SimpleNamespace(fp8_mlps=True, fp8_projections=True)
    trainer = SimpleNamespace(config=T.RECORD74, rt=Runtime(0, 1, CPU), model=model)
    message = "^the FP8 kernels of the MLP store wrong codes .*--fp8_qkv=false$"
    with pytest.raises(UserError, match=message) if wrong else contextlib.nullcontext():
        require_codes(trainer)
    monkeypatch.setattr(tk, "project_backward", Mock(side_effect=AssertionError("attention is not in FP8")))
    model.fp8_projections = False
    with pytest.raises(UserError, match=message) if wrong else contextlib.nullcontext():
        require_codes(trainer)
    monkeypatch.setattr(tk, "relu_square_codes", Mock(side_effect=AssertionError("no MLP is in FP8")))
    model.fp8_mlps = False
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


counts_graphs = pytest.mark.skipif(
    torch.cuda.is_available(), reason="counts what the CPU's compiler is given; on a GPU test_ops compiles the model")


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    """make_trainer(backend of torch.compile) -> a small Trainer of four stages with other lengths and windows."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, 4000)
    tokens[::40] = 256
    for name in "train", "val":
        oracles.write_shard(tmp_path / f"{name}.bin", tokens)
    stages = ((64, 24, 8, 16), (96, 48, 16, 32), (128, 48, 24, 40), (128, 64, 32, 48))
    keys = "batch_tokens", "max_doc_len", "short_window", "long_window"
    config = T.parse_config([
        "--preset=record74", "--device=cpu", "--dtype=float32", "--fp8=false", "--vocab_size=257", "--micro_batches=1",
        "--kernels=attention:triton,mlp:triton", "--model_dim=32", "--num_heads=2",
        "--bigram_tables=1", "--scheduled_steps=9", "--extension_steps=2", "--val_tokens=160", "--val_batch_tokens=160",
        f"--train_files={tmp_path}/train.bin", f"--val_files={tmp_path}/val.bin",
        *(f"--stage{i}.{key}={value}" for i, stage in enumerate(stages, 1) for key, value in zip(keys, stage))])
    # In place of the opaque operators, which take minutes in the interpreter: all around them is traced as it is.
    monkeypatch.setattr(tk, "_mlp", lambda x, W1, W2: (tk.mlp_ref(x, W1, W2),))
    monkeypatch.setattr(tk, "_AttentionBlock", SimpleNamespace(apply=lambda with_values, first, share, factor, x, weight, *args: (
        x @ weight[:x.size(1)]).view(x.size(0), args[3].size(0), -1) * args[7]))
    ops, _ = tk.choose_ops(CPU, config.system.kernels)
    compile = torch.compile

    def make(backend):
        monkeypatch.setattr(torch, "compile", lambda f, options, **others: compile(f, backend=backend, **others))
        return T.Trainer(config, Runtime(0, 1, CPU), SimpleNamespace(line=print), ops, Stopwatch(0.0))
    torch._dynamo.reset()
    yield make
    torch._dynamo.reset()


@counts_graphs
@pytest.mark.filterwarnings("ignore")
def test_compiled_graphs(make_trainer):
    """One graph serves all stages and lengths. A change that adds a graph of the model costs every user half a minute
    of every cold start."""
    trainer = make_trainer(counter := CompileCounterWithBackend("eager"))
    T.warm_up(trainer)
    assert counter.frame_count == 1
    assert list(trainer.watch) == ["imports", "data", "model", "compilation", *(
        f"step {s}" for s in steps_with_new_keys(trainer.plans[:-1], set())), "evaluation"]
    for step in range(trainer.total):  # the run itself meets nothing new
        trainer.step(trainer.loader, trainer.plans[step], 1)
    for view in trainer.attn:
        T.validate(trainer.summed_loss, trainer.validation, view, trainer.rt)
    assert counter.frame_count == 1


@counts_graphs
@pytest.mark.filterwarnings("ignore")
def test_layers_are_compiled_ahead(make_trainer):
    """Both passes, for all steps that follow, and without gradients for the weights."""
    lowered = Counter()

    def lower(name):
        def compiler(graph, inputs):
            lowered[name] += 1
            return make_boxed_func(graph.forward)
        return compiler
    trainer = make_trainer(aot_autograd(fw_compiler=lower("forward"), bw_compiler=lower("backward")))
    compile_ahead(trainer, False)
    assert lowered == {"forward": 1, "backward": 1}
    assert not any(param.grad is not None and param.grad.any() for param in trainer.model.parameters())
    for plan in trainer.plans[:-1]:
        trainer.micro_step(trainer.loader.next_batch(), trainer.mtp_table[plan.step, :len(plan.mtp_weights)],
                           trainer.attn[plan.stage])
    trainer.validate(0, trainer.plans[0], 0.0)
    assert lowered == {"forward": 1, "backward": 1}
    assert all(param.grad.any() for param in (trainer.model.mlp_bank, trainer.model.embed))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_is_kept(tmp_path, monkeypatch, device):
    """The next process loads it and does not compile; it serves other lengths, and its backward pass. Other keys, other
    sizes of a table or a parameter, other variables of PyTorch, damaged files and files that fail are compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)  # else the compiler tries what a CPU can do

    def function(module, x, settings):
        table, scale = settings
        return torch.tanh(module(x)) * scale + table[:len(x)], None

    def check(kept, length, rows=20, width=4):
        module, x = torch.nn.Linear(4, width, device=device), torch.randn(length, 4, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        settings = torch.randn(rows, 1, device=device), torch.tensor(length / 4)
        results = [f(module, x, settings)[0] for f in (kept, function)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result.sum(), module.weight) for result in results))

    check(first := KeptFunction(function, ("code", 1)), 6)
    compile, calls = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda *args, **options: calls.append(args) or compile(*args, **options))
    for length in 6, 9:
        monkeypatch.setenv("TRITON_SOME_PATH", f"set by the compiler, {length}")
        check(KeptFunction(function, ("code", 1)), length)
    assert not calls
    first.path.write_bytes(first.path.read_bytes()[:1000])
    check(KeptFunction(function, ("code", 1)), 6)
    check(KeptFunction(function, ("code", 2)), 6)
    check(KeptFunction(function, ("code", 1)), 6, rows=30)
    check(wide := KeptFunction(function, ("code", 1)), 6, width=5)
    assert len(calls) == 4 and len(list(first.path.parent.iterdir())) == 4
    wide.path.write_bytes(first.path.read_bytes())
    for origin in "compiled and kept", "loaded":
        check(wide := KeptFunction(function, ("code", 1)), 6, width=5)
        assert wide.origin == origin
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setattr("data.run.kept.FILES", 2)
    check(other := KeptFunction(function, ("code", 1)), 6)
    assert len(calls) == 6 and {*first.path.parent.iterdir()} == {wide.path, other.path}
    monkeypatch.setattr("data.run.kept.atomic_write", Mock(side_effect=UserError("no room")))
    check(full := KeptFunction(function, ("code", 3)), 6)
    assert full.origin == "compiled, not kept: no room"


@pytest.mark.parametrize("attention, compile, device, world, kept", [
    ("triton", True, "cuda", 1, True), ("triton", True, "cuda", 2, True), ("triton", False, "cuda", 1, False),
    ("triton", True, "cpu", 1, False), ("torch", True, "cuda", 1, False)])
def test_layers_that_are_kept(attention, compile, device, world, kept):
    """Those with one graph: in plain attention the windows are constants of the graph."""
    config = T.parse_config(["--preset=short", f"--compile={compile}"])
    ops = SimpleNamespace(attention=tk.IMPLEMENTATIONS["attention"][attention])
    assert T.may_keep_layers(config, Runtime(0, world, torch.device(device)), ops) is kept
