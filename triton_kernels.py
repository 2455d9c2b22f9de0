"""Triton kernels of the trainer, each beside the plain PyTorch that it replaces.

Every operation of IMPLEMENTATIONS has a wrapper `<name>` that checks its arguments and launches, a plain `<name>_ref` with
the same contract that tests and benchmarks compare with, and a Triton kernel. CPU tensors take the reference, so the
trainer runs without a GPU. TRITON_INTERPRET=1, set before the import, sends them through Triton's interpreter, as the tests do; what that
gets wrong (bf16 products, FP8) still takes the reference.

Conventions
  Importing this file only defines, and registers two ops with their gradients; launch parameters are in tables, nothing is
  autotuned. Times are medians on one H200 unless another machine is named.
  Strides are in elements. Offsets into tensors of N·D elements or more are int64; smaller ones (tables, gates) may be int32.
  Run-time floats are cast to fp32 inside the kernel: torch.compile hands Python floats over as fp64.
  Dtypes come from the pointers. Results are rounded once unless the section says otherwise.

Contents
  1  XXT, XTX, ba_plus_cAA                  symmetric products of the Muon iteration; polar_express, the iteration
  2  fused_momentum, normuon_tail           NorMuon before and after the iteration
  3  transpose_copy, transpose_add          moving the tied head between its two layouts; FP8 gradients
  4  attend, attend_backward                sliding-window attention within packed documents, output gate
  5  attention_block                        gates, projection, QK-norm, rotary, key offset, value embedding, attention
  6  mlp                                    ReLU² MLP
  7  HeadLoss, cross_entropy, quantise      FP8 or plain head, softcapped multi-token cross-entropy and its gradient
  8  lookup, embedding_grad                 rows of the embedding tables and their gradients
  9  choose_ops                             one implementation per op, chosen once
"""

import functools
import math
import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

NO_TRITON = ""  # or why
try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:  # as on macOS and Windows
    NO_TRITON = str(error)

    class Absent:
        """Stands for Triton: the kernels can be defined, and the references run."""
        __version__ = "absent"

        def __getattr__(self, name):
            return self

        def __call__(self, decorated=None, *args, **kwargs):
            return self if decorated is None else decorated

    triton = tl = gluon = gl = Absent()

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, when triton.jit below reads it too


def _takes_ref(*tensors, exact=True):
    """Whether an op with these tensors runs in plain PyTorch: on the CPU, unless Triton's interpreter was asked for.

    exact=False: what multiplies or rounds. The interpreter of Triton 3.7 gets that wrong for anything but fp32.
    """
    return tensors[0].device.type == "cpu" and not (INTERPRETED and (exact or all(x.dtype == torch.float32 for x in tensors)))


def _sm_count(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _tma(device) -> bool:
    """Whether tiles come through the copy engine (TMA), from Hopper on. What Triton puts in the place of descriptors before Hopper is
    not pipelined: steps took four times as long (records/2026-11-20_hardware). So kernels load by pointers there."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def _shared_memory(device) -> int:
    """Bytes that a program may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 2**20


# ======================================================================================================================
# 1  Symmetric products
#
#   XXT(X, out, scale)                          out = s² X Xᵀ          X (n, M, K), out (n, M, M)   replaces X @ X.mT
#   XTX(X, out, scale)                          out = s² Xᵀ X          X (n, M, K), out (n, K, K)   replaces X.mT @ X
#   ba_plus_cAA(A, alpha, beta, out, gamma, scale)
#                                               out = s (alpha A Aᵀ + beta A + gamma I)             replaces torch.baddbmm
#                                                                      A, out (n, M, M), A symmetric
#
# scale: s (n,) fp32, or None for 1. The batch dimension may be absent. bf16 or fp32, fp32 accumulation, one rounding, `out`
# exactly symmetric. Rows of the input are contiguous and begin at multiples of 16 bytes (the copy engine wants it); `out`
# has any strides.
# scale normalises X without a pass over X. gamma makes aX + (bP + cPP)X one plain product: an addend costs the library a
# copy of X (101 instead of 63 µs at 40·768², 217 instead of 135 at 24·3072·768). Against fp64, five iterations with both
# are 0.58 to 1.07 times as far off as with X rounded after scaling and aX added in fp32.
# Only the tiles on and below the diagonal are launched (21 of 36 at M = 768 with 128-tiles). A tile below the diagonal
# is stored twice, the second time transposed; a tile on the diagonal gets its upper half from its lower half. Symmetry thus
# holds by construction, whatever order the products are summed in. For an A that is not quite symmetric, ba_plus_cAA mirrors
# what the lower half of A gives.
# Tiles come through the copy engine (TMA): one instruction in place of 256 threads that compute addresses and masks, and
# zeros beyond the edges. XTX is the same code with tiles taken across and turned on chip: no copy, and tall matrices keep
# the small (K, K) product.
#
# H200, µs (torch): XXT 5·768² 11.0 (12.6), 40·768² 53.6 (57.0); ba_plus_cAA 5·768² 11.8 (19.4), 40·768² 59.4 (98.4);
# XTX 3·3072·768 18.6 (20.7), 24·3072·768 83.9 (116.0), which is 605 TFLOP/s of what is computed.
#
# Computing half of the symmetric products of Muon and mirroring it: byronxu99, PR 109.
# Loading along the contiguous axis and transposing on chip: EmmettBicker (Aster), PR 217.
# The tall form: ChrisJMcCormick, PR 233.
# ======================================================================================================================

# (programs per SM up to which it is used, launch); the first that fits. Square tiles: the diagonal misses one or is its own.
# A program keeps num_stages · 2 · BLOCK · BLOCK_K operands in shared memory, 227 KiB per SM. It waits for memory at its start
# and at its end, so an SM wants two of them, or deep pipelining where there are not enough. Medians in µs, H200:
GRAM_LAUNCH = {
    torch.bfloat16: (
        # 8 GPUs. 16 KiB a stage; as many stages as let two or three programs share an SM, all of them resident at once.
        (2, dict(BLOCK=64, BLOCK_K=64, num_warps=4, num_stages=6)),  # XTX 3·3072·768: 20.0, with 128-tiles 24.3
        (3, dict(BLOCK=64, BLOCK_K=64, num_warps=4, num_stages=4)),  # ba_plus_cAA 5·768²: 12.5, with 128-tiles 13.7
        # 4 GPUs, of those with that much memory. 32 KiB a stage, one program per SM: XTX 6·3072·768: 24.8, with 4 stages 27.9, with 3 33.5.
        (1, dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=6)),
        # 1 or 2 GPUs: two programs per SM, 128 registers a thread. XXT 40·768²: 55, with 4 stages and one program 63.
        (math.inf, dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=3, maxnreg=128))),
    # Exact fp32 has no tensor-core path and exists for tests: tiles small enough for registers and shared memory.
    torch.float32: ((math.inf, dict(BLOCK=64, BLOCK_K=32, num_warps=4, num_stages=2)),),
}


def _mirror_lower(product, out):
    return out.copy_(product.tril() + product.tril(-1).mT)


def _wide(X):
    return X.to(torch.promote_types(X.dtype, torch.float32))


def _per_matrix(scale):
    return 1.0 if scale is None else scale.view(-1, 1, 1)


def XXT_ref(X, out, scale=None):
    return _mirror_lower(_per_matrix(scale)**2 * (_wide(X) @ _wide(X).mT), out)


def XTX_ref(X, out, scale=None):
    return _mirror_lower(_per_matrix(scale)**2 * (_wide(X).mT @ _wide(X)), out)


def ba_plus_cAA_ref(A, alpha, beta, out, gamma=0.0, scale=None):
    A = _wide(A)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return _mirror_lower(_per_matrix(scale) * (alpha * (A @ A.mT) + beta * A + gamma * eye), out)


