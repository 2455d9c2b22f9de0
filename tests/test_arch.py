"""Other GPUs than the GPU of this machine: every kernel, at the sizes of a run, compiles and fits their shared memory,
and a start compiles all kernels before the first step.

    python tests/test_arch.py 89    compile for compute capability 8.9; print each kernel's shared memory and launch
    python tests/test_arch.py ahead FOLDER --preset=single    print the kernels that a start forgets to compile; writes
                                    shards
    python tests/test_arch.py variants FOLDER --preset=record    print how often a micro-step launches each kernel, and
                                    how many compiled variants of it; writes shards

No GPU is necessary, because Triton contains its assembler and the test launches nothing. The test does not show speed.
The tests start this file as a program, because they run under Triton's interpreter themselves.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
# Shared memory that a block may use, by compute capability: A100, RTX 4090 (an RTX 3090, 8.6, has as much), H100,
# RTX 5090.
SHARED_KIB = {80: 163, 89: 99, 90: 227, 120: 99}
MOST_VARIANTS = 12  # of each kernel of the sums of streams in a micro-step
FP8_ONLY = {"_quantise_weights_kernel"}  # 8.9 and up


def pretend_gpu(arch):
    """Launches compile for a GPU that this machine lacks, and are in the list: (name, compiled kernel, parameters)."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import triton_kernels as tk
    target = GPUTarget("cuda", arch, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0,
                                      get_current_stream=lambda device: 0))
    launched, run = [], jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **launch):
        kernel = run(self, *args, grid=grid, warmup=True, **launch)
        launched.append((self.__name__, kernel,
                         {name: value for name, value in launch.items() if isinstance(value, int)}))
    jit.JITFunction.run = compile_only
    tk._takes_ref = lambda *tensors, any_dtype=False: False
    tk._sm_count, tk._shared_memory = lambda device: 128, lambda device: 1024 * SHARED_KIB[arch]
    tk._has_tma, tk._is_hopper = lambda device: arch >= 90, lambda device: arch == 90
    return launched


def compile_all(arch):
    """Run the cases of bench_kernels.py for a GPU that this machine lacks; [(kernel, shared memory in KiB, launch)]."""
    launched = pretend_gpu(arch)
    import bench_kernels as bench
    import triton_kernels as tk
    from data.run.config import with_knobs
    bench.DEVICE, bench.PEERS, bench.TOKENS, bench.FP8 = "cpu", False, [1024], arch >= 89
    bench.CONFIG = with_knobs(bench.CONFIG, bigram_tables=0.1)  # filling more rows would take seconds
    torch.randn = lambda *shape, generator=None, **options: torch.empty(*shape, **options)
    bench.compiled = lambda function: function  # only for peers, which do not run; spares seconds of imports
    if arch < 89:  # no FP8
        tk.WeightCodes.refresh = lambda self: None
    for family in bench.FAMILIES.keys() - {"fp8"}:  # see below
        for case in bench.FAMILIES[family]():
            if not case.kernel.startswith("HeadLoss"):  # these need a GPU
                case.run()
    if arch >= 89:
        x = bench.rand(1024, 768)
        one, W = torch.ones(()), bench.rand(3072, 768, dtype=tk.E4M3)
        for static in False, True:
            codes = (u[None].to(tk.E4M3).contiguous() for u in (x, x.mT))
            tk.quantise_weights(x[None], torch.ones(1, 1), *codes, static)
        post, _ = tk.relu_square_codes(x.to(tk.E4M3), W, *[one] * 4)
        tk.relu_square_codes(x.to(tk.E5M2), W, *[one] * 4, post, one)
    return [(name, kernel.metadata.shared / 1024, launch) for name, kernel, launch in launched]


