"""Rules about settings: which values a run accepts, and which batches, rates and steps suit the length of a run."""

import dataclasses
import math
import re
from itertools import accumulate

from data.files import UserError
from data.knobs import flatten, render

SECONDS_PER_TOKEN = {"cuda": 0.92e-6, "cpu": 200e-6}  # roughly: `short` on one H200, `cpu` on two cores
SHORTEST_RUN = 20  # steps


# ---- Steps -----------------------------------------------------------------------------------------------------------

def stage_starts(schedule) -> list[int]:
    """[first step of every stage, number of steps of the run]."""
    shares = list(accumulate((stage.share for stage in schedule.stages[:-1]), initial=0.0))
    starts = [round(schedule.scheduled_steps * share / shares[-1]) for share in shares]
    return [*starts, schedule.scheduled_steps + schedule.extension_steps]


def stage_steps(schedule) -> list[int]:
    """Number of steps of every stage."""
    starts = stage_starts(schedule)
    return [end - start for start, end in zip(starts, starts[1:])]


def sum_over_steps(schedule, costs):
    """Total cost of a run. costs: the cost of a step in every stage."""
    return sum(cost * steps for cost, steps in zip(costs, stage_steps(schedule), strict=True))


def total_tokens(schedule) -> int:
    """Tokens of the whole run."""
    return sum_over_steps(schedule, [stage.batch_tokens for stage in schedule.stages])


def momentum_steps(schedule) -> tuple[int, int]:
    """Number of steps of the warm-up and of the cool-down of Muon's momentum."""
    total = stage_starts(schedule)[-1]
    return tuple(round(x * total) if x < 1 else x for x in (schedule.muon_warmup, schedule.muon_cooldown))


# ---- Length of the run -----------------------------------------------------------------------------------------------

def with_steps(schedule, costs, budget, extension=None):
    """The schedule with the even number of steps whose total cost is nearest to the budget.

    costs: the cost of a step in every stage. extension: steps of the last stage; None: they keep their ratio to the
    scheduled steps.
    """
    ratio = schedule.extension_steps / schedule.scheduled_steps

    def candidate(scheduled):
        last = round(ratio * scheduled) if extension is None else extension
        return dataclasses.replace(schedule, scheduled_steps=scheduled + (scheduled + last) % 2, extension_steps=last)

    fixed = (extension or 0) * costs[-1]
    near = round((budget - fixed) / (sum_over_steps(candidate(10**6), costs) - fixed) * 10**6)
    candidates = map(candidate, range(max(2, near - 4), max(2, near) + 5))
    return min(candidates, key=lambda candidate: abs(sum_over_steps(candidate, costs) - budget))


