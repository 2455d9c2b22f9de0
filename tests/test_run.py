"""The trainer from the command line: tiny runs on the CPU with 1, 2 and 4 ranks and on two nodes, through all four
stages, the sampled softmax, the split and the extension; their logs and checkpoints; and how a run ends that fails. The
corpus is made here.

Most processes are forks (forks.py). Interpreters of their own, which test_faults.py starts too: the two nodes, Ctrl-C,
the import."""

import hashlib
import os
import py_compile
import re
import runpy
import signal
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
import triton_kernels as kernels
from data.run.state import load_checkpoint
from data.run.config import flatten, render
from data.run.log import Stopwatch, published
from data.run.machine import PATHS, Runtime
from forks import Forks, free_port, rank_variables
from oracles import write_shard
from records import compare, rerun

ROOT, CPU = Path(T.__file__).parent, torch.device("cpu")
ENV = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
ENV |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
RULE = "=" * 100 + "\n"
STAGE_KEYS = "batch_tokens", "max_doc_len", "short_window", "long_window"
STAGES = ((512, 48, 8, 16), (768, 96, 16, 32), (1024, 96, 24, 48), (896, 128, 32, 64))
STEPS, VAL_STEPS, TRAIN_TOKENS = 11, [0, 3, 6, 9, 11], 3 * (512 + 768 + 1024) + 2 * 896
# three pieces: two ranks share them unevenly, the last of four has none
VAL_TOKENS, VAL_BATCH, FINAL_WINDOW = 2304, 768, 96
TINY = ["--preset=record74", "--device=cpu", "--dtype=float32", "--fp8=false", "--vocab_size=257",
        "--model_dim=48", "--muon_warmup=20", "--muon_cooldown=6", "--scheduled_steps=9", "--extension_steps=2",
        "--micro_batches=2",
        f"--final_window={FINAL_WINDOW}", f"--val_tokens={VAL_TOKENS}", f"--val_batch_tokens={VAL_BATCH}",
        "--val_every=3", "--val_share=0.1", "--sample_tokens=0",  # two pieces, before the last validation
        "--muon_lr=0.008", "--adam_lr=0.003", "--table_lr=0.003",  # low: rounding must not grow into another run
        "--sampled_frac=0.5", "--candidates=12",  # steps 0 to 5 take 256 of 384 classes
        *(f"--stage{i}.{key}={value}" for i, stage in enumerate(STAGES, 1) for key, value in zip(STAGE_KEYS, stage))]

# Runs the trainer after the code in its first argument (a hook), which may change or watch things in T.
HOOKED = """
import os, sys, time, train_gpt as T
say = lambda text: os.write(1, f"{text}\\n".encode()) and None  # one write: ranks share the pipe
exec(sys.argv.pop(1))
sys.exit(T.main(sys.argv[1:]))
"""
WARM_UP = "run = T.Trainer.run; T.Trainer.run = lambda self: T.warm_up(self) or run(self)"
SUM_FOR_AVERAGE = """scatter, reduce, wrong = T.reduce_scatter, T.dist.all_reduce, {"op": T.dist.ReduceOp.SUM}
T.reduce_scatter = lambda *args, **options: scatter(*args, **options | wrong)
T.dist.all_reduce = lambda *args, **options: reduce(*args, **options | wrong)"""
SAY_SCALES = """step, scales = T.Trainer.step, lambda self: self.model.codes['mlp_bank'].scales[:, 3::2, 0].tolist()
from data.run import machine
machine.capability = lambda device: dict(hardware="fake", hardware_fp8="yes", hardware_tma="no")
choose = T.kernels.choose_ops
T.kernels.choose_ops = lambda *args: (choose(*args)[0], choose(*args)[1] | {"mlp": "triton"})
T.Trainer.step = lambda self, *a, **k: (step(self, *a, **k), say(f"scales {scales(self)}"))[0]"""
FOUR = ["--micro_batches=4", "--pointer=true", "--average_blend=0.5"]
PAIR = ["--adam_lr=0", "--table_lr=0", "--muon_lr=0.023"]
RUNS = {  # name -> ranks, arguments, hook
    "one": (1, FOUR, ""), "two": (2, FOUR, WARM_UP), "four": (4, FOUR, ""),
    "sum": (2, FOUR, SUM_FOR_AVERAGE), "fp8": (2, [*FOUR, "--fp8_mlp=true", "--dtype=bfloat16"], SAY_SCALES),
    "pair1": (1, [*PAIR, "--sample_tokens=12", "--sample_prompt=the "], ""), "pair2": (2, PAIR, ""),
    "nodes": (2, [*PAIR, "--micro_batches=1"], "")}  # one rank on each of two nodes; two ranks take two micro-batches