def make_trainer(folder, *args):
    """(launches, which only compile for an H200, a trainer of a small model with all kernels); args: of the model."""
    launched = pretend_gpu(90)
    import oracles
    import train_gpt as T
    import triton_kernels as tk
    from data.run.log import Stopwatch
    from data.run.config import with_knobs
    from data.run.machine import Runtime
    torch.cuda.set_device, torch.cuda.current_device = lambda device: None, lambda: 0
    tk.triton.compiler.CompiledKernel.run = None  # Triton would load the kernel
    torch.bmm = lambda a, b, out: out.zero_()  # no number counts, and products in bf16 may take minutes
    tk.scaled_product = lambda a, b, scale_a, scale_b, out=None, dtype=torch.bfloat16, fast=False: torch.zeros(
        len(a), len(b), dtype=dtype)
    tokens = np.random.default_rng(0).integers(0, 512, 40000)
    tokens[::300] = 512
    for name in "train", "val":
        oracles.write_shard(Path(folder) / f"{name}.bin", tokens)
    config = T.parse_config(["--cuda_graphs=false", "--bigram_normal=false", "--vocab_size=513", "--candidates=8",
                             *args, "--micro_batches=1", "--scheduled_steps=14", "--extension_steps=2",
                             "--val_tokens=512", "--val_batch_tokens=512", f"--train_files={folder}/train.bin",
                             f"--val_files={folder}/val.bin", *(f"--stage{i}.batch_tokens=256" for i in (1, 2, 3, 4))])
    ops = SimpleNamespace(**{op: functions["triton"] for op, functions in tk.IMPLEMENTATIONS.items()})
    return launched, T.Trainer(with_knobs(config, device="cpu"), Runtime(0, 1, torch.device("cpu")),
                               SimpleNamespace(line=print), ops, Stopwatch(0.0))


def compile_ahead(folder, *sizes):
    """Kernels that `compile_kernels` leaves to the steps of a run on an H200; sizes: arguments of the model."""
    _, trainer = make_trainer(folder, "--fp8=false", "--ngram_rows=4e3,4e3", *sizes)
    import train_gpt as T
    import triton_kernels as tk
    from data.run import warmup
    trainer.graphs.stream = None  # torch.cuda.stream(None) changes nothing

    def state():
        parts = (part for parts in trainer.optimizer.state.values() for part in parts.values())
        return [x.clone() for x in (*trainer.model.parameters(), *parts) if x is not None]
    before = state()
    warmup.compile_kernels(trainer)
    assert all(map(torch.equal, before, state()))  # no kernel has run
    assert not any(param.grad is not None and param.grad.any() for param in trainer.model.parameters())
    compiled = []
    tk.triton.knobs.runtime.jit_post_compile_hook = lambda fn, **others: compiled.append(fn.name)
    for step in warmup.steps_with_new_keys(trainer.plans[:-1], set()):
        trainer.step(trainer.loader, trainer.plans[step], 1)
    T.validate(trainer.summed_loss, trainer.validation, trainer.attn[-1], trainer.rt)
    return compiled


def count_variants(folder, *args):
    """[(kernel, its launches in a micro-step, compiled variants of it)]; args: of the run."""
    launched, trainer = make_trainer(folder, *args)
    batch, plan = trainer.loader.next_batch(), trainer.plans[0]
    trainer.fetch_rows(batch)
    launched.clear()
    trainer.micro_step(batch, trainer.mtp_table[0, :len(plan.mtp_weights)], trainer.attn[0])
    found = {}
    for name, kernel, _ in launched:
        found.setdefault(name, []).append(id(kernel))
    return [(name, len(kernels), len(set(kernels))) for name, kernels in found.items()]


