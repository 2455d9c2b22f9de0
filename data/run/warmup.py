"""The start of a run, between its Trainer and the clock: compile kernels, capture graphs, fit the length to --minutes."""

import functools
import operator
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

import triton_kernels as kernels
from data.loader import cu_seqlens, cu_seqlens_size, make_batch
from data.run.config import check_config, with_knobs
from data.run.launch import allowed_cores
from data.run.length import seconds_per_step, with_minutes
from data.run.program import UserError
from data.run.start import survey_training_data
from data.run.state import load_state


def warm_up(trainer):
    """Compile, run one step of each kind to capture it, fit the run to --minutes, run a validation, and restore the
    state of step 0."""
    if trainer.rt.device.type == "cuda" and can_only_compile():
        compile_kernels(trainer)
    trainer.synchronize()
    trainer.watch.lap("compilation")
    run_steps(trainer, seen := set())
    if trainer.config.schedule.minutes:
        fit_minutes(trainer)
        run_steps(trainer, seen)
    if trainer.config.optim.average_blend:
        trainer.optimizer.blend(trainer.plans[-1])  # the first blend loads kernels, which must not be on the clock
    for batch in islice(trainer.validation, 1):  # a rank may have none
        trainer.summed_loss(batch, trainer.attn[-1])
    trainer.synchronize()
    trainer.watch.lap("evaluation")
    trainer.log.line("Resetting Model")
    trainer.init_weights()
    load_state(trainer.optimizer, {})
    trainer.quantise_weights()


