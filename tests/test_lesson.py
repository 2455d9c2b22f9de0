"""The four versions of lesson.py compute the same product."""

import pytest
import torch

import lesson
import triton_kernels as tk


@pytest.mark.parametrize("n, M, K", [(2, 70, 48), (1, 32, 8), (3, 100, 130)])
@pytest.mark.parametrize("version", lesson.VERSIONS)
def test_versions(version, n, M, K, device, poisoned_empty):
    if version in ("engine", "triangle") and not tk._has_tma(device):
        pytest.skip("needs the copy engine")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    X = torch.randn(n, M, K + -K % 8, device=device).to(dtype)
    out = lesson.launch(version, X, X.new_empty(n, M, M))
    exact = X.double() @ X.double().mT
    torch.testing.assert_close(out.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    if version == "triangle":  # a tile on the diagonal is a product, whose halves some processors round differently
        torch.testing.assert_close(out, out.mT, rtol=0, atol=0 if device.type == "cuda" else 1e-4)
