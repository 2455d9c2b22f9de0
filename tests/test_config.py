"""What is decided before anything runs: knobs, schedules, rotary states, the parameter table, the initial weights."""

import dataclasses
import itertools
import math
import re
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
from data.run.config import (
    FIRST, check_config, config_from_dict, flatten, left_open, parse_value, read_values, render, with_knobs)
from data.run.length import momentum_steps, scaled, stage_starts, total_tokens
from data.run.program import UserError
from data.run.warmup import steps_with_new_keys

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
RECORD, RECORD74 = T.PRESETS["record"].config, T.PRESETS["record74"].config
STEPS = range(1491)  # the last is the final validation


# ---- Command line ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("knob, text, value", [
    ("val_tokens", "2_097_152", 2097152), ("adam_eps", "1e-8", 1e-8), ("run_label", "a=b c,d", "a=b c,d"),
    ("sample_prompt", "", ""), ("fp8", "False", False), ("save", "1", True),
    ("stage1.mtp_start", "1,.5,.2", (1.0, 0.5, 0.2))])
def test_values_of_every_type(knob, text, value):
    """Only the named knob changes, and its type stays."""
    config = T.parse_config([f"--{knob}={text}"])
    assert config == edited(RECORD, knob, value) and type(flatten(config)[knob]) is type(value)


def test_no_arguments_and_several():
    assert T.parse_config([]) == RECORD and RECORD74 == T.Config()
    config = T.parse_config(["--seed", "3", "--preset=cpu", "--final_window", "99"])
    assert (config.system.seed, config.schedule.final_window, config.system.device) == (3, 99, "cpu")
    assert config.schedule.stages == T.PRESETS["cpu"].config.schedule.stages
    assert T.parse_config(["--preset=cpu"]) == T.PRESETS["cpu"].config


def test_stages():
    """More stages repeat the last one before the extension, which stays last; fewer drop the stages before it."""
    stages = RECORD.schedule.stages
    assert T.parse_config(["--stages=6"]).schedule.stages == (*stages[:3], stages[2], stages[2], stages[3])
    assert T.parse_config(["--stages=2", "--split_stage=2"]).schedule.stages == (stages[0], stages[3])
    config = T.parse_config(["--stages=5", "--stage4.lr_mul=2"])
    assert [stage.lr_mul for stage in config.schedule.stages] == [1.0, 1.52, 1.73, 2.0, 1.73]
    shares = (f"--stage{i}.share={share}" for i, share in enumerate((0.5, 0.25, 0.25), 1))
    assert stage_starts(T.parse_config(["--scheduled_steps=100", *shares]).schedule) == [0, 50, 75, 100, 140]


def test_layer_knobs():
    """One field, or all of them as words; more layers are plain ones."""
    for args, layer in {"--layer6.attention=true": T.Layer(skip_from=3),
                        "--layer6=paired skip_from=0": T.Layer(paired=True, skip_from=0),
                        "--layer6=default|--layer6.paired=1|--layer6.long=true": T.Layer(paired=True, long=True)
                        }.items():
        layers = T.parse_config(args.split("|")).model.layers
        assert layers == (*RECORD.model.layers[:6], layer, *RECORD.model.layers[7:])
    config = T.parse_config(["--preset=record74", "--layers=3", "--backout_layer=none", "--layer2.value_embed=false"])
    assert config.model.layers == (T.Layer(paired=True), T.Layer(value_embed=True), T.Layer(paired=True))
    assert T.parse_config(["--layers=12", "--layer11=two_lanes"]).model.layers[11] == T.Layer(two_lanes=True)


def test_config_from_dict():
    """A checkpoint holds such a dict. A knob that the dict lacks has its neutral value, a foreign knob is refused."""
    for config, *_ in T.PRESETS.values():
        assert config_from_dict(T.Config(), dataclasses.asdict(config)) == config
    config = T.parse_config(["--layers=12", "--layer11=two_lanes", "--stages=5", "--muon_lr=0.5"])
    tree = dataclasses.asdict(config)
    assert config_from_dict(T.Config(), tree) == config
    tree["system"] |= {"compile": True, "combo_kernels": True}  # of checkpoints when PyTorch compiled the layers
    assert config_from_dict(T.Config(), tree) == config
    tree["system"]["keep"] = 0  # as checkpoints have it of runs that keep all
    assert config_from_dict(T.Config(), tree).system.keep == 10**9
    tree["optim"]["average_blend"] = 0.5,  # as checkpoints before commit 1675c36 have it
    assert config_from_dict(T.Config(), tree).optim.average_blend == 0.5
    kept = tree["optim"].keys() - {"adam_every", "table_lr"}  # before there was a table_lr
    old = {key: tree["optim"][key] for key in kept} | {"adam_lr": 0.01}
    for every, rate in ({"adam_every": 1}, 0.01 / 2**0.25), ({"adam_every": 2}, 0.01), ({}, 0.01):
        optim = config_from_dict(T.Config(), tree | {"optim": old | every}).optim
        assert (optim.adam_lr, optim.table_lr) == pytest.approx((rate, 0.01), rel=1e-12)
    tree["optim"]["average_blend"] = 0.5, 1.0
    with pytest.raises(UserError, match="--average_blend=0.5,1.0: expected float"):
        config_from_dict(T.Config(), tree)
    del tree["optim"]["average_blend"], tree["optim"]["muon_lr"], tree["model"]["layers"][11]["two_lanes"]
    assert config_from_dict(T.Config(), tree).optim.muon_lr == 0.023
    assert not config_from_dict(T.Config(), tree).model.layers[11].two_lanes
    for part in tree, tree["optim"], tree["model"]["layers"][0]:
        part["foreign"] = 1
        with pytest.raises(UserError, match="another train_gpt.py: .*foreign"):
            config_from_dict(T.Config(), tree)
        del part["foreign"]


