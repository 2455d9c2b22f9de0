"""Every case of the benchmark runs, so its calls fit the current signatures of the kernels."""

import pytest

import bench_kernels as bench


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
