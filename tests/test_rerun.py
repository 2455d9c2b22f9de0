"""records/rerun.py and pack.py with FAKE, which writes a log in the format of the trainer. One run is real."""

import getpass
import gzip
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from data.run.program import UserError
from records import compare, pack, rerun
from test_run import ENV, ROOT, corpus, finish, ready, start  # noqa: F401 (corpus is a fixture)

UNRECORDED = {key: value for key, value in os.environ.items()
              if not key.startswith(("TORCH", "TRITON", "NCCL", "OMP", "DATA_PATH"))}

# Its losses follow from the sources (data/loader.py), from a knob (seed) and from an environment variable.
FAKE = '''import json, os, sys
from pathlib import Path
from data.loader import RATE

ROOT, RULE, LINE = Path(__file__).parent, "=" * 100 + "\\n", "-" * 40
NAMES = "train_gpt.py", "data/__init__.py", "data/loader.py", "notes.txt"
knobs = {"run_label": "base", "log_dir": "logs", "device": "cpu", "seed": "3", "prompt": "def ",
         "layer0": "paired, wide", "train_files": "data/*.py", "val_files": "data/*.py", "save": "True",
         "save_every": "2", "resume": "", "profile": "1:2", "sample_tokens": "9"}
knobs |= dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
if "stop" in knobs:
    print(f"error: no files match {knobs['train_files']}", file=sys.stderr)
    sys.exit(int(knobs["stop"]))
shards, sha256 = knobs.pop("shards", "a.bin:9"), knobs.pop("sha256", "0a")
recorded = "TORCH", "TRITON", "NCCL", "OMP"
env = {f"env.{key}": value for key, value in os.environ.items() if key.startswith(recorded)}
facts = {"hardware": "x86_64", "ranks": 1, "command": "train_gpt.py --seed=3", "commit": f"{os.getpid()} clean",
         "sources": " ".join(NAMES), "train_shards": shards, "val_shards": "b.bin:5", **env, **knobs}
titles = ["", *(f"\\n{LINE}\\n# {name}\\n{LINE}\\n\\n" for name in NAMES[1:])]
log = "".join(title + (ROOT / name).read_bytes().decode() + "\\n" for title, name in zip(titles, NAMES))
log += f"{RULE}Running Python 3.11\\nRunning PyTorch 2.13.0 compiled for CUDA 9\\n{RULE}"
log += "".join(f"{key}: {value}\\n" for key, value in facts.items())
log += f"{RULE}kernels: XXT:torch head:float32\\nshards: train_sha256={sha256}\\n"
for step in range(0, 7, 2):
    loss = 5 - RATE * step + int(knobs["seed"]) / 100 + int(os.environ.get("OMP_FAKE", 0)) / 1000
    log += f"step:{step}/6 val_loss:{loss:.4f}\\nstep:{step}/6 train_time:{step}ms step_avg:1.00ms\\n"
path = Path(knobs["log_dir"], f"{knobs['run_label']}_{os.getpid()}.txt")
path.parent.mkdir(exist_ok=True)
path.write_bytes(log.encode())
env |= {key: os.environ.get(key) for key in ("DATA_PATH", "PYTHONPATH")}
print("seen:", json.dumps([sys.argv[1:], env, str(ROOT), os.getcwd()]), flush=True)
'''
# An empty file, a file without a line end, characters of many kinds, rules and the title of a file that is not dumped.
FILES = {"train_gpt.py": FAKE, "data/__init__.py": "", "data/loader.py": "\n\nRATE = 0.25  # é ✓ \x0c tab\t\n\n\n",
         "notes.txt": f"\n{'-' * 40}\n# other.py\n{'-' * 40}\n\n{'=' * 100}\nno end \U0001f600"}
THEIRS = {"OMP_FAKE": "7", "TRITON_TRACE": "their/trace", "TORCHELASTIC_RUN_ID": "1", "NCCL_SOCKET_IFNAME": "eth9",
          "NCCL_ALGO": "Ring"}  # environment of the run in the log


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The log of a run of FILES."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    subprocess.run([sys.executable, "train_gpt.py"], cwd=folder, env=UNRECORDED | THEIRS, check=True)
    return next(folder.glob("logs/*.txt"))


@pytest.fixture
def log(made, tmp_path):
    """A copy of the log."""
    return Path(shutil.copy(made, tmp_path))