REFUSED = {  # arguments (and processes, if more than one) -> what the message says
    # what the parser does not understand
    "--scheduled_step=3": "unknown key --scheduled_step; the nearest is --scheduled_steps",
    "--learning_rate=3": r"unknown key --learning_rate; here it is --muon_lr, --adam_lr and --table_lr \(see",
    "--stage5.lr_mul=3": "unknown key --stage5.lr_mul: this run has stages 1 to 4",
    "--stage1=share=2": "unknown key --stage1; the nearest is --stages", "--=5": "unknown key -- ",
    "--preset=cpu --layer6.attention=true": "unknown key --layer6.attention: this run has layers 0 to 3",
    "tests": r"argument 'tests': write --key=value \(see --help\), or ./run.sh test$",
    "--resume=": "--resume= has no value: is there no checkpoint yet[?] --save=true makes one",
    "--init_from=": "--init_from= has no value: is there no checkpoint", "--minutes=": "--minutes= has no value: give",
    "--layer3=lang": "--layer3=lang: expected words that are fields of Layer, for example --layer3=long",
    "--layer6.skip_from=x": "expected a number or none, for example --layer6.skip_from=3",
    "--stages=1": "--stages=1: must be 2 or more", "--val_every": "'--val_every': write --key=value",
    "--layers=1001": "--layers=1001: must be 1 or more, and at most 1000",
    "--val_every=2.5": "--val_every=2.5: must be a whole number of steps, or from 0 to below 1",
    "--muon_lr=nan": "--muon_lr=nan: expected float, a finite number, for example --muon_lr=0.023",
    "--muon_momentum=0.9,x": "--muon_momentum=0.9,x: expected comma-separated numbers",
    "--fp8=yes": "expected true or false, for example --fp8=True",
    "--preset=h100": "preset=h100.*record74, record, single, cpu",
    "--preset=short": "^--preset=short: that run is --preset=single --train_tokens=27e6 now$",
    # values that would crash later; test_every_number_has_bounds has the bounds of all
    "--ngram_rows=1": "--ngram_rows=1.0: up to 7 whole numbers, each 0 or at least 2",
    "--ngram_rows=9,9,9,9,9,9,9,9": "--ngram_rows=9.0,9.0,9.0,9.0,9.0,9.0,9.0,9.0: up to 7 whole numbers",
    "--ngram_rows=2e9,2e9": "--ngram_rows=2000000000.0,2000000000.0: at most 2147483647 rows",
    "--ngram_rows=2.5": "--ngram_rows=2.5: up to 7 whole numbers, each 0 or at least 2",
    "--ngram_rows=0 --bigram_tables=0": "--bigram_tables=0.0: the table of bigrams needs two rows or more",
    "--muon_momentum=0.9": "--muon_momentum=0.9: must be 2 numbers", "--run_label=a/b": "--run_label=a/b.*a file",
    "--stage1.mtp_end=0,1,0": "--stage1.mtp_end=0.0,1.0,0.0: the first weight, of the next token, must be above 0",
    "--muon_warmup=1.5": "--muon_warmup=1.5: must be a whole number of steps, or from 0 to below 1",
    # numbers that do not fit together
    "--model_dim=100": "--model_dim=100.*--num_heads=6.*multiple of 8",
    "--preset=record74 --model_dim=960": "heads of 16 to 128 channels, a power of two; or add",
    "--model_dim=96 --layer0.narrow=1": "heads of 32 to 128 channels, a power of two, in models with narrow layers",
    "--layer3.narrow=1": "--layer3.narrow=True: only for a layer that is not long",
    "--layer6.narrow=1": "--layer6.narrow=True: only for a layer with attention",
    "--model_dim=24 --num_heads=1 --kernels=attention:torch": "--fp8_mlp takes multiples of 16 .* --fp8_mlp=false",
    "--preset=record74 --num_heads=3 --model_dim=384": "the paired layers 0,2,5,9 need an even number of heads",
    "--preset=record74 --depth=8": "--depth=8: the layers of this preset are not those of `wire`",
    "--depth=2": "from 3 to 24 layers", "--depth=x": "--depth=x: expected int, for example --depth=11",
    "--depth=8 --layers=9": "--depth=8: --layers or a checkpoint gives the model 9 layers",
    "--muon_warmup=0.7 --muon_cooldown=0.4": r"--muon_warmup=0.7 --muon_cooldown=0.4: 917 and 524 steps, .* only 1310",
    "--preset=record74 --scheduled_steps=300": "--muon_warmup=300 --muon_cooldown=50: 300 and 50 steps, .* only 340",
    "--dtype=float32": "--kernels=attention:torch", "--device=mps": "trains in --dtype=float32",
    "--scheduled_steps=1000000": "--scheduled_steps=1000000: a run has at most 999999 steps",
    "--scheduled_steps=30 --stage2.share=0.001": "--scheduled_steps=30: each stage needs at least one step",
    "--stage2.share=0": "shares of the stages: 1.0, 0.0, 1.0, 0.0; .* must be 0, all others above 0",
    "--stage4.share=1": "shares of the stages: 1.0, 1.0, 1.0, 1.0; .* the last",
    "--stage2.mtp_end=1": "--stage2.mtp_start=1.0,0.5 --stage2.mtp_end=1.0: both need the same length",
    "--backout_layer=11": "--backout_layer=11: must be 0 to 10, or none",
    "--mlp_ratio=0": "--mlp_ratio=0.0: an MLP of 0 channels",
    "--layer6.paired=true": "--layer6.paired=True: only for a layer with attention",
    "--layer6.skip_from=6": "--layer6.skip_from=6: must be an earlier layer, 0 to 5, or none",
    "--preset=record74 --layer8.two_lanes=false": "--layer8.two_lanes=False: layer 7 has two lanes",
    "--layer5.input_from=5": "--layer5.input_from=5: must be an earlier layer, 0 to 4, or none",
    "--layer6.input_from=2": "--layer6.input_from=2: only for a layer with attention",
    "--layer6.xsa=1": "--layer6.xsa=True: only for a layer with attention",
    "--layer5.xsa=1": "--layer5.xsa=True: only for a layer that is not paired",
    "--layer7.mix=1 --backout_layer=6": "--layer7.mix=True: only for one layer, with value_embed, behind the backout_l",
    "--layer8.mix=1 --backout_layer=8": "--layer8.mix=True: only for one layer, .* behind the backout_layer",
    "--layer8.mix=1 --backout_layer=none": "--layer8.mix=True: only for one layer, .* behind the backout_layer",
    "--layer8.mix=1 --layer10.mix=1": "--layer8.mix=True: only for one layer",
    "--layer6.dynamic=1 --layer7.dynamic=1": "--layer6.dynamic=True: neither this layer nor those up to the next",
    "--preset=cpu --bigram_normal=1": "--vocab_size=257: --bigram_normal needs .* add --bigram_normal=false",
    "--vocab_size=50256": "--vocab_size=50256: --bigram_normal needs .* add --bigram_normal=false",
    "--layers=1 --layer0.attention=false --layer0.paired=false --backout_layer=none":
        "all layers are without attention",
    "--stages=2": "--split_stage=4: must be one of the stages, 1 to 2",
    "--layer3=input_from": "--layer3.input_from=true: expected a number or none, for example --layer3.input_from=None",
    "--val_tokens=1000": "--val_tokens=1000 --val_batch_tokens=262144: the first must be a multiple of the second",
    "--val_batch_tokens=24 --val_tokens=240": "of 16",
    "--micro_batches=3": "--stage1.batch_tokens=131072: must be a multiple of 16 . --micro_batches=3",
    # lengths; values are checked before a length is fitted, and what the length makes of them afterwards
    "--preset=single --train_tokens=2e7 --stages=2 --stage1.share=0": "^shares of the stages: 0.0, 0.0; the sha",
    "--preset=single --train_tokens=2e7 --extension_steps=1000001": "^--extension_steps=1000001: must be from 0 to",
    "--preset=single --train_tokens=100 --scheduled_steps=25 --extension_steps=24":
        "^--table_beta2=1.0: must be from 0 to below 1",
    **{f"--preset=single {length}": rf"^{length}: that is a run of \d+ steps of \d+ tokens; it needs 20, so make"
       for length in ("--train_tokens=1000", "--minutes=0.0001")},
    "--minutes=1e308": "--minutes=1e[+]308: must be from 0 to 1000000000",
    **{f"--minutes=1 --{knob}=30": "^--minutes chooses the steps: leave out --train_tokens, --scheduled_steps, "
       for knob in ("train_tokens", "scheduled_steps", "extension_steps")},
    "--preset=single --train_tokens=1e14": "^--scheduled_steps=[0-9]+: a run has at most 999999 steps, the ext",
    "--train_tokens=many": "^--train_tokens=many: expected a number",
    "--profile=20": "^--profile=20: must be START:COUNT", "--profile=3:0": "^--profile=3:0: must be START:COUNT",
    "--preset=cpu --profile=1758:3": "^--profile=1758:3: .*steps 0 to 1759",
    "--preset=cpu --profile=174:4 --save_every=88": "^--profile=174:4: a checkpoint .* in between; .*--save_every=88",
    # several processes
    ("", 3): "^3 processes do not divide --micro_batches=8: .*$",
    ("", 12): "^--stage1.batch_tokens=131072: .* 16 . --micro_batches=12, one for each of 12 processes; .*"}


