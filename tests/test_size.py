"""The width that --minutes chooses, and what it is told about the GPU."""

import functools
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import train_gpt as T
from data.run import machine
from data.run.arguments import leaves_size_open
from data.run.machine import Runtime
from data.run.size import WIDTHS, Gpu, expected_loss, forecast, rank_sizes, seconds_per_token
from data.run.start import fit_size
from oracles import ON_GPU
from test_check import check, folder, gpus  # noqa: F401 (fixtures)

H100 = Gpu(1490e12, 3010e9, 0.85e-6)
GPUS = {"H100": H100, "A100": Gpu(250e12, 1815e9, 1e-6), "RTX 4090": Gpu(264e12, 897e9, 1e-6)}
RECORD = Path(__file__).resolve().parents[1] / "records/2026-11-25_size"


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("world", [1, 8])
def test_longer_runs_take_wider_models(name, world):
    times = np.geomspace(1, 1e6, 200)
    chosen = [rank_sizes(seconds, GPUS[name], world) for seconds in times]
    widths = [ranked[0].width for ranked in chosen]
    assert widths == sorted(widths) and {*widths} == {*WIDTHS}
    for ranked in chosen:
        assert sorted(it.width for it in ranked) == sorted(WIDTHS)
        assert [it.loss for it in ranked] == sorted(it.loss for it in ranked)
    tokens = [forecast(512, seconds, GPUS[name], world).tokens for seconds in times]
    assert tokens == sorted(tokens)


def test_slower_gpus_take_narrower_models():
    for seconds in np.geomspace(1, 1e6, 200):
        slow = Gpu(H100.products / 5, H100.copies / 5, H100.launch)
        assert rank_sizes(seconds, slow)[0].width <= rank_sizes(seconds, H100)[0].width
        assert forecast(512, seconds, slow, 1).tokens < forecast(512, seconds, H100, 1).tokens
        assert forecast(512, seconds, H100, 2).tokens > 1.8 * forecast(512, seconds, H100, 1).tokens


def test_fits_follow_the_measured_runs(tmp_path, monkeypatch, capsys):
    """The constants are those that the record's script prints, rounded, and the runs lie where the text says."""
    lines = [line.split() for line in (RECORD / "points.txt").read_text().splitlines() if line[0] != "#"]
    offsets = {}
    for width, tokens, loss, seconds, rows, group in lines:
        width, tokens = int(width), 1e6 * float(tokens)
        offsets.setdefault(group, []).append(float(loss) - expected_loss(width, tokens))
        if seconds != "-":
            assert seconds_per_token(width, int(rows), H100) == pytest.approx(float(seconds) / tokens, rel=0.06)
    residuals = np.concatenate([np.array(found) - np.mean(found) for found in offsets.values()])
    assert np.square(residuals).mean() ** 0.5 < 0.0065 and abs(residuals).max() < 0.02
    shutil.copy(RECORD / "points.txt", tmp_path)
    shutil.copy(RECORD / "fit.py.txt", tmp_path / "fit.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fit.py"])
    runpy.run_path("fit.py")
    text = capsys.readouterr().out
    a, b, A, B = map(float, re.match(r"a (\S+) b (\S+) A (\S+) B (\S+) ", text).groups())
    for w, t in ((256, 10), (512, 155), (768, 1000)):
        assert A * (768 / w) ** a + B * (40 / t) ** b == pytest.approx(expected_loss(w, 1e6 * t), abs=1e-3)
    passes, rest = map(float, re.search(r"bytes per token: (\d+) \* width \+ (\d+);", text).groups())
    assert (passes, rest) == pytest.approx((2270, 320e3), rel=0.01)


@pytest.mark.parametrize("args, open", [
    ("--preset=short --minutes=1", True), ("--preset=single --minutes 1 --seed=2 --layer3.xsa=false", True),
    ("--preset=short", False), ("--preset=short --train_tokens=1e8", False), ("--minutes=1", False),
    ("--preset=record --minutes=1", False), ("--preset=cpu --minutes=1", False),
    ("--preset=short --minutes=1 --model_dim=768", False), ("--preset=short --minutes=1 --num_heads=8", False),
    ("--preset=short --minutes=1 --depth=8", False), ("--preset=short --minutes=1 --device=cpu", False),
    ("--preset=short --minutes=1 --resume=x.pt", False)])
def test_when_the_width_is_chosen(args, open):
    assert leaves_size_open(args.split(), T.SIZED) == open


@pytest.mark.parametrize("preset, width, heads", [("short", 512, 4), ("record74", 256, 2), ("single", 640, 5),
                                                  ("cpu", 64, 4), ("record", 768, 6)])
def test_a_width_alone_keeps_the_width_of_a_head(preset, width, heads):
    model = T.parse_config([f"--preset={preset}", f"--model_dim={width}"]).model
    assert (model.model_dim, model.num_heads, model.head_dim) == (width, heads, T.PRESETS[preset].model.head_dim)
    both = T.parse_config([f"--preset={preset}", f"--model_dim={width}", f"--num_heads={2 * heads}"]).model
    assert both.num_heads == 2 * heads
    with pytest.raises(T.UserError, match="--model_dim=100 --num_heads="):
        T.parse_config([f"--preset={preset}", "--model_dim=100"])


