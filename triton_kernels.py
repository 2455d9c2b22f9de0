"""Triton kernels of the trainer, each beside the plain PyTorch that it replaces.

Every op has a wrapper `<name>` that checks its arguments and launches, a plain `<name>_ref` with the same contract that
tests and benchmarks compare with, and a Triton kernel. CPU tensors take the reference, so the trainer runs without a
GPU. TRITON_INTERPRET=1, set before the import, sends them through Triton's interpreter instead, as the tests do.

Conventions
  Importing this file does nothing but define; launch parameters are in one table per kernel, nothing is autotuned.
  Strides are in elements. Offsets in which a batch, row or column index multiplies a stride are int64.
  Run-time floats are cast to fp32 inside the kernel: torch.compile hands Python floats over as fp64.
  Dtypes come from the pointers, none is hard-coded. Results are rounded once.

Contents
  1  XXT, XTX, ba_plus_cAA            symmetric products of the Muon iteration
  2  fused_momentum                   Nesterov momentum and the norm of its result
  3  transpose_copy, transpose_add    moving the tied head between its two layouts
  4  varlen_attention                 sliding-window attention within packed documents
  5  mlp_ref                          ReLU² MLP
  6  HeadLoss                         FP8 or plain head, softcapped multi-token cross-entropy and its gradient
  7  lookup, embedding_grad          rows of the embedding tables and their gradients
  8  choose_ops                       one implementation per op, chosen once
"""

import functools
import math
import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, when triton.jit below reads it too


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


# ======================================================================================================================
# 1  Symmetric products
#
#   XXT(X, out)                        out = X Xᵀ                 X (n, M, K), out (n, M, M)     replaces X @ X.mT
#   XTX(X, out)                        out = Xᵀ X                 X (n, M, K), out (n, K, K)     replaces X.mT @ X
#   ba_plus_cAA(A, alpha, beta, out)   out = alpha A Aᵀ + beta A  A, out (n, M, M), A symmetric  replaces torch.baddbmm
#
# The batch dimension may be absent. bf16 or fp32, any strides, fp32 accumulation, one rounding, `out` exactly symmetric.
# Only the tiles on and below the diagonal are launched (21 of 36 at M = 768 with 128-tiles). A tile below the diagonal
# is stored twice, the second time transposed; a tile on the diagonal gets its upper half from its lower half. Both
# stores move along contiguous memory. Symmetry thus holds by construction, whatever order the products are summed in.
# For an A that is not quite symmetric, ba_plus_cAA mirrors what the lower half of A gives.
# Both operands are loaded along whichever axis is contiguous and the second is transposed on chip, so XTX is the same
# code with the two strides of X exchanged: no copy, and tall matrices keep the small (K, K) product.
#
# Computing half of the symmetric products of Muon and mirroring it: byronxu99, PR 109.
# Loading along the contiguous axis and transposing on chip, tile sizes: EmmettBicker (Aster), PR 217.
# The tall form: ChrisJMcCormick, PR 233.
# ======================================================================================================================

# Square tiles, so that the diagonal either misses a tile or is its diagonal.
GRAM_LAUNCH = {
    # 2·(128·64) operand elements are 32 KiB, times 4 stages 128 KiB of the 227 KiB of an H100/H200 SM: the loads of three
    # steps are in flight behind the product. 8 warps = two warpgroups, 64 fp32 accumulators per thread.
    torch.bfloat16: dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=4),
    # Exact fp32 has no tensor-core path and exists for tests: tiles small enough for registers and shared memory.
    torch.float32: dict(BLOCK=64, BLOCK_K=32, num_warps=4, num_stages=2),
}


def _mirror_lower(product, out):
    return out.copy_(product.tril() + product.tril(-1).mT)


def XXT_ref(X, out):
    return _mirror_lower(X @ X.mT, out)


def XTX_ref(X, out):
    return _mirror_lower(X.mT @ X, out)


def ba_plus_cAA_ref(A, alpha, beta, out):
    A3 = A if A.ndim == 3 else A.unsqueeze(0)
    return _mirror_lower(torch.baddbmm(A3, A3, A3.mT, beta=beta, alpha=alpha).reshape(A.shape), out)


