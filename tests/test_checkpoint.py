"""Checkpoints: a resumed run is the uninterrupted one, also after a kill in the middle of a save and on other numbers
of ranks; what is refused, and what a failed save leaves. Runs are those of test_run.py, in this process where one rank
is enough."""

import contextlib
import dataclasses
import io
import pickle
import re
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train_gpt as T
from data.run import config as settings
from data.run.machine import Runtime
from data.run.state import joined, load_checkpoint, write_checkpoint
from data.run.config import config_from_dict, flatten, render, with_knobs
from data.run.log import published
from data.run.program import UserError, atomic_write
from records import compare, evaluate
from oracles import write_shard
from test_run import (  # noqa: F401 (two are fixtures)
    PAIR, SHORT, STEPS, VAL_BATCH, corpus, fails, finish, ready, start)

LAST_ONLY = "--save_every=0", "--save=true"  # a resumed run saves as before unless it is told


def read_logs(logs):
    """The finished run whose log is there: its checkpoints by step, its validation losses, the text of its log."""
    (path,) = logs.glob("*.txt")
    text = path.read_text().split("=" * 100 + "\n")[-1]
    saved = {int(p.stem.removeprefix("state_step")): p for p in sorted(logs.glob("*/*.pt"))}
    return SimpleNamespace(saved=saved, text=text, path=path,
                           val=dict(re.findall(r"^step:(\d+)/\d+ val_loss:(\S+)", text, re.M)))


def train(corpus, logs, *args):
    """A run in this process."""
    assert T.main([*corpus.args, f"--log_dir={logs}", *args]) == 0
    return read_logs(logs)


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    """A run that was not interrupted, with a checkpoint before every step but the first, and after the last."""
    torch.manual_seed(7)  # not that of the other tests: a resumed run takes over the state of the generator
    with contextlib.redirect_stdout(io.StringIO()):
        return train(corpus, tmp_path_factory.mktemp("base"), "--save_every=1", "--keep=99")


def differing(path, other):
    """Names of what differs in two checkpoints, but for the seconds and the config."""
    flat = []
    for state in (torch.load(p, weights_only=True) for p in (path, other)):
        tensors = {f"{key} {label}": x for label, part in state["optimizer"].items() for key, x in part.items()}
        flat.append({key: state[key] for key in ("step", "loader", "sources", "rng")} | tensors
                    | {f"p {label}": x for label, x in state["model"].items()})
    def equal(x, y):
        return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
    return [name for name in flat[0] | flat[1] if not equal(*(part.get(name) for part in flat))]


def test_a_plot_at_the_end(corpus, tmp_path, monkeypatch):
    """A picture with a point for each validation, and with training losses. If it cannot be drawn, the results are
    there, and one line says so."""
    def plot(path, groups, target):
        ((run,),) = groups.values()
        assert run.finished and run.losses and target is None  # the tokens are bytes
        draw(path, groups, target)
    draw = compare.plot
    monkeypatch.setattr(compare, "plot", plot)
    args = "--plot=true", "--val_every=4", "--layers=2", "--backout_layer=none"
    run = train(corpus, tmp_path / "a", *args)
    picture = run.path.with_suffix(".svg").read_text()
    lines = [points.split() for points in re.findall('points="(.*?)"', picture)]  # of losses and axes
    assert picture.startswith("<svg ") and 1 + len(run.val) == 5 in map(len, lines) and "stroke-opacity" in picture
    assert f"\nplot: {published(str(run.path.with_suffix('.svg')))}\n" in run.text
    monkeypatch.setattr(compare, "plot", Mock(side_effect=compare.UserError("no room")))
    run = train(corpus, tmp_path / "b", *args)
    assert "\nwarning: no plot: no room\n" in run.text and "\nfinal_val_loss: " in run.text


def test_saving_on_the_way_leaves_no_trace(corpus, base, tmp_path):
    """Rotation, too: of the checkpoints before steps 2, 4, ..., 10 and after the last, the two newest stay."""
    torch.manual_seed(7)
    run = train(corpus, tmp_path, "--save_every=2")
    assert list(base.saved) == list(range(1, STEPS + 1)) and list(run.saved) == [10, 11]
    assert differing(run.saved[STEPS], base.saved[STEPS]) == [] and run.val == base.val