def parse(*more, words=("--preset=short", "--minutes=60"), world=1, gpu=None):
    return T.parse_config([*words, *more], world, gpu)


@pytest.mark.parametrize("free, world, chosen", [(80000, 1, 768), (9000, 1, 512), (1000, 1, 256), (1000, 2, 768)])
def test_the_best_width_that_fits(monkeypatch, free, world, chosen):
    """At 60 minutes of an H100 the order is 768, 512, 256. No width fits 1000 MiB: the narrowest is the best try."""
    assert [it.width for it in rank_sizes(3600, H100)] == [768, 512, 256]

    def report(config, sizes, device, world):
        return "", {768: 10000, 512: 7000, 256: 4000}[config.model.model_dim] <= free

    for name in "memory.memory_report", "start.memory_report":
        monkeypatch.setattr(f"data.run.{name}", report)
    parse_ = functools.partial(parse, world=world)
    config, line = fit_size(parse_, T.param_table, world, H100, torch.device("cpu"))
    assert config == parse_(f"--model_dim={chosen}", gpu=H100) and config.schedule.minutes == 60
    assert line.startswith(f"size: width {chosen} for 60 min, about ") and "extrapolated" in line
    assert ("does not fit the memory" in line) == (world == 1 and chosen < 768)
    assert line.count("width") == 3 and "1490 TFLOP/s, 3010 GB/s, 0.85 us per launch" in line


def test_short_times_are_not_extrapolated():
    words = "--preset=short", "--minutes=0.5"
    line = fit_size(functools.partial(parse, words=words), T.param_table, 1, H100, torch.device("cpu"))[1]
    assert "extrapolated" not in line


@pytest.mark.parametrize("world", [1, 4])
def test_batches_suit_the_tokens_of_this_gpu(world):
    """With a measured GPU, --minutes has the batches of the --train_tokens that the time is enough for."""
    slow = Gpu(H100.products / 9, H100.copies / 9, H100.launch)
    for gpu, width in ((H100, 256), (H100, 768), (slow, 512)):
        words = "--preset=short", f"--model_dim={width}"
        tokens = forecast(width, 120, gpu, world).tokens
        wanted = T.parse_config([*words, f"--train_tokens={tokens}"], world).schedule
        found = T.parse_config([*words, "--minutes=2"], world, gpu).schedule
        assert [stage.batch_tokens for stage in found.stages] == [stage.batch_tokens for stage in wanted.stages]
        assert found.lr_floor == wanted.lr_floor and found.scheduled_steps == wanted.scheduled_steps


def test_a_start_measures_and_chooses(gpus, monkeypatch):  # noqa: F811
    """`main` measures the GPU after the ranks have met, and trains the model of the chosen width."""
    train = Mock()
    monkeypatch.setattr(T, "train", train)
    monkeypatch.setattr(T, "Log", lambda config, rt: None)
    monkeypatch.setattr(T.dist, "destroy_process_group", lambda: None)
    measured = []
    monkeypatch.setattr(T, "agreed_gpu", lambda rt: measured.append(rt) or H100)
    started = lambda config: Runtime(0, 1, torch.device("cuda", 0))
    for minutes, width in (("0.1", 256), ("5", 512), ("500", 768)):
        monkeypatch.setattr(T, "init_runtime", started)
        assert gpus.start("--preset=short", f"--minutes={minutes}")[0] == 0
        config, *_, size = train.call_args.args
        assert config.model.model_dim == width and config.schedule.minutes == float(minutes)
        assert config.system.micro_batches > 0 and size.startswith(f"size: width {width}")
    assert len(measured) == 3
    assert gpus.start("--preset=short", "--minutes=5", "--model_dim=768")[0] == 0
    config, *_, size = train.call_args.args
    assert (config.model.model_dim, size, len(measured)) == (768, "", 3)


def test_check_names_the_width(gpus, monkeypatch):  # noqa: F811
    monkeypatch.setattr("records.check.measure_gpu", lambda: H100)
    rows = gpus.check("--preset=short", "--minutes=5")[1]
    assert rows["size"][0].startswith("width 512 for 5 min") and rows["size"][1] == "yes"
    assert "size" not in gpus.check("--preset=short", "--train_tokens=50e6")[1]


def test_ranks_take_what_rank_0_measured(monkeypatch):
    monkeypatch.setattr(machine, "measure_gpu", lambda: H100)
    sent = Mock(side_effect=lambda values, source: values.fill_(7.0))
    monkeypatch.setattr(machine.dist, "broadcast", sent)
    assert machine.agreed_gpu(SimpleNamespace(world=1, device="cpu")) == H100 and not sent.called
    assert machine.agreed_gpu(SimpleNamespace(world=2, device="cpu")) == Gpu(7.0, 7.0, 7.0)


@pytest.mark.skipif(not ON_GPU, reason="measures a GPU")
def test_measured_gpu():
    limits, before = machine.ceilings(), torch.cuda.memory_reserved()
    gpu = machine.measure_gpu()
    assert gpu.products == pytest.approx(limits["fp8"] or limits["bf16"], rel=0.2)
    assert gpu.copies == pytest.approx(limits["copy"], rel=0.2)
    assert 2e-7 < gpu.launch < 2e-5
    assert torch.cuda.memory_reserved() <= before + 2**26
