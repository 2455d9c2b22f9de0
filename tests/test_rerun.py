"""records/rerun.py: what it unpacks and refuses, what it starts, how it compares, how it ends. The trainer in most logs
is FAKE, a few lines that write a log in the format of the trainer; one run and its rerun are real."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from records import compare, rerun
from test_run import ENV, ROOT, corpus, finish, start  # noqa: F401 (corpus is a fixture)

# Its losses follow from the sources (data/loader.py), from a knob (seed) and from an environment variable.
FAKE = '''import json, os, sys, uuid
from pathlib import Path
from data.loader import RATE

ROOT, RULE = Path(__file__).parent, "=" * 100
NAMES = "train_gpt.py", "data/__init__.py", "data/loader.py", "notes.txt"


def main(knobs):
    if int(os.environ.get("RANK", 0)):
        return
    if "stop" in knobs:
        print(f"error: no files match {knobs['train_files']}", file=sys.stderr)
        sys.exit(int(knobs["stop"]))
    sources = {name: (ROOT / name).read_bytes().decode() for name in NAMES}
    knobs = {"run_label": "base", "log_dir": "logs", "device": "cpu", "seed": "3", "prompt": "def ",
             "layer0": "paired, wide", "train_files": "data/*.py", "val_files": "data/*.py", "save": "True",
             "save_every": "2", "resume": "", "profile": "1:2", "sample_tokens": "9"} | knobs
    script, *others = sources.items()
    line, versions = "-" * 40, f"{RULE}\\nRunning Python 3.11\\nRunning PyTorch 2.13.0 compiled for CUDA 9\\n{RULE}"
    recorded = "TORCH", "TRITON", "NCCL", "OMP"
    env = {f"env.{key}": value for key, value in os.environ.items() if key.startswith(recorded)}
    settings = {"hardware": "x86_64", "ranks": os.environ.get("WORLD_SIZE", 1), "command": "train_gpt.py --seed=3",
                "commit": f"{uuid.uuid4()} clean", "sources": " ".join(NAMES),
                "train_shards": knobs.pop("shards", "a.bin:9"), "val_shards": "b.bin:5", **env, **knobs}
    Path(knobs["log_dir"]).mkdir(exist_ok=True)
    path = Path(knobs["log_dir"], f"{knobs['run_label']}_{uuid.uuid4()}.txt")
    with open(path, "w", encoding="utf-8", newline="") as log:
        for text in (script[1], *(f"\\n{line}\\n# {name}\\n{line}\\n\\n{text}" for name, text in others), versions,
                     *(f"{key}: {value}" for key, value in settings.items()), RULE, "kernels: XXT:torch head:float32"):
            log.write(text + "\\n")
        for step in range(0, 7, 2):
            loss = 5 - RATE * step + int(knobs["seed"]) / 100 + int(os.environ.get("OMP_FAKE", 0)) / 1000
            log.write(f"step:{step}/6 val_loss:{loss:.4f} train_time:{step}ms step_avg:1.00ms\\n")
    env |= {key: os.environ.get(key) for key in ("DATA_PATH", "PYTHONPATH", "WORLD_SIZE")}
    print("seen:", json.dumps([sys.argv[1:], env, str(ROOT), os.getcwd()]), flush=True)


if __name__ == "__main__":
    main(dict(argument[2:].split("=", 1) for argument in sys.argv[1:]))
'''
RECORDED = "TORCH", "TRITON", "NCCL", "OMP"
# An empty file, one without a line end, characters of many kinds, rules and a title of a file that is not dumped.
FILES = {"train_gpt.py": FAKE, "data/__init__.py": "", "data/loader.py": "\n\nRATE = 0.25  # é ✓ \x0c tab\t\n\n\n",
         "notes.txt": f"\n{'-' * 40}\n# other.py\n{'-' * 40}\n\n{'=' * 100}\nno end \U0001f600"}


def make(folder, **variables) -> Path:
    """The log of a run of FILES with these environment variables, which is the only one in its folder."""
    code, logs = folder / "code", folder / "first"
    for name, text in FILES.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_bytes(text.encode())
    env = {key: value for key, value in os.environ.items() if not key.startswith(RECORDED)} | variables
    subprocess.run([sys.executable, "train_gpt.py", f"--log_dir={logs}"], cwd=code, env=env, check=True)
    (path,) = logs.glob("*.txt")
    return path


@pytest.fixture
def again(tmp_path, capfd, monkeypatch):
    """again(log, arguments) -> (status, stdout, stderr, new log or None, what FAKE saw or None). No temporary folder is
    left. tmp_path stands for the repository."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(rerun, "ROOT", tmp_path)
    for key in [key for key in os.environ if key.startswith(RECORDED)]:
        monkeypatch.delenv(key)
    (tmp_path / "temporary").mkdir()

    def again(log, *arguments):
        old = set((tmp_path / "logs").glob("*"))
        capfd.readouterr()
        status = rerun.main([str(log), *arguments])
        out, err = capfd.readouterr()
        new = set((tmp_path / "logs").glob("*")) - old
        seen = re.search("^seen: (.*)$", out, re.M)
        assert not list((tmp_path / "temporary").iterdir()) and len(new) == (status == 0), out + err
        return status, out, err, new.pop() if new else None, json.loads(seen[1]) if seen else None
    return again