@triton.jit
def _gram_tile(X, first, start, M, K, stride, ACROSS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK, BLOCK_K) of X (M, K), or of Xᵀ, X (K, M); zeros beyond."""
    m = first.to(tl.int64) + tl.arange(0, BLOCK)[:, None]
    k = (start + tl.arange(0, BLOCK_K))[None, :]
    return tl.load(X + (k.to(tl.int64) * stride + m if ACROSS else m * stride + k), mask=(m < M) & (k < K), other=0.0)


@triton.jit
def _gram_kernel(Tiles, X, Out, Scale, M, K, stride_xb, stride_xm, stride_ob, stride_om, stride_on, alpha, beta, gamma,
                 ACROSS: tl.constexpr, ADDEND: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr, BLOCK: tl.constexpr,
                 BLOCK_K: tl.constexpr):
    # Program t of the triangle 0 | 1 2 | 3 4 5 | ... is tile (row, col), col <= row. The first tile of a row has
    # 8t+1 = (2 row + 1)², the last of the row above 8 less: 8t+4 lies between, so no rounding of the root moves a tile.
    t = tl.program_id(0)
    row = ((tl.sqrt((8 * t + 4).to(tl.float32)) - 1) / 2).to(tl.int32)
    col = t - row * (row + 1) // 2
    batch = tl.program_id(1)

    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if not TMA:
            x = X + batch.to(tl.int64) * stride_xb
            a = _gram_tile(x, row * BLOCK, start, M, K, stride_xm, ACROSS, BLOCK, BLOCK_K)
            b = _gram_tile(x, col * BLOCK, start, M, K, stride_xm, ACROSS, BLOCK, BLOCK_K).T
        elif ACROSS:  # Tiles is a descriptor of (n, K, M), else of (n, M, K)
            a = Tiles.load([batch, start, row * BLOCK]).reshape(BLOCK_K, BLOCK).T
            b = Tiles.load([batch, start, col * BLOCK]).reshape(BLOCK_K, BLOCK)
        else:
            a = Tiles.load([batch, row * BLOCK, start]).reshape(BLOCK, BLOCK_K)
            b = Tiles.load([batch, col * BLOCK, start]).reshape(BLOCK, BLOCK_K).T
        acc = tl.dot(a, b, acc, input_precision="ieee")  # "ieee": fp32 operands are not cut to tf32

    i = tl.arange(0, BLOCK)
    m = row.to(tl.int64) * BLOCK + i  # (BLOCK,) rows of Out
    n = col.to(tl.int64) * BLOCK + i  # (BLOCK,) columns of Out
    in_tile = (m < M)[:, None] & (n < M)[None, :]
    if ADDEND:
        addend = tl.load(X + batch.to(tl.int64) * stride_xb + m[:, None] * stride_xm + n[None, :], mask=in_tile, other=0.0)
        acc = tl.cast(alpha, tl.float32) * acc + tl.cast(beta, tl.float32) * addend.to(tl.float32)
        acc += tl.where(m[:, None] == n[None, :], tl.cast(gamma, tl.float32), 0.0)
    if SCALED:
        scale = tl.load(Scale + batch)
        acc *= scale if ADDEND else scale * scale
    tile = acc.to(Out.dtype.element_ty)
    Out += batch.to(tl.int64) * stride_ob
    if row == col:
        tile = tl.where(i[:, None] >= i[None, :], tile, tl.trans(tile))
    else:
        mirrored = Out + n[:, None] * stride_om + m[None, :] * stride_on
        tl.store(mirrored, tl.trans(tile), mask=(n < M)[:, None] & (m < M)[None, :])
    tl.store(Out + m[:, None] * stride_om + n[None, :] * stride_on, tile, mask=in_tile)


def _check_gram(name, X, out, axis, scale):
    """`out` has as many rows and columns as X has along `axis`."""
    if X.ndim not in (2, 3):
        raise ValueError(f"{name}: input must have 2 or 3 dimensions, got shape {tuple(X.shape)}")
    side = X.shape[axis]
    if X.dtype not in GRAM_LAUNCH:
        raise ValueError(f"{name}: input must be bfloat16 or float32, got {X.dtype}")
    if out.shape != X.shape[:-2] + (side, side):
        raise ValueError(f"{name}: out must have shape {(*X.shape[:-2], side, side)}, got {tuple(out.shape)}")
    if out.dtype != X.dtype or out.device != X.device:
        raise ValueError(f"{name}: out is {out.dtype} on {out.device}, input is {X.dtype} on {X.device}")
    if out is X:
        raise ValueError(f"{name}: out must not be the input, which is read while out is written")
    if scale is not None and (scale.shape != X.shape[:-2] or scale.dtype != torch.float32 or scale.device != X.device
                              or not scale.is_contiguous()):
        raise ValueError(f"{name}: scale must be contiguous float32 of shape {tuple(X.shape[:-2])} on {X.device}, got"
                         f" {scale.dtype} of shape {tuple(scale.shape)} on {scale.device}")


def _launch_gram(name, X, axis, out, scale, alpha=1.0, beta=0.0, gamma=0.0, addend=False):
    """Sums products over the axis of X other than `axis` (-1 or -2)."""
    if X.numel() == 0:
        return out.zero_()
    X, out_3d = (X, out) if X.ndim == 3 else (X[None], out[None])
    if X.stride(2) != 1 or X.data_ptr() % 16 or any(stride * X.element_size() % 16 for stride in X.stride()[:2]):
        raise ValueError(f"{name}: rows of the input must be contiguous and begin at multiples of 16 bytes, got strides"
                         f" {X.stride()} of {X.element_size()} bytes from address {X.data_ptr()}")
    n, M, K = X.shape[0], X.shape[axis], X.shape[-3 - axis]
    for per_sm, launch in GRAM_LAUNCH[X.dtype]:
        blocks = triton.cdiv(M, launch["BLOCK"])
        tiles = blocks * (blocks + 1) // 2
        fits = 4 * launch["num_stages"] * launch["BLOCK"] * launch["BLOCK_K"] <= _shared_memory(X.device)
        if fits and n * tiles <= per_sm * _sm_count(X.device):
            break
    block, tma = [launch["BLOCK"], launch["BLOCK_K"]], _tma(X.device)
    tiles_of_X = TensorDescriptor.from_tensor(X, [1, *block] if axis == -2 else [1, *block[::-1]]) if tma else X
    # Tiles of one matrix are neighbours in launch order. At M = 768 it stays in L2 without any reordering of tiles.
    _gram_kernel[(tiles, n)](tiles_of_X, X, out_3d, scale, M, K, *X.stride()[:2], *out_3d.stride(), alpha, beta, gamma,
                             ACROSS=axis == -1, ADDEND=addend, SCALED=scale is not None, TMA=tma, **launch)
    return out


def XXT(X, out, scale=None):
    """out = s² X Xᵀ; returns out."""
    _check_gram("XXT", X, out, -2, scale)
    if _takes_ref(X, exact=False):
        return XXT_ref(X, out, scale)
    return _launch_gram("XXT", X, -2, out, scale)


def XTX(X, out, scale=None):
    """out = s² Xᵀ X; returns out."""
    _check_gram("XTX", X, out, -1, scale)
    if _takes_ref(X, exact=False):
        return XTX_ref(X, out, scale)
    return _launch_gram("XTX", X, -1, out, scale)


def ba_plus_cAA(A, alpha, beta, out, gamma=0.0, scale=None):
    """out = s (alpha A Aᵀ + beta A + gamma I) for symmetric A, which is not verified; returns out."""
    _check_gram("ba_plus_cAA", A, out, -1, scale)
    if A.shape[-2] != A.shape[-1]:
        raise ValueError(f"ba_plus_cAA: A must be square, got shape {tuple(A.shape)}")
    if _takes_ref(A, exact=False):
        return ba_plus_cAA_ref(A, alpha, beta, out, gamma, scale)
    return _launch_gram("ba_plus_cAA", A, -2, out, scale, alpha, beta, gamma, addend=True)


# Coefficients (a, b, c) of X <- aX + (bP + cPP)X, P = XXᵀ. Polar Express, Amsel et al., arXiv 2505.16932: 5 steps, safety 2e-2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
POLAR_SAFETY = 1.02


def polar_express(X, scale, ops):
    """Approximate polar factor (singular values to about 1 ± 0.14) of every matrix scale · X: X (n, R, C), scale (n,) fp32.

    Frobenius norms < 1 after scaling, which the first products do on the way. X is overwritten.
    """
    tall = X.size(1) > X.size(2)
    side = min(X.size(1), X.size(2))
    P, Q = (torch.empty(X.size(0), side, side, dtype=X.dtype, device=X.device) for _ in range(2))
    spare = torch.empty_like(X)
    for a, b, c in POLAR_EXPRESS:
        (ops.XTX if tall else ops.XXT)(X, P, scale)
        ops.ba_plus_cAA(P, c, b, Q, a, scale)  # aI + bP + cPP, so that what follows is a plain product
        new = torch.bmm(X, Q, out=spare) if tall else torch.bmm(Q, X, out=spare)
        X, spare, scale = new, X, None
    return X


# ======================================================================================================================
# 2  NorMuon around the products
#
#   X, scale = fused_momentum(grad, momentum, mu, safety)
#       m     ← m + (1 − mu)(g − m)             in place
#       X     = round(g + mu (m − g))           in the dtype of grad
#       scale = 1 / (safety ‖X‖ + 1e-6)         per matrix, of the rounded X, fp32
#
#   grad (n, R, C) bf16 or fp32, momentum (n, R, C) fp32, both contiguous; X like grad; scale (n,).
#   12 bytes per bf16 element: g and m are read, m and X written; the products apply the scale. Every program writes its own
#   partial sum of squares and a second, small launch adds them up: no atomics, so a run repeats bit for bit.
#
#   normuon_tail(p_bits, mantissa, v, y, lr, matrix_lr, weight_decay, beta2)     R >= C
#       q ← row means of y²;  v ← v + (1 − beta2)(q − v);  r = 1/√max(v, 1e-10)
#       y' = round(y r ‖y‖ / max(‖r y‖, 1e-10))                      rows evened out, norm of the matrix kept
#       w ← w − [y' w ≥ 0] w weight_decay lr' − y' lr',  lr' = lr matrix_lr
#
#   p_bits, mantissa (n, R, C) int16: upper and lower halves of the fp32 weights w, updated in place, truncated not rounded;
#   v (n, R, 1) fp32 in place; y (n, R, C) bf16 or fp32; all contiguous; matrix_lr (n, 1, 1) fp32; the rest floats.
#   12 bytes per bf16 element: y is read twice, since the norms need all of it, weights read and written. Two launches for
#   the whole bank, the first with partial sums as above.
#
#   H200, µs at 5·768², 40·768², 3·3072·768, 24·3072·768: fused_momentum 15.2, 75.6, 27.9, 169.6 (94 % of the copy rate);
#   normuon_tail 16.4, 79.9, 27.8, 172.4 (93 %), the compiled reference 17.8, 99.1, 39.0, 218.1.
#
# Momentum and norm without a pass through memory between them: ChrisJMcCormick, PR 233. NorMuon: Li et al., arXiv 2510.05491.
# Cautious decay: varunneal, PR 154. Master weights in two halves: classiclarryd and YouJiacheng, PR 190. Rates per matrix (K9):
# PR 168.
# ======================================================================================================================

# 8 elements to a thread, moved in 16-byte accesses; small programs overlap best (1 % better than 2048, 3 % than 4096).
MOMENTUM_LAUNCH = dict(BLOCK=1024, num_warps=4)
# Rows are walked 256 columns at a time, which divides 768. The first launch only reads: 16 rows with 8 warps. The second
# moves five tensors: 4 rows with 4 warps, 8 elements of each to a thread.
ROW_SQUARES_LAUNCH = dict(ROWS=16, BLOCK_C=256, num_warps=8)
UPDATE_LAUNCH = dict(ROWS=4, BLOCK_C=256, num_warps=4)


def fused_momentum_ref(grad, momentum, mu, safety):
    g = grad.float()
    momentum.add_((1 - mu) * (g - momentum))
    X = (g + mu * (momentum - g)).to(grad.dtype)
    return X, 1 / (safety * X.float().square().sum((-2, -1)).sqrt() + 1e-6)


def join_master(p_bits, mantissa):
    """fp32 numbers from their upper 16 bits (those of the bf16 parameter) and lower 16 bits, both int16."""
    return ((p_bits.int() << 16) | (mantissa.int() & 0xFFFF)).view(torch.float32)


def normuon_tail_ref(p_bits, mantissa, v, y, lr, matrix_lr, weight_decay, beta2):
    q = y.float().square().mean(-1, keepdim=True)
    v.lerp_(q, 1 - beta2)
    r = v.clamp(min=1e-10).rsqrt()
    norm, new_norm = (s.sum((-2, -1), keepdim=True).sqrt() for s in (q, q * r * r))  # both / sqrt(C)
    y = (y.float() * (r * norm / new_norm.clamp(min=1e-10))).to(y.dtype).float()
    w = join_master(p_bits, mantissa)
    lr = lr * matrix_lr
    w = w - (y * w >= 0) * w * (weight_decay * lr) - y * lr  # K7: a zero update decays here, not in Adam
    bits = w.view(torch.int32)
    p_bits.copy_((bits >> 16).to(torch.int16))  # K8: truncation
    mantissa.copy_(bits.to(torch.int16))


@triton.jit
def _momentum_kernel(Grad, Momentum, X, Partial, mu, size, BLOCK: tl.constexpr):
    mu = tl.cast(mu, tl.float32)
    block = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    within = block * BLOCK + tl.arange(0, BLOCK)
    mask = within < size
    offsets = matrix * size + within
    g = tl.load(Grad + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(Momentum + offsets, mask=mask, other=0.0)
    m += (1.0 - mu) * (g - m)
    x = (g + mu * (m - g)).to(X.dtype.element_ty)
    tl.store(Momentum + offsets, m, mask=mask)
    tl.store(X + offsets, x, mask=mask)
    x = x.to(tl.float32)
    tl.store(Partial + matrix * tl.num_programs(0) + block, tl.sum(x * x, axis=0))


@triton.jit
def _norm_scale_kernel(Partial, Scale, blocks, safety, BLOCKS: tl.constexpr):
    matrix = tl.program_id(0)
    i = tl.arange(0, BLOCKS)
    sumsq = tl.sum(tl.load(Partial + matrix * blocks + i, mask=i < blocks, other=0.0), axis=0)
    tl.store(Scale + matrix, 1.0 / (tl.cast(safety, tl.float32) * tl.sqrt(sumsq) + 1e-6))


@triton.jit
def _row_squares_kernel(Y, V, Partial, R, C, beta2, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    block = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    r = block * ROWS + tl.arange(0, ROWS)
    rows = matrix * R + r
    total = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        y = tl.load(Y + rows[:, None] * C + c[None, :], mask=(r < R)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        total += y * y
    q = tl.sum(total, axis=1) / C
    v = tl.load(V + rows, mask=r < R, other=0.0)
    v += (1.0 - tl.cast(beta2, tl.float32)) * (q - v)
    tl.store(V + rows, v, mask=r < R)
    partial = Partial + matrix * 2 * tl.num_programs(0) + block
    tl.store(partial, tl.sum(q, axis=0))
    tl.store(partial + tl.num_programs(0), tl.sum(q / tl.maximum(v, 1e-10), axis=0))


@triton.jit
def _update_kernel(P, Mantissa, Y, V, Partial, MatrixLr, R, C, blocks, lr, weight_decay, ROWS: tl.constexpr,
                   BLOCK_C: tl.constexpr, BLOCKS: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCKS)
    partial = Partial + matrix * 2 * blocks + i
    before = tl.sqrt(tl.sum(tl.load(partial, mask=i < blocks, other=0.0), axis=0))  # both / sqrt(C)
    after = tl.sqrt(tl.sum(tl.load(partial + blocks, mask=i < blocks, other=0.0), axis=0))
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = matrix * R + r
    v = tl.load(V + rows, mask=r < R, other=1.0)
    factor = tl.rsqrt(tl.maximum(v, 1e-10)) * before / tl.maximum(after, 1e-10)
    lr = tl.cast(lr, tl.float32) * tl.load(MatrixLr + matrix)
    decay = tl.cast(weight_decay, tl.float32) * lr
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = (r < R)[:, None] & (c < C)[None, :]
        offsets = rows[:, None] * C + c[None, :]
        y = tl.load(Y + offsets, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
        y = y.to(Y.dtype.element_ty).to(tl.float32)
        upper = tl.load(P + offsets, mask=mask, other=0).to(tl.int32)
        lower = tl.load(Mantissa + offsets, mask=mask, other=0).to(tl.int32)
        w = ((upper << 16) | (lower & 0xFFFF)).to(tl.float32, bitcast=True)
        w = w - tl.where(y * w >= 0, w * decay, 0.0) - y * lr  # K7: a zero update decays here, not in Adam
        bits = w.to(tl.int32, bitcast=True)
        tl.store(P + offsets, (bits >> 16).to(tl.int16), mask=mask)  # K8: truncation
        tl.store(Mantissa + offsets, bits.to(tl.int16), mask=mask)


def fused_momentum(grad, momentum, mu, safety):
    """Updates `momentum` in place; returns (X, scale). mu, safety: floats."""
    if grad.ndim != 3 or momentum.shape != grad.shape:
        raise ValueError(f"fused_momentum: grad and momentum must have one shape (n, R, C), got {tuple(grad.shape)}"
                         f" and {tuple(momentum.shape)}")
    if grad.dtype not in (torch.bfloat16, torch.float32) or momentum.dtype != torch.float32:
        raise ValueError("fused_momentum: grad must be bfloat16 or float32 and momentum float32, got"
                         f" {grad.dtype} and {momentum.dtype}")
    if not grad.is_contiguous() or not momentum.is_contiguous():
        raise ValueError("fused_momentum: grad and momentum must be contiguous, their strides are"
                         f" {grad.stride()} and {momentum.stride()}")
    if grad.device != momentum.device:
        raise ValueError(f"fused_momentum: grad is on {grad.device}, momentum on {momentum.device}")
    if _takes_ref(grad):
        return fused_momentum_ref(grad, momentum, mu, safety)
    n, R, C = grad.shape
    blocks = triton.cdiv(R * C, MOMENTUM_LAUNCH["BLOCK"])
    X = torch.empty_like(grad)
    partial = torch.empty(n, blocks, dtype=torch.float32, device=grad.device)
    scale = torch.empty(n, dtype=torch.float32, device=grad.device)
    _momentum_kernel[(blocks, n)](grad, momentum, X, partial, mu, R * C, **MOMENTUM_LAUNCH)
    _norm_scale_kernel[(n,)](partial, scale, blocks, safety, BLOCKS=triton.next_power_of_2(blocks), num_warps=4)
    return X, scale


def normuon_tail(p_bits, mantissa, v, y, lr, matrix_lr, weight_decay, beta2):
    """Updates p_bits, mantissa and v in place. lr, weight_decay, beta2: floats."""
    if y.ndim != 3 or y.shape[1] < y.shape[2]:
        raise ValueError(f"normuon_tail: y must be (n, R, C) with R >= C, got shape {tuple(y.shape)}")
    n, R, C = y.shape
    tensors = dict(p_bits=(p_bits, y.shape, torch.int16), mantissa=(mantissa, y.shape, torch.int16), y=(y, y.shape, y.dtype),
                   v=(v, (n, R, 1), torch.float32), matrix_lr=(matrix_lr, (n, 1, 1), torch.float32))
    for name, (tensor, shape, dtype) in tensors.items():
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != y.device or not tensor.is_contiguous():
            raise ValueError(f"normuon_tail: {name} must be contiguous {dtype} of shape {tuple(shape)} on {y.device}, got"
                             f" {tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}")
    if _takes_ref(y):
        return normuon_tail_ref(p_bits, mantissa, v, y, lr, matrix_lr, weight_decay, beta2)
    blocks = triton.cdiv(R, ROW_SQUARES_LAUNCH["ROWS"])
    partial = torch.empty(n, 2, blocks, dtype=torch.float32, device=y.device)
    _row_squares_kernel[(blocks, n)](y, v, partial, R, C, beta2, **ROW_SQUARES_LAUNCH)
    _update_kernel[(triton.cdiv(R, UPDATE_LAUNCH["ROWS"]), n)](
        p_bits, mantissa, y, v, partial, matrix_lr, R, C, blocks, lr, weight_decay,
        BLOCKS=triton.next_power_of_2(blocks), **UPDATE_LAUNCH)


# ======================================================================================================================
# 3  Transposes
#
#   transpose_copy(src, dst, sms)   dst = srcᵀ         1-, 2- or 4-byte dtype, bit exact      replaces dst.copy_(src.mT)
#   transpose_add(src, dst, sms)    dst = dst + srcᵀ   bf16, fp16 or fp32, rounded once         replaces dst.add_(src.mT)
#
#   src (M, N), dst (N, M), any strides. Traffic: 2 passes for the copy, 3 for the add.
#   A generic elementwise copy walks one side with a stride. Here a tile is read along src, turned on chip and written
#   along dst. Idea and use on the tied head: ChrisJMcCormick, PR 233; larger tiles: samacqua, PR 240.
#   sms programs walk over the tiles, one per SM: all of them by default; with fewer a collective beside them gets the rest. A
#   program loads its next tile before it stores this one, so few SMs still keep memory busy.
#   H200, 768 x 50304 bf16, µs on 132 / 64 / 32 / 16 SMs: copy 44.5, 55.8, 87.2, 168.5 (torch 269); add 61.6, 67.6, 101.9, 187.4
#   (torch 292). On 132 SMs that is 82 and 89 % of the copy rate.
# ======================================================================================================================

# 128 two-byte elements are two 128-byte lines on the reading and on the writing side. As one program has an SM to itself,
# it needs many threads, each with few loads in flight; the add has twice the loads.
TRANSPOSE_LAUNCH = {False: dict(BLOCK=128, num_warps=32), True: dict(BLOCK=128, num_warps=16)}  # by ADD


def transpose_copy_ref(src, dst, sms=None):
    return dst.copy_(src.mT)


def transpose_add_ref(src, dst, sms=None):
    return dst.add_(src.mT)


@triton.jit
def _load_turned(t, Src, Dst, M, N, stride_sm, stride_sn, stride_dn, stride_dm, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Tile t, down the columns of src; masked altogether beyond the last one."""
    rows = tl.cdiv(M, BLOCK)
    m = (t % rows).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = (t // rows).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(Src + m[:, None] * stride_sm + n[None, :] * stride_sn, mask=(m < M)[:, None] & (n < N)[None, :])
    dst_ptrs = Dst + n[:, None] * stride_dn + m[None, :] * stride_dm
    mask = (n < N)[:, None] & (m < M)[None, :]
    addend = tl.load(dst_ptrs, mask=mask) if ADD else tile
    return tile, addend, dst_ptrs, mask


@triton.jit
def _transpose_kernel(Src, Dst, M, N, stride_sm, stride_sn, stride_dn, stride_dm, ADD: tl.constexpr, BLOCK: tl.constexpr):
    step = tl.num_programs(0)
    tile, addend, dst_ptrs, mask = _load_turned(tl.program_id(0), Src, Dst, M, N, stride_sm, stride_sn, stride_dn, stride_dm,
                                                ADD, BLOCK)
    for t in range(tl.program_id(0), tl.cdiv(M, BLOCK) * tl.cdiv(N, BLOCK), step):
        next_tile, next_addend, next_ptrs, next_mask = _load_turned(t + step, Src, Dst, M, N, stride_sm, stride_sn,
                                                                    stride_dn, stride_dm, ADD, BLOCK)
        turned = tl.trans(tile)
        if ADD:
            turned = (addend.to(tl.float32) + turned.to(tl.float32)).to(Dst.dtype.element_ty)
        tl.store(dst_ptrs, turned, mask=mask)
        tile, addend, dst_ptrs, mask = next_tile, next_addend, next_ptrs, next_mask


# Single bytes, the FP8 gradient of the logits: read by lines of 128, written by 64. One program per tile, down the rows of
# src, so that neighbours write contiguously: 1277 µs for 49152 x 50304, 1408 the other way round, 1155 for a plain copy.
TRANSPOSE_BYTES_LAUNCH = dict(BLOCK_M=64, BLOCK_N=128, num_warps=8)


@triton.jit
def _transpose_bytes_kernel(Src, Dst, M, N, stride_sm, stride_sn, stride_dn, stride_dm, BLOCK_M: tl.constexpr,
                            BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.load(Src + m[:, None] * stride_sm + n[None, :] * stride_sn, mask=(m < M)[:, None] & (n < N)[None, :])
    tl.store(Dst + n[:, None] * stride_dn + m[None, :] * stride_dm, tl.trans(tile), mask=(n < N)[:, None] & (m < M)[None, :])


def _check_transpose(name, src, dst, sms):
    if sms is not None and sms < 1:
        raise ValueError(f"{name}: sms must be 1 or more, got {sms}")
    if src.ndim != 2 or dst.shape != src.shape[::-1]:
        raise ValueError(f"{name}: src must be (M, N) and dst (N, M), got {tuple(src.shape)} and {tuple(dst.shape)}")
    if src.dtype != dst.dtype or src.device != dst.device:
        raise ValueError(f"{name}: src is {src.dtype} on {src.device}, dst is {dst.dtype} on {dst.device}")
    if dst is src:
        raise ValueError(f"{name}: dst must not be src, which is read while dst is written")


def _launch_transpose(src, dst, sms, add):
    M, N = src.shape
    launch = TRANSPOSE_LAUNCH[add]
    programs = min(sms or _sm_count(src.device), triton.cdiv(M, launch["BLOCK"]) * triton.cdiv(N, launch["BLOCK"]))
    _transpose_kernel[(programs,)](src, dst, M, N, *src.stride(), *dst.stride(), ADD=add, **launch)
    return dst


def transpose_copy(src, dst, sms=None):
    """dst = srcᵀ; returns dst. Single bytes take every SM."""
    _check_transpose("transpose_copy", src, dst, sms)
    if src.element_size() not in (1, 2, 4):
        raise ValueError(f"transpose_copy: dtype must have 1, 2 or 4 bytes per element, got {src.dtype}")
    if _takes_ref(src):
        return transpose_copy_ref(src, dst)
    if src.element_size() > 1:
        return _launch_transpose(src, dst, sms, add=False)
    (M, N), launch = src.shape, TRANSPOSE_BYTES_LAUNCH
    _transpose_bytes_kernel[(triton.cdiv(M, launch["BLOCK_M"]), triton.cdiv(N, launch["BLOCK_N"]))](
        src.view(torch.uint8), dst.view(torch.uint8), M, N, *src.stride(), *dst.stride(), **launch)
    return dst


def transpose_add(src, dst, sms=None):
    """dst += srcᵀ; returns dst."""
    _check_transpose("transpose_add", src, dst, sms)
    if src.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"transpose_add: dtype must be bfloat16, float16 or float32, got {src.dtype}")
    if _takes_ref(src):
        return transpose_add_ref(src, dst)
    return _launch_transpose(src, dst, sms, add=True)


# ======================================================================================================================
# 4  Attention: causal softmax attention over packed documents with a sliding window and an output gate
#
#   out_t = Σ_s p_ts v_s,  p_t = softmax over s of  scale · q_t · k_s,  s in t's document with t - window <= s <= t
#   y_t   = gate_t · out_t          per head
#
#   q, k, v (N, H, d) bf16 (fp32 for tests), d a power of two >= 16 with stride 1, any other strides (v may be a slice);
#   gate (N, H), not negative; cu_seqlens (K,) int32: document borders, cu[0] = 0, unused tail entries = N; y contiguous.
#   window (int), scale (float): numbers or 0-D CPU tensors; attention_block takes the latter, so that one graph serves every stage.
#   Replaces scaled_dot_product_attention under a mask and a multiplication by the gate.
#
# Documents lie back to back, so tiles are cut from the flat sequence: rows t see the keys from max(start_t, t - window)
# to t, both ends monotone in t. A tile of queries (keys) therefore meets one contiguous run of keys (queries). The run
# starts at the first row needed, not at a multiple of the tile; only blocks that some row sees in part are masked.
# The exponentials are taken without subtracting a running maximum, which spares the forward pass 8 %: right as long as
# |scale · q · k| < 80 (2^±115 of fp32), beyond which infinities show. Here q and k are RMS-normed: at most d · scale = 26.
#
# Backward, with s_t = Σ_d dy y / gate, P' = gate · P and dP = dy vᵀ:
#   dgate = s,  dv = P'ᵀ dy,  dS = P' (dP - s),  dq = scale dS k,  dk = scale dSᵀ q
# P' costs nothing: the forward pass saves lse - log gate, in powers of two. One pass over dy and y makes s and dgate; then
# one launch has a program per tile of queries for dq and one per tile of keys for dk and dv, side by side because they read
# the same rows (3-9 % faster than two launches). Seven products where a single sweep needs five, but no atomics, so that a
# run repeats bit for bit, and no fp32 accumulator of dq in memory that must be cleared and converted.
#
# One H200, d = 128, documents of median 490, forward + backward in µs (FlashAttention-2 of PyTorch, without the gate):
#   16384 tokens, 6 heads, window 384: 55 + 162 (122 + 276);  49152, 6, 640: 180 + 550 (389 + 898).
#
# Online-softmax tiles and the recomputing backward: Dao et al., arXiv 2205.14135 and 2307.08691.
# ======================================================================================================================

# One warpgroup and 64 rows to a program: two or three programs share an SM, and one takes exponentials while another
# multiplies. 128 rows on two warpgroups, a program to the SM, were 20-40 % slower in all three kernels.
ATTENTION_LAUNCH = {
    torch.bfloat16: {
        # q 16 KiB and three stages of k and v, 16 KiB each, at d = 128: 64 KiB and 124 registers, three programs to an SM.
        "forward": dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3),
        "row_dot": dict(BLOCK=64, num_warps=4),
        # Two tiles that stay and two stages of two that pass by: 96 KiB and 255 registers, two programs to an SM.
        "backward": dict(BLOCK=64, num_warps=4, num_stages=2),
    },
    # For tests: no tensor cores, so small tiles.
    torch.float32: {
        "forward": dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2),
        "row_dot": dict(BLOCK=32, num_warps=4),
        "backward": dict(BLOCK=32, num_warps=4, num_stages=2),
    },
}
LOG2_E = tl.constexpr(1.4426950408889634)  # exponentials are powers of two


