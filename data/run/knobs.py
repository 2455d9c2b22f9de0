"""Settings as text: conversion between a config and command-line arguments, log lines and checkpoints.

A config is a frozen dataclass of sections, and a section is a frozen dataclass of knobs. A section may hold several
items of one kind, counted from 1 (stages) or from 0 (layers). Each field of a stage is a knob, stage<n>.<field>. Each
layer is a knob, layer<n>, whose text names the fields in which the layer differs from a default Layer;
layer<n>.<field> changes one field. The numbers of stages and of layers are the knobs `stages` and `layers`.

The type of a field says which values it takes: Literal, or Annotated with Bounds.
"""

import dataclasses
import difflib
import functools
import math
import re
from collections import deque
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints

from data.run.program import UserError

FIRST = {"layers": 0, "stages": 1}  # field that holds several items -> number of its first item
hints_of = functools.cache(get_type_hints)  # a config is read several times, and each call takes .1 ms


class Bounds(NamedTuple):
    """The numbers that a knob takes, from `low` to `high`; `below`: without `high` itself."""

    low: float
    high: float = 10**9
    below: bool = False

    def __contains__(self, value):
        return self.low <= value <= self.high and not (self.below and value == self.high)

    def __str__(self):
        return f"from {self.low} to {'below ' * self.below}{self.high}"


def fields_of(item, prefix=""):
    """Yields (name, value, type) of each field of a section, and in place of its items of theirs."""
    hints = hints_of(type(item), include_extras=True)
    for key, value in vars(item).items():
        if key in FIRST:
            for i, one in enumerate(value, FIRST[key]):
                yield from fields_of(one, f"{key[:-1]}{i}.")
        else:
            yield prefix + key, value, hints[key]


def demand(kind, value) -> str:
    """What a value of this type must be, if it is something else; otherwise ""."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "" if value in kinds else " or ".join(map(str, kinds))
    if origin is Annotated:
        optional = type(None) in get_args(kinds[0])
        return "" if optional and value is None or value in kinds[1] else f"{kinds[1]}{', or none' * optional}"
    if origin is tuple:
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        count = f"{len(kinds)} numbers" * (len(kinds) != len(value))
        return count or next(filter(None, map(demand, kinds, value)), "")
    return ""


def flatten(config) -> dict:
    """{knob: value} of all knobs of the config."""
    flat = {}
    for section in vars(config).values():
        for key, value in vars(section).items():
            flat[key] = len(value) if key in FIRST else value
            for i, item in enumerate(value, FIRST[key]) if key in FIRST else ():
                flat |= {f"layer{i}": item} if key == "layers" else {f"stage{i}.{k}": v for k, v in vars(item).items()}
    return flat


def render(value) -> str:
    """A knob's value as command-line text."""
    if dataclasses.is_dataclass(value):
        defaults = vars(type(value)())
        words = [key if v is True else f"{key}={render(v)}" for key, v in vars(value).items() if v != defaults[key]]
        return " ".join(words) or "default"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_value(key, text, kind, example):
    """Converts `text` to the type `kind`. Raises UserError, whose message shows the example."""
    def finite(part):
        value = float(part)
        if not math.isfinite(value):
            raise ValueError
        return value

    kind = type(get_args(kind)[0]) if get_origin(kind) is Literal else kind
    try:
        if dataclasses.is_dataclass(kind):
            words, hints = (word.partition("=") for word in text.split() if word != "default"), hints_of(kind)
            return kind(**{word: parse_value(f"{key}.{word}", value or "true", hints[word], vars(kind())[word])
                           for word, _, value in words})
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind == int | None:
            return None if text.lower() == "none" else int(text)
        if kind == int | float:
            return int(text) if text.strip("+- _0123456789") == "" else finite(text)
        if kind in (str, int):
            return kind(text)
        return finite(text) if kind is float else tuple(finite(part) for part in text.split(","))
    except (ValueError, KeyError):
        expected = {int: "int", bool: "true or false", float: "float, a finite number", int | None: "a number or none",
                    int | float: "a number"}.get(
            kind, "words that are fields of Layer" if dataclasses.is_dataclass(kind) else "comma-separated numbers")
        raise UserError(f"--{key}={text}: expected {expected}, for example --{key}={render(example)}") from None


