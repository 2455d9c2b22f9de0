"""Profiles: made-up traces of a GPU and of a CPU with known answers, the real thing on a tiny run, and the commands of the README."""

import gzip
import json
import random
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace as NS

import numpy as np
import pytest
import torch

import train_gpt as T
from data import loader as L
import triton_kernels as kernels
from oracles import write_shard
from records import compare, trace, work
from test_run import ENV, ROOT, TINY, VAL_TOKENS, text

# What copies or sets memory has another name in a graph.
IN_A_GRAPH = {"Memcpy DtoD (Device -> Device)": "memcpy32_post", "Memset (Device)": "memset32"}
# A micro-step of three layers, the middle one without attention: (region, kernels in order).
GEMM, SPLIT = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT"
REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)"
FUSED = "triton_red_fused_add_mul_rms_norm_7"
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>(int)"
MICRO_STEP = (
    ("forward embed", ["Memcpy DtoD (Device -> Device)", "index_select", FUSED, FUSED]),
    ("forward layer 0", ["_project_kernel", "_attention_kernel", GEMM, FUSED, "_mlp_hopper_kernel", "Memset (Device)", SPLIT,
                         REDUCE]),
    ("forward layer 1", [FUSED, "_mlp_hopper_kernel", GEMM]),
    ("forward layer 2", [FUSED, "_project_kernel", "_attention_kernel", GEMM, FUSED, "_mlp_hopper_kernel", GEMM]),
    ("forward loss", [FUSED, "_quantise_kernel", "_transpose_bytes_kernel", GEMM, "_cross_entropy_kernel", GEMM, "_cross_entropy_kernel"]),
    ("backward loss", ["sum", "_transpose_bytes_kernel", GEMM, GEMM, FUSED]),
    ("backward layer 2", [SPLIT, REDUCE, "_mlp_hopper_kernel", GEMM, GEMM, FUSED, GEMM, "_row_dot_kernel", "_attention_backward_kernel",
                          "_project_grad_kernel", GEMM, GEMM, FUSED]),
    ("backward layer 1", [GEMM, "_mlp_hopper_kernel", GEMM, GEMM, FUSED]),
    ("backward layer 0", [GEMM, "_mlp_hopper_kernel", GEMM, GEMM, FUSED, GEMM, "_row_dot_kernel", "_attention_backward_kernel",
                          "_project_grad_kernel", GEMM, GEMM]),
    ("backward embed", [FUSED, *["_sum_rows_kernel"] * 8]))