@pytest.mark.parametrize("step", [5, 8, STEPS - 1])
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(corpus, base, tmp_path, monkeypatch, step):
    """Before odd steps gradients of Adam parameters wait, before step 5 those of a sampled softmax; from step 8 on
    embedding and head are apart. A warm-up, which a GPU would have, visits what is left and leaves no trace."""
    assert T.make_plan(T.parse_config(corpus.args), 5).candidates == 256
    load = T.load
    monkeypatch.setattr(T, "load", lambda trainer, state: T.warm_up(trainer) or load(trainer, state))
    run = train(corpus, tmp_path, f"--resume={base.saved[step]}", *LAST_ONLY)
    assert list(run.saved) == [STEPS] and differing(run.saved[STEPS], base.saved[STEPS]) == []
    assert run.val == {at: loss for at, loss in base.val.items() if int(at) >= step} and str(STEPS) in run.val
    steps = [int(at) for at in re.findall(r"^step:(\d+)/\d+ train_loss", run.text, re.M)]
    assert steps == list(range(step + 1, STEPS + 1))
    # The clock goes on, and the log says where.
    seconds = torch.load(base.saved[step], weights_only=True)["seconds"]
    path = published(str(base.saved[step]))
    assert f"\nresumed: step {step}, {seconds:.3f} s inside the clock, from {path}\n" in run.text
    assert 0 < seconds and float(re.search(r"^train_seconds: (.*)$", run.text, re.M)[1]) >= round(seconds, 3)
    assert compare.read_run(run.path).finished


def exchange(path):
    content = path.read_bytes()
    path.write_bytes(content[:1030] + bytes([content[1030] ^ 1]) + content[1031:])  # the fourth token


EXCHANGES = {  # what happens in the folder of the shards -> what the line says
    "train_1": (exchange, ""), "train_2": (exchange, ""), "val_2": (exchange, ""),
    "val_2 gone": (Path.unlink, "nothing is in the place of val_2.bin of 2452 bytes"),
    "train_1 gone": (Path.unlink, "train_2.bin of 5624 bytes is in the place of train_1.bin of 5624 bytes"),
    "train_2 more": (lambda path: shutil.copy(path, path.with_name("train_3.bin")),
                     "train_3.bin of 5624 bytes is in the place of nothing"),
    "train_2 renamed": (lambda path: path.rename(path.with_name("train_9.bin")),
                        "train_9.bin of 5624 bytes is in the place of train_2.bin of 5624 bytes"),
    "train_2 grown": (lambda path: write_shard(path, [256, *[97] * 29] * 100),
                      "train_2.bin of 7024 bytes is in the place of train_2.bin of 5624 bytes")}


@pytest.fixture
def moved(corpus, tmp_path):
    """The arguments for a copy of the data, and its folder."""
    folder = shutil.copytree(corpus.folder, tmp_path / "copy")
    return SimpleNamespace(folder=folder, args=[word.replace(str(corpus.folder), str(folder)) for word in corpus.args])


@pytest.mark.parametrize("case", EXCHANGES)
def test_a_run_resumes_on_its_own_shards(base, moved, tmp_path, fails, capsys, case):
    """Refused where it reads another shard, or before it has a log; also by --check. The knob goes on, and says so."""
    change, difference = EXCHANGES[case]
    name = f"{case.split()[0]}.bin"
    message = f"the shards are not those of the checkpoint: {difference}" if difference else (
        f"{name} has other tokens than the shard of the checkpoint")
    change(moved.folder / name)
    resume = f"--resume={base.saved[9]}", *LAST_ONLY
    fits = ["--val_tokens=768"] * (case == "val_2 gone")
    fails([*moved.args, f"--log_dir={tmp_path / 'a'}", *resume, *fits], f"{message}.*--other_data=true")
    logs = [path.read_text() for path in (tmp_path / "a").glob("*.txt")]
    assert len(logs) == (change is exchange) and ("\nstep:10/" in "".join(logs)) == (case == "train_2")  # read later
    assert T.main(["--check", *moved.args, *resume, *fits]) == 1
    row = "".join(part.split(" |")[1].strip() for part in capsys.readouterr().out.splitlines())
    assert message.replace(" ", "") in row.replace(" ", "")
    run = train(moved, tmp_path / "b", *resume, *fits, "--other_data=true")
    warnings = re.findall("^warning: the shards.*$", run.text, re.M)
    assert [line.split(";")[0] for line in warnings] == [f"warning: {message}"] * bool(difference)
    torch.save(torch.load(run.saved[STEPS], weights_only=True) | {"step": 9}, tmp_path / "c.pt")
    assert not T.parse_config([f"--resume={tmp_path / 'c.pt'}"]).system.other_data  # only for the run that asks