def read_arguments(argv) -> dict[str, str]:
    """{key: value} of --key=value and --key value arguments; a later value replaces an earlier one. UserError for other
    arguments, and for an empty value, as an empty variable of a shell makes it, of all but a text."""
    values, arguments = {}, deque(argv)
    while arguments:
        argument = arguments.popleft()
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not equals and (not arguments or arguments[0].startswith("--")):
            near = difflib.get_close_matches(argument, ("test", "data"), 1)
            raise UserError(f"argument '{argument}': write --key=value (see --help)"
                            + "".join(f", or ./run.sh {word}" for word in near))
        values[key] = text if equals else arguments.popleft()
        if not values[key].strip() and key not in ("sample_prompt", "prompt"):
            missing = "is there no checkpoint yet? --save=true makes one"
            hint = missing if key in ("resume", "init_from", "sample") else "give it one, or leave it out"
            raise UserError(f"--{key}= has no value: {hint}")
    return values


# Names that other trainers have for knobs of ours.
ELSEWHERE = {**dict.fromkeys(("lr", "learning_rate", "max_lr"), "--muon_lr and --adam_lr"),
             **dict.fromkeys(("batch_size", "total_batch_size"), "--stage1.batch_tokens, in tokens"),
             **dict.fromkeys(("max_iters", "num_iterations", "num_steps", "steps"), "--scheduled_steps or --minutes"),
             "weight_decay": "--muon_wd and --adam_wd", "n_embd": "--model_dim", "n_head": "--num_heads",
             "n_layer": "--depth"}


def unknown_key(key, known) -> UserError:
    """The error for a key that is not in `known`; it names the knob that other trainers call so, or the nearest key."""
    near = [f"--{name}" for name in difflib.get_close_matches(key, known, 1)]
    hint = f"; here it is {ELSEWHERE[key]}" if key in ELSEWHERE else f"; the nearest is {near[0]}" if near else ""
    return UserError(f"unknown key --{key}{hint} (see --help)")


def override(config, overrides):
    """The config with the values of `overrides`, {knob: text}. Raises UserError for an unknown knob, a bad value, and a
    --depth that differs from the number of layers."""
    overrides = dict(overrides)
    depth = overrides.pop("depth", None)

    def resized(key, items):
        """Added layers are default layers. Added stages repeat the last but one, since the last is the extension."""
        count, end = parse_value(key, overrides.pop(key, str(len(items))), int, len(items)), int(key == "stages")
        if not 1 + end <= count <= 1000:
            raise UserError(f"--{key}={count}: must be {1 + end} or more, and at most 1000")
        new = items[-2:-1] if end else (type(items[0])(),)
        return (items[:len(items) - end] + new * count)[:count - end] + items[len(items) - end:]

    def updated(item, prefix=""):
        hints, new = hints_of(type(item)), {}
        for key, old in vars(item).items():
            if key in FIRST:
                name, items = prefix + key[:-1], enumerate(resized(key, old), FIRST[key])
                new[key] = tuple(updated(parsed(f"{name}{i}", one, type(one)), f"{name}{i}.") for i, one in items)
            else:
                new[key] = parsed(prefix + key, old, hints[key])
        return dataclasses.replace(item, **new)

    def parsed(key, old, kind):
        return parse_value(key, overrides.pop(key), kind, old) if key in overrides else old

    changed = dataclasses.replace(config, **{name: updated(section) for name, section in vars(config).items()})
    if depth is not None and parse_value("depth", depth, int, 11) != changed.model.depth:
        raise UserError(f"--depth={depth}: --layers or a checkpoint gives the model {changed.model.depth} layers")
    if overrides:
        key, known = next(iter(overrides)), flatten(changed)
        if item := re.match(r"(layer|stage)(\d+)", key):
            first, count = FIRST[item[1] + "s"], known[item[1] + "s"]
            if not 0 <= int(item[2]) - first < count:
                raise UserError(f"unknown key --{key}: this run has {item[1]}s {first} to {first + count - 1}")
        items = {name: item for name, item in known.items() if dataclasses.is_dataclass(item)}
        known |= {f"{name}.{field}": 0 for name, item in items.items() for field in vars(item)}
        raise unknown_key(key, [*known, "preset", "depth"])
    return changed