class Recorder:
    """Events of a made-up trace, in microseconds; kernels run one after the other on one stream, `gap` apart."""

    def __init__(self):
        self.events, self.host, self.device, self.links, self.stream = [], 1000.0, 1500.0, 0, 7
        self.truth = Counter()  # region -> microseconds of kernels

    def event(self, cat, name, ts, dur, tid=1, **args):
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})

    def range(self, name, inside):
        start = self.host
        self.host += 1
        inside()
        self.host += 1
        self.event("user_annotation", name, start, self.host - start)

    def launch(self, name="cudaLaunchKernel", tid=1, cat="cuda_runtime"):
        self.links += 1
        self.event(cat, name, self.host, 2, tid, correlation=self.links)
        self.host += 3
        return self.links

    def kernel(self, name, dur, region, gap=0.0, link=None):
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
        self.device += gap
        self.event(kind, name, self.device, dur, self.stream, stream=self.stream, correlation=link or self.launch())
        self.device += dur
        self.truth[region] += dur

    def replayed(self, content=MICRO_STEP, duration=lambda: 3.0, known=True):
        """A micro-step as one graph, after copies of its inputs."""
        def micro_step():
            for name in ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)", COPY):
                self.kernel(name, duration(), "micro-step")
            link = self.launch("cudaGraphLaunch")
            for region, names in content:
                for name in names:
                    name = IN_A_GRAPH.get(name, name)
                    self.kernel(name, duration(), region if known else "micro-step", link=link)
        self.range("micro-step", micro_step)

    def launched(self, content=MICRO_STEP, duration=lambda: 3.0, gap=0.0, marks="ranges", known=True):
        """A micro-step kernel by kernel, each `gap` after the one before; the backward pass is another thread's.

        Its layers show by ranges and by numbers of operations, or (compiled) by our operators; known: whether they show.
        """
        compiled, numbers = marks == "operators", {}  # number: of an operation in a region of the forward pass

        def operation(region):
            numbers[region] = len(self.events)
            self.event("cpu_op", "aten::mm", self.host, 1, **{"Sequence number": numbers[region]})
            self.host += 2

        def kernels(region, names, tid=1):
            place = region.split()[1]
            shown = region if known or place == "loss" else region.split()[0]
            for name in names:
                self.kernel(name, duration(), shown, gap, self.launch(tid=tid, cat="cuda_driver"))

        def node(region, inside):
            start = self.host
            inside()
            self.event("cpu_op", f"{trace.NODE}: X", start, self.host - start, 2,
                       **{"Sequence number": numbers[region]})

        def operators(region, names, before=0):
            """All but the first `before` kernels are launched by our operators."""
            kernels(region, names[:before])
            half = 0 if region.endswith("1") else len(names) // 2  # layer 1 has no attention
            for block, part in ("attention_block", names[before:half]), ("mlp_backward", names[max(before, half):]):
                if part:
                    start = self.host
                    kernels(region, part)
                    self.event("cpu_op", f"speedrun::{block}", start, self.host - start)

        forward_part = [(r, names) for r, names in content if r.startswith("forward") and "loss" not in r]
        backward_part = [(r, names) for r, names in content if r.startswith("backward") and "loss" not in r]

        def forward():
            for region, names in forward_part:
                if "layer" not in region or not compiled:
                    if marks == "ranges" and "layer" in region:
                        self.range(region.removeprefix("forward "), lambda: None)
                    operation(region)
                    kernels(region, names)
                    if compiled:
                        operation("compiled")
                else:
                    operators(region, names)

        def loss():
            for region, names in content:
                if region == "forward loss":
                    operation(region)
                    kernels(region, names)

        def backward():
            for region, names in content:
                if region == "backward loss":
                    node("forward loss", lambda: kernels(region, names, 2))
            if compiled:
                def layers():
                    for i, (region, names) in enumerate(backward_part):
                        if "layer" in region:
                            operators(region, names, before=i == 0)
                    kernels("backward embed", [FUSED])  # puts the gradients of all layers together
                node("compiled", layers)
            for region, names in backward_part:
                if not compiled or "layer" not in region:
                    node(region.replace("backward", "forward"), lambda: kernels(region, names[compiled:], 2))

        self.range("micro-step", lambda: [self.range(part.__name__, part) for part in (forward, loss, backward)])

    def trace(self, **run):
        random.Random(0).shuffle(self.events)  # the order of a file means nothing
        return {"traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, *self.events], "run": run}


def run_of(*steps):
    """What the trainer says of a run with CUDA graphs, as far as the regions need it."""
    return dict(cuda_graphs=True, layers=[dict(attention=n != 1) for n in range(3)],
                steps=[dict(step=step) for step in steps])


def milliseconds(regions, column=0):
    return {region: numbers[column] for region, numbers in regions.items() if numbers[column]}


@pytest.mark.parametrize("steps, marks", [([20], "ranges"), ([19, 20, 21], "ranges"), ([19, 20, 21], "operators")])
def test_regions_of_a_gpu(steps, marks):
    """Two micro-steps per step, of which the very first is launched kernel by kernel. Kernels have distinct lengths, so that
    one in the wrong place shows. The first of several steps counts nowhere."""
    rec, rng, idle = Recorder(), random.Random(1), Counter()

    def duration():
        return rng.randint(1, 1000)

    def step():
        for _ in range(2):
            rec.range("data", lambda: None)
            if rec.links:
                rec.replayed(duration=duration)
            else:
                rec.launched(duration=duration, gap=2, marks=marks)
                idle.update({region: 2 * len(names) for region, names in MICRO_STEP})
        rec.range("reduce lm_head", lambda: rec.kernel("_transpose_kernel", 5, "reduce lm_head", gap=40))
        rec.range("update mlp_bank", lambda: [rec.kernel("_gram_kernel", 7, "update mlp_bank", gap=10) for _ in range(3)])
        idle.update({"reduce lm_head": 40, "update mlp_bank": 30})
        rec.range("zero gradients", lambda: rec.kernel("void at::native::f<1>(int)", 11, "zero gradients"))
        rec.kernel("void at::native::f<1>(int)", 2, "other")
        rec.event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", rec.device, 300, 9, stream=9, correlation=rec.launch())

    for number in steps:
        rec.range(f"step {number}", step)
        if len(steps) > 1 and number == steps[0]:
            whole = sum(rec.truth.values())
            rec.truth.clear(), idle.clear()
    rec.kernel("after the last step", 50, None)
    idle["forward embed"] -= 2 * (len(steps) == 1)  # time begins with the first kernel
    count = max(1, len(steps) - 1)
    truth = {region: us / 1000 / count for region, us in rec.truth.items() if region}
    result = trace.analyse(rec.trace(**run_of(*steps)))
    assert milliseconds(result["regions"]) == pytest.approx(truth)
    assert milliseconds(result["regions"], 3) == pytest.approx(
        {region: us / 1000 / count for region, us in idle.items() if us})
    passes = {way: sum(ms for region, ms in truth.items() if region.startswith(way)) for way in ("forward", "backward")}
    gaps = sum(idle.values()) / 1000 / count
    assert result["split"] == pytest.approx({**passes, "optimizer": 0.037, "other": 0.002 + truth["micro-step"],
                                             "exposed communication": 0, "idle": gaps})
    assert result["steps"] == (steps if len(steps) == 1 else steps[1:])
    assert result["ms"] == pytest.approx(sum(truth.values()) + gaps) == pytest.approx(sum(result["split"].values()))
    assert ("_gram_kernel", 3, pytest.approx(0.021)) in result["names"] and ("Memcpy DtoH", 1, pytest.approx(0.3)) in result["names"]
    assert sum(row[1] for row in result["names"] if row[0].startswith("nvjet")) == 2 * sum(
        name in (GEMM, SPLIT) for _, names in MICRO_STEP for name in names)
    shown = trace.table(result)
    first = re.search(r"^the first micro-step of step (\d+) was launched kernel by kernel: (.*)$", shown, re.M)
    assert int(first[1]) == steps[0] and ("idle contains" if len(steps) == 1 else "left out") in first[2]
    assert "not told apart" not in shown and re.search(r"^layer 2 +\d", shown, re.M)
    kept = sum(item.end - item.start for item in result["items"]) / 1000  # the track in the trace shows all steps
    assert kept == pytest.approx(count * sum(truth.values()) + (whole / 1000 if len(steps) > 1 else 0))


def test_rates_leave_the_first_step_out():
    rec, run = Recorder(), RUN | run_of(1, 2, 3) | {"steps": RUN["steps"], "layers": RUN["layers"]}
    for step in RUN["steps"]:
        names = [name for name, *_ in work.calls(RUN | {"steps": [step]})]
        rec.range(f"step {step['step']}", lambda: [
            rec.kernel(kernel, 3, None) for name in names for kernel in work.WORK[name][0].split()])
    rates = trace.analyse(rec.trace(**run))["rates"]
    assert len(rates) > 10 and all(part is not None for *_, part in rates)
    assert {name: count for name, count, *_ in rates}["project"] == 6


def swapped(content):
    """The first two kernels of the first layer change places."""
    return [(region, [names[1], names[0], *names[2:]] if region == "forward layer 0" else names)
            for region, names in content]


def renamed(content):
    return [(region, [name.replace("256x128", "128x128") for name in names]) for region, names in content]


@pytest.mark.parametrize("other", [
    swapped, renamed, lambda content: content[1:], lambda content: [*content, ("backward embed", [FUSED])],
    lambda content: [("backward embed", [FUSED]), *content][:-1]])
def test_a_graph_of_other_kernels_is_not_told_apart(other):
    rec = Recorder()
    rec.range("step 0", lambda: (rec.launched(), rec.replayed(other(MICRO_STEP), known=False), rec.replayed()))
    shown = milliseconds(trace.analyse(rec.trace())["regions"])
    assert shown == pytest.approx({region: us / 1000 for region, us in rec.truth.items()})
    assert shown["micro-step"] > 0.2


def test_a_stage_that_begins_in_a_profiled_step():
    """Its first micro-step is launched kernel by kernel, too, and the inputs are copied afterwards, to record its graph. Each
    stage's graphs follow the launched micro-step of their own stage."""
    rec, later = Recorder(), renamed(MICRO_STEP[:-1]) + [("backward embed", [FUSED])]

    def recorded():
        rec.launched(later)
        micro_step = rec.events[-1]  # its range lasts until the copies are launched
        for _ in range(3):
            rec.kernel("Memcpy DtoD (Device -> Device)", 3, "micro-step")
        micro_step["dur"] = rec.host - micro_step["ts"]

    rec.range("step 0", lambda: (rec.launched(), rec.replayed()))
    rec.range("step 1", lambda: (recorded(), rec.replayed(later), rec.replayed(MICRO_STEP, known=False)))
    shown = milliseconds(trace.analyse(rec.trace())["regions"])
    assert shown == pytest.approx({region: us / 2000 for region, us in rec.truth.items()})


@pytest.mark.parametrize("marks, layers", [("", 0), ("operators", 0), ("operators", 2), ("operators", 4)])
def test_without_marks_of_layers(marks, layers):
    """What the host's ranges tell is left; operators say nothing when the model has another number of blocks. A graph
    without a launched micro-step is one region."""
    rec = Recorder()
    rec.range("step 0", lambda: rec.launched(marks=marks, known=False))
    result = trace.analyse(rec.trace(layers=[dict(attention=True)] * layers))
    assert milliseconds(result["regions"]) == pytest.approx({region: us / 1000 for region, us in rec.truth.items()})
    assert {*milliseconds(result["regions"])} == {"forward", "forward loss", "backward loss", "backward"}
    assert "not told apart" in trace.table(result)
    rec = Recorder()
    rec.range("step 0", lambda: rec.replayed(known=False))
    assert [*milliseconds(trace.analyse(rec.trace())["regions"])] == ["micro-step"]


def test_communication_and_overlap():
    """One stream computes 0-10 and 30-40, another 8-12; NCCL 5-15 and 20-35 on one stream, 14-18 on a second; a copy to the host 41-60.

    Compute alone or first: 0-12 and 30-40. Exposed: 12-18, 20-30. Idle: 18-20.
    """
    rec = Recorder()

    def at(name, start, end, stream):
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        rec.event(kind, name, start, end - start, stream, stream=stream, correlation=rec.launch())

    def step():
        rec.range("update attn_bank", lambda: (at("a", 0, 10, 7), at("b", 30, 40, 7)))
        rec.range("update mlp_bank", lambda: at("c", 8, 12, 8))
        rec.range("reduce mlp_bank", lambda: (at("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)", 5, 15, 20),
                                              at("ncclDevKernel_Broadcast(args)", 14, 18, 21)))
        rec.range("gather mlp_bank", lambda: at("ncclDevKernel_AllGather_RING_LL(args)", 20, 35, 20))
        at("Memcpy HtoD (Pinned -> Device)", 41, 60, 9)

    rec.range("step 5", step)
    rec.event("kernel", "no launch recorded", 40, 2, 7, stream=7)  # of step 5, as the one before it on its stream
    result = trace.analyse(rec.trace())
    assert {region: [round(1000 * ms, 6) for ms in numbers] for region, numbers in result["regions"].items()} == {
        "update attn_bank": [22, 0, 0, 0], "update mlp_bank": [2, 0, 0, 0],
        "reduce mlp_bank": [0, 14, 6, 0], "gather mlp_bank": [0, 15, 10, 2]}
    assert [round(1000 * ms, 6) for ms in result["split"].values()] == [0, 0, 24, 0, 16, 2]
    assert round(1000 * result["ms"], 6) == 42 and round(1000 * result["communication"], 6) == 28
    assert re.search(r"^exposed communication +0.016 +38.1%$", trace.table(result), re.M)


def test_cover_against_a_simulation():
    rng = np.random.default_rng(0)
    for _ in range(200):
        items = sorted((trace.Item("", a, a + n, n, 0) for a, n in rng.integers(0, 30, (rng.integers(0, 8), 2))), key=lambda i: i.start)
        edges = np.sort(rng.choice(60, 6, replace=False))
        free = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        owner = {moment: None for a, b in free for moment in range(a, b)}
        for number, item in reversed([*enumerate(items)]):
            owner |= {moment: number for moment in owner if item.start <= moment < item.end}
        taken, left = trace.cover(items, free)
        assert taken == [sum(o == number for o in owner.values()) for number in range(len(items))]
        assert {m for a, b in left for m in range(int(a), int(b))} == {m for m, o in owner.items() if o is None}
        assert left == sorted(left) and all(a <= b for a, b in left)


def test_operators_of_a_cpu():
    """Time of an operator is without those inside; the backward pass finds its layers by the numbers of operations; waiting is
    communication unless something runs meanwhile; the loader's thread does not count."""
    rec = Recorder()

    def op(name, start, dur, number=None, tid=1):
        rec.event("cpu_op", name, start, dur, tid, **({} if number is None else {"Sequence number": number}))

    def span(name, start, end):
        rec.event("user_annotation", name, start, end - start)

    for first, step in (0, 7), (1000, 8):
        span(f"step {step}", first, first + 1000), span("data", first, first + 50), span("micro-step", first + 50, first + 720)
        span("forward", first + 60, first + 300), span("layer 0", first + 100, first + 101), span("layer 1", first + 200, first + 201)
        op("aten::index", first + 70, 20, first), op("aten::linear", first + 110, 60), op("aten::mm", first + 120, 40, first + 1)
        op("aten::view", first + 170, 5, first + 2), op("aten::mul", first + 210, 80, first + 2)  # the later one makes node 2
        span("loss", first + 300, first + 400), op("_HeadLoss", first + 310, 90, first + 3)
        span("backward", first + 400, first + 700)
        for start, dur, number in (410, 30, 3), (450, 100, 2), (560, 70, 1), (640, 20, 0):
            op(f"{trace.NODE}: X", first + start, dur, first + number), op("X", first + start + 5, dur - 10, first + number)
        op("AccumulateGrad", first + 670, 10)
        span("wait mlp_bank", first + 720, first + 800), op("aten::div_", first + 780, 10), op("aten::elsewhere", first + 730, 30, tid=2)
        span("update mlp_bank", first + 800, first + 900), op("aten::bmm", first + 800, 100)
    result = trace.analyse(rec.trace(ranks=2))
    ms = {region: [round(1000 * x, 6) for x in numbers] for region, numbers in result["regions"].items()}
    compute = {"forward embed": 20, "forward layer 0": 65, "forward layer 1": 80, "forward loss": 90, "backward loss": 30,
               "backward layer 1": 100, "backward layer 0": 70, "backward embed": 20, "backward": 10, "update mlp_bank": 100,
               "wait mlp_bank": 10}
    assert {region: numbers[0] for region, numbers in ms.items() if numbers[0]} == compute
    assert {region: numbers[1:3] for region, numbers in ms.items() if numbers[1]} == {"wait mlp_bank": [80, 70]}
    assert ms["other"][3] == 100 and round(sum(numbers[3] for numbers in ms.values()), 6) == 1000 - sum(compute.values()) - 70
    assert [round(1000 * x, 6) for x in result["split"].values()] == [255, 230, 110, 0, 70, 335] and result["ms"] == 1
    times = {name: (count, round(1000 * x, 6)) for name, count, x in result["names"]}
    assert times["aten::linear"] == (1, 20) and times["aten::mm"] == (1, 40) and "aten::elsewhere" not in times
    assert times["X"] == (4, 180) and times[f"{trace.NODE}: X"] == (4, 40)
    assert trace.analyse(rec.trace(ranks=1))["split"]["exposed communication"] == 0  # nobody to wait for
    with pytest.raises(ValueError, match="no kernels"):
        trace.analyse(rec.trace(device="cuda"))


# ---- Work ------------------------------------------------------------------------------------------------------------

LAYERS = [dict(attention=True, paired=True, long=False, value_embed=False),
          dict(attention=False, paired=False, long=False, value_embed=False),
          dict(attention=True, paired=False, long=True, value_embed=True),
          dict(attention=True, paired=True, long=False, value_embed=True)]
RUN = dict(rank=0, ranks=1, model_dim=256, num_heads=2, padded_vocab=384, fp8=True, head_rows=40, polar_steps=5, layers=LAYERS,
           gate_channels=12,
           banks=[[8, 256, 256], [6, 1024, 256]], limits=dict(bf16=1e12, fp8=0.0, copy=1e11),
           steps=[dict(step=step, adam=step % 2 == 1, tied=step < 3, tokens=64, windows=[3, 9], micro_batches=[
               dict(documents=[40, 4, 21], token_ids=30, touched=dict(bigram_embed=50)),
               dict(documents=[64], token_ids=33, touched=dict(bigram_embed=60))]) for step in (1, 2, 3)])


def brute_force_pairs(documents, window):
    return sum(1 for n in documents for query in range(n) for key in range(query + 1) if key >= query - window)


def test_work_by_counting():
    micro_batches, found = [micro_batch for step in RUN["steps"] for micro_batch in step["micro_batches"]], {}
    for name, *sizes in work.calls(RUN):
        found.setdefault(name, []).append(work.WORK[name][1](*sizes))
    documents = [micro_batch["documents"] for micro_batch in micro_batches]
    # Paired: one head of the two, twice as long.
    paired = [brute_force_pairs([2 * n for n in lengths], 3) for lengths in documents]
    long = [2 * brute_force_pairs(lengths, 9) for lengths in documents]
    stream = 2 * 64 * 256  # bytes of one (N, D)
    assert sorted(found["attend"]) == sorted((2 * 2 * 128 * n, 4 * stream) for n in 2 * paired + long)
    assert sorted(found["attend_backward"]) == sorted((5 * 2 * 128 * n, 8 * stream) for n in 2 * paired + long)
    product = 2 * 64 * 256 * 256
    assert Counter(found["project"]) == {(3 * product, 4 * stream): 6, (3 * product, 5 * stream): 12}  # with ve
    # In: dq dk q k; out: two of dqkv. Paired: dv moves. Value embedding: dv and ve come in, dve goes out.
    assert Counter(found["project_backward"]) == {(0, 8 * stream): 6, (0, 9 * stream): 6, (0, 10 * stream): 6}
    # Channels of x (and 6 of ve), gates of 2 heads; backward reads the channels and their gradients and writes these.
    assert Counter(found["head_gates"]) == {(0, 128 * (12 + 2)): 6, (0, 128 * (18 + 4)): 6, (0, 128 * (12 + 4)): 6}
    assert Counter(found["head_gates_backward"]) == {(0, 128 * (36 + 4)): 6, (0, 128 * (54 + 8)): 6, (0, 128 * (36 + 8)): 6}
    assert found["mlp"] == [(4 * product, stream + 4 * stream)] * 24 and found["mlp_backward"] == [(4 * product, 9 * stream)] * 24
    assert Counter(found["cross_entropy"]) == {(0, 40 * 384 * 3): 6, (0, 24 * 384 * 3): 6}  # bf16 in, one byte out
    assert Counter(found["quantise"]) == {(0, 64 * 256 * 4): 6, (0, 384 * 256 * 4): 2}
    assert found["transpose_bytes"] == [(0, 2 * 64 * 384)] * 6
    assert Counter(b for _, b in found["embedding_grad"]) == Counter(
        stream + 2 * 2 * 256 * n for each in micro_batches
        for n in [each["token_ids"]] * 3 + [each["touched"]["bigram_embed"]])
    tiles = 3 / 4  # of the 2 x 2 tiles of a product
    assert found["XXT"] == [(8 * 2 * 256**3 * tiles, 8 * 2 * 2 * 256**2)] * 15
    assert found["XTX"] == [(6 * 2 * 256**2 * 1024 * tiles, 6 * 2 * (1024 * 256 + 256**2))] * 15
    assert found["ba_plus_cAA"] == [(n * 2 * 256**3 * tiles, n * 2 * 2 * 256**2) for _ in range(3) for n in [8] * 5 + [6] * 5]
    assert found["fused_momentum"] == found["normuon_tail"] == [(0, 12 * n * 256**2) for n in (8, 24)] * 3
    assert found["transpose_add"] == [(0, 6 * 256 * 384)] and found["transpose_copy"] == [(0, 4 * 256 * 384)]


def test_rates_of_our_kernels():
    """Each kernel takes four times what its operation needs at least, so each runs at 1/4 of the limit."""
    items = []
    for name, *sizes in work.calls(RUN):
        flops, data = work.WORK[name][1](*sizes)
        launched = work.WORK[name][0].split()
        for kernel in launched:
            us = 4e6 * max(flops / 1e12, data / 1e11) / len(launched)
            items.append(trace.Item(kernel.replace("_mlp_", "_mlp_hopper_"), 0, us, us, 0))
    rows = {name: rest for name, *rest in trace.rates(items, RUN, 3)}
    assert {name for names in rows for name in names.split()} == set(work.WORK)
    assert {"XTX XXT ba_plus_cAA", "mlp mlp_backward", "quantise transpose_bytes", "transpose_add transpose_copy"} < set(rows)
    assert all(part == pytest.approx(0.25) for *_, part in rows.values())
    assert {unit for *_, unit, part in rows.values()} == {"FLOP/s", "B/s"}
    calls, ms, rate, unit, _ = rows["project"]
    assert (calls, unit) == (6, "FLOP/s") and rate == pytest.approx(0.25e12) and ms == pytest.approx(6 * 4e3 * 6 * 64 * 256**2 / 1e12)
    for other in items[1:], [*items, items[0]]:
        assert [name for name, *_, part in trace.rates(other, RUN, 3) if part is None] == ["mlp mlp_backward"]
    assert trace.rates(items, RUN | {"limits": None}, 3) == trace.rates(items, {}, 3) == []
    result = dict(steps=[0, 1], run=RUN, ms=1.0, split={}, communication=0, regions={}, names=[], rates=trace.rates(items[1:], RUN, 3))
    assert re.search(r"^project +6 +\d+\.\d{3} +0\.25 TFLOP/s +25\.0%$", shown := trace.table(result), re.M) and "launches?" in shown


def test_describe():
    """One step in each of two stages, of two micro-batches; the result survives JSON, and `calls` understands it."""
    def batch(tokens, borders, hashed):
        return NS(tokens=torch.tensor(tokens), cu_seqlens=torch.tensor(borders),
                  touched={"bigram_embed": np.array(hashed)})

    def counted(documents, token_ids, rows):
        return dict(documents=documents, token_ids=token_ids, touched={"bigram_embed": rows})

    batches = [batch([1, 2, 1, 1], [0, 3, 4, 4], [5, 6, 5, 7]), batch([1, 1, 1, 1], [0, 4, 4, 4], [5, 5, 5, 5]),
               batch([1, 2, 3, 4], [0, 1, 2, 4], [1, 2, 3, 9]), batch([3, 3, 4, 4], [0, 4, 4, 4], [8, 9, 8, 9])]
    plans = [NS(step=4, stage=0, adam=False, tied=True, micro_batch_tokens=4),
             NS(step=5, stage=1, adam=True, tied=False, micro_batch_tokens=4)]
    layers = T.Layer(paired=True, long=True), T.Layer(attention=False)
    config = NS(model=NS(model_dim=32, num_heads=2, padded_vocab=128, layers=layers), system=NS(cuda_graphs=True),
                schedule=NS(stages=[NS(short_window=2, long_window=4), NS(short_window=3, long_window=6)]))
    bank = torch.zeros(8, 32, 32)
    optimizer = NS(params={"attn_gate_bank": torch.zeros(1, 2, 12)}, shards={"attn_bank": bank, "embed": bank[0]},
                   matrix_lr={"attn_bank": torch.ones(8)})
    on_cpu, run = (work.describe(config, NS(rank=1, world=2, device=torch.device(device)), plans, batches, optimizer,
                                 NS(fp8=False, block=3), 5, {"bf16": 1.0}) for device in ("cpu", "cuda"))
    assert json.loads(json.dumps(run)) == run and (on_cpu["cuda_graphs"], run["cuda_graphs"]) == (False, True)
    assert run["steps"] == [
        dict(step=4, adam=False, tied=True, tokens=4, windows=[2, 4],
             micro_batches=[counted([3, 1], 2, 3), counted([4], 1, 1)]),
        dict(step=5, adam=True, tied=False, tokens=4, windows=[3, 6],
             micro_batches=[counted([1, 1, 2], 4, 4), counted([4], 2, 2)])]
    assert (run["rank"], run["ranks"], run["gate_channels"], run["polar_steps"]) == (1, 2, 12, 5)
    assert run["limits"] == {"bf16": 1.0}
    assert run["banks"] == [[8, 32, 32]] and [layer["attention"] for layer in run["layers"]] == [True, False]
    count = Counter(name for name, *_ in work.calls(run))
    assert [count[name] for name in ("mlp", "attend", "cross_entropy", "XXT", "embedding_grad")] == [8, 4, 8, 10, 8]


def test_work_knows_every_kernel():
    source = Path(kernels.__file__).read_text()
    launched = set(map(work.plain, re.findall(r"^\s+(_\w+_kernel)\[", source, re.M)))
    assert launched == {kernel for kinds, _ in work.WORK.values() for kernel in kinds.split()} and "_sum_rows_kernel" in launched
    assert "_mlp_hopper_kernel" in source


# ---- Report ----------------------------------------------------------------------------------------------------------


class Finished:
    """torch's profiler, stopped, with a made-up trace."""

    def __init__(self, content):
        self.content = content

    def export_chrome_trace(self, path):
        Path(path).write_text(self.content)


@pytest.fixture
def report(monkeypatch):
    """call(content of the exported trace, path): the report on steps 4 to 6 on a GPU, and the limits that describe gets."""
    def call(content, path, dtype="bfloat16", ceilings=lambda: None):
        described = []

        def describe(*args):
            described.append(args)
            return run_of(4, 5, 6) | dict(device="cuda", rank=1, ranks=2)

        monkeypatch.setattr(trace, "ceilings", ceilings)
        monkeypatch.setattr(trace, "describe", describe)
        config, rt = NS(system=NS(dtype=dtype)), NS(device=torch.device("cuda"))
        text = trace.report(Finished(content), path, config, rt, "plans", "batches", "optimizer", "head", 5)
        assert [args[:-1] for args in described] == [(config, rt, "plans", "batches", "optimizer", "head", 5)]
        return text, described[0][-1]
    return call


def gpu_trace():
    rec = Recorder()
    for step in (4, 5, 6):
        rec.range(f"step {step}", rec.launched if step == 4 else rec.replayed)
    return json.dumps({"traceEvents": rec.events})


def test_report(report, tmp_path):
    path = tmp_path / "run_1_rank1.json.gz"
    text, limits = report(gpu_trace(), path, ceilings=lambda: "limits")
    shown, last = text.rsplit("\n\n", 1)
    assert last == "trace, beside this log: run_1_rank1.json.gz" and limits == "limits"
    assert [*tmp_path.iterdir()] == [path]
    recorded = json.loads(gzip.open(path).read())
    assert shown == trace.table(trace.analyse(recorded)) and shown.startswith("steps 5 to 6, rank 1 of 2 ")
    track = [event for event in recorded["traceEvents"] if event.get("cat") == "region"]
    expected = [region for region, _ in MICRO_STEP]
    assert [event["name"] for event in track] == expected + 2 * ["micro-step", *expected]
    assert report(gpu_trace(), path, "float32", ceilings=pytest.fail) == (text, None)


def no_memory():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_report_without_memory_for_the_limits(report, tmp_path):
    text, limits = report(gpu_trace(), tmp_path / "x.json.gz", ceilings=no_memory)
    warning = "warning: too little memory to measure what the kernels could do\n"
    assert limits is None and text.startswith(f"{warning}steps 5 to 6, ")


BARE_STEP = {"ph": "X", "cat": "user_annotation", "name": "step 4", "ts": 0, "dur": 9}


@pytest.mark.parametrize("content, folder, reason", [
    (json.dumps({"traceEvents": []}), "", "no training step.*"), ("not json", "", "Expecting value.*"),
    (json.dumps({"traceEvents": [BARE_STEP]}), "", "it has no kernels.*"),
    (gpu_trace(), "missing", "No such file or directory")])
def test_no_trace(report, tmp_path, content, folder, reason):
    path = tmp_path / folder / "x.json.gz"
    assert re.fullmatch(f"warning: no trace in {re.escape(path.name)}: {reason}", report(content, path)[0])
    assert not [*tmp_path.iterdir()]


# ---- Names, cost, errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, wanted", [
    (GEMM, "nvjet_tst_256x128"), (SPLIT, "nvjet_tst_64x8"), (REDUCE, "splitKreduce_kernel"), (FUSED, "triton_red_fused_add_mul_rms_norm"),
    ("_mlp_hopper_kernel", "_mlp_hopper_kernel"), ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"), ("aten::mm", "aten::mm"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllGather_RING_LL"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int, float)",
     "vectorized_elementwise_kernel FillFunctor"),
    ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::X&)::{l}>",
     "elementwise_kernel direct_copy_kernel_cuda"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_gemm>(cutlass_80_wmma_tensorop_bf16_gemm::Params)",
     "Kernel2 cutlass_80_wmma_tensorop_bf16_gemm"),
    ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(cublasGemvParams)", "kernel"),
    ("k" * 80, "k" * 56)])