@pytest.fixture
def again(tmp_path, capfd, monkeypatch):
    """again(log, arguments) -> (status, stdout, stderr, new log or None, what FAKE saw or None). No temporary folder is
    left. tmp_path stands for the repository."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(rerun, "ROOT", tmp_path)
    for key in {*os.environ} - {*UNRECORDED}:
        monkeypatch.delenv(key)
    (tmp_path / "temporary").mkdir()

    def again(log, *arguments):
        old = {*tmp_path.glob("logs/*")}
        status = rerun.main([str(log), *arguments])
        out, err = capfd.readouterr()
        new = [*{*tmp_path.glob("logs/*")} - old]
        assert not [*(tmp_path / "temporary").iterdir()] and len(new) == (status == 0), out + err
        seen = re.findall("^seen: (.*)$", out, re.M)
        return status, out, err, *(new or [None]), *(map(json.loads, seen) if seen else [None])
    return again


def edit(log, old, new, count=1) -> Path:
    """Replaces text in the log."""
    text = log.read_bytes().decode()
    assert text.count(old) == count, old
    log.write_bytes(text.replace(old, new).encode())
    return log


def test_equal_runs(tmp_path, log, again, monkeypatch):
    """The log's sources, settings and environment. Folders and devices are those of this machine."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}/elsewhere")  # tmp_path stands for the repository
    for key, value in {"OMP_FAKE": "8", "TRITON_TRACE": "my/trace", "TORCH_MINE": "1"}.items():
        monkeypatch.setenv(key, value)
    # The order in which the log names its sources does not matter.
    edit(log, f"\nsources: {' '.join(FILES)}\n", f"\nsources: {' '.join(reversed(FILES))}\n")
    assert dict(rerun.unpack(compare.read_run(log))) == FILES
    status, out, err, new, (argv, env, folder, cwd) = again(log)
    assert (status, err) == (0, "") and out.splitlines()[0] == f"this executes the code in {log}, whoever wrote it"
    assert """
| step |    log |  rerun | difference |
| ---- | ------ | ------ | ---------- |
| 0    | 5.0370 | 5.0370 |    +0.0000 |
| 2    | 4.5370 | 4.5370 |    +0.0000 |
| 4    | 4.0370 | 4.0370 |    +0.0000 |
| 6    | 3.5370 | 3.5370 |    +0.0000 |

""" in out and out.endswith("\n\nequal in every digit\n")
    assert new.name.startswith("rerun_base_") and dict(rerun.unpack(compare.read_run(new))) == FILES
    assert argv == ["--run_label=rerun_base", f"--log_dir={tmp_path}/logs", "--device=cpu", "--seed=3", "--prompt=def ",
                    "--layer0=paired, wide", "--train_files=data/*.py", "--val_files=data/*.py", "--save=false",
                    "--save_every=0", "--sample_tokens=0"]
    assert env == {"env.OMP_FAKE": "7", "env.TRITON_TRACE": "my/trace", "env.NCCL_ALGO": "Ring", "env.TORCH_MINE": "1",
                   "DATA_PATH": str(tmp_path), "PYTHONPATH": "/elsewhere"}
    assert folder == cwd and Path(folder).parent == tmp_path / "temporary"
    # Arguments after the log replace its settings.
    _, out, _, _, (argv, *_) = again(log, "--seed=5", "--run_label", "mine", "--shards=a.bin:8")
    assert argv[-3:] == ["--seed=5", "--run_label=mine", "--shards=a.bin:8"] and "--seed=3" not in argv
    assert "\n\nother data: train_shards is 'a.bin:9' in the log, 'a.bin:8' in the rerun\n\n" in out
    assert out.endswith("\n\nthe largest difference is 0.0200 at step 0\n")
    _, out, *_ = again(log, "--sha256=0b")  # another text of the same size
    assert "\n\nother data: train_sha256 is '0a' in the log, '0b' in the rerun\n\n" in out
    edit(edit(log, "\nprompt: def \n", '\nprompt: "a\\nb "\n'), "\nenv.OMP_FAKE: 7\n", '\nenv.OMP_FAKE: "7 "\n')
    *_, (argv, env, *_) = again(log)  # a text that the log has in JSON
    assert "--prompt=a\nb " in argv and env["env.OMP_FAKE"] == "7 "
    # The folder of a checkpoint is not the one in which the code runs.
    *_, (argv, *_) = again(edit(log, "\nseed: 3\n", "\nseed: 3\ninit_from: logs/a.pt\nsave_every: 9\n"))
    assert f"--init_from={tmp_path}/logs/a.pt" in argv and "--save_every=0" in argv  # not that of the checkpoint


@pytest.mark.parametrize("old, new, verdict", [
    ("step:4/6 val_loss:4.0370", "step:4/6 val_loss:4.0371", "the largest difference is 0.0001 at step 4"),
    ("step:6/6 val_loss:3.5370", "step:6/6 val_loss:nan", "the largest difference is nan at step 6"),
    ("RATE = 0.25 ", "RATE = 0.24 ", "the largest difference is 0.0600 at step 6"),
    ("\nseed: 3\n", "\nseed: 4\n", "the largest difference is 0.0100 at step 0"),
    ("step:6/6 val_loss:3.5370\n", "", "equal in every digit (3 of 4 validations are in both logs)")])