def round_batch(tokens, unit) -> int:
    """The 2 ** k or 3 * 2 ** k that is nearest to `tokens` by ratio, rounded up to a multiple of `unit`.

    Such numbers have many divisors.
    """
    nearest = min((n << k for n in (2, 3) for k in range(60)), key=lambda batch: abs(math.log(batch / tokens)))
    return -(-nearest // unit) * unit


def fit_length(config, by_hand, made_for, world):
    """The config with batches, rates and steps for a run of --train_tokens or --minutes, if one of these is set.

    The tokens that a loss needs grow with batch / critical batch, and the critical batch grows in proportion to the
    tokens of the run (arXiv 1812.06162). Each step also has a fixed cost, of the optimizer and of communication: in its
    time one H200 trains on 2800 tokens, and G of them on about G ** 0.8 times as many. So the best batch grows with the
    root of tokens times fixed cost. The rates, lr_floor among them, grow with batch ** 0.35
    (records/2026-11-22_short_runs has the numbers, records/2026-11-22_lengths the check at three lengths). table_beta2
    keeps its half-life in tokens: .975 gained .020 in runs of 12288 to 36864 tokens per step, and lost .006 with 131072
    (records/2026-11-22_lengths).

    by_hand: names of the knobs that the user has set; they stay as they are. made_for: (schedule of the preset, number
    of GPUs that it is made for).
    """
    schedule, (native, gpus) = config.schedule, made_for
    if schedule.minutes and by_hand & {"train_tokens", "scheduled_steps", "extension_steps"}:
        raise UserError("--minutes chooses the steps: leave out --train_tokens, --scheduled_steps, --extension_steps")
    tokens = schedule.train_tokens
    if schedule.minutes:
        tokens = schedule.minutes * 60 * world / SECONDS_PER_TOKEN[config.system.device]
    if not tokens:
        return config
    growth = (tokens / total_tokens(native) * (world / gpus) ** 0.8) ** 0.5
    unit, stages = 16 * (config.system.micro_batches or world), []
    for i, stage in enumerate(schedule.stages, 1):
        if f"stage{i}.batch_tokens" not in by_hand:
            batch = round_batch(stage.batch_tokens * growth, unit)
            rate = round(stage.lr_mul * (batch / stage.batch_tokens) ** 0.35, 4)
            rate = stage.lr_mul if f"stage{i}.lr_mul" in by_hand else rate
            stage = dataclasses.replace(stage, batch_tokens=batch, lr_mul=rate)
        stages.append(stage)
    if "table_beta2" not in by_hand:
        ratio = total_tokens(dataclasses.replace(native, stages=tuple(stages))) / total_tokens(native)  # of the batches
        beta2 = round(config.optim.table_beta2 ** ratio, 4)
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, table_beta2=beta2))
    if not by_hand & {"lr_floor", f"stage{len(stages)}.lr_mul"}:
        floor = round(schedule.lr_floor * stages[-1].lr_mul / schedule.stages[-1].lr_mul, 4)
        schedule = dataclasses.replace(schedule, lr_floor=floor)
    schedule = dataclasses.replace(schedule, stages=tuple(stages))
    if "scheduled_steps" not in by_hand:
        extension = schedule.extension_steps if "extension_steps" in by_hand else None
        schedule = with_steps(schedule, [stage.batch_tokens for stage in stages], tokens, extension)
        if schedule.scheduled_steps < SHORTEST_RUN:
            knob = "minutes" if schedule.minutes else "train_tokens"
            raise UserError(f"--{knob}={getattr(schedule, knob):g}: that is a run of {schedule.scheduled_steps} steps"
                            f" of {stages[0].batch_tokens} tokens; it needs {SHORTEST_RUN}, so make it longer")
    for key in {"muon_warmup", "muon_cooldown"} - by_hand:
        if (steps := getattr(schedule, key)) >= 1:  # as a part of the run it fits the steps of `with_minutes`, too
            schedule = dataclasses.replace(schedule, **{key: round(steps / stage_starts(native)[-1], 4)})
    schedule = dataclasses.replace(schedule, train_tokens=0 if schedule.minutes else total_tokens(schedule))
    return dataclasses.replace(config, schedule=schedule)


def with_minutes(config, seconds):
    """The config with the number of steps that --minutes asks for. seconds: the time of a step in every stage.

    Its minutes are 0, and its train_tokens hold the choice, so that a resumed run keeps it.
    """
    minutes = config.schedule.minutes
    fitted = with_steps(config.schedule, seconds, 60 * minutes)
    if fitted.scheduled_steps < SHORTEST_RUN:
        raise UserError(f"--minutes={minutes:g}: this machine makes only {fitted.scheduled_steps} steps in that time; a"
                        f" run needs {SHORTEST_RUN}")
    schedule = dataclasses.replace(fitted, minutes=0.0, train_tokens=total_tokens(fitted))
    return dataclasses.replace(config, schedule=schedule)


# ---- Accepted values -------------------------------------------------------------------------------------------------

