"""The size that suits the length of a run, and what its choice is told about the GPU."""

import dataclasses
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
from data.run.state import KEYS, write_checkpoint
from data.run.config import flatten, left_open, read_values, render
from data.run.length import (MEASURED, H100, SIZES, Gpu, Size, best_seconds, expected_loss, forecast, rank_sizes,
                           rows_per_gpu, seconds, seconds_per_token)
from data.run.machine import Runtime
from data.run.start import fit_size
from oracles import ON_GPU
from records import rerun
from test_check import H200, check, folder, gpus  # noqa: F401 (fixtures)

GPUS = {"H100": H100, "A100": Gpu(250e12, 1815e9, 0.85e-6), "RTX 4090": Gpu(264e12, 897e9, 0.85e-6),
        "RTX 3090": Gpu(57e12, 842e9, 0.85e-6)}
RECORD = Path(__file__).resolve().parents[1] / "records/2026-11-28_proven"


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("world", [1, 8])
def test_longer_runs_take_larger_models(name, world):
    """Slower GPUs smaller ones. The tokens of the best size in a time have that size again."""
    gpu, times, previous = GPUS[name], np.geomspace(0.3, 1e6, 200), 0
    slow = Gpu(gpu.products / 5, gpu.copies / 5, gpu.launch)
    chosen = [rank_sizes(time, gpu, world) for time in times]
    numbers = [SIZES.index(ranked[0].size) for ranked in chosen]
    assert numbers == sorted(numbers) and {0, len(SIZES) - 1} <= {*numbers}
    assert all(SIZES.index(rank_sizes(time, slow, world)[0].size) <= i for time, i in zip(times, numbers))
    for ranked in chosen:
        assert sorted(it.size for it in ranked) == sorted(SIZES)
        assert [it.loss for it in ranked] == sorted(it.loss for it in ranked)
    for size in SIZES:
        tokens = [forecast(size, time, gpu, world).tokens for time in times]
        assert tokens == sorted(tokens) and tokens[9] > forecast(size, times[9], slow, world).tokens
        assert [seconds(size, count, gpu, world) for count in tokens] == pytest.approx([*times], rel=1e-3)
        assert forecast(size, 60, gpu, 2 * world).tokens > 1.6 * forecast(size, 60, gpu, world).tokens
    for count in np.geomspace(1e6, 1e12, 200):
        time = best_seconds(count, gpu, world)
        best = rank_sizes(time, gpu, world)[0]
        assert best.tokens == pytest.approx(count, rel=0.02) and time > previous
        assert all(rank_sizes(earlier, gpu, world)[0].tokens < count
                   for earlier in np.geomspace(time / 100, time * 0.97, 50))
        previous = time


def test_fits_follow_the_measured_runs(tmp_path, monkeypatch, capsys):
    """The constants are those that the record's script prints, rounded, and the runs lie where the text says."""
    for folder in RECORD, RECORD.with_name("2026-11-28_headline"):
        shutil.copytree(folder, tmp_path / folder.name)
    monkeypatch.chdir(tmp_path / RECORD.name)
    runpy.run_path("fit.py.txt")
    text = capsys.readouterr().out
    a, c, b, A, C, B, K, E = map(float, re.findall(r"(?<=[A-Ka-c] )\S+", text.split("\n")[0])[:8])
    for size in SIZES:
        for tokens in 5, 40, 155, 1000:
            law = A * (768 / size.width) ** a + C * (11 / size.layers) ** c + B * (40 / tokens) ** b
            law += K * np.log((768 / size.width) ** 2 * 11 / size.layers) * np.log(tokens / 40)
            assert law == pytest.approx(expected_loss(size, 1e6 * tokens), abs=2e-3)
    runs = re.findall(r"width (\d+) layers (\d+) tokens (\S+)M loss (\S+) on L residual", text)
    residuals = [float(loss) - E - expected_loss(Size(int(width), int(layers)), 1e6 * float(tokens))
                 for width, layers, tokens, loss in runs]
    assert len(runs) == 20 and np.square(residuals).mean() ** 0.5 < 0.0045 and np.abs(residuals).max() < 0.0095
    times = re.findall(r"(H\d+) (\w+), width (\d+) layers (\d+) rows (\d+): (\S+) ms", text)
    shapes = [(Size(int(width), int(layers)), int(rows)) for _, _, width, layers, rows, _ in times]
    errors = {label: 1e3 * rows * seconds_per_token(size, rows, H100 if gpu == "H100" else H200) / float(ms) - 1
              for (gpu, label, *_, ms), (size, rows) in zip(times, shapes)}
    on_a_busy_host = [errors.pop("Z640x8_40_1"), errors.pop("Z640x8_80_1")]
    assert len(times) == 23 and min(on_a_busy_host) > -0.1 and np.abs([*errors.values()]).max() < 0.05
    assert {*SIZES} == {size for size, _ in shapes}