def attention_ref(q, k, v, gate, cu_seqlens, max_len, window, scale):
    """Blocked plain PyTorch: a block of queries sees its own and the few preceding key blocks, O(N · window) memory."""
    N, H, d = q.shape
    window, scale = int(window), float(scale)
    block = min(128, N)
    behind = min(-(-window // block), -(-N // block) - 1)  # preceding key blocks that the window can reach
    pad = -N % block
    blocks = (N + pad) // block

    position = torch.arange(N, device=q.device)
    document = torch.searchsorted(cu_seqlens, position.to(cu_seqlens.dtype), right=True)
    document = F.pad(document, (behind * block, pad), value=-1)  # padding is a document of its own
    position = torch.arange(-behind * block, N + pad, device=q.device)

    def reach(x):  # (behind·block + N + pad, ...) -> (blocks, (behind + 1)·block, ...): keys that each query block may see
        x = x.unflatten(0, (-1, block))
        return torch.cat([x[j:j + blocks] for j in range(behind + 1)], 1)

    own = slice(behind * block, None)
    doc_q, pos_q = document[own].view(blocks, block, 1), position[own].view(blocks, block, 1)
    distance = pos_q - reach(position)[:, None]
    mask = (doc_q == reach(document)[:, None]) & (distance >= 0) & (distance <= window)
    q = F.pad(q, (0, 0, 0, 0, 0, pad)).unflatten(0, (blocks, block)).transpose(1, 2)
    k, v = (reach(F.pad(x, (0, 0, 0, 0, behind * block, pad))).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
    return out.transpose(1, 2).reshape(N + pad, H, d)[:N] * gate[..., None].to(out.dtype)


@triton.jit
def _rows(X, head, first, N, stride_n, stride_h, BLOCK: tl.constexpr, D: tl.constexpr):
    """(BLOCK, D) rows of a head from row `first` on, zeros beyond N. Plain loads: several are under way at once."""
    i = first + tl.arange(0, BLOCK)
    return tl.load(X + head.to(tl.int64) * stride_h + i.to(tl.int64)[:, None] * stride_n + tl.arange(0, D)[None, :],
                   mask=(i < N)[:, None], other=0.0)


@triton.jit
def _tile(X, head, first, N, stride_n, stride_h, BLOCK: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """The same rows of an X that is a descriptor."""
    if TMA:
        x = X.load([head, first, 0]).reshape(BLOCK, D)
    else:
        x = _rows(X, head, first, N, stride_n, stride_h, BLOCK, D)
    return x


@triton.jit
def _store_rows(X, x, head, first, N, stride_n, BLOCK: tl.constexpr, D: tl.constexpr):
    """The same rows of an X (N, H, D) with heads side by side."""
    i = first + tl.arange(0, BLOCK)
    tl.store(X + i.to(tl.int64)[:, None] * stride_n + head * D + tl.arange(0, D)[None, :], x.to(X.dtype.element_ty),
             mask=(i < N)[:, None])


@triton.jit
def _keys_of_queries(Start, m0, N, window, BLOCK: tl.constexpr):
    """(first key that each row sees (BLOCK,), first and last key that some row sees, first key that every row could see)."""
    t = m0 + tl.arange(0, BLOCK)
    last = tl.minimum(m0 + BLOCK, N) - 1
    return (tl.maximum(tl.load(Start + t, mask=t < N, other=0), t - window), tl.maximum(tl.load(Start + m0), m0 - window),
            last, tl.maximum(tl.load(Start + last), last - window))


@triton.jit
def _mask_keys(x, low, m0, n0, to_all, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """x (BLOCK_M, BLOCK_N) with -inf where row t does not see key s; untouched where every row sees the whole block."""
    if (n0 < to_all) | (n0 + BLOCK_N - 1 > m0):
        t = m0 + tl.arange(0, BLOCK_M)
        s = n0 + tl.arange(0, BLOCK_N)
        # low <= s <= t in one comparison: what is negative becomes huge.
        x = tl.where((s[None, :] - low[:, None]).to(tl.uint32) <= (t - low).to(tl.uint32)[:, None], x, float("-inf"))
    return x


@triton.jit(do_not_specialize=["window"])
def _attention_kernel(Q, K, V, Gate, Y, Lse, Start, N, H, window, scale, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn,
                      stride_vh, stride_gn, stride_gh, stride_lh, D: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr):
    # Heads are neighbours in launch order, then tiles: what runs together shares keys in L2 and reads whole tokens.
    head = tl.program_id(0) % H
    m0 = tl.program_id(0) // H * BLOCK_M
    scale2 = tl.cast(scale, tl.float32) * LOG2_E
    low, first, last, to_all = _keys_of_queries(Start, m0, N, window, BLOCK_M)
    q = _rows(Q, head, m0, N, stride_qn, stride_qh, BLOCK_M, D)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for n0 in range(first, last + 1, BLOCK_N):
        k = _tile(K, head, n0, N, stride_kn, stride_kh, BLOCK_N, D, TMA)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")  # "ieee": fp32 operands are not cut to tf32
        x = _mask_keys(x, low, m0, n0, to_all, BLOCK_M, BLOCK_N)
        p = tl.exp2(x * scale2)
        total += tl.sum(p, 1)
        v = _tile(V, head, n0, N, stride_vn, stride_vh, BLOCK_N, D, TMA)  # not beside k: the first product would wait for both
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    t = m0 + tl.arange(0, BLOCK_M)
    gate = tl.load(Gate + t.to(tl.int64) * stride_gn + head * stride_gh, mask=t < N, other=1.0).to(tl.float32)
    _store_rows(Y, acc * (gate / total)[:, None], head, m0, N, H * D, BLOCK_M, D)
    tl.store(Lse + head.to(tl.int64) * stride_lh + t, tl.log2(total) - tl.log2(gate), mask=t < N)


@triton.jit
def _row_dot_kernel(dY, Y, Gate, dGate, RowDot, N, H, stride_dn, stride_dh, stride_gn, stride_gh, stride_lh,
                    D: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(0) % H
    m0 = tl.program_id(0) // H * BLOCK
    t = m0 + tl.arange(0, BLOCK)
    dy = _rows(dY, head, m0, N, stride_dn, stride_dh, BLOCK, D)
    y = _rows(Y, head, m0, N, H * D, D, BLOCK, D)
    gate = tl.load(Gate + t.to(tl.int64) * stride_gn + head * stride_gh, mask=t < N, other=1.0).to(tl.float32)
    row_dot = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1) / gate
    row_dot = tl.where(gate > 0, row_dot, 0.0)  # a sigmoid that underflowed passes no gradient on either
    tl.store(RowDot + head.to(tl.int64) * stride_lh + t, row_dot, mask=t < N)
    tl.store(dGate + t.to(tl.int64) * H + head, row_dot.to(dGate.dtype.element_ty), mask=t < N)


@triton.jit
def _dq_tile(head, m0, q, dy, K, V, Lse, RowDot, dQ, Start, N, H, window, scale, stride_kn, stride_kh, stride_vn, stride_vh,
             D: tl.constexpr, TMA: tl.constexpr, BLOCK: tl.constexpr):
    low, first, last, to_all = _keys_of_queries(Start, m0, N, window, BLOCK)
    t = m0 + tl.arange(0, BLOCK)
    lse = tl.load(Lse + t, mask=t < N, other=0.0)
    row_dot = tl.load(RowDot + t, mask=t < N, other=0.0)
    dq = tl.zeros((BLOCK, D), dtype=tl.float32)
    for n0 in range(first, last + 1, BLOCK):
        k = _tile(K, head, n0, N, stride_kn, stride_kh, BLOCK, D, TMA)
        v = _tile(V, head, n0, N, stride_vn, stride_vh, BLOCK, D, TMA)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(dy, tl.trans(v), input_precision="ieee")
        x = _mask_keys(x, low, m0, n0, to_all, BLOCK, BLOCK)
        ds = tl.exp2(x * (scale * LOG2_E) - lse[:, None]) * (dp - row_dot[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    _store_rows(dQ, dq * scale, head, m0, N, H * D, BLOCK, D)


@triton.jit
def _dkv_tile(head, n0, Q, dY, K, V, Lse, RowDot, dK, dV, End, N, H, window, scale, stride_qn, stride_qh, stride_dn, stride_dh,
              stride_kn, stride_kh, stride_vn, stride_vh, stride_lh, stride_dv, D: tl.constexpr, TMA: tl.constexpr,
              BLOCK: tl.constexpr):
    # Everything is transposed, keys along the rows: Pᵀ and dSᵀ then enter their products from registers.
    s = n0 + tl.arange(0, BLOCK)
    high = tl.minimum(tl.load(End + s, mask=s < N, other=0) - 1, s + window)  # last query that sees each key
    last_key = tl.minimum(n0 + BLOCK, N) - 1
    last = tl.minimum(tl.load(End + last_key) - 1, last_key + window)
    of_all = tl.minimum(tl.load(End + n0) - 1, n0 + window)  # last query that could see every key
    k = _tile(K, head, n0, N, stride_kn, stride_kh, BLOCK, D, TMA)
    v = _tile(V, head, n0, N, stride_vn, stride_vh, BLOCK, D, TMA)
    dk = tl.zeros((BLOCK, D), dtype=tl.float32)
    dv = tl.zeros((BLOCK, D), dtype=tl.float32)
    for m0 in range(n0, last + 1, BLOCK):
        q = _tile(Q, head, m0, N, stride_qn, stride_qh, BLOCK, D, TMA)
        dy = _tile(dY, head, m0, N, stride_dn, stride_dh, BLOCK, D, TMA)
        t = m0 + tl.arange(0, BLOCK)
        if TMA:
            lse = Lse.load([head, m0]).reshape(BLOCK)
            row_dot = RowDot.load([head, m0]).reshape(BLOCK)
        else:
            row = head.to(tl.int64) * stride_lh + t
            lse = tl.load(Lse + row, mask=t < N, other=0.0)
            row_dot = tl.load(RowDot + row, mask=t < N, other=0.0)
        x = tl.dot(k, tl.trans(q), input_precision="ieee")  # (keys, queries)
        dp = tl.dot(v, tl.trans(dy), input_precision="ieee")
        if (m0 < n0 + BLOCK - 1) | (m0 + BLOCK - 1 > of_all):
            x = tl.where((t[None, :] - s[:, None]).to(tl.uint32) <= (high - s).to(tl.uint32)[:, None], x, float("-inf"))
        p = tl.exp2(x * (scale * LOG2_E) - lse[None, :])
        dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision="ieee")
        ds = p * (dp - row_dot[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    _store_rows(dK, dk * scale, head, n0, N, H * D, BLOCK, D)
    _store_rows(dV, dv, head, n0, N, stride_dv, BLOCK, D)


@triton.jit(do_not_specialize=["window"])
def _attention_backward_kernel(Q, dY, Lse, RowDot, q_tiles, dy_tiles, k_tiles, v_tiles, lse_tiles, row_dot_tiles, dQ, dK, dV,
                               Start, End, N, H, window, scale, stride_qn, stride_qh, stride_dn, stride_dh, stride_kn, stride_kh,
                               stride_vn, stride_vh, stride_lh, stride_dv, D: tl.constexpr, TMA: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0) // 2
    head = tile % H
    first = tile // H * BLOCK
    scale = tl.cast(scale, tl.float32)
    if tl.program_id(0) % 2 == 0:
        _dkv_tile(head, first, q_tiles, dy_tiles, k_tiles, v_tiles, lse_tiles, row_dot_tiles, dK, dV, End, N, H, window, scale,
                  stride_qn, stride_qh, stride_dn, stride_dh, stride_kn, stride_kh, stride_vn, stride_vh, stride_lh, stride_dv,
                  D, TMA, BLOCK)
    else:
        q = _rows(Q, head, first, N, stride_qn, stride_qh, BLOCK, D)
        dy = _rows(dY, head, first, N, stride_dn, stride_dh, BLOCK, D)
        row = head.to(tl.int64) * stride_lh
        _dq_tile(head, first, q, dy, k_tiles, v_tiles, Lse + row, RowDot + row, dQ, Start, N, H, window, scale,
                 stride_kn, stride_kh, stride_vn, stride_vh, D, TMA, BLOCK)


def _loadable(x):
    """x, or a copy where the tensor memory accelerator could not load from it: last stride 1, the rest 16-byte aligned."""
    apart = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    return x if x.stride(-1) == 1 and all(a % 16 == 0 for a in apart) else x.clone(memory_format=torch.contiguous_format)


def _head_rows(x, block):
    """Descriptor of (1, block, d) pieces of x (N, H, d), or of (1, block) pieces of N columns of x (H, N); without TMA x itself."""
    if not _tma(x.device):
        return x
    if x.ndim == 3:
        x = x.transpose(0, 1)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, block, *x.shape[2:]])


def _row_scalars(q):
    """(H, N) fp32, rows 16-byte aligned."""
    N, H = q.shape[:2]
    return q.new_empty((H, N + -N % 4), dtype=torch.float32)[:, :N]


def attend(q, k, v, gate, start, end, window, scale):
    """y (N, H, d), and what the backward pass needs of the softmax, (H, N) fp32.

    start, end (N,): the document of every token; `end` is not used here, one signature serves the backward pass too.
    """
    N, H, D = q.shape
    launch = ATTENTION_LAUNCH[q.dtype]["forward"]
    y, lse = q.new_empty((N, H, D)), _row_scalars(q)
    q, k, v = (_loadable(x) for x in (q, k, v))
    _attention_kernel[(triton.cdiv(N, launch["BLOCK_M"]) * H,)](
        q, *(_head_rows(x, launch["BLOCK_N"]) for x in (k, v)), gate, y, lse, start, N, H, int(window), float(scale),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *gate.stride(), lse.stride(0), D=D, TMA=_tma(q.device), **launch)
    return y, lse


def attend_backward(dy, q, k, v, gate, y, lse, start, end, window, scale, dv=None):
    """Gradients of q, k, v, gate; that of v is written to `dv` (N, H, d) if there is one, heads side by side."""
    N, H, D = q.shape
    window, scale = int(window), float(scale)
    dq, dk, dgate = (x.new_empty(x.shape) for x in (q, k, gate))
    dv = v.new_empty(v.shape) if dv is None else dv
    row_dot = _row_scalars(q)
    q, dy, k, v = (_loadable(x) for x in (q, dy, k, v))
    launch = ATTENTION_LAUNCH[q.dtype]["row_dot"]
    _row_dot_kernel[(triton.cdiv(N, launch["BLOCK"]) * H,)](
        dy, y, gate, dgate, row_dot, N, H, *dy.stride()[:2], *gate.stride(), row_dot.stride(0), D=D, **launch)
    launch = ATTENTION_LAUNCH[q.dtype]["backward"]
    _attention_backward_kernel[(2 * triton.cdiv(N, launch["BLOCK"]) * H,)](
        q, dy, lse, row_dot, *(_head_rows(x, launch["BLOCK"]) for x in (q, dy, k, v, lse, row_dot)), dq, dk, dv, start, end,
        N, H, window, scale, *q.stride()[:2], *dy.stride()[:2], *k.stride()[:2], *v.stride()[:2], lse.stride(0), dv.stride(0),
        D=D, TMA=_tma(q.device), **launch)
    return dq, dk, dv, dgate


def document_of_tokens(cu_seqlens, N):
    """(start, end), each (N,) int32: borders of the document of every token."""
    after = torch.searchsorted(cu_seqlens, torch.arange(N, dtype=torch.int32, device=cu_seqlens.device), right=True)
    return cu_seqlens[after - 1], cu_seqlens[after]


def _flash_attention_3():
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise ValueError("kernels: 'attention:fa3' needs the package flash_attn_interface (FlashAttention-3);"
                         " install it or choose attention:triton") from error
    return flash_attn_varlen_func


def fa3_attention(q, k, v, gate, cu_seqlens, max_len, window, scale):
    """`attention_ref` through FlashAttention-3 (Shah et al., arXiv 2407.08608) where that package is installed."""
    out = _flash_attention_3()(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_len,
                               max_seqlen_k=max_len, causal=True, softmax_scale=float(scale), window_size=(int(window), 0))
    return out * gate[..., None].to(out.dtype)


# ======================================================================================================================
# 5  Attention block: gates, projection, QK-norm, rotary, key offset, value embedding, attention
#
#   out_gate = σ(x[:, :C] w_outᵀ);  ve_gate = 2 σ(seen w_veᵀ), seen = x[:, :C] in paired layers, else x[:, :C/2] | ve[:, :C/2]
#   q, k, v = x Wᵀ, H heads of width d each;  q, k ← rms_norm(q), rms_norm(k);  v ← v + ve_gate · ve
#   In the first half of the d axis of q and k the adjacent pairs turn by the angles of a row of `rotary`: row t, in paired
#   layers row 2t + (head mod 2). With `offset` the second half of key t is that of key t - 1 (key 0 keeps its own).
#   y = attention(q, k, v, out_gate), see section 4; in paired layers of the reinterpretation (2N, H/2, d)   (K1, K4)
#
#   x (N, D), weight (3 H d, D), w_out (H, C), y (N, H, d), bf16 (fp32 for tests); ve (N, H d), unit stride along H d, and
#   w_ve (H, C), or both None; rotary (>= 2N, d/4, 2): cosine and sine side by side, so that a thread loads both of its pairs
#   at once. Inside, gates (1 or 2, N, H): out_gate and, with ve, ve_gate.
#
# Forward: one GEMM whose tiles are a head wide, so norm, rotation, offset and value embedding happen on the fp32
# accumulator; nothing is read or written between projection and attention. q, k and v come out as planes of one tensor
# (3, N + 1, H, d), hence contiguous each, as the reinterpretation needs. Row N takes the half key that the offset moves
# past the end, which the backward pass asks for.
# Backward: x Wᵀ is not kept. Rotated vectors y = R x̂ give back all that is needed, with R Rᵀ = c² + s² =: ρ per pair (not
# quite 1, the table is rounded):  dx = rstd · Rᵀ (dy - y · mean(dy · y) / ρ),  since  mean(Rᵀdy · x̂) = mean(dy · y).
# So 4 bytes of 1/rms per head are kept beside q, k, v. One elementwise pass, then the two GEMMs of a linear layer.
# One op, because pieces of one would pass dq, dk, dv through more copies: dv goes straight into its third of dqkv.
# The gates belong to it for their gradients, which are added to C columns of dx and dve where these lie. Made by the
# compiler from slices, they had the kernels behind dx, which sum over D for the norm, read all their operands twice, and dve
# written once more. Gradients of w_out and w_ve are summed by program, then over programs: a run repeats bit for bit.
# H200, N = 49152, plain layer: forward 274 µs against 244 + 144 (library GEMM, compiled rest), backward pass 114 µs
# (94 % of copy bandwidth) against 272; 228 MB kept per layer where q, k, v beside x Wᵀ are 377 to 452.
#
# QK-norm: Henry et al., arXiv 2010.04245; fusing norm, rotary and offset is an open idea of the speedrun's authors.
# ======================================================================================================================

RMS_EPS = 2.0**-23

# 128 x 128 tiles on one warpgroup: 128 accumulators of 255 registers a thread and three stages of 32 KiB, so two programs
# share an SM and one finishes its tile while the other multiplies. H200, N = 49152, µs: 274 (with value embedding 307); two
# warpgroups under 128 registers 275 (335), a tile of 256 rows 287, one tile per program 300; the library's GEMM alone 244.
PROJECT_LAUNCH = {
    torch.bfloat16: dict(BLOCK_M=128, BLOCK_K=64, num_warps=4, num_stages=3),
    torch.float32: dict(BLOCK_M=32, BLOCK_K=32, num_warps=4, num_stages=2),  # for tests: no tensor cores
}
PROJECT_PROGRAMS_PER_SM = 2
# 16 heads of 16 threads each, 16-byte accesses, two per operand and thread. 32 rows cost 4-20 % in the layers with offset.
PROJECT_GRAD_LAUNCH = dict(BLOCK=16, num_warps=4)

# Heads and channels padded to the 16 that tl.dot asks for. Compiled for sm_90, the forward kernel runs a quarter of the
# instructions of one with products and sums elementwise. Fewer tokens to a program leave more parts of dw_out and dw_ve to add
# up; more warps repeat the product that makes a part, whose 16 x 16 results cannot be divided among them.
GATE_LAUNCH = dict(BLOCK=128, num_warps=4)


def head_gates_ref(x, ve, w_ve, w_out, paired):
    """out_gate and ve_gate (N, H), the latter None without ve."""
    C = w_out.size(1)
    out_gate = torch.sigmoid(F.linear(x[:, :C], w_out))
    if ve is None:
        return out_gate, None
    seen = x[:, :C] if paired else torch.cat((x[:, :C // 2], ve[:, :C // 2]), 1)
    return out_gate, 2 * torch.sigmoid(F.linear(seen, w_ve))


@triton.jit
def _at(X, t, N, stride, c, first, end):
    """Pointers (tokens, columns) and their mask: columns `first` to `end` - 1 are channels 0, 1, ... of the rows t of X."""
    return X + t.to(tl.int64)[:, None] * stride + (c - first)[None, :], (t < N)[:, None] & ((c >= first) & (c < end))[None, :]


@triton.jit
def _gate(seen, W, Gate, t, N, h, c, H: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr):
    """seen (tokens, channels)"""
    w, of_w = _at(W, h, H, C, c, 0, C)
    w = tl.load(w, mask=of_w, other=0.0)
    gate = SCALE * tl.sigmoid(tl.dot(seen, tl.trans(w), input_precision="ieee"))
    gates, of_gates = _at(Gate, t, N, H, h, 0, H)
    tl.store(gates, gate.to(Gate.dtype.element_ty), mask=of_gates)


@triton.jit
def _head_gates_kernel(X, Ve, WVe, WOut, Gates, N, stride_x, stride_ve, FROM_X: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
                       HEADS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, c = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    x, of_x = _at(X, t, N, stride_x, c, 0, C)
    seen = tl.load(x, mask=of_x, other=0.0)
    _gate(seen, WOut, Gates, t, N, h, c, H, C, 1.0)
    if Ve is not None:
        ve, of_ve = _at(Ve, t, N, stride_ve, c, FROM_X, C)
        seen = tl.where(of_ve, tl.load(ve, mask=of_ve, other=0.0), seen)
        _gate(seen, WVe, Gates + N * H, t, N, h, c, H, C, 2.0)


@triton.jit
def _gate_grad(seen, W, Gate, dGate, dW, t, N, h, c, H: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr):
    """Gradient of seen (tokens, channels); these tokens' part of that of W goes to dW. The logits' is rounded to the dtype."""
    gates, of_gates = _at(Gate, t, N, H, h, 0, H)
    gate = tl.load(gates, mask=of_gates, other=0.0).to(tl.float32)
    gates, _ = _at(dGate, t, N, H, h, 0, H)
    dlogit = (tl.load(gates, mask=of_gates, other=0.0).to(tl.float32) * gate * (1 - gate / SCALE)).to(seen.dtype)
    w, of_w = _at(W, h, H, C, c, 0, C)
    w = tl.load(w, mask=of_w, other=0.0)
    dw, _ = _at(dW, h, H, C, c, 0, C)
    tl.store(dw, tl.dot(tl.trans(dlogit), seen, input_precision="ieee"), mask=of_w)
    return tl.dot(dlogit, w, input_precision="ieee")


@triton.jit
def _head_gates_grad_kernel(dOutGate, dVeGate, Gates, X, Ve, WVe, WOut, dX, dVe, dW, N, stride_x, stride_ve, stride_dve,
                            FROM_X: tl.constexpr, H: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr,
                            BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, c = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    dW += tl.program_id(0) * (1 if Ve is None else 2) * H * C
    x, of_x = _at(X, t, N, stride_x, c, 0, C)
    seen = tl.load(x, mask=of_x, other=0.0)
    grad = _gate_grad(seen, WOut, Gates, dOutGate, dW, t, N, h, c, H, C, 1.0)
    if Ve is not None:
        ve, of_ve = _at(Ve, t, N, stride_ve, c, FROM_X, C)
        seen = tl.where(of_ve, tl.load(ve, mask=of_ve, other=0.0), seen)
        more = _gate_grad(seen, WVe, Gates + N * H, dVeGate, dW + H * C, t, N, h, c, H, C, 2.0)
        dve, _ = _at(dVe, t, N, stride_dve, c, FROM_X, C)
        total = tl.load(dve, mask=of_ve, other=0.0).to(tl.float32) + more
        tl.store(dve, total.to(dVe.dtype.element_ty), mask=of_ve)
        grad += tl.where(of_ve, 0.0, more)
    dx, _ = _at(dX, t, N, stride_x, c, 0, C)
    total = tl.load(dx, mask=of_x, other=0.0).to(tl.float32) + grad
    tl.store(dx, total.to(dX.dtype.element_ty), mask=of_x)


def _gate_launch(ve, w_out, paired):
    H, C = w_out.shape
    heads, channels = (max(16, triton.next_power_of_2(n)) for n in (H, C))
    return dict(FROM_X=C if ve is None or paired else C // 2, H=H, C=C, HEADS=heads, CHANNELS=channels, **GATE_LAUNCH)


def head_gates(x, ve, w_ve, w_out, paired):
    """(1 or 2, N, H): `head_gates_ref` in one tensor."""
    N = x.size(0)
    gates = x.new_empty(1 if ve is None else 2, N, w_out.size(0))
    _head_gates_kernel[(triton.cdiv(N, GATE_LAUNCH["BLOCK"]),)](
        x, ve, w_ve, w_out, gates, N, x.stride(0), 0 if ve is None else ve.stride(0), **_gate_launch(ve, w_out, paired))
    return gates


def head_gates_backward(dout_gate, dve_gate, gates, x, ve, w_ve, w_out, paired, dx, dve):
    """Adds to dx and dve in place; returns the gradients of w_out and w_ve, (1 or 2, H, C) fp32."""
    N = x.size(0)
    programs = triton.cdiv(N, GATE_LAUNCH["BLOCK"])
    parts = x.new_empty(programs, len(gates), *w_out.shape, dtype=torch.float32)
    _head_gates_grad_kernel[(programs,)](
        dout_gate, dve_gate, gates, x, ve, w_ve, w_out, dx, dve, parts, N, x.stride(0), *(0, 0) if ve is None else
        (ve.stride(0), dve.stride(0)), **_gate_launch(ve, w_out, paired))
    return parts.sum(0)


def rotate(x, rotary):
    """Turn the adjacent pairs in the first half of the last axis of x (..., d) by the angles of rotary (..., d / 4, 2)."""
    cos, sin = rotary.unbind(-1)
    even, odd = x[..., :x.size(-1) // 2].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((cos * even + sin * odd, cos * odd - sin * even), -1).flatten(-2)
    return torch.cat((turned, x[..., x.size(-1) // 2:]), -1)


def project_ref(x, weight, rotary, ve, ve_gate, paired, offset):
    """q, k, v (N, H, d)."""
    N, d = x.size(0), 4 * rotary.size(1)
    q, k, v = F.linear(x, weight).view(N, 3, -1, d).unbind(1)
    q, k = (F.rms_norm(u, (d,), eps=RMS_EPS) for u in (q, k))
    if ve is not None:
        v = v + ve_gate[..., None] * ve.view(v.shape)
    if paired:
        q, k = (rotate(u.view(N, -1, 2, d), rotary[:2 * N].view(N, 1, 2, d // 4, 2)).view(v.shape) for u in (q, k))
    else:
        q, k = (rotate(u, rotary[:N, None]) for u in (q, k))
    if offset:
        k = torch.cat((k[..., :d // 2], torch.cat((k[:1, :, d // 2:], k[:-1, :, d // 2:]))), -1)
    return q, k, v


@triton.jit
def _project_kernel(X, W, Qkv, Rstd, Rotary, Ve, Gate, N, stride_x, stride_w, stride_part, stride_ve, K: tl.constexpr,
                    EPS: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr, VALUE: tl.constexpr, H: tl.constexpr,
                    D: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    c = tl.arange(0, D // 2)[None, :]
    # Heads are neighbours in launch order: those that run together share rows of x in L2. As a loop, so that the first
    # loads of a tile are under way while the one before it is finished.
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_M) * 3 * H, tl.num_programs(0), flatten=True):
        first = tile // (3 * H) * BLOCK_M
        head = tile % (3 * H)
        acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            if TMA:
                x, w = X.load([first, k]), tl.trans(W.load([head * D, k]))
            else:
                m = first + tl.arange(0, BLOCK_M)
                n = head * D + tl.arange(0, D)
                j = k + tl.arange(0, BLOCK_K)
                x = tl.load(X + m.to(tl.int64)[:, None] * stride_x + j[None, :], mask=(m < N)[:, None] & (j < K)[None, :], other=0.0)
                w = tl.load(W + n[None, :] * stride_w + j[:, None], mask=(j < K)[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        # From here on what concerns q and k alone, or v alone, is masked: a branch would keep the loops apart.
        part, h = head // H, head % H
        t = first + tl.arange(0, BLOCK_M)
        token = t.to(tl.int64)[:, None]
        inside = (t < N)[:, None]
        lo, hi = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, D // 2)), (0, 2, 1)))
        rstd = tl.rsqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + EPS)
        tl.store(Rstd + (part * N + t) * H + h, rstd, mask=(t < N) & (part < 2))
        rstd = tl.where(part < 2, rstd, 1.0)[:, None]
        row = 2 * t + h % 2 if PAIRED else t
        table = tl.load(Rotary + row[:, None] * (D // 2) + c, mask=inside & (part < 2), other=0.0).to(tl.float32)
        cos, sin = tl.split(tl.reshape(table, (BLOCK_M, D // 4, 2)))
        cos = tl.where(part < 2, cos, 1.0)
        even, odd = tl.split(tl.reshape(lo * rstd, (BLOCK_M, D // 4, 2)))
        lo = tl.reshape(tl.join(cos * even + sin * odd, cos * odd - sin * even), (BLOCK_M, D // 2))
        hi *= rstd
        if VALUE:
            gate = tl.load(Gate + t * H + h, mask=(t < N) & (part == 2), other=0.0).to(tl.float32)[:, None]
            ve = Ve + token * stride_ve + h * D + c
            lo += gate * tl.load(ve, mask=inside & (part == 2), other=0.0).to(tl.float32)
            hi += gate * tl.load(ve + D // 2, mask=inside & (part == 2), other=0.0).to(tl.float32)
        out = Qkv + part.to(tl.int64) * stride_part + token * (H * D) + h * D + c
        tl.store(out, lo.to(Qkv.dtype.element_ty), mask=inside)
        hi = hi.to(Qkv.dtype.element_ty)
        if OFFSET:
            tl.store(out + D // 2, hi, mask=(t == 0)[:, None] & (part == 1))
            out += tl.where(part == 1, H * D, 0)
        tl.store(out + D // 2, hi, mask=inside)


@triton.jit
def _norm_rotary_grad(dY, Y, dX, Rstd, Rotary, row, N, stride_dy, stride_dx, PAIRED: tl.constexpr, OFFSET: tl.constexpr,
                      H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK, D): `row` counts token and head."""
    t, h = row // H, row % H
    c = tl.arange(0, D)[None, :]
    column = (h * D)[:, None] + c
    inside = (t < N)[:, None]
    came_from = t[:, None].to(tl.int64)
    if OFFSET:
        came_from += (c >= D // 2)
    y = tl.load(Y + came_from * (H * D) + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dY + came_from * stride_dy + column, mask=inside & (came_from < N), other=0.0).to(tl.float32)
    if OFFSET:
        dy += tl.load(dY + column, mask=(t == 0)[:, None] & (c >= D // 2), other=0.0).to(tl.float32)
    rstd = tl.load(Rstd + row, mask=t < N, other=0.0)
    mean = tl.sum(dy * y, 1) / D

    angle = 2 * t + h % 2 if PAIRED else t
    table = tl.load(Rotary + angle[:, None] * (D // 2) + c, mask=inside & (c < D // 2), other=0.0)
    table = tl.where(c < D // 2, table.to(tl.float32), 1.0 - c % 2)  # the second half is not turned
    cos, sin = tl.split(tl.reshape(table, (BLOCK, D // 2, 2)))
    y_even, y_odd = tl.split(tl.reshape(y, (BLOCK, D // 2, 2)))
    dy_even, dy_odd = tl.split(tl.reshape(dy, (BLOCK, D // 2, 2)))
    along = mean[:, None] / (cos * cos + sin * sin)
    even = (dy_even - along * y_even) * rstd[:, None]
    odd = (dy_odd - along * y_odd) * rstd[:, None]
    dx = tl.reshape(tl.join(cos * even - sin * odd, sin * even + cos * odd), (BLOCK, D))
    tl.store(dX + t[:, None].to(tl.int64) * stride_dx + column, dx.to(dX.dtype.element_ty), mask=inside)


@triton.jit
def _project_grad_kernel(dQ, dK, dV, Q, K, dQkv, Rstd, Rotary, Ve, Gate, dVe, dGate, N, stride_dq, stride_dk, stride_dv,
                         stride_ve, PAIRED: tl.constexpr, OFFSET: tl.constexpr, VALUE: tl.constexpr, COPY: tl.constexpr,
                         H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK)
    width: tl.constexpr = 3 * H * D
    if part == 0:
        _norm_rotary_grad(dQ, Q, dQkv, Rstd, Rotary, row, N, stride_dq, width, PAIRED, False, H, D, BLOCK)
    elif part == 1:
        _norm_rotary_grad(dK, K, dQkv + H * D, Rstd + N * H, Rotary, row, N, stride_dk, width, PAIRED, OFFSET, H, D, BLOCK)
    else:
        t = (row // H).to(tl.int64)[:, None]
        inside = t < N
        column = (row % H * D)[:, None] + tl.arange(0, D)[None, :]
        dv = tl.load(dV + t * stride_dv + column, mask=inside, other=0.0)
        if COPY:
            tl.store(dQkv + 2 * H * D + t * width + column, dv, mask=inside)
        if VALUE:
            dv = dv.to(tl.float32)
            gate = tl.load(Gate + row, mask=row < N * H, other=0.0).to(tl.float32)
            ve = tl.load(Ve + t * stride_ve + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(dVe + t * (H * D) + column, (gate[:, None] * dv).to(dVe.dtype.element_ty), mask=inside)
            tl.store(dGate + row, tl.sum(dv * ve, 1).to(dGate.dtype.element_ty), mask=row < N * H)


def project(x, weight, rotary, ve, ve_gate, paired, offset):
    """qkv (3, N + 1, H, d), of which the planes [:N] are q, k, v, and 1 / rms of each head of q and k (2, N, H) fp32."""
    N, d = x.size(0), 4 * rotary.size(1)
    H = weight.size(0) // (3 * d)
    launch = PROJECT_LAUNCH[x.dtype]
    qkv, rstd = x.new_empty(3, N + 1, H, d), x.new_empty(2, N, H, dtype=torch.float32)
    programs = min(triton.cdiv(N, launch["BLOCK_M"]) * 3 * H, _sm_count(x.device) * PROJECT_PROGRAMS_PER_SM)
    value, tma = ve is not None, _tma(x.device)
    _project_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [launch["BLOCK_M"], launch["BLOCK_K"]]) if tma else x,
        TensorDescriptor.from_tensor(weight, [d, launch["BLOCK_K"]]) if tma else weight, qkv, rstd, rotary, ve if value else x,
        ve_gate if value else x, N, x.stride(0), weight.stride(0), qkv.stride(0), ve.stride(0) if value else 0,
        K=x.size(1), EPS=RMS_EPS, PAIRED=paired, OFFSET=offset, VALUE=value, H=H, D=d, TMA=tma, **launch)
    return qkv, rstd


def project_backward(dq, dk, dv, qkv, rstd, rotary, ve, ve_gate, paired, offset, dqkv):
    """Fills dqkv (N, 3, H, d), of which dv may be a part already; returns the gradients of ve and ve_gate, or (None, None)."""
    N, _, H, d = dqkv.shape
    value, copy = ve is not None, dv.data_ptr() != dqkv[:, 2].data_ptr()
    dve, dgate = (ve_gate.new_empty(N, H * d), torch.empty_like(ve_gate)) if value else (None, None)
    blocks = triton.cdiv(N * H, PROJECT_GRAD_LAUNCH["BLOCK"])
    _project_grad_kernel[(2 + (value or copy), min(blocks, 65535), triton.cdiv(blocks, 65535))](
        dq, dk, dv, qkv[0], qkv[1], dqkv, rstd, rotary, ve if value else dv, ve_gate if value else dv, dve if value else dv,
        dgate if value else dv, N, dq.stride(0), dk.stride(0), dv.stride(0), ve.stride(0) if value else 0,
        PAIRED=paired, OFFSET=offset, VALUE=value, COPY=copy, H=H, D=d, **PROJECT_GRAD_LAUNCH)
    return dve, dgate


def _reinterpreted(qkv, paired):
    q, k, v = qkv[:, :-1]
    return (u.view(2 * u.size(0), u.size(1) // 2, u.size(2)) for u in (q, k, v)) if paired else (q, k, v)


@torch.library.custom_op("speedrun::attention_block", mutates_args=())
def _attention_block(x: Tensor, weight: Tensor, rotary: Tensor, ve: Tensor | None, w_ve: Tensor | None, w_out: Tensor,
                     start: Tensor, end: Tensor, window: Tensor, scale: Tensor, paired: bool,
                     offset: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gates = head_gates(x, ve, w_ve, w_out, paired)
    qkv, rstd = project(x, weight, rotary, ve, gates[-1], paired, offset)  # looks at the gate if there is a ve
    q, k, v = _reinterpreted(qkv, paired)
    y, lse = attend(q, k, v, gates[0].view(q.shape[:2]), start, end, window, scale)
    return y.view(x.size(0), *qkv.shape[2:]), lse, qkv, rstd, gates


@_attention_block.register_fake
def _(x, weight, rotary, ve, w_ve, w_out, start, end, window, scale, paired, offset):
    N, H, d = x.size(0), w_out.size(0), 4 * rotary.size(1)
    return (x.new_empty(N, H, d), _row_scalars(x.new_empty((2 * N, H // 2) if paired else (N, H))), x.new_empty(3, N + 1, H, d),
            x.new_empty(2, N, H, dtype=torch.float32), x.new_empty(1 if ve is None else 2, N, H))


@torch.library.custom_op("speedrun::attention_block_backward", mutates_args=())
def _attention_block_backward(dy: Tensor, x: Tensor, weight: Tensor, rotary: Tensor, ve: Tensor | None, w_ve: Tensor | None,
                              w_out: Tensor, start: Tensor, end: Tensor, window: Tensor, scale: Tensor, y: Tensor, lse: Tensor,
                              qkv: Tensor, rstd: Tensor, gates: Tensor, paired: bool,
                              offset: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, H, d = y.shape
    dqkv = x.new_empty(N, 3, H, d)
    q, k, v = _reinterpreted(qkv, paired)
    *grads, dout_gate = attend_backward(dy.reshape(q.shape), q, k, v, gates[0].view(q.shape[:2]), y.view(q.shape), lse, start,
                                        end, window, scale, dv=None if paired else dqkv[:, 2])
    dve, dve_gate = project_backward(*(u.view(N, H, d) for u in grads), qkv, rstd, rotary, ve, gates[-1], paired, offset, dqkv)
    dqkv = dqkv.view(N, 3 * H * d)
    dx = dqkv @ weight
    dgates = head_gates_backward(dout_gate, dve_gate, gates, x, ve, w_ve, w_out, paired, dx, dve)
    return dx, dqkv.t() @ x, x.new_empty(0) if ve is None else dve, dgates  # an op returns tensors


@_attention_block_backward.register_fake
def _(dy, x, weight, rotary, ve, w_ve, w_out, *others):
    return (x.new_empty(x.shape), x.new_empty(weight.shape), x.new_empty(0 if ve is None else ve.shape),
            x.new_empty(1 if ve is None else 2, *w_out.shape, dtype=torch.float32))


def _block_setup(ctx, inputs, output):
    *tensors, ctx.paired, ctx.offset = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # only y has a gradient; zeros would be written for the others


def _block_grad(ctx, dy, *others):
    dx, dweight, dve, dgates = _attention_block_backward(dy, *ctx.saved_tensors, ctx.paired, ctx.offset)
    dw_out, *dw_ve = dgates.to(dx.dtype)  # here, so that the compiler joins it with what comes next
    return dx, dweight, None, *((dve, *dw_ve) if dw_ve else (None, None)), dw_out, *[None] * 6


_attention_block.register_autograd(_block_grad, setup_context=_block_setup)


def attention_block_ref(x, weight, rotary, ve, w_ve, w_out, cu_seqlens, max_len, window, scale, paired, offset,
                        attention=attention_ref):
    out_gate, ve_gate = head_gates_ref(x, ve, w_ve, w_out, paired)
    q, k, v = project_ref(x, weight, rotary, ve, ve_gate, paired, offset)
    N, H, d = q.shape
    if not paired:
        return attention(q, k, v, out_gate, cu_seqlens, max_len, window, scale)
    q, k, v, out_gate = (u.reshape(2 * N, H // 2, *u.shape[2:]) for u in (q, k, v, out_gate))
    return attention(q, k, v, out_gate, 2 * cu_seqlens, 2 * max_len, window, scale).reshape(N, H, d)


def attention_block(x, weight, rotary, ve, w_ve, w_out, cu_seqlens, max_len, window, scale, paired, offset):
    """y (N, H, d); differentiable in x, weight, ve, w_ve and w_out. window and scale are 0-D CPU tensors."""
    d = 4 * rotary.size(1)
    (N, D), H = x.shape, weight.size(0) // (3 * d)
    if N == 0 or weight.shape != (3 * H * d, D) or paired and H % 2:
        raise ValueError(f"attention_block: for x {(N, D)}, N > 0, and heads of width {d} weight must be (3 H d, {D}), H even in"
                         f" paired layers, got {tuple(weight.shape)}")
    if rotary.shape[2:] != (2,) or rotary.size(0) < N * (1 + paired) or not rotary.is_contiguous():
        raise ValueError(f"attention_block: rotary must be (>= {N * (1 + paired)}, d/4, 2), contiguous, got {tuple(rotary.shape)}"
                         f" with strides {rotary.stride()}")
    if d & (d - 1) or d < 16:
        raise ValueError(f"attention_block: head width must be a power of two from 16 on, got {d}")
    if w_out.ndim != 2 or w_out.size(0) != H or w_out.size(1) > min(D, H * d) or w_out.size(1) % 2:
        raise ValueError(f"attention_block: w_out must be ({H}, C), C even and at most {min(D, H * d)}, got {tuple(w_out.shape)}")
    if (ve is None) != (w_ve is None) or ve is not None and (ve.shape != (N, H * d) or w_ve.shape != w_out.shape):
        raise ValueError(f"attention_block: ve must be {(N, H * d)} and w_ve {tuple(w_out.shape)}, or both None, got"
                         f" {None if ve is None else tuple(ve.shape)} and {None if w_ve is None else tuple(w_ve.shape)}")
    given = [u for u in (x, weight, rotary, ve, w_ve, w_out) if u is not None]
    if x.dtype not in PROJECT_LAUNCH or any(u.dtype != x.dtype for u in given):
        raise ValueError(f"attention_block: tensors must be all bfloat16 or all float32, got {[u.dtype for u in given]}")
    if _takes_ref(x, exact=False):
        return attention_block_ref(x, weight, rotary, ve, w_ve, w_out, cu_seqlens, max_len, window, scale, paired, offset)
    # Outside the opaque op, so that the compiler does this once for all layers.
    start, end = document_of_tokens((1 + paired) * cu_seqlens, (1 + paired) * N)
    ve = ve if ve is None or ve.stride(-1) == 1 else ve.contiguous()
    x, weight, w_ve, w_out = (u if u is None else u.contiguous() for u in (x, weight, w_ve, w_out))
    return _attention_block(x, weight, rotary, ve, w_ve, w_out, start, end, window, scale, paired, offset)[0]


def attention_block_fa3(*args):
    """`attention_block_ref` with FlashAttention-3 inside."""
    return attention_block_ref(*args, attention=fa3_attention)


# ======================================================================================================================
# 6  ReLU² MLP
#
#   y = mlp(x, W1, W2)      post = relu(x W1ᵀ)²,  y = post W2          replaces F.linear(x, W1).relu().square() @ W2
#   its gradient            dpre = 2 (g W2ᵀ) relu(x W1ᵀ)
#                           dx = dpre W1,  dW1 = dpreᵀ x,  dW2 = postᵀ g
#
#   x (N, D), W1 and W2 (F, D), bf16 or fp32, contiguous, rows of whole 16 bytes; y and dx (N, D), dW1 and dW2 (F, D).
#   Each product is rounded to the dtype, then post and dpre once more: the bits of mlp_ref but for the order of sums.
#
# The square and its derivative ride on the products x W1ᵀ and g W2ᵀ, which saves passes over (N, F) tensors. The other
# four products are the library's. The forward pass keeps x and post: for p = relu(x W1ᵀ), bf16(√post) is p bit for bit.
# Rounding p² moves its root by at most 0.71 of half the spacing of bf16 at p, so the root is rounded back to p, and may
# itself be off by a relative 8e-4. Not recovered: p < 2⁻⁶³ and p > 2⁶⁴, whose squares leave the range of bf16.
#
# On one H200 (µs at N = 16384 / 32768 / 49152, D = 768, F = 3072, medians, L2 cold):
#   forward kernel    118 / 228 / 335    691 TFLOP/s, 96 % of the 722 of an 8192³ product; the product alone by torch 339,
#                                        with a fused pass behind it 481
#   backward kernel   133 / 257 / 384    605 TFLOP/s, 84 %; torch with a fused pass 545
#   op forward        218 / 425 / 637    compiled mlp_ref 267 / 528 / 785
#   op backward       444 / 860 / 1283   compiled mlp_ref 495 / 969 / 1440
#
# ReLU²: So et al., arXiv 2109.08668. Riding on a persistent product: andrewbriand8 and Joshrav21, PR 197. Saving post
# alone: cong_ml (Recursive), PR 322. Warpgroups that take turns: the ping-pong schedule of NVIDIA's CUTLASS.
# ======================================================================================================================

# Hopper: one warp fetches, two warpgroups take turns tile by tile, so that one multiplies while the other finishes its
# tile and the tensor cores do not wait for root and stores. At N = 49152 Triton's own pipelining took 345 µs forward and
# 481 backward where this took 334 and 380; two warpgroups on one 128x256 tile took 340 and, in another run, 413 against
# 382. 128x128 fp32 sums are 128 registers of a thread; 256 columns would be too many. A stage of both operands is 32 KiB;
# 5 of them and a 32 KiB tile for each warpgroup, which holds post and then the result, are 224 of the 227 KiB of an SM.
MLP_HOPPER = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, STAGES=5, num_warps=4)  # warps of one warpgroup

# Elsewhere, in Triton's interpreter, and for fp32, which exists for tests: plain tiles. 4 stages of 16 KiB fit every GPU
# that has bf16 units.
MLP_LAUNCH = {
    torch.bfloat16: dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=4),
    torch.float32: dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=2),
}


def mlp_ref(x, W1, W2):
    """(N, D) -> (N, D), in the dtype of x."""
    return F.linear(x, W1).relu().square() @ W2


@triton.jit
def _mlp_kernel(A, B, Post, Out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Out (M, N) = relu(A Bᵀ)², or with Post (M, N): 2 (A Bᵀ) √Post. A (M, K), B (N, K)."""
    columns = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        a = tl.load(A + m * K + (start + k)[None, :], mask=(m < M) & inside[None, :], other=0.0)
        b = tl.load(B + n * K + (start + k)[:, None], mask=(n < N) & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    in_tile = (m < M) & (n < N)
    if Post is None:
        pre = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL).to(Out.dtype.element_ty)
        result = pre * pre
    else:
        post = tl.load(Post + m * N + n, mask=in_tile, other=0.0)
        root = tl.sqrt(post.to(tl.float32)).to(Out.dtype.element_ty)
        result = acc.to(Out.dtype.element_ty) * (root + root)
    tl.store(Out + m * N + n, result, mask=in_tile)


NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def _mlp_fetch(args):
    A, B, Post, Out, a_ring, b_ring, full, free, posts, tiles, turn = args
    BLOCK_M: gl.constexpr = a_ring.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    BLOCK_K: gl.constexpr = a_ring.shape[2]
    STAGES: gl.constexpr = a_ring.shape[0]
    columns = gl.cdiv(Out.shape[1], BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(Out.shape[0], BLOCK_M) * columns, gl.num_programs(0)):
        for k in range(0, A.shape[1], BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), step // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), A.block_type.nbytes + B.block_type.nbytes)
            tma.async_copy_global_to_shared(A, [tile // columns * BLOCK_M, k], full.index(stage), a_ring.index(stage))
            tma.async_copy_global_to_shared(B, [tile % columns * BLOCK_N, k], full.index(stage), b_ring.index(stage))
            step += 1


@gluon.jit
def _mlp_multiply(args, ME: gl.constexpr):
    A, B, Post, Out, a_ring, b_ring, full, free, posts, tiles, turn = args
    BLOCK_M: gl.constexpr = a_ring.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    STAGES: gl.constexpr = a_ring.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    columns = gl.cdiv(Out.shape[1], BLOCK_N)
    steps = gl.cdiv(A.shape[1], a_ring.shape[2])
    buffer = tiles.index(ME)
    step = ME * steps  # of the steps of all tiles of this program, which share one ring
    count = 0  # of its own tiles
    for tile in range(gl.program_id(0) + ME * gl.num_programs(0), gl.cdiv(Out.shape[0], BLOCK_M) * columns,
                      2 * gl.num_programs(0)):
        m = tile // columns * BLOCK_M
        n = tile % columns * BLOCK_N
        if Post is not None:  # on its way while the other warpgroup multiplies
            tma.store_wait(0)
            mbarrier.expect(posts.index(ME), Post.block_type.nbytes)
            tma.async_copy_global_to_shared(Post, [m, n], posts.index(ME), buffer)
        # Also for correctness: a barrier has one bit of phase, so nobody may wait for a stage two rounds ahead.
        mbarrier.wait(turn.index(ME), count & 1 ^ (1 - ME))
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            b = b_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(a_ring.index(stage), b, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the product before this one is done with its stage
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        mbarrier.arrive(turn.index(1 - ME))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
        # In bf16 arithmetic on purpose: one instruction for two elements, and conversions in pairs. Doubling is exact.
        if Post is None:
            pre = gl.maximum(acc, 0.0, propagate_nan=NAN_STAYS).to(Out.dtype)
            result = pre * pre
            tma.store_wait(0)
        else:
            mbarrier.wait(posts.index(ME), count & 1)
            root = gl.sqrt(buffer.load(LAYOUT).to(gl.float32)).to(Out.dtype)
            result = acc.to(Out.dtype) * (root + root)
        buffer.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(Out, [m, n], buffer)
        step += steps
        count += 1
    tma.store_wait(0)


@gluon.jit
def _mlp_hopper_kernel(A, B, Post, Out, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                       STAGES: gl.constexpr):
    """What _mlp_kernel computes, from descriptors of blocks of the operands."""
    a_ring = gl.allocate_shared_memory(A.dtype, [STAGES, BLOCK_M, BLOCK_K], A.layout)
    b_ring = gl.allocate_shared_memory(B.dtype, [STAGES, BLOCK_N, BLOCK_K], B.layout)
    tiles = gl.allocate_shared_memory(Out.dtype, [2, BLOCK_M, BLOCK_N], Out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    posts = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(posts.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    args = (A, B, Post, Out, a_ring, b_ring, full, free, posts, tiles, turn)
    # Registers per thread of the second warpgroup and of the warp that fetches; the first gets what remains, 240.
    gl.warp_specialize([(_mlp_multiply, (args, 0)), (_mlp_multiply, (args, 1)), (_mlp_fetch, (args,))], [4, 1], [240, 24])


def _relu_square(a, b, post=None):
    """a (M, K), b (N, K) -> relu(a bᵀ)² (M, N); with post (M, N) -> 2 (a bᵀ) √post."""
    (M, K), N = a.shape, b.size(0)
    out = a.new_empty(M, N)
    hopper = a.is_cuda and a.dtype == torch.bfloat16 and torch.cuda.get_device_capability(a.device)[0] == 9
    launch = MLP_HOPPER if hopper else MLP_LAUNCH[a.dtype]
    tiles = triton.cdiv(M, launch["BLOCK_M"]) * triton.cdiv(N, launch["BLOCK_N"])
    if not hopper:
        _mlp_kernel[(tiles,)](a, b, post, out, M, N, K, **launch)
        return out
    if any(t.data_ptr() % 16 for t in (a, b)):
        raise ValueError("mlp: operands must start at multiples of 16 bytes, as the tensor memory accelerator requires")

    def blocks(tensor, rows, columns):
        swizzle = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        return GluonDescriptor.from_tensor(tensor, [launch[rows], launch[columns]], swizzle)

    programs = min(tiles, _sm_count(a.device))
    _mlp_hopper_kernel[(programs,)](
        blocks(a, "BLOCK_M", "BLOCK_K"), blocks(b, "BLOCK_N", "BLOCK_K"),
        None if post is None else blocks(post, "BLOCK_M", "BLOCK_N"), blocks(out, "BLOCK_M", "BLOCK_N"), **launch)
    return out


@torch.library.custom_op("speedrun::mlp", mutates_args=())
def _mlp(x: Tensor, W1: Tensor, W2: Tensor) -> tuple[Tensor, Tensor]:
    post = _relu_square(x, W1)
    return post @ W2, post


@_mlp.register_fake
def _(x, W1, W2):
    return torch.empty_like(x), x.new_empty(x.size(0), W1.size(0))


@torch.library.custom_op("speedrun::mlp_backward", mutates_args=())
def _mlp_backward(grad: Tensor, x: Tensor, W1: Tensor, W2: Tensor, post: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    dW2 = post.mT @ grad  # first, since it gives a new thread of the autograd engine the CUDA context descriptors need
    dpre = _relu_square(grad, W2, post)
    return dpre @ W1, dpre.mT @ x, dW2


@_mlp_backward.register_fake
def _(grad, x, W1, W2, post):
    return torch.empty_like(x), torch.empty_like(W1), torch.empty_like(W2)


def _mlp_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)  # post has no gradient; (N, F) zeros would be written for it


def _mlp_grad(ctx, grad, grad_post):
    return _mlp_backward(grad, *ctx.saved_tensors)


_mlp.register_autograd(_mlp_grad, setup_context=_mlp_setup)


def mlp(x, W1, W2):
    """`mlp_ref` with the square and its derivative inside the products."""
    if x.ndim != 2 or W1.ndim != 2 or W1.shape != W2.shape or W1.size(1) != x.size(1) or x.size(0) == 0:
        raise ValueError("mlp: x must be (N, D) with N > 0, W1 and W2 (F, D), got"
                         f" {tuple(x.shape)}, {tuple(W1.shape)}, {tuple(W2.shape)}")
    for name, t in (("x", x), ("W1", W1), ("W2", W2)):
        if t.dtype != x.dtype or t.dtype not in MLP_LAUNCH or t.device != x.device:
            raise ValueError(f"mlp: all must be bfloat16 or all float32, on one device; {name} is {t.dtype} on {t.device}")
        if not t.is_contiguous():
            raise ValueError(f"mlp: {name} must be contiguous, its strides are {t.stride()}")
    if any(size * x.element_size() % 16 for size in W1.shape):
        raise ValueError(f"mlp: rows of F or D elements must be multiples of 16 bytes, got (F, D) = {tuple(W1.shape)}")
    if _takes_ref(x, exact=False):
        return mlp_ref(x, W1, W2)
    return _mlp(x, W1, W2)[0]


# ======================================================================================================================
# 7  Head and loss: softcapped multi-token cross-entropy of h (N, D) under the head weight W (D, V), V classes
#
#   ℓ = h W,  u = σ((ℓ + 5) / 7.5),  z = 23 u,  lse_t = ln Σ_v exp z
#   Loss    = loss_scale Σ_t Σ_k w_k (lse_t - z[t, target[t + k]]),  k = 0..P-1, terms with t + k >= N dropped  (K1: borders ignored)
#   ∂Loss/∂ℓ = loss_scale (S exp(z - lse) - Σ_k w_k [v = target[t + k]]) (23 / 7.5) u (1 - u),   S = Σ_k w_k of the terms that count
#
# FP8 head: e4m3 codes of h and W, e5m2 codes of ∂Loss/∂ℓ, static scales, each quantised straight from fp32.
# Forward: logits of a block of rows, their loss and their gradient, block after block: the (N, V) logits never exist as a
# whole, the gradient does (2.5 GB of codes at N = 49152). Backward: its transpose and two products over all rows, with
# the upstream gradient in their scale. Without FP8 the gradient overwrites the logits in their own dtype.
# At N = 49152 on an H200 (µs): logits 3856 (985 TFLOP/s), cross_entropy 2505, transpose 1277, dh 2687, dW 2701 (1410).
#
# FP8 head after Andrew Briand (PR 207), its tiled transposes after samacqua (PR 240); multi-token loss in one pass over
# the logits after Soren Dunn (PR 199); loss and gradient in one kernel and the fixed maximum: Andrew Briand (PR 251).
# ======================================================================================================================

CAP, CAP_SHIFT, CAP_SCALE = 23.0, 5.0, 7.5
E4M3_MAX = 448.0
X_SCALE, W_SCALE, GRAD_SCALE = 100 / E4M3_MAX, 1.6 / E4M3_MAX, 0.75 / E4M3_MAX  # real value = code · scale (GRAD_SCALE · loss_scale)


def softcap(logits):
    """Logits of any shape, bounded to (0, 23), in fp32."""
    return CAP * torch.sigmoid((logits.float() + CAP_SHIFT) / CAP_SCALE)


def multi_token_targets(targets, count):
    """(N,) next-token ids -> (N, count) view: column k is the target k positions further on, -1 beyond the end."""
    return F.pad(targets, (0, count - 1), value=-1).unfold(0, count, 1)


# ---- Codes -----------------------------------------------------------------------------------------------------------
#
#   codes, codes_t = quantise(x, scale)     codes = e4m3(x / scale): fp32 division, saturated, one rounding; codes_t = codesᵀ
#
# x (M, N) contiguous, bf16 or fp32. FP8 products want both operands contiguous along what is summed, so each operand is
# needed in both layouts sooner or later. The second comes from transpose_copy, which finds the codes in L2. Not turned in this
# kernel: Triton 3.6 turns x and divides twice (74 µs for 49152 x 768), and gave wrong tiles for fp32 x.

QUANTISE_LAUNCH = dict(BLOCK=4096, num_warps=8)  # 16 elements to a thread, moved in 16-byte accesses


def quantise_ref(x, scale):
    codes = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, codes.t().contiguous()


@triton.jit
def _quantise_kernel(X, Codes, size, scale, MAX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < size).to(tl.float32)
    x = tl.clamp(tl.div_rn(x, tl.cast(scale, tl.float32)), -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(Codes + i, x.to(Codes.dtype.element_ty), mask=i < size)


def quantise(x, scale, out=None):
    """`out`: codes and codes_t of before, to be overwritten (on a GPU)."""
    if x.ndim != 2 or not x.is_contiguous():
        raise ValueError(f"quantise: x must be a contiguous matrix, got shape {tuple(x.shape)}, strides {x.stride()}")
    if out and any(o.shape != shape or not o.is_contiguous() for o, shape in zip(out, (x.shape, x.shape[::-1]))):
        raise ValueError(f"quantise: out must be contiguous, {tuple(x.shape)} and its transpose")
    if x.device.type == "cpu":  # the interpreter of Triton 3.7 rounds to FP8 wrongly
        return quantise_ref(x, scale)
    codes, codes_t = out or (torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device) for shape in (x.shape, x.shape[::-1]))
    programs = triton.cdiv(x.numel(), QUANTISE_LAUNCH["BLOCK"])
    _quantise_kernel[(programs,)](x, codes, x.numel(), scale, MAX=E4M3_MAX, **QUANTISE_LAUNCH)
    return codes, transpose_copy(codes, codes_t)


# ---- Cross-entropy of some rows --------------------------------------------------------------------------------------
#
#   losses = cross_entropy(logits, targets, weights, loss_scale, code_scale, grad)
#
# logits (n, V) bf16, fp16 or fp32, rows contiguous; targets (n, P) int64 of any strides, < V (not verified), -1 = none; weights
# (P,) fp32.
# Returns the loss of each row (n,) fp32. `grad` (n, V), if there is one, gets ∂Loss/∂ℓ / code_scale, rounded once to its
# dtype (e5m2, bf16, ...), saturated; it may be `logits` itself.
#
# One program per row reads it once, 2 bytes per logit, and writes 1: 7.4 GB at N = 49152, 1.74 ms. Measured: 2.48 with the
# halves packed by one instruction of assembly, 2.67 by shifts (records/2026-11-22_ground); without a gradient 1.62.
# The next limit is the special-function unit, 16 results per clock and SM, 0.6 ms for each one per logit. exp, 1/x, exp
# would be three; two logits share a reciprocal (1/a = b · 1/(ab)), which makes it 2.5. z < 23, so exp(z - 23) needs no
# running maximum.
# Up to its factor loss_scale S / Σ, the gradient is e u (1 - u), known before the sum: that is what waits for Σ in registers, two
# fp16 numbers in each, hence 50 registers of 512 threads, and two programs fit an SM: one reads while the other computes.
# No column is compared with a target: once the row is written, the <= P columns that are targets are overwritten.

CE_LAUNCH = dict(SEGMENT=2048, num_warps=16, maxnreg=64)


def cross_entropy_ref(logits, targets, weights, loss_scale, code_scale=1.0, grad=None):
    u = torch.sigmoid((logits.float() + CAP_SHIFT) / CAP_SCALE)
    z = CAP * u
    lse = z.logsumexp(1, keepdim=True)
    w = weights * (targets >= 0)  # (n, P)
    losses = loss_scale * (w * (lse - z.gather(1, targets.clamp(min=0)))).sum(1)
    if grad is not None:
        dz = w.sum(1, keepdim=True) * torch.exp(z - lse)
        classes = torch.arange(logits.size(1), device=logits.device)
        for k in range(targets.size(1)):
            dz = dz - torch.where(classes == targets[:, k:k + 1], w[:, k:k + 1], 0.0)
        grad.copy_(dz * (u * (1 - u)) * (loss_scale * CAP / CAP_SCALE / code_scale))
    return losses


def head_loss_ref(h, W, targets, weights, loss_scale):
    """The loss of all rows at once; differentiable by autograd; materialises the logits."""
    return cross_entropy_ref(h @ W, multi_token_targets(targets, weights.numel()), weights, loss_scale).sum()


LIFT = tl.constexpr(21.0)  # e u (1 - u) <= 0.0154: times 2^21 fp16 holds it in full precision to 2.9e-11, at all to 2.8e-14


@triton.jit
def _exponent(x, CAP_SHIFT: tl.constexpr, CAP_SCALE: tl.constexpr):
    """-(x + 5) / 7.5 / ln 2, so that u = 1 / (1 + 2^this); at most 60, so that the product of two fits fp32 (u = 1e-18)."""
    return tl.minimum(x.to(tl.float32) * (-LOG2_E / CAP_SCALE) - CAP_SHIFT * LOG2_E / CAP_SCALE, 60.0,
                      propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _lifted_exp(u, CAP: tl.constexpr):
    """2^LIFT exp(z - 23)."""
    return tl.exp2(u * (CAP * LOG2_E) + (LIFT - CAP * LOG2_E))


@triton.jit
def _cross_entropy_kernel(Logits, Targets, Weights, Losses, Grad, loss_scale, code_scale, stride_l, stride_g, stride_tn, stride_tk,
                          V: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, CAP: tl.constexpr,
                          CAP_SHIFT: tl.constexpr, CAP_SCALE: tl.constexpr, SEGMENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    Logits += row * stride_l
    HALF: tl.constexpr = Logits.dtype.element_ty.primitive_bitwidth == 16
    col = tl.arange(0, SEGMENT)
    even = 2 * tl.arange(0, SEGMENT // 2)
    total = tl.zeros((SEGMENT // 2,), dtype=tl.float32)
    held = ()
    for start in tl.static_range(0, V, SEGMENT):
        if start + SEGMENT <= V:
            x = tl.load(Logits + start + col)
        else:
            x = tl.load(Logits + start + col, mask=start + col < V, other=0.0)
        xa, xb = tl.split(tl.reshape(x, (SEGMENT // 2, 2)))
        da = 1.0 + tl.exp2(_exponent(xa, CAP_SHIFT, CAP_SCALE))
        db = 1.0 + tl.exp2(_exponent(xb, CAP_SHIFT, CAP_SCALE))
        r = tl.rsqrt(da * db)  # Triton's 1/x guards against overflow with several instructions; the square of this is one more
        r = r * r
        ua = r * db
        ub = r * da
        ea = _lifted_exp(ua, CAP)
        eb = _lifted_exp(ub, CAP)
        if start + SEGMENT <= V:
            total += ea
            total += eb
        else:
            total += tl.where(start + even < V, ea, 0.0)
            total += tl.where(start + even + 1 < V, eb, 0.0)
        if Grad is not None:
            wa = ea * (ua - ua * ua)
            wb = eb * (ub - ub * ub)
            if HALF:  # assembly, because the compiler sees through shifts and gives each half a register of its own
                held = held + (tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [wa, wb], dtype=tl.uint32,
                                                         is_pure=True, pack=1),)
            else:
                held = held + ((wa, wb),)
    total = tl.sum(total, axis=0)

    k = tl.arange(0, BLOCK_P)
    target = tl.load(Targets + row * stride_tn + k * stride_tk, mask=k < P, other=-1)
    there = target >= 0
    weight = tl.load(Weights + k, mask=there, other=0.0)
    u = 1.0 / (1.0 + tl.exp2(_exponent(tl.load(Logits + target, mask=there, other=0.0), CAP_SHIFT, CAP_SCALE)))
    lse = CAP + (tl.log2(total) - LIFT) / LOG2_E
    loss_scale = tl.cast(loss_scale, tl.float32)
    tl.store(Losses + row, loss_scale * tl.sum(weight * (lse - CAP * u), axis=0))

    if Grad is not None:
        if Grad.dtype.element_ty == Logits.dtype.element_ty:
            tl.debug_barrier()  # Grad may be Logits: all threads have read those of the targets
        Grad += row * stride_g
        unit = loss_scale * (CAP / CAP_SCALE) / tl.cast(code_scale, tl.float32)
        factor = tl.sum(weight, axis=0) * unit / total
        # Coinciding targets: each gets the sum of their weights, so that it does not matter which is stored last.
        chosen = tl.sum(tl.where(target[:, None] == target[None, :], weight[None, :], 0.0), axis=1)
        at_target = (factor * _lifted_exp(u, CAP) - unit * chosen) * (u - u * u)
        for start in tl.static_range(0, V, SEGMENT):
            if HALF:
                pair = held[start // SEGMENT]
                wa = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
                wb = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            else:
                wa, wb = held[start // SEGMENT]
            g = tl.reshape(tl.join(factor * wa, factor * wb), (SEGMENT,))
            tl.store(Grad + start + col, g.to(Grad.dtype.element_ty), mask=start + col < V)
        tl.debug_barrier()  # the row has been written by all threads
        tl.store(Grad + target, at_target.to(Grad.dtype.element_ty), mask=there)


def cross_entropy(logits, targets, weights, loss_scale, code_scale=1.0, grad=None):
    """Losses (n,) fp32 of logits (n, V); fills `grad` with the gradient w.r.t. the logits / code_scale."""
    n, V = logits.shape
    if targets.shape != (n, weights.numel()) or targets.dtype != torch.int64 or weights.dtype != torch.float32:
        raise ValueError(f"cross_entropy: for logits {tuple(logits.shape)} targets must be ({n}, P) int64 and weights (P,) fp32,"
                         f" got {tuple(targets.shape)} {targets.dtype} and {tuple(weights.shape)} {weights.dtype}")
    if logits.stride(1) != 1 or not weights.is_contiguous() or grad is not None and (
            grad.shape != logits.shape or grad.stride(1) != 1):
        raise ValueError("cross_entropy: logits, weights and grad must have contiguous rows, grad the shape of logits")
    if _takes_ref(logits, logits if grad is None else grad, exact=False):
        return cross_entropy_ref(logits, targets, weights, loss_scale, code_scale, grad)
    losses = torch.empty(n, device=logits.device)
    P = weights.numel()
    launch = CE_LAUNCH | dict(SEGMENT=min(CE_LAUNCH["SEGMENT"], triton.next_power_of_2(V)))
    _cross_entropy_kernel[(n,)](
        logits, targets, weights, losses, grad, loss_scale, code_scale, logits.stride(0), 0 if grad is None else grad.stride(0),
        *targets.stride(), V=V, P=P, BLOCK_P=triton.next_power_of_2(P), CAP=CAP, CAP_SHIFT=CAP_SHIFT, CAP_SCALE=CAP_SCALE,
        **launch)
    return losses


# ---- The head --------------------------------------------------------------------------------------------------------


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, head, targets, weights, loss_scale):
        ctx.head, ctx.loss_scale = head, loss_scale
        shape, dtype = (h.size(0), weight.size(1)), torch.float8_e5m2 if head.fp8 else head.dtype
        grad = torch.empty(shape, dtype=dtype, device=h.device)  # of the loss w.r.t. the logits
        if head.fp8:
            x, x_t = quantise(h, X_SCALE)
            ctx.save_for_backward(grad, x_t, head.codes)

            def logits(rows):
                return torch._scaled_mm(x[rows], head.codes_t.t(), head.scale_x, head.scale_w, out_dtype=head.dtype,
                                        use_fast_accum=True)
        else:
            W = weight.to(head.dtype)
            ctx.save_for_backward(grad, h, W)

            def logits(rows):
                return torch.mm(h[rows], W, out=grad[rows])
        return head.blockwise(logits, targets, weights, loss_scale, GRAD_SCALE * loss_scale if head.fp8 else 1.0, grad)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        head = ctx.head
        grad, x, w = ctx.saved_tensors
        if head.fp8:
            scale_g = upstream * (GRAD_SCALE * ctx.loss_scale)
            grad_t = transpose_copy(grad, torch.empty(grad.shape[::-1], dtype=grad.dtype, device=grad.device))
            grad_h = torch._scaled_mm(grad, w.t(), scale_g, head.scale_w, out_dtype=head.dtype)
            grad_w = torch._scaled_mm(x, grad_t.t(), head.scale_x, scale_g, out_dtype=head.dtype)
        else:
            grad_h = upstream * (grad @ w.t())
            grad_w = upstream * (x.t() @ grad)
        return grad_h, grad_w.to(head.weight.dtype), None, None, None, None


def head_rows(classes):
    """Rows per block: a power of two, so that it divides every batch; 16384 for 50304 classes, 1.6 GB of bf16 logits."""
    return 1 << int(math.log2(2**30 / classes))


class HeadLoss:
    """loss = head(h, targets, weights, loss_scale): the training loss, h (N, D), targets (N,) int64, weights (P,) fp32.

    `weight` (D, V) is the parameter that gets the gradient. Call `refresh` whenever it has changed: the FP8 codes are
    made once per update, not once per micro-step. `exact=True` takes the unquantised weight (validation).
    `cross_entropy` is the function of that name or cross_entropy_ref, compiled or not.
    """

    def __init__(self, weight, dtype, fp8, cross_entropy=cross_entropy):
        self.weight, self.dtype, self.fp8, self.cross_entropy = weight, dtype, fp8, cross_entropy
        self.block = head_rows(weight.size(1))
        if fp8:
            self.scale_x, self.scale_w = (torch.tensor(s, device=weight.device) for s in (X_SCALE, W_SCALE))
            self.codes, self.codes_t = quantise(weight.detach(), W_SCALE)

    def refresh(self):
        """The codes stay where they are: CUDA graphs read them."""
        if self.fp8:
            self.codes, self.codes_t = quantise(self.weight.detach(), W_SCALE, (self.codes, self.codes_t))
            torch.autograd.graph.increment_version((self.codes, self.codes_t))  # a backward pass that comes late raises

    def __call__(self, h, targets, weights, loss_scale, exact=False):
        if not exact:
            return _HeadLoss.apply(h, self.weight, self, targets, weights, loss_scale)
        with torch.no_grad():
            W = self.weight.to(self.dtype)
            return self.blockwise(lambda rows: h[rows] @ W, targets, weights, loss_scale)

    def blockwise(self, logits, targets, weights, loss_scale, code_scale=1.0, grad=None):
        """Loss (0-D fp32), a block of rows at a time: `logits(rows)` are theirs. Fills `grad` (N, V) / code_scale."""
        many = multi_token_targets(targets, weights.numel())
        blocks = (slice(start, start + self.block) for start in range(0, targets.numel(), self.block))
        return torch.cat([self.cross_entropy(logits(rows), many[rows], weights, loss_scale, code_scale,
                                             None if grad is None else grad[rows]) for rows in blocks]).sum()


# ======================================================================================================================
# 8  Embedding tables: rows out, gradients straight into the gradient buffer
#
#   lookup(table, num_tables, sorted_ids, embedding_grad)   table (P·R, D) leaf parameter, P = num_tables -> P tensors (N, D): rows ids[t]
#   embedding_grad(grad, sorted_ids, upstream)          grad[ids[t]] += Σ_t upstream[t]   in place, fp32 sums, rounded once
#
#   grad (R, D) contiguous, bf16 or fp32; sorted_ids of ids (N,) int32, 0 <= id < R, which the forward of lookup sees to; upstream
#   (N, D), unit stride along D.
#   Replaces aten.embedding_dense_backward, whose atomics want a fp32 table: zeroed, cast to bf16, added to the gradient, four
#   passes over all rows of which a batch touches a few percent. Here the ids are sorted and one program sums all occurrences
#   of a row: rows that do not occur cost nothing, and a run repeats bit for bit.
#   N = 49152, R = 50304: 63 µs (aten.embedding_dense_backward, its cast and the addition: 700).
# ======================================================================================================================

# Most ids occur once or twice, a few (comma, "the") thousands of times. So that nobody adds up thousands of rows alone, the
# sorted positions are first summed in pieces that end at multiples of PIECE, then the pieces of every id. One kernel does both.
PIECE = 64
# Four warps read a row of 768 in 16-byte accesses. 2 rows at a time: with more, rare ids idle. Loads are pipelined 3 deep.
EMBEDDING_LAUNCH = dict(BLOCK=2, STAGES=3, num_warps=4)
EMBEDDING_PROGRAMS_PER_SM = 16  # what an SM holds at 4 warps each


class SortedIds:
    """ids (N,) int32, and where equal ones are."""

    def __init__(self, ids):
        self.ids = ids

    @functools.cached_property
    def pieces(self):
        """Found when first asked for, that is in the backward pass; int64 but the last.

        order (N,): positions sorted by id; piece_starts (N + 1,): places in `order`, filled up with N; group_starts (N + 1,):
        the same for ids, places in `piece_starts`; piece_ids (N + 1,): the id of every piece, filled up with -1.
        """
        N = self.ids.numel()
        ids, order = torch.sort(self.ids, stable=True)
        first = F.pad(ids[1:] != ids[:-1], (1, 1), value=True)  # the fill of piece_starts counts as one group per entry
        pieces = first[:N].clone()
        pieces[::PIECE] = True
        piece_starts = torch.nonzero_static(pieces, size=N + 1, fill_value=N).view(-1)
        group_starts = torch.nonzero_static(first[piece_starts], size=N + 1, fill_value=N).view(-1)
        return order, piece_starts, group_starts, F.pad(ids, (0, 1), value=-1)[piece_starts]


def embedding_grad_ref(grad, sorted_ids, upstream):
    grad += torch.ops.aten.embedding_dense_backward(_wide(upstream), sorted_ids.ids, grad.size(0), -1, False)


@triton.jit
def _sum_rows_kernel(Dst, Src, Order, Starts, Ids, N, D, stride_sn, FINAL: tl.constexpr, COLUMNS: tl.constexpr,
                     BLOCK: tl.constexpr, STAGES: tl.constexpr):
    # Sum s is over the rows Starts[s] .. Starts[s + 1] - 1 of Src. First launch: rows as listed in Order, into row s of Dst.
    # Final launch: consecutive rows, added to row Ids[Starts[s]] of Dst. Entries from the first id of -1 on are fill.
    column = tl.arange(0, COLUMNS)
    s = tl.minimum(tl.program_id(0), N)
    begin = tl.load(Starts + s)
    id = tl.load(Ids + (begin if FINAL else s)).to(tl.int64)
    while id >= 0:
        end = tl.load(Starts + s + 1)
        total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
        for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
            place = start + tl.arange(0, BLOCK)
            row = place if FINAL else tl.load(Order + place, mask=place < end, other=0)
            total += tl.load(Src + row.to(tl.int64)[:, None] * stride_sn + column[None, :],
                             mask=(place < end)[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
        result = tl.sum(total, axis=0)
        target = Dst + (id if FINAL else s.to(tl.int64)) * D + column
        if FINAL:
            result += tl.load(target, mask=column < D, other=0.0).to(tl.float32)
        tl.store(target, result.to(Dst.dtype.element_ty), mask=column < D)
        s = tl.minimum(s + tl.num_programs(0), N)
        begin = tl.load(Starts + s)
        id = tl.load(Ids + (begin if FINAL else s)).to(tl.int64)


def embedding_grad(grad, sorted_ids, upstream):
    """Adds to `grad` in place."""
    N, D = sorted_ids.ids.numel(), grad.size(1)
    if upstream.shape != (N, D) or upstream.stride(1) != 1 or not grad.is_contiguous():
        raise ValueError(f"embedding_grad: for grad {tuple(grad.shape)}, contiguous, and {N} ids upstream must be {(N, D)} with"
                         f" unit stride in the last axis, got {tuple(upstream.shape)} with strides {upstream.stride()}")
    if _takes_ref(grad):
        return embedding_grad_ref(grad, sorted_ids, upstream)
    order, piece_starts, group_starts, piece_ids = sorted_ids.pieces
    sums = torch.empty(N, D, dtype=torch.float32, device=grad.device)  # one row per piece is used
    for final, dst, src, starts in (False, sums, upstream, piece_starts), (True, grad, sums, group_starts):
        _sum_rows_kernel[(_sm_count(grad.device) * EMBEDDING_PROGRAMS_PER_SM,)](
            dst, src, order, starts, piece_ids, N, D, src.stride(0), FINAL=final, COLUMNS=triton.next_power_of_2(D),
            **EMBEDDING_LAUNCH)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, num_tables, sorted_ids, add):
        ctx.table, ctx.num_tables, ctx.sorted_ids, ctx.add = table, num_tables, sorted_ids, add
        return tuple(part.index_select(0, sorted_ids.ids) for part in table.chunk(num_tables))

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        if ctx.table.grad is None:
            ctx.table.grad = torch.zeros_like(ctx.table)
        for grad, dy in zip(ctx.table.grad.chunk(ctx.num_tables), upstream):
            ctx.add(grad, ctx.sorted_ids, dy)
        return None, None, None, None


def lookup(table, num_tables, sorted_ids, embedding_grad):
    """See above. `table` is a leaf: backward adds to `table.grad`, which torch.autograd.grad does not see."""
    return _Lookup.apply(table, num_tables, sorted_ids, embedding_grad)


# ======================================================================================================================
# 9  The choice of implementation, made once at start
# ======================================================================================================================

IMPLEMENTATIONS = {
    "XXT": {"triton": XXT, "torch": XXT_ref},
    "XTX": {"triton": XTX, "torch": XTX_ref},
    "ba_plus_cAA": {"triton": ba_plus_cAA, "torch": ba_plus_cAA_ref},
    "fused_momentum": {"triton": fused_momentum, "torch": fused_momentum_ref},
    "normuon_tail": {"triton": normuon_tail, "torch": normuon_tail_ref},
    "transpose_copy": {"triton": transpose_copy, "torch": transpose_copy_ref},
    "transpose_add": {"triton": transpose_add, "torch": transpose_add_ref},
    "attention": {"triton": attention_block, "fa3": attention_block_fa3, "torch": attention_block_ref},
    "mlp": {"triton": mlp, "torch": mlp_ref},
    "cross_entropy": {"triton": cross_entropy, "torch": cross_entropy_ref},
    "embedding_grad": {"triton": embedding_grad, "torch": embedding_grad_ref},
}


def choose_ops(device, wanted="auto"):
    """One implementation per operation -> (namespace of callables, {operation: name of the choice}).

    wanted: "auto" (the first listed on CUDA, torch elsewhere), "torch" (references only), or "op:name,op:name" for some.
    """
    names = {op: next(iter(table)) if device.type == "cuda" and wanted != "torch" else "torch"
             for op, table in IMPLEMENTATIONS.items()}
    if NO_TRITON and device.type == "cuda":
        raise ValueError(f"a GPU needs Triton ({NO_TRITON}): install what requirements.txt names, use ./run.sh, or try --preset=cpu")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        raise ValueError(f"{torch.cuda.get_device_name(device)}: bfloat16 needs an Ampere GPU (sm_80) or a newer one; try --preset=cpu")
    if wanted not in ("auto", "torch"):
        for item in wanted.split(","):
            op, _, name = item.partition(":")
            if name not in IMPLEMENTATIONS.get(op, {}):
                known = ", ".join(f"{o}:{'|'.join(t)}" for o, t in IMPLEMENTATIONS.items())
                raise ValueError(f"kernels: '{item}' is not one of {known}")
            if name != "torch" and device.type == "cpu" and not INTERPRETED:
                raise ValueError(f"kernels: '{item}' needs a GPU")
            if name == "fa3":
                _flash_attention_3()  # says now, not from within the compiler, if it is missing
            names[op] = name
    return SimpleNamespace(**{op: IMPLEMENTATIONS[op][name] for op, name in names.items()}), names
