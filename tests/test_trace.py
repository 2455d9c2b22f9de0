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

import numpy as np
import pytest
import torch

import train_gpt as T
from data import loader as L
import triton_kernels as kernels
from oracles import write_shard
from records import compare, trace, work
from test_run import ENV, ROOT, TINY, VAL_TOKENS, text

# A micro-step of three layers, the middle one without attention: (region, kernels in order).
GEMM, SPLIT = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT"
REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)"
FUSED = "triton_red_fused_add_mul_rms_norm_7"
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

    def micro_step(self, graph, duration=lambda name: 3.0):
        """As one graph, or launch by launch, the backward pass from another thread."""
        link = self.launch("cudaGraphLaunch") if graph else None
        for way in ("forward", "backward"):
            def launches():
                for region, names in MICRO_STEP:
                    for name in names if region.startswith(way) else ():
                        self.kernel(name, duration(name), region, link=link or self.launch(tid=1 + (way == "backward"), cat="cuda_driver"))
            launches() if graph else self.range(way, launches)

    def trace(self, **run):
        random.Random(0).shuffle(self.events)  # the order of a file means nothing
        return {"traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, *self.events], "run": run}


@pytest.mark.parametrize("graph", [True, False])
def test_regions_of_a_gpu(graph):
    """Two steps of two micro-steps; kernels of distinct lengths, so that one in the wrong place shows."""
    rec, rng = Recorder(), random.Random(1)
    idle = Counter()

    def step():
        for _ in range(2):
            rec.range("data", lambda: None)
            rec.range("micro-step", lambda: rec.micro_step(graph, lambda name: rng.randint(1, 1000)))
        rec.range("reduce lm_head", lambda: rec.kernel("_transpose_kernel", 5, "reduce lm_head", gap=40))
        idle["reduce lm_head"] += 40
        rec.range("update mlp_bank", lambda: [rec.kernel("_gram_kernel", 7, "update mlp_bank", gap=10) for _ in range(3)])
        idle["update mlp_bank"] += 30
        rec.range("zero gradients", lambda: rec.kernel("void at::native::f<1>(int)", 11, "zero gradients"))
        rec.kernel("void at::native::f<1>(int)", 2, "other")
        rec.event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", rec.device, 300, 9, stream=9, correlation=rec.launch())

    rec.kernel("before the first step", 50, None)
    for number in (20, 21):
        rec.range(f"step {number}", step)
    rec.kernel("after the last step", 50, None)
    truth = {region: us / 2000 for region, us in rec.truth.items() if region}
    result = trace.analyse(rec.trace())
    assert {region: numbers[0] for region, numbers in result["regions"].items()} == pytest.approx(truth)
    assert {region: numbers[3] for region, numbers in result["regions"].items() if numbers[3]} == pytest.approx(
        {region: us / 2000 for region, us in idle.items()})
    whole = {way: sum(ms for region, ms in truth.items() if region.startswith(way)) for way in ("forward", "backward")}
    optimizer = (5 + 21 + 11) / 1000
    assert result["split"] == pytest.approx({**whole, "optimizer": optimizer, "other": 0.002, "exposed communication": 0, "idle": 0.07})
    assert result["steps"] == [20, 21]
    assert result["ms"] == pytest.approx(sum(truth.values()) + 0.07) == pytest.approx(sum(result["split"].values()))
    assert ("_gram_kernel", 3, pytest.approx(0.021)) in result["names"] and ("Memcpy DtoH", 1, pytest.approx(0.3)) in result["names"]
    assert sum(row[1] for row in result["names"] if row[0].startswith("nvjet")) == 2 * sum(
        name in (GEMM, SPLIT) for _, names in MICRO_STEP for name in names)


def test_micro_steps_of_other_kernels_are_not_cut():
    """The host's ranges remain: here two of them, in one graph nothing."""
    plain = {"_mlp_hopper_kernel": GEMM, "_cross_entropy_kernel": FUSED}
    for graph, regions in (True, {"micro-step"}), (False, {"forward", "backward"}):
        rec = Recorder()
        rec.range("step 0", lambda: rec.range("micro-step", lambda: rec.micro_step(graph)))
        for event in rec.events:
            event["name"] = plain.get(event["name"], event["name"])
        result = trace.analyse(rec.trace())
        assert {region for region, numbers in result["regions"].items() if numbers[0]} == regions
        assert ("not told apart" in trace.table(result)) != graph


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

LAYERS = [dict(attention=True, paired=True, long=False, value_table=None),
          dict(attention=False, paired=False, long=False, value_table=None),
          dict(attention=True, paired=False, long=True, value_table=0),
          dict(attention=True, paired=True, long=False, value_table=1)]
RUN = dict(rank=0, ranks=1, model_dim=256, num_heads=2, padded_vocab=384, fp8=True, head_rows=40, polar_steps=5, layers=LAYERS,
           gate_channels=12,
           banks=[[8, 256, 256], [6, 1024, 256]], limits=dict(bf16=1e12, fp8=0.0, copy=1e11),
           steps=[dict(step=step, adam=step % 2 == 1, tied=step < 3, tokens=64, windows=[3, 9], rows=[
               dict(documents=[40, 4, 21], token_ids=30, bigram_rows=50), dict(documents=[64], token_ids=33, bigram_rows=60)])
               for step in (1, 2, 3)])


def brute_force_pairs(documents, window):
    return sum(1 for n in documents for query in range(n) for key in range(query + 1) if key >= query - window)


def test_work_by_counting():
    rows, found = [row for step in RUN["steps"] for row in step["rows"]], {}
    for name, *sizes in work.calls(RUN):
        found.setdefault(name, []).append(work.WORK[name][1](*sizes))
    paired = [brute_force_pairs([2 * n for n in row["documents"]], 3) for row in rows]  # one head of the two, twice as long
    long = [2 * brute_force_pairs(row["documents"], 9) for row in rows]
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
        stream + 2 * 2 * 256 * n for row in rows for n in [row["token_ids"]] * 3 + [row["bigram_rows"]])
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
        flops, octets = work.WORK[name][1](*sizes)
        launched = work.WORK[name][0].split()
        for kernel in launched:
            us = 4e6 * max(flops / 1e12, octets / 1e11) / len(launched)
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
    assert trace.rates(items, RUN | {"limits": None}, 3) == []
    result = dict(steps=[0, 1], run=RUN, ms=1.0, split={}, communication=0, regions={}, names=[], rates=trace.rates(items[1:], RUN, 3))
    assert re.search(r"^project +6 +\d+\.\d{3} +0\.25 TFLOP/s +25\.0%$", shown := trace.table(result), re.M) and "launches?" in shown


