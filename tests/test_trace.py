"""Profiles: made-up traces of a GPU and of a CPU with known answers, and real tiny runs."""

import gzip
import json
import random
import re
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace as NS

import numpy as np
import pytest
import torch

import train_gpt as T
import triton_kernels
from data import loader as L
from data.run.machine import Runtime
from data.run.program import UserError
from forks import Forks, rank_variables
from records import compare, trace
from test_run import corpus  # noqa: F401 (a fixture)

COPY, IN_A_GRAPH = "MemcpyDtoD", {"MemcpyDtoD": "memcpy32_post", "Memset": "memset32"}  # other names of the same


def micro_step(gemm="gemm"):
    """What `Recorder.play` plays: two layers, whose operations of the forward pass have nodes of the backward pass."""
    return ("micro-step",
            ("forward", ("op 0",), f"forward embed: {COPY} index_select fused fused",
             ("layer 0",), ("op 1",), f"forward layer 0: project attend {gemm} Memset split reduce",
             ("layer 1",), ("op 2",), f"forward layer 1: fused mlp {gemm}"),
            ("loss", ("op 3",), f"forward loss: fused {gemm} cross_entropy"),
            ("backward", ("node 3", f"backward loss: sum transpose {gemm} fused"),
             ("node 2", f"backward layer 1: split reduce mlp {gemm} fused"),
             ("node 1", f"backward layer 0: {gemm} attend project {gemm}"),
             ("node 0", "backward embed: fused" + 4 * " rows pieces")))


def kernels(item):
    """The "region: kernels" of an item, in order."""
    return [item] if isinstance(item, str) else [text for part in item[1:] for text in kernels(part)]


LAUNCHED = *micro_step(), f"micro-step: {COPY}"  # kernel by kernel; then its inputs are copied, to record the graph
# The updates of a step with and without Adam. No range is around the last kernel of the first range.
MUON, ZERO = ("update mlp_bank", "update mlp_bank: fused gram gram gram"), ("zero gradients", "zero gradients: fill")
UPDATES = [("update", MUON, "update: fused", ZERO),
           ("update", ("update lm_head", "update lm_head: fused gemm"), MUON, ZERO)]


class Recorder:
    """Events of a made-up trace, in microseconds. The kernels run one after the other on one stream."""

    def __init__(self, gap=0):
        self.events, self.host, self.device, self.links, self.random = [], 1000.0, 1500.0, 0, random.Random(1)
        self.gap, self.truth, self.idle = gap, Counter(), Counter()  # region -> microseconds of kernels, before kernels

    def event(self, cat, name, ts, dur, tid=1, **args):
        self.events.append(dict(ph="X", cat=cat, name=name, pid=1, tid=tid, ts=ts, dur=dur, args=args))

    def launch(self, name="cudaLaunchKernel"):
        self.links += 1
        self.event("cuda_runtime", name, self.host, 2, correlation=self.links)
        self.host += 3
        return self.links

    def kernel(self, name, region, dur=None, link=None):
        """By a graph's launch `link`, or its own after a gap. Distinct durations show a wrong region. name@grid."""
        name, _, grid = name.partition("@")
        gap, dur = 0 if link else self.gap, dur or self.random.randint(1, 1000)
        kind = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
        self.event(kind, name, self.device + gap, dur, stream=7, correlation=link or self.launch(), grid=grid)
        self.device += gap + dur
        self.truth[region] += dur
        self.idle[region] += gap

    def play(self, *items):
        """Each item is "region: kernels", a call, or (name, items): a named range of host time, or an operation of
        the forward pass ("op 1") or its node of the backward pass in another thread ("node 1")."""
        for item in items:
            if isinstance(item, str):
                region, _, names = item.partition(": ")
                for name in names.split():
                    self.kernel(name, region)
            elif callable(item):
                item()
            else:
                (name, *inside), start = item, self.host
                self.host += 1
                self.play(*inside)
                self.host += 1
                kind, _, number = name.partition(" ")
                cat = "cpu_op" if kind in ("op", "node") else "user_annotation"
                args = {"Sequence number": int(number)} if kind in ("op", "node") else {}
                self.event(cat, f"{trace.NODE}: X" if kind == "node" else name, start, self.host - start,
                           2 if kind == "node" else 1, **args)

    def graph(self, item, known=True):
        """A call that plays an item as one graph between two copies. If not `known`, it has one region."""
        def replay():
            link = self.launch("cudaGraphLaunch")
            for region, names in (text.split(": ") for text in kernels(item)):
                for name in names.split():
                    self.kernel(IN_A_GRAPH.get(name, name), region if known else item[0], link=link)
        copy = f"{item[0]}: {COPY}"
        return lambda: self.play((item[0], copy, replay, copy))

    def trace(self, **run):
        random.Random(0).shuffle(self.events)  # the order in a file means nothing
        return {"traceEvents": [{"ph": "M", "name": "process_name"}, *self.events], "run": run}

    def regions(self, column=0, **run):
        """Region -> milliseconds, as records/trace.py finds them."""
        found = trace.analyse(self.trace(**run))["regions"]
        return {region: numbers[column] for region, numbers in found.items() if numbers[column]}