@triton.jit
def _gram_kernel(X, Out, M, K, stride_xb, stride_xm, stride_xk, stride_ob, stride_om, stride_on, alpha, beta,
                 ADDEND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    # Program t of the triangle 0 | 1 2 | 3 4 5 | ... is tile (row, col), col <= row. The first tile of a row has
    # 8t+1 = (2 row + 1)², the last of the row above 8 less: 8t+4 lies between, so no rounding of the root moves a tile.
    t = tl.program_id(0)
    row = ((tl.sqrt((8 * t + 4).to(tl.float32)) - 1) / 2).to(tl.int32)
    col = t - row * (row + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    X += batch * stride_xb
    Out += batch * stride_ob

    i = tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    m = row.to(tl.int64) * BLOCK + i  # (BLOCK,) rows of Out
    n = col.to(tl.int64) * BLOCK + i  # (BLOCK,) columns of Out
    a_ptrs = X + m[:, None] * stride_xm + k[None, :] * stride_xk  # (BLOCK, BLOCK_K)
    b_ptrs = X + n[:, None] * stride_xm + k[None, :] * stride_xk
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = (k < K - start)[None, :]
        a = tl.load(a_ptrs, mask=(m < M)[:, None] & inside, other=0.0)
        b = tl.load(b_ptrs, mask=(n < M)[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")  # "ieee": fp32 operands are not cut to tf32
        a_ptrs += BLOCK_K * stride_xk
        b_ptrs += BLOCK_K * stride_xk

    in_tile = (m < M)[:, None] & (n < M)[None, :]
    if ADDEND:  # here K = M and X is the symmetric A
        addend = tl.load(X + m[:, None] * stride_xm + n[None, :] * stride_xk, mask=in_tile, other=0.0)
        acc = tl.cast(alpha, tl.float32) * acc + tl.cast(beta, tl.float32) * addend.to(tl.float32)
    tile = acc.to(Out.dtype.element_ty)
    if row == col:
        tile = tl.where(i[:, None] >= i[None, :], tile, tl.trans(tile))
    else:
        mirrored = Out + n[:, None] * stride_om + m[None, :] * stride_on
        tl.store(mirrored, tl.trans(tile), mask=(n < M)[:, None] & (m < M)[None, :])
    tl.store(Out + m[:, None] * stride_om + n[None, :] * stride_on, tile, mask=in_tile)


def _takes_gram_ref(X):
    # The interpreter of Triton 3.7 gets tl.dot on bf16 wrong, so there bf16 takes the reference as well.
    return X.device.type == "cpu" and not (INTERPRETED and X.dtype == torch.float32)


def _check_gram(name, X, out, axis):
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


def _launch_gram(X, axis, out, alpha=1.0, beta=0.0, addend=False):
    """Sums products over the axis of X other than `axis` (-1 or -2). Strides are exchanged here, not by views of X."""
    launch, other = GRAM_LAUNCH[X.dtype], -3 - axis
    n, stride_xb, stride_ob = (X.shape[0], X.stride(0), out.stride(0)) if X.ndim == 3 else (1, 0, 0)
    tiles = _cdiv(X.shape[axis], launch["BLOCK"])
    # Tiles of one matrix are neighbours in launch order. At M = 768 it stays in L2 without any reordering of tiles.
    _gram_kernel[(tiles * (tiles + 1) // 2, n)](
        X, out, X.shape[axis], X.shape[other], stride_xb, X.stride(axis), X.stride(other),
        stride_ob, out.stride(-2), out.stride(-1), alpha, beta, ADDEND=addend, **launch)
    return out


def XXT(X, out):
    """out = X Xᵀ; returns out."""
    _check_gram("XXT", X, out, axis=-2)
    if _takes_gram_ref(X):
        return XXT_ref(X, out)
    return _launch_gram(X, -2, out)


def XTX(X, out):
    """out = Xᵀ X; returns out."""
    _check_gram("XTX", X, out, axis=-1)
    if _takes_gram_ref(X):
        return XTX_ref(X, out)
    return _launch_gram(X, -1, out)


def ba_plus_cAA(A, alpha, beta, out):
    """out = alpha A Aᵀ + beta A for symmetric A, which is not verified; returns out."""
    _check_gram("ba_plus_cAA", A, out, axis=-1)
    if A.shape[-2] != A.shape[-1]:
        raise ValueError(f"ba_plus_cAA: A must be square, got shape {tuple(A.shape)}")
    if _takes_gram_ref(A):
        return ba_plus_cAA_ref(A, alpha, beta, out)
    return _launch_gram(A, -2, out, alpha, beta, addend=True)


# ======================================================================================================================
# 2  Nesterov momentum
#
#   X, sumsq = fused_momentum(grad, momentum, mu)
#       m     ← m + (1 − mu)(g − m)             in place
#       X     = round(g + mu (m − g))           in the dtype of grad
#       sumsq = Σ X² per matrix                 of the rounded X, fp32
#
#   grad (n, R, C) bf16 or fp32, momentum (n, R, C) fp32, both contiguous; X like grad; sumsq (n,).
#   Replaces momentum.lerp_(grad, 1 - mu); X = grad.lerp(momentum, mu); X.square().sum((-2, -1)) and their passes.
#   12 bytes per bf16 element: g and m are read, m and X written. The caller folds 1/‖X‖ into its first product.
#   Every program writes its own partial sum and one torch.sum adds them up: no atomics, so a run repeats bit for bit.
#
# Momentum and norm without a pass through memory between them: ChrisJMcCormick, PR 233.
# ======================================================================================================================

# 4096 divides 768² and 3072·768, so no program of the real banks is ragged. 8 warps leave 16 elements to a thread, all
# moved in 16-byte accesses. There is no loop to pipeline.
MOMENTUM_LAUNCH = dict(BLOCK=4096, num_warps=8)


def fused_momentum_ref(grad, momentum, mu):
    mu = torch.as_tensor(mu, dtype=torch.float32)
    g = grad.float()
    momentum.add_((1 - mu) * (g - momentum))
    X = (g + mu * (momentum - g)).to(grad.dtype)
    return X, X.float().square().sum((-2, -1))


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


def fused_momentum(grad, momentum, mu):
    """Updates `momentum` in place; returns (X, sumsq). `mu` is a float or a 0-D CPU tensor, whose value is read here."""
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
    if isinstance(mu, torch.Tensor) and (mu.ndim > 0 or mu.device.type != "cpu"):
        raise ValueError("fused_momentum: mu must be a float or a 0-D CPU tensor (reading one from the GPU would wait for"
                         f" it), got shape {tuple(mu.shape)} on {mu.device}")
    if grad.device.type == "cpu" and not INTERPRETED:
        return fused_momentum_ref(grad, momentum, mu)
    n, R, C = grad.shape
    blocks = _cdiv(R * C, MOMENTUM_LAUNCH["BLOCK"])
    X = torch.empty_like(grad)
    partial = torch.empty(n, blocks, dtype=torch.float32, device=grad.device)
    _momentum_kernel[(blocks, n)](grad, momentum, X, partial, float(mu), R * C, **MOMENTUM_LAUNCH)
    return X, partial.sum(1)


# ======================================================================================================================
# 3  Transposes
#
#   transpose_copy(src, dst)   dst = srcᵀ         2- or 4-byte dtype of Triton, bit exact   replaces dst.copy_(src.mT)
#   transpose_add(src, dst)    dst = dst + srcᵀ   bf16, fp16 or fp32, rounded once         replaces dst.add_(src.mT)
#
#   src (M, N), dst (N, M), any strides. Traffic: 2 passes for the copy, 3 for the add.
#   A generic elementwise copy walks one side with a stride. Here a tile is read along src, turned on chip and written
#   along dst. Idea and use on the tied head: ChrisJMcCormick, PR 233; larger tiles: samacqua, PR 240.
#   The grid has one program per tile and so occupies every SM: a collective that runs beside it will wait.
# ======================================================================================================================

# 64 two-byte elements are one 128-byte line on the reading and on the writing side. 4 warps leave 32 elements to a
# thread: four 16-byte loads in flight each, and several programs fit an SM to hide the turn.
TRANSPOSE_LAUNCH = dict(BLOCK=64, num_warps=4)


def transpose_copy_ref(src, dst):
    return dst.copy_(src.mT)


def transpose_add_ref(src, dst):
    return dst.add_(src.mT)


@triton.jit
def _transpose_kernel(Src, Dst, M, N, stride_sm, stride_sn, stride_dn, stride_dm, ADD: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(Src + m[:, None] * stride_sm + n[None, :] * stride_sn, mask=(m < M)[:, None] & (n < N)[None, :])
    turned = tl.trans(tile)
    dst_ptrs = Dst + n[:, None] * stride_dn + m[None, :] * stride_dm
    mask = (n < N)[:, None] & (m < M)[None, :]
    if ADD:
        turned = (tl.load(dst_ptrs, mask=mask).to(tl.float32) + turned.to(tl.float32)).to(Dst.dtype.element_ty)
    tl.store(dst_ptrs, turned, mask=mask)


def _check_transpose(name, src, dst):
    if src.ndim != 2 or dst.shape != src.shape[::-1]:
        raise ValueError(f"{name}: src must be (M, N) and dst (N, M), got {tuple(src.shape)} and {tuple(dst.shape)}")
    if src.dtype != dst.dtype or src.device != dst.device:
        raise ValueError(f"{name}: src is {src.dtype} on {src.device}, dst is {dst.dtype} on {dst.device}")
    if dst is src:
        raise ValueError(f"{name}: dst must not be src, which is read while dst is written")


def _launch_transpose(src, dst, add):
    M, N = src.shape
    grid = (_cdiv(N, TRANSPOSE_LAUNCH["BLOCK"]), _cdiv(M, TRANSPOSE_LAUNCH["BLOCK"]))
    _transpose_kernel[grid](src, dst, M, N, *src.stride(), *dst.stride(), ADD=add, **TRANSPOSE_LAUNCH)
    return dst


def transpose_copy(src, dst):
    """dst = srcᵀ; returns dst."""
    _check_transpose("transpose_copy", src, dst)
    if src.element_size() not in (2, 4):
        raise ValueError(f"transpose_copy: dtype must have 2 or 4 bytes per element, got {src.dtype}")
    if src.device.type == "cpu" and not INTERPRETED:
        return transpose_copy_ref(src, dst)
    return _launch_transpose(src, dst, add=False)


def transpose_add(src, dst):
    """dst += srcᵀ; returns dst."""
    _check_transpose("transpose_add", src, dst)
    if src.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"transpose_add: dtype must be bfloat16, float16 or float32, got {src.dtype}")
    if src.device.type == "cpu" and not INTERPRETED:
        return transpose_add_ref(src, dst)
    return _launch_transpose(src, dst, add=True)


# ======================================================================================================================
# 4  Attention: causal softmax attention over packed documents with a sliding window
#   out_t = softmax( scale · q_t · k_s ) v_s   over the s of t's document with t - window <= s <= t
#   q, k, v (N, H, d), cu_seqlens (K,) int32: document borders, cu[0] = 0, unused tail entries = N
#   window (int) and scale (float) arrive as 0-D CPU tensors, so that one compiled graph serves every stage
# ======================================================================================================================


def attention_ref(q, k, v, cu_seqlens, max_len, window, scale):
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
    return out.transpose(1, 2).reshape(N + pad, H, d)[:N]


# The FlashAttention-2 kernels that ship with PyTorch (Tri Dao, arXiv 2307.08691). Called through custom ops of our own
# because the public wrapper takes window and scale as Python numbers, each value of which would be one more graph.
@torch.library.custom_op("speedrun::varlen_attention", mutates_args=())
def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, window: Tensor,
                      scale: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, False, False,
        scale=float(scale), window_size_left=int(window), window_size_right=0)
    return out, lse


@_varlen_attention.register_fake
def _(q, k, v, cu_seqlens, max_len, window, scale):
    return torch.empty_like(q), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)


@torch.library.custom_op("speedrun::varlen_attention_backward", mutates_args=())
def _varlen_attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
                               max_len: int, window: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, False, no_dropout, no_dropout,
        scale=float(scale), window_size_left=int(window), window_size_right=0)


@_varlen_attention_backward.register_fake
def _(grad, q, k, v, out, lse, cu_seqlens, max_len, window, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _varlen_setup(ctx, inputs, output):
    q, k, v, cu_seqlens, ctx.max_len, window, scale = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, window, scale)


def _varlen_grad(ctx, grad_out, grad_lse):
    q, k, v, out, lse, cu_seqlens, window, scale = ctx.saved_tensors
    grads = _varlen_attention_backward(grad_out, q, k, v, out, lse, cu_seqlens, ctx.max_len, window, scale)
    return (*grads, None, None, None, None)


_varlen_attention.register_autograd(_varlen_grad, setup_context=_varlen_setup)


def varlen_attention(q, k, v, cu_seqlens, max_len, window, scale):
    """`attention_ref` through PyTorch's FlashAttention-2; bf16, CUDA; `max_len` >= the longest document."""
    return _varlen_attention(q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens, max_len, window, scale)[0]


# ======================================================================================================================
# 5  MLP: relu(x W1ᵀ)² W2,  x (N, D), W1 and W2 (F, D); the square acts on the rounded product
# ReLU² after So et al., arXiv 2109.08668
# ======================================================================================================================


def mlp_ref(x, W1, W2):
    """(N, D) -> (N, D), in the dtype of x."""
    return F.linear(x, W1).relu().square() @ W2


# ======================================================================================================================
# 6  Head and loss: softcapped multi-token cross-entropy of h (N, D) under the head weight W (D, V), V classes
#   ℓ = h W,  z = 23 σ((ℓ + 5) / 7.5)
#   Loss = κ Σ_t Σ_k w_k (lse_t - z[t, target[t + k]]),  k = 0..P-1, terms with t + k >= N dropped  (K1: borders ignored)
# FP8 head after Andrew Briand (PR 207); multi-token loss in one pass over the logits after Soren Dunn (PR 199).
# The gradient is formed in the forward pass, a block of rows at a time: the (N, V) logits never exist as a whole.
# ======================================================================================================================

CAP, CAP_SHIFT, CAP_SCALE = 23.0, 5.0, 7.5
E4M3_MAX = 448.0
X_SCALE, W_SCALE, GRAD_SCALE = 100 / E4M3_MAX, 1.6 / E4M3_MAX, 0.75 / E4M3_MAX  # real value = code · scale (GRAD_SCALE · κ)


def softcap(logits):
    """Logits of any shape, bounded to (0, 23), in fp32."""
    return CAP * torch.sigmoid((logits.float() + CAP_SHIFT) / CAP_SCALE)


def multi_token_targets(targets, count):
    """(N,) next-token ids -> (N, count): column k is the target k positions further on, -1 beyond the end."""
    return torch.stack([F.pad(targets[k:], (0, k), value=-1) for k in range(count)], 1)


def quantise(x, scale):
    """Codes of x / scale in e4m3: fp32 division, saturated, one rounding."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def head_loss_ref(h, W, targets, weights, kappa):
    """Loss as written above, fp32 after the GEMM; differentiable by autograd; materialises the logits."""
    z = softcap(h @ W)
    many = multi_token_targets(targets, weights.numel())
    w = weights * (many >= 0)
    return kappa * (w * (z.logsumexp(1, keepdim=True) - z.gather(1, many.clamp(min=0)))).sum()


def cross_entropy_rows(logits, targets, weights, kappa, code_scale, grad_dtype):
    """Summed loss of some rows and its gradient: logits (n, V), targets (n, P), -1 = none, weights (P,).

    Returns (loss 0-D fp32, gradient w.r.t. the logits / code_scale as grad_dtype, or None without a grad_dtype).
    """
    u = torch.sigmoid((logits.float() + CAP_SHIFT) / CAP_SCALE)
    z = CAP * u
    lse = z.logsumexp(1, keepdim=True)
    w = weights * (targets >= 0)  # (n, P)
    z_target = softcap(logits.gather(1, targets.clamp(min=0)))
    loss = kappa * (w * (lse - z_target)).sum()
    if grad_dtype is None:
        return loss, None
    grad = w.sum(1, keepdim=True) * torch.exp(z - lse)
    classes = torch.arange(logits.size(1), device=logits.device)
    for k in range(targets.size(1)):
        grad = grad - torch.where(classes == targets[:, k:k + 1], w[:, k:k + 1], 0.0)
    return loss, (grad * (u * (1 - u)) * (kappa * CAP / CAP_SCALE / code_scale)).to(grad_dtype)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, head, targets, weights, kappa):
        with_grad = h.requires_grad or weight.requires_grad
        loss, grad_h, grad_weight = head.loss_and_grads(h, targets, weights, kappa, with_grad)
        ctx.save_for_backward(grad_h, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_h, grad_weight = ctx.saved_tensors
        return grad * grad_h, grad * grad_weight, None, None, None, None


class HeadLoss:
    """loss = head(h, targets, weights, kappa): the training loss, h (N, D), targets (N,) int64, weights (P,) fp32.

    `weight` (D, V) is the parameter that gets the gradient. Call `refresh` whenever it has changed: the FP8 codes are
    made once per update, not once per micro-step. `exact=True` takes the unquantised weight (validation).
    """

    def __init__(self, weight, dtype, fp8, compiler=lambda f: f):
        self.weight, self.dtype, self.fp8 = weight, dtype, fp8
        self.rows_loss, self.quantise = compiler(cross_entropy_rows), compiler(quantise)
        # Rows per block: a power of two, so that it divides every batch; the fp32 temporaries stay around 2 GB.
        self.block = 1 << int(math.log2(2**29 / weight.size(1)))
        if fp8:
            self.scale_x, self.scale_w = (torch.tensor(s, device=weight.device) for s in (X_SCALE, W_SCALE))
            self.scale_g = {}  # κ -> 0-D tensor
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        if self.fp8:
            self.codes = self.quantise(self.weight.detach(), W_SCALE)
            self.codes_t = self.codes.t().contiguous()  # the GEMM wants both layouts

    def __call__(self, h, targets, weights, kappa, exact=False):
        if exact:
            with torch.no_grad():
                return self.loss_and_grads(h, targets, weights, kappa, with_grad=False, fp8=False)[0]
        return _HeadLoss.apply(h, self.weight, self, targets, weights, kappa)

    def loss_and_grads(self, h, targets, weights, kappa, with_grad, fp8=None):
        """Loss (0-D fp32), gradient of h (N, D) in its dtype, gradient of the weight (D, V) in its dtype (or None, None)."""
        fp8 = self.fp8 if fp8 is None else fp8
        code_scale = GRAD_SCALE * kappa if fp8 else 1.0
        grad_dtype = None if not with_grad else torch.float8_e5m2 if fp8 else self.dtype
        weight = self.weight.detach().to(self.dtype)
        many = multi_token_targets(targets, weights.numel())
        loss = torch.zeros((), device=h.device)
        grad_h = torch.empty_like(h) if with_grad else None
        grad_w = torch.zeros(weight.shape, device=h.device) if with_grad else None
        if fp8:
            x = self.quantise(h.detach(), X_SCALE)
            if kappa not in self.scale_g:
                self.scale_g[kappa] = torch.tensor(code_scale, device=h.device)
            scale_g = self.scale_g[kappa]
        for start in range(0, h.size(0), self.block):
            rows = slice(start, start + self.block)
            if fp8:
                logits = torch._scaled_mm(x[rows], self.codes_t.t(), self.scale_x, self.scale_w, out_dtype=self.dtype,
                                          use_fast_accum=True)
            else:
                logits = h[rows] @ weight
            part, grad = self.rows_loss(logits, many[rows], weights, kappa, code_scale, grad_dtype)
            loss += part
            if not with_grad:
                continue
            if fp8:
                grad_h[rows] = torch._scaled_mm(grad, self.codes.t(), scale_g, self.scale_w, out_dtype=self.dtype)
                grad_w += torch._scaled_mm(x[rows].t().contiguous(), grad.t().contiguous().t(), self.scale_x, scale_g,
                                           out_dtype=torch.float32)
            else:
                grad_h[rows] = grad @ weight.t()
                grad_w += h[rows].t() @ grad
        return loss, grad_h, None if grad_w is None else grad_w.to(self.weight.dtype)


# ======================================================================================================================
# 7  Embedding tables: rows out, gradients straight into the gradient buffer
#
#   lookup(table, planes, groups, embedding_grad)   table (P·R, D) leaf parameter, P = planes -> (P, N, D): row ids[t] of each
#   embedding_grad(grad, groups, upstream)          grad[p, ids[t]] += Σ_t upstream[p, t]   in place, fp32 sums, rounded once
#
#   grad (P, R, D) contiguous, bf16 or fp32; groups of ids (N,) int32; upstream (P, N, D), unit stride along D.
#   Replaces aten.embedding_dense_backward, whose atomics want a fp32 table: zeroed, cast to bf16, added to the gradient, four
#   passes over all rows of which a batch touches a few percent. Here the ids are sorted and one program sums all occurrences
#   of a row: rows that do not occur cost nothing, and a run repeats bit for bit.
#   H200, N = 49152, R = 50304: P = 5 281 us, P = 1 63 us (the old way: 1.6 ms, 0.7 ms).
# ======================================================================================================================

# Most ids occur once or twice, a few (comma, "the") thousands of times. So that nobody adds up thousands of rows alone, the
# sorted positions are first summed in pieces that end at multiples of PIECE, then the pieces of every id. One kernel does both.
PIECE = 64
# Four warps read a row of 768 in 16-byte accesses. 2 rows at a time: with more, rare ids idle. Loads are pipelined 3 deep.
EMBEDDING_LAUNCH = dict(BLOCK=2, STAGES=3, num_warps=4)
EMBEDDING_PROGRAMS_PER_SM = 16  # what an SM holds at 4 warps each


class Groups:
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


def embedding_grad_ref(grad, groups, upstream):
    for table, dy in zip(grad, upstream):
        wide = torch.promote_types(dy.dtype, torch.float32)
        table += torch.ops.aten.embedding_dense_backward(dy.to(wide), groups.ids, table.size(0), -1, False)


@triton.jit
def _sum_rows_kernel(Dst, Src, Order, Starts, Ids, N, D, planes, stride_dp, stride_sp, stride_sn,
                     FINAL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    # Sum s is over the rows Starts[s] .. Starts[s + 1] - 1 of Src. First launch: rows as listed in Order, into row s of Dst.
    # Final launch: consecutive rows, added to row Ids[Starts[s]] of Dst. Entries from the first id of -1 on are fill.
    column = tl.arange(0, COLUMNS)
    work = tl.program_id(0)  # sum work // planes in plane work % planes
    s = tl.minimum(work // planes, N)
    begin = tl.load(Starts + s)
    id = tl.load(Ids + (begin if FINAL else s)).to(tl.int64)
    while id >= 0:
        end = tl.load(Starts + s + 1)
        plane = (work % planes).to(tl.int64)
        total = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
        for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
            place = start + tl.arange(0, BLOCK)
            row = place if FINAL else tl.load(Order + place, mask=place < end, other=0)
            total += tl.load(Src + plane * stride_sp + row.to(tl.int64)[:, None] * stride_sn + column[None, :],
                             mask=(place < end)[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
        result = tl.sum(total, axis=0)
        target = Dst + plane * stride_dp + (id if FINAL else s.to(tl.int64)) * D + column
        if FINAL:
            result += tl.load(target, mask=column < D, other=0.0).to(tl.float32)
        tl.store(target, result.to(Dst.dtype.element_ty), mask=column < D)
        work += tl.num_programs(0)
        s = tl.minimum(work // planes, N)
        begin = tl.load(Starts + s)
        id = tl.load(Ids + (begin if FINAL else s)).to(tl.int64)


def embedding_grad(grad, groups, upstream):
    """Adds to `grad` in place."""
    P, R, D = grad.shape
    N = groups.ids.numel()
    if upstream.shape != (P, N, D) or upstream.stride(2) != 1 or not grad.is_contiguous():
        raise ValueError(f"embedding_grad: for grad {tuple(grad.shape)}, contiguous, and {N} ids upstream must be {(P, N, D)} with unit"
                         f" stride in the last axis, got {tuple(upstream.shape)} with strides {upstream.stride()}")
    if grad.device.type == "cpu" and not INTERPRETED:
        return embedding_grad_ref(grad, groups, upstream)
    order, piece_starts, group_starts, piece_ids = groups.pieces
    sums = torch.empty(P, N, D, dtype=torch.float32, device=grad.device)  # one row per piece is used
    sms = torch.cuda.get_device_properties(grad.device).multi_processor_count if grad.is_cuda else 1
    for final, dst, src, starts in (False, sums, upstream, piece_starts), (True, grad, sums, group_starts):
        _sum_rows_kernel[(sms * EMBEDDING_PROGRAMS_PER_SM,)](
            dst, src, order, starts, piece_ids, N, D, P, dst.stride(0), src.stride(0), src.stride(1),
            FINAL=final, COLUMNS=triton.next_power_of_2(D), **EMBEDDING_LAUNCH)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, planes, groups, add):
        ctx.table, ctx.planes, ctx.groups, ctx.add = table, planes, groups, add
        return table.view(planes, -1, table.size(1)).index_select(1, groups.ids)

    @staticmethod
    def backward(ctx, upstream):
        if ctx.table.grad is None:
            ctx.table.grad = torch.zeros_like(ctx.table)
        ctx.add(ctx.table.grad.view(ctx.planes, -1, ctx.table.size(1)), ctx.groups, upstream.contiguous())
        return None, None, None, None


def lookup(table, planes, groups, embedding_grad):
    """See above. `table` is a leaf: backward adds to `table.grad` and passes nothing on."""
    return _Lookup.apply(table, planes, groups, embedding_grad)


# ======================================================================================================================
# 8  The choice of implementation, made once at start
# ======================================================================================================================

IMPLEMENTATIONS = {
    "XXT": {"triton": XXT, "torch": XXT_ref},
    "XTX": {"triton": XTX, "torch": XTX_ref},
    "ba_plus_cAA": {"triton": ba_plus_cAA, "torch": ba_plus_cAA_ref},
    "fused_momentum": {"triton": fused_momentum, "torch": fused_momentum_ref},
    "transpose_copy": {"triton": transpose_copy, "torch": transpose_copy_ref},
    "transpose_add": {"triton": transpose_add, "torch": transpose_add_ref},
    "attention": {"varlen": varlen_attention, "torch": attention_ref},
    "mlp": {"torch": mlp_ref},
    "embedding_grad": {"triton": embedding_grad, "torch": embedding_grad_ref},
}


def choose_ops(device, wanted="auto"):
    """One implementation per operation -> (namespace of callables, {operation: name of the choice}).

    wanted: "auto" (the first listed on CUDA, torch elsewhere), "torch" (references only), or "op:name,op:name" for some.
    """
    names = {op: next(iter(table)) if device.type == "cuda" and wanted != "torch" else "torch"
             for op, table in IMPLEMENTATIONS.items()}
    if wanted not in ("auto", "torch"):
        for item in wanted.split(","):
            op, _, name = item.partition(":")
            if name not in IMPLEMENTATIONS.get(op, {}):
                known = ", ".join(f"{o}:{'|'.join(t)}" for o, t in IMPLEMENTATIONS.items())
                raise ValueError(f"kernels: '{item}' is not one of {known}")
            if name != "torch" and device.type == "cpu" and not INTERPRETED:
                raise ValueError(f"kernels: '{item}' needs a GPU")
            names[op] = name
    return SimpleNamespace(**{op: IMPLEMENTATIONS[op][name] for op, name in names.items()}), names