def check_config(config, world=1):
    """Raises UserError when a value is out of range, or when two values do not fit together."""
    def require(ok, message):
        if not ok:
            raise UserError(message)

    may_be_zero = ("extension_steps", "seed", "sample_tokens", "micro_batches", "save_every", "keep", "backout_layer",
                   "muon_warmup", "muon_cooldown", "train_tokens")
    for key, value in flatten(config).items():
        least = int(key not in may_be_zero)
        require(type(value) is not int or value >= least, f"--{key}={value}: must be {least} or more")
        require(type(value) is not float or value >= 0, f"--{key}={value}: must be 0 or more")
    model, schedule, system, data = config.model, config.schedule, config.system, config.data
    stages, layers, total = schedule.stages, model.layers, schedule.scheduled_steps + schedule.extension_steps

    require(model.model_dim % (8 * model.num_heads) == 0,
            f"--model_dim={model.model_dim} --num_heads={model.num_heads}: the width of a head must be a multiple of 8")
    require(model.num_heads % 2 == 0 or not model.layers_with("paired"),
            f"--num_heads={model.num_heads}: the paired layers {render(tuple(model.layers_with('paired')))} need an even"
            " number of heads; --layer0.paired=false makes another layer of the first")
    require(2 <= model.vocab_size <= 65536,
            f"--vocab_size={model.vocab_size}: must be 2 to 65536, as shards hold 16-bit tokens")
    require(model.bigram_rows >= 2,
            f"--bigram_tables={model.bigram_tables}: the table of bigrams needs two rows or more")
    require(model.vocab_size == 50257 or not model.bigram_normal,
            f"--vocab_size={model.vocab_size}: --bigram_normal needs the tokens of GPT-2, a vocabulary of 50257; add"
            " --bigram_normal=false")
    require(model.mlp_dim >= 16, f"--mlp_ratio={model.mlp_ratio}: an MLP of {model.mlp_dim} channels")
    require(model.backout_layer is None or model.backout_layer < len(layers),
            f"--backout_layer={model.backout_layer}: must be 0 to {len(layers) - 1}, or none")
    require(any(layer.attention for layer in layers), "all layers are without attention: at least one needs it")
    for i, layer in enumerate(layers):
        require(layer.attention or not (layer.paired or layer.long or layer.value_embed),
                f"--layer{i}={render(layer)!r}: paired, long and value_embed need attention, which this layer lacks")
        require(layer.skip_from is None or 0 <= layer.skip_from < i,
                f"--layer{i}.skip_from={layer.skip_from}: must be an earlier layer, 0 to {i - 1}, or none")
        require(layer.input_from is None or layer.attention and 0 <= layer.input_from < i,
                f"--layer{i}.input_from={layer.input_from}: must be an earlier layer, 0 to {i - 1}, or none, in a layer"
                " with attention")
        require(not layer.narrow or layer.attention and not layer.long,
                f"--layer{i}.narrow=True: only for a layer with attention that is not long")
        require(not layer.xsa or layer.attention and not layer.paired,
                f"--layer{i}.xsa=True: only for a layer with attention that is not paired")
        require(not layer.mix or layer.value_embed and model.backout_layer is not None and model.backout_layer < i
                and model.layers_with("mix") == [i],
                f"--layer{i}.mix=True: only for one layer, with value_embed, behind the backout_layer")
        require(not layer.dynamic or model.dynamic_sizes[i],
                f"--layer{i}.dynamic=True: neither this layer nor those up to the next dynamic one have factors")
        require(i == 0 or layer.two_lanes or not layers[i - 1].two_lanes,
                f"--layer{i}.two_lanes=False: layer {i - 1} has two lanes, so all later layers need two; add"
                f" --layer{i}.two_lanes=true")

    require(all(stage.share > 0 for stage in stages[:-1]) and stages[-1].share == 0,
            f"shares of the stages: {', '.join(render(stage.share) for stage in stages)}; the share of the last stage,"
            " which is the extension, must be 0, all others above 0")
    require(total < 10**6, f"--scheduled_steps={schedule.scheduled_steps}: a run has at most 999999 steps,"
            " the extension included")  # names of checkpoints have six digits
    starts = stage_starts(schedule)
    require(all(a < b for a, b in zip(starts, starts[1:-1])),
            f"--scheduled_steps={schedule.scheduled_steps}: each stage needs at least one step")
    require(0 < schedule.cooldown_frac <= 1 <= schedule.cooldown_frac * schedule.scheduled_steps,
            f"--cooldown_frac={schedule.cooldown_frac}: must be at most 1 and cover a scheduled step")
    require(0 <= schedule.sampled_frac <= 1, f"--sampled_frac={schedule.sampled_frac}: must be from 0 to 1")
    require(schedule.candidates > 0, f"--candidates={schedule.candidates}: must be above 0")
    require(schedule.split_stage <= len(stages),
            f"--split_stage={schedule.split_stage}: there are {len(stages)} stages, so it must be 1 to {len(stages)}")
    for key, most in ("minutes", 10**6), ("train_tokens", 10**15):
        require(0 <= getattr(schedule, key) <= most, f"--{key}={getattr(schedule, key)}: must be from 0 to {most}")
    require(len(schedule.muon_momentum) == 2,
            f"--muon_momentum={render(schedule.muon_momentum)}: two numbers, before and after the warm-up")
    for key in "muon_warmup", "muon_cooldown":
        value = getattr(schedule, key)
        require(0 <= value < 1 or type(value) is int,
                f"--{key}={value}: must be a whole number of steps, or from 0 to below 1, a part of the run")
    warmup, cooldown = momentum_steps(schedule)  # a run may end within the warm-up, as short trials of record74 do
    require(not warmup < total < warmup + cooldown - 1,  # both are rounded, so one step may belong to both
            f"--muon_warmup={schedule.muon_warmup} --muon_cooldown={schedule.muon_cooldown}: {warmup} and {cooldown}"
            f" steps, but the run has only {total}")
    for key in "table_beta2", "muon_beta2", "slow_momentum":
        require(0 <= getattr(config.optim, key) < 1, f"--{key}={getattr(config.optim, key)}: must be from 0 to below 1")
    require(config.optim.polar_steps in (4, 5), f"--polar_steps={config.optim.polar_steps}: must be 4 or 5")
    blend = config.optim.average_blend
    require(0 <= blend <= 1, f"--average_blend={blend}: must be from 0 (last weights) to 1 (averages)")
    for i, stage in enumerate(stages, 1):
        require(len(stage.mtp_start) == len(stage.mtp_end), f"--stage{i}.mtp_start and mtp_end need the same length")
    require(system.seed < 2**63, f"--seed={system.seed}: must be below 2 ** 63")
    require(re.fullmatch(r"([0-9]+:[1-9][0-9]*)?", system.profile),
            f"--profile={system.profile}: expected START:COUNT, for example 20:4")
    require(system.profiled.stop <= total, f"--profile={system.profile}: the run has steps 0 to {total - 1}")
    pauses = system.val_every, system.save_every or total
    require(not any(step % every == 0 for step in system.profiled[1:] for every in pauses),
            f"--profile={system.profile}: a validation or a checkpoint comes in between; take other steps, or change"
            f" --val_every={system.val_every} or --save_every={system.save_every}")
    require("/" not in system.run_label and "\\" not in system.run_label,
            f"--run_label={system.run_label}: it names a file, not a folder")
    require(system.device in ("cuda", "cpu"), f"--device={system.device}: cuda or cpu")
    require(system.dtype in ("bfloat16", "float32"), f"--dtype={system.dtype}: bfloat16 or float32")
    plain = system.device == "cpu" or system.kernels == "torch"
    plain_attention = plain or "attention:torch" in system.kernels
    require(plain_attention or system.dtype == "bfloat16",
            f"--dtype={system.dtype}: the attention kernel is made for bfloat16; add --kernels=attention:torch")
    for knob in "fp8_mlp", "fp8_qkv":
        require(not getattr(system, knob) or system.dtype != "bfloat16" or system.kernels == "torch"
                or model.model_dim % 16 == 0,
                f"--model_dim={model.model_dim}: --{knob} takes multiples of 16 channels; add --{knob}=false")
    least = 32 if model.layers_with("narrow") else 16
    require(plain_attention or least <= model.head_dim <= 128 and model.head_dim & (model.head_dim - 1) == 0,
            f"--model_dim={model.model_dim} --num_heads={model.num_heads}: the attention kernel takes heads of {least}"
            f" to 128 channels, a power of two{', in models with narrow layers' * (least == 32)}; or add"
            " --kernels=attention:torch")
    require(data.data_end in ("wrap", "stop"), f"--data_end={data.data_end}: wrap or stop")
    require(data.val_batch_tokens % 16 == 0 and data.val_tokens % data.val_batch_tokens == 0,
            f"--val_tokens={data.val_tokens} must be a multiple of --val_batch_tokens={data.val_batch_tokens},"
            " and --val_batch_tokens a multiple of 16")
    if not system.micro_batches:  # `choose_micro_batches` chooses and checks the number
        return
    require(system.micro_batches % world == 0,
            f"{world} processes do not divide --micro_batches={system.micro_batches}: use a divisor of it"
            + ("" if system.resume else ", or a larger number"))
    for i, stage in enumerate(stages, 1):
        require(stage.batch_tokens % (16 * system.micro_batches) == 0,
                f"--stage{i}.batch_tokens={stage.batch_tokens} must be a multiple of"
                f" 16 * --micro_batches={system.micro_batches}"
                + (f", one for each of {world} processes" if world == system.micro_batches > 1 else ""))


# Knobs of Data and System that a resumed run has to keep, like all knobs of Model, Schedule and Optim.
KEPT_KNOBS = {"train_files", "seed", "micro_batches", "dtype"}


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