def size_is_open(argv):
    return left_open(read_values(argv, T.PRESETS), T.PRESETS)[0]


@pytest.mark.parametrize("args, open", [
    ("--preset=short --minutes=1", True), ("--preset=single --minutes 1 --seed=2 --muon_lr=0.02", True),
    ("--preset=short --layer3.xsa=false", False), ("--preset=short --backout_layer=none", False),
    ("--preset=short", True), ("--preset=short --train_tokens=1e8", True), ("--minutes=1", False),
    ("--preset=single", False), ("--preset=single --train_tokens=1e8", True), ("--preset=single --minutes=0", False),
    ("--preset=single --train_tokens=0", False), ("--preset=short --minutes=0", True),
    ("--preset=record --train_tokens=1e8", False), ("--preset=cpu --minutes=1", False),
    ("--preset=short --model_dim=768", False), ("--preset=short --num_heads=8", False),
    ("--preset=short --depth=8", False), ("--preset=short --device=cpu", False),
    ("--preset=short --resume=x.pt", False)])
def test_when_the_size_is_chosen(args, open):
    assert size_is_open(args.split()) == open


@pytest.mark.parametrize("preset, width, heads", [("short", 512, 4), ("record74", 256, 2), ("single", 640, 5),
                                                  ("cpu", 64, 4), ("record", 768, 6)])
def test_a_width_alone_keeps_the_width_of_a_head(preset, width, heads):
    model = T.parse_config([f"--preset={preset}", f"--model_dim={width}"]).model
    assert (model.model_dim, model.num_heads, model.head_dim) == (width, heads, T.PRESETS[preset].config.model.head_dim)
    both = T.parse_config([f"--preset={preset}", f"--model_dim={width}", f"--num_heads={2 * heads}"]).model
    assert both.num_heads == 2 * heads


def words_of(size):
    return f"--model_dim={size.width}", f"--depth={size.layers}"


def fitted(*words, world=1):
    """What `fit_size` returns, and the function that makes the config of a size."""
    def parse(size, gpu):
        return T.parse_config(["--preset=short", *words, *words_of(size)], world, gpu)
    return *fit_size(parse(SIZES[4], None).schedule, parse, world, H100, torch.device("cpu")), parse


@pytest.mark.parametrize("free, world, chosen", [(80000, 1, 4), (7000, 1, 2), (1000, 1, 0), (1000, 2, 4)])
def test_the_best_size_that_fits(monkeypatch, free, world, chosen):
    """At 60 minutes of an H100 larger is better. No size fits 1000 MiB: the smallest is the best try."""
    assert [it.size for it in rank_sizes(3600, H100)] == [*reversed(SIZES)]
    chosen = SIZES[chosen]

    def report(config, device, world):
        return "", 1000 * config.model.depth + config.model.model_dim <= free
    for name in "memory.memory_report", "start.memory_report":
        monkeypatch.setattr(f"data.run.{name}", report)
    config, line, time, parse = fitted("--minutes=60", world=world)
    assert time == 3600 and config == parse(chosen, H100) and config.schedule.minutes == 60
    assert (config.model.model_dim, len(config.model.layers)) == chosen and config.model.head_dim == 128
    assert line.startswith(f"size: {chosen} (channels x layers) for 60 min, about ") and "extrapolated" in line
    assert ("does not fit the memory" in line) == (world == 1 and chosen != SIZES[4])
    assert all(str(size) in line for size in SIZES) and "1490 TFLOP/s, 3010 GB/s, 0.85 us per launch" in line


