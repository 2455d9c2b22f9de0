"""The config of a run. Its settings go one way: text -> values -> config -> checks.

A config is a frozen dataclass of sections, and a section is a frozen dataclass of knobs, whose types say which values
they take: Literal, or Annotated with Bounds. stage<n>.<field>, counted from 1, and layer<n>.<field>, counted from 0,
are knobs, too. layer<n> is a whole layer: its text names the fields in which it differs from a default Layer. The knobs
`stages` and `layers` are their numbers. What the user has set is a dictionary, {knob: value}, in which `preset` and
`depth` stand beside the knobs.

Importing this file takes no torch, since other programs read their arguments by it.
"""

import dataclasses
import difflib
import functools
import math
import re
import shlex
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints

from data import NGRAM_FACTORS
from data.run.length import (
    BORDERS, CPU_SECONDS_PER_TOKEN, SHORTEST_RUN, SIZE_KNOBS, Size, h100s, momentum_steps, scaled, seconds,
    stage_starts, total_tokens, with_steps)
from data.run.program import UserError


# ---- Sections of knobs that no model depends on; train_gpt.py has the others ----------------------------------------

class Bounds(NamedTuple):
    """The numbers that a knob takes, from `low` to `high`; `below`: without `high` itself."""

    low: float
    high: float = 10**9
    below: bool = False

    def __contains__(self, value):
        return self.low <= value <= self.high and not (self.below and value == self.high)

    def __str__(self):
        return f"from {self.low} to {'below ' * self.below}{self.high}"


class Steps(Bounds):
    """A number of steps, or below 1 a part of the run."""

    def __contains__(self, value):
        return super().__contains__(value) and (value < 1 or type(value) is int)

    def __str__(self):
        return "a whole number of steps, or from 0 to below 1, a part of the run"


Whole, Count = Annotated[int, Bounds(0, 10**9)], Annotated[int, Bounds(1, 10**9)]
Period = Annotated[int | float, Steps(0, 10**6)]


@dataclass(frozen=True)
class Data:
    """Files of tokens, and the size of a validation."""

    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # read in name order, in $DATA_PATH or this folder
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # like train_files
    val_tokens: Count = 10485760  # validate on the first tokens of the validation files, on all if they hold fewer
    val_batch_tokens: Count = 262144  # tokens per validation forward pass; documents are cut at its end
    val_share: Annotated[float, Bounds(0, 1)] = 0.0  # of the run's tokens; all validations but the last read so many


@dataclass(frozen=True)
class System:
    """Machine, numerics and output of one run."""

    run_label: str = "run"  # first part of the log's file name
    device: Literal["cuda", "cpu", "mps"] = "cuda"  # cuda, cpu or mps, the GPU of a Mac, which nobody has tried
    seed: Annotated[int, Bounds(0, 2**63 - 1)] = 1337  # seed of the initial weights
    micro_batches: Whole = 8  # forward passes per step of all ranks, at least one each (0: the fewest for GPU and data)
    val_every: Period = 250  # steps between validations, or below 1 a part of the run (0: one at the end)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of activations: bfloat16 or float32
    fp8: bool = True  # FP8 training head, if the GPU has FP8
    fp8_mlp: bool = False  # FP8 MLPs in training, if the GPU has FP8, in bfloat16, with our kernels (PR 349)
    fp8_qkv: bool = False  # FP8 projections to queries, keys and values in training, under the same conditions
    cuda_graphs: bool = True  # replay each micro-step and each update as a CUDA graph; takes more memory
    kernels: str = "auto"  # auto, torch (plain PyTorch everywhere), or op:choice,op:choice
    log_dir: str = "logs"  # folder of the logs, relative to this folder
    plot: bool = False  # at the end, draw the losses of validation and training into an .svg file beside the log
    profile: str = ""  # START:COUNT: trace these steps and log where their time went (records/guide.md)
    save: bool = False  # write a checkpoint at the end, into a folder beside the log
    save_every: Whole = 0  # write a checkpoint every so many steps and at the end (0: none)
    keep: Count = 2  # number of checkpoints of a run to keep, the newest ones
    resume: str = ""  # checkpoint to continue, with the settings stored in it
    other_data: bool = False  # resume on other shards than those of the checkpoint, at the same shard and document
    init_from: str = ""  # checkpoint whose weights and settings a new run begins with; head and embedding are untied
    sample_tokens: Whole = 0  # tokens of text to generate at the end
    sample_prompt: str = ""  # beginning of this text

    @property
    def profiled(self) -> range:
        """The steps to profile. Without --profile, an empty range from -1, which no step number equals."""
        start, count = map(int, self.profile.split(":")) if self.profile else (-1, 0)
        return range(start, start + count)

    def val_steps(self, total) -> set[int]:
        """The steps before which a run of `total` steps validates; it also does so at its end."""
        every = self.val_every if self.val_every >= 1 else max(1, self.val_every * total)
        return {round(i * every) for i in range(math.ceil(total / every))} if self.val_every else set()


