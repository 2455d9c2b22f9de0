"""How long the steps of a run take on this machine, for --minutes."""

import time

import torch
import torch.distributed as dist

from data.rules import stage_starts, stage_steps


def time_step(trainer, step) -> float:
    """Mean seconds of step `step` and of its neighbour: of the two, one has Adam."""
    first = step // 2 * 2
    plans = trainer.plans[first:first + 2] * 5
    loader = trainer.new_loader(plans, trainer.config)
    for group in plans[:2], plans[2:]:  # the first pair is not timed
        trainer.synchronize()
        began = time.perf_counter()
        for plan in group:
            trainer.step(loader, plan, trainer.micro_steps)
    trainer.synchronize()
    return (time.perf_counter() - began) / len(plans[2:])


def seconds_per_step(trainer) -> list[float]:
    """Mean seconds of a step in every stage, as rank 0 measures them. Changes weights and optimizer state."""
    schedule, seconds = trainer.config.schedule, []
    for start, steps in zip(stage_starts(schedule), stage_steps(schedule)):
        plans = trainer.plans[start:start + steps]
        counts = sorted({plan.candidates for plan in plans})  # steps with a sampled softmax are faster
        kinds = [[plan.step for plan in plans if plan.candidates == count] for count in counts]
        total = sum(len(kind) * time_step(trainer, kind[len(kind) // 2]) for kind in kinds)
        seconds.append(total / max(1, steps))
    seconds = torch.tensor(seconds, dtype=torch.float64, device=trainer.rt.device)
    if trainer.rt.world > 1:
        dist.broadcast(seconds, 0)
    return seconds.tolist()
