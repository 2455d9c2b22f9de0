"""What is checked before anything is compiled, and the table of --check. The GPUs are made up: nothing runs on them."""

import dataclasses
import math
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt as T
import triton_kernels as kernels
from data import loader as L
from data.run import machine, memory, start
from data.run.config import left_open, read_values
from data.run.memory import (
    VALIDATION_STREAMS, estimate_memory, fit_memory, possible_micro_batches, require_state,
    restart_with_more_micro_batches, state_bytes)
from data.run.program import UserError, error_message
from forks import Forks, rank_variables
from oracles import write_shard
from records import check as C

ROOT, MiB, GPU = Path(T.__file__).parent, 2**20, torch.device("cuda")
H200 = 1.19  # H100s
ROWS = ["versions", "device", "kernels", "training data", "validation data", "caches", "disk", "memory", "time"]
DOCUMENT = [256, *[97] * 599]  # cut at 448 in the first stage of the preset, at 512 in the others


@pytest.fixture
def folder(tmp_path):
    """Good and bad data for --preset=cpu; the rows of its batches have 1024 tokens."""
    for name, tokens in {"train_1": DOCUMENT * 3, "train_2": DOCUMENT * 2, "val_1": [256, *[97] * 39999],
                         "val_2": [256, *[97] * 25536], "val_short": [256, *[97] * 65535], "val_tiny": [256] * 16,
                         "foreign": [*DOCUMENT * 3, 257], "other": [97] * 1800,
                         "below_1": [256] * 1024, "below_2": [256] * 1023, "gpt2_val": [50256, *[97] * 65536]}.items():
        write_shard(tmp_path / f"{name}.bin", tokens)
    write_shard(tmp_path / "longer.bin", DOCUMENT * 3, count=1801)
    (tmp_path / "xval_2.bin").symlink_to(tmp_path / "val_2.bin")
    return tmp_path


@pytest.fixture
def check(folder, capsys, monkeypatch):
    """check(argument, ...) -> (status, {row: (found, ok)}) of --check; .start: (status, stderr) of a normal start,
    which stops where it would join the process group."""
    monkeypatch.setattr(T, "init_runtime", Mock(side_effect=UserError("all checks passed")))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**37))  # other programs change it
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # set by the trainer, so put back afterwards
    preset = ["--preset=cpu", f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_[12].bin",
              f"--log_dir={folder}/new/logs"]
    def table(*args):
        T.init_runtime.reset_mock()
        status, rows, key = T.main(["--check", *preset, *args]), {}, None
        out, err = capsys.readouterr()
        assert err == "" and not T.init_runtime.called and not (folder / "new").exists()
        head, *lines = ([cell.strip() for cell in f"{line} ".split(" | ")] for line in out.splitlines())
        assert head == ["what", "found", "ok?"]
        for name, found, ok in lines:
            key = name or key  # a long line goes on in the next ones
            before, ok = rows.get(key, ("", ok))
            rows[key] = f"{before} {found}".strip(), ok
        assert [row for row in rows if row not in ("tokenizer", "size")] == ROWS
        assert status == int(any(ok == "no" for _, ok in rows.values()))
        return status, rows
    def start(*args):
        status = T.main([*preset, *args])
        return status, capsys.readouterr().err
    table.check, table.start, table.args = table, start, preset
    return table


@pytest.fixture
def gpus(check, folder, monkeypatch):
    """Two H200s, or what is set in it; .check and .start with --preset=record."""
    has = SimpleNamespace(count=2, capability=(9, 0), free=140000, whole=0, own=500, gpu=H200, sees=[])
    count = lambda: len(has.sees[-1].split(",")) if has.sees else has.count
    for name, value in {"device_count": count, "init": lambda: has.sees.append(os.environ["CUDA_VISIBLE_DEVICES"]),
                        "is_initialized": lambda: bool(has.sees),
                        "set_device": lambda local: setattr(has, "device", local),
                        "current_device": lambda: has.device, "get_device_name": lambda device: "NVIDIA H200",
                        "get_device_capability": lambda device: has.capability,
                        "memory_reserved": lambda device: has.own * MiB,
                        "mem_get_info": lambda device: ((has.free - has.own) * MiB,
                                                        (has.whole or has.free) * MiB)}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(C, "measure_gpu", lambda fp8: has.gpu)
    monkeypatch.setattr(start, "text_codec", lambda size: None)
    monkeypatch.setattr(start, "tokens_and_passes", lambda *args: (10**8, 0.5, 10**8))  # as if the data were enough
    monkeypatch.setattr(memory, "kept_tokens", lambda config: 10**8)
    write_shard(folder / "gpt2.bin", [50256, *[97] * 599] * 82)  # 49200 tokens; a row has 49153 of them
    args = ["--preset=record", f"--train_files={folder}/gpt2.bin", f"--val_files={folder}/gpt2_val.bin",
            "--val_tokens=65536", "--val_batch_tokens=65536"]
    def fresh(run):
        def process(*more):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
            has.sees = []
            return run(*args, *more)
        return process
    has.check, has.start = fresh(check), fresh(check.start)
    return has