@pytest.mark.parametrize("args", REFUSED)
def test_refused_in_one_line_that_names_the_knob(args):
    text, world = args if isinstance(args, tuple) else (args, 1)
    with pytest.raises(UserError, match=REFUSED[args]) as error:
        T.parse_config(text.split(), world)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("args, world, micro_batches", [
    ("", 1, 8), ("", 8, 8), ("", 16, 16), ("--micro_batches=32", 16, 32), ("--micro_batches=2", 4, 4),
    ("--preset=cpu", 8, 8)])
def test_every_rank_has_a_micro_batch(args, world, micro_batches):
    assert T.parse_config(args.split(), world).system.micro_batches == micro_batches


@pytest.mark.parametrize("args", [*(f"--preset={preset}" for preset in T.PRESETS), "--train_tokens=3e7",
                                  "--preset=single --train_tokens=13e6",
                                  "--preset=cpu --train_tokens=5e5 --stages=6 --stage2.share=0.5"])
@pytest.mark.parametrize("base", T.PRESETS)
def test_written_out_config_is_read_back(args, base):
    """Every knob of a run, as render writes it into the log, turns any preset into that run."""
    config = T.parse_config(args.split())
    logged = [f"--{key}={render(value)}" for key, value in flatten(config).items() if render(value) or "prompt" in key]
    assert T.parse_config([f"--preset={base}", *logged]) == config