@pytest.mark.parametrize("is_old", [False, True])
def test_a_run_resumes_on_a_copy_of_its_shards(base, moved, tmp_path, is_old):
    """An older checkpoint does not know its shards, which the log says."""
    state = torch.load(base.saved[9], weights_only=True)
    if is_old:
        del state["shards"]
    torch.save(state, tmp_path / "saved.pt")
    run = train(moved, tmp_path / "a", f"--resume={tmp_path / 'saved.pt'}", *LAST_ONLY)
    warning = "^warning: the checkpoint is an older one that does not say which"
    assert len(re.findall(warning, run.text, re.M)) == run.text.count("warning: the checkpoint") == is_old
    assert {*differing(run.saved[STEPS], base.saved[STEPS])} <= {"sources"} and "warning: the shards" not in run.text


def test_a_checkpoint_knows_the_checksums_of_what_was_read(corpus, moved, tmp_path):
    shutil.copy(moved.folder / "train_2.bin", moved.folder / "train_3.bin")
    early = train(moved, tmp_path / "a", *SHORT, "--save_every=1", "--keep=99")
    first, last = (load_checkpoint(early.saved[step])["shards"] for step in (1, 4))
    assert [sha for *_, sha in last["train"] + last["val"]].count(None) == 0 and first["val"] == last["val"]
    assert first["train"][0] == last["train"][0] and first["train"][2] == (*last["train"][2][:2], None)


def test_a_new_run_begins_with_the_weights_of_a_checkpoint(base, tmp_path, monkeypatch):
    """Its first validation sees them, also after a warm-up; its first step moves them with a fresh optimizer, on a new
    schedule without ties. Such a run resumes like any other, without the first checkpoint."""
    first, bare = tmp_path / "first.pt", SimpleNamespace(args=[])  # the checkpoint has all settings
    first.write_bytes(base.saved[STEPS].read_bytes())
    begun = f"--init_from={first}", "--seed=5", "--scheduled_steps=6", "--extension_steps=2"
    load, seen = T.load_weights, []

    def warm(trainer, state):
        T.warm_up(trainer)
        load(trainer, state)
        seen.extend((label, torch.equal(x.cpu(), state["model"][label])) for label, x in
                    trainer.model.state_dict().items())
        states = [x for part in trainer.optimizer.state.values() for key, x in part.items() if key != "average"]
        assert states and not any(x.any() for x in states)
    monkeypatch.setattr(T, "load_weights", warm)
    run = train(bare, tmp_path / "new", *begun, "--save_every=4", "--keep=99")
    assert seen and all(same for _, same in seen)
    config = T.parse_config(begun)
    assert config.schedule.scheduled_steps == 6 and config.system.seed == 5 and config.model.model_dim == 48
    assert config.system.micro_batches == 0  # that of the checkpoint suited its batches and its GPU
    old = load_checkpoint(first)["config"]["system"]  # what a run is called and keeps is its own
    assert {key for key, value in vars(config.system).items() if value != old[key]} == {
        "seed", "micro_batches", "init_from", "log_dir", "save_every", "keep"}
    assert (config.system.log_dir, config.system.save_every, config.system.keep) == ("logs", 0, 2)
    plans = [T.make_plan(with_knobs(config, micro_batches=1), step) for step in range(9)]
    assert not any(plan.tied or plan.split or plan.candidates for plan in plans)
    first.unlink()
    monkeypatch.setattr(T, "load_weights", load)
    again = train(bare, tmp_path / "again", f"--resume={run.saved[4]}", *LAST_ONLY)
    assert differing(again.saved[8], run.saved[8]) == []