FIRST = {"layers": 0, "stages": 1}  # field that holds several items -> number of its first item
# A config is read several times, and each call takes .1 ms.
hints_of = functools.cache(functools.partial(get_type_hints, include_extras=True))
# Knobs of Data and System that a resumed run has to keep, like all knobs of Model, Schedule and Optim.
# The shards are compared with those of the checkpoint, wherever they are (`compare_shards`).
KEPT_KNOBS = {"seed", "micro_batches", "dtype", "init_from"}
# What a run is called, keeps and shows. A run that begins with the weights of another one has its own.
OUTPUT_KNOBS = ("run_label", "log_dir", "plot", "profile", "save", "save_every", "keep", "resume", "init_from",
                "other_data", "sample_tokens", "sample_prompt")
# The knobs with which --help begins.
MAIN_KNOBS = ("minutes", "train_tokens", "model_dim", "depth", "seed", "train_files", "val_files", "save", "resume",
              "init_from", "run_label", "plot")
# Names that other trainers have for knobs of ours.
ELSEWHERE = {**dict.fromkeys(("lr", "learning_rate", "max_lr"), "--muon_lr, --adam_lr and --table_lr"),
             **dict.fromkeys(("batch_size", "total_batch_size"), "--stage1.batch_tokens, in tokens"),
             **dict.fromkeys(("max_iters", "num_iterations", "num_steps", "steps"), "--scheduled_steps or --minutes"),
             "weight_decay": "--muon_wd and --adam_wd", "n_embd": "--model_dim", "n_head": "--num_heads",
             "n_layer": "--depth"}


# ---- Knobs: their names, types and texts -----------------------------------------------------------------------------

def knobs_of(config):
    """Yields (name, value, type) of each knob, with the fields of each layer after the layer."""
    for section in vars(config).values():
        for key, value in vars(section).items():
            if key not in FIRST:
                yield key, value, hints_of(type(section))[key]
                continue
            yield key, len(value), int
            for i, item in enumerate(value, FIRST[key]):
                if key == "layers":
                    yield f"layer{i}", item, type(item)
                for field, one in vars(item).items():
                    yield f"{key[:-1]}{i}.{field}", one, hints_of(type(item))[field]


def flatten(config) -> dict:
    """{knob: value} of all knobs of the config; a layer is one knob."""
    return {name: value for name, value, _ in knobs_of(config) if not ("." in name and name.startswith("layer"))}


def with_knobs(config, **knobs):
    """The config with other values for some fields of its sections. TypeError for a field that no section has."""
    sections = {name: dataclasses.replace(section, **{key: knobs.pop(key) for key in vars(section).keys() & knobs})
                for name, section in vars(config).items()}
    return dataclasses.replace(config, **sections, **knobs)


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


def render(value) -> str:
    """A knob's value as command-line text."""
    if dataclasses.is_dataclass(value):
        defaults = vars(type(value)())
        words = [key if v is True else f"{key}={render(v)}" for key, v in vars(value).items() if v != defaults[key]]
        return " ".join(words) or "default"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


READERS = {  # type -> what a text of it must be, and a function that reads the text; else a tuple of numbers
    str: ("a text", str),
    int: ("int", int),
    float: ("float, a finite number", float),
    bool: ("true or false", lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()]),
    int | None: ("a number or none", lambda text: None if text.lower() == "none" else int(text)),
    int | float: ("a number", lambda text: int(text) if text.strip("+- _0123456789") == "" else float(text))}