@pytest.fixture
def refused(again):
    """refused(log, pattern, *arguments): one line says why, and nothing was run."""
    def refused(log, pattern, *arguments):
        status, out, err, _, seen = again(log, *arguments)
        assert status == 1 and seen is None and "executes" not in out
        assert re.fullmatch(f"error: .*{pattern}.*\n", err), err
    return refused


def edited(log, old, new, count=1) -> Path:
    text = log.read_bytes().decode()
    assert text.count(old) == count, old
    path = log.with_name("edited.txt")
    path.write_bytes(text.replace(old, new).encode())
    return path


def table(out, first) -> list[list[str]]:
    """The rows of the table in `out` whose first row begins with these words."""
    return [line.split() for line in re.search(rf"^ *{first}.*\n(?:.+\n)*", out, re.M)[0].splitlines()]


def test_unpacking_is_exact(tmp_path):
    log = make(tmp_path)
    assert rerun.unpack(compare.read_run(log)) == FILES
    shuffled = edited(log, "\nsources: train_gpt.py data/__init__.py", "\nsources: data/__init__.py train_gpt.py")
    shuffled = edited(shuffled, "data/loader.py notes.txt\n", "notes.txt data/loader.py\n")
    assert rerun.unpack(compare.read_run(shuffled)) == FILES


def test_equal_runs_and_what_they_were_given(tmp_path, again, monkeypatch):
    monkeypatch.delenv("DATA_PATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}/elsewhere")  # without what stands for the repository
    log = make(tmp_path)
    status, out, err, new, (argv, env, folder, cwd) = again(log)
    assert (status, err) == (0, "") and out.splitlines()[0] == f"this executes the code in {log}, whoever wrote it"
    assert out.endswith("\n\nsettings and machine are equal\n\nequal in every digit\n")
    assert table(out, "step") == [["step", "log", "rerun", "difference"], ["0", "5.0300", "5.0300", "+0.0000"],
                                  ["2", "4.5300", "4.5300", "+0.0000"], ["4", "4.0300", "4.0300", "+0.0000"],
                                  ["6", "3.5300", "3.5300", "+0.0000"]]
    assert new.name.startswith("rerun_base_") and rerun.unpack(compare.read_run(new)) == FILES  # what FAKE has read
    assert argv == ["--run_label=rerun_base", f"--log_dir={tmp_path}/logs", "--device=cpu", "--seed=3", "--prompt=def ",
                    "--layer0=paired, wide", "--train_files=data/*.py", "--val_files=data/*.py"]
    assert (env["DATA_PATH"], env["PYTHONPATH"]) == (str(tmp_path), "/elsewhere")
    assert folder == cwd and Path(folder).parent == tmp_path / "temporary"