def as_ms(times, steps=1):
    """{region: microseconds} -> {region: milliseconds per step}, without zeros."""
    return pytest.approx({region: us / 1000 / steps for region, us in times.items() if us})


@pytest.mark.parametrize("steps", [[20], [19, 20], [19, 20, 21, 22]])
def test_regions_of_a_gpu(steps):
    """Two micro-steps and an update per step. In the first two steps (of two, in the first) the first micro-step and
    the update are launched kernel by kernel; these steps count only if no other step is there. Of two steps, the second
    has an update of its own, whose kernels keep one region."""
    rec, launched = Recorder(gap=2), max(1, min(2, len(steps) - 1))
    run = dict(cuda_graphs=True, steps=[dict(step=step) for step in steps])
    for number in steps:
        first, (_, *update) = number in steps[:launched], UPDATES[number % 2]
        if first or number == steps[launched]:
            rec.truth.clear(), rec.idle.clear()
        rec.play((f"step {number}", ("data",), LAUNCHED if first else rec.graph(micro_step()), rec.graph(micro_step()),
                  ("reduce lm_head", "reduce lm_head: a"),
                  ("update", f"update: {COPY}", *update) if first else rec.graph(("update", *update), len(steps) > 2),
                  "other: f<1>(int)"))
    truth, idle, left_out = rec.truth.copy(), rec.idle.copy(), launched if len(steps) > 1 else 0
    count = len(steps) - left_out
    idle["micro-step" if left_out else "forward embed"] -= 2  # time begins with the first kernel
    rec.kernel("after the last step", None)
    result = trace.analyse(rec.trace(**run))
    assert rec.regions(0, **run) == as_ms(truth, count) and rec.regions(3, **run) == as_ms(idle, count)
    split = Counter(idle=sum(idle.values()))
    for region, us in truth.items():
        way = "other" if region == "micro-step" else region.split()[0]
        split[way if way in ("forward", "backward", "other") else "optimizer"] += us
    assert {name: ms for name, ms in result["split"].items() if ms} == as_ms(split, count)
    assert result["steps"] == steps[left_out:] and result["ms"] == pytest.approx(sum(result["split"].values()))
    assert [calls for name, calls, _ in result["names"] if name == "gram"] == [3]
    left = "left out, as they were launched in part kernel by kernel: steps "
    note = {1: "step 20 was launched in part kernel by kernel: idle contains the gaps", 2: f"{left}19",
            4: f"{left}19, 20"}[len(steps)]
    shown = trace.table(result)
    assert f"\n{note}\n\n" in shown and "not told apart" not in shown and re.search(r"^layer 1 +\d", shown, re.M)


