"""Time every kernel against the limits of this GPU.

    python tests/bench_kernels.py [--only=attention,mlp] [--json=table.json]

Prints one line per kernel and shape, most recoverable time first. The limit is the larger of operations / measured
matmul rate and bytes / measured copy bandwidth, with each operand counted once. "recoverable" is the time that a
training step on one GPU would gain if the kernel ran at its limit, for shapes that occur there. Times are medians and
quartiles with a cold L2 cache; kernel and PyTorch calls run in turn. Attention counts the (query, key) pairs inside
window and document; "64/128" are the widths of a head of q and k, and of v.
`records/compare.py` compares step times. The other files in this folder test correctness.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_gpt as T
import triton_kernels as tk
from data import loader as L
from data.run import trial
from data.run.machine import ceilings
from records.trace import WORK, seen_pairs

BF16 = torch.bfloat16
CONFIG = T.Config()
D, H, V, HEAD = CONFIG.model.model_dim, CONFIG.model.num_heads, CONFIG.model.padded_vocab, CONFIG.model.head_dim
MLP_DIM = CONFIG.model.mlp_dim
STAGES = CONFIG.schedule.stages[:3]
MICRO = CONFIG.system.micro_batches  # per step on one GPU
TOKENS = [stage.batch_tokens // MICRO for stage in STAGES]
BANKS = {param.label: param.shape[0] for param in T.param_table(CONFIG.model) if param.label.endswith("bank")}
BANK = 4 * BANKS["vo_bank"], 2 * BANKS["mlp_bank"]  # matrices
KINDS = Counter((layer.paired, layer.long, layer.narrow, layer.value_embed)
                for layer in CONFIG.model.layers if layer.attention)
NARROW = {(paired, False, True, value): 0 for paired, value in product((False, True), repeat=2)}
DEVICE, PEERS = "cuda", True
compiled = partial(torch.compile, dynamic=False)  # for peers
FP8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


class Case(NamedTuple):
    kernel: str
    shape: str
    run: Callable
    work: tuple  # operations and bytes, as in WORK of records/trace.py
    peers: dict[str, Callable] = {}  # other implementations of the same result
    # Calls per step on one GPU in the stage of this shape; 0 for shapes of several ranks and for parts of other lines.
    calls: float = 0
    fp8: bool = False  # whether the operations are in FP8


OWN_WORK = {  # bytes of the operations that records/trace.py leaves out
    "transpose_copy": lambda size: 4 * size, "transpose_add": lambda size: 6 * size,
    "transpose_bytes": lambda size: 2 * size,
    "scaled_weights": lambda size, passes: 2 * size * passes,  # how often (size,) bf16 is read or written
    # passes: how often a sum of streams reads or writes a bf16 tensor (N, D); two codes (FP8) count as one
    **dict.fromkeys(("mix", "mix_backward", "added_backward"), lambda N, D, passes: 2 * N * D * passes),
    "token_gate": lambda N, channels: N * (2 * channels + 4),
    "token_gate_backward": lambda N, channels: N * (4 * channels + 4), "exclude_values": lambda N, D: 6 * N * D,
    "output_grad": lambda N, D, excludes: (10 if excludes else 4) * N * D,
    "quantise_weights": lambda size: 4 * size,  # without the largest weights
    "signed_rows": lambda N, D, orders: 2 * N * D * (orders + 1)}  # the signs are few rows, which the cache holds


def work(name, *sizes):
    """The least operations and bytes of an operation."""
    return (0, OWN_WORK[name](*sizes)) if name in OWN_WORK else WORK[name][1](*sizes)


def case(name, shape, args, sizes, peers={}, calls=0):
    """The case of the function `name` of triton_kernels.py with these arguments, and the work of these sizes. peers
    "compiled" and "plain": the reference with these arguments."""
    if isinstance(peers, str):
        reference = getattr(tk, name + "_ref")
        peers = {peers: partial(compiled(reference) if peers == "compiled" else reference, *args)}
    return Case(name, shape, partial(getattr(tk, name), *args), work(name, *sizes), peers, calls)


def backward(name, shape, outputs, inputs, sizes, calls=0, of=None):
    """The case of the gradients of `inputs`, with the work of the operation `of` (name_backward) at these sizes."""
    run = partial(torch.autograd.grad, outputs, inputs, [rand(*x.shape, dtype=x.dtype) for x in outputs], True)
    return Case(f"{name}, backward", shape, run, work(of or f"{name}_backward", *sizes), calls=calls)


# ---- Measuring -------------------------------------------------------------------------------------------------------
class Timer:
    def __init__(self, repetitions):
        self.repetitions = repetitions
        # Many times as large as the L2. While the GPU fills it, the host launches the timed kernel.
        self.flush = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)

    def once(self, run):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        run()
        end.record()
        return start, end

    def __call__(self, *runs):
        """[quartiles in microseconds] of each callable; the callables run in turn."""
        for run in runs:  # compile, warm up
            run(), run()
        events = [[self.once(run) for run in runs] for _ in range(self.repetitions)]
        torch.cuda.synchronize()
        times = [[1000 * start.elapsed_time(end) for start, end in column] for column in zip(*events)]
        return [np.percentile(column, (25, 50, 75)).tolist() for column in times]


def measure(case, timer, limits):
    """One row of the table. limits: operations per second (bf16, fp8), bytes per second (copy)."""
    quartiles, *others = timer(case.run, *case.peers.values())
    (operations, size), us = case.work, quartiles[1]
    compute_s, copy_s = operations / (limits["fp8"] / 2 if case.fp8 else limits["bf16"]), size / limits["copy"]
    limit, compute = 1e6 * max(compute_s, copy_s), compute_s > copy_s
    return dict(kernel=case.kernel, shape=case.shape, us=us, quartiles=quartiles,
                rate=(1 + case.fp8) * operations / us / 1e6 if compute else size / us / 1e3,
                unit="TFLOP/s" if compute else "GB/s", of_limit=limit / us, calls=case.calls,
                recoverable_ms=case.calls * (us - limit) / 1000,
                peers={name: times[1] for name, times in zip(case.peers, others)})


def rand(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


# ---- Cases -----------------------------------------------------------------------------------------------------------
def example(op, dtype=BF16, ends=None, window=128, **sizes):
    """Arguments of an operation, of the widths of this file and these sizes. Cases with arguments of their own time
    parts of operations, the weights of a stage's tokens, or ids that repeat as those of text do."""
    widths = dict(D=D, H=H, d=HEAD, F=MLP_DIM, V=V)
    return trial.example(op, CONFIG.model, dtype, DEVICE, ends, window, **widths | sizes)


