"""Every case of the benchmark runs, so its calls fit the current signatures of the kernels. The four versions of
lesson.py compute the same product."""

import pytest
import torch

import bench_kernels as bench
import lesson
import triton_kernels as tk


@pytest.mark.filterwarnings("ignore:.*encountered in")  # Triton's interpreter computes beyond the edges of tiles
@pytest.mark.parametrize("family", bench.FAMILIES)
def test_cases_run(family, device, monkeypatch):
    config = bench.T.parse_config(["--preset=cpu", "--ngram_rows=600"])
    small = dict(CONFIG=config, D=64, H=2, HEAD=32, V=128, MLP_DIM=128, TOKENS=[16, 32, 48], BANK=(8, 16))
    for name, value in dict(small, DEVICE=device.type, PEERS=False).items():
        monkeypatch.setattr(bench, name, value)
    shapes = set()
    for case in bench.FAMILIES[family]():
        case.run()
        assert sum(case.work) > 0 and (case.kernel, case.shape) not in shapes
        shapes.add((case.kernel, case.shape))
    assert shapes


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
