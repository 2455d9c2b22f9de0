"""Where the time of training steps went:  python records/trace.py logs/run_..._rank0.json.gz [...]

The class `Profiler` writes the chrome traces of --profile=START:COUNT; records/guide.md explains the tables. A kernel
belongs to the region, a named range of host time (`trace_range` in data/run/log.py), that launched it. A CUDA graph is
one launch for all kernels of a micro-step or of an update, so `tell_apart` gives them the regions of kernels that the
first steps have launched one by one. Without a GPU, operators take the place of kernels, and waiting for other
processes that of communication.

An instant of time belongs to the running kernel, and to the first of several. If only NCCL runs, the instant is exposed
communication; if nothing runs, it is idle.
"""

import gzip
import json
import os
import re
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.run.program import UserError, one_line, run_program, user_path

# ---- Events -> kernels with their regions ----------------------------------------------------------------------------

RANGES = re.compile(r"(step|layer) \d+|data|micro-step|forward|loss|backward|(reduce|wait|update|gather) .+"
                    r"|update|zero gradients|fetch rows|send gradients of rows")
NODE = "autograd::engine::evaluate_function"


@dataclass
class Item:
    """A kernel, or without a GPU an operator. Times in microseconds."""

    name: str
    start: float
    end: float
    own: float  # duration without nested operators
    launched: float  # host time
    kind: str = "compute"  # or communication, or transfer: between host and device
    region: str = ""
    grid: str = ""  # numbers of programs


class Host:
    """The regions: named ranges of host time. at(moment) is the name of the innermost range."""

    def __init__(self, events):
        self.ranges = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events
                             if e.get("cat") == "user_annotation" and RANGES.fullmatch(e["name"]))
        # A node of the backward pass has the sequence number of the forward operation that made it: the last operation
        # with this number.
        numbered = sorted((e["ts"], e["ts"] + e["dur"], e["name"], e["args"]["Sequence number"]) for e in events
                          if e.get("cat") == "cpu_op" and e.get("args", {}).get("Sequence number", -1) >= 0)
        nodes = [(start, end, number) for start, end, name, number in numbered if name.startswith(NODE)]
        passes, marks = ([r for r in self.ranges if r[2].startswith(word)] for word in ("forward", "layer "))
        inside = [(mark, end, f"forward {name}")  # a mark lasts until the next mark, or the end of the pass
                  for mark, _, name in marks for start, end, _ in passes if start <= mark <= end]
        named = {"loss": "forward loss", "forward": "forward embed"}
        ranges = [(start, end, named.get(name, "other" if name.startswith("step ") else name))
                  for start, end, name in self.ranges if not name.startswith("layer ")]
        self.flatten(ranges + inside)
        made = {number: self.at(start) for start, _, _, number in numbered if self.at(start).startswith("forward ")}
        ranges += [(*node, made[number].replace("forward", "backward")) for *node, number in nodes if number in made]
        self.flatten(ranges + inside)

    def flatten(self, ranges):
        self.borders = [-np.inf, *sorted({border for *ends, _ in ranges for border in ends})]
        self.names = ["between steps"] * len(self.borders)
        for *ends, name in sorted(ranges, key=lambda r: (r[0], -r[1])):  # an inner range is later
            first, last = (bisect_left(self.borders, border) for border in ends)
            self.names[first:last] = [name] * (last - first)

    def at(self, moment):
        return self.names[bisect_right(self.borders, moment) - 1]