def test_short_names(name, wanted):
    assert trace.short(name) == wanted


def test_cost_of_the_profiler():
    """Even and odd steps differ, and so do stages; the outlier of a step like the profiled one does not move a median."""
    times = [10, 20, 10, 20, 15, 27, 10, 20, 500, 20, 10, 20, 90, 95]
    kinds = [(step > 11, step % 2 == 1) for step in range(len(times))]
    assert trace.cost(0.042, times, kinds, range(4, 6)).endswith("21.00 ms per profiled step, 15.00 ms for others like them (median): +6.00 ms")
    assert trace.cost(0.027, times, kinds, range(5, 6)).startswith("profiler: 27.00 ms per profiled step, 20.00 ms")
    assert "15.00 ms for" in trace.cost(0.042, times, kinds, range(4, 6), reach=2) and "no others" in trace.cost(0.1, times, kinds, range(12, 14))


@pytest.mark.parametrize("knob, message", [
    ("20", "expected START:COUNT"), ("a:b", "expected START:COUNT"), ("-1:2", "expected START:COUNT"), ("3:0", "expected START:COUNT"),
    ("1:2:3", "expected START:COUNT"), ("94:3", "steps 0 to 95"), ("96:1", "steps 0 to 95"), ("18:4", "pause.*--val_every=20")])