def test_work_knows_every_kernel():
    source = Path(kernels.__file__).read_text()
    launched = set(map(work.plain, re.findall(r"^\s+(_\w+_kernel)\[", source, re.M)))
    assert launched == {kernel for kinds, _ in work.WORK.values() for kernel in kinds.split()} and "_sum_rows_kernel" in launched
    assert "_mlp_hopper_kernel" in source


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
        assert [*T.parse_config(["--preset=cpu", f"--profile={knob}"]).run.profiled] == steps
    assert not set(range(97)) & {T.Run().profiled.start, T.Run().profiled.stop}


@pytest.fixture
def in_process():
    """T.main leaves nothing behind."""
    yield
    if T.dist.is_initialized():
        T.dist.destroy_process_group()


class SlowProfile:
    def __init__(self, *args):
        pass

    def start(self):
        time.sleep(1)
        return 1

    stop = start

    def cost(self):
        return "cost"


def test_starting_and_stopping_are_outside_the_clock(data, tmp_path, monkeypatch, in_process):
    monkeypatch.setattr(trace, "Profile", SlowProfile)
    assert T.main([*data, f"--log_dir={tmp_path}", "--scheduled_steps=4", "--profile=5:1", "--micro_batches=1", "--val_every=9"]) == 0
    body = next(tmp_path.glob("*.txt")).read_text().rpartition("=" * 100)[2]
    train, *others, total = (float(x) for x in re.findall(r"^\w+_seconds: (.*)$", body, re.M))
    assert train + sum(others) < total - 1.9 and re.search(r"^step:6/6 val_loss.*\ncost\n", body, re.M)


@pytest.mark.parametrize("octets, message", [
    (b"not json", "Expecting value"), (gzip.compress(b"{}" * 99)[:-9], "[Cc]ompressed"), (b'{"traceEvents": []}', "no training step"),
    (None, "No such file"), (gzip.compress(b'{"a": 1}'), "traceEvents")])
def test_unreadable_traces(tmp_path, octets, message):
    if octets is not None:
        (tmp_path / "x.json").write_bytes(octets)
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
    layers = [[float(x) for x in found[place]] for place in ("embed", *(f"layer {n}" for n in range(len(T.LAYERS))), "loss")]
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
        assert [step["rows"] for step in result["run"]["steps"]] == [[{
            "documents": [n for n in np.diff(batch.cu_seqlens).tolist() if n], "token_ids": len({*batch.tokens.tolist()}),
            "bigram_rows": len({*batch.bigram_rows_cpu.tolist()})}] for batch in batches]
