"""The size that suits the length of a run, and what its choice is told about the GPU."""

import dataclasses
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import train_gpt as T
from data.run import machine
from data.run.config import flatten, left_open, read_values, render
from data.run.length import BORDERS, Size, best_size, h100s, seconds
from data.run.machine import Runtime
from data.run.start import fit_size
from data.run.state import KEYS, write_checkpoint
from oracles import ON_GPU
from records import rerun
from test_check import check, folder, gpus  # noqa: F401 (fixtures)

SIZES = [*BORDERS]
TIMES = np.geomspace(0.3, 1e6, 200)


def test_speed_and_seconds():
    """Eight GPUs are worth 8 ** .9 of one, and the time falls as much."""
    assert (h100s(1.0, 1), h100s(0.5, 1), h100s(0.5, 8)) == (1, 0.5, 0.5 * 8**0.9)
    for size, millions in zip(SIZES, (1 / 0.264, 1 / 0.387, 1 / 0.600, 1 / 1.001)):  # of tokens in a second of an H100
        assert seconds(size, 1e6 * millions) == pytest.approx(1, rel=2e-3)
        assert seconds(size, 3e6 * millions, 1 / 3) == pytest.approx(9, rel=2e-3)


def test_longer_runs_take_larger_models():
    """In the same time, slower GPUs smaller ones. A border belongs to the smaller size."""
    chosen = [best_size(time) for time in TIMES]
    assert chosen == sorted(chosen) and {*chosen} == {*SIZES} and SIZES == sorted(SIZES)
    assert all(best_size(time / 5) <= size for time, size in zip(TIMES, chosen))
    for (size, border), larger in zip(BORDERS.items(), SIZES[1:]):
        assert (best_size(border), best_size(1.001 * border)) == (size, larger)
        assert best_size(tokens=border / seconds(size, 1) * 0.999) == size
        assert best_size(tokens=border / seconds(size, 1) * 1.001) == larger


def test_tokens_and_time_choose_the_same_size():
    """But for times just behind a border, in which the larger size takes tokens for which the smaller is enough."""
    for tokens in np.geomspace(1e6, 1e11, 200):
        size = best_size(tokens=tokens)
        assert best_size(seconds(size, tokens)) == size
    differing = [time for time in TIMES if best_size(tokens=time / seconds(best_size(time), 1)) != best_size(time)]
    assert 0 < len(differing) < 0.1 * len(TIMES)
    assert all(any(border < time < 1.7 * border for border in BORDERS.values()) for time in differing)


def size_is_open(argv):
    return left_open(read_values(argv, T.PRESETS), T.PRESETS)[0]


@pytest.mark.parametrize("args, open", [
    ("--minutes 1 --seed=2 --muon_lr=0.02", True), ("--train_tokens=340e6", True), ("", False), ("--minutes=0", False),
    ("--train_tokens=0", False), ("--scheduled_steps=100", False),
    ("--preset=record --train_tokens=1e8", False), ("--preset=cpu --minutes=1", False),
    *((f"--train_tokens=27e6 --{knob}", False) for knob in (
        "model_dim=768", "num_heads=8", "depth=8", "layer3.xsa=false", "layers=9", "backout_layer=none", "device=cpu",
        "device=mps", "resume=x.pt", "init_from=x.pt"))])
def test_when_the_size_is_chosen(args, open):
    args = args.split()
    assert size_is_open(args if args and "preset" in args[0] else ["--preset=single", *args]) == open


@pytest.mark.parametrize("preset, width, heads", [("record74", 256, 2), ("single", 640, 5), ("cpu", 64, 4),
                                                  ("record", 768, 6)])
def test_a_width_alone_keeps_the_width_of_a_head(preset, width, heads):
    model = T.parse_config([f"--preset={preset}", f"--model_dim={width}"]).model
    assert (model.model_dim, model.num_heads, model.head_dim) == (width, heads, T.PRESETS[preset].config.model.head_dim)
    both = T.parse_config([f"--preset={preset}", f"--model_dim={width}", f"--num_heads={2 * heads}"]).model
    assert both.num_heads == 2 * heads


def fitted(*words, world=1, gpu=1.0):
    """What `fit_size` returns, and the config of each size."""
    def parse(gpu, **knobs):
        return T.parse_config(["--preset=single", *words, *(f"--{k}={v}" for k, v in knobs.items())], world, gpu)
    return *fit_size(parse(1.0), True, parse, world, gpu, torch.device("cpu")), lambda size: parse(gpu, **size.knobs)