def sizes(config):
    return state_bytes(config, T.param_table(config.model))


def joined(text):
    """Without blanks: a table breaks long lines, and names without blanks."""
    return "".join(text.split())


STEPS_20 = "--scheduled_steps=14 --extension_steps=6 --muon_cooldown=1 " + " ".join(
    f"--stage{i}.batch_tokens=128" for i in (1, 2, 3, 4))
TORCH, CACHES = "torch.__version__", "$TRITON_CACHE_DIR"
TWO_RANKS = {"$WORLD_SIZE": "2", "$LOCAL_WORLD_SIZE": "2"}
MAC = {"torch.backends.mps.is_available": lambda: True}
OFFLINE = Mock(side_effect=UserError("no GPT-2 tokenizer (ConnectionError): tiktoken fetches it once, online"))
# By fixture. Each case has the arguments, the name of a row, its `ok?`, its text, and what it changes on the machine.
# {d} is the folder of the data.
CASES = {"check": [
    # 1760 steps of 1024 tokens; each takes one shard, of which the first has 1800 tokens.
    ("", "training data", "yes", "2 files, 3,000 tokens; the run takes 1,802,240, with what is cut off long documents"
     f" about {1760 * 1800:,.0f}: 1056.00 passes;"
     " a second pass raises the validation loss: --train_tokens=1700 is about one"),
    ("", "validation data", "yes", "2 files, 65,537 tokens, 65,537 of them used"),
    ("--device=mps", "device", "no", "--device=mps needs a Mac whose GPU PyTorch can use, .*; try --device=cpu"),
    ("--device=mps", "device", "yes", "GPU of a Mac, ranks 1, .* fp8 no, tma no", MAC),
    ("--device=mps --minutes=1", "kernels", "yes", ".* attention:torch .* head:float32", MAC),
    ("", "device", "yes", r"CPU, cores \d+, ranks 1, hardware \w+, fp8 no, tma no"),
    ("", "kernels", "yes", ".* attention:torch .* head:float32"), ("", "caches", "yes", "nothing is compiled"),
    ("--train_files={d}/none_*.bin", "training data", "no", "no files match .*none_.*data/prepare.py.*"),
    ("--train_files={d}/[tl][ro]*.bin", "training data", "no", ".*longer.bin.*1801 tokens.*1800.*"),  # and good ones
    ("--train_files={d}/foreign.bin", "training data", "no", ".*foreign.bin.*257.*--vocab_size.*"),
    ("--train_files={d}/other.bin", "training data", "no", ".*other.bin.*no document separator.*256.*"),
    ("--train_files={d}/below_*.bin", "training data", "no", ".*below_.*.bin.* 1024 tokens.* 1025:.*--micro_batches"),
    ("--scheduled_steps=12000", "training data", "maybe", ".* passes; a second pass raises the validation loss: .*"),
    ("--minutes=1", "training data", "yes", "2 files, 3,000 tokens; --minutes will choose how many the run takes"),
    ("--minutes=1", "time", "yes", "1 min, as --minutes says"),
    ("--val_files={d}/val_short.bin", "validation data", "yes", "1 files, 65,536 tokens, 65,409 of them used"),
    ("--val_files={d}/val_tiny.bin", "validation data", "no", ".*16 tokens.*65537: lower --val_tokens.*"),
    ("--train_files={d}/[tx]*_[12].bin", "validation data", "maybe", "the run trains on val_2.bin, which is also a file"
     " of the validation; 2 files, 65,537 tokens, 65,537 of them used"),  # through a link
    ("--log_dir={d}/val_1.bin", "disk", "no",
     "cannot write a log in /.*/val_1.bin; choose another --log_dir .Not a directory."),
    ("--log_dir=/proc/x/logs", "disk", "no",
     "cannot write a log in /proc/x/logs; choose another --log_dir .No such file or directory."),
    ("--micro_batches=0 --stage1.batch_tokens=1000", "memory", "no",
     "--micro_batches=0: no number up to 128 divides .*"),
    ("--kernels=attention:flash", "kernels", "no", ".*attention:flash.*"),
    ("", "versions", "no", "PyTorch 2.9.0[+]cu128: 2.11 or newer is needed; install the packages that requirements.txt"
     " names, or use ./run.sh", {TORCH: "2.9.0+cu128"}),
    *(("", "versions", "yes", f"Python .*, PyTorch {re.escape(new)}, CUDA .*", {TORCH: new})
      for new in ("2.12.0a0+git123", "3.0")),
    # A test that ran before on a machine with a GPU may have initialised CUDA.
    ("--device=cuda --dtype=bfloat16", "device", "no", ".* no usable GPU .The NVIDIA driver on your system is old.*", {
        "torch.cuda.init": Mock(side_effect=RuntimeError("The NVIDIA driver on\nyour system is old")),
        "torch.cuda.device_count": lambda: 0, "torch.cuda.is_initialized": lambda: False})], "gpus": [
    ("", "device", "yes", "NVIDIA H200, ranks 2, hardware sm_90, fp8 yes, tma yes", TWO_RANKS),
    ("", "device", "no", "2 processes but 1 GPUs on this machine: start one process per GPU",
     TWO_RANKS | {"torch.cuda.device_count": lambda: 1}),
    ("", "kernels", "yes", ".* attention:triton .* head:fp8 mlp_training:fp8 qkv_training:fp8"),
    ("", "memory", "yes", r"140000 MiB of the GPU are free, about 8\d\d\d\d to 9\d\d\d\d needed \(estimate\) with"
     " --micro_batches=8 --ngram_rows=42400000.0,42400000.0", TWO_RANKS),
    ("", "caches", "yes", "{d}/new/caches", {CACHES: "{d}/new/caches"}),  # made when needed
    ("", "caches", "no", "{d}/val_1.bin/caches cannot be written: set TRITON_CACHE_DIR to a folder for compiled code",
     {CACHES: "{d}/val_1.bin/caches"}),
    ("", "device", "no", ".*AMD.*--preset=cpu", {"torch.version.hip": "6.4"}),
    ("", "kernels", "no", ".*bfloat16 needs an Ampere GPU .sm_80. or a newer one; float16 .*; try --preset=cpu",
     {"torch.cuda.get_device_capability": lambda device: (7, 5)}),
    ("", "kernels", "no", "a GPU needs Triton .No module named 'triton'.*",
     {"triton_kernels.NO_TRITON": "No module named 'triton'"}),
    ("", "tokenizer", "yes", "GPT-2's BPE"),  # the record takes a table from it
    ("", "tokenizer", "no", "no GPT-2 tokenizer .*", {"data.run.start.text_codec": OFFLINE}),
    # Rows of a table take 1.5 KB each, and there are 140000 MiB.
    ("--preset=single --ngram_rows=4e7", "memory", "yes", "140000 MiB of the GPU are free, .*"),
    ("--preset=single --ngram_rows=1e8", "memory", "no", "140000 MiB of the GPU are free, but weights, gradients and"
     r" optimizer state alone take 1(4[7-9]|5[0-4])\d\d\d: use fewer --ngram_rows .*")]}