def test_settings_of_the_user_win(tmp_path, again, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_PATH", "my data")
    mine = "--seed=5", "--save_every=4", "--run_label=mine[1]", "--log_dir=logs", "--x=a=b"
    status, out, _, new, (argv, env, *_) = again(make(tmp_path), *mine[:2], "--run_label", "mine[1]", *mine[3:])
    assert status == 0 and new.name.startswith("mine[1]_") and env["DATA_PATH"] == f"{tmp_path}/my data"
    assert argv[-5:] == [*mine[:3], f"--log_dir={tmp_path}/logs", "--x=a=b"]
    keys = [argument.partition("=")[0] for argument in argv]
    assert len(set(keys)) == len(keys) and out.endswith("\n\nthe largest difference is 0.0200 at step 0\n")
    assert table(out, "log +rerun") == [["log", "rerun"], ["seed", "3", "5"], ["x", "–", "a=b"]]


def test_environment_is_that_of_the_log(tmp_path, again, monkeypatch):
    there = {"OMP_FAKE": "7", "TRITON_TRACE": "their/trace", "TORCHELASTIC_RUN_ID": "1", "NCCL_SOCKET_IFNAME": "eth9",
             "NCCL_ALGO": "Ring", "TRITON_CACHE_DIR": "their_cache"}
    log = make(tmp_path, **there)
    monkeypatch.setenv("OMP_FAKE", "8")  # FAKE's loss depends on it
    monkeypatch.setenv("TRITON_TRACE", "my/trace")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/my/cache")
    monkeypatch.setenv("TORCH_MINE", "1")
    status, out, _, _, (argv, env, *_) = again(log)
    assert status == 0 and out.endswith("\n\nequal in every digit\n") and "--env" not in " ".join(argv)
    assert {key: value for key, value in env.items() if key.startswith("env.")} == {
        "env.OMP_FAKE": "7", "env.TRITON_TRACE": "my/trace", "env.TRITON_CACHE_DIR": "/my/cache",
        "env.NCCL_ALGO": "Ring", "env.TORCH_MINE": "1"}
    assert table(out, "log +rerun") == [["log", "rerun"], ["env.TRITON_TRACE", "their/trace", "my/trace"],
                                        ["env.TORCH_MINE", "–", "1"]]


CHANGED = {  # case -> old and new text of the log, the difference and its step
    "loss": ("step:4/6 val_loss:4.0300", "step:4/6 val_loss:4.0301", "0.0001 at step 4"),
    "higher loss": ("step:6/6 val_loss:3.5300", "step:6/6 val_loss:3.4000", "0.1300 at step 6"),
    "nan": ("step:6/6 val_loss:3.5300", "step:6/6 val_loss:nan", "nan at step 6"),
    "source": ("RATE = 0.25 ", "RATE = 0.24 ", "0.0600 at step 6"),
    "knob": ("\nseed: 3\n", "\nseed: 4\n", "0.0100 at step 0")}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_log_is_found_out(tmp_path, again, case):
    old, new, difference = CHANGED[case]
    status, out, err, *_ = again(edited(make(tmp_path), old, new))
    assert (status, err) == (0, "") and out.endswith(f"\n\nthe largest difference is {difference}\n"), out


def test_an_unfinished_log_is_compared_as_far_as_it_goes(tmp_path, again):
    log = make(tmp_path)
    text = log.read_text()
    log.write_text(text[:text.index("step:4/6")])
    status, out, *_ = again(log)
    assert status == 0 and "the run in the log did not finish; the losses are compared up to its step 2\n" in out
    assert out.endswith("\n\nequal in every digit (2 of 4 validations are in both logs)\n")
    assert table(out, "step")[-1] == ["6", "–", "3.5300", "–"]


def test_other_data_has_a_line_of_its_own(tmp_path, again):
    _, out, *_ = again(make(tmp_path), "--shards=a.bin:8")
    line = "other data: train_shards is 'a.bin:9' in the log, 'a.bin:8' in the rerun"
    assert f"\n\n{line}\n\nsettings and machine are equal\n\nequal in every digit\n" in out


def test_a_failing_trainer(tmp_path, again, monkeypatch):
    """Its status is passed on, and a line says what to do where this machine does not have the data."""
    log = make(tmp_path)
    (tmp_path / "mine[1]/data").mkdir(parents=True)
    (tmp_path / "mine[1]/data/x.py").touch()
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "mine[1]"))
    status, out, err, *_ = again(log, "--stop=3")
    assert (status, err) == (3, "error: no files match data/*.py\n") and "difference" not in out
    files = "--train_files=other/*.bin", "--val_files=other/*.bin"
    for missing in (files[:1], files[1:], files):
        status, out, err, *_ = again(log, "--stop=1", *missing)
        advice = "other/*.bin is not on this machine: pass --train_files=... and --val_files=...\n"
        assert status == 1 and re.fullmatch(f"error: no files match .*\n{re.escape(advice)}", err), err