@pytest.mark.parametrize("words, found", [
    ("--minutes=0.5", "512 x 6 (channels x layers) for 0.5 min, about 7"),
    ("", "384 x 4 (channels x layers) for 27M tokens, about 6.9"),
    ("--train_tokens=27e6", "384 x 4 (channels x layers) for 27M tokens, about 6.9"),
    ("--train_tokens=130e6", "512 x 6 (channels x layers) for 130M tokens, about 5"),
    ("--scheduled_steps=10000", "640 x 8 (channels x layers) for ")])
def test_the_length_has_many_names(words, found):
    config, line, time, parse = fitted(*words.split())
    assert time == 30 if "minutes" in words else f", about {time:.3g} s;" in line
    assert line.startswith("size: " + found) and ("extrapolated" in line) == ("10000" in words)
    assert config == parse(next(size for size in SIZES if found.startswith(str(size))), H100)


@pytest.mark.parametrize("world", [1, 4])
def test_batches_suit_the_tokens_of_this_gpu(world):
    """With a measured GPU, --minutes has the batches of the --train_tokens that the time is enough for."""
    slow = Gpu(H100.products / 9, H100.copies / 9, H100.launch)
    for gpu, size in ((H100, SIZES[0]), (H100, SIZES[4]), (slow, SIZES[2])):
        words = "--preset=short", *words_of(size)
        tokens = forecast(size, 120, gpu, world).tokens
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
    """begin(argument, ...) -> (status, stderr, config, line of the size, seconds) of a start; .measured: its calls."""
    train, measured = Mock(), []
    for name, value in dict(train=train, Log=lambda config, rt: None,
                            measure_gpu=lambda fp8: measured.append(fp8) or H100,
                            init_runtime=lambda config: Runtime(0, 1, torch.device("cuda", 0))).items():
        monkeypatch.setattr(T, name, value)
    monkeypatch.setattr(T.dist, "destroy_process_group", lambda: None)

    def run(*args):
        status, err = gpus.start("--preset=short", *args)
        config, *_, size, seconds, _ = train.call_args.args
        return status, err, config, size, seconds
    run.measured, run.gpus = measured, gpus
    return run


@pytest.mark.parametrize("args, wanted, fits", [
    ("--minutes=0.1", SIZES[0], True), ("--minutes=1", SIZES[2], True), ("--minutes=500", SIZES[4], True),
    ("--minutes=500", SIZES[0], False), ("--preset=single", None, True), ("--minutes=5 --model_dim=768", None, True)])
def test_a_start_measures_and_chooses(begin, args, wanted, fits):
    """`main` measures the GPU after the ranks have met, and trains the model of the chosen size; where the size is not
    open, it measures nothing. If no size fits, the smallest is the best try, and one warning says so."""
    begin.gpus.free = 140000 if fits else 3500
    status, err, config, size, time = begin(*args.split())
    assert (status, time) == (0, 60 * config.schedule.minutes) and config.system.micro_batches > 0
    assert (err == "") == fits and err.count("warning") == size.count("does not fit the memory") == (not fits)
    assert begin.measured == [True] * bool(wanted) and size.startswith(f"size: {wanted} " if wanted else "")  # FP8
    assert bool(size) == bool(wanted)
    assert (config.model.model_dim, config.model.depth) == (wanted or SIZES[4])
    assert f"--minutes={config.schedule.minutes:g}" in args or not config.schedule.minutes