@pytest.mark.parametrize("fixture, case", [(fixture, case) for fixture, cases in CASES.items() for case in cases])
def test_a_row_and_what_a_start_says(request, folder, monkeypatch, fixture, case):
    """One failure hides no other row; it stops a start with the line of the table. A doubt is a warning."""
    machine, (args, row, ok, pattern, *changes) = request.getfixturevalue(fixture), case
    for name, value in dict(*changes).items():
        if name.startswith("$"):
            monkeypatch.setenv(name[1:], value.format(d=folder))
        else:
            monkeypatch.setattr(name, value)
    args = args.format(d=folder).split()
    rows = machine.check(*args)[1]
    bad = {"device", "kernels", "caches", "memory", "time"} if row == "device" else {row}
    assert {name for name, (_, ok) in rows.items() if ok != "yes"} == (set() if ok == "yes" else bad)
    found, said = rows[row][0], machine.start(*args)[1].splitlines()
    if ok != "no":
        assert said.pop() == "error: all checks passed"
    if ok != "yes":
        kind, _, found = said.pop().partition(": ")
        assert kind == {"maybe": "warning", "no": "error"}[ok] and joined(found) == joined(rows[row][0])
    fewer = "the validation files have fewer tokens than --val_tokens=65536: 65408 are used"
    assert said == [fewer] * any("val_short" in arg for arg in args) and rows[row][1] == ok
    assert T.init_runtime.called == (ok != "no")
    assert re.fullmatch(pattern.format(d=folder), found), found