def require_codes(trainer):
    """Raises UserError when the FP8 kernels of this run do not store the same e5m2 codes in both layouts. One compiler
    stored codes before they were computed (see _store_qkv_grad)."""
    H, d, device = trainer.config.model.num_heads, trainer.config.model.head_dim, trainer.rt.device

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device=device).to(dtype)

    one, largest, pairs = torch.ones((), device=device), torch.zeros((), device=device), {}
    if trainer.model.fp8_mlps:
        a, b = random(16, 128, dtype=kernels.E5M2), random(128, 128, dtype=kernels.E4M3)
        post = random(16, 128).abs().to(kernels.E4M3)
        pairs["the MLP"] = kernels.relu_square_codes(a, b, one, one, one, largest, post, one)
    if trainer.model.fp8_projections:
        dqkv = torch.zeros(16, 3 * H * d, dtype=kernels.E5M2, device=device)
        pairs["attention"] = dqkv, torch.zeros_like(dqkv.view(torch.uint8).T.contiguous()).view(kernels.E5M2)
        heads = [random(16, H, d) for _ in range(3)]
        kernels.project_backward(*heads, random(2, 17, H, d), torch.ones(2, 16, H, device=device),
                                 random(16, d // 4, 2), None, None, False, False, *pairs["attention"], one)
    if wrong := [name for name, (codes, codes_t) in pairs.items()
                 if not torch.equal(codes.view(torch.uint8), codes_t.view(torch.uint8).T)]:
        raise UserError(f"the FP8 kernels of {' and '.join(wrong)} store wrong codes with Triton"
                        f" {kernels.triton.__version__}; train with --fp8_mlp=false --fp8_qkv=false")


PRIVATE_NAMES = "JITFunction.run", "AsyncCompileMode", "runtime.build._load_module_from_path"  # of Triton 3.6


def can_only_compile() -> bool:
    """Whether this Triton has what `only_compiling` needs. Without it, kernels compile one by one at their launch."""
    with suppress(AttributeError):
        return bool(operator.attrgetter(*PRIVATE_NAMES)(kernels.triton))
    return False


@contextmanager
def modules_apart():
    """In this context, each module that Triton loads is an object of its own.

    Triton launches kernels by extension modules of one name. When Python loads such a module again, for another kernel
    with the same types of arguments, it fills the one object that stands for this name. So a thread could take the
    launcher that another thread had loaded.
    """
    build, lock = kernels.triton.runtime.build, threading.Lock()
    shared = build._load_module_from_path

    def load(name, path):
        with lock:
            return SimpleNamespace(**vars(shared(name, path)))

    build._load_module_from_path = load
    try:
        yield
    finally:
        build._load_module_from_path = shared


@contextmanager
def only_compiling(threads):
    """In this context, a launch of a kernel of ours compiles and loads the kernel and does not run it. So many threads
    compile side by side; leaving the context waits for them.

    What the kernels would have written is undefined. PyTorch's kernels run. This needs `PRIVATE_NAMES`.
    """
    run, device = kernels.triton.JITFunction.run, torch.cuda.current_device()

    def only_compile(self, *args, warmup, **options):
        return run(self, *args, warmup=True, **options)

    def load(compile):
        kernel = compile()
        kernel.run  # without this, Triton loads a kernel at its first launch
        return kernel

    kernels.triton.JITFunction.run = only_compile
    try:
        with (modules_apart(),
              ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool,
              kernels.triton.AsyncCompileMode(SimpleNamespace(submit=functools.partial(pool.submit, load)))):
            yield
    finally:
        kernels.triton.JITFunction.run = run


def blank_batch(trainer, tokens, **options):
    """A batch of one document, as long as a row of `tokens`, of token 0."""
    size = cu_seqlens_size(tokens, trainer.config.data.tokens_per_doc)
    batch = make_batch(np.zeros(tokens + 1, np.uint16), cu_seqlens(np.array([tokens]), tokens, size), trainer.config,
                       trainer.rt.device, **options)
    for rows in batch.row_ids.values():
        rows.zero_()  # of the rows that ranks share, this one has only the first
    return batch


def compile_kernels(trainer):
    """Compile the Triton kernels of a step and of a validation.

    A few tokens pass through the model, and the optimizer makes its updates, but no Triton kernel runs. So weights and
    optimizer state stay as they are.
    """
    attn, batch = trainer.attn[0], functools.partial(blank_batch, trainer, 256)
    losses = {(plan.candidates, len(plan.mtp_weights)) for plan in trainer.plans}
    updates = {plan.update_key: plan for plan in trainer.plans[:-1]}
    # Autograd's own threads do not know those that compile, and would compile one kernel after the other.
    threads, stream = max(8, int(allowed_cores()) // trainer.rt.world), torch.cuda.stream(trainer.graphs.stream)
    with only_compiling(threads), stream, torch.autograd.set_multithreading_enabled(False):
        trainer.summed_loss(batch(), attn)
        for count, terms in losses:
            trainer.micro_step(batch(row=0, count=count), trainer.mtp_table[0, :terms], attn)
        for plan in updates.values():
            trainer.optimizer.compile_kernels(plan, trainer.update_graphs.numbers)
        trainer.optimizer.drop_gradients()  # of kernels that did not run


def steps_with_new_keys(plans, seen) -> list[int]:
    """The steps that are the first to have a key that is not in `seen`. Adds their keys to `seen`."""
    steps = []
    for plan in plans:
        keys = {("forward", plan.forward_key), ("update", plan.update_key)}
        if not keys <= seen:
            steps.append(plan.step)
        seen |= keys
    return steps


def run_steps(trainer, seen):
    """Run the first step with each key that is not in `seen`, with one micro-batch, to compile and capture graphs."""
    if not (steps := steps_with_new_keys(trainer.plans[trainer.first_step:-1], seen)):
        return
    trainer.log.line(f"Sampling steps {steps} for warmup")
    one_micro_step = with_knobs(trainer.config, micro_batches=trainer.rt.world)
    loader = trainer.new_loader([trainer.plans[step] for step in steps], one_micro_step)
    for step in steps:
        trainer.step(loader, trainer.plans[step], 1)
        trainer.optimizer.drop_gradients()  # FewRows has room for those of two steps
        trainer.synchronize()
        trainer.watch.lap(f"step {step}")


def fit_minutes(trainer):
    """Give the run as many steps as --minutes asks for. Changes weights and optimizer state."""
    def time_steps(plans):
        """Mean seconds of a step; the first pass through the plans is not timed."""
        loader = trainer.new_loader(plans * 5, trainer.config)
        for group in plans, plans * 4:
            trainer.synchronize()
            began = time.perf_counter()
            for plan in group:
                trainer.step(loader, plan, trainer.micro_steps)
        trainer.synchronize()
        return (time.perf_counter() - began) / len(plans * 4)

    seconds = seconds_per_step(trainer.config.schedule, trainer.plans, time_steps)
    seconds = torch.tensor(seconds, dtype=torch.float64, device=trainer.rt.device)
    if trainer.rt.world > 1:
        dist.broadcast(seconds, 0)  # all ranks take the same length
    config = with_minutes(trainer.config, seconds.tolist())
    check_config(config, trainer.rt.world)  # --profile may ask for steps that the run does not have
    trainer.set_length(config)
    found, enough = survey_training_data(config)
    if not enough:
        trainer.log.line(f"warning: {found}")
    keys = "minutes", "train_tokens", "scheduled_steps", "extension_steps"
    trainer.log.line("length: " + " ".join(f"{key}={getattr(config.schedule, key)}" for key in keys))
    trainer.watch.lap("length")