def parse_value(key, text, kind, example):
    """Converts `text` to the type `kind`. Raises UserError, whose message shows the example."""
    if get_origin(kind) in (Annotated, Literal):
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else type(get_args(kind)[0])
    expected, read = READERS.get(kind, ("comma-separated numbers", lambda text: tuple(map(float, text.split(",")))))
    try:
        if not dataclasses.is_dataclass(kind):
            value = read(text)
            if not all(math.isfinite(x) for x in (value if type(value) is tuple else [value]) if type(x) is float):
                raise ValueError
            return value
        expected, hints, values = f"words that are fields of {kind.__name__}", hints_of(kind), vars(kind())
        words = (word.partition("=") for word in text.split() if word != "default")
        return kind(**{word: parse_value(f"{key}.{word}", value or "true", hints[word], values[word])
                       for word, _, value in words})
    except (ValueError, KeyError):
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


def read_options(argv, options, aliases, known):
    """({option: value}, {knob: text}) of --key=value arguments, for programs with options of their own. options:
    {option: default value}; aliases: {alias: knob}; known: the knobs. Raises UserError for an unknown key."""
    values, texts = dict(options), {}
    for key, text in read_arguments(argv).items():
        if key in options:
            values[key] = parse_value(key, text, type(options[key]), options[key])
        elif key in {*aliases, *known} or re.match(r"(stage|layer)\d", key):
            texts[aliases.get(key, key)] = text
        else:
            raise unknown_key(key, [*options, *aliases, *known])
    return values, texts


def unknown_key(key, known) -> UserError:
    """The error for a key that is not in `known`; it names the knob that other trainers call so, or the nearest key."""
    near = [f"; the nearest is --{name}" for name in difflib.get_close_matches(key, known, 1)]
    hint = f"; here it is {ELSEWHERE[key]}" if key in ELSEWHERE else "".join(near)
    return UserError(f"unknown key --{key}{hint} (see --help)")


def read_texts(texts, config) -> dict:
    """{knob: text} -> {knob: value}. The config has the types of the knobs, and examples for messages. Raises UserError
    for an unknown knob, and for a text that is not of the type of its knob."""
    known = {name: (kind, value) for name, value, kind in knobs_of(config)} | {"depth": (int, config.model.depth)}
    first, values = {"layer": "layer0", "stage": "stage1"}, {}
    for key, text in texts.items():
        # The config need not have this stage or layer, but the first one has the same fields.
        alike = re.sub(r"^(layer|stage)\d+", lambda item: first[item[1]], key)
        if not (found := known.get(key) or known.get(alike)):
            raise unknown_key(key, [*known, "preset"])
        values[key] = parse_value(key, text, *found)
    return values


def read_values(argv, presets) -> dict:
    """{knob: value} of the arguments, --check left out. Raises UserError. presets: {name: Preset of train_gpt.py}."""
    texts = read_arguments(arg for arg in argv if arg != "--check")
    preset = texts.pop("preset", None)
    if preset == "short":
        raise UserError("--preset=short: that run is --preset=single --train_tokens=27e6 now")
    if preset not in (None, *presets):
        raise UserError(f"--preset={preset}: known presets are {', '.join(presets)}")
    return read_texts(texts, presets[preset or "record"].config) | ({"preset": preset} if preset else {})


# ---- Values -> config ------------------------------------------------------------------------------------------------

def with_values(config, values):
    """The config with other values for some knobs, {knob: value}. Raises UserError for the number of a stage or of a
    layer that the config does not have, and for a `depth` that differs from the number of layers."""
    fields = {"layers": config.model.layers, "stages": config.schedule.stages}
    for key, items in fields.items():
        count, end = values.get(key, len(items)), int(key == "stages")
        if not 1 + end <= count <= 1000:
            raise UserError(f"--{key}={count}: must be {1 + end} or more, and at most 1000")
        # Added layers are default layers. Added stages repeat the last but one, since the last is the extension.
        added = items[-2:-1] if end else (type(items[0])(),)
        items = (items[:len(items) - end] + added * count)[:count - end] + items[len(items) - end:]
        fields[key] = tuple(
            dataclasses.replace(values.get(name := f"{key[:-1]}{i}", item), **{
                field: values[f"{name}.{field}"] for field in vars(item) if f"{name}.{field}" in values})
            for i, item in enumerate(items, FIRST[key]))
    plain = {key for section in vars(config).values() for key in vars(section)}
    changed = with_knobs(config, **{key: value for key, value in (values | fields).items() if key in plain})
    if (depth := values.get("depth")) not in (None, changed.model.depth):
        raise UserError(f"--depth={depth}: --layers or a checkpoint gives the model {changed.model.depth} layers")
    known = {name for name, *_ in knobs_of(changed)} | {"depth"}
    if foreign := [key for key in values if key not in known]:
        item = re.match("layer|stage", foreign[0])[0] + "s"
        last = FIRST[item] + len(fields[item]) - 1
        raise UserError(f"unknown key --{foreign[0]}: this run has {item} {FIRST[item]} to {last}")
    return changed


