"""A lesson: one kernel in four versions, from the definition to the kernel that the trainer uses.

    python tests/lesson.py    the time of each version on this GPU, beside the library's product

The task is X Xᵀ for a batch of matrices X (n, M, K), as in the Muon iteration: out[i, j] = Σ_k X[i, k] X[j, k]. Read
the versions in order; each changes one thing. Times are those of 40 matrices of 768 x 768 in bf16 on an H100
(records/2026-11-25_kernels).

  1  rows, 5240 µs      One program per row of the result. It reads a row of X, multiplies all rows of X by it and adds
                        up. Every program reads the whole matrix, and no tensor core works.
  2  tiles, 81 µs       One program per BLOCK x BLOCK tile. A tile of BLOCK_K columns of the left and of the right rows
                        serves BLOCK products at once, so each number is read M / BLOCK times, not M times, and `tl.dot`
                        runs on the tensor cores. Each of 256 threads computes addresses and masks for every load.
  3  engine, 71 µs      The same tiles through the copy engine (TMA, from Hopper on): one instruction loads a tile, and
                        the engine computes addresses and fills in zeros beyond the edges.
  4  triangle, 59 µs    X Xᵀ is symmetric. Only the tiles on and below the diagonal are computed; a tile below it is
                        stored twice, the second time transposed: 21 of 36 products, but all of the stores.

The library takes 60 µs. `_gram_kernel` of triton_kernels.py is version 4 with an addend and a scale; the library needs
another pass over the matrices for each of them.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import triton_kernels as tk
from triton_kernels import tl, triton


@triton.jit
def _rows_kernel(X, Out, M, K, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    i, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    j = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        row = tl.load(X + batch * M * K + i * K + k, mask=k < K, other=0.0).to(tl.float32)
        rows = tl.load(X + batch * M * K + j[:, None] * K + k[None, :], mask=(j < M)[:, None] & (k < K)[None, :],
                       other=0.0)
        sums += tl.sum(rows.to(tl.float32) * row[None, :], axis=1)
    tl.store(Out + batch * M * M + i * M + j, sums.to(Out.dtype.element_ty), mask=j < M)


@triton.jit
def _tiles_kernel(X, Out, M, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    X += batch * M * K
    i, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(X + i[:, None] * K + k[None, :], mask=(i < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(X + j[None, :] * K + k[:, None], mask=(j < M)[None, :] & (k < K)[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    tl.store(Out + batch * M * M + i[:, None] * M + j[None, :], sums.to(Out.dtype.element_ty),
             mask=(i < M)[:, None] & (j < M)[None, :])


@triton.jit
def _engine_kernel(Tiles, Out, M, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    row, col, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = Tiles.load([batch, row * BLOCK, k]).reshape(BLOCK, BLOCK_K)
        right = Tiles.load([batch, col * BLOCK, k]).reshape(BLOCK, BLOCK_K)
        sums = tl.dot(left, right.T, sums, input_precision="ieee")
    i, j = row * BLOCK + tl.arange(0, BLOCK), col * BLOCK + tl.arange(0, BLOCK)
    tl.store(Out + batch.to(tl.int64) * M * M + i[:, None] * M + j[None, :], sums.to(Out.dtype.element_ty),
             mask=(i < M)[:, None] & (j < M)[None, :])


@triton.jit
def _triangle_kernel(Tiles, Out, M, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    t, batch = tl.program_id(0), tl.program_id(1)  # t counts the tiles 0 | 1 2 | 3 4 5 | ...
    row = ((tl.sqrt((8 * t + 4).to(tl.float32)) - 1) / 2).to(tl.int32)
    col = t - row * (row + 1) // 2
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = Tiles.load([batch, row * BLOCK, k]).reshape(BLOCK, BLOCK_K)
        right = Tiles.load([batch, col * BLOCK, k]).reshape(BLOCK, BLOCK_K)
        sums = tl.dot(left, right.T, sums, input_precision="ieee")
    tile = sums.to(Out.dtype.element_ty)
    Out += batch.to(tl.int64) * M * M
    i, j = row * BLOCK + tl.arange(0, BLOCK), col * BLOCK + tl.arange(0, BLOCK)
    tl.store(Out + i[:, None] * M + j[None, :], tile, mask=(i < M)[:, None] & (j < M)[None, :])
    if row != col:
        tl.store(Out + j[:, None] * M + i[None, :], tl.trans(tile), mask=(j < M)[:, None] & (i < M)[None, :])


# Launch parameters of the versions 2 to 4, those of GRAM_LAUNCH for many matrices.
TILES = dict(BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=3)
SMALL = dict(BLOCK=32, BLOCK_K=32, num_warps=4, num_stages=2)  # for fp32, which has no tensor cores


def launch(version, X, out):
    """out (n, M, M) = X Xᵀ by version "rows", "tiles", "engine" or "triangle"; X (n, M, K) contiguous, bf16 or fp32."""
    (n, M, K), tiles = X.shape, TILES if X.dtype == torch.bfloat16 else SMALL
    blocks = triton.cdiv(M, tiles["BLOCK"])
    if version == "rows":
        _rows_kernel[(M, n)](X, out, M, K, ROWS=triton.next_power_of_2(M), BLOCK_K=16, num_warps=8)
    elif version == "tiles":
        _tiles_kernel[(blocks, blocks, n)](X, out, M, K, **tiles)
    else:
        descriptor = tk.TensorDescriptor.from_tensor(X, [1, tiles["BLOCK"], tiles["BLOCK_K"]])
        grid, kernel = ((blocks, blocks, n), _engine_kernel) if version == "engine" else (
            (blocks * (blocks + 1) // 2, n), _triangle_kernel)
        kernel[grid](descriptor, out, M, K, **tiles)
    return out


VERSIONS = "rows", "tiles", "engine", "triangle"


def main():
    from bench_kernels import Timer  # here, because this import takes seconds

    if not torch.cuda.is_available():
        sys.exit("error: lesson.py needs a GPU")
    if not tk._has_tma(torch.device("cuda")):
        sys.exit("error: the versions 3 and 4 need the copy engine of Hopper or a newer GPU")
    X = torch.randn(40, 768, 768, device="cuda").bfloat16()
    out = torch.empty_like(X)
    runs = {version: lambda version=version: launch(version, X, out) for version in VERSIONS}
    runs |= {"trainer": lambda: tk.XXT(X, out), "library": lambda: torch.bmm(X, X.mT, out=out)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; 40 x 768 x 768")
    for name, (low, median, high) in zip(runs, Timer(25)(*runs.values())):
        print(f"{name:9} {median:8.1f} µs  (quartiles {low:.1f} and {high:.1f})")


if __name__ == "__main__":
    main()
