"""From the arguments of a command to the config of a run, and from a checkpoint to that of its model."""

import dataclasses
import re

import torch

from data.run.checkpoint import load_checkpoint
from data.run.program import UserError
from data.run.knobs import config_from_dict, flatten, override, parse_value, read_arguments, render, with_system
from data.run.length import FITTED, SHORTEST_RUN, fit_length, stage_starts
from data.run.limits import check_config, check_values
from data.run.machine import choose_kernels, find_device
from data.run.size import SIZE_KNOBS, SIZES, Size

# Knobs of Data and System that a resumed run has to keep, like all knobs of Model, Schedule and Optim.
# The shards are compared with those of the checkpoint, wherever they are (`compare_shards`).
KEPT_KNOBS = {"seed", "micro_batches", "dtype", "init_from"}


# What a run is called, keeps and shows. A run that begins with the weights of another one has its own.
OUTPUT_KNOBS = ("run_label", "log_dir", "plot", "profile", "save", "save_every", "keep", "resume", "init_from",
                "other_data", "sample_tokens", "sample_prompt")


def parse_config(argv, world, presets, gpu=None):
    """Arguments --preset=name and --key=value -> config for `world` ranks, checked.

    presets: {name: Preset of train_gpt.py}; gpu: see `fit_length`. Raises UserError for an unknown argument, and for
    values that a run does not accept.
    """
    overrides = read_arguments(argv)
    preset, first_step = overrides.pop("preset", None), 0
    if preset not in (None, *presets):
        raise UserError(f"--preset={preset}: known presets are {', '.join(presets)}")
    if "resume" in overrides:
        config, first_step = resumed_config(overrides, preset, world, presets)
    elif "init_from" in overrides:
        config = begun_config(overrides, preset, world, presets)
    else:
        config = preset_config(preset or "record", overrides, world, presets, gpu)
    check_config(config, world)
    if config.system.profile and config.system.profiled.start < first_step:
        raise UserError(f"--profile={config.system.profile}: the resumed run starts at step {first_step}; profile later"
                        " steps")
    return config


def leaves_size_open(argv, presets) -> bool:
    """Whether the size of the model is to suit the length of the run and the GPU (data/run/size.py).

    argv must be valid. A preset of another size, or with layers of its own, keeps them.
    """
    overrides = read_arguments(argv)
    preset = presets[overrides.get("preset", "record")]
    model, has_length = preset.config.model, any(float(overrides.get(knob, 0)) for knob in ("minutes", "train_tokens"))
    by_hand = any(key in SIZE_KNOBS or re.match("depth|layer", key) for key in overrides)
    from_checkpoint = overrides.keys() & {"resume", "init_from"}
    return ((preset.sized == "always" or preset.sized == "given" and has_length)
            and model.is_wired and Size(model.model_dim, model.depth) in SIZES
            and not by_hand and not from_checkpoint and overrides.get("device") != "cpu")


def leaves_rows_open(argv) -> bool:
    """Whether the number of rows of n-grams, if the preset has any, is to suit the memory of the GPU."""
    return not {"ngram_rows", "resume", "init_from"} & read_arguments(argv).keys()