def text(count, seed):
    """`count` tokens: documents of words from a short list, each after a separator."""
    letters, rng, tokens = np.random.default_rng(0), np.random.default_rng(seed), []
    words = ["".join(letters.choice(list("etaoinshrdlu"), letters.integers(2, 6))) for _ in range(30)]
    while len(tokens) < count:
        tokens += [256, *" ".join(rng.choice(words, rng.integers(3, 50))).encode()]
    return tokens[:count]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with data, the arguments that select the data, and the validation tokens."""
    folder, val = tmp_path_factory.mktemp("corpus"), text(VAL_TOKENS + 1, 3)
    for name, tokens in {"train_1": text(2300, 1), "train_2": text(2300, 2), "val_1": val[:1600],
                         "val_2": val[1600:] + [256] * 9, "foreign": [*text(2300, 5), 257]}.items():
        write_shard(folder / f"{name}.bin", tokens)
    return SimpleNamespace(folder=folder, val=np.array(val),
                           args=[*TINY, f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin"])


def start(corpus, *args, ranks=1, hook="", variables=None):
    """Forks that train, one for each rank; hook: code that runs first; variables: environments unlike torchrun's."""
    return Forks(HOOKED, [hook, *corpus.args, *args], variables or (rank_variables(ranks) if ranks > 1 else [{}]))