BROKEN = {  # case -> old and new text of the log, how often the old one is there, what the line says
    "older": ("\ncommand: train_gpt.py --seed=3\n", "\n", 1, "lacks `command`; "),
    "no sources": ("\nsources: ", "\nsource: ", 1, "lacks `sources`; "),
    "no text": ("# data/loader.py\n", "# data/loaded.py\n", 1, "lacks the text of data/loader.py; "),
    "two": ("\nsources: train_gpt.py data/__init__.py", "\nsources: train_gpt.py data/files.py x.py", 1,
            "lacks the text of data/files.py, the text of x.py; "),
    "no losses": ("/6 val_loss:", "/6 train_time:1ms val_loss:", 5, "lacks validation losses; "),
    "twice": ("\nno end ", f"{rerun.title('data/loader.py')}RATE = 0.5\n", 1, "holds data/loader.py more than once"),
    "ranks": ("\nranks: 1\n", "\nranks: 0\n", 1, "ranks are '0'"),
    "resumed": ("\nresume: \n", "\nresume: run_1/step_40.pt\n", 1, "went on from run_1/step_40.pt"),
    "no GPU": ("\ndevice: cpu\n", "\ndevice: cuda\n", 1, "this machine has none; add --device=cpu")}


@pytest.mark.parametrize("case", BROKEN)
def test_logs_that_cannot_be_trained_again(tmp_path, refused, monkeypatch, case):
    monkeypatch.setattr(rerun, "gpu_count", lambda: 0)
    old, new, count, pattern = BROKEN[case]
    refused(edited(make(tmp_path), old, new, count), pattern)


@pytest.mark.parametrize("name", ["{d}/evil.py", "../evil.py", "data/../../evil.py", "data/..", ".", "..\\evil.py",
                                  "C:evil.py", "~/evil.py"])
def test_names_stay_inside_the_folder(tmp_path, refused, name):
    name = name.format(d=tmp_path)
    log = edited(edited(make(tmp_path), "py notes.txt\n", f"py {name}\n"), "\n# notes.txt\n", f"\n# {name}\n")
    refused(log, f"'{re.escape(name)}' among its sources may lead out")
    assert not list(tmp_path.rglob("*evil*"))


def test_a_name_that_is_a_file_and_a_folder(tmp_path, again):
    log = edited(make(tmp_path), "py notes.txt\n", "py notes.txt notes.txt/x.py\n")
    status, _, err, _, seen = again(edited(log, "\nno end ", rerun.title("notes.txt/x.py")))
    assert status == 1 and seen is None and re.fullmatch("error: .*: cannot unpack notes.txt/x.py: .*\n", err), err


def test_what_is_no_log(tmp_path, refused):
    (tmp_path / "prose.txt").write_text("This is\nno log.\n")
    (tmp_path / "data.bin").write_bytes(b"\0" * 5000)
    refused(tmp_path / "prose.txt", "prose.txt: not the log of a run")
    refused(tmp_path / "data.bin", "data.bin: not a log but binary data")
    refused(tmp_path / "none.txt", "cannot read .*none.txt")
    refused(tmp_path, "cannot read .*: Is a directory")
    older = next((ROOT / "records").glob("*/seed1_*.txt"))
    refused(older, "lacks `command`, `sources`, `train_shards`, `val_shards`; ")
    log = make(tmp_path)
    for arguments in (["--seed", "3", "4"], ["--check"], ["--check", "--seed=3"], ["other.txt"]):
        refused(log, "--key=value", *arguments)
    for key in ("preset=cpu", "resume=x.pt", "profile=1:2", "sample_tokens=9"):
        refused(log, f"--{key.partition('=')[0]}: a rerun has the settings of the log", f"--{key}")
    log.write_text(compare.HEADER.split(log.read_text())[-1].join(["=" * 100 + "\n", ""]))
    refused(log, "lacks the text of data/__init__.py, .*, the text of train_gpt.py; ")