def with_system(config, **knobs):
    """The config with other values for some knobs of System."""
    return dataclasses.replace(config, system=dataclasses.replace(config.system, **knobs))


def read_options(argv, options, aliases, known):
    """({option: value}, {knob: text}) of --key=value arguments, for programs with options of their own.

    options: {option: default value}; aliases: {alias: knob of the trainer}; known: the knobs of the trainer. Raises
    UserError for an unknown key.
    """
    values, knobs = dict(options), {}
    for key, text in read_arguments(argv).items():
        if key in options:
            values[key] = parse_value(key, text, type(options[key]), options[key])
        elif key in known or key in aliases or re.match(r"(stage|layer)\d", key):
            knobs[aliases.get(key, key)] = text
        else:
            raise unknown_key(key, [*options, *aliases, *known])
    return values, knobs


def help_text(config, source) -> str:
    """One line per knob: name, value (for stage<n> the values of all stages), and the knob's comment in `source`."""
    comments, knobs = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.M)), {}
    comments |= {"depth": "number of layers; another number makes them anew, by `wire`"}
    for key, value in flatten(config).items():
        name = re.sub(r"^stage\d+", "stage<n>", key)
        knobs[name] = f"{knobs[name]} {render(value)}" if name in knobs else f"  --{name}={render(value)}"
        if key == "layers":
            knobs |= {"depth": f"  --depth={value}", key: knobs.pop(key)}
        if dataclasses.is_dataclass(value) and f"layer{len(config.model.layers) - 1}" == key:
            knobs |= {f"layer<n>.{field}": f"  --layer<n>.{field}=" for field in vars(value)}
    return "\n".join(f"{knob:<46}  {comments.get(name.split('.')[-1], '')}".rstrip() for name, knob in knobs.items())


def help_page(manual, presets, argv, source) -> str:
    """The manual, then all knobs with the values of the preset that `argv` names, or else of `record`.

    source: the text of train_gpt.py, whose comments explain the knobs.
    """
    preset = next((name for name in presets if {name, f"--preset={name}"} & {*argv}), "record")
    others = ", ".join(name for name in presets if name != preset)
    knobs = help_text(presets[preset].config, source.partition("class Config:")[0])
    return (f"{manual}\nKnobs with the values of --preset={preset} (others: {others}), before --train_tokens or"
            f" --minutes changes batches, rates and steps:\n{knobs}")


def config_from_dict(default, tree):
    """The inverse of `dataclasses.asdict`. A missing knob takes its value from `default`.

    Raises UserError for an unknown knob.
    """
    def section(old, values):
        hints = hints_of(type(old))
        values = {key: value for key, value in values.items() if key != "depth"}  # older ones have it beside the layers
        items = {key: tuple(get_args(hints[key])[0](**item) for item in values[key]) for key in FIRST if key in values}
        return dataclasses.replace(old, **values | items)

    try:
        sections = {name: section(getattr(default, name), values) for name, values in tree.items()}
        config = dataclasses.replace(default, **sections)
        # Through text, so that a value of another type, from an older version, becomes one of today's or an error.
        return override(default, {key: render(value) for key, value in flatten(config).items()})
    except (TypeError, AttributeError) as error:
        raise UserError(f"these settings are those of another train_gpt.py: {error}") from None
