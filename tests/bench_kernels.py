"""Time every kernel against the limits of this GPU:  python tests/bench_kernels.py [--only=attention] [--json=table.json]

One line per kernel and shape, most recoverable time first. "limit" is the larger of operations / measured matmul rate and
bytes / measured copy bandwidth (each operand counted once); "recoverable" is what one training step on one GPU would gain if
the kernel ran at its limit. Medians and quartiles of cold-L2 repetitions; the PyTorch call beside each kernel in turn with it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_gpt as T
import triton_kernels as tk

BF16 = torch.bfloat16
MICRO_STEPS = 8  # per training step on one GPU
CONFIG = T.Config()
D, V = CONFIG.model.model_dim, CONFIG.model.padded_vocab


class Case(NamedTuple):
    kernel: str
    shape: str
    run: Callable
    torch: Callable | None = None  # what it replaces
    flops: float = 0  # dense, a multiply-add is two
    fp8: bool = False
    bytes: float = 0
    calls: float = 0  # per training step on one GPU at this shape; 0: a shape of several ranks, or a part of another line


def quartiles(samples):
    return [float(q) for q in np.percentile(samples, (25, 50, 75))]


class Timer:
    def __init__(self, repetitions=25):
        self.repetitions = repetitions
        self.flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # several times the L2

    def once(self, run):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        run()
        end.record()
        return start, end

    def __call__(self, *runs):
        """Quartiles in microseconds of each, taken in turn."""
        for run in runs:  # compile, warm up
            run(), run()
        events = [[self.once(run) for run in runs] for _ in range(self.repetitions)]
        torch.cuda.synchronize()
        return [quartiles([1000 * a.elapsed_time(b) for a, b in column]) for column in zip(*events)]


def ceilings(timer):
    """(bf16 FLOP/s, fp8 FLOP/s, copied bytes/s), read and written bytes both counted, on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    src = torch.randint(2**30, (2**28,), device="cuda", dtype=torch.int32)
    dst = torch.empty_like(src)
    times = timer(lambda: a @ b, lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=BF16, use_fast_accum=True),
                  lambda: dst.copy_(src))
    work = 2 * 8192**3, 2 * 8192**3, 2 * src.nbytes
    return [w / (median * 1e-6) for w, (_, median, _) in zip(work, times)]


def documents(n, longest, seed=0):
    """cu_seqlens of packed documents with log-normal lengths, median 490."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < n:
        lengths.append(int(np.clip(rng.lognormal(np.log(490), 0.95), 64, longest)))
    borders = np.minimum(np.cumsum(lengths), n)
    return torch.from_numpy(T.cu_seqlens(borders, n, T.cu_seqlens_size(n, CONFIG.data.tokens_per_doc))).cuda()


def rand(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def symmetric_cases():
    for ranks in (1, 8):
        n, m = 40 // ranks, 24 // ranks
        X, tall, P, Q = rand(n, D, D), rand(m, 4 * D, D), rand(n, D, D), torch.empty(n, D, D, device="cuda", dtype=BF16)
        P = (P + P.mT) / 2
        PT, QT = P[:m], Q[:m]
        calls = 5 * (ranks == 1)
        for A, out, count in (X, Q, n), :
            yield Case("XXT", f"{count}x768x768", lambda A=A, out=out: tk.XXT(A, out), lambda A=A, out=out: torch.bmm(A, A.mT, out=out),
                       flops=2 * count * D**3, bytes=4 * count * D * D, calls=calls)
        yield Case("XTX", f"{m}x3072x768", lambda: tk.XTX(tall, QT), lambda: torch.bmm(tall.mT, tall, out=QT),
                   flops=8 * m * D**3, bytes=2 * m * 5 * D * D, calls=calls)