def test_a_run_keeps_its_size(begin, tmp_path):
    """Whatever GPU it goes on with: a checkpoint, and a log that is trained again, have the size among their knobs."""
    config = begin("--train_tokens=27e6")[2]
    assert (config.model.model_dim, config.model.depth) == SIZES[0]
    state = dict.fromkeys(KEYS) | dict(step=3, config=dataclasses.asdict(config))
    write_checkpoint(state, tmp_path / "state.pt", keep=1)
    resume = f"--resume={tmp_path / 'state.pt'}"
    resumed = T.parse_config([resume])
    assert not size_is_open([resume])
    assert (resumed.model, resumed.schedule, resumed.optim) == (config.model, config.schedule, config.optim)
    with pytest.raises(T.UserError, match="model_dim is 768 here, 384 there.*; leave out --preset=short"):
        T.parse_config(["--preset=short", resume])
    log = rerun.Run("log", facts={"val_shards": "", **{key: render(value) for key, value in flatten(config).items()}})
    again = [f"--{key}={value}" for key, value in rerun.settings(log, {}).items()]
    assert not size_is_open(again) and T.parse_config(again).model == config.model


def test_check_names_the_size(gpus, monkeypatch):  # noqa: F811
    monkeypatch.setattr("records.check.measure_gpu", lambda fp8: H100)
    rows = gpus.check("--preset=short", "--minutes=5")[1]
    assert rows["size"][0].startswith("768 x 11 (channels x layers) for 5 min") and rows["size"][1] == "yes"
    rows = gpus.check("--preset=short")[1]
    assert rows["size"][0].startswith("384 x 4 (channels x layers) for 27M tokens")
    assert rows["time"][0].startswith("about 0.1 minutes")
    for args in (["--preset=single"], ["--preset=short", "--model_dim=768"]):
        rows = gpus.check(*args)[1]
        assert "size" not in rows and rows["time"][0].startswith("about ")
    for arg in "--bigram_tables=7", "--mlp_ratio=4", "--kernels=torch":
        assert gpus.check("--preset=short", arg)[1]["time"][0] == "not known for this model or these kernels"
    monkeypatch.setattr("records.check.measure_gpu", Mock(side_effect=T.UserError("too little")))
    assert gpus.check("--preset=short", "--minutes=5")[1]["size"] == ("too little", "maybe")
    assert gpus.check()[1]["time"] == ("not measured: too little memory of the GPU is free", "maybe")


def test_ranks_take_what_rank_0_measured(monkeypatch):
    def broadcast(values, source):
        assert source == 0
        values[0] = Gpu(7.0, 7.0, 7.0)
    monkeypatch.setattr(machine.dist, "broadcast_object_list", broadcast)
    assert [machine.of_rank_0(H100, SimpleNamespace(world=world)) for world in (1, 2)] == [H100, Gpu(7.0, 7.0, 7.0)]


def test_too_little_memory_to_measure(monkeypatch):
    monkeypatch.setattr(machine, "ceilings", Mock(side_effect=torch.OutOfMemoryError("none")))
    with pytest.raises(T.UserError, match="too little free memory to measure this GPU; choose the size .*=4"):
        machine.measure_gpu(True)


def test_table_in_the_readme():
    """README's estimates are those of the rule."""
    text = (RECORD.parents[1] / "README.md").read_text()
    rows = re.findall(r"^\| (1/4|1|5|10|60) \| (\d+ x \d+, .*) \|$", text, re.M)
    assert len(rows) == 5
    for minutes, found in rows:
        ranked = (rank_sizes(60 * (0.25 if minutes == "1/4" else int(minutes)), gpu)[0] for gpu in GPUS.values())
        assert found.split(" | ") == [
            f"{best.size}, {best.tokens / 1e6:.0f}M"
            + f", {best.loss + 2.094:.2f}" * (MEASURED[0] <= best.tokens <= MEASURED[1]) for best in ranked]


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