def test_the_gpu_of_a_mac(monkeypatch):
    """It works for one thread at a time, and the clock waits for it."""
    loader = SimpleNamespace(rt=machine.Runtime(0, 1, torch.device("mps")), builder=Mock(), batches=None)
    monkeypatch.setattr(torch.mps, "synchronize", Mock())
    L.Loader.build(loader)
    T.Trainer.synchronize(loader)
    assert loader.ready.exception.called and torch.mps.synchronize.called


@pytest.mark.parametrize("visible, local, sees", [("", 1, "1"), ("3,GPU-5", 0, "3"), ("3,GPU-5", 1, "GPU-5")])
def test_a_process_sees_its_own_gpu(gpus, monkeypatch, visible, local, sees):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    found = [machine.find_device(T.Config()) for _ in range(2)]
    assert found == [torch.device("cuda", 0)] * 2 and gpus.sees == [sees]


def test_expected_minutes(gpus):
    """In proportion to the tokens, and twice the time on a GPU of half the rates; record 74 has another step."""
    def minutes(slower, *args, ranks=1):
        config = T.parse_config(args, ranks)
        gpus.gpu = H200 / slower
        text, _ = C.expected_time(config, ranks)
        return float(re.match(r"about ([\d.]+) minutes|not known for this model", text)[1] or 0)
    assert (minutes(1, "--preset=single"), minutes(1, "--preset=single", ranks=2)) == (4.8, 2.6)
    assert (minutes(2, "--preset=single"), minutes(1, "--preset=record74")) == (9.5, 0)


@pytest.mark.parametrize("part, second, args, ok, pattern", [
    ("train", [], "", "maybe", "; .*/x_3.bin holds no tokens and is passed over"),
    ("train", [*DOCUMENT, 257], "", "no", "/x_3.bin: token 257 but a vocabulary of 257; .*"),
    # 65600 tokens: the run may or may not need more than the first shard
    ("train", [97] * 1800, STEPS_20, "maybe", "; .*/x_3.bin: no document .*; the run ends there if it needs the shard"),
    ("train", [97] * 1800, "--minutes=1", "maybe", "; .*/x_3.bin: no document .*; the run ends there if .*"),
    ("val", [97] * 1800, "", "maybe", "; .*/x_3.bin: no document .*; the run ends there if it needs the shard"),
    ("val", [97] * 1800, "--val_tokens=131072", "no", ".*/x_3.bin: no document separator .*")])
def test_check_reads_the_shards(check, folder, part, second, args, ok, pattern):
    write_shard(folder / "x_1.bin", DOCUMENT * 110)
    write_shard(folder / "x_3.bin", second)
    write_shard(folder / "x_4.bin", DOCUMENT * 110)
    name = {"train": "training data", "val": "validation data"}[part]
    rows = check(f"--{part}_files={folder}/x_*.bin", *args.split())[1]
    assert {key for key, (_, ok) in rows.items() if ok != "yes"} == {name} and rows[name][1] == ok
    assert re.fullmatch(f".*{pattern}.*", rows[name][0]), rows[name]


def test_check_reads_the_first_shards(check, folder):
    """As many as fit into a number of bytes; the last token counts."""
    write_shard(folder / "y_1.bin", DOCUMENT * 3)
    write_shard(folder / "y_2.bin", [*DOCUMENT * 3, 257])
    config = T.parse_config([*check.args, f"--train_files={folder}/y_*.bin"])
    assert start.read_shards(config, "train", 7201) == [
        "not read: 1 shards from y_2.bin on; a run reads each when it needs it"]
    with pytest.raises(UserError, match="y_2.bin: token 257"):
        start.read_shards(config, "train", 7202)
    assert L.Shard(folder / "train_1.bin", T.PRESETS["cpu"].config.model, 700).lengths.tolist() == [600, 100]