def test_bad_knobs(knob, message):
    with pytest.raises(T.UserError, match=f"^--profile={knob}: .*{message}"):
        T.parse_config(["--preset=cpu", f"--profile={knob}"])


def test_good_knobs():
    for knob, steps in ("", []), ("94:2", [94, 95]), ("20:1", [20]), ("18:2", [18, 19]), ("20:20", [*range(20, 40)]):
        assert [*T.parse_config(["--preset=cpu", f"--profile={knob}"]).system.profiled] == steps
    assert not set(range(97)) & {T.System().profiled.start, T.System().profiled.stop}


@pytest.fixture
def in_process():
    """T.main leaves nothing behind."""
    yield
    if T.dist.is_initialized():
        T.dist.destroy_process_group()


class SlowProfiler:
    def __init__(self, trainer):
        pass

    def start(self):
        time.sleep(1)

    stop = start

    def cost(self):
        return "cost"


def test_starting_and_stopping_are_outside_the_clock(data, tmp_path, monkeypatch, in_process):
    monkeypatch.setattr(trace, "Profiler", SlowProfiler)
    assert T.main([*data, f"--log_dir={tmp_path}", "--scheduled_steps=4", "--profile=5:1", "--micro_batches=1", "--val_every=9"]) == 0
    body = next(tmp_path.glob("*.txt")).read_text().rpartition("=" * 100)[2]
    seconds = {phase: float(x) for phase, x in re.findall(r"^(\w+)_seconds: (.*)$", body, re.M)}
    assert 1.9 < seconds["profile"] < 3 and sum(seconds.values()) - seconds["total"] - seconds["gpu"] < seconds["total"]
    assert re.search(r"^step:6/6 val_loss.*\ncost\n", body, re.M)


