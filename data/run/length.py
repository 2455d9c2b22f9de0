"""The length of a run: its steps, and the batches, rates and steps that suit --train_tokens or --minutes."""

import dataclasses
import math
import re
from itertools import accumulate

from data.run.program import UserError
from data.run.size import H100, Size, forecast, rank_sizes


SECONDS_PER_TOKEN = {"cuda": 0.92e-6, "cpu": 130e-6}  # roughly: `short` on one H200, `cpu` on two cores
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


def fit_length(config, by_hand, made_for, world, gpu=None):
    """The config with batches, rates and steps for a run of --train_tokens or --minutes, if one of these is set.

    The tokens that a loss needs grow with batch / critical batch, and the critical batch grows in proportion to the
    tokens of the run (arXiv 1812.06162). Each step also has a fixed cost, of the optimizer and of communication: in its
    time one H200 trains on 2800 tokens, and G of them on about G ** 0.8 times as many. So the best batch grows with the
    root of tokens times fixed cost. The rates, lr_floor among them, grow with batch ** 0.35
    (records/2026-11-22_short_runs has the numbers, records/2026-11-22_lengths and records/2026-11-25_length the checks
    at three lengths and at 155M tokens). table_beta2 keeps its half-life in tokens (records/2026-11-22_lengths). A run
    of more than MANY_STEPS and more than its preset has, with --minutes by the estimate of its steps, has
    --adam_every=2.

    by_hand: names of the knobs that the user has set; they stay as they are. made_for: (schedule of the preset, number
    of GPUs that it is made for). gpu: what the GPU can do, from which --minutes gets the tokens (None: they come
    from SECONDS_PER_TOKEN).
    """
    schedule, (native, gpus) = config.schedule, made_for
    tokens = schedule.train_tokens
    if schedule.minutes and gpu:
        size = Size(config.model.model_dim, len(config.model.layers))
        tokens = forecast(size, 60 * schedule.minutes, gpu, world).tokens
    elif schedule.minutes:
        tokens = schedule.minutes * 60 * world / SECONDS_PER_TOKEN[config.system.device]
    if not tokens:
        return config
    growth = (tokens / total_tokens(native) * (world / gpus) ** 0.8) ** 0.5
    unit, stages, factor = 16 * (config.system.micro_batches or world), [], 1.0
    for i, stage in enumerate(schedule.stages, 1):
        batch = stage.batch_tokens if f"stage{i}.batch_tokens" in by_hand else round_batch(
            stage.batch_tokens * growth, unit)
        factor = (batch / stage.batch_tokens) ** 0.35
        rate = stage.lr_mul if f"stage{i}.lr_mul" in by_hand else round(stage.lr_mul * factor, 4)
        stages.append(dataclasses.replace(stage, batch_tokens=batch, lr_mul=rate))
    if "table_beta2" not in by_hand:
        ratio = total_tokens(dataclasses.replace(native, stages=tuple(stages))) / total_tokens(native)  # of the batches
        beta2 = round(config.optim.table_beta2 ** ratio, 4)
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, table_beta2=beta2))
    if "lr_floor" not in by_hand:
        schedule = dataclasses.replace(schedule, lr_floor=round(schedule.lr_floor * factor, 4))  # of the last stage
    schedule = dataclasses.replace(schedule, stages=tuple(stages))
    if "scheduled_steps" not in by_hand:
        extension = schedule.extension_steps if "extension_steps" in by_hand else None
        schedule = with_steps(schedule, [stage.batch_tokens for stage in stages], tokens, extension)
    if "adam_every" not in by_hand and stage_starts(schedule)[-1] > max(MANY_STEPS, stage_starts(native)[-1]):
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, adam_every=2))
    for key in {"muon_warmup", "muon_cooldown"} - by_hand:
        if (steps := getattr(schedule, key)) >= 1:  # as a part of the run it fits the steps of `with_minutes`, too
            schedule = dataclasses.replace(schedule, **{key: round(steps / stage_starts(native)[-1], 4)})
    schedule = dataclasses.replace(schedule, train_tokens=0 if schedule.minutes else total_tokens(schedule))
    return dataclasses.replace(config, schedule=schedule)


def needed_tokens(config, world) -> float:
    """Estimate of the tokens that a run on FineWeb reads, rather too many: record 74 trains on 396 million and reads
    less than 900, because it cuts long documents. With --minutes, the GPUs count as H100s and the size is the best."""
    schedule = config.schedule
    if schedule.minutes:
        return 2.2 * rank_sizes(60 * schedule.minutes, H100, world)[0].tokens
    return 2.2 * total_tokens(schedule)


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


def seconds_per_step(schedule, plans, time_steps) -> list[float]:
    """Mean seconds of a step in every stage. plans: of all steps; time_steps: function (plans) -> mean seconds."""
    seconds = []
    for start, steps in zip(stage_starts(schedule), stage_steps(schedule)):
        stage = plans[start:start + steps]
        counts = sorted({plan.candidates for plan in stage})  # steps with a sampled softmax are faster
        kinds = [[plan.step for plan in stage if plan.candidates == count] for count in counts]
        middles = [kind[len(kind) // 2] // 2 * 2 for kind in kinds]  # one of this step and the next updates the tables
        total = sum(len(kind) * time_steps(plans[step:step + 2]) for kind, step in zip(kinds, middles))
        seconds.append(total / max(1, steps))
    return seconds