@pytest.mark.parametrize("ranks, gpus, count", [(8, 8, 8), (8, 9, 8), (8, 7, 4), (8, 3, 2), (8, 1, 1), (16, 8, 8),
                                                (6, 5, 3), (1, 1, 1)])
def test_as_many_processes_as_there_are_gpus(monkeypatch, ranks, gpus, count):
    monkeypatch.setattr(rerun, "gpu_count", lambda: gpus)
    assert (rerun.processes(ranks, "cuda"), rerun.processes(ranks, "cpu")) == (count, ranks)


def test_two_processes_run_under_torchrun(tmp_path, again, monkeypatch):
    log = edited(make(tmp_path), "\nranks: 1\n", "\nranks: 2\n")
    status, out, *_, (_, env, *_) = again(log)
    assert status == 0 and env["WORLD_SIZE"] == "2" and out.endswith("\n\nequal in every digit\n")
    monkeypatch.setattr(rerun, "gpu_count", lambda: 1)
    status, out, *_, (_, env, *_) = again(edited(log, "\ndevice: cpu\n", "\ndevice: cuda\n"))
    assert status == 0 and env["WORLD_SIZE"] is None
    assert "\n1 of the 2 processes fit on the GPUs here and make more micro-steps, so digits will differ\n" in out
    assert ["ranks", "2", "1"] in table(out, "log +rerun")


# It takes its time to end, and then ends by the first signal that it was sent.
WAIT = """import os, signal, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(int(number)))
print(f"pid {os.getpid()}", flush=True)
while not got:
    time.sleep(0.01)
time.sleep(0.3)
print("got", got, flush=True)
signal.signal(got[0], signal.SIG_DFL)
os.kill(os.getpid(), got[0])
"""


@pytest.mark.parametrize("number, ranks", [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_ctrl_c_ends_the_trainer_and_leaves_no_folder(tmp_path, number, ranks):
    log = edited(edited(make(tmp_path), FAKE, WAIT), "\nranks: 1\n", f"\nranks: {ranks}\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen([sys.executable, ROOT / "records/rerun.py", log], text=True, start_new_session=True,
                               env=ENV | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": ""},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seen = ""
    while seen.count("pid ") < ranks:
        seen += (line := process.stdout.readline())
        assert line, process.stderr.read()
    assert list(temporary.glob("rerun_*/train_gpt.py")) and seen.startswith("this executes the code in ")
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # a terminal sends Ctrl-C to the group
    out, err, status = finish(process, 30, seen)
    if ranks == 1:
        assert status == 128 + number and f"\ngot [{int(number)}]\n" in out
    assert status > 0 and out.count("\ngot ") == ranks
    assert not list(temporary.glob("rerun_*")) and "rerun.py\", line" not in err, err


def test_a_real_run_is_repeated_digit_for_digit(corpus, tmp_path):
    """The trainer's own log: its sources come back as they are in the repository, and its losses as they were."""
    _, err, status = finish(start(corpus, f"--log_dir={tmp_path}/first"))
    (log,) = (tmp_path / "first").glob("*.txt")
    run = compare.read_run(log)
    assert status == 0, err
    files = rerun.unpack(run)
    assert {"train_gpt.py", "triton_kernels.py", "data/loader.py"} <= files.keys()
    assert {name: text.encode() for name, text in files.items()} == {name: (ROOT / name).read_bytes() for name in files}
    data = [argument for argument in corpus.args if "_files=" in argument]
    command = [sys.executable, ROOT / "records/rerun.py", log, f"--log_dir={tmp_path}/second", *data]
    result = subprocess.run(command, env=ENV, text=True, capture_output=True, timeout=100)
    assert result.returncode == 0, result
    assert result.stdout.endswith("\n\nsettings and machine are equal\n\nequal in every digit\n"), result.stdout
    (again,) = (tmp_path / "second").glob("rerun_run_*.txt")
    new = compare.read_run(again)
    assert new.losses == run.losses and len(run.losses) > 3 and new.source == run.source