@pytest.mark.parametrize("data, message", [
    (b"not json", "Expecting value"), (gzip.compress(b"{}" * 99, mtime=0)[:-9], "[Cc]ompressed"), (b'{"traceEvents": []}', "no training step"),
    (None, "No such file"), (gzip.compress(b'{"a": 1}', mtime=0), "traceEvents")])
def test_unreadable_traces(tmp_path, data, message):
    if data is not None:
        (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(SystemExit, match=f"^error: .*x.json: .*{message}"):
        trace.main([str(tmp_path / "x.json")])


# ---- Real runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Arguments of a tiny run."""
    folder = tmp_path_factory.mktemp("data")
    for name, tokens in ("train_1", text(2300, 1)), ("train_2", text(2300, 2)), ("val", text(VAL_TOKENS + 1, 3)):
        write_shard(folder / f"{name}.bin", tokens)
    return [*TINY, f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val.bin", "--val_tokens=1536", "--scheduled_steps=6"]


def launch(command, seconds=100):
    done = subprocess.run(command, env=ENV, cwd=ROOT, text=True, capture_output=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(shown):
    """first column -> the other cells, of the lines of tables; where two begin alike (a region may be "other", too), of the first."""
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line.strip()) for line in reversed(shown.splitlines()))}


def check(shown, ranks):
    found = numbers(shown)
    split = {name: float(found[name][0]) for name in ("forward", "backward", "optimizer", "other", "exposed communication", "idle", "all")}
    assert sum(split.values()) == pytest.approx(2 * split["all"], abs=0.01) and (split["exposed communication"] > 0) == (ranks > 1)
    names = [f"layer {n}" for n in range(len(T.PRESETS["cpu"].model.layers))]
    layers = [[float(x) for x in found[place]] for place in ("embed", *names, "loss")]
    assert all(min(row) > 0 for row in layers)
    forward, backward = (sum(column) for column in zip(*layers))
    assert forward == pytest.approx(split["forward"], abs=0.01) and 0.9 * split["backward"] < backward <= split["backward"] + 0.01
    assert f"steps 4 to 5, rank 0 of {ranks}" in shown and "aten::mm" in found and "more" in shown