def test_without_triton(folder):
    """macOS and Windows: runs on the CPU; a GPU is refused in one line. Windows has no `resource`, too."""
    code = """import sys; sys.modules.update(triton=None, resource=None)
import torch, train_gpt as T, triton_kernels as tk
try: tk.choose_ops(torch.device('cuda'))
except ValueError as error: print(error)
sys.exit(T.main(sys.argv[1:]))"""
    args = ["--preset=cpu", f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_1.bin",
            f"--log_dir={folder}/logs", *(f"--stage{i}.batch_tokens=256" for i in (1, 2, 3, 4)), "--micro_batches=1",
            "--scheduled_steps=3", "--extension_steps=1", "--cooldown_frac=1", "--val_tokens=512",
            "--val_batch_tokens=512", "--sample_tokens=0"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code, *args], text=True, capture_output=True, cwd=folder, env=env)
    assert result.returncode == 0, result.stderr
    assert re.match(r"a GPU needs Triton \(.*\): install what requirements.txt names, .*\n", result.stdout)
    assert re.search(r"final_val_loss: \d\.\d+\n", result.stdout)


@pytest.mark.parametrize("extra, status", [([], 0), (["--val_files=none"], 1)])
def test_one_table_for_two_ranks(check, folder, extra, status):
    ranks = Forks("import sys, train_gpt as T; sys.exit(T.main(sys.argv[1:]))", ["--check", *check.args, *extra],
                  rank_variables(2))
    out, err = ranks.communicate(60)
    assert ranks.returncode == status and out.count("\nversions ") == 1 and ", ranks 2, " in out
    assert err == "" and not (folder / "new").exists()


def test_a_later_rank_tells_what_the_first_cannot_see(check, monkeypatch, capsys):
    """Its own GPU, for example: no table, one line, as in a start."""
    for key, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    args = ["--check", *check.args]
    assert T.main(args) == 0 and capsys.readouterr() == ("", "")
    monkeypatch.setattr(start, "check_memory", Mock(side_effect=UserError("too little")))
    assert T.main(args) == 1 and capsys.readouterr() == ("", "error: rank 1: too little\n")


def test_disk_space_for_log_and_checkpoint(monkeypatch):
    """What optimizer and model really have, and waiting gradients. Large checkpoints are announced."""
    config, cpu = T.parse_config(["--preset=cpu", "--ngram_rows=0"]), torch.device("cpu")
    model = T.GPT(config.model, None, torch.float32, cpu)
    optimizer = T.NorMuonAndAdam(model, config, machine.Runtime(0, 1, cpu), None)
    state = sum(part.nbytes for parts in optimizer.state.values() for part in parts.values())
    weights = sum(p.nbytes for p in model.parameters())
    assert sizes(config)[:2] == pytest.approx((weights, state), rel=0.01)  # without second moments of rows; 0.4 %
    each, room = weights + sum(sizes(config)[:2]), SimpleNamespace()
    monkeypatch.setattr("shutil.disk_usage", lambda path: room)
    for args, count in ([], 0), (["--save=true"], 1), (["--save_every=900"], 2), (["--save_every=400", "--keep=99"], 5):
        config, need = T.parse_config(["--preset=cpu", "--ngram_rows=0", *args]), MiB + count * each
        purpose = "the log" + f" and checkpoints of up to {each / 1e9:.1f} GB" * (count > 0)
        room.free, size = need, need // MiB
        assert start.check_disk(config, 1) == (f"logs: {size} MiB free, {size} needed for {purpose}", True)
        room.free -= 1
        with pytest.raises(UserError, match=f"^cannot write a log in logs: {room.free // MiB} MiB free, "):
            start.check_disk(config, 1)
    room.free = 2**45
    for ranks in 1, 8:  # rank 0 writes the parts of all
        for rows, size in ([], "14.7"), (["--ngram_rows=0,9e5"], "6.7"):
            config = T.parse_config(["--preset=record", "--save=true", *rows], ranks)
            text, fine = start.check_disk(config, 1)
            assert not fine and text.endswith(f"checkpoints of up to {size} GB; each checkpoint is larger than 4 GB:"
                                              " --ngram_rows, --keep and --save_every limit them")
    monkeypatch.setenv("RANK", "1")  # on another machine, which writes nothing
    assert start.check_disk(config, 1) == ("rank 0 writes", True)


