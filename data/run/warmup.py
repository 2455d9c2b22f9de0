"""The start of a run, between its Trainer and the clock: compile kernels, capture CUDA graphs, fit the length to
--minutes."""

import functools
import gc
import operator
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from types import SimpleNamespace

import numpy as np
import torch

import triton_kernels as kernels
from data.loader import make_batch
from data.run.config import check_config, with_knobs
from data.run.launch import allowed_cores
from data.run.length import stage_starts, with_minutes
from data.run.machine import beside, of_rank_0, on
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
    if trainer.config.system.fp8_mlp:
        a, b = random(16, 128, dtype=kernels.E5M2), random(128, 128, dtype=kernels.E4M3)
        post = random(16, 128).abs().to(kernels.E4M3)
        pairs["the MLP"] = kernels.relu_square_codes(a, b, one, one, one, largest, post, one)
    if trainer.config.system.fp8_qkv:
        dqkv = torch.zeros(16, 3 * H * d, dtype=kernels.E5M2, device=device)
        pairs["attention"] = dqkv, torch.zeros_like(dqkv.view(torch.uint8).T.contiguous()).view(kernels.E5M2)
        heads = [random(16, H, d) for _ in range(3)]
        kernels.project_backward(*heads, random(2, 17, H, d), torch.ones(2, 16, H, device=device),
                                 random(16, d // 4, 2), None, None, False, False, *pairs["attention"], one)
    if wrong := [name for name, (codes, codes_t) in pairs.items()
                 if not torch.equal(codes.view(torch.uint8), codes_t.view(torch.uint8).T)]:
        raise UserError(f"the FP8 kernels of {' and '.join(wrong)} store wrong codes with Triton"
                        f" {kernels.triton.__version__}; train with --fp8_mlp=false --fp8_qkv=false")


def can_only_compile() -> bool:
    """Whether this Triton has the names, private in version 3.6, that `only_compiling` needs. Without them, kernels
    compile one by one at their launch."""
    names = "JITFunction.run", "AsyncCompileMode", "runtime.build._load_module_from_path"
    with suppress(AttributeError):
        return bool(operator.attrgetter(*names)(kernels.triton))
    return False


@contextmanager
def modules_apart():
    """In this context, each module that Triton loads is an object of its own.

    Triton launches kernels by extension modules of one name. When Python loads such a module again, for another kernel
    with the same types of arguments, it fills the one object that stands for this name. So a thread could take the
    launcher that another thread had loaded."""
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
    compile side by side; leaving the context waits for them. What the kernels would have written is undefined.
    PyTorch's kernels run. This needs `can_only_compile`."""
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


def compile_kernels(trainer):
    """Compile the Triton kernels of a step and of a validation. A few tokens pass through the model, and the optimizer
    makes its updates, but no Triton kernel runs. So weights and optimizer state stay as they are."""
    attn, tokens, config = trainer.attn[0], 256, trainer.config

    def batch(**options):
        """A batch of one document, as long as a row, of token 0."""
        found = make_batch(np.zeros(tokens + 1, np.uint16), np.array([tokens]), config, trainer.rt.device, **options)
        for rows in found.row_ids.values():
            rows.zero_()  # of the rows that ranks share, this batch has only the first
        return found

    updates = {plan.update_key: plan for plan in trainer.plans[:-1]}
    # Autograd's own threads do not know those that compile, and would compile one kernel after the other.
    threads, stream = max(8, int(allowed_cores()) // trainer.rt.world), torch.cuda.stream(trainer.graphs.stream)
    with only_compiling(threads), stream, torch.autograd.set_multithreading_enabled(False):
        trainer.summed_loss(batch(), attn)
        for count, terms in {(plan.candidates, len(plan.mtp_weights)) for plan in trainer.plans}:
            trainer.micro_step(batch(row=0, count=count), trainer.mtp_table[0, :terms], attn)
        for plan in updates.values():
            numbers = trainer.numbers(plan)
            trainer.optimizer.step_rows(plan, numbers)
            trainer.optimizer.step(plan, numbers)
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

    seconds, starts = [], stage_starts(trainer.config.schedule)
    for start, end in zip(starts, starts[1:]):
        total, stage = 0.0, trainer.plans[start:end]
        for count in sorted({plan.candidates for plan in stage}):  # steps with a sampled softmax are faster
            steps = [plan.step for plan in stage if plan.candidates == count]
            middle = steps[len(steps) // 2] // 2 * 2  # one of this step and the next updates the tables
            total += len(steps) * time_steps(trainer.plans[middle:middle + 2])
        seconds.append(total / max(1, end - start))
    seconds = of_rank_0(seconds, trainer.rt)  # all ranks take the same length
    config = with_minutes(trainer.config, seconds)
    check_config(config, trainer.rt.world)  # --profile may ask for steps that the run does not have
    trainer.set_length(config)
    found, enough = survey_training_data(config)
    if not enough:
        trainer.log.line(f"warning: {found}")
    keys = "minutes", "train_tokens", "scheduled_steps", "extension_steps"
    trainer.log.line("length: " + " ".join(f"{key}={getattr(config.schedule, key)}" for key in keys))
    trainer.watch.lap("length")


# ---- CUDA graphs: the host launches all kernels of a micro-step at once, and all kernels of an update ----------------

class MicroStepGraphs:
    """run(batch, mtp_weights, attn) -> loss, a 0-D tensor; as a CUDA graph for each key, if `enabled`.

    The first call with a key also captures a graph, and later calls with this key replay it. A replay launches hundreds
    of kernels at once: the host would take 30 to 39 ms to launch them one by one, and the GPU takes 21 ms to run them
    (stage 1, H200). A graph reads and writes fixed addresses, so its tensors are updated in place. It writes its loss
    to one address, too, so the next call with its key changes the loss that this call returns."""

    def __init__(self, run, enabled):
        self.run, self.enabled = run, enabled
        self.graphs = {}  # key -> (graph, and its batch, MTP weights, AttentionSettings, loss)
        # Autograd runs a backward pass on the stream of the forward pass, and `add_gradients` runs on the current
        # stream. So all micro-steps use one stream.
        # Only one graph runs at a time, so the graphs share one memory pool.
        self.stream, self.pool = (torch.cuda.Stream(), torch.cuda.graph_pool_handle()) if enabled else (None, None)

    def run_eagerly(self, run, *args):
        """run(*args) without a graph, on the stream of the graphs."""
        with beside([self.stream]), on(self.stream):
            return run(*args)

    def capture(self, run, *args):
        """(graph, result) of run(*args), which is captured and not run."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # garbage may hold another graph, which nothing may free during a capture
        try:
            # thread_local: the threads of the loader may call CUDA during the capture.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                return graph, run(*args)
        finally:
            if collects:
                gc.enable()

    def __call__(self, batch, mtp_weights, attn, stage, eager=False):
        """eager: launch the kernels of the graph one by one, so that a trace shows the layer of each kernel."""
        if not self.enabled:
            return self.run(batch, mtp_weights, attn)
        # The key is StepPlan.forward_key, unless the batch has more targets than candidates: such a batch takes all
        # classes, and the warm-up may not have met its graph.
        key = stage, 0 if batch.candidates is None else len(batch.candidates)
        if key not in self.graphs:
            # The first run compiles kernels, which a capture must not do.
            loss = self.run_eagerly(self.run, batch, mtp_weights, attn)
            batch, mtp_weights = batch.clone(), mtp_weights.clone()
            # The graph copies its loss to the first loss, because the graph of an update may use the memory in which
            # the graph computes its loss.
            graph, _ = self.capture(lambda *args: loss.copy_(self.run(*args)), batch, mtp_weights, attn)
            self.graphs[key] = graph, batch, mtp_weights, attn, loss
            return loss
        graph, graph_batch, graph_weights, graph_attn, loss = self.graphs[key]
        graph_batch.buffer.copy_(batch.buffer)  # the key decides the shapes, so all tensors have the same places
        graph_weights.copy_(mtp_weights)
        if eager:
            return self.run_eagerly(self.run, graph_batch, graph_weights, graph_attn)
        graph.replay()
        return loss


class UpdateGraphs:
    """run(plan, numbers): the update of a step; as a CUDA graph for each key, if `enabled`.

    The update of a small model has hundreds of kernels, and the host takes 12 ms to launch them one by one, longer than
    the GPU takes for the whole step. A graph reads its numbers at fixed addresses, where each step puts its own. The
    graphs of several ranks also hold their exchange, so all ranks capture and replay in the same order.

    micro_steps: MicroStepGraphs, whose stream and memory these graphs share. names: those of the numbers."""

    def __init__(self, run, enabled, micro_steps, names):
        self.run, self.enabled, self.micro_steps, self.graphs = run, enabled, micro_steps, {}
        self.numbers = None  # {name: 0-D tensor}, if enabled
        if enabled:  # 16 bytes for each number: for other addresses, compilers make other kernels
            self.values = torch.zeros(len(names), 4, device="cuda")[:, 0]
            self.numbers = dict(zip(names, self.values.unbind()))

    def set_numbers(self, values):
        """values (len(names),): the numbers of the next update. Returns them as `self.numbers`."""
        if self.enabled:
            self.values.copy_(values)
        return self.numbers

    def __call__(self, plan, numbers, eager=False):
        """numbers: those of `set_numbers`, if `enabled`. eager: as in MicroStepGraphs."""
        key = plan.update_key
        if not self.enabled:
            self.run(plan, numbers)
        elif key in self.graphs and not eager:
            self.graphs[key].replay()
        else:
            self.micro_steps.run_eagerly(self.run, plan, numbers)
            if key not in self.graphs and not plan.split:  # the split happens once
                self.graphs[key], _ = self.micro_steps.capture(self.run, plan, numbers)

    def drop(self):
        """Free the graphs. NCCL would wait for them without end when its group of processes ends."""
        self.graphs.clear()