def test_graphs_of_other_kernels():
    """A graph has the regions of an earlier micro-step only if its kernels are the same."""
    rec, other, part = Recorder(), micro_step("other_gemm"), ("micro-step", *micro_step()[2:])
    rec.play(("step 0", rec.graph(micro_step(), known=False), LAUNCHED, rec.graph(micro_step()),
              rec.graph(other, known=False), rec.graph(part, known=False), rec.graph(micro_step())),
             ("step 1", (*other, f"micro-step: {COPY}"), rec.graph(other), rec.graph(micro_step())))
    assert rec.regions() == as_ms(rec.truth, 2)


def test_regions_of_several_ranks():
    """Collectives in the graph of an update have regions, and what is launched beside it has its own."""
    rec = Recorder()
    rows, fetched = ("update ngram_embed", "update ngram_embed: rows"), ("fetch rows", "fetch rows: ncclSendRecv")
    update = ("update", ("reduce mlp_bank", "reduce mlp_bank: ncclReduceScatter"), MUON,
              ("wait gather mlp_bank", "wait gather mlp_bank: ncclAllGather"), ZERO)
    for number in range(3):
        if number == 2:
            rec.truth.clear()
        rec.play((f"step {number}", rows, fetched, update if number < 2 else rec.graph(update)))
    collectives = {"reduce mlp_bank", "wait gather mlp_bank", "fetch rows"}
    for column, names in (0, rec.truth.keys() - collectives), (1, collectives):
        assert rec.regions(column, cuda_graphs=True) == as_ms({name: rec.truth[name] for name in names})


def test_banks_side_by_side():
    """Launched kernel by kernel, one bank follows the other; in a graph, their kernels alternate."""
    rec, banks = Recorder(), ("update a: gram@1 gram@1", "update b: gram@2 gram@2")
    for number in range(3):
        if number == 2:
            rec.truth.clear()
        rec.play((f"step {number}", ("update", *((text[:8], text) for text in banks)) if number < 2 else rec.graph(
            ("update", *2 * ("update b: gram@2", "update a: gram@1")))))
    assert rec.regions(cuda_graphs=True) == as_ms(rec.truth)


def test_short_names():
    for name, short in (
            ("nvjet_tst_256x128_64x4_1x2_h_bz_TNT", "nvjet_tst_256x128"), ("triton_red_fused_7", "triton_red_fused"),
            ("void cublasLt::splitK<32, 16, int>(cublasLt::Params<float>)", "splitK"),
            ("void at::elementwise<128, at::FillFunctor<int> >(int)", "elementwise FillFunctor")):
        assert trace.short(name) == short


def in_us(result):
    """The regions with whole microseconds: {region: [compute, communication, of that exposed, idle]}; the split."""
    regions = {region: [round(1000 * ms, 6) for ms in numbers] for region, numbers in result["regions"].items()}
    return regions, [round(1000 * ms, 6) for ms in result["split"].values()]


def test_communication_and_overlap():
    """Kernels compute from 0 to 12 and 30 to 40 on streams 7, 8; others communicate to 18, and from 20."""
    rec = Recorder()

    def at(name, start, end, stream):
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        return lambda: rec.event(kind, name, start, end - start, stream, stream=stream, correlation=rec.launch())
    rec.play(("step 5", ("update qk_bank", at("a", 0, 10, 7), at("b", 30, 40, 7)),
              ("update mlp_bank", at("c", 8, 12, 8)),
              ("reduce mlp_bank", at("ncclDevKernel_ReduceScatter_Sum_bf16(args)", 5, 15, 20),
               at("ncclDevKernel_Broadcast(args)", 14, 18, 21)),
              ("gather mlp_bank", at("ncclDevKernel_AllGather_RING_LL(args)", 20, 35, 20)),
              at("Memcpy HtoD (Pinned -> Device)", 41, 60, 9)))
    rec.event("kernel", "no launch recorded", 40, 2, 7, stream=7)  # counts with the kernel before it on its stream
    result = trace.analyse(rec.trace())
    assert in_us(result) == ({"update qk_bank": [22, 0, 0, 0], "update mlp_bank": [2, 0, 0, 0],
                              "reduce mlp_bank": [0, 14, 6, 0], "gather mlp_bank": [0, 15, 10, 2]},
                             [0, 0, 24, 0, 16, 2])
    assert round(1000 * result["ms"], 6) == 42