def start_interpreter(corpus, *args, torchrun=(), hook=None):
    """The command of a user, under torchrun if it has options. hook: code that runs first, in each rank."""
    script = [ROOT / "train_gpt.py"] if hook is None else [corpus.folder / "hooked.py", hook]
    if hook is not None:
        script[0].write_text(HOOKED)
    launcher = ["-m", "data.run.launch", *torchrun] if torchrun else []
    return subprocess.Popen([sys.executable, *launcher, *script, *corpus.args, *args], env=ENV, text=True,
                            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ready(process, *patterns, seen=""):
    """What the process has written when all patterns were in it."""
    while not all(re.search(pattern, seen, re.M) for pattern in patterns):
        seen += (line := process.stdout.readline())
        assert line, process.communicate()
    return seen


def finish(process, seconds=100, seen=""):
    """(stdout, stderr, status) when it has ended, and every process that gave its id; seen: stdout read before."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.terminate()  # torchrun ends its ranks; nothing when it is over
    end = time.monotonic() + 5
    while alive := [pid for pid in re.findall(r"^pid (\d+)$", seen + out, re.M) if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"processes {alive} are still there"
    return seen + out, err, process.returncode


def final_view():
    """The windows, rotary tables and scale of the final validation, for oracles.py."""
    freqs, scale = oracles.base_freqs(48 // 6 // 4), 0.1
    for old, new in zip(STAGES, STAGES[1:]):
        freqs, scale = oracles.yarn(freqs, scale, old[3], new[3])
    return dict(S=STAGES[-1][2], L=FINAL_WINDOW, H=6, freqs=freqs, attn_scale=scale, lambda_dtype=torch.bfloat16)


def oracle_losses(model, val):
    """Final losses of all pieces from the weights by the plain model of oracles.py: fp32, no ranks."""
    params = {name: tensor.float() for name, tensor in model.items()}
    losses, view = [], final_view() | ({"pointer": (257, VAL_BATCH)} if "pointer_sink" in params else {})
    for pos in range(0, VAL_TOKENS, VAL_BATCH):
        tok, targets, cu = oracles.validation_piece(val, pos, VAL_BATCH, 256)
        rows = torch.tensor(oracles.bigram_hash(tok, len(params["bigram_embed"])))
        loss, _ = oracles.model_loss(params, torch.tensor(tok), targets, cu.tolist(), rows, mtp_weights=[1.0],
                                     loss_scale=1 / VAL_BATCH, **view)
        losses.append(loss)
    return torch.stack(losses)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """name -> finished run; val: logged losses, tensors: "p label", "m label" ... of the checkpoint."""
    data = {str(path.relative_to(ROOT)) for path in ROOT.glob("data/**/*.py")}
    names = "train_gpt.py", *sorted(data - {"data/prepare.py"}), "triton_kernels.py"
    sources = {name: (ROOT / name).read_text() for name in names}

    def run(name):
        (ranks, args, hook), logs = RUNS[name], tmp_path_factory.mktemp(name)
        args = ["--save=true", f"--run_label={name}", f"--log_dir={logs}", *args]
        if name == "nodes":
            address = "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"
            processes = [start_interpreter(corpus, *args, torchrun=[*address, f"--node_rank={i}"]) for i in (0, 1)]
        else:
            processes = [start(corpus, *args, ranks=ranks, hook=hook)]
        parts = list(map(finish, processes))
        assert all(status == 0 for _, _, status in parts), f"run {name}: {parts}"
        out = "".join(out for out, _, _ in parts)
        (path,), (saved,) = logs.glob("*.txt"), logs.glob("*/*.pt")
        log, state = path.read_text(), torch.load(saved, weights_only=True)
        tensors = {f"{key} {label}": tensor for label, p in state["model"].items()
                   for key, tensor in {"p": p, **state["optimizer"][label]}.items()}
        # The last step is an even one.
        assert all(f"{key} {label}" in tensors for key in "pmv" for label in state["model"]) and "grad embed" in tensors
        val = {int(step): float(loss) for step, loss in re.findall(r"^step:(\d+)/\d+ val_loss:(\S+)", log, re.M)}
        return SimpleNamespace(out=out, path=path, log=log, body=log.split(RULE)[-1], state=state, tensors=tensors,
                               val=val, sources=sources, args=[*corpus.args, *args])
    return {name: run(name) for name in RUNS}


def differences(run, other, kinds):
    """name -> relative Euclidean distance of the tensors of these kinds."""
    pairs = {name: (x.double(), other.tensors[name].double()) for name, x in run.tensors.items()
             if name.split()[0] in kinds}
    return {name: ((x - y).norm() / max(x.norm(), 1e-30)).item() for name, (x, y) in pairs.items()}


def test_logged_loss_is_that_of_the_oracle(corpus, runs):
    """To the 4 digits of the log; fp32 sums have another order. Largest difference seen: 4.8e-5. Two ranks
    have taken one of the three pieces each before; four take all that there are."""
    for name in ("four", "pair2"):
        losses = oracle_losses(runs[name].state["model"], corpus.val)
        assert abs(runs[name].val[STEPS] - losses.mean()) < 0.5e-4 + 1e-5, name
    early = re.search(rf"^step:{STEPS}/{STEPS} val_tokens:{2 * VAL_BATCH} val_loss:(.*)$", runs["pair2"].body, re.M)
    assert abs(float(early[1]) - losses[:2].mean()) < 0.5e-4 + 1e-5


def test_training_loss_is_the_mean_of_the_micro_batches(corpus):
    """Of the next tokens alone, over the classes of the step, before the update: in fp64, from the final stream."""
    config = T.parse_config([*corpus.args, "--layers=2", "--backout_layer=none"])
    ops, _ = kernels.choose_ops(CPU, "auto")
    trainer = T.Trainer(config, Runtime(0, 1, CPU), SimpleNamespace(line=print), ops, Stopwatch(0.0))
    graphs, batches = trainer.graphs, []
    trainer.graphs = lambda batch, *rest: batches.append(batch) or graphs(batch, *rest)
    for plan in trainer.plans[:-1]:
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        batches.clear()
        loss, sums = trainer.step(trainer.loader, plan, 2), []
        changed = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            for batch in batches:
                h = trainer.model(batch.tokens, batch.documents, batch.row_ids, trainer.attn[plan.stage]).h
                W = trainer.model.lm_head.double()
                W = W if batch.candidates is None else W[:, batch.candidates]
                z = 23 * torch.sigmoid((h.double() @ W + 5) / 7.5)
                sums.append(torch.nn.functional.cross_entropy(z, batch.targets, reduction="sum"))
        trainer.model.load_state_dict(changed, strict=False)
        assert loss.item() == pytest.approx((sum(sums) / 2 / plan.micro_batch_tokens).item(), rel=1e-5), plan.step
        assert len(batches) == 2 and (batches[1].candidates is not None) == (plan.step < 6)


def test_ranks_quantise_with_the_same_scales(runs):
    """Each rank sees other maxima. Both write to one pipe, so a line of one may begin within a line of the other."""
    said = Counter(re.findall(r"scales (\[\[.*?\]\])", runs["fp8"].out))
    assert len(said) == STEPS and set(said.values()) == {2}


@pytest.mark.parametrize("name", ["two", "four"])
def test_ranks_agree(runs, name):
    """bf16 gradients are added in another order, and Muon blows the rounding up, the more the higher the rates."""
    loss_tolerance, state_tolerance = 5e-3, 0.5  # seen: 5.0e-4; relative 0.11 (attn_gate_bank), another seed gives 1
    one, other, wrong = runs["one"], runs[name], runs["sum"]
    assert one.state["loader"] == other.state["loader"] and list(one.val) == list(other.val) == VAL_STEPS
    assert one.val[STEPS] < one.val[0] - 0.6  # it learns; seen: 5.94 -> 5.10
    assert ("Resetting Model" in other.body) == (name == "two")
    found = differences(one, other, ["p", "m", "v", "average"])
    loss = max(abs(one.val[step] - other.val[step]) for step in VAL_STEPS)
    print(f"{name}: loss {loss:.1e}, state {max(found.values()):.3f} ({max(found, key=found.get)})")
    assert loss < loss_tolerance and max(found.values()) < state_tolerance, found
    # Muon and Adam do not feel the scale of a gradient: with a sum in place of the average the loss looks fine, momenta
    # do not.
    assert abs(one.val[STEPS] - wrong.val[STEPS]) < loss_tolerance
    assert min(differences(one, wrong, "m").values()) > state_tolerance


def test_two_micro_batches_on_one_and_two_ranks_are_exact(runs):
    """With Adam at rest: g0/2 + g1/2 and (g0 + g1)/2 round alike."""
    one, two = runs["pair1"], runs["pair2"]
    assert one.val == two.val and one.val[STEPS] < one.val[0] - 0.02
    exact = [name for name in one.tensors if name[0] == "p" or name.split()[1] in ("qk_bank", "vo_bank", "mlp_bank")]
    assert [name for name in exact if not torch.equal(one.tensors[name], two.tensors[name])] == []
    found = differences(one, two, "mv")
    # Adam sums two steps: one rank ((a0+a1)+b0)+b1, two ranks (a0+b0)+(a1+b1), rounded to bf16 (2^-9) after each. Its
    # moments may differ by a few roundings: seen 8.5e-3.
    assert max(found.values()) < 8 * 2**-9 and one.tensors["m embed"].any(), found
    assert one.tensors["m bigram_embed"].any(), found


def test_two_nodes_of_one_rank_are_one_node_of_two(runs):
    """Bit for bit, and two ranks take two micro-batches by themselves: they were told one."""
    one, two = runs["pair2"], runs["nodes"]
    assert one.val == two.val and one.state["loader"] == two.state["loader"]
    assert [name for name, tensor in one.tensors.items() if not torch.equal(tensor, two.tensors[name])] == []
    assert "\nmicro_batches: 2\n" in two.log
    assert "\ntokens per micro-batch: 256 384 512 448; micro-batches per rank: 1\n" in two.body


def test_logs_are_read_by_compare(runs, tmp_path):
    """Every line of them: the formats have one writer and one reader."""
    for name, run in runs.items():
        log, ranks = compare.read_run(run.path), RUNS[name][0]
        assert log.finished and log.losses == run.val and (log.few > 0) == (ranks < 4), name
        assert sorted(log.ms) == list(range(log.total + 1)), name
        assert run.state["sources"] == run.sources, name
        assert log.source.startswith(run.sources["train_gpt.py"]) and run.sources["data/loader.py"] in log.source
        config = flatten(T.parse_config(run.args, ranks))
        assert sorted(log.training) == list(range(1, log.total + 1)), name
        knobs = {key: rerun.value_of(log.facts[key]) for key in config}
        assert knobs == {key: published(text) if key in PATHS else text
                         for key, text in ((key, render(value)) for key, value in config.items())}
        assert log.facts["kernels.attention"] == "torch" and log.facts["ranks"] == str(ranks)
        assert f"train_seconds: {log.seconds[log.total]:.3f}" in run.log
    more = "compiled layers: loaded\nerror: out of GPU memory\n"  # of an older run on a GPU, and of one that fails
    (tmp_path / "log.txt").write_text(run.path.read_text() + more)
    assert compare.read_run(tmp_path / "log.txt").finished


def test_log_opens_with_sources_versions_and_config(runs, corpus):
    run = runs["one"]
    rule = "-" * 40
    (_, script), *others = run.sources.items()
    opening = script + "".join(f"\n\n{rule}\n# {name}\n{rule}\n\n{source}" for name, source in others)
    assert re.fullmatch(r"one_[0-9a-f]{8}-[0-9a-f-]{27}\.txt", run.path.name) and run.log[:len(opening)] == opening
    header = run.log[len(opening):-len(run.body)]
    assert header.lstrip("\n").startswith(RULE) and "attention:torch" in run.body.splitlines()[0]
    assert (f"Running Python {sys.version}\nRunning PyTorch {torch.__version__} compiled for CUDA"
            f" {torch.version.cuda}\nRunning Triton version {kernels.triton.__version__}\n") in header
    found = dict(re.findall(r"^([\w.]+): (.*)$", header, re.M))
    assert re.match("train_gpt.py --preset=record74 --device=cpu .*--run_label=one", found["command"])
    assert re.fullmatch(r"[0-9a-f]{40} (clean|with changes)|unknown", found["commit"])
    assert found["train_shards"] == "train_1.bin:5624 train_2.bin:5624"
    files = [corpus.folder / f"train_{i}.bin" for i in (1, 2)]
    found = compare.read_run(run.path).facts["train_sha256"]
    assert found.split(",") == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert "/tmp" not in header and str(ROOT) not in header


def test_log_lines_and_results(runs):
    """Each loss and each time has its line, so a diff of two runs shows no time; results agree."""
    run, last = runs["one"], 0
    order = sorted([*((step, "train") for step in range(1, STEPS + 1)), *((step, "val") for step in VAL_STEPS)])
    few = rf"^step:{STEPS}/{STEPS} val_tokens:{2 * VAL_BATCH} val_loss:.*\n"
    lines = re.findall("^step:.*$", re.sub(few, "", run.body, flags=re.M), re.M)
    assert re.search(few, run.body, re.M)
    assert f"\nval_loss: before the end over the first {2 * VAL_BATCH} tokens, then over all {VAL_TOKENS}\n" in run.body
    assert "\ntrain_loss: over sampled classes up to step 6, which makes it lower than a val_loss\n" in run.body
    assert set(lines) <= set(run.out.splitlines())
    for loss, times, (step, kind) in zip(lines[::2], lines[1::2], order, strict=True):
        assert re.fullmatch(rf"step:{step}/{STEPS} {kind}_loss:\d+\.\d{{4}}", loss), loss
        match = re.fullmatch(rf"step:{step}/{STEPS} train_time:(\d+)ms step_avg:(\d+\.\d\d)ms", times)
        ms, average, count = int(match[1]), float(match[2]), max(step, 1)
        assert abs(ms - average * count) <= 0.501 + 0.005 * count and ms >= last, times
        last = ms
    found = dict(re.findall(r"^(\w+): (.*)$", run.body[run.body.index("peak memory"):], re.M))
    assert list(found) == ["final_val_loss", "train_seconds", "setup_seconds", "warmup_seconds", "validation_seconds",
                           "total_seconds", "gpu_seconds", "steps", "tokens", "peak_memory_mib", "shards", "checkpoint"]
    assert found["final_val_loss"] == f"{run.val[STEPS]:.4f}"
    assert (found["steps"], found["tokens"]) == (str(STEPS), str(TRAIN_TOKENS))
    train, *others, total, gpu = (float(value) for key, value in found.items() if key.endswith("_seconds"))
    assert gpu == 0  # no GPU was held
    assert abs(1000 * train - last) <= 1.001 and min(others) >= 0 and train + sum(others) <= total + 0.01
    # the two shards run out twice, but the run says so once
    assert run.state["loader"]["shard"] >= 2 * 2 and run.out.count("warning: training data exhausted") == 1


SHORT = "--scheduled_steps=3", "--extension_steps=1", "--val_every=0"  # does not need a fourth shard


def shards_of(corpus, folder, *names):
    """The argument for training shards that are copies of files of the corpus, train_0.bin and so on."""
    for i, name in enumerate(names):
        shutil.copy(corpus.folder / f"{name}.bin", folder / f"train_{i}.bin")
    return f"--train_files={folder}/train_*.bin"


def test_shards_that_the_run_does_not_need(corpus, tmp_path, capsys):
    """Nobody reads them: one that is bad, and one without tokens."""
    train, empty = shards_of(corpus, tmp_path, "train_1", "train_2", "train_1", "foreign"), tmp_path / "train_0b.bin"
    write_shard(empty, [])
    assert T.main([*corpus.args, *SHORT, f"--log_dir={tmp_path}", train]) == 0
    out, text = capsys.readouterr().out, next(tmp_path.glob("*.txt")).read_text().split(RULE)[-1]
    assert re.findall("^step:(.*) val_loss", text, re.M) == ["4/4"]
    for seen, name in (out, empty), (text, empty.name):
        assert re.findall("^warning: .*$", seen, re.M) == [f"warning: {name} holds no tokens and is passed over"]
    assert "\nfinal_val_loss: " in out and ",unknown val_sha256=" in text


@pytest.fixture
def fails(capsys):
    """fails(argv, pattern): `main` returns 1 and says why in one line."""
    def check(argv, pattern):
        assert T.main(argv) == 1
        assert re.fullmatch(rf"error: .*{pattern}.*\n", err := capsys.readouterr().err), err
    return check


def test_a_loss_that_is_no_number_ends_the_run(corpus, tmp_path, fails, monkeypatch):
    """All steps before it are in the log, and then the error."""
    monkeypatch.setattr(kernels, "POLAR_SAFETY", float("nan"))
    fails([*corpus.args, f"--log_dir={tmp_path}"], "training loss of step 2 is nan.*--muon_lr")
    text = next(tmp_path.glob("*.txt")).read_text()
    assert re.search(rf"\nstep:2/{STEPS} train_loss:nan\n.*\nerror: the training loss of step 2 is nan.*\n$", text)


NO_MEMORY = """init = T.Trainer.__init__
def fails(self, config, *rest):
    if config.system.micro_batches < ENOUGH:
        raise MESSAGE
    init(self, config, *rest)
T.Trainer.__init__ = fails"""


@pytest.mark.parametrize("enough, status, error", [
    (2, 0, "T.torch.OutOfMemoryError('Tried 2 GiB')"),
    (3, 1, r"RuntimeError('Triton Error [CUDA]: out of memory\nTried 2 GiB')")])
def test_out_of_memory_starts_again_once(corpus, tmp_path, enough, status, error):
    """With --micro_batches=0, and with twice as many. The second process trains or says the remedy."""
    hook = NO_MEMORY.replace("ENOUGH", str(enough)).replace("MESSAGE", error)
    _, err, code = finish(start_interpreter(corpus, *SHORT, f"--log_dir={tmp_path}", "--micro_batches=0", hook=hook))
    again = "out of GPU memory with --micro_batches=1: starting again with --micro_batches=2\n"
    remedy = "error: out of GPU memory: .*--micro_batches.*2 GiB.*\n"
    assert code == status and re.fullmatch(again + status * remedy, err), err
    logs = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert len(logs) == 2 and sum("\nfinal_val_loss: " in log for log in logs) == 1 - status


def test_ctrl_c_ends_it_and_keeps_the_log(corpus, tmp_path):
    """The last line says how to go on; test_faults.py ends a run without a checkpoint."""
    process = start_interpreter(corpus, f"--log_dir={tmp_path}", "--scheduled_steps=9000", "--save_every=3")
    seen = ready(process, "^step:4/.*\n")
    process.send_signal(signal.SIGINT)
    out, err, status = finish(process, 30, seen)
    assert status == 130 and err == ""
    path = re.fullmatch(r"ended by Ctrl-C; go on with --resume=(\S+/state_step\d{6}\.pt)", out.splitlines()[-1])[1]
    assert load_checkpoint(ROOT / path)["step"] >= 3
    assert set(re.findall("^step:.*$", seen, re.M)) <= set(next(tmp_path.glob("*.txt")).read_text().splitlines())


@pytest.mark.parametrize("ranks", [1, 2])
def test_damage_in_a_later_shard_is_one_line(corpus, tmp_path, ranks):
    """The run ends where it would read the shard, on every rank, and saves what it has."""
    train = shards_of(corpus, tmp_path, "train_1", "train_2", "foreign")
    out, err, status = finish(start(corpus, train, f"--log_dir={tmp_path}", "--save=true", ranks=ranks))
    assert status == 1 and re.fullmatch(r"error: .*/train_2\.bin: token 257 but a vocabulary of 257.*\n", err), err
    last = max(map(int, re.findall(r"^step:(\d+)/11 train_time", next(tmp_path.glob("*.txt")).read_text(), re.M)))
    assert load_checkpoint(next(tmp_path.glob("run_*/state_step*.pt")))["step"] == last > 1


@pytest.mark.parametrize("change, status", [
    ("os.utime(path, ns=(1, 1))", 0), ("path.write_bytes(path.read_bytes()[:-2] + b'ab')", 1)])
def test_shards_that_change_during_a_run_on_two_ranks(corpus, tmp_path, change, status):
    """The same bytes may have another date where their SHA-256 is known. If the run ends, it saves what it has."""
    train = shards_of(corpus, tmp_path, "train_1", "train_2")
    hook = f"""step = T.Trainer.step
def then_change(self, loader, plan, *args, **options):
    if plan.step == 2:
        self.shards["train"].table(), T.dist.barrier()
        for path in self.shards["train"].files if os.environ["RANK"] == "0" else ():
            {change}
        T.dist.barrier()
    return step(self, loader, plan, *args, **options)
T.Trainer.step = then_change"""
    out, err, code = finish(start(corpus, train, f"--log_dir={tmp_path}", "--save=true", ranks=2, hook=hook))
    steps = max(map(int, re.findall(r"^step:(\d+)/11 train_time", out, re.M)))
    assert load_checkpoint(next(tmp_path.glob("run_*/state_step*.pt")))["step"] == steps
    assert code == status and re.fullmatch("error: .*/train_[01].bin: changed, exchanged or deleted .*\n" * status,
                                               err), err
    assert "\nstep:3/11" in out and ("\nfinal_val_loss" in out) == (not status)


@pytest.mark.parametrize("translated", [False, True])
def test_bytecode_is_kept_where_pytorch_has_none(tmp_path, translated):
    """The PyTorch of this test tells where Python keeps bytecode, and ends the script."""
    (tmp_path / "data/run").mkdir(parents=True)
    for name in "train_gpt.py", *(f"data/{name}.py" for name in (
            "__init__", "run/config", "run/launch", "run/length", "run/program")):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    fake = tmp_path / "torch.py"
    fake.write_text("import sys; sys.exit(f'{sys.pycache_prefix} {sys.dont_write_bytecode}')")
    if translated:
        py_compile.compile(fake)
    env = {key: value for key, value in ENV.items() if key not in ("PYTHONPATH", "PYTHONPYCACHEPREFIX")}
    ended = subprocess.run([sys.executable, "train_gpt.py"], cwd=tmp_path, env=env | {"PYTHONDONTWRITEBYTECODE": "1"},
                           capture_output=True, text=True)
    assert ended.stderr == ("None True\n" if translated else f"{tmp_path / '__pycache__'} False\n")


@pytest.mark.parametrize("script", ["train_gpt.py", "data/prepare.py", "tests/test_guard.py"])
def test_a_missing_package_is_one_line(script):
    """Without the packages of the environment, as with another Python than that of .venv."""
    ended = subprocess.run([sys.executable, "-S", ROOT / script], env=ENV, text=True, capture_output=True)
    packages = "numpy and no torch" + " and no pytest" * script.startswith("tests")
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr == (f"error: {sys.executable} has no {packages}: activate .venv (source .venv/bin/activate), or"
                            " start with ./run.sh\n")


def test_an_old_python_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    with pytest.raises(SystemExit, match=r"error: this is Python 3\.9, but 3\.10 or newer is needed: activate"):
        runpy.run_path(ROOT / "data/__init__.py")


def test_import_does_nothing():
    result = subprocess.run([sys.executable, "-c", """if True:
        import os, signal, sys
        sys.argv, before = ["x", "--nonsense"], (dict(os.environ), sys.pycache_prefix, sys.dont_write_bytecode)
        import train_gpt, triton_kernels, torch
        assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert (dict(os.environ), sys.pycache_prefix, sys.dont_write_bytecode) == before
    """], env=ENV, text=True, capture_output=True)
    assert result.returncode == 0 and result.stdout == "", result.stderr