@pytest.mark.parametrize("preset", T.PRESETS)
@pytest.mark.parametrize("length", [[], ["--train_tokens=7e7"]])
def test_a_setting_that_says_what_the_run_has_anyway_changes_nothing(preset, length):
    """Also one that follows from the length."""
    words = [f"--preset={preset}", *length]
    config = T.parse_config(words)
    learned = {**vars(config.model), **vars(config.schedule), **vars(config.optim), "micro_batches": 0, "dtype": 0}
    for knob, value in flatten(config).items():
        if (knob in learned or knob.startswith("stage")) and (length or "." not in knob):
            assert T.parse_config([*words, f"--{knob}={render(value)}"]) == config, knob


def edited(config, knob, value):
    """The config as an edit of the file makes it, with another value of a knob, for example of stage1.share."""
    item, number, name = re.fullmatch(r"(?:(stage|layer)(\d+)\.)?(\w+)", knob).groups()
    field = f"{item}s" if item else name
    key, section = next((key, each) for key, each in vars(config).items() if hasattr(each, field))
    if item:
        items, i = list(getattr(section, field)), int(number) - FIRST[field]
        items[i] = dataclasses.replace(items[i], **{name: value})
        name, value = field, tuple(items)
    return dataclasses.replace(config, **{key: dataclasses.replace(section, **{name: value})})


@pytest.mark.parametrize("kind", [T.Layer, T.Model, T.Stage, T.Schedule, T.Optim, T.Data, T.System])
def test_every_number_has_bounds(kind):
    """In the file, and on the command line; of several numbers, each."""
    tried = 0
    for name, hint in get_type_hints(kind, include_extras=True).items():
        knob = {T.Layer: f"layer8.{name}", T.Stage: f"stage2.{name}"}.get(kind, name)
        several = get_origin(hint) is tuple and name not in FIRST
        for i, one in enumerate(arg for arg in get_args(hint) if arg is not ...) if several else [(0, hint)]:
            if get_origin(one) is Literal:
                outside = [type(get_args(one)[0])("3")]
            elif get_origin(one) is Annotated:
                number, (low, high, below) = get_args(one)
                whole = float not in (number, *get_args(number))
                outside = [low - 1 if whole else low - 1e-6 * (low == 0) - 0.5 * low, high if below else high * 1.5 + 1,
                           math.nan, math.inf, -math.inf]
                outside = [int(x) if whole and math.isfinite(x) else x for x in outside]
            else:
                assert one not in (int, float, int | None, int | float), f"{name} has no bounds"
                continue
            for value in outside:
                value, tried = ((0.5,) * i + (value,) + (0.5,) * (1 - i) if several else value), tried + 1
                with pytest.raises(UserError, match=rf"^--{knob}=.*: must be "):
                    check_config(edited(RECORD, knob, value))
                with pytest.raises(UserError, match=rf"^--{knob}=.*: (must be|expected) "):
                    T.parse_config([f"--{knob}={render(value)}"])
    assert tried >= 5


def test_a_preset_is_one_entry(monkeypatch, capsys):
    """Its recipe follows the length, and so does its size; `scaled` gives a preset without one its length. It has the
    depth of its layers; --depth makes others."""
    def enter(*preset, **fields):
        monkeypatch.setitem(T.PRESETS, "mine", T.Preset(*preset, **fields))

    def mine(*args, world=1):
        """(the config, whether the length chooses the size)"""
        return (T.parse_config(["--preset=mine", *args], world),
                left_open(read_values(["--preset=mine", *args], T.PRESETS), T.PRESETS)[0])
    own = lambda tokens=340e6, gpus=1: edited(T.recipe(tokens, gpus), "muon_lr", 0.02)
    enter(own(), recipe=own)
    for args, tokens in ([], 340e6), (["--train_tokens=5e7"], 5e7), (["--train_tokens=5e7", "--depth=11"], 5e7):
        for world in 1, 2:
            (config, size_is_open), wanted = mine(*args, world=world), own(tokens, world)
            assert (config.model, config.optim, config.schedule.stages, size_is_open) == (
                wanted.model, wanted.optim, wanted.schedule.stages, len(args) == 1)
    deep = edited(T.recipe(), "layers", T.wire(16))
    enter(deep)
    for args in [], ["--train_tokens=5e7"], ["--depth=16"], ["--layers=16"]:
        config, size_is_open = mine(*args)
        assert config.model == deep.model and config.model.depth == 16 and not size_is_open
        assert [key for key, value in flatten(config).items() if value == 16] == ["layers"]
    config, _ = mine("--train_tokens=5e7")
    assert config == with_knobs(scaled(deep, 5e7), train_tokens=total_tokens(config.schedule))
    check_config(scaled(T.parse_config(["--preset=record74", "--scheduled_steps=200"]), 2e7), 1)  # ends in its warm-up
    assert config.optim.adam_lr == deep.optim.adam_lr < T.recipe(5e7).optim.adam_lr
    assert mine("--depth=6")[0].model.layers == T.wire(6)
    assert T.main(["--preset=mine", "--help"]) == 0 and "\n  --depth=16 " in capsys.readouterr().out
    by_hand = lambda *length: edited(T.recipe(*length), "layer3.xsa", False)  # these layers are of no other depth
    enter(by_hand(), recipe=by_hand)
    for args in [], ["--depth=11"], ["--train_tokens=5e7"]:
        config, size_is_open = mine(*args)
        assert config.model.layers == by_hand().model.layers and not size_is_open
    with pytest.raises(UserError, match="--depth=8: the layers of this preset are not those of `wire`"):
        mine("--depth=8")
    enter(RECORD, gpus=2)  # for whose batches its size is
    assert [mine("--train_tokens=3.49e8", world=world)[0].schedule.stages[0].batch_tokens for world in (1, 2)] == [
        98304, 131072]
    for model in deep.model, RECORD.model:  # older checkpoints have a depth, which need not be that of the layers
        tree = dataclasses.asdict(edited(RECORD, "layers", model.layers))
        tree["model"]["depth"] = 11
        assert config_from_dict(T.Config(), tree).model.layers == model.layers


