"""The length of a run: its steps, the settings that suit --train_tokens or --minutes, and the size of the model.

In the same time, a smaller model trains on more tokens, and a larger one learns more from each. `rank_sizes` puts the
sizes that have been measured in order, by a fit of the loss and a fit of the time (records/2026-11-28_proven).
"""

import dataclasses
import math
import re
from itertools import accumulate
from typing import NamedTuple

from data.run.program import UserError


class Size(NamedTuple):
    """The size of a model with heads of 128 channels."""

    width: int
    layers: int

    def __str__(self):
        return f"{self.width} x {self.layers}"

    @property
    def knobs(self) -> dict[str, int]:
        """The settings of a model of this size."""
        return {"model_dim": self.width, "depth": self.layers}


class Gpu(NamedTuple):
    """What a GPU can do; `measure_gpu` in data/run/machine.py measures it."""

    products: float  # operations per second of a large matrix multiplication, in FP8 if the GPU has it
    copies: float  # bytes per second, read and written
    launch: float  # seconds from one kernel of a CUDA graph to the next


class Forecast(NamedTuple):
    """What a model of one size learns in a training time."""

    size: Size
    tokens: float
    loss: float  # up to a constant, which depends on the text


SIZES = Size(384, 4), Size(512, 4), Size(512, 6), Size(640, 8), Size(768, 11)  # the time of a token grows
# A knob that is set by hand leaves the size as it is if it is one of these, --depth, or that of a layer.
SIZE_KNOBS = {"model_dim", "num_heads", "backout_layer"}
MEASURED = 8e6, 155e6  # about the tokens of the shortest and of the longest runs in the fit of the loss
H100 = Gpu(products=1490e12, copies=3010e9, launch=0.85e-6)  # measured, like the times of the fit
# Of machines that nobody has measured yet, roughly: `short` on one H200, `cpu` on two cores.
SECONDS_PER_TOKEN = {"cuda": 0.92e-6, "cpu": 130e-6}
SHORTEST_RUN = 20  # steps
# In a run of more steps than this and than its preset has, Adam updates the head in every second step. In a run of 1628
# steps, an update of the head in every step raised the loss (one pair, records/2026-11-27_learning).
MANY_STEPS = 1200
# The knobs that `fit_length` changes, but for train_tokens.
FITTED = re.compile(r"stage\d+\.(batch_tokens|lr_mul)|(scheduled|extension)_steps|lr_floor|table_beta2|adam_every"
                    r"|muon_(warmup|cooldown)")


def stage_starts(schedule) -> list[int]:
    """[first step of every stage, number of steps of the run]."""
    shares = list(accumulate((stage.share for stage in schedule.stages[:-1]), initial=0.0))
    starts = [round(schedule.scheduled_steps * share / shares[-1]) for share in shares]
    return [*starts, schedule.scheduled_steps + schedule.extension_steps]


def sum_over_steps(schedule, costs):
    """Total cost of a run. costs: the cost of a step in every stage."""
    starts = stage_starts(schedule)
    return sum(cost * (end - start) for cost, start, end in zip(costs, starts, starts[1:]))


def total_tokens(schedule) -> int:
    """Tokens of the whole run."""
    return sum_over_steps(schedule, [stage.batch_tokens for stage in schedule.stages])


def in_steps(period, total) -> int:
    """A number of steps, which below 1 is given as a part of the `total`."""
    return period if period >= 1 else round(period * total)


def momentum_steps(schedule) -> tuple[int, int]:
    """Number of steps of the warm-up and of the cool-down of Muon's momentum."""
    total = stage_starts(schedule)[-1]
    return tuple(in_steps(x, total) for x in (schedule.muon_warmup, schedule.muon_cooldown))


def with_steps(schedule, costs, budget, extension=None):
    """The schedule with the even number of steps whose total cost is nearest to the budget. costs: the cost of a step
    in every stage. extension: steps of the last stage; None: they keep their ratio to the scheduled steps."""
    ratio = schedule.extension_steps / schedule.scheduled_steps

    def candidate(scheduled):
        last = round(ratio * scheduled) if extension is None else extension
        return dataclasses.replace(schedule, scheduled_steps=scheduled + (scheduled + last) % 2, extension_steps=last)

    fixed = (extension or 0) * costs[-1]
    near = round((budget - fixed) / (sum_over_steps(candidate(10**6), costs) - fixed) * 10**6)
    candidates = map(candidate, range(max(2, near - 4), max(2, near) + 5))
    return min(candidates, key=lambda candidate: abs(sum_over_steps(candidate, costs) - budget))