@pytest.mark.parametrize("free, world, chosen", [(80000, 1, 3), (7000, 1, 1), (1000, 1, 0), (1000, 2, 3)])
def test_the_best_size_that_fits(monkeypatch, free, world, chosen):
    """In an hour the largest is best. No size fits 1000 MiB: the smallest is the best try. Ranks ignore the memory."""
    chosen = SIZES[chosen]

    def report(config, device, world):
        return "", 1000 * config.model.depth + config.model.model_dim <= free
    for name in "memory.memory_report", "start.memory_report":
        monkeypatch.setattr(f"data.run.{name}", report)
    config, line, of_size = fitted("--minutes=60", world=world)
    assert config == of_size(chosen) and config.schedule.minutes == 60
    assert Size(config.model.model_dim, len(config.model.layers)) == chosen and config.model.head_dim == 128
    assert line == (f"size: {chosen} (channels x layers) for 3600 s; the GPUs are worth {world**0.9:.2f} H100s"
                    + "; 768 x 11 would be better, but does not fit the memory" * (world == 1 and chosen != SIZES[-1]))
    model = fitted("--train_tokens=1e9", world=world)[0].model
    assert Size(model.model_dim, model.depth) == chosen


@pytest.mark.parametrize("words, slow, world, size, length", [
    ("--minutes=0.5", 1, 1, 1, "30 s; the GPUs are worth 1.00 H100s;"
     " on corpus L, such runs are near 3.59 halfway and end near 3.23"),
    ("--minutes=0.5", 2, 1, 0, "30 s; the GPUs are worth 0.50 H100s;"
     " on corpus L, such runs are near 3.76 halfway and end near 3.38"),
    ("--minutes=0.5", 1, 4, 2, "30 s; the GPUs are worth 3.48 H100s"), ("--train_tokens=17e6", 1, 1, 0, "17M tokens"),
    ("--train_tokens=27e6", 4, 1, 0, "27M tokens; on corpus L, such runs are near 3.96 halfway and end near 3.54"),
    ("--train_tokens=155e6", 1, 1, 1, "155M tokens; on corpus L, such runs are near 3.44 halfway and end near 3.11"),
    ("--train_tokens=130e6", 1, 8, 1, "130M tokens; on corpus L, such runs are near 3.47 halfway and end near 3.14"),
    ("--train_tokens=130e6 --scheduled_steps=5000", 1, 1, 2, "331M tokens")])
def test_minutes_count_the_gpus_and_tokens_do_not(words, slow, world, size, length):
    """The steps count, wherever they come from."""
    config, line, of_size = fitted(*words.split(), world=world, gpu=1 / slow)
    assert config == of_size(SIZES[size]) and line == f"size: {SIZES[size]} (channels x layers) for {length}"


@pytest.fixture
def begin(gpus, monkeypatch):  # noqa: F811
    """begin(argument, ...) -> (status, stderr, config, line of the size, seconds) of a start; .measured: its calls."""
    train, measured = Mock(), []
    for name, value in dict(train=train, Log=lambda config, rt: None,
                            measure_gpu=lambda fp8: measured.append(fp8) or 0.5,
                            init_runtime=lambda config: Runtime(0, 1, torch.device("cuda", 0))).items():
        monkeypatch.setattr(T, name, value)
    monkeypatch.setattr(T.dist, "destroy_process_group", lambda: None)

    def run(*args):
        status, err = gpus.start("--preset=single", *args)
        config, *_, size, seconds, _ = train.call_args.args
        return status, err, config, size, seconds
    run.measured, run.gpus = measured, gpus
    return run


@pytest.mark.parametrize("args, wanted, fits", [
    ("--minutes=0.1", SIZES[0], True), ("--minutes=1", SIZES[1], True), ("--minutes=500", SIZES[3], True),
    ("--minutes=500", SIZES[0], False), ("", None, True), ("--train_tokens=27e6", SIZES[0], True),
    ("--minutes=5 --model_dim=768", None, True)])