def with_heads(overrides, model):
    """Overrides, with the --num_heads that keep the width of the heads if only --model_dim is among them."""
    width = overrides.get("model_dim", "")
    if "num_heads" in overrides or not width.isdecimal() or int(width) % model.head_dim or not int(width):
        return overrides
    return overrides | {"num_heads": str(int(width) // model.head_dim)}


def with_depth(config, overrides):
    """The config with new layers for the --depth and the --num_heads among the overrides."""
    model = override(config, {key: text for key, text in overrides.items() if key == "num_heads"}).model
    depth = parse_value("depth", overrides.get("depth", str(model.depth)), int, model.depth)
    pairs_fit = model.num_heads % 2 == 0 or not model.layers_with("paired") or not model.is_wired
    if depth == model.depth and pairs_fit:
        return config
    if not model.is_wired or not 3 <= depth <= 24:
        raise UserError(f"--depth={depth}: " + ("from 3 to 24 layers" if model.is_wired else "the layers of this preset"
                        " are not those of `wire`; take another preset, or change them with --layers and --layer<n>"))
    layers = model.rewired(depth, model.num_heads % 2 == 0)
    return dataclasses.replace(config, model=dataclasses.replace(
        config.model, layers=layers, backout_layer=layers[-1].input_from))


def preset_config(name, overrides, world, presets, gpu=None):
    """A preset with overrides, and with the batches, rates and steps that --train_tokens or --minutes gives it."""
    preset = presets[name]
    overrides = with_heads(overrides, preset.config.model)
    base = with_depth(preset.config, overrides)
    return with_length(base, overrides, (preset.config.schedule, preset.gpus), world, gpu)


def with_length(base, overrides, made_for, world, gpu=None):
    """The config `base` with the overrides, with at least a micro-batch for each rank, and with the length that the
    overrides ask for. The last three arguments are those of `fit_length`.

    A setting is set by hand if the length would have given it another value. So no setting that says what the run has
    anyway changes the run.
    """
    config, by_hand = override(base, overrides), set()
    check_values(config)  # `fit_length` computes with them
    asked = config.schedule
    if asked.minutes and overrides.keys() & {"train_tokens", "scheduled_steps", "extension_steps"}:
        raise UserError("--minutes chooses the steps: leave out --train_tokens, --scheduled_steps, --extension_steps")
    wanted = {key: value for key, value in flatten(config).items() if key in overrides and FITTED.fullmatch(key)}
    while True:
        config = override(base, {key: overrides[key] for key in overrides.keys() - (wanted.keys() - by_hand)})
        if 0 < config.system.micro_batches < world:
            config = with_system(config, micro_batches=world)
        config = fit_length(config, by_hand, made_for, world, gpu)
        found = flatten(config)
        if not (others := {key for key, value in wanted.items() if found[key] != value}):
            break
        by_hand |= others
    steps, knob = config.schedule.scheduled_steps, "minutes" if asked.minutes else "train_tokens"
    if getattr(asked, knob) and "scheduled_steps" not in overrides and steps < SHORTEST_RUN:
        raise UserError(f"--{knob}={getattr(asked, knob):g}: that is a run of {steps} steps of"
                        f" {config.schedule.stages[0].batch_tokens} tokens; it needs {SHORTEST_RUN}, so make it longer")
    return config


def begun_config(overrides, preset, world, presets):
    """The config of a new run that begins with the weights of the checkpoint that --init_from names: the settings of
    the checkpoint but OUTPUT_KNOBS, with the overrides, and with the batches, rates and steps of a --train_tokens or
    --minutes.

    Raises UserError when an override changes the model, and for a preset.
    """
    path, default = overrides["init_from"], presets["record74"].config
    if preset:
        raise UserError(f"--init_from={path}: the checkpoint brings its settings; leave out --preset={preset}")
    saved = config_from_dict(default, load_checkpoint(path)["config"])
    # The number of micro-batches suited the batches and the GPU of the checkpoint's run.
    saved = with_system(saved, micro_batches=0, **{key: getattr(default.system, key) for key in OUTPUT_KNOBS})
    saved = dataclasses.replace(saved, schedule=dataclasses.replace(saved.schedule, train_tokens=0))
    config = override(saved, overrides)
    if config.model != saved.model:
        changed = (f"--{key}" for key in overrides if key.startswith("layer")
                   or getattr(config.model, key, None) != getattr(saved.model, key, None))
        raise UserError(f"--init_from={path}: that model is another one; leave out {', '.join(changed)}")
    return with_length(saved, overrides, (saved.schedule, 1), world)


def resumed_config(overrides, preset, world, presets):
    """(config of the checkpoint that --resume names, its step). Overrides may change only the knobs of Data and System
    that are not in KEPT_KNOBS: machine, FP8, output, validation.

    Raises UserError when an override or the preset changes another knob, and when the run is finished.
    """
    path = overrides["resume"]
    state = load_checkpoint(path)
    default = presets["record74"].config
    saved = with_system(config_from_dict(default, state["config"]), profile="", other_data=False)
    wanted = preset_config(preset, overrides, world, presets) if preset else override(saved, overrides)
    config = override(saved, allowed_changes(path, wanted, saved, overrides, preset))
    step, total = state["step"], stage_starts(config.schedule)[-1]
    if step >= total:
        raise UserError(f"--resume={path}: that run is finished, step {step} of {total}: resume an earlier checkpoint,"
                        " or start a longer run")
    return config, step


def allowed_changes(path, wanted, saved, overrides, preset) -> dict[str, str]:
    """The overrides of a resumed run. Raises UserError when they or the preset would change its training.

    path: the checkpoint. wanted, saved: the config of the arguments and of the checkpoint.
    """
    free = {*vars(saved.data), *vars(saved.system)} - KEPT_KNOBS
    new, old = flatten(wanted), flatten(saved)
    if overrides.get("micro_batches", "0") == "0":  # the saved number was chosen, or raised to that of the ranks
        new["micro_batches"] = old["micro_batches"]
    differing = [f"{key} is {render(new.get(key, 'missing'))} here, {render(old.get(key, 'missing'))} there"
                 for key in new | old if key not in free and new.get(key) != old.get(key)]
    if differing:
        given = [f"--preset={preset}"] * bool(preset)
        given += [f"--{key}" for key in ("minutes", "train_tokens") if key in overrides]
        advice = f"; leave out {' and '.join(given)}, the checkpoint brings its settings" if given else ""
        raise UserError(f"--resume={path}: that run has another config; {'; '.join(differing)}{advice}")
    return {key: text for key, text in overrides.items() if key in free}


def checkpoint_config(saved, default, knobs):
    """(config, implementations of the operations, device) for the model of a checkpoint, on a GPU if there is one.

    saved: "config" of the checkpoint; default: config of the knobs that it lacks; knobs: {name: text}, overrides.
    Raises UserError for bad knobs.
    """
    config = config_from_dict(default, saved)
    device = knobs.get("device") or ("cuda" if torch.cuda.device_count() else "cpu")
    dtype = knobs.get("dtype") or ("float32" if device == "cpu" else config.system.dtype)
    kernels = "torch" if dtype == "float32" else config.system.kernels
    for_reading = {"device": device, "dtype": dtype, "kernels": kernels, "resume": "", "profile": ""}
    config = override(config, for_reading | knobs)
    config = with_system(config, micro_batches=config.system.micro_batches or 1)
    check_config(config)
    device = find_device(config)
    config, ops, _ = choose_kernels(config, device)
    return config, ops, device
