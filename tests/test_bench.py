"""The benchmark's cases run: every kernel with the arguments that it has now."""

import pytest

import bench_kernels as bench


@pytest.mark.filterwarnings("ignore:.*encountered in")  # of numbers beyond a tile's edge, in Triton's interpreter
@pytest.mark.parametrize("family", bench.FAMILIES)
def test_cases_run(family, device, monkeypatch):
    for name, value in dict(DEVICE=device.type, PEERS=False, D=96, H=6, HEAD=16, V=384, TOKENS=[32, 64, 96], BANK=(8, 16)).items():
        monkeypatch.setattr(bench, name, value)
    shapes = set()
    for case in bench.FAMILIES[family]():
        case.run()
        assert case.bytes > 0 and (case.kernel, case.shape) not in shapes
        shapes.add((case.kernel, case.shape))
    assert shapes
