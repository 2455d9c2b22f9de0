"""Where the time of training steps went:  python records/trace.py logs/run_..._rank0.json.gz [...]

Reads the chrome traces that --profile=START:COUNT writes; train_gpt.py uses it to write them. A kernel belongs to the range of host
time (`region` in train_gpt.py) it was launched from. A CUDA graph is one launch, so a micro-step is cut at kernels of ours that every
layer has (`cut`). Without a GPU operators stand for kernels, and waiting for other processes for communication.

An instant belongs to the kernel that runs, among several to the first; if only NCCL runs it is exposed communication, else idle.
Contents: events to kernels with regions; numbers and their table; recording; main. Bytes and operations are in work.py.
"""

import gzip
import json
import re
import sys
import time
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from records.work import WORK, calls, ceilings, describe, plain

# ---- Events -> kernels with their regions ----------------------------------------------------------------------------

RANGES = re.compile(r"(step|layer) \d+|data|micro-step|forward|loss|backward|(reduce|wait|update|gather) .+|zero gradients")
NODE = "autograd::engine::evaluate_function"
LIBRARY = re.compile("nvjet|gemm|cutlass|cublas|memset", re.I)  # matrix products of libraries, and what they bring along


@dataclass
class Item:
    """A kernel, or an operator where there is no GPU. Times in microseconds."""

    name: str
    start: float
    end: float
    own: float  # duration without operators inside
    launched: float  # host time
    kind: str = "compute"  # or communication, or transfer: between host and device
    region: str = ""


class Host:
    """The named ranges of host time; at(moment) is the name of the innermost one."""

    def __init__(self, events):
        self.ranges = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events
                             if e.get("cat") == "user_annotation" and RANGES.fullmatch(e["name"]))
        passes, marks = ([r for r in self.ranges if r[2].startswith(word)] for word in ("forward", "layer "))
        named = {"loss": "forward loss", "forward": "forward embed" if marks else "forward"}
        ranges = [(start, end, named.get(name, "other" if name.startswith("step ") else name))
                  for start, end, name in self.ranges if not name.startswith("layer ")]
        for mark, _, name in marks:  # holds until the next one, or the end of the pass
            ranges += [(mark, end, f"forward {name}") for start, end, _ in passes if start <= mark <= end]
        self.flatten(ranges)
        # A node of the backward pass carries the number of the operation that made it: the last one with this number.
        numbered = sorted((e["ts"], e["dur"], e["name"], e["args"]["Sequence number"]) for e in events
                          if e.get("cat") == "cpu_op" and e.get("args", {}).get("Sequence number", -1) >= 0)
        made = {number: self.at(ts) for ts, _, _, number in numbered if self.at(ts).startswith("forward ")}
        self.flatten(ranges + [(ts, ts + dur, made[number].replace("forward", "backward"))
                               for ts, dur, name, number in numbered if name.startswith(NODE) and number in made])

    def flatten(self, ranges):
        self.borders, self.names, stack = [-np.inf], ["between steps"], []
        for start, end, name in [*sorted(ranges, key=lambda r: (r[0], -r[1])), (np.inf, np.inf, "")]:
            while stack and stack[-1][0] <= start:
                self.borders.append(stack.pop()[0])
                self.names.append(stack[-1][1] if stack else self.names[0])
            self.borders.append(start)
            self.names.append(name)
            stack.append((end, name))

    def at(self, moment):
        return self.names[bisect_right(self.borders, moment) - 1]


def kernels(events):
    """All that ran on the GPU, by start. What has no recorded launch goes with its predecessor on the stream."""
    launches = {e["args"]["correlation"]: e["ts"] for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}
    items, latest = [], {}
    for e in sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"]):
        stream = e["args"].get("stream")
        latest[stream] = launches.get(e["args"].get("correlation"), latest.get(stream, -np.inf))
        kind = "communication" if e["name"].startswith("nccl") else "transfer" if re.search("HtoD|DtoH", e["name"]) else "compute"
        items.append(Item(e["name"], e["ts"], e["ts"] + e["dur"], e["dur"], latest[stream], kind))
    return items