def muon_cases():
    for ranks in 8, 1:
        on_one = ranks == 1
        for n, height in (BANK[0] // ranks, D), (-(-BANK[1] // ranks), MLP_DIM):
            shape, square = f"{n}x{height}x{D}", f"{n}x{D}x{D}"
            name = "XXT" if height == D else "XTX"
            X, Q, _ = example(name, n=n, M=height)
            factors = (X, X.mT) if height == D else (X.mT, X)
            yield case(name, shape, (X, Q), (n, D, height), {"bmm": partial(torch.bmm, *factors, out=Q)}, 5 * on_one)
            P, *_ = args = example("ba_plus_cAA", n=n, M=D)
            yield case("ba_plus_cAA", square, args, (n, D),
                       {"baddbmm": partial(torch.baddbmm, P, P, P, beta=-2.0, alpha=0.5)}, 5 * on_one)


def update_cases():
    """The passes over banks and tables; the peers are compiled by PyTorch."""
    for n, height in (BANK[0], D), (BANK[1], MLP_DIM):
        size = n * height * D
        for name, own in ("fused_momentum", 4), ("normuon_update", 8):  # without and with the arguments of an average
            args = example(name, n=n, M=height)
            for each in args[:own], args:
                sizes = size, len(each) > own
                yield case(name, f"{n}x{height}x{D}, {work(name, *sizes)[1] // size} bytes", each, sizes, "compiled", 1)
    args = example("adam_update", R=V)
    for each in args[:9], args:
        yield case("adam_update", f"{V}x{D}, {22 + 8 * (len(each) > 9)} bytes", each, (V * D, len(each) > 9),
                   "compiled", 0.5)
    for dtype in BF16, torch.float32:
        args = example("replicated_update", dtype, R=max(1, 2**18 // D))
        size = len(args[0])
        yield case("replicated_update", f"{size}, {dtype}", args, (size, dtype.itemsize), "compiled", 0.5)


def mix_cases():
    """The sums of a layer, after attention and after its MLP, in bf16 and with FP8 codes."""
    for N in TOKENS:
        lane, a, x0, ngram = (rand(N, D).requires_grad_() for _ in range(4))
        number = torch.ones((), device=DEVICE, requires_grad=True)
        rows = [rand(N, 2, dtype=torch.float32).requires_grad_() for _ in range(3)]

        def after_attention(reader):
            added = tk.mix.add_later([x0, ngram], [rows[0].split(1, 1)])[1]
            return tk.mix([(number, lane), (None, a)], reader, added)

        def after_mlp(reader, codes=None):
            return tk.mix([(number, lane), (None, a)], reader, (), codes)

        for name, function, streams in ("4 streams", after_attention, 4), ("2 streams", after_mlp, 2):
            for kind, reader in (("", tk.Reader()), (", codes", tk.Reader(2.0**-4, T.GATE_CHANNELS)))[:1 + FP8]:
                yield Case("mix", f"{name}{kind}, {N}", partial(function, reader), work("mix", N, D, streams + 2))
        for kind, reader in (("", tk.Reader()), (", codes", tk.Reader(2.0**-4)))[:1 + FP8]:
            mixed = after_mlp(reader, tk.GradCodes(2.0**-6) if reader.scale else None)
            yield backward("mix", f"2 streams{kind}, {N}", (mixed.x, mixed.normed), (lane, a, number), (N, D, 6))
        places = [tk.mix([(None, lane)], None, [each]).x for each in
                  tk.mix.add_later([x0, ngram], [row.split(1, 1) for row in rows])[1]]
        yield backward("mix", f"3 places that add 2 streams, {N}", places, (x0, ngram, *rows), (N, D, 7),
                       of="added_backward")
        inputs = rand(N, T.GATE_CHANNELS), rand(1, T.GATE_CHANNELS), torch.ones(1, device=DEVICE)
        gate = tk.token_gate(*(x.requires_grad_() for x in inputs))
        yield case("token_gate", f"{N}", inputs, (N, T.GATE_CHANNELS))
        yield backward("token_gate", f"{N}", [gate], inputs, (N, T.GATE_CHANNELS))
        y, v, dz = (rand(N, H, HEAD) for _ in range(3))
        for share in rand(N, H, dtype=torch.float32), None:
            kind, gate = f"{N}{', without values' if share is None else ''}", rand(N, H).sigmoid()
            if share is not None:
                yield case("exclude_values", kind, (y, v, share), (N, D), "compiled")
            yield case("output_grad", kind, (dz, y, v, share, gate), (N, D, share is not None))


def weights_cases():
    """The matrices of all layers times their factors, the projections to values and the MLPs, with their gradients:
    passes over the scaled half, and over the stack of all gradients."""
    for n, P, height in (BANK[0] // 4, 1, D), (BANK[1] // 2, 2, MLP_DIM):
        bank, factors = rand(n, P, height, D).requires_grad_(), torch.ones(n, device=DEVICE, requires_grad=True)
        for in_codes in (False, True)[:1 + FP8]:
            shape, size = f"{n}x{P}x{height}x{D}{', codes' * in_codes}", n * height * D
            if not in_codes:
                yield case("scaled_weights", shape, (bank, factors), (size, 2), "plain", MICRO)
            matrices = [matrix for layer in tk.scaled_weights(bank, factors, in_codes) for matrix in layer]
            yield backward("scaled_weights", shape, matrices, (bank, factors), (size, 2 * P + 3 - in_codes), MICRO,
                           "scaled_weights")


def transpose_cases():
    src, dst = example("transpose_copy", N=V)  # (V, D), (D, V)
    yield case("transpose_copy", f"{D}x{V}", (dst, src), (D * V,), {"copy_": lambda: src.copy_(dst.mT)}, 0.5)
    yield case("transpose_add", f"{V}x{D}", (src, dst), (D * V,), {"add_": lambda: dst.add_(src.mT)}, 0.5)


def documents(n, longest, seed=0):
    """cu_seqlens of packed documents with log-normal lengths, median 490."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < n:
        lengths.append(int(np.clip(rng.lognormal(np.log(490), 0.95), 64, longest)))
    return torch.from_numpy(np.minimum([0, *np.cumsum(lengths)], n).astype(np.int32)).to(DEVICE)


def flash2(q, k, v, dy, cu, longest, window):
    """(forward, backward) of PyTorch's varlen_attn, which is FlashAttention-2."""
    q, k = (F.pad(x, (0, v.size(2) - x.size(2))) for x in (q, k))  # it takes only one width
    packed = cu, cu, longest, longest, 0.0, False
    window = dict(scale=0.1, window_size_left=window, window_size_right=0)

    def forward():
        return torch.ops.aten._flash_attention_forward(q, k, v, *packed, False, **window)

    out, lse, *_ = forward()
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=DEVICE)
    return forward, lambda: torch.ops.aten._flash_attention_backward(
        dy, q, k, v, out, lse, *packed, no_dropout, no_dropout, **window)


def attention_cases():
    for tokens, stage in zip(TOKENS, STAGES):
        for paired, long, d in (False, False, HEAD), (False, True, HEAD), (True, False, HEAD), (
                False, False, HEAD // 2), (True, False, HEAD // 2):
            N, heads, longest = tokens, H, stage.max_doc_len
            if paired:
                N, heads, longest = 2 * N, H // 2, 2 * longest
            window = stage.long_window if long else stage.short_window
            cu = documents(N, longest)
            start, end = torch.from_numpy(L.document_of_tokens(cu.cpu().numpy(), N)).to(DEVICE)
            q, k, v, dy = (F.rms_norm(rand(N, heads, width), (width,)) for width in (d, d, HEAD, HEAD))
            args = q, k, v, torch.sigmoid(rand(N, heads)), start, end, window, 0.1
            y, lse = tk.attend(*args)
            name = f"FA2{', q and k padded with zeros' * (d < HEAD)}"
            peers = {name: flash2(q, k, v, dy, cu, longest, window)} if PEERS else {}
            sizes = tokens, D, HEAD, d / HEAD, heads * seen_pairs(np.diff(cu.tolist()), window)
            shape = f"{N}, {heads} heads of {d}/{HEAD}, window {window}"
            calls = MICRO * sum(n for kind, n in KINDS.items() if kind[:3] == (paired, long, d < HEAD))
            forward, backward = ({name: peer[i] for name, peer in peers.items()} for i in range(2))
            yield case("attend", shape, args, sizes, forward, calls)
            *_, dgate = tk.output_grad(dy, y, v, None, args[3])
            yield case("attend_backward", shape, (dy, *args[:3], dgate, lse, *args[4:]), sizes, backward, calls)


def block_cases():
    """The projection and its gradient, in bf16 and in FP8, and the gates of heads, by kind of layer."""
    one = torch.ones((), device=DEVICE)
    for N in TOKENS:
        x, rotary = rand(N, D), rand(2 * N, HEAD // 4, 2)
        ve, gate = rand(N, D), torch.sigmoid(rand(N, H))
        w_out, w_ve = (rand(H, T.GATE_CHANNELS) for _ in range(2))
        for (paired, offset, narrow, value), layers in (NARROW | KINDS).items():
            width = HEAD // 2 if narrow else HEAD
            grads = [rand(N, H, w) for w in (width, width, HEAD)]
            weight = rand(H * (2 * width + HEAD), D) * D**-0.5
            dqkv = torch.empty(N, weight.size(0), device=DEVICE, dtype=BF16)
            switches = dict(paired=paired, offset=offset, narrow=narrow, value=value)
            shape = f"{N}, {'+'.join(name for name, on in switches.items() if on) or 'plain'}"
            values = (ve, gate) if value else (None, None)
            args = (x, weight, rotary, *values, paired, offset, narrow)
            sizes, of_grads = (N, D, value, width / HEAD), (N, D, value, paired, width / HEAD)
            planes, _, rstd = tk.project(*args)
            yield case("project", shape, args, sizes, {"GEMM alone": partial(F.linear, x, weight)}, MICRO * layers)
            dv = grads[2] if paired else dqkv[:, -D:].view(N, H, HEAD)
            more = planes, rstd, rotary, *values, paired, offset
            yield case("project_backward", shape, (*grads[:2], dv, *more, dqkv), of_grads, calls=MICRO * layers)
            if FP8:
                yield Case("project, FP8", shape, partial(tk.project, *args, (
                    x.to(tk.E4M3), weight.to(tk.E4M3), one, one)), work("project", *sizes, True), fp8=True)
                codes = [rand(*s).to(tk.E5M2) for s in ((N, len(weight)), (len(weight), N))]
                yield Case("project_backward, FP8", shape, partial(tk.project_backward, *grads, *more, *codes, one),
                           work("project_backward", *of_grads, True))
            if narrow:  # the gates do not depend on the widths
                continue
            args = x, *((ve, w_ve) if value else (None, None)), w_out, paired
            gates, channels = tk.head_gates(*args), T.GATE_CHANNELS * (3 if value and not paired else 2) // 2
            sizes = N, channels, H * len(gates)
            yield case("head_gates", shape, args, sizes, "plain", MICRO * layers)
            back = gates[0], gates[-1], gates, *args, torch.zeros_like(x), torch.zeros_like(ve) if value else None
            yield case("head_gates_backward", shape, back, sizes, calls=MICRO * layers)


def mlp_cases():
    sizes = [(N, MLP_DIM, len(CONFIG.model.layers)) for N in TOKENS]
    for N, width, count in *sizes, (TOKENS[0], 2816, 0):  # 2816 = 22 * 128, PR 349
        shape = f"{N}, width {width}"
        g, (x, W1, W2) = rand(N, D), (leaf.detach() for leaf in example("mlp", N=N, F=width))
        post, _ = tk._relu_square(x, W1)
        square = compiled(lambda pre: pre.relu().square())
        derivative = compiled(lambda u, pre: 2 * u * pre.relu())
        yield Case("mlp: relu(x W1ᵀ)²", shape, partial(tk._relu_square, x, W1), work("mlp", N, D, width), {
            "GEMM alone": partial(F.linear, x, W1), "GEMM + pass": lambda x=x, W=W1, f=square: f(x @ W.t())},
            MICRO * count)
        yield Case("mlp: dpre", shape, partial(tk._relu_square, g, W2, post), work("mlp_backward", N, D, width), {
            "GEMM + pass": lambda g=g, W=W2, p=post, f=derivative: f(g @ W.t(), p)}, MICRO * count)


def fp8_cases():
    """The MLP in FP8: quantising, the two kernels, and all of it beside the MLP in bf16."""
    count, width = len(CONFIG.model.layers), MLP_DIM
    bank = rand(count, 2, width, D) * D**-0.5
    mlps = tk.Fp8Mlps(bank, 1.0)
    yield Case("Fp8Mlps.refresh", f"{2 * count}x{width}x{D}", mlps.refresh, (0, 6 * bank.numel()), calls=1)
    W1, W2 = mlps.codes[0]
    x_scale, w1_scale, w2_scale, post_scale, g_scale, dpre_scale = mlps.scales[0, :, 0]
    for N in TOKENS:
        shape, each = str(N), dict(fp8=True, calls=MICRO * count)
        x, g = F.rms_norm(rand(N, D), (D,)), rand(N, D) * 0.01
        (x8, x8_t), (g8, _) = tk.both_layouts(x, tk.x8_scale(D), tk.E4M3), tk.both_layouts(g, tk.G8_SCALE, tk.E5M2)
        yield Case("transpose_copy", f"{N}x{D} bytes", partial(tk.transpose_copy, x8, x8_t),
                   work("transpose_bytes", N * D), calls=2 * MICRO * count)
        up = x8, W1, x_scale, w1_scale, post_scale, mlps.post_max[0]
        post, _ = tk.relu_square_codes(*up)
        yield Case("mlp, FP8: codes of post", shape, partial(tk.relu_square_codes, *up), work("mlp", N, D, width, True),
                   {"product alone": partial(tk.scaled_product, x8, W1, x_scale, w1_scale, fast=True)}, **each)
        down = g8, W2, g_scale, w2_scale, dpre_scale, mlps.dpre_max[0], post, post_scale
        yield Case("mlp, FP8: codes of dpre", shape, partial(tk.relu_square_codes, *down),
                   work("mlp_backward", N, D, width, True),
                   {"product alone": partial(tk.scaled_product, g8, W2, g_scale, w2_scale)}, **each)
        leaves = [t.requires_grad_() for t in (x, *bank[0].clone())]

        def whole(mlp, leaves=leaves, g=g):
            torch.autograd.grad(mlp(*leaves), leaves, g)

        yield Case("mlp, FP8: all of it", shape, partial(whole, partial(mlps, 0)),
                   (6 * N * D * width, N * (13 * D + 7 * width)), {"bf16": partial(whole, tk.mlp)}, fp8=True)


def head_cases():
    weights = torch.tensor([1.0, 0.5, 0.25], device=DEVICE)
    weight = torch.nn.Parameter(rand(D, V) * 0.02)
    head = tk.HeadLoss(weight, BF16, True)
    yield Case("quantise_weights", f"{D}x{V}", head.refresh, work("quantise_weights", D * V), calls=0.5)
    head.embedding = torch.nn.Parameter(rand(V, D))
    head.embedding.grad = torch.zeros_like(head.embedding)
    for N, stage in zip(TOKENS, STAGES):
        h = rand(N, D).requires_grad_()
        targets, w = torch.randint(V, (N,), device=DEVICE), weights[:len(stage.mtp_start)]
        rows = min(N, head.block)
        logits, grad = rand(rows, V) * 4, torch.empty(rows, V, device=DEVICE, dtype=torch.float8_e5m2)
        args = logits, tk.multi_token_targets(targets, len(w))[:rows], w, 0.1, 0.001, grad
        yield case("cross_entropy", f"{rows} rows of {N}", args, (rows, V, True), "compiled", MICRO * N / rows)
        codes = torch.randint(256, (N, V), device=DEVICE, dtype=torch.uint8)
        turned = torch.empty(V, N, device=DEVICE, dtype=torch.uint8)
        yield Case("transpose_copy", f"{N}x{V} bytes", partial(tk.transpose_copy, codes, turned),
                   work("transpose_bytes", N * V), {"copy_": partial(turned.copy_, codes.mT)}, MICRO)

        def whole(targets, candidates=None, h=h, w=w):
            weight.grad = h.grad = None
            head(h, targets, w, 0.125, candidates=candidates).backward()

        yield Case("HeadLoss, all of it", str(N), partial(whole, targets), (3 * N * D * V, 7 * N * V), fp8=True)

        P = min(V, T.num_candidates(CONFIG, N) or V)
        text = (np.random.default_rng(0).pareto(1.0, N) * 20).astype(np.int64) % V  # not more distinct ids than text
        candidates, positions = (torch.from_numpy(x).to(DEVICE) for x in L.sample_candidates(text, V, P, 0))
        logits, grad = rand(N, P) * 4, torch.empty(N, P, device=DEVICE, dtype=torch.float8_e5m2)
        args = logits, tk.multi_token_targets(positions, len(w)), w, 0.1, 0.001, grad
        yield case("cross_entropy", f"{N} rows, {P} candidates", args, (N, P, True))
        yield Case("HeadLoss, sampled", f"{N}, {P} candidates", partial(whole, positions, candidates),
                   (3 * N * D * P, 7 * N * P), fp8=True)


def pointer_cases():
    for N, stage in zip(TOKENS, STAGES):
        cu = documents(N, stage.max_doc_len)
        *args, targets = example("pointer", ends=cu.cpu().numpy(), window=N, N=N)
        args.append(tk.multi_token_targets(targets[:, 0].contiguous(), len(stage.mtp_start)))
        sizes = N, T.POINTER_WIDTH, seen_pairs(np.diff(cu.tolist()), N) - N
        yield case("pointer", str(N), args, sizes, calls=MICRO)
        yield backward("pointer", str(N), tk.pointer(*args), args[:3], sizes, MICRO)
        args, sizes = example("pointer_inputs", ends=cu.cpu().numpy(), N=N), sizes[:2]
        yield case("pointer_inputs", str(N), args, sizes, "plain", MICRO)
        yield backward("pointer_inputs", str(N), tk.pointer_inputs(*args), args[:3], sizes, MICRO)


def after(run, *changed):
    """A call of `run` that finds these tensors as they are now."""
    before = [x.clone() for x in changed]

    def again():
        for x, old in zip(changed, before):
            x.copy_(old)
        run()
    return again


def embedding_cases():
    bigrams, touched = CONFIG.model.ngrams[0][1], max(TOKENS)
    for N in TOKENS:
        ids = torch.from_numpy((np.random.default_rng(0).pareto(1.0, N) * 20).astype(np.int32) % V).to(DEVICE)
        for name, rows, calls in ("token", V, 6 * MICRO), ("bigram", bigrams, MICRO):
            rows_of_tokens = (ids * 7919) % rows if name == "bigram" else ids
            pieces = torch.from_numpy(L.sorted_pieces(rows_of_tokens.cpu().numpy())).to(DEVICE)
            args = torch.zeros(rows, D, device=DEVICE, dtype=BF16), tk.SortedIds(rows_of_tokens, pieces), rand(N, D)
            yield case("embedding_grad", f"{name}, {N}", args, (N, D, rows_of_tokens.unique().numel()), "plain", calls)
        args = example("embedding_grad", R=bigrams, N=N)
        ids, (place, count) = args[1].ids, args[3:6:2]
        yield Case("embedding_grad", f"2 orders, {N}, places for all rows",
                   after(partial(tk.embedding_grad, *args), place, count),
                   (0, 2 * D * (len(ids) + ids.unique().numel())), calls=MICRO)
        table, ids, _, signs, sign_ids = example("signed_rows", R=bigrams, N=N)
        for orders in 1, 2:
            args = table, ids[:orders * N], orders, signs, sign_ids[:orders * N]
            yield case("signed_rows", f"{orders} orders, {N}", args, (N, D, orders), "plain", MICRO)
    shape = f"{touched} of {bigrams} rows, and the write of their gradients"
    p, v, last, is_touched, grad, *numbers = example("update_rows", R=bigrams)
    ids = (torch.arange(touched, device=DEVICE) * 7919 % bigrams).unique()
    values = grad[ids]
    grad.zero_(), is_touched.zero_()

    def update_rows():
        grad[ids], is_touched[ids] = values, True  # the update clears both
        tk.update_rows(p, v, last, is_touched, grad, *numbers)

    all_rows = partial(tk.adam_update, p, torch.zeros_like(v), v, grad, 1e-3, 0.0, 0.75, 0.95, 1e-10)
    yield Case("update_rows", shape, update_rows, (0, 20 * D * len(ids)),
               {"all rows, with a first moment": all_rows}, 0.5)
    args = example("update_few_rows", R=bigrams, N=touched)
    grad, place, _, count = args[3:7]
    run = after(partial(tk.update_few_rows, *args), grad[:count.item()], place, count)
    yield Case("update_few_rows", shape, run, (0, 12 * D * count.item()), calls=0.5)


FAMILIES = {name.removesuffix("_cases"): cases for name, cases in [*globals().items()] if name.endswith("_cases")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(FAMILIES), help="comma-separated: %(default)s")
    parser.add_argument("--json", help="also write the table here")
    parser.add_argument("--repetitions", type=int, default=25)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(FAMILIES):
        parser.error(f"unknown families {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if not torch.cuda.is_available():
        sys.exit("error: bench_kernels.py needs a GPU")
    torch.manual_seed(0)
    timer, limits, rows = Timer(args.repetitions), ceilings(), []
    machine = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=tk.triton.__version__,
                   cuda=torch.version.cuda, bf16_tflops=limits["bf16"] / 1e12, fp8_tflops=limits["fp8"] / 1e12,
                   copy_gb_per_s=limits["copy"] / 1e9)
    print(", ".join(f"{key} {value:.0f}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in machine.items()))
    try:
        for family in args.only.split(","):
            for case in FAMILIES[family]():
                rows.append(measure(case, timer, limits))
                print(".", end="", file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
        print(file=sys.stderr)
    finally:  # after an error, the rows measured so far are printed
        rows.sort(key=lambda row: -row["recoverable_ms"])
        print("| kernel | shape | µs (quartiles) | rate | of limit | calls per step | recoverable ms | beside it, µs |",
              "|---" * 8 + "|", sep="\n")
        for row in rows:
            low, median, high = row["quartiles"]
            peers = ", ".join(f"{name} {us:.1f}" for name, us in row["peers"].items())
            print(f"| {row['kernel']} | {row['shape']} | {median:.1f} ({low:.1f}-{high:.1f}) |"
                  f" {row['rate']:.0f} {row['unit']} | {row['of_limit']:.0%} | {row['calls']:g} |"
                  f" {row['recoverable_ms']:.2f} | {peers} |")
        if args.json:
            Path(args.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