def test_verdicts_on_a_changed_log(log, again, old, new, verdict):
    status, out, err, *_ = again(edit(log, old, new))
    assert (status, err) == (0, "") and out.endswith(f"\n\n{verdict}\n"), out
    unfinished = "\nthe run in the log did not finish; the losses are compared up to its step 4\n"
    assert (unfinished in out) == ("3 of 4" in verdict)


def test_a_failing_trainer(log, again):
    """Its status is passed on. Where this machine does not have the data, a line says what to do."""
    status, out, err, *_ = again(log, "--stop=3", "--train_files=/*", "--val_files=other/*.bin")
    advice = "other/*.bin is not on this machine: pass --train_files=... and --val_files=...\n"
    assert status == 3 and err == f"error: no files match /*\n{advice}" and "difference" not in out


@pytest.mark.parametrize("old, new, count, message", [
    ("\ncommand: train_gpt.py --seed=3\n", "\n", 1, "lacks `command`; "),
    ("\nsources: train_gpt.py data/__init__.py", "\nsources: train_gpt.py data/shards.py x.py", 1,
     "lacks the text of data/shards.py, the text of x.py; "),
    ("/6 val_loss:", "/6 train_loss:", 5, "lacks validation losses; "),
    ("\nno end ", "\n{0}\n# data/loader.py\n{0}\n\nx = 0\n".format("-" * 40), 1, "holds data/loader.py more than"),
    ("\nresume: \n", "\nresume: run_1/step_40.pt\n", 1, "went on from run_1/step_40.pt"),
    ("\ndevice: cpu\n", "\ndevice: cuda\n", 1, "this machine has none; add --device=cpu"),
    *(("notes.txt\n", f"{name}\n", 2, f"'{re.escape(name)}' among its sources may lead out")
      for name in ("/tmp/evil.py", "../evil.py", "data/../../evil.py", "..", "..\\evil.py", "C:evil.py", "~/evil.py"))])
def test_logs_that_cannot_be_trained_again(tmp_path, log, again, monkeypatch, capfd, old, new, count, message):
    """One line says why, and nothing runs."""
    monkeypatch.setattr(rerun, "gpu_count", lambda: 0)
    with pytest.raises(UserError, match=f"^.*{message}.*$"):
        again(edit(log, old, new, count))
    assert capfd.readouterr() == ("", "") and not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("arguments, message", [
    (["README.md"], "README.md: not the log of a run"), (["none.txt"], "cannot read none.txt"),
    ([], "expected a log"), (["LOG", "other.txt"], "write --key=value"), (["LOG", "--check"], "write --key=value"),
    (["LOG", "--preset=cpu"], "--preset: a rerun has the settings of the log"), (["LOG", "--resume=x"], "--resume: "),
    ([str(next((ROOT / "records").glob("*/seed1_*.txt")))], "lacks `command`, `sources`, `train_shards`, ")])