def test_help_lists_every_knob(capsys):
    """Once, in groups; what most runs set comes first."""
    assert T.main(["--preset=cpu", "-h"]) == 0
    text = capsys.readouterr().out
    knobs = re.findall(r"^  --(\S+?)=(.*?)  +(.*)$", text, re.M)
    names = [knob for knob, *_ in knobs]
    assert {"depth", "adam_every", "stage<n>.lr_mul", "layer<n>.xsa"} < {*names} and len(names) == len({*names})
    groups = re.findall(r"^(\w.*):\n  --(\S+?)=", text, re.M)
    assert groups == [("What most runs set", "model_dim"), ("Model", "vocab_size"), ("Schedule", "scheduled_steps"),
                      ("Optim", "adam_lr"), ("Data", "val_tokens"), ("System", "device")]
    assert "Contents" not in text and names.index("minutes") < names.index("vocab_size")
    assert [knob for knob, _, comment in knobs if not comment and not re.fullmatch(r"layer\d+", knob)] == []
    for key, value in flatten(T.PRESETS["cpu"].config).items():
        if not key.startswith("stage") or key == "stages":
            assert f"\n  --{key}={render(value)}".rstrip() in text
    for field in dataclasses.fields(T.Stage):
        assert f"\n  --stage<n>.{field.name}=" in text


# ---- Schedules -------------------------------------------------------------------------------------------------------
def test_every_step_of_the_record_against_the_oracle():
    assert stage_starts(RECORD74.schedule) == [0, 483, 967, 1450, 1490]
    for step in STEPS:
        got = T.make_plan(RECORD74, step)
        stage = oracles.stage_of(step)
        assert (got.step, got.stage) == (step, stage)
        assert got.micro_batch_tokens == [16384, 32768, 49152, 49152][stage]
        assert got.max_doc_len == [896, 2048, 2048, 2048][stage]
        assert got.lr_factor == pytest.approx(oracles.lr_factor(step), rel=1e-12)
        assert got.momentum == pytest.approx(oracles.muon_momentum(step), rel=1e-12)
        assert len(got.mtp_weights) == len(oracles.mtp_weights(step))
        assert got.mtp_weights == pytest.approx(oracles.mtp_weights(step), abs=1e-12)
        assert got.adam is got.tables is (step % 2 == 1) and got.split is (step == 967) and got.tied is (step <= 967)


def test_momentum_over_fractions_of_the_run():
    """The same as over so many steps; 0 is neither a rise nor a fall."""
    def momenta(*knobs):
        config = T.parse_config(["--preset=record74", "--scheduled_steps=90", "--extension_steps=10", *knobs])
        return [T.make_plan(config, step).momentum for step in range(101)]
    assert momenta("--muon_warmup=0.2", "--muon_cooldown=0.05") == momenta("--muon_warmup=20", "--muon_cooldown=5")
    assert momenta("--muon_warmup=0", "--muon_cooldown=0") == [0.95] * 101
    assert max(momenta("--muon_warmup=101")) < 0.95  # a trial that ends within the warm-up of a longer run
    assert momentum_steps(RECORD74.schedule) == (300, 50) and momentum_steps(RECORD.schedule) == (302, 50)
    assert momenta("--muon_warmup=20", "--muon_cooldown=5")[10:100:89] == pytest.approx([0.9, 0.87])


def test_slow_momentum():
    """From 43 % of the run on; then the fast averages are as fast as at the start. The whole share stays."""
    knobs = "--preset=record74", "--scheduled_steps=90", "--extension_steps=10", "--muon_warmup=20", "--muon_cooldown=5"
    plain, slow = ([T.make_plan(T.parse_config([*knobs, *more]), step) for step in range(101)]
                   for more in ([], ["--slow_momentum=0.56"]))
    assert [p.momentum for p in slow] == [p.momentum for p in plain] == [p.momentum_decay for p in plain]
    assert [p.momentum_decay for p in slow] == [p.momentum for p in plain[:43]] + [0.85] * 58
    assert [p.slow_share for p in slow] == [0.0] * 43 + [0.56] * 58
    assert {p.slow_rate for p in slow} == {1 / 4.2} and {p.slow_share for p in plain} == {0.0}


@pytest.mark.parametrize("scheduled, stage, split", [(144, 3, 97), (145, 3, 97), (145, 1, 1), (146, 4, 147)])
def test_split_is_the_first_odd_step_of_its_stage(scheduled, stage, split):
    """It has to be a step on which Adam updates the still tied pair."""
    config = T.parse_config([f"--scheduled_steps={scheduled}", f"--split_stage={stage}"])
    plans = [T.make_plan(config, step) for step in range(scheduled + 40)]
    assert [(p.step, p.adam, p.tied) for p in plans if p.split] == [(split, True, True)]
    assert [p.tied for p in plans] == [step <= split for step in range(scheduled + 40)]


@pytest.mark.parametrize("args, changes", [  # changes: {first step: classes in the loss of a micro-batch, 0: all}
    ("", {0: 0}),
    ("--sampled_frac=0.5", {0: 8192, 483: 11776, 746: 0}),  # 745 of the 1490 steps; 744 and 745 are one update
    (f"--sampled_frac={746 / 1490}", {0: 8192, 483: 11776, 746: 0}),
    ("--sampled_frac=1", {0: 8192, 483: 11776, 967: 14336, 968: 0}),  # 968 is untied
    ("--sampled_frac=1 --candidates=0.001 --micro_batches=32", {0: 256, 968: 0}),
    ("--sampled_frac=1 --vocab_size=11520", {0: 8192, 483: 0}),  # 11520 classes are fewer than 11776
    ("--sampled_frac=1 --vocab_size=11776", {0: 8192, 483: 0}),
    ("--sampled_frac=1 --vocab_size=11777", {0: 8192, 483: 11776, 967: 0})])