def override(config, texts):
    """`with_values` of {knob: text}. Raises UserError."""
    return with_values(config, read_texts(texts, config))


DROPPED = "depth", "data_end", "compile", "combo_kernels", "tokens_per_doc"  # knobs of older checkpoints


def config_from_dict(default, tree):
    """The inverse of `dataclasses.asdict`. A missing knob takes its value from `default`. Raises UserError for an
    unknown knob."""
    def section(old, values):
        hints = hints_of(type(old))
        values = {key: value for key, value in values.items() if key not in DROPPED}
        values |= {"keep": 10**9} if values.get("keep") == 0 else {}  # which meant: all
        if "adam_lr" in values and "table_lr" not in values:  # adam_lr was that of an update after two steps
            factor = (values.get("adam_every", 2) / 2) ** 0.25
            values |= {"table_lr": values["adam_lr"], "adam_lr": factor * values["adam_lr"]}
        items = {key: tuple(get_args(hints[key])[0](**item) for item in values[key]) for key in FIRST if key in values}
        return dataclasses.replace(old, **values | items)

    try:
        sections = {name: section(getattr(default, name), values) for name, values in tree.items()}
        config = dataclasses.replace(default, **sections)
        # Through text, so that a value of another type, from an older version, becomes one of today's or an error.
        return override(default, {key: render(value) for key, value in flatten(config).items()})
    except (TypeError, AttributeError) as error:
        raise UserError(f"these settings are those of another train_gpt.py: {error}") from None


def help_page(manual, presets, argv, source) -> str:
    """The manual up to its contents, then all knobs with the values of the preset that `argv` names, or else of
    `record`, in groups: a line for each with its name, its value (for stage<n> those of all stages), and its comment
    here or in `source`, the text of train_gpt.py."""
    own = Path(__file__).read_text(encoding="utf-8").partition("# ---- Knobs:")[0]
    preset = next((name for name in presets if {name, f"--preset={name}"} & {*argv}), "record")
    config, lines = presets[preset].config, {}
    comments = {"depth": "number of layers; another number makes them anew, by `wire`",
                **dict(re.findall(r"^    (\w+): .*?  # (.*)$", source.partition("class Config:")[0] + own, re.M))}
    for key, value in flatten(config).items():
        name = re.sub(r"^stage\d+", "stage<n>", key)
        if key == "layers":
            lines["depth"] = f"  --depth={value}"
        lines[name] = f"{lines[name]} {render(value)}" if name in lines else f"  --{name}={render(value)}"
        if key == f"layer{config.model.depth - 1}":
            lines |= {f"layer<n>.{field}": f"  --layer<n>.{field}=" for field in vars(value)}
    titles = {key: name.capitalize() for name, section in vars(config).items() for key in vars(section)}
    titles |= dict.fromkeys(MAIN_KNOBS, first := "What most runs set")
    groups = {title: [] for title in (first, *map(str.capitalize, vars(config)))}
    for name, line in lines.items():
        rows = groups[titles[re.sub("^(layer|stage).*", r"\1s", name)]]
        rows.append(f"{line:<46}  {comments.get(name.split('.')[-1], '')}".rstrip())
    knobs = "\n\n".join("\n".join([f"{title}:", *rows]) for title, rows in groups.items())
    others = ", ".join(name for name in presets if name != preset)
    manual = manual.partition("\nContents")[0]  # what follows is for readers of the code
    return (f"{manual}\nKnobs with the values of --preset={preset} (others: {others}), before --train_tokens or"
            f" --minutes changes what follows from the length.\n\n{knobs}")


# ---- Presets, checkpoints and lengths --------------------------------------------------------------------------------