def round_batch(tokens, unit) -> int:
    """The 2 ** k or 3 * 2 ** k that is nearest to `tokens` by ratio, rounded up to a multiple of `unit`. Such numbers
    have many divisors."""
    nearest = min((n << k for n in (2, 3) for k in range(60)), key=lambda batch: abs(math.log(batch / tokens)))
    return -(-nearest // unit) * unit


def fit_length(config, by_hand, made_for, world, gpu=None) -> dict:
    """{field: value} of the batches, rates and steps for a run of --train_tokens or --minutes, if one of these is set.

    The batch grows with the root of tokens times fixed cost of a step, for two reasons. The tokens that a loss needs
    grow with batch / critical batch, and the critical batch grows in proportion to the tokens of the run (arXiv
    1812.06162). And each step has a fixed cost, of the optimizer and of communication: in its time one H200 trains on
    2800 tokens, and G of them on about G ** 0.8 times as many. The rates, lr_floor among them, grow with batch ** 0.35.
    table_beta2 keeps its half-life in tokens. records/2026-11-22_short_runs has the numbers, records/2026-11-22_lengths
    and records/2026-11-25_length the checks at three lengths and at 155M tokens. A run of more than MANY_STEPS and more
    than its preset has, with --minutes by the estimate of its steps, has --adam_every=2.

    by_hand: names of the knobs that the user has set; they stay as they are. made_for: (schedule of the preset, number
    of GPUs that it is made for). gpu: what the GPU can do, from which --minutes gets the tokens (None: they come from
    SECONDS_PER_TOKEN)."""
    schedule, (native, gpus) = config.schedule, made_for
    tokens, time = schedule.train_tokens, 60 * schedule.minutes
    if time and gpu:
        tokens = forecast(Size(config.model.model_dim, config.model.depth), time, gpu, world).tokens
    elif time:
        tokens = time * world / SECONDS_PER_TOKEN[config.system.device]
    if not tokens:
        return {}
    growth = (tokens / total_tokens(native) * (world / gpus) ** 0.8) ** 0.5
    unit, stages, factor = 16 * (config.system.micro_batches or world), [], 1.0
    for i, stage in enumerate(schedule.stages, 1):
        batch = stage.batch_tokens if f"stage{i}.batch_tokens" in by_hand else round_batch(
            stage.batch_tokens * growth, unit)
        factor = (batch / stage.batch_tokens) ** 0.35
        rate = stage.lr_mul if f"stage{i}.lr_mul" in by_hand else round(stage.lr_mul * factor, 4)
        stages.append(dataclasses.replace(stage, batch_tokens=batch, lr_mul=rate))
    found, stages = {"lr_floor": round(schedule.lr_floor * factor, 4)}, tuple(stages)  # the factor of the last stage
    ratio = total_tokens(dataclasses.replace(native, stages=stages)) / total_tokens(native)  # of the batches
    found["table_beta2"] = round(config.optim.table_beta2 ** ratio, 4)
    schedule = dataclasses.replace(schedule, stages=stages)
    if "scheduled_steps" not in by_hand:
        extension = schedule.extension_steps if "extension_steps" in by_hand else None
        schedule = with_steps(schedule, [stage.batch_tokens for stage in stages], tokens, extension)
    if stage_starts(schedule)[-1] > max(MANY_STEPS, stage_starts(native)[-1]):
        found["adam_every"] = 2
    for key in "muon_warmup", "muon_cooldown":
        if (steps := getattr(schedule, key)) >= 1:  # as a part of the run it fits the steps of `with_minutes`, too
            found[key] = round(steps / stage_starts(native)[-1], 4)
    return {key: value for key, value in found.items() if key not in by_hand} | {
        "stages": stages, "scheduled_steps": schedule.scheduled_steps, "extension_steps": schedule.extension_steps,
        "train_tokens": 0 if time else total_tokens(schedule)}


def needed_tokens(config, world) -> float:
    """Estimate of the tokens that a run on FineWeb reads, rather too many: record 74 trains on 396 million and reads
    less than 900, because it cuts long documents. With --minutes, the GPUs count as H100s and the size is the best."""
    time = 60 * config.schedule.minutes
    return 2.2 * (rank_sizes(time, H100, world)[0].tokens if time else total_tokens(config.schedule))


def with_minutes(config, seconds):
    """The config with the number of steps that --minutes asks for. seconds: the time of a step in every stage. Its
    minutes are 0, and its train_tokens hold the choice, so that a resumed run keeps it."""
    minutes = config.schedule.minutes
    fitted = with_steps(config.schedule, seconds, 60 * minutes)
    if fitted.scheduled_steps < SHORTEST_RUN:
        raise UserError(f"--minutes={minutes:g}: this machine makes only {fitted.scheduled_steps} steps in that time; a"
                        f" run needs {SHORTEST_RUN}")
    schedule = dataclasses.replace(fitted, minutes=0.0, train_tokens=total_tokens(fitted))
    return dataclasses.replace(config, schedule=schedule)


def seconds_per_token(size, rows, gpu) -> float:
    """Time of a training step with `rows` tokens on one GPU, divided by the rows.

    A step multiplies each token with the weights of the layers and with the sampled classes of the head, makes passes
    over activations and logits, updates the weights, and launches 140 + 60 · layers kernels. 23 times of H100s and
    H200s are within 4.9 % of this, but for two of 640 x 8 on a busy machine (6 and 9 %)."""
    width, layers = size
    weights = 9.6 * layers * width**2
    passes = 320e3 + 181.4 * layers * width + 133.9 * weights / rows  # bytes per token
    products = 6 * (weights + 64 * width * rows**0.5)  # operations per token
    copies = min(gpu.copies, (gpu.copies * H100.copies) ** 0.5)  # an H200's passes gain half of its lead
    return products / gpu.products + passes / copies + (140 + 60 * layers) * gpu.launch / rows


def expected_loss(size, tokens) -> float:
    """Validation loss after so many tokens, up to a constant that depends on the text. The last term says that large
    models gain more from more tokens. 47 runs with four million n-gram embeddings have .0045 rms."""
    narrower, shallower = 768 / size.width, 11 / size.layers
    return (0.0586 * narrower**1.2 + 0.1258 * shallower**0.6 + 1.0068 * (40e6 / tokens) ** 0.25
            + 0.0183 * math.log(narrower**2 * shallower) * math.log(tokens / 40e6))


def rows_per_gpu(tokens, world) -> float:
    """Tokens per step on each GPU with the batches that `fit_length` gives `short`, before they are rounded."""
    return 32768 * (tokens / 27e6 * world**0.8) ** 0.5 / world


def seconds(size, tokens, gpu, world=1) -> float:
    """Training time of so many tokens on `world` GPUs."""
    return tokens * seconds_per_token(size, rows_per_gpu(tokens, world), gpu) / world


def forecast(size, time, gpu, world) -> Forecast:
    """What a model of this size learns in a training time in seconds on `world` GPUs."""
    tokens = 27e6
    for _ in range(20):  # the batch depends on the tokens
        tokens *= time / seconds(size, tokens, gpu, world)
    return Forecast(size, tokens, expected_loss(size, tokens))


def rank_sizes(time, gpu, world=1) -> list[Forecast]:
    """The forecasts of all sizes, the lowest loss first."""
    return sorted((forecast(size, time, gpu, world) for size in SIZES), key=lambda it: it.loss)


def best_seconds(tokens, gpu, world=1) -> float:
    """The training time in which the best size takes so many tokens. Near a border two sizes read the same tokens in
    different times; this is the shorter time."""
    times = (seconds(size, tokens, gpu, world) for size in SIZES)
    return next(time for size, time in zip(SIZES, times)
                if SIZES.index(rank_sizes(time, gpu, world)[0].size) <= SIZES.index(size))