def test_steps_with_a_sampled_softmax(args, changes):
    """64 * N ** 0.5 for N = 16384, 32768, 49152, rounded up to a multiple of 256."""
    config = T.parse_config(["--preset=record74", *args.split()])
    counts = [T.make_plan(config, step).candidates for step in STEPS]
    assert {step: count for step, count in enumerate(counts) if step == 0 or count != counts[step - 1]} == changes


@pytest.mark.parametrize("args", ["--preset=record", "--preset=cpu", "--preset=record74 --sampled_frac=0.5"])
def test_warmup_meets_every_stage_and_every_kind_of_update(args):
    config = T.parse_config(args.split())
    plans = [T.make_plan(config, step) for step in range(stage_starts(config.schedule)[-1])]
    warmup = [plans[step] for step in steps_with_new_keys(plans, set())]
    for kind in (lambda p: (p.stage, p.candidates)), (lambda p: (p.adam, p.tables, p.tied, p.split)):
        assert set(map(kind, warmup)) == set(map(kind, plans))
    assert len(warmup) < (14 if config.optim.average_blend else 10)


# ---- Rotary states ---------------------------------------------------------------------------------------------------
WINDOWS = 384, 896, 1408, 1664


def oracle_states(windows=WINDOWS, scale=0.1):
    states = [(oracles.base_freqs(32), scale)]
    for old, new in zip(windows, windows[1:]):
        states.append(oracles.yarn(*states[-1], old, new))
    return states


def test_rotary_states_against_the_oracle():
    """And in figures: the scale and two frequencies of the last state."""
    states = T.rotary_states(128, WINDOWS)
    for (frequencies, scale), (exact, exact_scale) in zip(states, oracle_states(), strict=True):
        assert frequencies.dtype == np.float64 and frequencies.tolist() == pytest.approx(exact, rel=1e-12)
        assert scale == pytest.approx(exact_scale, rel=1e-12)
    assert [scale, frequencies[8], frequencies[31]] == pytest.approx([0.131778, 0.073630, 0.000225], abs=6e-7)
    first, second = T.rotary_states(24, [16, 16])  # the window stays, and so does the state
    assert np.array_equal(first[0], second[0]) and first[1] == second[1] == 0.1


def test_views_of_the_stages():
    """Windows, scale and tables of the four stages; the final validation has a longer window and nothing else (K10).
    Narrow layers follow the short windows. Rows are short enough for tables on a CPU."""
    small = "--val_tokens=4096", "--val_batch_tokens=2048", *(f"--stage{i}.batch_tokens={128 * i}" for i in range(1, 5))
    views = T.attention_settings(T.parse_config(small), CPU, FP32)
    windows = [(view.short_window, view.long_window, view.pointer_window) for view in views]
    assert windows == [(128, 384, 896), (384, 896, 3072), (640, 1408, 3072), (768, 1664, 3072), (768, 2560, 3072)]
    for narrow, states in (False, oracle_states()), (True, oracle_states((128, 384, 640, 768), 0.13)):
        for view, (frequencies, scale) in zip(views, [*states, states[-1]], strict=True):
            table, factor = view.rotary[narrow]
            assert factor == pytest.approx(scale, rel=1e-12)
            assert table.shape == (4096, 32, 2)  # twice the longest row, for paired heads
            # The angle is an fp32 product of fp32 factors.
            angle = (np.arange(4096, dtype=np.float32)[:, None] * np.array(frequencies, np.float32)).astype(np.float64)
            assert np.abs(table.numpy() - np.stack((np.cos(angle), np.sin(angle)), -1)).max() < 2e-7
    rounded = T.attention_settings(T.parse_config(small), CPU, BF16)[1]  # last
    assert torch.equal(views[1].rotary[False][0].bfloat16(), rounded.rotary[False][0])
    assert T.attention_settings(T.parse_config(["--preset=record74", *small]), CPU, BF16)[0].rotary.keys() == {False}


# ---- Parameter table -------------------------------------------------------------------------------------------------
SMOOTH = "replicated", (0.9, 0.99)


def test_parameter_table():
    """The rates and betas of record 74, and the parameters that its ranks divide."""
    table = {row.label: row for row in T.param_table(RECORD74.model)}
    adam = {label: row for label, row in table.items() if row.optim in ("adam", "replicated")}
    betas = {label: (row.betas[0], row.betas[1] or RECORD74.optim.table_beta2) for label, row in adam.items()}
    assert {label: (*betas[label], row.lr_mul, row.wd_mul) for label, row in adam.items()} == oracles.ADAM_TABLE
    assert [label for label, row in table.items() if row.optim == "adam"] == [
        "value_embeds", "lm_head", "embed", "bigram_embed"]
    assert {label: row.matrix_lr for label, row in table.items() if label not in adam} == {
        "qk_bank": (1,), "vo_bank": (1,), "mlp_bank": (2, 4)}
    assert {label: row.tied_to for label, row in table.items() if row.tied_to} == {"embed": "lm_head"}
    assert RECORD74.optim == T.Optim(adam_lr=0.008, adam_eps=1e-10, adam_wd=0.005, muon_lr=0.023, muon_beta2=0.95,
                                     muon_wd=1.2)