def start_program(*args):
    """This file as a program, without the interpreter. Triton's cache keeps compiled kernels for the next run."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen([sys.executable, __file__, *map(str, args)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment)


def printed(program):
    """The lines of a program that ends well."""
    out, err = program.communicate()
    assert program.returncode == 0, err[-2000:]
    return out.splitlines()


@pytest.fixture(scope="module")
def compilers():
    """One process per compute capability, side by side."""
    return {arch: start_program(arch) for arch in SHARED_KIB}


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_every_kernel_compiles_and_fits(compilers, arch):
    rows = [line.split(maxsplit=2) for line in printed(compilers[arch])]
    nodes = ast.parse((ROOT / "triton_kernels.py").read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list]
    kernels = {node.name for node in functions if node.name.endswith("_kernel")}
    other = "_mlp_kernel" if arch == 90 else "_mlp_hopper_kernel"
    expected = kernels - {other} - (set() if arch >= 89 else FP8_ONLY)
    assert {name for name, *_ in rows} == expected, "a new kernel needs a case in tests/bench_kernels.py"
    assert max(float(shared) for _, shared, _ in rows) <= SHARED_KIB[arch]


@pytest.mark.parametrize("sizes", [
    "--preset=single --model_dim=256 --depth=6", "--preset=single --model_dim=384 --depth=4",
    "--preset=single --model_dim=192 --num_heads=3 --depth=3", "--preset=record74 --ngram_rows=0 --model_dim=256"])
def test_a_start_compiles_all_kernels(tmp_path, sizes):
    """A kernel that the first steps compile one by one costs every cold start a second or more."""
    assert printed(start_program("ahead", tmp_path, *sizes.split())) == []


@pytest.mark.parametrize("args", ["single --ngram_rows=4e3,4e3", "record --ngram_rows=4e3,4e3", "record74"])
def test_variants_of_the_sums(tmp_path, args):
    """A cold start compiles each variant: the sums of streams of a whole micro-step share a few."""
    lines = printed(start_program("variants", tmp_path, *f"--preset={args}".split()))
    variants = {name: int(count) for name, _, count in map(str.split, lines)}
    assert 0 < variants["_mix_kernel"] <= MOST_VARIANTS and 0 < variants["_mix_grad_kernel"] <= MOST_VARIANTS, variants


@pytest.mark.parametrize("paired, offset, narrow, value", [
    (False, True, False, True), (True, False, False, False), (True, False, True, True)])
def test_tiles_by_pointers_are_the_same(monkeypatch, device, paired, offset, narrow, value):
    """Loads by pointers, for GPUs without TMA, give the same bits as TMA: ragged shapes and strided views."""
    import oracles
    import triton_kernels as tk
    gpu = device.type == "cuda"
    dtype, N, H, d, D = (torch.bfloat16, 1000, 6, 128, 768) if gpu else (torch.float32, 75, 2, 32, 40)

    def random(*shape, dtype=dtype):
        return torch.randn(shape, device=device).to(dtype)
    weight = random(H * (2 * d // (1 + narrow) + d), D) * D**-0.5
    x, rotary, grad = random(N, D), random(2 * N, d // 4, 2), random(N, H, d)
    ve, gate = (random(N, H * d), random(N, H).sigmoid()) if value else (None, None)
    starts, ends = oracles.documents(torch.tensor([0, N // 3, N // 3 + 7, N], dtype=torch.int32, device=device))
    gram, square = random(2, 100, 64), random(2, 72, 72)
    square = square + square.mT

    def results():
        qk, v, rstd = tk.project(x, weight, rotary, ve, gate, paired, offset, narrow)
        q, k = qk[:, :N].unbind()
        y, lse = tk.attend(q, k, v, random(N, H).fill_(0.5), starts, ends, 21, 0.2)
        *_, dgate = tk.output_grad(grad, y, v, None, random(N, H).fill_(0.5))
        grads = tk.attend_backward(grad, q, k, v, dgate, lse, starts, ends, 21, 0.2)
        products = [tk.XXT(gram, gram.new_empty(2, 100, 100)), tk.XTX(gram, gram.new_empty(2, 64, 64)),
                    tk.ba_plus_cAA(square, 0.5, -2.0, torch.empty_like(square), 3.0)]
        return [q, k, v, rstd, y, lse, *grads, *products]
    if not gpu:  # with AVX-512, OpenBLAS sums in another order if an operand of the interpreter is transposed in memory
        matmul = np.matmul
        monkeypatch.setattr(np, "matmul", lambda *ab, **more: matmul(*map(np.ascontiguousarray, ab), **more))
    by_descriptors = results()
    monkeypatch.setattr(tk, "_has_tma", lambda device: False)
    monkeypatch.setattr(tk.TensorDescriptor, "__post_init__", None)  # making a descriptor fails from here on
    for a, b in zip(by_descriptors, results(), strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


if __name__ == "__main__":
    if sys.argv[1] == "ahead":
        print(*compile_ahead(*sys.argv[2:]), sep="\n", end="")
    elif sys.argv[1] == "variants":
        for row in count_variants(*sys.argv[2:]):
            print(*row)
    else:
        for name, shared, launch in compile_all(int(sys.argv[1])):
            print(name, f"{shared:.1f}", launch)