def test_errors_are_one_line(log, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    for program in [rerun] + [pack] * (len(arguments) < 2 and "lacks" not in message):
        with pytest.raises(UserError, match=f"^.*{message}.*$"):
            program.main([str(log) if argument == "LOG" else argument for argument in arguments])


@pytest.mark.parametrize("ranks, gpus, count", [(8, 9, 8), (8, 7, 4), (8, 1, 1), (6, 5, 3), (1, 1, 1)])
def test_as_many_processes_as_there_are_gpus(log, again, monkeypatch, ranks, gpus, count):
    """A divisor of the run's processes, under torchrun."""
    commands = []
    monkeypatch.setattr(rerun, "gpu_count", lambda: gpus)
    monkeypatch.setattr(rerun, "execute", lambda command, *_: commands.append(command) or 7)
    edit(edit(log, "\nranks: 1\n", f"\nranks: {ranks}\n"), "\ndevice: cpu\n", "\ndevice: cuda\n")
    status, out, *_ = again(log)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local_addr=localhost", f"--nproc_per_node={count}"]
    launcher *= count > 1
    assert status == 7 and commands[0][1:len(launcher) + 2] == [*launcher, "train_gpt.py"]
    assert (f"\n{count} of the {ranks} processes fit on the GPUs here" in out) == (count < ranks)


# It takes its time to end. Then it ends by the first signal that it got.
WAIT = """import os, signal, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(int(number)))
os.write(1, b"pid %d\\n" % os.getpid())  # in one piece: two processes write to one pipe
while not got:
    time.sleep(0.01)
time.sleep(0.3)
os.write(1, f"got {got}\\n".encode())
signal.signal(got[0], signal.SIG_DFL)
os.kill(os.getpid(), got[0])
"""


@pytest.mark.parametrize("number, ranks", [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_ctrl_c_ends_the_trainer_and_leaves_no_folder(tmp_path, log, number, ranks):
    edit(edit(log, FAKE, WAIT), "\nranks: 1\n", f"\nranks: {ranks}\n")
    process = subprocess.Popen([sys.executable, ROOT / "records/rerun.py", log], text=True, start_new_session=True,
                               env=ENV | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": ""},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seen = ready(process, "(?s)" + "pid .*" * ranks)
    assert list(tmp_path.glob("rerun_*/train_gpt.py")) and seen.startswith("this executes the code in ")
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # a terminal sends Ctrl-C to the group
    out, err, status = finish(process, 30, seen)
    assert status > 0 and out.count(f"\ngot [{int(number)}]\n" if ranks == 1 else "\ngot ") == ranks
    assert ranks > 1 or status == 128 + number
    assert not list(tmp_path.glob("rerun_*")) and "rerun.py\", line" not in err, err


def test_a_real_run_is_repeated_digit_for_digit(corpus, tmp_path, capfd, monkeypatch):
    """The trainer's own log: its sources are those of the repository, and the losses of its rerun are equal."""
    small = ["--layers=2", "--backout_layer=none", "--model_dim=32", "--num_heads=2", "--micro_batches=1",
             *(f"--stage{i}.batch_tokens=256" for i in range(1, 5))]
    _, err, status = finish(start(corpus, *small, f"--log_dir={tmp_path}/first"))
    assert status == 0, err
    (log,) = (tmp_path / "first").glob("*.txt")
    run = compare.read_run(log)
    files = {name: text.encode() for name, text in rerun.unpack(run)}
    assert files == {name: (ROOT / name).read_bytes() for name in files}
    assert {"train_gpt.py", "triton_kernels.py", "data/loader.py"} <= files.keys()
    data = [argument for argument in corpus.args if "_files=" in argument]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # conftest.py may have set it
    monkeypatch.chdir(tmp_path)
    assert pack.main([str(log)]) == 0
    zipfile.ZipFile(f"{log.stem}.zip").extractall()
    assert rerun.main([log.name, f"--log_dir={tmp_path}/second", *data]) == 0
    out = capfd.readouterr().out
    assert out.endswith("\n\nsettings and machine are equal\n\nequal in every digit\n"), out
    new = compare.read_run(next((tmp_path / "second").glob("rerun_run_*.txt")))
    assert new.losses == run.losses and len(run.losses) > 3 and new.source == run.source


def test_a_packed_log_has_no_private_names_and_trains_again(log, again, tmp_path, monkeypatch, capfd):
    home = tmp_path / "homes/Änn"
    fakes = (platform, "node", "DeepBox.example.org"), (getpass, "getuser", "Änn"), (Path, "home", home)
    for target, name, value in fakes:
        monkeypatch.setattr(target, name, lambda value=value: value)
    edit(log, "RATE = 0.25  #", f'RATE = 0.25  # {home}/x on deepbox, by Änn the Ännlich, channel "/home/bob/y"')
    edit(log, "command: train_gpt.py", f"command: train_gpt.py --log_dir={home}/logs --run_label=Änn_1")
    edit(log, "prompt: def", f"prompt: {json.dumps(f'Änn{chr(10)}')}", 1)
    log = log.rename(log.with_name("Änn_1.txt"))
    log.with_name("Änn_1_rank0.json.gz").write_bytes(gzip.compress(json.dumps(f"{home}/a.py, {log}").encode()))
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert pack.main([str(log)]) == 0 and "by ~: home folders\n" in capfd.readouterr().out
    with zipfile.ZipFile("user_1.zip") as archive:
        assert archive.namelist() == ["user_1.txt", "user_1_rank0.json.gz"]
        archive.extractall()
    text, trace = Path("user_1.txt").read_text(), gzip.decompress(Path("user_1_rank0.json.gz").read_bytes()).decode()
    assert trace == '"~/a.py, ./user_1.txt"' and '# ~/x on host, by user the Ännlich, channel "~/y"' in text
    assert not re.search(r"(?i)deepbox|Änn\b|\\u00c4nn|bob|homes", text)
    assert again(Path("user_1.txt"))[1].endswith("equal in every digit\n")
    monkeypatch.setattr(getpass, "getuser", lambda: "knobs")  # the code needs this word
    assert pack.main([str(log)]) == 0 and "stays: knobs, " in capfd.readouterr().out
    assert rerun.unpack(compare.read_run(Path("user_1.txt")))[0] == ("train_gpt.py", FAKE)
    assert {*os.listdir()} == {"user_1.zip", "user_1.txt", "user_1_rank0.json.gz"}