# On H200s, all MiB at the peak: arguments, ranks, micro-batches -> allocated, reserved (records/2026-11-22_lengths,
# 2026-11-23_attention and 2026-11-23_optimizer).
NOW = "single --train_tokens=27e6 --ngram_rows=0 --val_batch_tokens=262144"
BEFORE = f"{NOW} --fp8_qkv=0 --lazy_tables=0 --slow_momentum=0"
ROWS_OF_49152 = " ".join(f"--stage{i}.batch_tokens=49152" for i in (1, 2, 3, 4))
PEAKS = {("record74", 1, 8): (22432, 38744), ("record74", 2, 8): (20434, 37004), ("record74", 4, 8): (19435, 35784),
         ("record74", 1, 16): (14860, 23524), (BEFORE, 1, 1): (18275, 28110),
         (f"{BEFORE} {ROWS_OF_49152}", 1, 1): (22924, 37486), (f"{NOW} {ROWS_OF_49152}", 1, 1): (21443, 35716)}
SINCE = {("record --ngram_rows=21.2e6,21.2e6", 1, 8): (82166, 94882),  # records/2026-11-29_record
         ("single --train_tokens=20e6 --model_dim=512 --depth=6 --ngram_rows=8e6,8e6", 1, 1): (22285, 27148),
         ("single --train_tokens=20e6 --model_dim=384 --depth=4 --ngram_rows=8e6,8e6", 1, 1): (16890, 20824)}


@pytest.mark.parametrize("arguments, ranks, micro_batches", PEAKS | SINCE)
def test_memory_estimate(arguments, ranks, micro_batches):
    """Within 2 %: seen 1.1 % and 1.9 %. When the runs of PEAKS were measured, the tables had averages."""
    config = T.parse_config([*f"--preset={arguments}".split(), f"--micro_batches={micro_batches}"], ranks)
    estimates = estimate_memory(config, sizes(config), ranks)
    tables = [param for param in T.param_table(config.model) if param.label in ("value_embeds", "bigram_embed")]
    had = config.optim.average_blend and (arguments, ranks, micro_batches) in PEAKS
    averages = 4 * sum(math.prod(param.shape) for param in tables) / MiB if had else 0
    for estimate, measured in zip(estimates, (PEAKS | SINCE)[arguments, ranks, micro_batches]):
        assert abs((estimate + averages) / measured - 1) < 0.02


class LiveBytes(TorchDispatchMode):
    """.peak: the most bytes that live at once, without those of `known` tensors."""

    def __init__(self, known):
        super().__init__()
        self.now, self.peak, self.sizes = 0, 0, {x.untyped_storage()._cdata: 0 for x in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if torch.is_tensor(x)):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage._cdata)
        return result

    def free(self, storage):
        self.now -= self.sizes.pop(storage)


@pytest.mark.parametrize("arguments, streams", [
    ("record74", 17.3), ("record", 15.6), ("single --micro_batches=4", 17.3),
    ("single --micro_batches=4 --model_dim=384 --depth=4", 14.7)])