def test_the_example_in_python(base, monkeypatch, capsys):
    """The guide's three lines load a checkpoint and sample."""
    guide = (Path(T.__file__).parent / "records/guide.md").read_text()
    (example,) = (block for block in re.findall("```python\n(.*?)```", guide, re.S) if "state_step001760" in block)
    exec(example.replace("logs/run_1/state_step001760.pt", str(base.saved[STEPS])).replace('"100"', '"9"'), {})
    assert capsys.readouterr().out.startswith("def ")


@pytest.mark.parametrize("args, message", [
    (["--preset=cpu"], "the checkpoint brings its settings; leave out --preset=cpu"),
    (["--model_dim=96", "--seed=3"], "that model is another one; leave out --model_dim"),
    (["--layer3.xsa=true"], "that model is another one; leave out --layer3.xsa"),
    (["--layers=4"], "that model is another one; leave out --layers")])
def test_a_checkpoint_brings_the_model_of_a_new_run(base, args, message):
    with pytest.raises(UserError, match=f"^--init_from=.*state_step000011.pt: {message}$"):
        T.parse_config([f"--init_from={base.saved[STEPS]}", *args])


def test_the_length_of_a_run_from_a_checkpoint(base):
    """Steps follow the tokens; the batch grows with their root from that of the checkpoint."""
    saved = T.parse_config([f"--init_from={base.saved[STEPS]}"])
    tokens = 64 * sum(saved.schedule.stages[0].batch_tokens for _ in range(STEPS))
    args = [f"--init_from={base.saved[STEPS]}", f"--train_tokens={tokens}", "--muon_warmup=0.2"]
    longer, on_four = T.parse_config(args), T.parse_config(args, 4)
    ratio = longer.schedule.stages[0].batch_tokens / saved.schedule.stages[0].batch_tokens
    assert 5 < ratio < 11 and longer.schedule.scheduled_steps > 40 and longer.model == saved.model
    assert on_four.schedule == longer.schedule


def test_from_two_ranks_to_one_and_back(corpus, tmp_path):
    """In the middle of Adam's two steps. With Adam at rest weights and losses do not depend on the ranks at all
    (test_run.py); Adam's moments and its waiting gradients agree to a few bf16 roundings (2^-9 each)."""
    args = [*PAIR, "--ngram_rows=300,203", "--bigram_signs=true", "--save_every=5", "--keep=99"]
    two = start(corpus, *args, f"--log_dir={tmp_path / 'two'}", ranks=2)
    ready(two, "^checkpoint: .*5.pt\n")
    two.kill()
    finish(two)
    (saved,) = (tmp_path / "two").glob("*/*5.pt")
    one = train(corpus, tmp_path / "one", *args)
    out, err, status = finish(start(corpus, *args, f"--log_dir={tmp_path / 'one_two'}", f"--resume={one.saved[5]}",
                                    ranks=2))
    assert status == 0, out + err
    runs = train(corpus, tmp_path / "two_one", *args, f"--resume={saved}"), read_logs(tmp_path / "one_two")
    want, *states = (torch.load(run.saved[STEPS], weights_only=True) for run in (one, *runs))
    for run, got in zip(runs, states):
        assert run.val.items() <= one.val.items() and str(STEPS) in run.val and got["loader"] == want["loader"]
        assert "rows" in got["optimizer"]["ngram_embed"] and "m" in got["optimizer"]["embed"]
        for label, weights in want["model"].items():
            assert torch.equal(weights, got["model"][label]), label
            theirs, ours = want["optimizer"][label], got["optimizer"][label]
            assert theirs.keys() == ours.keys()
            for key in theirs.keys() - {"mantissa"}:
                x, y = theirs[key].double(), ours[key].double()
                assert (x - y).norm() <= 12 * 2**-9 * x.norm(), (key, label, (x - y).norm() / x.norm())