@pytest.mark.parametrize("label, change, message", [
    ("vo_bank", {"optim": "adam"}, "optim='adam': betas=None: must be two numbers from 0 to below 1, the second one"),
    ("vo_bank", {"optim": "muon"}, "optim='muon': must be normuon, adam, rows or replicated"),
    ("vo_bank", {"optim": "rows", "betas": (0.9, None)}, "ngram_embed takes rows, nothing else does"),
    ("smear_gate", {"optim": "normuon", "betas": None, "lr_mul": 1.0, "wd_mul": 1.0}, "takes banks of matrices"),
    ("embed", {"optim": "replicated"}, "head, embedding and lazy tables take adam"),
    ("vo_bank", {"lr_mul": 2.0}, "does not read lr_mul; its factor is matrix_lr"),
    ("vo_bank", {"matrix_lr": (1.0, 2.0, 3.0)}, "its number of matrices is no multiple of the length of matrix_lr, 3"),
    ("smear_gate", {"matrix_lr": (2.0,)}, "does not read matrix_lr; its factor is lr_mul"),
    ("smear_gate", {"label": "vo_bank"}, "optim='normuon': another row has this name"),
    ("smear_gate", {"betas": (0.9,)}, "betas=.0.9,.: must be two numbers"),
    ("smear_gate", {"average": 0.1}, "average=0.1: must be 0 or more, and 0 for rows, replicated and lazy"),
    ("embed", {"average": -1.0}, "average=-1.0: must be 0 or more"),
    ("embed", {"tied_to": "head"}, "tied_to='head': there is no such row")])
def test_rows_that_no_optimizer_can_serve(label, change, message):
    table = [row._replace(**change) if row.label == label else row for row in T.param_table(RECORD74.model)]
    with pytest.raises(UserError, match=f"^param_table, row .*{message}"):
        for row in table:
            T.check_row(row, [each.label for each in table])


def test_parameters_of_features_that_record74_lacks():
    config = T.parse_config(["--preset=record74", "--vocab_size=120", "--layer1.xsa=1", "--layer4=xsa dynamic",
                             "--layer8.mix=1", "--pointer=1", "--ngram_rows=300,200"]).model
    known = {row.label for row in T.param_table(RECORD74.model)}
    rows = {row.label: (row.optim, row.betas, row.lr_mul, row.wd_mul, row.shape, row.dtype)
            for row in T.param_table(config) if row.label not in known}
    assert rows == {  # dynamic from layer 4 on: 2 factors in 6 layers with attention, those of 6 heads, 11 of mixtures
        "dynamic_in": (*SMOOTH, 0.25, 1, (1, 64, 768), BF16), "dynamic_out": (*SMOOTH, 0.25, 1, (29, 64), FP32),
        "xsa_lambdas": (*SMOOTH, 1, 0, (2, 6), FP32), "mix_lambdas": (*SMOOTH, 1, 0, (11,), FP32),
        "pointer_weights": (*SMOOTH, 1, 1, (3, 128, 768), BF16), "pointer_sink": (*SMOOTH, 1, 0, (128,), FP32),
        "pointer_gain": (*SMOOTH, 1, 0, (1,), FP32), "ngram_embed": ("rows", (0.0, None), 75, 5, (500, 768), BF16)}
    found = fresh(3, config)
    a, b, zeros = found["pointer_weights"]
    assert uniform(found["dynamic_in"], 768**-0.5) and not torch.equal(a, b) and not zeros.any()
    assert all(uniform(weight, 3**0.5 * 0.5 * 768**-0.5) for weight in (a, b))
    assert normal(found["pointer_sink"], 128**-0.5) and found["pointer_gain"].tolist() == [1.0]
    assert not any(found[label].any() for label in ("dynamic_out", "xsa_lambdas", "mix_lambdas"))