def test_operators_of_a_cpu():
    """Without the operators inside, and the thread of the loader. Waiting is communication unless an operator runs."""
    rec = Recorder()

    def op(name, start, dur, number=None, tid=1):
        rec.event("cpu_op", name, start, dur, tid, **({} if number is None else {"Sequence number": number}))
    for t, step in (0, 7), (1000, 8):
        for name, start, end in (
                (f"step {step}", 0, 1000), ("data", 0, 50), ("micro-step", 50, 720), ("forward", 60, 300),
                ("layer 0", 100, 101), ("layer 1", 200, 201), ("loss", 300, 400), ("backward", 400, 700),
                ("wait mlp_bank", 720, 800), ("update mlp_bank", 800, 900)):
            rec.event("user_annotation", name, t + start, end - start)
        op("aten::index", t + 70, 20, t), op("aten::linear", t + 110, 60), op("aten::mm", t + 120, 40, t + 1)
        op("aten::view", t + 170, 5, t + 2), op("aten::mul", t + 210, 80, t + 2)  # the later operation makes node 2
        op("_HeadLoss", t + 310, 90, t + 3)
        for start, dur, number in (410, 30, 3), (450, 100, 2), (560, 70, 1), (640, 20, 0):
            op(f"{trace.NODE}: X", t + start, dur, t + number), op("X", t + start + 5, dur - 10, t + number)
        op("AccumulateGrad", t + 670, 10), op("aten::div_", t + 780, 10), op("aten::bmm", t + 800, 100)
        op("aten::elsewhere", t + 730, 30, tid=2)
    result = trace.analyse(rec.trace(ranks=2))
    regions, split = in_us(result)
    assert {region: numbers[0] for region, numbers in regions.items() if numbers[0]} == {
        "forward embed": 20, "forward layer 0": 65, "forward layer 1": 80, "forward loss": 90, "backward loss": 30,
        "backward layer 1": 100, "backward layer 0": 70, "backward embed": 20, "backward": 10, "update mlp_bank": 100,
        "wait mlp_bank": 10}
    assert {region: numbers[1:3] for region, numbers in regions.items() if numbers[1]} == {"wait mlp_bank": [80, 70]}
    assert split == [255, 230, 110, 0, 70, 335]
    names = {name: round(1000 * ms) for name, _, ms in result["names"]}
    assert names["aten::linear"] == 20 and "aten::elsewhere" not in names
    assert trace.analyse(rec.trace(ranks=1))["split"]["exposed communication"] == 0  # no other rank to wait for


# ---- Work ------------------------------------------------------------------------------------------------------------
LAYERS = (T.Layer(paired=True), T.Layer(attention=False), T.Layer(long=True, value_embed=True),
          T.Layer(paired=True, value_embed=True))
DOCUMENTS = [40, 4, 20], [64]  # of the two micro-batches of each step
LIMITS = dict(bf16=1e12, fp8=0.0, copy=1e11)