STALLS = """import torch
save = torch.save
class Slow:
    def __init__(self, file):
        self.file, self.count, self.flush = file, 0, file.flush
    def write(self, data):
        self.count += self.file.write(data)
        if self.count > 10**6:
            self.flush(), say("half of it")
            time.sleep(1000)
torch.save = lambda state, file: save(state, Slow(file) if state["step"] == 6 else file)"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16])
def test_parts_are_joined_some_rows_at_a_time(dtype):
    part = torch.arange(28).view(7, 4).to(dtype)
    for most in 1, 3, 7, 99:
        whole = joined(part, [7], Runtime(0, 1, torch.device("cpu")), most)
        assert whole.dtype == dtype and torch.equal(whole, part)


def test_killed_in_the_middle_of_a_save(corpus, base, tmp_path, fails):
    """What was saved before is still there, and what is half-written is no checkpoint."""
    process = start(corpus, f"--log_dir={tmp_path}", "--save_every=3", "--keep=1", hook=STALLS)
    ready(process, "^half of it\n")
    process.kill()
    assert finish(process)[2] == -signal.SIGKILL
    files = {path.name: path for path in tmp_path.glob("*/*")}
    assert sorted(files) == ["state_step000003.pt", "state_step000006.pt.tmp"]
    assert files["state_step000006.pt.tmp"].stat().st_size > 10**6
    assert {*differing(files["state_step000003.pt"], base.saved[3])} <= {"rng", "sources"}  # of another process
    fails([*corpus.args, f"--log_dir={tmp_path}", f"--resume={files['state_step000006.pt.tmp']}"],
          "000006.pt.tmp is no checkpoint")


@pytest.mark.parametrize("step, before", [(4, 2), (STEPS, 10)])
def test_a_full_disk_ends_the_run_with_one_line(corpus, tmp_path, fails, monkeypatch, step, before):
    """From this step on no file may grow as long as a checkpoint. The one before stays; at the end, results do, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    write = write_checkpoint

    def limited(state, path, keep):
        if state["step"] == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, hard))
        write(state, path, keep)
    monkeypatch.setattr("data.run.state.write_checkpoint", limited)
    try:
        fails([*corpus.args, f"--log_dir={tmp_path}", "--save_every=2", "--keep=1"],
              rf"cannot write .*{step}.pt: .*File too large.*make room, or choose another folder")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.glob("*/*")] == [f"state_step{before:06}.pt"]
    assert ("\nfinal_val_loss: " in next(tmp_path.glob("*.txt")).read_text()) == (step == STEPS)


def test_a_changed_byte_is_found(base, tmp_path):
    """Anywhere in the tensors, by each reading of a file that has changed."""
    path, whole = tmp_path / "state_step000005.pt", base.saved[5].read_bytes()
    path.write_bytes(whole)
    assert load_checkpoint(path)["step"] == 5
    for part in (0.2, 0.5, 0.9):
        place = int(part * len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1:])
        with pytest.raises(UserError, match="state_step000005.pt is (damaged|no checkpoint of this trainer)"):
            load_checkpoint(path)
    path.write_bytes(whole)
    assert load_checkpoint(path)["step"] == 5


