"""The width that suits the length of a run, and what its choice is told about the GPU."""

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
from data.run.size import (WIDTHS, Gpu, best_seconds, expected_loss, forecast, rank_sizes, rows_per_gpu,
                           seconds_per_token)
from data.run.start import fit_size
from oracles import ON_GPU
from test_check import check, folder, gpus  # noqa: F401 (fixtures)

H100 = Gpu(1490e12, 3010e9, 0.85e-6)
GPUS = {"H100": H100, "A100": Gpu(250e12, 1815e9, 0.85e-6), "RTX 4090": Gpu(264e12, 897e9, 0.85e-6)}
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


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("world", [1, 8])
def test_more_tokens_take_wider_models(name, world):
    """The tokens of the best width in a time have that width again, but for times in which a narrower one took as
    many."""
    tokens, previous = np.geomspace(1e6, 1e12, 200), 0
    for count in tokens:
        seconds = best_seconds(count, GPUS[name], world)
        best = rank_sizes(seconds, GPUS[name], world)[0]
        assert best.tokens == pytest.approx(count, rel=0.02) and seconds > previous
        assert all(rank_sizes(earlier, GPUS[name], world)[0].tokens < count
                   for earlier in np.geomspace(seconds / 100, seconds * 0.97, 50))
        previous = seconds


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
    ("--preset=short", True), ("--preset=short --train_tokens=1e8", True), ("--minutes=1", False),
    ("--preset=single", False), ("--preset=single --train_tokens=1e8", True), ("--preset=single --minutes=0", False),
    ("--preset=single --train_tokens=0", False), ("--preset=short --minutes=0", True),
    ("--preset=short --scheduled_steps=9", True),
    ("--preset=record --train_tokens=1e8", False), ("--preset=short --model_dim=768", False),
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


def parse(width, gpu, words=("--preset=short", "--minutes=60"), world=1):
    return T.parse_config([*words, f"--model_dim={width}"], world, gpu)


@pytest.mark.parametrize("free, world, chosen", [(80000, 1, 768), (9000, 1, 512), (1000, 1, 256), (1000, 2, 768)])
def test_the_best_width_that_fits(monkeypatch, free, world, chosen):
    """At 60 minutes of an H100 the order is 768, 512, 256. No width fits 1000 MiB: the narrowest is the best try."""
    assert [it.width for it in rank_sizes(3600, H100)] == [768, 512, 256]

    def report(config, sizes, device, world):
        return "", {768: 10000, 512: 7000, 256: 4000}[config.model.model_dim] <= free

    for name in "memory.memory_report", "start.memory_report":
        monkeypatch.setattr(f"data.run.{name}", report)
    parse_ = functools.partial(parse, world=world)
    config, line = fit_size(parse_(768, None).schedule, parse_, T.param_table, world, H100, torch.device("cpu"))
    assert config == parse_(chosen, H100) and config.schedule.minutes == 60
    assert line.startswith(f"size: width {chosen} for 60 min, about ") and "extrapolated" in line
    assert ("does not fit the memory" in line) == (world == 1 and chosen < 768)
    assert line.count("width") == 3 and "1490 TFLOP/s, 3010 GB/s, 0.85 us per launch" in line


@pytest.mark.parametrize("words, found", [
    ("--minutes=0.5", "size: width 256 for 0.5 min, about 8"), ("", "size: width 256 for 27M tokens, about 9."),
    ("--train_tokens=27e6", "size: width 256 for 27M tokens, about 9."),
    ("--train_tokens=130e6", "size: width 512 for 130M tokens, about "),
    ("--scheduled_steps=10000", "size: width 512 for ")])
def test_the_length_has_many_names(words, found):
    parse_ = functools.partial(parse, words=("--preset=short", *words.split()))
    config, line = fit_size(parse_(768, None).schedule, parse_, T.param_table, 1, H100, torch.device("cpu"))
    assert line.startswith(found) and ("extrapolated" in line) == ("10000" in words)
    assert config == parse_(256 if "256" in found else 512, H100)


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


@pytest.mark.parametrize("world", [1, 8])
@pytest.mark.parametrize("tokens", np.geomspace(1e6, 1e10, 9))
def test_rows_are_those_of_the_rule_before_rounding(world, tokens):
    stage = T.parse_config(["--preset=short", f"--micro_batches={world}", f"--train_tokens={tokens}"], world
                           ).schedule.stages[0]
    assert 0.8 < rows_per_gpu(tokens, world) * world / stage.batch_tokens < 1.25


@pytest.fixture
def begin(gpus, monkeypatch):  # noqa: F811
    """begin(argument, ...) -> (status, stderr, config and line about the size that `train` got) of a start on an H100
    that is already running; .measured: the calls that measured it."""
    train, measured = Mock(), []
    for name, value in dict(train=train, Log=lambda config, rt: None,
                            agreed_gpu=lambda *args: measured.append(args) or H100,
                            init_runtime=lambda config: Runtime(0, 1, torch.device("cuda", 0))).items():
        monkeypatch.setattr(T, name, value)
    monkeypatch.setattr(T.dist, "destroy_process_group", lambda: None)

    def run(*args):
        status, err = gpus.start("--preset=short", *args)
        config, *_, size = train.call_args.args
        return status, err, config, size
    run.measured, run.gpus = measured, gpus
    return run