def made(slow=(), few=(), orders=1, ranks=1, fp8=False, layers=LAYERS, mlp_dim=1024,
         banks=((8, 256, 256), (6, 1024, 256)), adam={"lm_head": (256 * 384, False)}, copies={}):
    """Stands for a trainer of four layers of 256 channels. adam: label -> (weights, whether it is a table)."""
    model = NS(model_dim=256, num_heads=2, mlp_dim=mlp_dim, padded_vocab=384, layers=layers, ngrams=(0,) * orders,
               ngram_table="bigram_embed", pointer=True)
    def part(optim, shape, state, sparse=False, tied_to=""):
        return NS(row=NS(optim=optim, sparse=sparse, tied_to=tied_to), part=torch.empty(shape, device="meta"),
                  state=state)
    sharded = {f"bank {i}": part("normuon", bank, {"m": None}) for i, bank in enumerate(banks)}
    sharded |= {label: part("adam", size, {"m": None}, sparse, label in copies.values() and "head")
                for label, (size, sparse) in adam.items()}
    sharded |= {label: part("adam", 0, {"last": None, "v": None}) for label in few}  # their updates do not count
    optimizer = NS(params={"attn_gate_bank": torch.zeros(1, 12), "pointer_sink": torch.zeros(128)}, of_rows=few,
                   sharded=sharded, replicated=NS(grads=[torch.zeros(9)]))
    return NS(rt=NS(world=ranks), head=NS(fp8=True, block=40), optimizer=optimizer, config=NS(
        model=model, system=NS(fp8_mlp=fp8, fp8_qkv=fp8), optim=NS(polar_steps=5, slow_momentum=slow),
        schedule=NS(stages=[NS(short_window=3, long_window=9)])))


def calls(**changes):
    """[operation, sizes of every call] of three steps of a changed `made`; the second one updates no Adam parameter."""
    def batch(documents, token_ids, touched, candidates):
        starts = torch.tensor([0, *documents[:-1]]).cumsum(0).repeat_interleave(torch.tensor(documents))
        return NS(documents={False: (starts, None)}, tokens=torch.arange(64) % token_ids, candidates=candidates,
                  row_ids={"bigram_embed": torch.arange(64) % touched, "signs": torch.arange(64)})
    batches = batch(DOCUMENTS[0], 30, 50, None), batch(DOCUMENTS[1], 33, 60, torch.zeros(256))
    plans = [NS(stage=0, micro_batch_tokens=64, adam=odd, tables=odd, tied=step > 1)
             for step, odd in ((1, True), (2, False), (3, True))]
    return [list(trace.calls(made(**changes), plan, batches)) for plan in plans]


def pairs(documents, window):
    """(query, key) pairs by counting."""
    return sum(1 for n in documents for query in range(n) for key in range(query + 1) if key >= query - window)


def found(**changes):
    """{operation: [(operations, bytes) of each call]} and all calls of `calls`."""
    done, least = sum(calls(**changes), []), defaultdict(list)
    for name, *sizes in done:
        least[name].append(trace.WORK[name][1](*sizes))
    return least, done