# ---- Parameters ------------------------------------------------------------------------------------------------------
def test_parameters_of_the_record():
    """The reference counts 543 818 952, with 7 scalars of padding for 8 ranks and a 12th MLP without a layer."""
    model = T.GPT(RECORD74.model, None, BF16, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == 543_818_952 - 7 - 2 * 3072 * 768 and not list(model.buffers())
    for label, p in model.named_parameters():
        assert p.dtype == (FP32 if "lambda" in label else BF16)


def fresh(seed, model=T.Model(vocab_size=2000, model_dim=96)):
    """{label: weights} of a new model."""
    model = T.GPT(model, None, FP32, CPU)
    model.init_weights(seed)
    return {label: p.detach() for label, p in model.named_parameters()}


def test_zeros_and_constants():
    weights = fresh(3)
    zeros = "attn_gate_bank", "ve_gate_bank", "smear_gate", "skip_gate", "bigram_embed", "x0_lambdas", "smear_lambda"
    constants = dict.fromkeys(zeros, 0.0) | dict(backout_lambda=0.5, skip_lambda=-1.5, bigram_lambdas=0.05,
                                                 resid_lambdas=1.1**0.5)
    for label, value in constants.items():
        assert torch.equal(weights[label], torch.full_like(weights[label], value)), label
    post = torch.ones(11, 2, 2)
    post[7:, 0, 1] = 1.5
    assert torch.equal(weights["post_lambdas"], post) and weights["sa_lambdas"].tolist() == [[0.5, 1.0]] * 11
    assert not weights["mlp_bank"][:, 1].any() and torch.equal(weights["embed"], weights["lm_head"].T)


def drawn(x, std, inner, share):
    """Mean, spread and the share within ±inner, to 5 standard errors (bf16 rounds by up to 2^-9)."""
    x, n = x.double().flatten(), x.numel()
    return (abs(x.mean()) < 5 * std / n**0.5 and abs(x.std() / std - 1) < 5 / (2 * n) ** 0.5 + 2**-9
            and abs((x.abs() < inner).double().mean() - share) < 5 * 0.5 / n**0.5 + 2**-9)


def uniform(x, bound):
    return drawn(x, bound / 3**0.5, bound / 2, 0.5) and 0.99 * bound < x.abs().max() <= bound * (1 + 2**-9)


def normal(x, std):
    return drawn(x, std, std, 0.6827)


def test_random_weights():
    """Each matrix by itself, so that none is left out or repeated. The seed decides them."""
    bound, weights, other = 3**0.5 * 0.5 * 96**-0.5, fresh(3), fresh(4)
    matrices = [*weights["qk_bank"].flatten(0, 2), *weights["vo_bank"].flatten(0, 1), *weights["mlp_bank"][:, 0]]
    assert len(matrices) == 51 and all(uniform(matrix, bound) for matrix in matrices)
    tables = [*weights["value_embeds"].view(5, 2048, 96), weights["lm_head"]]
    assert all(normal(table, 0.01) for table in tables[:5]) and normal(tables[5], 0.005)
    heads = [tuple(m.flatten()[:8].tolist()) for m in matrices + tables]
    assert len(set(heads)) == len(heads)
    torch.rand(3)  # the global generator has no say
    assert all(torch.equal(p, weights[label]) for label, p in fresh(3).items())
    assert not any(torch.equal(other[label], weights[label]) for label in ("vo_bank", "embed"))


def test_values_are_those_of_whole_matrices():
    """Three heads are rows of record 74's four matrices a layer, narrow heads their first half."""
    found = fresh(5, T.parse_config(["--preset=single", "--model_dim=96", "--num_heads=3", "--kernels=torch"]).model)
    bound, d = 3**0.5 * 0.5 * 96**-0.5, 32
    drawn = torch.empty(10, 4, 96, 96).uniform_(-bound, bound, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert torch.equal(found["vo_bank"], drawn[:, 2:])
    whole, narrow = [3, 9], [0, 1, 2, 4, 5, 6, 7, 8]  # among the layers with attention
    for rows, name, w in (whole, "", 32), (narrow, "narrow_", 16):
        heads = drawn[rows, :2].view(-1, 2, 3, d, 96)[:, :, :, :w]
        assert torch.equal(found[f"{name}qk_bank"], heads)


WIRED = (
    "narrow paired dynamic", "narrow value_embed xsa", "narrow value_embed paired", "long xsa", "narrow xsa dynamic",
    "narrow paired", "attention=False skip_from=3", "narrow xsa", "narrow value_embed xsa input_from=7",
    "narrow value_embed paired input_from=7", "value_embed long xsa input_from=7 dynamic mix")


def test_wiring():
    """At depth 11 that of records/2026-11-22_model, in `record` without the mixtures and some attention."""
    single, record = (T.parse_config([f"--preset={name}", "--depth=11"]).model.layers for name in ("single", "record"))
    assert T.wire(11) == T.LAYERS == single == tuple(parse_value("layer", text, T.Layer, T.Layer()) for text in WIRED)
    assert record[4] == T.Layer(attention=False, dynamic=True) and record[7] == record[9] == T.Layer(attention=False)
    kept = [layer for i, layer in enumerate(single[:-1]) if i not in (4, 7, 9)]
    assert [layer for i, layer in enumerate(record) if i not in (4, 7, 9)] == [
        *kept, dataclasses.replace(single[-1], mix=False)]
    shorter = T.parse_config(["--preset=record", "--depth=8"]).model
    assert not shorter.layers_with("mix") and shorter.layers_with("attention") == [0, 1, 2, 7]
    for depth in range(3, 25):
        for heads in "6", "3":
            model = T.parse_config([f"--depth={depth}", f"--num_heads={heads}", "--preset=cpu"]).model
            assert len(model.layers) == depth and len(model.layers_with("skip_from")) == 1
            assert model.layers[-1].long and model.layers[-1].mix and model.backout_layer < depth - 1
            assert bool(model.layers_with("paired")) == (heads == "6" and depth > 3)


@pytest.mark.parametrize("width", range(128, 1537, 64))
def test_every_size(width):
    """Any number of heads of 64 and 128 channels, and any depth from 3 to 24, also with FP8."""
    for head, depth in itertools.product((64, 128), (3, 4, 11, 24)):
        if width % head == 0:
            config = T.parse_config(["--preset=single", f"--model_dim={width}", f"--num_heads={width // head}",
                                     f"--depth={depth}"])
            model, shapes = config.model, {row.label: row.shape for row in T.param_table(config.model)}
            assert config.system.fp8_mlp and model.head_dim == head and len(model.layers) == depth
            assert shapes["vo_bank"] == (depth - 1, 2, width, width) and shapes["embed"] == (50304, width)
            heads = sum(math.prod(shape[2:4]) for label, shape in shapes.items() if "narrow" in label and "qk" in label)
            assert heads == (width // 2 if depth > 3 else 0)  # rows of Q of a narrow layer; with 3 layers there is none


def test_rates_of_narrow_models():
    """Half the width, in a short run: Adam's rates grow by the root of 2, those of head and embedding by 2."""
    def rates(*args):
        config = T.parse_config(["--preset=single", "--train_tokens=27e6", *args])
        return {row.label: row.lr_mul for row in T.param_table(config.model)}
    wide, narrow = rates("--model_dim=768"), rates("--model_dim=384", "--num_heads=6")
    assert wide == rates("--model_dim=768", "--width_lr_power=0")
    for label, rate in wide.items():
        factor = 2 if label in ("lm_head", "embed") else 2**0.5
        assert narrow[label] == pytest.approx(factor * rate), label
