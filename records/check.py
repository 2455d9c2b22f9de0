"""The table of `python train_gpt.py --check`: whether a run with these arguments would start on this machine.

The checks are those of every start (data/run/start.py), which stops at the first failure. The table adds what a start
does not wait for: the tokens of the shards, and the expected time.
"""

import os
import textwrap
from contextlib import suppress
from functools import cache, partial

from data.run import start
from data.run.config import with_knobs
from data.run.length import CPU_SECONDS_PER_TOKEN, Size, h100s, seconds, total_tokens
from data.run.machine import choose_kernels, find_device, measure_gpu
from data.run.memory import fit_memory
from data.run.program import UserError


def expected_time(config, world):
    """(a line about the expected training time, whether it could be estimated)."""
    schedule, model, whole = config.schedule, config.model, " for the whole run" * bool(config.system.resume)
    if schedule.minutes:
        return f"{schedule.minutes:g} min, as --minutes says", True
    if not model.pointer or config.system.kernels != "auto":  # record74
        return "not known for this model or these kernels", True
    if find_device(config).type != "cuda":
        return (f"{CPU_SECONDS_PER_TOKEN * total_tokens(schedule) / 60:.1f} minutes{whole} on two cores of an AMD EPYC"
                " for a model like that of --preset=cpu; this machine was not measured"), True
    try:
        speed = h100s(measure_gpu(fp8=config.system.fp8_mlp), world)
    except UserError:
        return "not measured: too little memory of the GPU is free", False
    minutes = seconds(Size(model.model_dim, model.depth), total_tokens(schedule), speed) / 60
    return f"about {minutes:.1f} minutes{whole} (a rough estimate from H100s, scaled to what this GPU can do)", True


def with_shards(survey, part, config, world):
    """A check: `survey`, and then all tokens of the shards of this part."""
    found, fine = survey(config, world)
    doubts = start.read_shards(config, part)
    return "; ".join([found, *doubts]), fine and not doubts


def check_table(config, world, fit, most_rows, show) -> int:
    """Prints the table and returns the exit status. Without `show` it prints nothing and raises the first failure.
    fit: None, or function (H100s that the GPU is worth, device) -> (config that suits it, a line about its size).
    most_rows: see `fit_memory`."""
    columns, status, more, told = "{:<15} | {:<90} | {}", 0, {}, {}  # told: text -> the row that says it
    with suppress(UserError):  # the rows "device", "kernels" and "memory" report it
        device = find_device(config)
        if fit and device.type == "cuda":
            try:
                gpu = measure_gpu(fp8=config.system.fp8_mlp) if config.schedule.minutes else 1.0
                config, line = fit(gpu, device)
                size = line.removeprefix("size: "), True
            except UserError as error:
                size = str(error), False
            more |= {"size": lambda *run: size} if size[0] else {}
        config = choose_kernels(config, device)[0]
    fitted = cache(lambda: fit_memory(wanted, find_device(wanted), world, most_rows))
    wanted, more["memory"] = config, lambda *run: start.check_memory(fitted(), world)
    with suppress(UserError):
        config = fitted()
    config = with_knobs(config, micro_batches=config.system.micro_batches or world)  # the other checks need a number
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a machine reads the shards
        more |= {"training data": partial(with_shards, start.survey_training_data, "train"),
                 "validation data": partial(with_shards, start.survey_validation_data, "val")}
    if show:
        more["time"] = lambda *run: expected_time(config, world)
        print(columns.format("what", "found", "ok?"))
    for name, check in start.checks_of(config, **more).items():
        try:
            found, fine = check(config, world)
            ok = "yes" if fine else "maybe"
        except (UserError, OSError) as error:
            found, ok = str(error), "no"
        status |= ok == "no"
        if show:
            known = told.setdefault(found, name)
            first, *rest = textwrap.wrap(found if known == name else f"as {known}", 90, break_on_hyphens=False)
            print(columns.format(name, first, ok), *(columns.format("", part, "").rstrip() for part in rest), sep="\n")
        elif ok == "no":
            raise UserError(found)
    return status