def test_commands_of_the_readme(data, tmp_path, tmp_path_factory):
    section = (ROOT / "README.md").read_text().partition("## Reading a trace")[2].partition("\n## ")[0]
    train, read = (shlex.split(line, comments=True) for line in re.search("```bash\n(.*?)```", section, re.S)[1].strip().splitlines())
    assert train[:2] == ["python", "train_gpt.py"] and read[:2] == ["python", "records/trace.py"] and "--profile=4:2" in train
    same = [*data, "--micro_batches=1", f"--log_dir={tmp_path}"]
    with ThreadPoolExecutor(2) as pool:
        out, unprofiled = pool.map(launch, (
            [sys.executable, *train[1:], *same], [sys.executable, "train_gpt.py", *same, f"--log_dir={tmp_path_factory.mktemp('again')}"]))
    (log,), (file,) = tmp_path.glob("*.txt"), tmp_path.glob("*.gz")
    assert file.name == f"{log.stem}_rank0.json.gz" and sorted(tmp_path.iterdir()) == sorted([log, file])
    shown = launch([sys.executable, *read[1:-1], *map(str, tmp_path.glob(Path(read[-1]).name))])
    body = log.read_text().rpartition("=" * 100)[2]
    table = shown.partition("\n")[2].rstrip()
    assert compare.read_run(log).notes == []
    assert table in body and table in out and f"\ntrace, beside this log: {file.name}\n" in body
    check(table, 1)
    steps = {step: float(ms) for step, ms in re.findall(r"step:(\d+)/8 train_time:(\d+)ms", body)}
    profiled = float(re.search(r"^profiler: ([\d.]+) ms per profiled step", body, re.M)[1])
    assert profiled == pytest.approx((steps["6"] - steps["4"]) / 2, rel=0.02, abs=1)
    whole = float(numbers(table)["all"][0])
    assert 0.8 * profiled < whole <= 1.01 * profiled  # the clock has the step line and little else on top
    events = json.loads(gzip.open(file).read())["traceEvents"]
    assert float(numbers(body.replace(": ", "  "))["profile_seconds"][0]) > 0
    regions = {event["name"] for event in events if event.get("cat") == "region"}
    assert {"forward embed", "forward layer 0", "backward layer 10", "forward loss", "update mlp_bank", "reduce replicated"} <= regions
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"data", "forward", "layer 6", "loss", "backward", "wait lm_head"} <= ranges
    losses = [re.findall(r"val_loss:\S+|^final_val_loss.*", shown, re.M) for shown in (out, unprofiled)]
    assert losses[0] == losses[1] and len(losses[0]) == 5