def test_streams_of_a_validation(monkeypatch, arguments, streams):
    """Counted without data or kernels: each name in `layers` that outlives its use adds a stream."""
    monkeypatch.setattr(kernels, "_takes_ref", lambda *tensors, any_dtype=False: False)
    monkeypatch.setattr(type(kernels._mlp_kernel), "run", lambda *args, **options: None)
    config, meta = T.parse_config(f"--preset={arguments}".split()), torch.device("meta")
    model, N = config.model, config.data.val_batch_tokens
    ops = SimpleNamespace(attention=kernels.attention_block, mlp=kernels.mlp, mix=kernels.mix, pointer_inputs=(
        kernels.pointer_inputs), signed_rows=(
            lambda table, ids, orders, *signs: table.new_empty(len(ids) // orders, table.size(1))))
    gpt = T.GPT(model, ops, torch.bfloat16, meta)
    ids, rows, *documents = (torch.zeros(shape, dtype=torch.int32, device=meta) for shape in (
        N, N * len(model.ngrams), (2, N), (2, 2 * N)))
    attn = T.attention_settings(config, meta, torch.bfloat16)[-1]
    with torch.no_grad(), LiveBytes([*gpt.parameters(), *gpt.buffers()]) as live:
        gpt(ids, documents, {model.ngram_table: rows, "signs": rows}, attn)
    counted = live.peak / (2 * N * model.model_dim)
    assert counted == pytest.approx(streams, abs=0.1) and counted < VALIDATION_STREAMS + 0.1


@pytest.mark.parametrize("free, micro_batches, times", [
    (140000, 4, 16), (48000, 4, 8), (32000, 4, 2), (27500, 8, 4), (26000, 8, 4), (18200, 16, 2), (12287, 32, 1),
    (11100, 32, 1), (10200, 64, 1), (9700, 128, 1), (8000, 128, 1)])
def test_single_takes_what_fits(gpus, free, micro_batches, times):
    """As few micro-batches as fit nine tenths of the memory, then more rows, up to 16 million."""
    gpus.free, args = free, ["--preset=single", "--val_tokens=65536"]
    chosen = f"--micro_batches={micro_batches} --ngram_rows={times * 5e5},{times * 5e5}"
    status, rows = gpus.check(*args)
    found, ok = rows["memory"]
    needed = re.match(rf"{free} MiB .* free, about \d+ to (\d+) needed \(estimate\) with {chosen}", found)[1]
    assert status == 0 and (int(needed) <= free, ok) == ((True, "yes") if free > 8000 else (False, "maybe"))
    assert rows["time"][0].startswith("about ") and gpus.check(*args, *chosen.split())[1]["memory"] == (found, ok)
    gpus.start(*args)
    started = T.init_runtime.call_args.args[0]
    assert (started.system.micro_batches, started.model.ngram_rows) == (micro_batches, (times * 5e5, times * 5e5))


@pytest.mark.parametrize("whole, ranks, steps, rows", [
    (140000, 1, 1270, 42.4e6), (140000, 2, 1270, 84.8e6), (80000, 1, 1270, 21.2e6), (80000, 8, 1270, 84.8e6),
    (40000, 4, 1270, 5.3e6), (140000, 2, 200, 42.4e6), (140000, 1, 20, 10.6e6), (24000, 1, 1270, 5.3e6)])
def test_rows_of_record(gpus, whole, ranks, steps, rows):
    """They follow the memory of all GPUs, whatever is free of it, and the tokens of the run, not micro-batches by hand,
    nor batches that only these divide."""
    for gpus.whole, gpus.free, *more in (whole, whole - 1000), (whole, 9000), (whole, 9000, "--micro_batches=16"), (
            whole, 9000, "--micro_batches=8", "--stage1.batch_tokens=131200"):
        config = fit_memory(T.parse_config([f"--scheduled_steps={steps}", *more], ranks), GPU, ranks, 85e6)
        assert config.model.ngram_rows == (rows / 2, rows / 2)
        assert config.system.micro_batches == 8 * (1 + ("--micro_batches=16" in more))


def test_what_keeps_the_rows_of_n_grams(gpus):
    """A number by hand, a preset without n-grams, a CPU, a resumed run; too little free memory is one line."""
    for args, end in ((["--preset=single", "--ngram_rows=5e5,5e5"], " --ngram_rows=500000.0,500000.0"),
                      (["--preset=record74"], " --micro_batches=8"), ([], " --ngram_rows=21200000.0,21200000.0")):
        rows = gpus.check(*args)[1]
        assert rows["memory"][0].endswith(end) and ("tokenizer" in rows) == ("--preset=record74" not in args)
    gpus.whole, gpus.free = 140000, 60000
    status, rows = gpus.check()
    assert status == 1 and re.match("60000 MiB .* free, but weights.* alone take 68.*: use fewer", rows["memory"][0])
    config = T.parse_config(["--preset=single"])
    assert fit_memory(config, torch.device("cpu"), 1, 16e6).model == config.model
    for args, most in (["--resume=x.pt"], 0), (["--ngram_rows=0"], 0), ([], 16e6):
        assert left_open(read_values(["--preset=single", *args], T.PRESETS), T.PRESETS)[1] == most


@pytest.mark.parametrize("free, micro_batches", [(40000, 2), (16000, 4), (5000, 128)])
def test_second_start_takes_what_fits_now(gpus, monkeypatch, free, micro_batches):
    """Twice as many micro-batches or more, no more rows; what this process holds will be free."""
    commands, gpus.free, gpus.own = [], free, free - 600
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command[-2:]))
    config = T.parse_config(["--preset=single", "--train_tokens=27e6", "--micro_batches=1"])
    restart_with_more_micro_batches([], config, GPU)
    assert commands == [[f"--micro_batches={micro_batches}", "--ngram_rows=500000.0,500000.0"]]


def test_micro_batches_that_divide():
    """Rows of up to 49152 tokens, in multiples of 16, for every stage."""
    def possible(*batches, world=1):
        stages = (f"--stage{i}.batch_tokens={tokens}" for i, tokens in enumerate(batches, 1))
        return possible_micro_batches(T.parse_config(["--preset=single", "--train_tokens=27e6", *stages], world), world)
    assert possible(*[131072] * 4) == [4, 8, 16, 32, 64, 128]
    assert possible(*[98304] * 4) == [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert possible(32, 64, 96, 96) == [1, 2] and possible(32, 64, 96, 96, world=2) == [2]
    assert possible(*[131072] * 4, world=16) == [16, 32, 64, 128]
    assert fit_memory(T.parse_config(["--preset=single"], 4), GPU, 4, 0).system.micro_batches == 4
    with pytest.raises(UserError, match="^--micro_batches=0: no number up to 128 .*393216,393224 "):
        possible(131072, 262144, 393216, 393224)


def test_too_little_memory(gpus, monkeypatch):
    """A warning, once per machine, since it is an estimate. What the advice names, helps. A start measures nothing."""
    config = T.PRESETS["record"].config
    allocated, reserved = estimate_memory(config, sizes(config), 1)
    reserved += 850  # outside PyTorch
    gpus.free = int(reserved + 2)
    assert gpus.check()[1]["memory"][1] == "yes"
    gpus.free = int(reserved - 2)
    status, rows = gpus.check()
    found, ok = rows["memory"]
    assert (status, ok) == (0, "maybe")
    assert f"about {allocated:.0f} to {reserved:.0f} needed" in found and "raise --micro_batches (16, 32" in found
    for advice in "--micro_batches=16", "--cuda_graphs=false":
        assert gpus.check(advice)[1]["memory"][1] == "yes"
    monkeypatch.setattr(C, "measure_gpu", Mock(side_effect=AssertionError("measured")))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for rank, warning in ("0", f"warning: {found}\n"), ("1", ""):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert gpus.start() == (1, f"{warning}error: all checks passed\n")


def test_a_model_larger_than_the_memory_of_the_machine():
    """A CPU hands out memory that it does not have, and the kernel would end the run later without a word."""
    config = T.parse_config(["--preset=cpu", "--model_dim=9600", "--layers=1000"])
    with pytest.raises(UserError, match=r"^this machine has \d+ MiB, but weights, .* take \d+: .* a smaller --m"):
        require_state(config, torch.device("cpu"), 1)
    require_state(T.parse_config(["--preset=cpu"]), torch.device("cpu"), 1)
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory")
    assert error_message(error).startswith("out of memory: end other programs, lower")


def test_memory_of_the_ranks_for_few_rows():
    """Against FewRows: each rank has gradients for as many rows as all micro-batches of two steps may bring it."""
    for ranks, rows in (1, 9e6), (2, 9e6), (8, 9e6), (8, 9e5):
        config = T.parse_config([f"--ngram_rows=0,{rows}"], ranks)
        table = torch.empty(math.ceil(rows / ranks), 768, dtype=torch.bfloat16, device="meta")
        gradients = kernels.FewRows(table, min(2 * 393216, len(table))).grad.nbytes
        own = state_bytes(config, T.param_table(config.model), ranks)
        none = state_bytes(config, [p for p in T.param_table(config.model) if p.optim != "rows"], ranks)
        assert own[3] - none[3] == gradients > 0 == none[3]
        free = estimate_memory(config, (*own[:3], 0), ranks)
        assert estimate_memory(config, own, ranks) == pytest.approx([x + gradients / MiB for x in free])
        # Ranks also hold rows of two micro-batches and gradients of one. Copies that travel count beside the graphs.
        bare = dataclasses.replace(config, model=dataclasses.replace(config.model, ngram_rows=(0.0,)))
        micro_batch = config.data.val_batch_tokens * 768 * 2 / MiB  # longer than one of training
        shared = [a - b for a, b in zip(free, estimate_memory(bare, (*own[:3], 0), ranks))]
        assert shared == pytest.approx([0, 0] if ranks == 1 else [3 * micro_batch, 7 * micro_batch])
