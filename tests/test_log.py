"""The log of a run: what its header says, what reads it back, what a terminal shows."""

import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt as T
from data.run.config import flatten, override, with_knobs
from data.run.log import Log, loaded_sources, published, revision, write_header
from data.run.machine import Runtime
from data.run.program import UserError
from records import compare, rerun

CPU, ROOT = torch.device("cpu"), Path(T.__file__).parent


@pytest.mark.parametrize("path, expected", {
    "/home/jane doe/data/train_*.bin": "train_*.bin", "/home/jane": "jane", "../../jane/x": "x", "~/x/y.pt": "y.pt",
    "data/../../../jane/x": "x", f"{ROOT}/logs/a/b.pt": "logs/a/b.pt", "data/x/x_*.bin": "data/x/x_*.bin",
    "": ""}.items())
def test_no_folder_of_this_machine_is_published(path, expected):
    """Names inside the repository keep their folders."""
    assert published(path) == expected


TEXTS = ("def ", " x", "a\nb\r\nc", "/* main */ int", "..", "~", '"x"', '"', "\u2028\x85\x0c\xa0", "caf\udce9",
         "é ✓ 日本", "=" * 100, "--seed=7", "ranks: 3", "\\n", "'", "$HOME `x`", "a\tb", "\ufeff", "{}", "",
         "seed: 1\n" + "=" * 100 + "\n")


@pytest.fixture
def header(tmp_path, monkeypatch):
    """header(arguments) -> (the config of the arguments, what compare.py reads of the header)."""
    def header(*argv):
        config = T.parse_config(argv := ["--preset=cpu", f"--log_dir={tmp_path}/logs", *argv])
        log = Log(config, Runtime(0, 1, CPU))
        write_header(log, argv, {"train_gpt.py": "x = 1"}, config, {"hardware": "x", "ranks": 1}, {"mlp": "torch"}, {})
        return config, compare.read_run(log.path), log.path.read_text()
    return header


@pytest.mark.parametrize("prompt", TEXTS)
def test_any_text_reads_back(header, monkeypatch, prompt):
    """A setting, in the line of its own and in the command, and a variable; no other setting changes."""
    monkeypatch.setenv("TORCH_TEXT", prompt)
    config, run, text = header(f"--sample_prompt={prompt}")
    assert config.system.sample_prompt == prompt
    words = shlex.split(rerun.value_of(run.facts["command"]))
    assert words == ["train_gpt.py", "--preset=cpu", "--log_dir=logs", f"--sample_prompt={prompt}"]
    knobs = {key: rerun.value_of(run.facts[key]) for key in flatten(config)}
    assert override(T.PRESETS["record74"].config, knobs) == with_knobs(config, log_dir="logs") and not run.finished
    path = prompt.startswith(("/", "..", "~"))
    assert rerun.value_of(run.facts["env.TORCH_TEXT"]) == (published(prompt) if path else prompt)
    # The lines are those of any reader, and an editor may strip them.
    assert len(text.splitlines()) == text.count("\n") and all(x == x.strip() for x in run.facts.values())


def test_only_paths_are_shortened(header):
    """Also where the value is a word of its own."""
    _, run, text = header("--train_files", "/home/jane doe/x_*.bin", "--val_files=~/y_*.bin", "--sample_prompt=/a/b")
    assert run.facts["command"].endswith("'--train_files=x_*.bin' '--val_files=y_*.bin' --sample_prompt=/a/b")
    assert (run.facts["train_files"], run.facts["val_files"], run.facts["log_dir"]) == ("x_*.bin", "y_*.bin", "logs")
    assert "jane" not in text and "/tmp" not in text


def test_errors_name_no_private_folder(tmp_path, monkeypatch):
    """In the log; the console names them. Bytes of a name that are no UTF-8 stop nothing."""
    monkeypatch.setenv("DATA_PATH", "/scratch/jane doe")
    monkeypatch.setenv("HOME", "/home/jane")
    log = Log(T.parse_config(["--preset=cpu", f"--log_dir={tmp_path}/caf\udce9", "--val_files=/jane/x/*.bin"]),
              Runtime(0, 1, CPU))
    log.line("warning: /scratch/jane doe/data/a.bin and /jane/x/b.bin: odd")
    log.failed(f"{ROOT}/data/x.bin, /home/jane/caf\udce9: no", UserError())
    assert log.path.read_text() == "warning: data/a.bin and b.bin: odd\nerror: data/x.bin, caf\\udce9: no\n"


NAMES = "train_gpt.py", "data/loader.py", "mine/new.py", "triton_kernels.py"


@pytest.mark.parametrize("project, place", [
    ("project", "project"), ("project", "project/.venv"), ("project", "."), ("project", "other"),
    ("lib/python3/site-packages/project", ".")])
