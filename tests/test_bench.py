"""Every case of the benchmark runs, so its calls fit the current signatures of the kernels; slower ones are named."""

import pytest

import bench_kernels as bench


@pytest.mark.filterwarnings("ignore:.*encountered in")  # Triton's interpreter computes beyond the edges of tiles
@pytest.mark.parametrize("family", bench.FAMILIES)
def test_cases_run(family, device, monkeypatch):
    config = bench.T.parse_config(["--preset=cpu", "--ngram_rows=600"])
    small = dict(CONFIG=config, D=64, H=2, HEAD=32, V=128, MLP_DIM=128, TOKENS=[16, 32, 48],
                 BANK=(8, 16))
    for name, value in dict(small, DEVICE=device.type, PEERS=False).items():
        monkeypatch.setattr(bench, name, value)
    shapes = set()
    for case in bench.FAMILIES[family]():
        case.run()
        assert case.bytes + case.bf16 > 0 and (case.kernel, case.shape) not in shapes
        shapes.add((case.kernel, case.shape))
    assert shapes


def table(gpu="NVIDIA H200", **kernels):
    rows = [dict(kernel=name, shape="16", us=us, quartiles=[us - spread, us, us + spread])
            for name, (us, spread) in kernels.items()]
    return dict(machine=dict(gpu=gpu), rows=rows)


def test_slower_kernels_are_named():
    """More than 5 %, and more than the spread of the measurement; kernels without an old time do not count."""
    old = table(same=(100, 1), slow=(100, 1), noisy=(100, 1), fast=(100, 1), gone=(1, 0))
    new = table(same=(104.9, 1), slow=(107, 1), noisy=(107, 4), fast=(50, 1), new=(1, 0))
    assert bench.slower(new, old) == ["slow, 16: 107.0 µs, was 100.0"]
    for other, message in (table("NVIDIA H100", slow=(1, 0)), "of NVIDIA H100, this GPU is NVIDIA H200"), (
            table(gone=(1, 0)), "no kernel is in both"):
        with pytest.raises(ValueError, match=message):
            bench.slower(new, other)


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"a": 1}', '{"machine": {"gpu": "x"}, "rows": []}'])
def test_table_that_cannot_be_read(monkeypatch, capsys, tmp_path, text):
    if text is not None:
        (tmp_path / "old.json").write_text(text)
    monkeypatch.setattr("sys.argv", ["bench_kernels.py", f"--against={tmp_path}/old.json"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "old.json: not a table that --json wrote" in capsys.readouterr().err
