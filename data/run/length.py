"""The length of a run: its steps, what follows from --train_tokens or --minutes, the size of the model, and the losses
to expect.

In the same time, a smaller model trains on more tokens, and a larger one learns more from each.
"""

import dataclasses
import math
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


# The sizes, and the seconds on one H100 up to which each learns most. records/2026-11-29_recipe has the fits of loss
# and time from which these borders come: on five kinds of GPU, a choice by the fits gains .0007 of loss at most in the
# mean.
BORDERS = {Size(384, 4): 20, Size(512, 6): 88, Size(640, 8): 277, Size(768, 11): math.inf}
# A knob that is set by hand leaves the size as it is if it is one of these, --depth, or that of a layer.
SIZE_KNOBS = {"model_dim", "num_heads", "backout_layer"}
CPU_SECONDS_PER_TOKEN = 130e-6  # roughly: of `cpu` on two cores
SHORTEST_RUN = 20  # steps


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


def validations(config, world) -> list[tuple[int | None, int]]:
    """[(pieces that each rank reads, tokens of all ranks)] of the validations before the last, which read about the
    `val_share` of the run's tokens, at least one piece, to take little time; then (None: all pieces, all tokens) of the
    last, if these are more."""
    data, each = config.data, world * config.data.val_batch_tokens
    pieces = math.ceil(data.val_share * total_tokens(config.schedule) / each)
    few = [(pieces, pieces * each)] if config.system.val_every and 0 < pieces * each < data.val_tokens else []
    return [*few, (None, data.val_tokens)]


def momentum_steps(schedule) -> tuple[int, int]:
    """Number of steps of the warm-up and of the cool-down of Muon's momentum. Below 1 they are parts of the run."""
    total = stage_starts(schedule)[-1]
    return tuple(x if x >= 1 else round(x * total) for x in (schedule.muon_warmup, schedule.muon_cooldown))


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


def round_batch(tokens) -> int:
    """The 2 ** k or 3 * 2 ** k, 16 or more, that is nearest to `tokens` by ratio. Such numbers have many divisors."""
    return min((n << k for n in (2, 3) for k in range(3, 60)), key=lambda batch: abs(math.log(batch / tokens)))


def scaled(config, tokens, gpus=1.0):
    """The config with the batches, rates and steps of a run of so many tokens on `gpus` times as many GPUs.

    The batch grows with the root of tokens times fixed cost of a step, for two reasons. The tokens that a loss needs
    grow with batch / critical batch, and the critical batch grows in proportion to the tokens of the run (arXiv
    1812.06162). And each step has a fixed cost, of the optimizer and of communication: in its time one H200 trains on
    2800 tokens, and G of them on about G ** 0.8 times as many. The rates, lr_floor among them, grow with batch ** .35.
    table_beta2 keeps its half-life in tokens. records/2026-11-22_short_runs has the numbers, records/2026-11-22_lengths
    and records/2026-11-25_length the checks at three lengths and at 155M tokens."""
    schedule = config.schedule
    growth, stages, factor = (tokens / total_tokens(schedule) * gpus**0.8) ** 0.5, [], 1.0
    for stage in schedule.stages:
        batch = round_batch(stage.batch_tokens * growth)
        factor = (batch / stage.batch_tokens) ** 0.35
        stages.append(dataclasses.replace(stage, batch_tokens=batch, lr_mul=round(stage.lr_mul * factor, 4)))
    larger = dataclasses.replace(schedule, stages=tuple(stages))
    beta2 = config.optim.table_beta2 ** (total_tokens(larger) / total_tokens(schedule))
    # A warm-up in steps may be longer than its run. It becomes a fraction of a run, which must be below 1.
    total = max(stage_starts(schedule)[-1], 1 + sum(momentum_steps(schedule)))
    periods = "muon_warmup", "muon_cooldown"
    parts = {key: round(getattr(schedule, key) / total, 4) for key in periods if getattr(schedule, key) >= 1}
    larger = with_steps(larger, [stage.batch_tokens for stage in stages], tokens)
    larger = dataclasses.replace(larger, lr_floor=round(schedule.lr_floor * factor, 4), **parts)  # of the last stage
    return dataclasses.replace(config, schedule=larger,
                               optim=dataclasses.replace(config.optim, table_beta2=round(beta2, 4)))


def expected_tokens(config, world) -> float:
    """The tokens on which a run trains. With --minutes an estimate: the GPUs count as H100s, and the size is the best
    one or the config's own, whichever trains on more."""
    time, speed = 60 * config.schedule.minutes, h100s(1.0, world)
    sizes = best_size(time * speed), Size(config.model.model_dim, config.model.depth)
    return time / min(seconds(size, 1, speed) for size in sizes) if time else total_tokens(config.schedule)


def needed_tokens(config, world) -> float:
    """Estimate of the tokens that a run on FineWeb reads, rather too many: record 74 trains on 396 million and reads
    less than 900, because it cuts long documents."""
    return 2.2 * expected_tokens(config, world)


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


def h100s(gpu, world) -> float:
    """How many H100s `world` GPUs are worth, roughly, each of which is worth `gpu` of one (`measure_gpu`)."""
    return gpu * world**0.9


def seconds(size, tokens, speed=1.0) -> float:
    """Estimate of the training time of so many tokens on `speed` H100s. A token takes the time of its products with the
    weights of the layers, and that of the tables, head and optimizer."""
    return tokens * (0.19 + 0.125e-6 * size.layers * size.width**2) * 1e-6 / speed


def best_size(time=0.0, tokens=0.0) -> Size:
    """The size that learns most in a time, in seconds of one H100, or in the time in which it takes so many tokens."""
    return next(size for size, border in BORDERS.items() if (time or seconds(size, tokens)) <= border)


def loss_on_L(size, tokens) -> str:
    """What `single` reaches on our corpus L, in words; "" where no run was near. The end is the fit of
    records/2026-11-29_recipe/borders.py.txt, the middle, within .03, that of records/2026-11-29_people."""
    narrower, shallower, shorter = 768 / size.width, 11 / size.layers, 40e6 / tokens
    loss = (2.1629 + 0.0546 * narrower**1.2 + 0.1156 * shallower**0.6 + 0.9518 * shorter**0.265
            - 0.0153 * math.log(narrower**2 * shallower) * math.log(shorter))
    middle = loss + 0.44 * (20e6 / tokens) ** 0.15
    found = f"; on corpus L, such runs are near {middle:.2f} halfway and end near {loss:.2f}"
    return found if 18e6 <= tokens <= 160e6 else ""