def operators(events):
    """All operators of the thread that trains, by start."""
    thread = next(e["tid"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("step "))
    items, stack = [], []
    for e in sorted((e for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
        items.append(Item(e["name"], e["ts"], e["ts"] + e["dur"], e["dur"], e["ts"]))
        while stack and stack[-1].end <= e["ts"]:
            stack.pop()
        if stack:
            stack[-1].own -= e["dur"]
        stack.append(items[-1])
    return items


def cut(group):
    """Set the regions of a micro-step's kernels, given in order, by those of ours that every layer has: one of the MLP in either
    direction, the cross-entropy between. A layer ends with the library's products after its MLP kernel (forward) and starts with
    the one before it (backward); the projection and its gradient part layer 0 from the tables. Other kernels: nothing is set."""
    where = defaultdict(list)
    for i, item in enumerate(group):
        where[plain(item.name)].append(i)
    losses = where["_cross_entropy_kernel"] or [0]
    there, back = [i for i in where["_mlp_kernel"] if i < losses[0]], [i for i in where["_mlp_kernel"] if i > losses[-1]]
    if not there or len(there) != len(back):
        return

    def after(i):
        return next((j for j in range(i + 1, len(group)) if not LIBRARY.search(group[j].name)), len(group))

    def before(i):
        while "splitKreduce" in group[i - 1].name:
            i -= 1
        return i - bool(LIBRARY.search(group[i - 1].name))

    borders = [(0, "forward embed"), (next((i for i in where["_project_kernel"] if i < there[0]), 0), "forward layer 0")]
    borders += [(after(i), f"forward layer {n}") for n, i in enumerate(there[:-1], 1)]
    borders += [(after(there[-1]), "forward loss"), (losses[-1] + 1, "backward loss")]
    borders += [(before(i), f"backward layer {n}") for n, i in zip(reversed(range(len(back))), back)]
    borders += [(after(i), "backward embed") for i in where["_project_grad_kernel"][-1:] if i > back[-1]]
    for (start, region), (end, _) in zip(borders, [*borders[1:], (len(group), "")]):
        for item in group[start:end]:
            item.region = region


def cover(items, free):
    """Items by start take what they cover of free time, [(from, to), ...] -> (microseconds of each item, time that stays free)."""
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


# ---- Regions -> numbers -> table -------------------------------------------------------------------------------------


def analyse(trace):
    """Chrome trace -> numbers, in milliseconds per step."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    host, run, gpu = Host(events), trace.get("run", {}), kernels(events)
    steps = [r for r in host.ranges if r[2].startswith("step ")]
    if not steps:
        raise ValueError("no training step in this trace; --profile=START:COUNT of train_gpt.py writes those that have some")
    if not gpu and run.get("device") == "cuda":
        raise ValueError("it has no kernels; was the profiler not allowed to see them?")
    items = [i for i in gpu or operators(events) if any(start <= i.launched < end for start, end, _ in steps)]
    for item in items:
        item.region = host.at(item.launched)
    work = [i for i in items if i.kind == "compute"]
    if gpu:
        for start, end, _ in (r for r in host.ranges if r[2] == "micro-step"):
            cut([i for i in work if start <= i.launched < end])
        talk = [i for i in items if i.kind == "communication"]
        window = min(i.start for i in work + talk), max(i.end for i in work + talk)
    else:
        talk = [Item(name, start, end, end - start, start, region=name) for start, end, name in host.ranges
                if name.startswith("wait ") and run.get("ranks") != 1]
        window = steps[0][0], steps[-1][1]

    ms = 1e-3 / len(steps)
    regions = defaultdict(lambda: [0.0] * 4)  # compute, communication, of that exposed, idle
    taken, free = cover(work, [window])
    exposed, idle = cover(talk, free)
    for column, those, amounts in (0, work, taken), (1, talk, [i.own for i in talk]), (2, talk, exposed):
        for item, amount in zip(those, amounts):
            regions[item.region][column] += amount * ms
    busy = sorted(work + talk, key=lambda i: i.start)
    if gpu:  # idle time counts for the kernel that comes next
        for start, end in idle:
            regions[busy[bisect_left(busy, end, key=lambda i: i.start)].region][3] += (end - start) * ms
    else:  # for the range that the host was in
        ends = [*host.borders[1:], np.inf]
        ranges = [Item("", start, end, 0.0, 0.0, region=name) for start, end, name in zip(host.borders, ends, host.names)]
        for item, amount in zip(ranges, cover(ranges, idle)[0]):
            regions[item.region][3] += amount * ms
    split = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.0)
    for region, numbers in regions.items():
        word = region.partition(" ")[0]
        split[word if word in split else "optimizer" if word in ("reduce", "wait", "update", "gather", "zero") else "other"] += numbers[0]
    split |= {"exposed communication": sum(exposed) * ms, "idle": sum(end - start for start, end in idle) * ms}
    own = defaultdict(list)
    for item in items:
        own[short(item.name)].append(item.own * ms)
    names = sorted(((name, len(times) / len(steps), sum(times)) for name, times in own.items()), key=lambda row: -row[2])
    return {"steps": [int(name.split()[1]) for _, _, name in steps], "run": run, "ms": (window[1] - window[0]) * ms, "split": split,
            "communication": sum(cover(talk, [window])[0]) * ms, "regions": dict(regions), "names": names,
            "rates": rates(items, run, len(steps)), "items": busy}


def rates(items, run, steps):
    """Rows (operations, calls and ms per step, rate, its unit, part of the measured limit) for our kernels; the last three are None
    when there are not as many launches as expected. Operations that share a kernel are one row."""
    if not run.get("limits"):
        return []
    count, took, work, rows = Counter(), Counter(), defaultdict(list), []
    for item in items:
        count[plain(item.name)] += 1
        took[plain(item.name)] += item.own * 1e-6
    for name, *sizes in calls(run):
        work[name].append(WORK[name][1](*sizes))
    families = []  # (operations, their kernels)
    for name in work:
        names, kinds = {name}, {*WORK[name][0].split()}
        for family in [f for f in families if f[1] & kinds]:
            families.remove(family)
            names, kinds = names | family[0], kinds | family[1]
        families.append((names, kinds))
    for names, kinds in families:
        seen, seconds = (sum(counter[kind] for kind in kinds) for counter in (count, took))
        if seen:
            done = np.array([call for name in names for call in work[name]], dtype=float)
            least = done / (run["limits"]["bf16"], run["limits"]["copy"])
            column = int(least[:, 1].sum() > least[:, 0].sum())
            found = done[:, column].sum() / seconds, ("FLOP/s", "B/s")[column], least.max(1).sum() / seconds
            expected = seen == sum(len(work[name]) * len(WORK[name][0].split()) for name in names)
            rows.append((" ".join(sorted(names)), len(done) / steps, 1e3 * seconds / steps, *(found if expected else [None] * 3)))
    return sorted(rows, key=lambda row: -row[2])


def short(name):
    """A kernel's name without what only its compiler wants to know."""
    name = re.sub(r"^(void |std::enable_if<.*?>::type )", "", name)
    base = re.split(r"[<(]", name)[0].strip()
    inner = re.search(r"cutlass_\w+|\w*[Ff]unctor\w*|\w+_kernel_cuda", name[len(base):])
    base = re.sub(r"^(nvjet_\w*?\d+x\d+)_\w+$|^(triton_\w+?)_\d+$", r"\1\2", base.rpartition("::")[2] if "<" in name else base)
    return (f"{base} {inner[0]}" if inner else base)[:56]


def table(result, top=25):
    """The numbers as text."""
    total, run, regions, lines = result["ms"], result["run"], result["regions"], []

    def rows(titles, body):
        for name, *cells in titles, *body:
            cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
            lines.append(f"{name:<58}" + "".join(f"{cell:>15}" for cell in cells))
        lines.append("")

    def share(value):
        return f"{value / total:.1%}"

    rows((f"steps {result['steps'][0]} to {result['steps'][-1]}, rank {run.get('rank', '?')} of {run.get('ranks', '?')}", "ms per step",
          "share"), [(name, value, share(value)) for name, value in {**result["split"], "all": total}.items()])
    inside = {name: numbers for name, numbers in regions.items() if name.startswith(("forward", "backward"))}
    order = {"embed": 0, "layer": 1, "loss": 2, "": 3}
    places = sorted({name.partition(" ")[2] for name in inside}, key=lambda place: (order[place.partition(" ")[0]], len(place), place))
    rows(("place", "forward ms", "backward ms"), [(place or "not told apart", *(
        inside.get(f"{way} {place}".strip(), [0.0])[0] for way in ("forward", "backward"))) for place in places])
    other = {name: numbers for name, numbers in regions.items() if name not in inside}
    other |= {"forward, backward": [sum(column) for column in zip(*inside.values())]} if inside else {}
    small = [other.pop(name) for name, numbers in [*other.items()] if sum(numbers) < 1e-3 * total]
    rows(("region", "ms", "communication", "exposed", "idle"),
         sorted(((name, *numbers) for name, numbers in other.items()), key=lambda row: -sum(row[1:]))
         + [(f"{len(small)} more", *map(sum, zip(*small)))] * bool(small))
    left = result["names"][top:]
    rows(("kernels", "calls", "ms", "share"), [(name, f"{count:g}", time, share(time)) for name, count, time in [
        *result["names"][:top], *[(f"{len(left)} more", sum(row[1] for row in left), sum(row[2] for row in left))] * bool(left)]])
    if result["rates"]:
        rows(("our operations", "calls", "ms", "rate", "of the limit"), [
            (name, f"{count:g}", time, *(("launches?", "") if rate is None else (
                f"{rate / 1e12:.2f} T{unit}", f"{part:.1%}"))) for name, count, time, rate, unit, part in result["rates"]])
        lines.append("limit: the larger of operations / {bf16:.3g} FLOP/s and bytes / {copy:.3g} B/s".format(**run["limits"]))
    return "\n".join(lines).rstrip()


# ---- Recording -------------------------------------------------------------------------------------------------------


def recorded(profiler, path, run):
    """Write the trace with the regions of the kernels to `path`, complete or not at all; the numbers."""
    temporary = Path(f"{path}.tmp")
    try:
        profiler.export_chrome_trace(str(temporary))
        trace = json.loads(temporary.read_text(encoding="utf-8"), strict=False) | {"run": run}
        result = analyse(trace)
        for item in result["items"]:
            track = trace["traceEvents"][-1]
            if track.get("cat") == "region" and (track["name"], track["tid"]) == (item.region, item.kind):
                track["dur"] = max(track["dur"], item.end - track["ts"])
            else:
                trace["traceEvents"].append({"ph": "X", "cat": "region", "name": item.region, "pid": "regions", "tid": item.kind,
                                             "ts": item.start, "dur": item.end - item.start})
        with gzip.open(temporary, "wt", compresslevel=4, encoding="utf-8") as file:
            json.dump(trace, file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return result


class Profile:
    """The profiler around the steps of --profile. `start` and `stop` return the seconds that they took: outside the clock."""

    def __init__(self, trainer, layers, polar_steps):
        self.trainer, self.layers, self.polar_steps = trainer, layers, polar_steps

    def start(self):
        from torch.profiler import ProfilerActivity, profile  # reading a trace does without
        self.trainer.synchronize()
        began = time.perf_counter()
        self.data = self.trainer.loader.state_dict()
        gpu = self.trainer.rt.device.type == "cuda"
        self.profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu], acc_events=True)
        self.profiler.start()
        seconds = self.spent(began)
        self.running = time.perf_counter()
        return seconds

    def stop(self):
        """Also writes this rank's trace beside the log, and what it says into the log."""
        import torch
        began, trainer = time.perf_counter(), self.trainer
        self.seconds = began - self.running
        self.profiler.stop()
        plans = [trainer.plans[step] for step in trainer.config.run.profiled]
        batches = [batch for batch, *_ in islice(trainer.loader._batches(**self.data), len(plans) * trainer.micro_steps)]
        trainer.synchronize()  # the copies ran on a side stream
        run = describe(trainer.config, trainer.rt, self.layers, plans, batches, trainer.optimizer, trainer.head)
        run["polar_steps"] = self.polar_steps
        if trainer.rt.device.type == "cuda" and trainer.dtype == torch.bfloat16:
            try:
                run["limits"] = ceilings()
            except torch.OutOfMemoryError:
                trainer.log.line("warning: too little memory to measure what the kernels could do")
        log = [str(trainer.log.path) if trainer.rt.rank == 0 else None]
        torch.distributed.broadcast_object_list(log)
        path = Path(log[0]).with_name(f"{Path(log[0]).stem}_rank{trainer.rt.rank}.json.gz")
        try:
            trainer.log.line(f"{table(recorded(self.profiler, path, run))}\n\ntrace, beside this log: {path.name}")
        except (OSError, ValueError) as error:
            trainer.log.line(f"warning: no trace in {path}: {error}")
        torch.distributed.barrier()
        return self.spent(began)

    def spent(self, began):
        seconds = time.perf_counter() - began
        self.trainer.seconds["profile"] = self.trainer.seconds.get("profile", 0.0) + seconds
        return seconds

    def cost(self):
        """One line, when the run is over."""
        trainer, profiled = self.trainer, self.trainer.config.run.profiled
        kinds = [(plan.stage, plan.adam) for plan in trainer.plans[trainer.first:]]
        times = np.diff(trainer.clock_ms, prepend=1000 * trainer.before)
        return cost(self.seconds, times, kinds, range(profiled.start - trainer.first, profiled.stop - trainer.first))


def cost(seconds, times, kinds, profiled, reach=20):
    """What the profiler cost: the profiled steps, which took `seconds`, against the median of those like them (times: of every
    step, ms), at most `reach` steps away."""
    mine, others = 1000 * seconds / len(profiled), []
    for step in profiled:
        near = range(max(0, step - reach), min(len(times), step + reach + 1))
        others.append([times[other] for other in near if other not in profiled and kinds[other] == kinds[step]])
    if not all(others):
        return f"profiler: {mine:.2f} ms per profiled step; no others like them to compare with"
    median = sum(map(np.median, others)) / len(others)
    return f"profiler: {mine:.2f} ms per profiled step, {median:.2f} ms for others like them (median): {mine - median:+.2f} ms"


def main(paths):
    for path in paths:
        try:
            octets = Path(path).read_bytes()
            trace = json.loads(gzip.decompress(octets) if octets[:2] == b"\x1f\x8b" else octets)
            print(f"{path}\n{table(analyse(trace))}\n")
        except (OSError, EOFError, KeyError, TypeError, ValueError, zlib.error) as error:
            sys.exit(f"error: {path}: {error}")
    if not paths:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