def make_config(values, world, presets, gpu=1.0):
    """What the user has set, {knob: value} -> config for `world` ranks, checked. presets: {name: Preset of
    train_gpt.py}; gpu: see `with_length`. Raises UserError for values that a run does not accept."""
    preset, first_step = values.get("preset"), 0
    values = {key: value for key, value in values.items() if key != "preset"}
    if "resume" in values:
        config, first_step = resumed_config(values, preset, world, presets)
    elif "init_from" not in values:
        config = preset_config(preset or "record", values, world, presets, gpu)
    elif preset:
        raise UserError(f"--init_from={values['init_from']}: the checkpoint brings its settings; leave out"
                        f" --preset={preset}")
    else:
        config = begun_config(values, world, presets["record74"].config, gpu)
    check_config(config, world, first_step)
    return config


def left_open(values, presets) -> tuple[bool, float]:
    """(whether the size of the model is to suit the length of the run (data/run/length.py), in a preset with a recipe;
    the most n-gram embeddings that the run may have, or 0: as many as its config says). A preset with a size or with
    layers of its own keeps them."""
    continues, has_length = {"resume", "init_from"} & values.keys(), values.get("minutes") or values.get("train_tokens")
    by_hand = any(key in SIZE_KNOBS or re.match("depth|layer", key) for key in values)
    preset = presets[values.get("preset", "record")]
    model = preset.config.model
    keeps = by_hand or continues or not model.is_wired or Size(model.model_dim, model.depth) not in BORDERS
    size_is_open = preset.recipe and has_length and not keeps and values.get("device", "cuda") == "cuda"
    return bool(size_is_open), 0.0 if "ngram_rows" in values or continues else preset.most_rows