def test_a_start_measures_and_chooses(begin, args, wanted, fits):
    """`main` measures the GPU after the ranks have met if --minutes need it, and trains the model of the chosen size.
    If no size fits, the smallest is the best try, and one warning says so."""
    begin.gpus.free = 140000 if fits else 3500
    status, err, config, size, time = begin(*args.split())
    assert (status, time) == (0, 60 * config.schedule.minutes) and config.system.micro_batches > 0
    assert (err == "") == fits and err.count("warning") == size.count("does not fit the memory") == (not fits)
    assert begin.measured == [True] * ("--minutes" in args) and size.startswith(f"size: {wanted} " if wanted else "")
    assert bool(size) == bool(wanted)
    if wanted or args:  # the batches suit the GPU, too
        words = ["--preset=single", *args.split(), *(f"--{k}={v}" for k, v in (wanted.knobs if wanted else {}).items())]
        assert config.schedule.stages == T.parse_config(words, 1, 0.5).schedule.stages
    assert (config.model.model_dim, config.model.depth) == (wanted or SIZES[3])
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
    with pytest.raises(T.UserError, match="model_dim is 768 here, 384 there.*; leave out --preset=single"):
        T.parse_config(["--preset=single", resume])
    log = rerun.Run("log", facts={"val_shards": "", **{key: render(value) for key, value in flatten(config).items()}})
    again = [f"--{key}={value}" for key, value in rerun.settings(log, {}).items()]
    assert not size_is_open(again) and T.parse_config(again).model == config.model


def test_check_names_the_size(gpus, monkeypatch):  # noqa: F811
    monkeypatch.setattr("records.check.measure_gpu", lambda fp8: 1.0)
    def rows_of(*args):
        return gpus.check("--preset=single", *args)[1]
    rows = rows_of("--minutes=5")
    assert rows["size"][0].startswith("768 x 11 (channels x layers) for 300 s; ") and rows["size"][1] == "yes"
    rows = rows_of("--train_tokens=27e6")
    assert rows["size"][0].startswith("384 x 4 (channels x layers) for 27M tokens; on corpus L, such runs are near ")
    assert rows["time"][0].startswith("about 0.1 minutes")
    for args, minutes in ([], 5.7), (["--train_tokens=1e8", "--model_dim=768"], 1.7):
        rows = rows_of(*args)
        assert "size" not in rows and rows["time"][0].startswith(f"about {minutes} minutes")
    for arg in "--pointer=false", "--kernels=torch":
        assert rows_of("--train_tokens=27e6", arg)["time"][0] == "not known for this model or these kernels"
    monkeypatch.setattr("records.check.measure_gpu", Mock(side_effect=T.UserError("too little")))
    assert rows_of("--minutes=5")["size"] == ("too little", "maybe")
    assert gpus.check()[1]["time"] == ("not measured: too little memory of the GPU is free", "maybe")


def test_ranks_take_what_rank_0_measured(monkeypatch):
    def broadcast(values, source):
        assert source == 0
        values[0] = 7.0
    monkeypatch.setattr(machine.dist, "broadcast_object_list", broadcast)
    assert [machine.of_rank_0(1.0, SimpleNamespace(world=world)) for world in (1, 2)] == [1.0, 7.0]


def test_too_little_memory_to_measure(monkeypatch):
    monkeypatch.setattr(machine, "ceilings", Mock(side_effect=torch.OutOfMemoryError("none")))
    line = "too little free memory to measure this GPU for --minutes; free 2.3 GiB, or "
    with pytest.raises(T.UserError, match=line):
        machine.measure_gpu(True)


def test_table_in_the_readme():
    """README's sizes and tokens are those of the rule."""
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (1/4|1|5|10|60) \| (\d+ x \d+, .*) \|$", text, re.M)
    rates = (1490e12, 3010e9), (250e12, 1815e9), (264e12, 897e9), (57e12, 842e9)  # H100, A100, RTX 4090, RTX 3090
    worths = [(products / 1490e12 * copies / 3010e9) ** 0.5 for products, copies in rates]
    assert len(rows) == 5
    for minutes, found in rows:
        times = [float(60 * Fraction(minutes)) * worth for worth in worths]
        wanted = [f"{best_size(time)}, {time / seconds(best_size(time), 1) / 1e6:.0f}M" for time in times]
        assert [re.match("[^,]*, [^,]*", cell)[0] for cell in found.split(" | ")] == wanted


@pytest.mark.skipif(not ON_GPU, reason="measures a GPU")
def test_measured_gpu():
    limits = machine.ceilings()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for fp8, products in (True, limits["fp8"] or limits["bf16"]), (False, limits["bf16"]):
        worth = (products / 1490e12 * limits["copy"] / 3010e9) ** 0.5
        assert machine.measure_gpu(fp8) == pytest.approx(worth, rel=0.2)
    assert torch.cuda.memory_reserved() <= before + 2**26