@pytest.mark.parametrize("missing", ["", "triton_kernels.py"])
def test_sources_are_those_of_the_repository(tmp_path, monkeypatch, project, place, missing):
    """The script first; not Python and its packages. No log lacks code of the trainer."""
    root, lib = tmp_path / project, tmp_path / place / "lib/python3"
    packages = lib / "os.py", lib / "site-packages/numpy.py", root / "env/lib/site-packages/torch.py"
    loaded = [*packages, *(root / name for name in NAMES)]
    for path in loaded:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    modules = {str(path): SimpleNamespace(__file__=str(path)) for path in loaded if path.name != missing}
    with monkeypatch.context() as patch:
        for room in "log", "program":
            patch.setattr(f"data.run.{room}.ROOT", root)
        patch.setattr("sysconfig.get_path", lambda name: str(lib if "std" in name else lib / "site-packages"))
        patch.setattr(sys, "prefix", str(tmp_path / place))
        patch.setattr(sys, "modules", modules)
        try:
            found = list(loaded_sources().items())
        except UserError as error:
            found = str(error)
    if missing:
        assert found.startswith(f"triton_kernels.py of this run lie outside {root}, ")
    else:
        assert found == [(name, Path(name).name) for name in NAMES]


def test_the_commit_is_that_of_the_sources(tmp_path, monkeypatch):
    """Of this folder's own repository, whatever the environment says; unknown where the commit does not have them."""
    def git(folder, *words):
        command = ["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    def found(folder):
        monkeypatch.setattr("data.run.log.ROOT", folder)
        return revision(sources)
    for name in {name for name in os.environ if name.startswith("GIT_")}:
        monkeypatch.delenv(name)
    sources = ["train_gpt.py", "data/loader.py"]
    root, copy, inside = tmp_path / "ü b", tmp_path / "copy", tmp_path / "ü b/copy"
    for folder in root, copy, inside, root / "ours":
        (folder / "data").mkdir(parents=True)
        for name in sources:
            (folder / name).write_text("x\n")
    git(root, "init", "-q")
    assert found(root) == "unknown"  # without a commit
    (root / ".gitignore").write_text("copy\ndata/new.py\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "x")
    commit = git(root, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(root / ".git"))
    assert found(root) == f"{commit} clean"
    assert found(copy) == found(inside) == "unknown" and found(root / "ours") == f"{commit} clean"
    monkeypatch.delenv("GIT_DIR")
    (root / "data/new.py").write_text("x\n")
    sources.append("data/new.py")
    assert found(root) == f"{commit} with changes"  # a source that git ignores
    (root / "data/loader.py").write_text("y\n")
    del sources[2]
    assert found(root) == f"{commit} with changes"
    git(copy, "init", "-q")
    git(copy, "commit", "--allow-empty", "-qm", "x")
    assert found(copy) == "unknown"  # another repository


@pytest.fixture
def console(tmp_path, monkeypatch):
    """console(whether it is a terminal) -> (a new log, what it shows after the line that names the file)."""
    def console(terminal):
        screen = io.StringIO()
        screen.isatty = lambda: terminal
        monkeypatch.setattr("sys.stdout", screen)
        log = Log(T.parse_config(["--preset=cpu", f"--log_dir={tmp_path}"]), Runtime(0, 1, CPU))
        return log, lambda: screen.getvalue().partition("\n")[2]
    return console


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_stays_on_one_line_of_a_terminal(console, terminal):
    """It overwrites itself and tells the time left; elsewhere, and in the log, it is lines."""
    log, shown = console(terminal)
    log.step(2, 9, "train_loss:3.1000", 0.005, 119.7)
    log.step(2, 9, "val_loss:3.0000", 0.005)
    loss, times = "step:2/9 train_loss:3.1000", "train_time:5ms step_avg:2.50ms"
    last = f"step:2/9 val_loss:3.0000\nstep:2/9 {times}\n"
    plain, fancy = f"{loss}\nstep:2/9 {times}\n{last}", f"\r\033[K{loss} {times} eta:2m00s\r\033[K{last}"
    assert log.path.read_text() == plain and shown() == (fancy if terminal else plain)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_that_moves(console, terminal):
    """A terminal shows it until the work is done, or has failed, and it leaves nothing behind."""
    count, twice, threads = itertools.count(1), threading.Event(), threading.active_count()
    log, shown = console(terminal)

    def text():
        if (number := next(count)) == 2:
            twice.set()
        return f"{number} s"
    with pytest.raises(ZeroDivisionError), log.moving(text, every=0.001):
        assert not terminal or twice.wait(20)
        1 / 0
    assert re.fullmatch(r"\r\033\[K1 s\r\033\[K2 s.*\r\033\[K" * terminal, shown(), re.S)
    assert log.path.read_text() == "" and threading.active_count() == threads
