"""Gradients of the embedding tables, which go straight into the gradient buffer, and updates of some rows."""

import pytest
import torch

import triton_kernels as tk
from data.loader import PIECE, sorted_pieces
from oracles import framed, gpu, only_gpu, rows_step

REF, NO_REFERENCE = tk.embedding_grad_ref, ["embedding_grad_ref"]


def sorted_ids(ids):
    return tk.SortedIds(ids, torch.from_numpy(sorted_pieces(ids.cpu().numpy())).to(ids.device))


def setting(rows, width, n, dtype, device):
    ids = torch.randint(0, rows, (n,), dtype=torch.int32, device=device)
    ids[:n // 3] = rows // 2  # a frequent id
    grad, upstream = (torch.randn(k, width, device=device).to(dtype) for k in (rows, n))
    return ids, grad, upstream


@pytest.mark.parametrize("rows, width, n", [
    (10, 24, 7), (50, 300, 200), (5, 256, 300), (1000, 64, 1), (1, 16, 33), (3, 8, 64)])
def test_embedding_grad(rows, width, n, device):
    ids, grad, upstream = setting(rows, width, n, torch.float32, device)
    wanted = grad.double().index_add_(0, ids, upstream.double())
    untouched = torch.ones(rows, dtype=torch.bool, device=device)
    untouched[ids.long()] = False
    for implementation in (REF, tk.embedding_grad):
        got = grad.clone()
        implementation(got, sorted_ids(ids), upstream)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[untouched], grad[untouched])
    framed_rows = framed(upstream, (0, 0), (width, width))[1]  # strided
    for _ in range(2):
        again = grad.clone()
        tk.embedding_grad(again, sorted_ids(ids), framed_rows)
        assert torch.equal(again, got)


def test_ids_of_every_length(device, poisoned_empty):
    """Ids of one and of several pieces, the last of which are full or not; the longest has several blocks of pieces."""
    counts = [*range(1, 3 * PIECE + 2), 4, 5 * PIECE, 40 * PIECE + 3]
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids))].to(device, torch.int32)
    grad, upstream = (torch.randn(k, 200, device=device) for k in (len(counts) + 1, len(ids)))
    wanted = grad.double().index_add_(0, ids, upstream.double())
    tk.embedding_grad(grad, sorted_ids(ids), upstream)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-5)


@gpu
def test_production_shape(device):
    """bf16 is rounded once: the error is half an ulp of the exact sum. bf16 atomics would err by many ulps."""
    ids, grad, upstream = setting(50304, 768, 49152, torch.bfloat16, device)
    wanted = grad.double().index_add_(0, ids, upstream.double())
    got = grad.clone()
    tk.embedding_grad(got, sorted_ids(ids), upstream)
    # 1e-4 allows for fp32 sums of up to 16384 terms that may cancel.
    assert ((got.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-4).all()


@pytest.mark.parametrize("rows, width", [(1, 8), (7, 24), (50, 300), only_gpu(50304, 768)])
@pytest.mark.parametrize("update", [tk.update_rows, tk.update_rows_ref])
def test_update_rows(rows, width, update, device):
    """Seven updates, in each of which some rows have a gradient, against Adam with beta1 = 0 of all rows in fp64. In
    rows without gradient nothing is written. Every second update gets its numbers as tensors."""
    p = torch.randn(rows, width, device=device)
    v, last = torch.zeros_like(p), torch.zeros(rows, 1, dtype=torch.int32, device=device)
    exact, exact_v = p.double(), v.double()
    beta2, eps = 0.9, 1e-3
    for t in range(1, 8):
        grad = torch.randn_like(p)
        grad[torch.rand(rows, device=device) < 0.6] = 0
        grad[:, 0] = 0  # a weight without gradient in a row with gradient
        touched = (grad != 0).any(1) | (torch.rand(rows, device=device) < 0.3)  # also rows without gradient
        step_size, decay = 0.1 / t, 0.05
        before = [x.clone() for x in (p, v, last)]
        g = grad.double()
        given = [torch.tensor(float(x), device=device) if t % 2 else x for x in (t, step_size, decay)]
        update(p, v, last, touched, grad, *given, beta2, eps)
        assert not grad.any() and not touched.any()
        exact, exact_v = rows_step(exact, exact_v, g, step_size, decay, beta2, eps)
        torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=1e-6)
        idle = (g == 0).all(1)
        assert all(torch.equal(new[idle], old[idle]) for new, old in zip((p, v, last), before))
        assert (last[~idle] == t).all()
    torch.testing.assert_close(v.double() * beta2 ** (7 - last.double()), exact_v, rtol=1e-5, atol=1e-7)