@pytest.mark.parametrize("minutes, width", [("0.1", 256), ("5", 512), ("500", 768)])
def test_a_start_measures_and_chooses(begin, minutes, width):
    """`main` measures the GPU after the ranks have met, and trains the model of the chosen width."""
    status, err, config, size = begin(f"--minutes={minutes}")
    assert (status, err) == (0, "") and size.startswith(f"size: width {width}") and len(begin.measured) == 1
    assert config.model.model_dim == width and config.schedule.minutes == float(minutes)
    assert config.system.micro_batches > 0 and begin.measured[0][1] is True  # FP8


@pytest.mark.parametrize("args", [["--preset=single"], ["--preset=single", "--minutes=0"], ["--model_dim=768"],
                                  ["--minutes=5", "--model_dim=768"]])
def test_a_start_that_measures_nothing(begin, args):
    status, err, config, size = begin(*args)
    assert (status, err, size, begin.measured) == (0, "", "", []) and config.model.model_dim == 768


def test_a_warning_comes_once(begin):
    """About the size that was chosen: no size fits this GPU, and the narrowest is the best try."""
    begin.gpus.free = begin.gpus.own + 3000
    err, config, size = begin("--minutes=500")[1:]
    assert config.model.model_dim == 256 and err.count("warning") == 1 and size.count("does not fit the memory") == 1


def test_check_names_the_width(gpus, monkeypatch):  # noqa: F811
    monkeypatch.setattr("records.check.measure_gpu", lambda fp8: H100)
    rows = gpus.check("--preset=short", "--minutes=5")[1]
    assert rows["size"][0].startswith("width 512 for 5 min") and rows["size"][1] == "yes"
    rows = gpus.check("--preset=short")[1]
    assert rows["size"][0].startswith("width 256 for 27M tokens") and rows["time"][0].startswith("about 0.2 minutes")
    for args in (["--preset=single"], ["--preset=short", "--model_dim=768"]):
        rows = gpus.check(*args)[1]
        assert "size" not in rows and rows["time"][0].startswith("about ")
    for arg in "--ngram_rows=1e6", "--mlp_ratio=4", "--kernels=torch":
        assert gpus.check("--preset=short", arg)[1]["time"][0] == "not known for this model or these kernels"
    monkeypatch.setattr("records.check.measure_gpu", Mock(side_effect=T.UserError("too little")))
    assert gpus.check("--preset=short", "--minutes=5")[1]["size"] == ("too little", "maybe")


def test_ranks_take_what_rank_0_measured(monkeypatch):
    monkeypatch.setattr(machine, "measure_gpu", lambda fp8: H100 if fp8 else H100._replace(products=1.0))

    def broadcast(values, source):
        assert source == 0
        values.fill_(7.0)
    monkeypatch.setattr(machine.dist, "broadcast", broadcast)
    one, two = (SimpleNamespace(world=world, device="cpu") for world in (1, 2))
    assert machine.agreed_gpu(one, True) == H100 and machine.agreed_gpu(one, False).products == 1
    assert machine.agreed_gpu(two, True) == Gpu(7.0, 7.0, 7.0)


def test_too_little_memory_to_measure(monkeypatch):
    monkeypatch.setattr(machine, "ceilings", Mock(side_effect=torch.OutOfMemoryError("none")))
    with pytest.raises(T.UserError, match="too little free memory to measure this GPU; choose the width .*=256"):
        machine.measure_gpu(True)


def test_table_in_the_readme():
    """README's estimates are those of the rule."""
    rows = re.findall(r"^\| (1/4|1|5|10|60) \| (\d+), (\d+)M \| (\d+), (\d+)M \| (\d+), (\d+)M \|$",
                      (RECORD.parents[1] / "README.md").read_text(), re.M)
    assert len(rows) == 5
    for minutes, *found in rows:
        for name, width, tokens in zip(("H100", "A100", "RTX 4090"), found[::2], found[1::2]):
            best = rank_sizes(60 * (0.25 if minutes == "1/4" else int(minutes)), GPUS[name])[0]
            assert (best.width, f"{best.tokens / 1e6:.0f}") == (int(width), tokens), (minutes, name)


@pytest.mark.skipif(not ON_GPU, reason="measures a GPU")
def test_measured_gpu():
    limits = machine.ceilings()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    gpu = machine.measure_gpu(True)
    assert gpu.products == pytest.approx(limits["fp8"] or limits["bf16"], rel=0.2)
    assert gpu.copies == pytest.approx(limits["copy"], rel=0.2)
    assert 2e-7 < gpu.launch < 2e-5
    assert torch.cuda.memory_reserved() <= before + 2**26
    assert machine.measure_gpu(False).products == pytest.approx(limits["bf16"], rel=0.2)