def preset_config(name, values, world, presets, gpu=1.0):
    """A preset with other values, and with what follows from train_tokens or minutes. A model_dim alone keeps the width
    of the heads. Another depth makes the layers anew, and so does an odd number of heads where layers are paired."""
    config, gpus, recipe, _ = presets[name]
    model, width = config.model, values.get("model_dim", 0)
    if "num_heads" not in values and width > 0 and width % model.head_dim == 0:
        values = values | {"num_heads": width // model.head_dim}
    heads, depth, rewired = values.get("num_heads", model.num_heads), values.get("depth", model.depth), {}
    if depth != model.depth or heads % 2 and model.layers_with("paired") and model.is_wired:
        if not model.is_wired or not 3 <= depth <= 24:
            raise UserError(f"--depth={depth}: " + (
                "from 3 to 24 layers" if model.is_wired else "the layers of this preset are not those of `wire`; take"
                " another preset, or change them with --layers and --layer<n>"))
        layers = model.rewired(depth, heads % 2 == 0)
        rewired = {"layers": layers, "backout_layer": layers[-1].input_from}

    def of_length(tokens):
        found = recipe(tokens, world) if recipe else scaled(config, tokens, world / gpus)
        return with_knobs(found, **rewired)
    return with_length(with_knobs(config, **rewired), values, of_length, world, gpu)


def with_length(base, values, of_length, world, gpu=1.0):
    """The config `base` with other values, with at least a micro-batch for each rank, and with the length that the
    values ask for. What is set by hand stays; the steps suit it. of_length: function (tokens) -> the config of a run of
    so many tokens. gpu: how many H100s a GPU is worth, for --minutes."""
    config = with_values(base, values)
    check_config(config)  # the steps are computed with the values
    asked, knob = config.schedule, "minutes" if config.schedule.minutes else "train_tokens"
    if asked.minutes and values.keys() & {"train_tokens", "scheduled_steps", "extension_steps"}:
        raise UserError("--minutes chooses the steps: leave out --train_tokens, --scheduled_steps, --extension_steps")
    tokens = asked.train_tokens
    if asked.minutes and config.system.device != "cuda":
        tokens = 60 * asked.minutes * world / CPU_SECONDS_PER_TOKEN
    elif asked.minutes:
        size = Size(config.model.model_dim, config.model.depth)
        tokens = 60 * asked.minutes / seconds(size, 1, h100s(gpu, world))
    config = with_values(of_length(tokens), values) if tokens else config
    if 0 < config.system.micro_batches < world:
        config = with_knobs(config, micro_batches=world)
    if not tokens:
        return config
    # A micro-batch has a multiple of 16 tokens, unless the batch was set by hand.
    unit, schedule = 16 * (config.system.micro_batches or world), config.schedule
    schedule = dataclasses.replace(schedule, stages=tuple(
        stage if f"stage{i}.batch_tokens" in values else dataclasses.replace(
            stage, batch_tokens=-(-stage.batch_tokens // unit) * unit) for i, stage in enumerate(schedule.stages, 1)))
    if "scheduled_steps" not in values:
        schedule = with_steps(schedule, [stage.batch_tokens for stage in schedule.stages], tokens,
                              schedule.extension_steps if "extension_steps" in values else None)
        if schedule.scheduled_steps < SHORTEST_RUN:
            raise UserError(
                f"--{knob}={getattr(asked, knob):g}: that is a run of {schedule.scheduled_steps} steps of"
                f" {schedule.stages[0].batch_tokens} tokens; it needs {SHORTEST_RUN}, so make it longer")
    schedule = dataclasses.replace(schedule, train_tokens=0 if asked.minutes else total_tokens(schedule))
    return dataclasses.replace(config, schedule=schedule)


def read_checkpoint(path, default, **knobs):
    """(config of a checkpoint with other values for some knobs, its step). default: see `config_from_dict`."""
    from data.run import state  # which imports torch
    saved = state.load_checkpoint(path)
    return with_knobs(config_from_dict(default, saved["config"]), **knobs), saved["step"]


def begun_config(values, world, default, gpu):
    """The config of a new run that begins with the weights of the checkpoint that --init_from names: the settings of
    the checkpoint but OUTPUT_KNOBS, with other values, and with the batches, rates and steps of a --train_tokens or
    --minutes. Raises UserError when a value changes the model."""
    path, own = values["init_from"], {key: getattr(default.system, key) for key in OUTPUT_KNOBS}
    # The number of micro-batches suited the batches and the GPU of the checkpoint's run, not those of this one.
    saved, _ = read_checkpoint(path, default, **own, micro_batches=0, train_tokens=0)
    config = with_values(saved, values)
    if config.model != saved.model:
        changed = (f"--{key}" for key in values if key.startswith("layer")
                   or getattr(config.model, key, None) != getattr(saved.model, key, None))
        raise UserError(f"--init_from={path}: that model is another one; leave out {', '.join(changed)}")
    return with_length(saved, values, lambda tokens: scaled(saved, tokens), world, gpu)  # its batches suited its GPUs


def resumed_config(values, preset, world, presets):
    """(config of the checkpoint that --resume names, its step). The values may change only the knobs of Data and System
    that are not in KEPT_KNOBS: machine, FP8, output, validation. Raises UserError when a value or the preset
    changes another knob, and when the run is finished."""
    path = values["resume"]
    saved, step = read_checkpoint(path, presets["record74"].config, profile="", other_data=False)
    wanted = preset_config(preset, values, world, presets) if preset else with_values(saved, values)
    free, new, old = {*vars(saved.data), *vars(saved.system)} - KEPT_KNOBS, flatten(wanted), flatten(saved)
    if not values.get("micro_batches"):  # the saved number was chosen, or raised to that of the ranks
        new["micro_batches"] = old["micro_batches"]
    if differing := [f"{key} is {render(new.get(key, 'missing'))} here, {render(old.get(key, 'missing'))} there"
                     for key in new | old if key not in free and new.get(key) != old.get(key)]:
        given = [f"--preset={preset}"] * bool(preset)
        given += [f"--{key}" for key in ("minutes", "train_tokens") if key in values]
        advice = f"; leave out {' and '.join(given)}, the checkpoint brings its settings" if given else ""
        raise UserError(f"--resume={path}: that run has another config; {'; '.join(differing)}{advice}")
    if step >= (total := stage_starts(saved.schedule)[-1]):
        raise UserError(f"--resume={path}: that run is finished, step {step} of {total}: resume an earlier checkpoint,"
                        f" or begin another run with its weights, --init_from={path}")
    return with_values(saved, {key: value for key, value in values.items() if key in free}), step


# ---- Checks ----------------------------------------------------------------------------------------------------------

def check_config(config, world=None, first_step=0):
    """Raises UserError for the first knob whose value is never accepted. With the number of ranks, `world`, also when
    values do not fit together. first_step: of the run; a resumed one begins later."""
    for is_bad, names, words in faults(config, world, first_step):
        if is_bad:
            values = {name: value for name, value, _ in knobs_of(config)}
            given = " ".join(f"--{name}={shlex.quote(render(values[name]))}" for name in names.split())
            raise UserError(f"{given}: {words}" if given else words)


def faults(config, world, first_step):
    """Yields (whether values are wrong, names of their knobs, why) for each value, then for values that have to fit
    together. A test may compute with what the tests before it accept."""
    model, schedule, system, data = config.model, config.schedule, config.system, config.data
    layers, stages = model.layers, schedule.stages
    for name, value, kind in knobs_of(config):
        wanted = demand(kind, value)
        yield wanted, name, f"must be {wanted}"
    yield (not re.fullmatch(r"([0-9]+:[1-9][0-9]*)?", system.profile), "profile",
           "must be START:COUNT, for example 20:4")
    yield {*"/\\"} & {*system.run_label}, "run_label", "must be the name of a file, not of a folder"
    for i, stage in enumerate(stages, 1):
        weights, start, end = f"stage{i}.mtp_start stage{i}.mtp_end", stage.mtp_start, stage.mtp_end
        yield len(start) != len(end), weights, "both need the same length"
        yield not (start[0] and end[0]), weights, "the first weight, of the next token, must be above 0"
    *shares, last = [stage.share for stage in stages]
    yield not min(shares) > 0 == last, "", (
        f"shares of the stages: {', '.join(map(render, [*shares, last]))}; the share of the last stage, which is the"
        " extension, must be 0, all others above 0")
    if not world:
        return

    orders, rows = len(NGRAM_FACTORS) - 1, [rows for _, rows in model.ngrams]
    paired, behind = tuple(model.layers_with("paired")), model.backout_layer
    yield model.model_dim % (8 * model.num_heads), "model_dim num_heads", "the width of a head must be a multiple of 8"
    yield model.num_heads % 2 and paired, "num_heads", (
        f"the paired layers {render(paired)} need an even number of heads; --layer0.paired=false makes another layer of"
        " the first")
    yield (len(model.ngram_rows) > orders or any(0 < count < 2 or count % 1 for count in model.ngram_rows),
           "ngram_rows", f"up to {orders} whole numbers, each 0 or at least 2")
    yield min(rows) < 2, "bigram_tables", "the table of bigrams needs two rows or more"
    yield sum(rows) >= 2**31, "ngram_rows", "at most 2147483647 rows in all"
    yield model.vocab_size != 50257 and model.bigram_normal, "vocab_size", (
        "--bigram_normal needs the tokens of GPT-2, a vocabulary of 50257; add --bigram_normal=false")
    yield model.mlp_dim < 16, "mlp_ratio", f"an MLP of {model.mlp_dim} channels"
    yield behind is not None and behind >= len(layers), "backout_layer", f"must be 0 to {len(layers) - 1}, or none"
    yield not model.layers_with("attention"), "", "all layers are without attention: at least one needs it"
    for i, layer in enumerate(layers):
        name = f"layer{i}"
        for field in "skip_from", "input_from":
            source = getattr(layer, field)
            yield (source is not None and source >= i, f"{name}.{field}",
                   f"must be an earlier layer, 0 to {i - 1}, or none")
        for field in () if layer.attention else ("paired", "narrow", "long", "value_embed", "input_from", "xsa"):
            yield i in model.layers_with(field), f"{name}.{field}", "only for a layer with attention"
        yield layer.narrow and layer.long, f"{name}.narrow", "only for a layer that is not long"
        yield layer.xsa and layer.paired, f"{name}.xsa", "only for a layer that is not paired"
        yield (layer.mix and not (layer.value_embed and behind is not None and behind < i
                                  and model.layers_with("mix") == [i]),
               f"{name}.mix", "only for one layer, with value_embed, behind the backout_layer")
        yield (layer.dynamic and not model.dynamic_sizes[i], f"{name}.dynamic",
               "neither this layer nor those up to the next dynamic one have factors")
        yield i and layers[i - 1].two_lanes and not layer.two_lanes, f"{name}.two_lanes", (
            f"layer {i - 1} has two lanes, so all later layers need two; add --{name}.two_lanes=true")
    (*starts, total), (warmup, cooldown) = stage_starts(schedule), momentum_steps(schedule)
    yield total >= 10**6, "scheduled_steps", "a run has at most 999999 steps, the extension included"
    yield any(a >= b for a, b in zip(starts, starts[1:])), "scheduled_steps", "each stage needs at least one step"
    yield schedule.cooldown_frac * schedule.scheduled_steps < 1, "cooldown_frac", "must cover a scheduled step"
    yield schedule.split_stage > len(stages), "split_stage", f"must be one of the stages, 1 to {len(stages)}"
    # A run may end within Muon's warm-up, as short trials of record74 do. Warm-up and cool-down are rounded to whole
    # steps, so the two may share one step.
    yield (warmup < total < warmup + cooldown - 1, "muon_warmup muon_cooldown",
           f"{warmup} and {cooldown} steps, but the run has only {total}")
    steps = system.profiled
    yield (system.profile and not first_step <= steps.start < steps.stop <= total, "profile",
           f"the run has steps {first_step} to {total - 1}")
    yield system.save_every and any(step % system.save_every == 0 for step in steps[1:]), "profile", (
        f"a checkpoint comes in between; take other steps, or change --save_every={system.save_every}")
    has_kernel = system.device == "cuda" and system.kernels != "torch" and "attention:torch" not in system.kernels
    in_bf16 = system.dtype == "bfloat16"
    yield system.device == "mps" and in_bf16, "device dtype", "the GPU of a Mac trains in --dtype=float32"
    yield has_kernel and not in_bf16, "dtype", (
        "the attention kernel of a GPU is made for bfloat16; add --kernels=attention:torch, or --device=cpu")
    for knob in "fp8_mlp", "fp8_qkv":
        yield (getattr(system, knob) and in_bf16 and system.kernels != "torch" and model.model_dim % 16, "model_dim",
               f"--{knob} takes multiples of 16 channels; add --{knob}=false")
    least, d = 32 if model.layers_with("narrow") else 16, model.head_dim
    yield has_kernel and (not least <= d <= 128 or d & (d - 1)), "model_dim num_heads", (
        f"the attention kernel takes heads of {least} to 128 channels, a power of two"
        f"{', in models with narrow layers' * (least == 32)}; or add --kernels=attention:torch")
    yield data.val_batch_tokens % 16 or data.val_tokens % data.val_batch_tokens, "val_tokens val_batch_tokens", (
        "the first must be a multiple of the second, and the second of 16; set both, for example to the same number")
    count = system.micro_batches  # 0: `fit_memory` chooses the number
    yield count % world, "", (
        f"{world} processes do not divide --micro_batches={count}: use a divisor of it, with run.sh by NPROC"
        + ("" if system.resume else ", or a larger number"))
    for i, stage in enumerate(stages if count else (), 1):
        yield stage.batch_tokens % (16 * count), f"stage{i}.batch_tokens", (
            f"must be a multiple of 16 * --micro_batches={count}"
            + (f", one for each of {world} processes; or start 1, 2, 4 or 8" if world == count > 1 else ""))


def check_row(row, labels):
    """Raises UserError for a row of `param_table` that would train in silence in another way than it says. labels:
    those of all rows."""
    is_muon, betas = row.optim == "normuon", row.betas or ()
    unread, read = (("betas", "lr_mul", "wd_mul"), "matrix_lr") if is_muon else (("matrix_lr",), "lr_mul")
    problems = {
        "another row has this name": labels.count(row.label) > 1,
        "must be normuon, adam, rows or replicated": row.optim not in ("normuon", "adam", "rows", "replicated"),
        f"tied_to={row.tied_to!r}: there is no such row": row.tied_to not in ("", *labels),
        "takes banks of matrices, (..., rows, columns) in bfloat16":
            is_muon and (len(row.shape) < 3 or str(row.dtype) != "torch.bfloat16"),
        "ngram_embed takes rows, nothing else does": (row.optim == "rows") != (row.label == "ngram_embed"),
        "head, embedding and lazy tables take adam":
            (row.lazy or row.tied_to or row.label == "lm_head") and row.optim != "adam",
        f"betas={row.betas}: must be two numbers from 0 to below 1, the second one or None":
            not is_muon and (len(betas) != 2 or not all(0 <= (beta or 0) < 1 for beta in betas)),
        f"average={row.average}: must be 0 or more, and 0 for rows, replicated and lazy":
            row.average < 0 or row.average and (row.lazy or row.optim in ("rows", "replicated")),
        f"its number of matrices is no multiple of the length of matrix_lr, {len(row.matrix_lr)}":
            math.prod(row.shape[:-2]) % len(row.matrix_lr),
        **{f"does not read {field}; its factor is {read}": getattr(row, field) != row._field_defaults[field]
           for field in unread}}
    for problem, is_there in problems.items():
        if is_there:
            raise UserError(f"param_table, row {row.label}, optim={row.optim!r}: {problem}")