def test_work_by_counting():
    least, _ = found()
    documents = 3 * DOCUMENTS
    paired = [pairs([2 * n for n in lengths], 3) for lengths in documents]  # one head of the two, twice as long
    long = [2 * pairs(lengths, 9) for lengths in documents]
    stream, product = 2 * 64 * 256, 2 * 64 * 256 * 256  # bytes of one (N, D); FLOPs of a product with a (D, D)
    assert sorted(least["attend"]) == sorted((2 * 2 * 128 * n, 4 * stream) for n in 2 * paired + long)
    assert sorted(least["attend_backward"]) == sorted((5 * 2 * 128 * n, 7 * stream) for n in 2 * paired + long)
    assert Counter(least["project"]) == {(3 * product, 4 * stream): 6, (3 * product, 5 * stream): 12}  # with ve
    assert {*least["mlp"], *least["mlp_backward"]} == {(4 * product, 5 * stream), (4 * product, 9 * stream)}
    earlier = [sum(n * (n - 1) // 2 for n in lengths) for lengths in documents]
    assert sorted(least["pointer"]) == sorted((2 * 128 * n, stream) for n in earlier)
    assert sorted(least["pointer_backward"]) == sorted((6 * 128 * n, 2 * stream) for n in earlier)
    rows_times_columns = 40 * 384, 24 * 384, 40 * 256, 24 * 256
    assert Counter(least["cross_entropy"]) == {(0, 3 * size): 3 for size in rows_times_columns}  # bf16 in, one byte out
    assert least["XXT"] == [(8 * 2 * 256**3 * 3 / 4, 8 * 2 * 2 * 256**2)] * 15  # 3 of the 2 x 2 tiles of a product

    least, _ = found(layers=[T.Layer(narrow=True)], mlp_dim=512, banks=[[4, 128, 256]])
    near = [2 * pairs(lengths, 3) for lengths in documents]
    assert least["attend"] == [(2 * (64 + 128) * n, 3 * stream) for n in near]  # q and k are half a (N, D) each
    assert least["attend_backward"] == [(2 * (3 * 64 + 2 * 128) * n, 5 * stream) for n in near]
    assert least["project"] == least["mlp"] == [(2 * product, 3 * stream)] * 6
    assert least["XXT"][0][0] == 4 * 2 * 128**2 * 256

    (least, _), sizes = found(), [8 * 256**2, 6 * 1024 * 256] * 3
    assert least["fused_momentum"] == [(0, 12 * n) for n in sizes]
    assert least["normuon_update"] == [(0, 10 * n) for n in sizes]
    least, _ = found(slow=(1,), adam={"a": (100, False), "b": (10, True), "c": (1, False)}, copies={"a": "c"})
    assert least["fused_momentum"] == [(0, 20 * n) for n in sizes]
    assert sorted(least["adam_update"]) == [(0, 22 * n) for n in (1, 10, 10, 100, 100)]  # a copy is not updated
    assert least["replicated_update"] == [(0, (32 + 3 * 4) * 9)] * 2

    _, few = found(few=["bigram_embed"], orders=2)
    assert few.count(("embedding_grad", 128, 256, 50)) == few.count(("embedding_grad", 128, 256, 60)) == 3
    _, two = found(few=["bigram_embed"], orders=2, ranks=2)  # each of two ranks owns half of the rows
    assert len(two) == len(few) + 6
    assert two.count(("embedding_grad", 50, 256, 25)) == two.count(("embedding_grad", 60, 256, 30)) == 3
    least, _ = found(fp8=True)  # an operation counts as half of one; a code has one byte
    assert Counter(least["project"]) == {(1.5 * product, 3.5 * stream): 6, (1.5 * product, 4.5 * stream): 12}
    assert {*least["mlp"], *least["mlp_backward"]} == {(2 * product, 4.5 * stream), (2 * product, 6.5 * stream)}


@pytest.mark.parametrize("fp8", [False, True])
def test_rates_of_our_kernels(fp8):
    """Each kernel takes four times the least time of its operation, so it runs at 1/4 of the limit. The first step
    does not count. A missing launch leaves no rate."""
    rec, steps = Recorder(), calls(fp8=fp8)
    run = dict(cuda_graphs=True, limits=LIMITS, steps=[
        dict(step=step, calls=[[n, *call] for call, n in Counter(done).items()]) for step, done in enumerate(steps, 1)])
    for step, done in enumerate(steps, 1):
        launches = []
        for name, *sizes in done:
            (flops, data), kernels = trace.WORK[name][1](*sizes), trace.WORK[name][0].split()
            us = 4e6 * max(flops / 1e12, data / 1e11) / len(kernels)
            launches += [(kernel.replace("_mlp_", "_mlp_hopper_"), None, us) for kernel in kernels]
        rec.play((f"step {step}", *(partial(rec.kernel, *launch) for launch in launches)))
    result = trace.analyse(rec.trace(**run))
    rows = {name: rest for name, *rest in result["rates"]}
    assert {name for names in rows for name in names.split()} == set(trace.WORK)
    assert all(part == pytest.approx(0.25) for *_, part in rows.values())
    assert rows["project"][0] == 6
    assert rows["project"][1] == pytest.approx(6 * 4e3 * (0.5 if fp8 else 1) * 6 * 64 * 256**2 / 1e12)
    assert re.search(r"^project +6 +\d+\.\d\d\d +0\.25 TFLOP/s +25\.0%$", trace.table(result), re.M)
    rec.events.remove(max((e for e in rec.events if e["name"] == "_mlp_hopper_kernel"), key=lambda e: e["ts"]))
    result = trace.analyse(rec.trace(**run))
    assert [name for name, *_, part in result["rates"] if part is None] == ["mlp mlp_backward"]
    assert "launches?" in trace.table(result)


def test_the_kernels_of_work_exist():
    launched = {*re.findall(r"^\s+(_\w+_kernel)\[", Path(triton_kernels.__file__).read_text(), re.M)}
    assert {kernel for kernels, _ in trace.WORK.values() for kernel in kernels.split()} < launched


# ---- Errors ----------------------------------------------------------------------------------------------------------
def profiler(content):
    """A stopped profiler whose trace is `content`."""
    return NS(export_chrome_trace=lambda path: Path(path).write_text(content), stop=lambda: None)


@pytest.mark.parametrize("content, folder, reason", [
    ("{}", "missing", "No such file or directory"), ("not json", "", "Expecting value.*"),
    ('{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "step 4", "ts": 0, "dur": 9}]}', "",
     "it has no kernels.*")])
def test_no_trace(tmp_path, content, folder, reason):
    """The run goes on with a warning, and leaves no file."""
    lines, rt = [], NS(device=torch.device("cuda"), rank=0, world=1)
    system = NS(profiled=[], cuda_graphs=False, dtype="float32")
    trainer = NS(log=NS(path=tmp_path / folder / "x.txt", line=lines.append), rt=rt, micro_steps=1, plans=[],
                 config=NS(system=system), loader=NS(replay=lambda state, count: []))
    started = trace.Profiler(trainer)
    started.profiler, started.loader_state = profiler(content), None
    started.stop()
    assert re.fullmatch(f"warning: no trace in x_rank0.json.gz: {reason}", *lines) and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("data, message", [
    (b"not json", "Expecting value"), (gzip.compress(b"{}" * 99, mtime=0)[:-9], "[Cc]ompressed"),
    (b'{"traceEvents": []}', "no training step"), (b'{"a": 1}', "traceEvents")])
def test_unreadable_traces(tmp_path, data, message):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(UserError, match=f"^.*x.json: .*{message}.*$"):
        trace.main([str(tmp_path / "x.json")])


# ---- Real runs -------------------------------------------------------------------------------------------------------
@pytest.fixture
def small(corpus):  # noqa: F811
    """The arguments of a tiny run of seven steps."""
    data = [argument for argument in corpus.args if "_files=" in argument]
    return ["--preset=cpu", *data, "--val_tokens=256", "--val_batch_tokens=256", "--model_dim=32", "--num_heads=2",
            "--layers=3", "--backout_layer=none", "--scheduled_steps=6", "--extension_steps=1", "--sample_tokens=0",
            "--val_every=7", *(f"--stage{i}.batch_tokens=256" for i in (1, 2, 3, 4))]


def check(path, ranks):
    """The numbers of a run on the CPU: its regions are told apart and add up."""
    result = trace.analyse(json.loads(gzip.open(path).read()))
    regions, split = result["regions"], result["split"]
    forward, backward = ([regions[f"{way} {place}"][0] for place in ("embed", "layer 0", "layer 1", "layer 2", "loss")]
                         for way in ("forward", "backward"))
    assert min(forward + backward) > 0 and sum(forward) == pytest.approx(split["forward"])
    assert 0.5 * split["backward"] < sum(backward) < 1.0001 * split["backward"]
    assert (split["exposed communication"] > 0) == (ranks > 1) and result["ms"] == pytest.approx(sum(split.values()))
    assert "aten::mm" in {name for name, *_ in result["names"]}
    assert {"data", "reduce lm_head", "wait lm_head", "update replicated"} <= regions.keys()
    return result


def test_a_profiled_run(small, tmp_path, monkeypatch, capsys):
    """The log has the tables of records/trace.py. Starting and stopping it, 100 s each here, is outside the clock.
    The losses are those of a run without it."""
    late, now, start, stop = [0], time.perf_counter, trace.Profiler.start, trace.Profiler.stop
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now() + late[0])
        patch.setattr(trace.Profiler, "start", lambda self: late.append(late.pop() + 100) or start(self))
        patch.setattr(trace.Profiler, "stop", lambda self: stop(self) or late.append(late.pop() + 100))
        assert T.main([*small, "--profile=4:2", f"--log_dir={tmp_path}/logs"]) == 0
    log, file = sorted((tmp_path / "logs").iterdir(), key=lambda path: path.suffix, reverse=True)  # .txt, .gz
    assert file.name == f"{log.stem}_rank0.json.gz"
    capsys.readouterr()
    trace.main([str(file)])
    shown, body = capsys.readouterr().out.partition("\n")[2].rstrip(), log.read_text().rpartition("=" * 100)[2]
    assert shown.startswith("steps 4 to 5, rank 0 of 1 ")
    assert f"{shown}\n\ntrace, beside this log: {file.name}\n" in body
    result, run = check(file, 1), compare.read_run(log)
    # The trace and the log read two clocks, and a busy machine may stop the process between the two readings. A wrong
    # unit would make seconds of milliseconds.
    assert run.finished and result["ms"] <= 1.01 * (run.ms[6] - run.ms[4]) / 2 + 1000
    assert run.time < 100 < float(re.search(r"^profile_seconds: (.*)", body, re.M)[1])
    assert T.main([*small, f"--log_dir={tmp_path}/again"]) == 0
    again = compare.read_run(next((tmp_path / "again").glob("*.txt")))
    assert again.losses == run.losses and len(run.losses) == 2


def test_two_ranks(small, tmp_path):
    """Each rank writes a trace of its own data, up to the last step of the run."""
    args = [*small, "--ngram_rows=0", "--micro_batches=2", "--profile=4:3", f"--log_dir={tmp_path}/logs"]
    forks = Forks("import sys, train_gpt; sys.exit(train_gpt.main(sys.argv[1:]))", args, rank_variables(2))
    out, err = forks.communicate(timeout=100)
    assert forks.returncode == 0, out + err
    (log,), config = (tmp_path / "logs").glob("*.txt"), T.parse_config(args)
    assert "\nsteps 4 to 6, rank 0 of 2 " in log.read_text()
    for rank in 0, 1:
        result = check(log.with_name(f"{log.stem}_rank{rank}.json.gz"), 2)
        run = result["run"]
        assert run["rank"] == rank and [step["step"] for step in run["steps"]] == [4, 5, 6] == result["steps"]
        assert {"wait bigram_embed", "wait gather mlp_bank", "wait replicated"} <= set(result["regions"])
        plans = [T.make_plan(config, step) for step in range(7)]
        loader = L.Loader(config, Runtime(rank, 2, torch.device("cpu")), plans)
        batches = [loader.next_batch() for _ in range(7)][4:]
        for step, batch, plan in zip(run["steps"], batches, plans[4:]):
            made, tokens = [call[1:] for call in step["calls"]], len({*batch.tokens.tolist()})
            touched = len({*batch.row_ids["bigram_embed"].tolist()})
            earlier = sum(i - start for i, start in enumerate(batch.documents[False][0].tolist()))
            assert [n for name, *_, n in made if name == "embedding_grad"] == [tokens, touched], made
            assert [n for name, *_, n in made if name == "pointer"] == [earlier]
            assert ("adam_update" in {name for name, *_ in made}) == plan.adam