def test_nothing_half_written_stays(tmp_path):
    """Not when the folder is none, nor after Ctrl-C."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write .*/file/x.pt: .*; make room, or choose another folder"):
        atomic_write(tmp_path / "file" / "x.pt").__enter__()
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "x.pt") as file:
        # torch goes on, and fails in its own way
        writes = [*[len] * 9, Mock(side_effect=KeyboardInterrupt), *[len] * 99]
        torch.save(torch.zeros(10**5), SimpleNamespace(write=lambda data: writes.pop(0)(data), flush=file.flush))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- Refused ---------------------------------------------------------------------------------------------------------
def test_another_config_is_refused_with_all_differences(corpus, base, tmp_path, fails):
    """In one line; a knob that does not change what is learned may differ."""
    fails([*corpus.args, f"--log_dir={tmp_path}", f"--resume={base.saved[5]}", "--muon_lr=0.25", "--seed=3",
           "--stage2.mtp_end=1,0.5", "--val_every=5", f"--val_tokens={VAL_BATCH}"],
          r"--resume=\S+/state_step000005\.pt: that run has another config; stage2\.mtp_end is 1\.0,0\.5 here,"
          r" 1\.0,0\.0 there; muon_lr is 0\.25 here, 0\.008 there; seed is 3 here, 1337 there;"
          r" leave out --preset=record74, the checkpoint brings its settings$")


def replace_checkpoint(monkeypatch, config):
    """Whatever file is named, it is the checkpoint of such a run at step 3."""
    state = {"step": 3, "config": dataclasses.asdict(config)}
    monkeypatch.setattr("data.run.state.load_checkpoint", lambda path: state)


def test_every_knob_is_learned_or_free(monkeypatch):
    """A resumed run may change a free knob. It is told about a learned knob in the line that refuses it. It profiles
    later steps."""
    config, presets = T.PRESETS["cpu"].config, T.PRESETS
    assert settings.KEPT_KNOBS == {"seed", "micro_batches", "dtype", "init_from"}
    free = {*vars(config.data), *vars(config.system)} - settings.KEPT_KNOBS
    replace_checkpoint(monkeypatch, config)
    for key, value in flatten(config).items():
        other = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value + 0.5,
                 str: lambda: value + "x", tuple: lambda: (*value, 9.0),
                 T.Layer: lambda: dataclasses.replace(value, long=not value.long)}[type(value)]()
        values = {"resume": "x", key: other}
        if key in free - {"resume"}:
            changed, step = settings.resumed_config(values, None, 1, presets)
            assert flatten(changed)[key] == other and step == 3
        elif key != "resume":
            with pytest.raises(UserError) as refused:
                settings.resumed_config(values, None, 1, presets)
            assert f"; {key} is {render(other)} here, {render(value)} there" in str(refused.value)
    assert T.parse_config(["--resume=x", "--profile=3:2"]).system.profiled == range(3, 5)
    with pytest.raises(UserError, match="^--profile=2:2: the run has steps 3 to 1759$"):
        T.parse_config(["--resume=x", "--profile=2:2"])


@pytest.mark.parametrize("args", [["--preset=single"], ["--preset=single", "--train_tokens=5e7", "--muon_lr=0.02"]])
@pytest.mark.parametrize("world", [1, 2])
def test_the_command_of_a_fitted_run_resumes_it(monkeypatch, args, world):
    """Its preset alone has other batches and steps, which follow from its length. Another length is refused."""
    config = with_knobs(T.parse_config(args, world), micro_batches=32)  # as the script may choose
    replace_checkpoint(monkeypatch, config)
    assert T.parse_config([*args, "--resume=x"], world) == with_knobs(config, resume="x")
    with pytest.raises(UserError, match="has another config.* leave out .*--train_tokens, the checkpoint brings"):
        T.parse_config([*args, "--resume=x", "--train_tokens=6e7"], world)
    with pytest.raises(UserError, match="--minutes=-1"):  # checked before the length is fitted
        T.parse_config([*args, "--resume=x", "--minutes=-1"], world)


@pytest.mark.parametrize("saved, world", [(16, 16), (16, 8), (8, 8)])
def test_a_resumed_run_keeps_its_number_of_micro_batches(monkeypatch, saved, world):
    """16 ranks have raised the 8 of the preset. The preset is no reason to refuse; another number is one."""
    config = with_knobs(T.RECORD74, micro_batches=saved)
    replace_checkpoint(monkeypatch, config)
    for same in [], ["--micro_batches=0"], [f"--micro_batches={saved}"]:
        resumed = T.parse_config(["--preset=record74", "--resume=x", *same], world)
        assert resumed == with_knobs(config, resume="x")
    with pytest.raises(UserError, match=f"micro_batches is 32 here, {saved} there"):
        T.parse_config(["--preset=record74", "--resume=x", "--micro_batches=32"], world)


def test_a_resumed_run_has_the_settings_of_its_checkpoint(corpus, base, tmp_path, capsys):
    """Whatever the preset says; --check shows it. A finished run has nothing left to train."""
    state = torch.load(base.saved[5], weights_only=True)
    config = config_from_dict(T.Config(), state["config"])
    resumed = T.parse_config([f"--resume={base.saved[5]}", "--val_every=7"])
    assert resumed == with_knobs(config, resume=str(base.saved[5]), val_every=7) and resumed.model.model_dim == 48
    assert T.main(["--check", *corpus.args, f"--log_dir={tmp_path}", f"--resume={base.saved[5]}"]) == 0
    assert re.search(r"^checkpoint +\| .*\n(?:.*\n)*?.*step 5, ", capsys.readouterr().out, re.M)
    with pytest.raises(UserError, match=f"that run is finished, step {STEPS} of {STEPS}: .*earlier checkpoint"):
        T.parse_config([f"--resume={base.saved[STEPS]}"])


OTHER_WIRING = ["--stages=5", "--stage4.long_window=56", "--stage5.batch_tokens=768", "--stage5.max_doc_len=96",
                "--stage5.long_window=72", "--layer6=long", "--layer4.skip_from=1", "--layer9.value_embed=false",
                "--backout_layer=8", "--layer0.dynamic=1", "--layer3.xsa=1", "--layer9.input_from=6",
                "--layer10=two_lanes value_embed long xsa dynamic mix", "--ngram_rows=300,203", "--bigram_signs=1",
                "--head_pairs=1", "--lazy_tables=1", "--slow_momentum=0.5", "--pointer=1", "--average_blend=0.5"]


def test_any_stages_and_layers(corpus, tmp_path, capsys, monkeypatch):
    """Five stages, another layer table, all features: resumed bit for bit while gradients wait, with a warm-up on the
    way, evaluated, sampled; another layer table is refused."""
    run = train(corpus, tmp_path / "run", *OTHER_WIRING, "--save_every=9")
    saved, waiting = (torch.load(run.saved[step], weights_only=True) for step in (STEPS, 9))
    assert saved["model"]["vo_bank"].shape[0] == 11 and saved["model"]["ve_gate_bank"].shape[0] == 4
    for label in ("dynamic_in", "dynamic_out", "xsa_lambdas", "mix_lambdas", "ngram_embed", "pointer_weights",
                  "pointer_sink", "pointer_gain"):
        assert saved["model"][label].any() and saved["optimizer"][label]["v"].any(), label
    table = waiting["optimizer"]["ngram_embed"]
    assert table["grad"].shape == (len(table["rows"]), 48) and table["grad"].any() and len(table["last"]) == 503
    assert evaluate.main([str(run.saved[STEPS]), "--device=cpu"]) == 0
    assert f"\nval_loss: {run.val[str(STEPS)]}\n" in capsys.readouterr().out
    assert T.main([f"--sample={run.saved[STEPS]}", "--device=cpu", "--tokens=3", "--prompt=the "]) == 0
    with pytest.raises(UserError, match="layer3 is xsa here, long xsa there$"):
        T.parse_config([f"--resume={run.saved[9]}", "--layer3.long=false"])
    load = T.load
    monkeypatch.setattr(T, "load", lambda trainer, state: T.warm_up(trainer) or load(trainer, state))
    again = train(corpus, tmp_path / "again", *OTHER_WIRING, f"--resume={run.saved[9]}", *LAST_ONLY)
    assert differing(again.saved[STEPS], run.saved[STEPS]) == []


class Harmful:
    """What unpickling it would call."""

    def __reduce__(self):
        return open, (str(Path(__file__).parent / "was_here"), "w")


def test_files_that_are_no_checkpoints(corpus, base, tmp_path, fails):
    """One line each, and nothing in them is executed."""
    data = base.saved[5].read_bytes()
    state = torch.load(base.saved[5], weights_only=True)
    del state["model"]["sa_lambdas"]
    state["model"]["embed"] = state["model"]["embed"][1:]
    for name, content in {"weights": state, "foreign": {"model": {}}, "harmful": Harmful()}.items():
        torch.save(content, tmp_path / f"{name}.pt")
    for name, content in {"pickle": pickle.dumps(Harmful()), "half": data[:len(data) // 2], "empty": b""}.items():
        (tmp_path / f"{name}.pt").write_bytes(content)
    for name, message in {"none": "none.pt is no checkpoint of this trainer: No such file",
                          "weights": r"other parameters than this train_gpt\.py: embed, sa_lambdas$",
                          **dict.fromkeys(("foreign", "harmful", "pickle", "half", "empty"),
                                          "is no checkpoint of this trainer: .+")}.items():
        fails([*corpus.args, f"--log_dir={tmp_path}", f"--resume={tmp_path / name}.pt"], message)
    assert not (Path(__file__).parent / "was_here").exists() and not list(tmp_path.glob("*.txt"))