def kernels(events):
    """All kernels and copies on the GPU, by start. An item without a recorded launch takes its predecessor's."""
    launches = {e["args"]["correlation"]: e["ts"] for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}
    items, latest = [], {}
    ran = (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    for e in sorted(ran, key=lambda e: e["ts"]):
        name, stream = e["name"], e["args"].get("stream")
        latest[stream] = launches.get(e["args"].get("correlation"), latest.get(stream, -np.inf))
        kind = "communication" if name.startswith("nccl") else "transfer" if re.search("HtoD|DtoH", name) else "compute"
        items.append(Item(name, e["ts"], e["ts"] + e["dur"], e["dur"], latest[stream], kind,
                          grid=str(e["args"].get("grid"))))
    return items


def operators(events):
    """All operators of the thread that trains, by start."""
    thread = next(e["tid"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("step "))
    ran = (e for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread)
    items, stack = [], []
    for e in sorted(ran, key=lambda e: (e["ts"], -e["dur"])):
        items.append(Item(e["name"], e["ts"], e["ts"] + e["dur"], e["dur"], e["ts"]))
        while stack and stack[-1].end <= e["ts"]:
            stack.pop()
        if stack:
            stack[-1].own -= e["dur"]
        stack.append(items[-1])
    return items


def tell_apart(groups, whole):
    """Gives the kernels of each CUDA graph the regions of the same kernels in a group launched kernel by kernel.

    groups: the kernels of each micro-step or of each update, in order; whole: the region of those that a graph
    launched. The kernels of a graph are those of the launches from which the graph was recorded, and those of one name
    and grid have their order; if they run side by side, they may swap regions. Only copies and memory sets have other
    names, such as memcpy32_post. Before a graph the host copies its inputs, and the last copy of a graph is that of its
    loss; such copies keep the region `whole`. So do all kernels of a graph if no earlier group has the same, since
    libraries choose other kernels for other lengths.
    """
    def by_name(items):
        found = defaultdict(list)
        for item in items:
            copied = re.match("mem(cpy|set)", item.name, re.I)
            found[(copied[0].lower(), None) if copied else (item.name, item.grid)].append(item)
        return found

    known = []  # {(name, grid): kernels in order} of each group that was launched kernel by kernel
    for group in filter(None, groups):
        if own := [n for n, i in enumerate(group) if i.region != whole]:
            known.append(by_name(group[own[0]:own[-1] + 1]))
            continue
        [(launch, _)] = Counter(item.launched for item in group).most_common(1)  # one call launches a whole graph
        found = by_name(item for item in group if item.launched == launch)
        same = next((each for each in reversed(known) if all(
            len(found[key]) == len(each[key]) or key[1] is None for key in {*found, *each})), {})
        for key, items in found.items():
            for item, model in zip(items, same.get(key, ())):
                item.region = model.region


def cover(items, free):
    """Gives free time, [(from, to), ...], to the first of `items`, sorted by start, that covers it.

    Returns (microseconds of each item, the remaining free time)."""
    taken, passed, free = [], [], deque(free)
    for item in items:
        taken.append(0.0)
        while free and free[0][0] < item.end:
            start, end = free.popleft()
            if start < item.start:
                passed.append((start, min(end, item.start)))
            if end > item.start:
                taken[-1] += min(end, item.end) - max(start, item.start)
            if end > item.end:
                free.appendleft((item.end, end))
    return taken, passed + list(free)


# ---- The least work of the kernels that take most of a step, in operations and bytes ---------------------------------

def product(n, M, K):
    """(operations, bytes) of n symmetric M x M products over K, in tiles of 128 up to the diagonal."""
    return n * M * (M + 128) * K, 2 * n * M * (K + M)


WORK = {  # operation -> (kernels of one call, function from sizes to (bf16 operations, bytes)). A multiply-add is two
    # operations; each operand counts once. fp8: with codes, in 1 byte; the limit is twice as high, so that an operation
    # counts as half of one.
    "XXT": ("_gram_kernel", product),
    "XTX": ("_gram_kernel", product),
    "ba_plus_cAA": ("_gram_kernel", lambda n, M: (product(n, M, M)[0], 4 * n * M * M)),
    # slow: with a slow average. average: with that of the weights.
    "fused_momentum": ("_momentum_kernel _momentum_scale_kernel", lambda size, slow: (0, (12 + 8 * slow) * size)),
    "normuon_update": ("_row_norms_kernel _normuon_kernel", lambda size, average=False: (0, (10 + 8 * average) * size)),
    "adam_update": ("_adam_kernel", lambda size, average=False: (0, (22 + 8 * average) * size)),
    "replicated_update": ("_adam_kernel", lambda size, itemsize: (0, (32 + 3 * itemsize) * size)),
    # d: width of the heads of v; qk: width of those of q and k, divided by d; pairs: (query, key) that see each other,
    # over all heads
    "attend": ("_attention_kernel", lambda N, D, d, qk, pairs: (2 * d * (qk + 1) * pairs, 4 * N * D * (qk + 1))),
    "attend_backward": ("_attention_backward_kernel", lambda N, D, d, qk, pairs: (
        2 * d * (3 * qk + 2) * pairs, N * D * (8 * qk + 6))),
    "project": ("_project_kernel", lambda N, D, value, qk, fp8=False: (
        (2 - fp8) * N * D * D * (2 * qk + 1), N * D * (4 - fp8 + 4 * qk + 2 * value))),
    # Reads q, k and their gradients, writes two gradients; may copy dv, read ve and write the gradient of ve. In FP8 it
    # writes codes of q, k and v in both layouts.
    "project_backward": ("_project_grad_kernel", lambda N, D, value, paired, qk, fp8=False: (
        0, 4 * N * D * (3 * qk + 1 + value) if fp8 else
        2 * N * D * (6 * qk + (3 + paired if value else 2 * paired)))),
    # channels: input of the gates. Reads and writes the gradients of the channels and of other gates of the layer.
    "head_gates": ("_head_gates_kernel", lambda N, channels, gates: (0, 2 * N * (channels + gates))),
    "head_gates_backward": ("_head_gates_grad_kernel", lambda N, channels, gates: (
        0, 2 * N * (3 * channels + 2 * gates))),
    # relu(x W1ᵀ)², and the gradient before the activation
    "mlp": ("_mlp_kernel", lambda N, D, F, fp8=False: ((2 - fp8) * N * D * F, N * ((2 - fp8) * D + 2 * F))),
    "mlp_backward": ("_mlp_kernel", lambda N, D, F, fp8=False: (
        (2 - fp8) * N * D * F, N * ((2 - fp8) * D + (4 - fp8) * F))),
    "pointer_inputs": ("_pointer_inputs_kernel", lambda N, d: (0, 10 * N * d)),
    "pointer_inputs_backward": ("_pointer_inputs_grad_kernel", lambda N, d: (0, 16 * N * d)),
    "pointer": ("_pointer_kernel", lambda N, d, pairs: (2 * d * pairs, 4 * N * d)),
    "pointer_backward": ("_pointer_backward_kernel", lambda N, d, pairs: (6 * d * pairs, 8 * N * d)),
    "cross_entropy": ("_cross_entropy_kernel", lambda rows, V, fp8: (0, (3 if fp8 else 4) * rows * V)),
    "embedding_grad": ("_sum_rows_kernel _sum_pieces_kernel", lambda N, D, unique: (0, 2 * D * (N + 2 * unique)))}


def seen_pairs(lengths, window):
    """Pairs (query, key) of one head with key <= query <= key + window in documents of these lengths."""
    lengths = np.asarray(lengths, dtype=np.int64)
    near = np.minimum(lengths, window)
    return int((near * (near + 1) // 2 + (lengths - near) * (window + 1)).sum())


def calls(trainer, plan, batches):
    """(operation, sizes) of every call on this rank in the step of `plan`, which has these batches."""
    config, optimizer, head, ranks = trainer.config, trainer.optimizer, trainer.head, trainer.rt.world
    model, layers, stage = config.model, config.model.layers, config.schedule.stages[plan.stage]
    D, H, F, V, N = model.model_dim, model.num_heads, model.mlp_dim, model.padded_vocab, plan.micro_batch_tokens
    for batch in batches:
        documents = np.unique(batch.documents[False][0].cpu(), return_counts=True)[1]  # their lengths
        token_ids = batch.tokens.unique().numel()
        for layer in layers:
            yield from ((name, N, D, F, config.system.fp8_mlp) for name in ("mlp", "mlp_backward"))
            if layer.attention:
                folds, value, paired = 1 + layer.paired, layer.value_embed, layer.paired
                qk = 0.5 if layer.narrow else 1  # width of the heads of q and k, divided by d
                window = stage.long_window if layer.long else stage.short_window
                pairs = H // folds * seen_pairs(folds * documents, window)
                yield from ((name, N, D, D // H, qk, pairs) for name in ("attend", "attend_backward"))
                yield "project", N, D, value, qk, config.system.fp8_qkv
                yield "project_backward", N, D, value, paired, qk, config.system.fp8_qkv
                channels = optimizer.params["attn_gate_bank"].size(-1) * (3 if value and not paired else 2) // 2
                yield from ((name, N, channels, H * (1 + value)) for name in ("head_gates", "head_gates_backward"))
        if model.pointer:
            d, pairs = optimizer.params["pointer_sink"].numel(), seen_pairs(documents - 1, N)  # none points at itself
            yield from ((name, N, d, pairs) for name in ("pointer", "pointer_backward"))
            yield from ((name, N, d) for name in ("pointer_inputs", "pointer_inputs_backward"))
        columns = V if batch.candidates is None else batch.candidates.numel()
        for start in range(0, N, head.block):
            yield "cross_entropy", min(head.block, N - start), columns, head.fp8
        for _ in range(1 + sum(layer.value_embed for layer in layers)):  # tables indexed by token id
            yield "embedding_grad", N, D, token_ids
        touched = batch.row_ids[model.ngram_table].unique().numel()
        yield "embedding_grad", N * len(model.ngrams), D, touched
        if ranks > 1 and optimizer.of_rows:  # of the rows that the ranks send to their owners
            yield "embedding_grad", touched, D, touched // ranks
    for each in optimizer.sharded.values():
        if each.row.optim == "normuon":
            n, R, C = each.part.shape
            side, name = min(R, C), "XXT" if R <= C else "XTX"
            yield from [(name, n, side, max(R, C)), ("ba_plus_cAA", n, side)] * config.optim.polar_steps
            yield from (("fused_momentum", n * R * C, bool(config.optim.slow_momentum)), ("normuon_update", n * R * C))
        elif "m" in each.state and not (plan.tied and each.row.tied_to) and (
                plan.tables if each.row.sparse else plan.adam):
            yield "adam_update", each.part.numel()
    if plan.adam:
        yield from (("replicated_update", len(x), x.element_size()) for x in optimizer.replicated.grads)


# ---- Regions -> numbers -> table -------------------------------------------------------------------------------------

def analyse(trace):
    """The numbers of a chrome trace, in milliseconds per step. Raises ValueError if it lacks steps or kernels."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    run, gpu = trace.get("run", {}), kernels(events)
    host = Host(events)
    steps = [r for r in host.ranges if r[2].startswith("step ")]
    if not steps:
        raise ValueError("no training step in this trace; --profile=START:COUNT of train_gpt.py writes traces of steps")
    if not gpu and run.get("device") == "cuda":
        raise ValueError("it has no kernels; was the profiler not allowed to see them?")
    items = [i for i in gpu or operators(events) if any(start <= i.launched < end for start, end, _ in steps)]
    for item in items:
        item.region = host.at(item.launched)
    if gpu:
        for whole, kind in ("micro-step", "compute"), ("update", "compute"), ("update", "communication"):
            tell_apart([[i for i in items if i.kind == kind and start <= i.launched < end]
                        for start, end, name in host.ranges if name == whole], whole)
    if run.get("cuda_graphs") and len(steps) > 1:  # without the steps of launches kernel by kernel
        steps = steps[min(2, len(steps) - 1):]
        items = [i for i in items if i.launched >= steps[0][0]]
    compute, communication = ([i for i in items if i.kind == kind] for kind in ("compute", "communication"))
    if gpu:
        window = min(i.start for i in compute + communication), max(i.end for i in compute + communication)
    else:
        communication = [Item(name, start, end, end - start, start, region=name) for start, end, name in host.ranges
                         if name.startswith("wait ") and run.get("ranks") != 1]
        window = steps[0][0], steps[-1][1]

    ms = 1e-3 / len(steps)
    taken, free = cover(compute, [window])
    exposed, idle = cover(communication, free)
    busy = sorted(compute + communication, key=lambda i: i.start)
    # Idle time belongs to the region of the next kernel; without a GPU, to the region of the host.
    borders, names = ([-np.inf, *(i.start for i in busy)], [i.region for i in busy]) if gpu else (
        host.borders, host.names)
    pauses = [Item("", *ends, 0.0, 0.0, region=name) for name, *ends in zip(names, borders, [*borders[1:], np.inf])]
    regions = defaultdict(lambda: [0.0] * 4)  # compute, communication, of that exposed, idle
    columns = ((compute, taken), (communication, [i.own for i in communication]), (communication, exposed),
               (pauses, cover(pauses, idle)[0]))
    for column, (group, amounts) in enumerate(columns):
        for item, amount in zip(group, amounts):
            regions[item.region][column] += amount * ms
    split = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.0)
    for region, amounts in regions.items():
        way = re.match("(forward|backward)|(reduce|wait|update|gather|zero)|", region)
        split[way[1] or ("optimizer" if way[2] else "other")] += amounts[0]
    split |= {"exposed communication": sum(exposed) * ms, "idle": sum(end - start for start, end in idle) * ms}
    times = defaultdict(list)  # short name -> ms of every call
    for item in items:
        times[short(item.name)].append(item.own * ms)
    names = [(name, len(each) / len(steps), sum(each)) for name, each in times.items()]
    numbers = [int(name.split()[1]) for _, _, name in steps]
    return {"steps": numbers, "run": run, "ms": (window[1] - window[0]) * ms, "split": split,
            "regions": dict(regions), "names": sorted(names, key=lambda row: -row[2]),
            "rates": rates(items, run, numbers) if run.get("limits") else []}


def rates(items, run, numbers):
    """Rows (operations, calls per step, ms per step, rate, its unit, part of the measured limit) of our kernels in the
    steps of these numbers. Operations that share their kernels share a row. Its last three values are None if the
    number of launches is not the expected number."""
    launches, families, rows = defaultdict(list), defaultdict(list), []  # seconds by kernel; least work by kernels
    for item in items:
        launches[item.name.replace("_hopper_kernel", "_kernel")].append(item.own * 1e-6)
    calls = (call for step in run["steps"] if step["step"] in numbers for call in step["calls"] if call[1] in WORK)
    for times, name, *sizes in calls:
        kinds, least_work = WORK[name]
        families[kinds] += [(name, *least_work(*sizes))] * times
    for kinds, done in families.items():
        if seconds := [each for kind in kinds.split() for each in launches[kind]]:
            names, *amounts = zip(*done)
            amounts, took = np.array(amounts, dtype=float), sum(seconds)
            least = amounts / [[run["limits"]["bf16"]], [run["limits"]["copy"]]]
            bound = int(least[1].sum() > least[0].sum())
            found = amounts[bound].sum() / took, ("FLOP/s", "B/s")[bound], least.max(0).sum() / took
            if len(seconds) != len(done) * len(kinds.split()):
                found = [None] * 3
            rows.append((" ".join(sorted({*names})), len(done) / len(numbers), 1e3 * took / len(numbers), *found))
    return sorted(rows, key=lambda row: -row[2])


def short(name):
    """A kernel's name without template arguments and numbers."""
    name = re.sub(r"^(void |std::enable_if<.*?>::type )", "", name)
    base = re.split(r"[<(]", name)[0].strip()
    inner = re.search(r"cutlass_\w+|\w*[Ff]unctor\w*|\w+_kernel_cuda", name[len(base):])
    base = base.rpartition("::")[2] if "<" in name else base
    base = re.sub(r"^(nvjet_\w*?\d+x\d+)_\w+$|^(triton_\w+?)_\d+$", r"\1\2", base)
    return (f"{base} {inner[0]}" if inner else base)[:56]


def table(result, top=25):
    """The numbers of `analyse` as text. top: number of kernels to list."""
    total, run, regions, lines = result["ms"], result["run"], result["regions"], []

    def rows(titles, body):
        for name, *cells in titles, *body:
            cells = (f"{cell:.3f}" if isinstance(cell, float) else cell for cell in cells)
            lines.append(f"{name:<58}" + "".join(f"{cell:>15}" for cell in cells))
        lines.append("")

    def rest(more):
        """One row with the sums of these rows."""
        return [(f"{len(more)} more", *map(sum, zip(*more)))] if more else []

    first, last, rank, ranks = result["steps"][0], result["steps"][-1], run.get("rank", "?"), run.get("ranks", "?")
    rows((f"steps {first} to {last}, rank {rank} of {ranks}", "ms per step", "share"),
         [(name, value, f"{value / total:.1%}") for name, value in {**result["split"], "all": total}.items()])
    if run.get("cuda_graphs"):
        missing = [str(step["step"]) for step in run["steps"] if step["step"] < first]
        lines[-1:] = [f"left out, as they were launched in part kernel by kernel: steps {', '.join(missing)}" if missing
                      else f"step {first} was launched in part kernel by kernel: idle contains the gaps", ""]
    inside = {name: numbers for name, numbers in regions.items() if name.startswith(("forward", "backward"))}
    order = {"embed": 0, "layer": 1, "loss": 2, "": 3}
    places = sorted({name.partition(" ")[2] for name in inside},
                    key=lambda place: (order[place.partition(" ")[0]], len(place), place))
    rows(("place", "forward ms", "backward ms"), [(place or "not told apart", *(
        inside.get(f"{way} {place}".strip(), [0.0])[0] for way in ("forward", "backward"))) for place in places])
    other = {name: numbers for name, numbers in regions.items() if name not in inside}
    other |= {"forward, backward": [sum(column) for column in zip(*inside.values())]} if inside else {}
    small = [other.pop(name) for name, numbers in [*other.items()] if sum(numbers) < 1e-3 * total]
    rows(("region", "ms", "communication", "exposed", "idle"),
         sorted(((name, *numbers) for name, numbers in other.items()), key=lambda row: -sum(row[1:])) + rest(small))
    names = result["names"]
    rows(("kernels", "calls", "ms", "share"),
         [(name, f"{count:g}", time, f"{time / total:.1%}")
          for name, count, time in names[:top] + rest([numbers for _, *numbers in names[top:]])])
    if result["rates"]:
        rows(("our operations", "calls", "ms", "rate", "of the limit"), [
            (name, f"{count:g}", time, *(("launches?", "") if rate is None else (
                f"{rate / 1e12:.2f} T{unit}", f"{part:.1%}")))
            for name, count, time, rate, unit, part in result["rates"]])
        limits = "{bf16:.3g} FLOP/s and bytes / {copy:.3g} B/s".format(**run["limits"])
        lines.append(f"limit: the larger of operations / {limits}; an operation in FP8 counts as half of one")
    return "\n".join(lines).rstrip()


# ---- Recording -------------------------------------------------------------------------------------------------------

def recorded(profiler, path, run):
    """Writes the trace to `path`, complete or not at all. Returns the numbers."""
    temporary = Path(f"{path}.tmp")
    try:
        profiler.export_chrome_trace(str(temporary))
        trace = json.loads(temporary.read_text(encoding="utf-8"), strict=False) | {"run": run}
        result = analyse(trace)
        with gzip.open(temporary, "wt", compresslevel=4, encoding="utf-8") as file:
            json.dump(trace, file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return result


class Profiler:
    """torch's profiler around the steps of --profile. The trainer calls its methods while the clock is stopped."""

    def __init__(self, trainer):
        self.trainer = trainer

    def start(self):
        from torch.profiler import ProfilerActivity, profile  # reading a trace does not need torch
        self.loader_state = self.trainer.loader.state_dict()
        gpu = self.trainer.rt.device.type == "cuda"
        if not gpu:
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it prints an error about the missing GPU
        self.profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu], acc_events=True)
        self.profiler.start()

    def stop(self):
        """Writes this rank's trace beside the log, and the tables, or a warning, into the log."""
        from torch import OutOfMemoryError, distributed

        from data.run.machine import ceilings
        self.profiler.stop()
        trainer, limits = self.trainer, None
        log, rt, system = trainer.log, trainer.rt, trainer.config.system
        plans, each = [trainer.plans[step] for step in system.profiled], trainer.micro_steps
        batches = trainer.loader.replay(self.loader_state, len(plans) * each)
        done = [Counter(calls(trainer, plan, batches[i * each:(i + 1) * each])) for i, plan in enumerate(plans)]
        if rt.device.type == "cuda" and system.dtype == "bfloat16":
            try:
                limits = ceilings()
            except OutOfMemoryError:
                log.line("warning: too little memory to measure what the kernels could do")
        run = {"device": rt.device.type, "rank": rt.rank, "ranks": rt.world, "limits": limits,
               "cuda_graphs": system.cuda_graphs and rt.device.type == "cuda",
               "steps": [{"step": plan.step, "calls": [[times, *call] for call, times in counts.items()]}
                         for plan, counts in zip(plans, done)]}
        path = log.path.with_name(f"{log.path.stem}_rank{rt.rank}.json.gz")
        try:
            shown = table(recorded(self.profiler, path, run))
            log.line(f"{shown}\n\ntrace, beside this log: {path.name}")
        except (OSError, ValueError) as error:
            log.line(f"warning: no trace in {path.name}: {one_line(error)}")
        if rt.world > 1:
            distributed.barrier()


def main(paths) -> int:
    if not paths or "--help" in paths:
        print(__doc__)
        return int(not paths)
    for path in paths:
        try:
            data = user_path(path).read_bytes()
            trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
            print(f"{path}\n{table(analyse(trace))}\n")
        except (OSError, EOFError, AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise UserError(f"{path}: {one_line(error)}") from None
    return 0


if __name__ == "__main__":
    run_program(main)