def test_two_ranks(data, tmp_path):
    """With the exchange of touched rows, up to the last step of the run."""
    args = [*data, "--micro_batches=2", "--extension_steps=1", "--val_every=9", "--profile=4:3", f"--log_dir={tmp_path}"]
    out = launch([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_gpt.py", *args])
    (log,), files = tmp_path.glob("*.txt"), sorted(tmp_path.glob("*.gz"))
    assert [file.name for file in files] == [f"{log.stem}_rank{rank}.json.gz" for rank in (0, 1)]
    check(out.replace("steps 4 to 6", "steps 4 to 5"), 2)
    for rank, file in enumerate(files):
        recorded = json.loads(gzip.open(file).read())
        result = trace.analyse(recorded)
        assert result["run"]["rank"] == rank and [step["step"] for step in result["run"]["steps"]] == [4, 5, 6] == result["steps"]
        assert {"wait bigram_embed", "wait gather mlp_bank", "wait replicated"} <= set(result["regions"])
        config = T.parse_config(args)
        loader = L.Loader(config, T.Runtime(rank, 2, torch.device("cpu")), [T.make_plan(config, step) for step in range(7)])
        batches = [loader.next_batch() for _ in range(7)][4:]
        assert [step["micro_batches"] for step in result["run"]["steps"]] == [[{
            "documents": [n for n in np.diff(batch.cu_seqlens).tolist() if n],
            "token_ids": len({*batch.tokens.tolist()}),
            "touched": {"bigram_embed": len({*batch.touched["bigram_embed"].tolist()})}}] for batch in batches]
