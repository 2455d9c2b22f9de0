"""run.sh and .ci/run with a Python that records its arguments, so nothing is installed, fetched or trained.

The stand-in runs only `-c` programs, with the real interpreter and a site folder that the test fills."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.run import launch
from data.run.program import UserError
from test_repeat import script

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["numpy", "tiktoken", "huggingface_hub", "triton", "pytest", "xdist"]

PYTHON = """#!/bin/bash
case "$0" in *.venv/*) site=$SITES/dotvenv ;; */active*/bin/*) site=$SITES/active ;; *) site=$SITES/system ;; esac
if [ "$1" = -c ]; then
  [ -z "${OLD_PYTHON:-}" ] || { echo old; exit; }
  PYTHONPATH=$site exec "$REAL_PYTHON" -S "$@"
fi
line="$(basename "$(dirname "$(dirname "$0")")")/$(basename "$0")"
for argument in "$@"; do
  line="$line|$argument"
done
echo "$line" >>"$CALLS"
echo "${OMP_NUM_THREADS:-}" >"$CALLS.threads"
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip") exit "${PIP_STATUS:-0}" ;;
  "data/prepare.py stdlib") mkdir -p data/stdlib; : >data/stdlib/stdlib_val_000000.bin ;;
  "-m data.run.launch" | "train_gpt.py "*) eval "${TRAIN:-}" ;;
  "records/repeat.py "*) exec "$REAL_PYTHON" "$@" ;;
esac
"""

TORCH = """import os
open(os.environ["CALLS"] + ".imported", "w")
"""
LENGTH = """import os
needed_tokens = lambda config, world: float(os.environ.get("NEEDED", "850e6"))
"""
TRAINER = """from types import SimpleNamespace
from data.run.program import UserError
def parse_config(argv, world):
    if "--learning_rate=3" in argv: raise UserError("unknown key --learning_rate")
    return SimpleNamespace(system=SimpleNamespace(device="cpu" if "--device=cpu" in argv else "cuda"))
if __name__ == "__main__":  # with the real Python, for records/repeat.py
    import json, os, subprocess, sys
    for line in sys.stdin:
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{sys.argv[1:2]} {line}")
        subprocess.run(["bash", "-c", os.environ.get("TRAIN", ""), "train", *json.loads(line)])
        os.write(0, b".")
"""


class Machine:
    """A copy of run.sh in a folder with a space in its name, with stand-ins for all that run.sh looks for."""

    def __init__(self, folder: Path):
        self.folder, self.repo, bin = folder, folder / "my repo", folder / "system" / "bin"
        for name in "data/run", "records":
            (self.repo / name).mkdir(parents=True)
        for name in ("requirements.txt", "records/repeat.py", "data/__init__.py", "data/run/program.py",
                     "data/run/launch.py"):
            shutil.copy(ROOT / name, self.repo / name)
        (self.repo / "records" / "compare.py").write_text("import sys; print(*sys.argv[1:])")
        text = (ROOT / "run.sh").read_text()
        assert text.count("/dev/nvidia0") == 1  # the machine that runs the tests may have it
        script(self.repo / "run.sh", text.replace("/dev/nvidia0", "../nvidia0"))
        for name in ("python3", "python"):  # both, so that no real one further down PATH is found
            script(bin / name, PYTHON)
        script(bin / "nvidia-smi", (
            '#!/bin/sh\n[ "$1" = -L ] || exec echo "${DRIVER:-580.65.06}"\n'
            'for i in $(seq $SMI_GPUS); do echo "GPU $i: H100"; done\n'))
        (self.repo / "train_gpt.py").write_text(TRAINER)
        with open(self.repo / "data/run/launch.py", "a") as file:
            file.write("allowed_cores = lambda: 12.5\ngpu_count = lambda: int(os.environ['CUDA_GPUS'])\n")
        (self.repo / "data/run/length.py").write_text(LENGTH)
        self.env = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(folder), "CALLS": str(folder / "calls"),
                    "SITES": str(folder / "sites"), "REAL_PYTHON": sys.executable, "SMI_GPUS": "0", "CUDA_GPUS": "0"}

    def change(self, old: str, new: str):
        """Another stand-in for python3."""
        assert PYTHON.count(old) == 1
        script(self.folder / "system/bin/python3", PYTHON.replace(old, new))

    def site(self, name: str, torch: str | None, packages=PACKAGES):
        site = self.folder / "sites" / name
        shutil.rmtree(site, ignore_errors=True)
        files = {f"{package}/__init__.py": "" for package in packages}
        if torch:
            metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
            files |= {"torch/__init__.py": TORCH, f"torch-{torch}.dist-info/METADATA": metadata}
        for path, text in files.items():
            (site / path).parent.mkdir(parents=True)
            (site / path).write_text(text)

    def run(self, *argv, status=0, cwd=None, program=(), **env) -> list[str]:
        """Runs run.sh; returns the calls of the stand-in, as `folder/python|argument|...`."""
        for name in "calls", "calls.threads", "calls.imported":
            (self.folder / name).unlink(missing_ok=True)
        done = subprocess.run([*(program or [str(self.repo / "run.sh")]), *argv], env={**self.env, **env},
                              cwd=cwd or self.folder, capture_output=True, text=True)
        self.out, self.err, calls = done.stdout, done.stderr, self.folder / "calls"
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        self.imported = (self.folder / "calls.imported").exists()
        self.threads = calls.with_name("calls.threads").read_text().strip() if calls.exists() else None
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.site("system", "2.11.0+cpu")
    return machine


STDLIB, FINEWEB = (f"system/python3|data/prepare.py|{name}" for name in ("stdlib", "fineweb|--shards|9"))
IN_VENV, said = ".venv/python", "run.sh: {}\n".format
VENV = ["system/python3|-m|venv|.venv", f"{IN_VENV}|-m|pip|install|-r|requirements.txt"]


def train(procs, *arguments, python="system/python3") -> str:
    launcher = ["-m", "data.run.launch", "--standalone", "--local_addr=localhost", f"--nproc_per_node={procs}"]
    return "|".join([python, *launcher * (procs > 1), "train_gpt.py", *arguments])


CPU = train(1, "--preset=cpu")


def gpus(count) -> dict:
    return {"SMI_GPUS": str(count), "CUDA_GPUS": str(count)}


# ---- Hardware, preset, data ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count, arguments, data, procs, preset", [
    (1, [], FINEWEB, 1, "single"), (3, [], FINEWEB, 2, "record"), (9, [], FINEWEB, 8, "record"),
    (0, ["--run_label=a  b*", "--x=$HOME `id` \\", "", "--y='\"'", "--x=again"], STDLIB, 1, "cpu"),
    (8, ["--a=1", "--preset=cpu"], STDLIB, 1, ""), (0, ["--preset=record"], "", 1, ""),  # it ends at once
    (0, ["--preset=record", "--device=cpu"], FINEWEB, 1, ""),
    (8, ["--preset", "cpu"], STDLIB, 1, ""), (0, ["--preset=cpu", "--preset"], STDLIB, 1, ""),
    (8, ["--preset", "record", "--train_files", "x"], "", 8, ""), (4, ["--train_files=x*.bin"], "", 4, "record"),
    (2, ["--resume", "logs/a.pt"], "", 2, ""),  # the checkpoint has the preset and the data
    (2, ["--init_from=logs/a.pt"], "", 2, ""), (1, ["--check", "--minutes=2"], "", 1, "single"),  # it downloads nothing
    (0, ["--resume="], STDLIB, 1, "cpu")])  # a log has it without a value
def test_gpus_and_arguments_decide(machine, count, arguments, data, procs, preset):
    """Processes, preset and data. The arguments arrive unchanged."""
    added = [f"--preset={preset}"] if preset else []
    assert machine.run(*arguments, **gpus(count)) == [*filter(None, [data]), train(procs, *added, *arguments)]
    if preset in ("single", "record"):
        assert machine.threads == ""  # torchrun and the trainer choose them


def test_gpus_that_torch_cannot_use(machine, tmp_path, monkeypatch):
    """A PyTorch for the CPU, no driver, a driver that fails, two GPUs. PyTorch is not imported."""
    assert machine.run(SMI_GPUS="8", CUDA_GPUS="0")[-1] == CPU
    assert machine.err == said("this machine has GPUs, but torch sees none (CPU build, driver 580.65.06, or"
                               " CUDA_VISIBLE_DEVICES): training on the CPU") and not machine.imported

    def two(count):
        count._obj.value = 2
    library = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetCount=two)
    monkeypatch.setattr(launch.importlib.util, "find_spec",
                        lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: library)
    for cuda, count in ("None", 0), ("'13.0'", 2):
        (tmp_path / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda}\nhip = None\n")
        assert launch.gpu_count() == count
    library.cuInit = lambda flags: 100  # no driver that works
    assert launch.gpu_count() == 0
    monkeypatch.undo()


@pytest.mark.parametrize("variables, procs, preset, threads", [
    ({}, 1, "cpu", "12"), ({"NPROC": "8"}, 8, "cpu", "1"), ({"NPROC": "2"}, 2, "cpu", "6"),
    ({"NPROC": "2", "OMP_NUM_THREADS": "5"}, 2, "cpu", "5"), ({"NPROC": "1", **gpus(8)}, 1, "single", "")])
def test_nproc_and_threads(machine, variables, procs, preset, threads):
    """The processes share the cores, unless OMP_NUM_THREADS is set."""
    assert machine.run(**variables)[-1] == train(procs, f"--preset={preset}") and machine.threads == threads


@pytest.mark.parametrize("arguments, variables, error", [
    ("", {"NPROC": "0"}, said("NPROC=0: write 1, 2, 4 or 8")),
    ("", {"OLD_PYTHON": "yes"}, said("no Python 3.10 or newer on PATH; install one and start again")),
    ("--preset=single --learning_rate=3", {}, "error: unknown key --learning_rate\n")])
def test_an_error_costs_no_download(machine, arguments, variables, error):
    assert machine.run(*arguments.split(), status=1, **variables) == [] and machine.err == error


def test_data_that_is_there_is_not_prepared_again(machine):
    """An interrupted download goes on. Nothing is trained without data. prepare.py knows what of the library is there.
    No start imports the slow torch."""
    start = train(1, "--preset=single")
    for _ in range(2):
        assert machine.run() == [STDLIB, CPU] and machine.err == "" and not machine.imported
    assert machine.run(DATA_PATH="/somewhere", **gpus(1)) == [start]
    folder = machine.repo / "data" / "fineweb10B"
    folder.mkdir()
    count = int(re.search(r"^FINEWEB_SHARDS = (\d+)", (ROOT / "data/prepare.py").read_text(), re.M)[1])
    shards = [folder / f"fineweb_val_{0:06d}.bin", *(folder / f"fineweb_train_{i + 1:06d}.bin" for i in range(count))]
    for shard in shards:
        shard.touch()
    assert machine.run(**gpus(1)) == [start]
    assert machine.run("--preset=single") == [start] and not machine.imported
    for argument, needed, fetch in ("--train_tokens=20e6", "45e6", []), ("--minutes=60", "2345e6", [
            FINEWEB.replace("9", "24")]):  # one shard is there, 24 are not
        assert machine.run(argument, NEEDED=needed, **gpus(1)) == [*fetch, f"{start}|{argument}"]
    for shard in shards[0], shards[-1]:
        shard.unlink()
        assert machine.run(**gpus(1)) == [FINEWEB, start]
        shard.touch()
    machine.change('"data/prepare.py stdlib") ', '"data/prepare.py stdlib") exit 7; ')
    assert machine.run(status=7) == [STDLIB]


# ---- Python ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("has, arguments, status, pip, then", [
    ("numpy huggingface_hub triton", ["test", "-k", "a or b"], 0, "tiktoken|pytest|pytest-xdist",
     "system/python3|-m|pytest|tests|-q|-n|auto|--dist|loadfile|-k|a or b"),
    ("numpy huggingface_hub triton", ["--train_files=x"], 1, "tiktoken",
     "system/python3|train_gpt.py|--preset=cpu|--train_files=x")])
def test_missing_packages_are_installed(machine, has, arguments, status, pip, then):
    """Training goes on without them. status: that of pip."""
    machine.site("system", "2.11.0", has.split())
    calls = machine.run(*arguments, PIP_STATUS=str(status))
    assert calls == ["system/python3|-m|pip|install|--quiet|--retries|1|-c|requirements.txt|" + pip, then]
    python, missing = machine.folder / "system/bin/python3", pip.replace("|", " ")
    lines = [f"installing {missing} for {python}", *[f"could not install {missing}; going on without"] * status]
    assert machine.err == "".join(map(said, lines))


def test_without_a_recent_torch_a_venv_is_made_once(machine):
    machine.site("system", "2.10.1")
    machine.site("dotvenv", "2.11.0")
    start = train(1, "--preset=cpu", python=IN_VENV)
    assert machine.run(PIP_STATUS="1", status=1) == VENV
    assert machine.err.splitlines()[-1].startswith("run.sh: could not install requirements.txt into .venv")
    data = f"{IN_VENV}|data/prepare.py|stdlib"
    assert machine.run() == [*VENV, data, start]
    assert "/bin/python has a torch older than 2.11 and is left as it is; using .venv" in machine.err
    assert machine.run() == [data, start]
    with (machine.repo / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    assert machine.run() == [*VENV, data, start]
    machine.site("system", "3.0.1")
    assert machine.run() == [STDLIB, CPU]  # a recent torch is used as it is


def test_a_python_without_venv_is_named(machine):
    machine.site("system", None)
    machine.change('"-m venv") ', '"-m venv") exit 1; ')
    assert machine.run(status=1) == VENV[:1]
    python = machine.folder / "system/bin/python3"
    assert machine.err == said(
        f"could not make .venv with {python}; its venv module may be a package of its own (Debian: python3-venv)")


def test_an_active_virtualenv(machine):
    """It comes first. Without torch it gets the requirements, with an old torch it stays as it is."""
    folder, python = machine.folder / "active env", "active env/python"
    for name in ("python", "python3"):
        script(folder / "bin" / name, PYTHON)
    machine.env |= {"VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin:{machine.env['PATH']}", "DATA_PATH": "/x"}
    machine.site("active", None, [])
    pip, start = f"{python}|-m|pip|install|-r|requirements.txt", train(1, "--preset=cpu", python=python)
    assert machine.run(PIP_STATUS="1", status=1) == [pip]
    assert said(f"could not install requirements.txt into {folder}; pip's lines above say why") in machine.err
    assert machine.run() == [pip, start]
    machine.site("active", "2.12.0")
    assert machine.run() == [start] and not (machine.repo / ".venv").exists()
    machine.site("active", "2.4.0")
    machine.site("system", None)
    machine.site("dotvenv", "2.11.0")
    assert machine.run() == [f"{python}|-m|venv|.venv", VENV[1], train(1, "--preset=cpu", python=IN_VENV)]
    assert said(f"{folder}/bin/python has a torch older than 2.11 and is left as it is; using .venv") in machine.err


def test_the_versions_are_those_that_were_measured():
    log = next(ROOT.glob("records/2026-11-21_h100/*.txt")).read_text()
    measured = re.findall(r"^Running (?:PyTorch|Triton version) ([\d.]+)", log, re.M)
    text = (ROOT / "requirements.txt").read_text()
    assert [re.search(rf"^{name}==([\d.]+)", text, re.M)[1] for name in ("torch", "triton")] == measured


@pytest.mark.parametrize("driver, words", [
    ("580.65.06", ""), ("570.86.10", "is older than 580: installing torch with CUDA 12.6, which needs 525")])
def test_an_old_driver_gets_another_build(machine, driver, words):
    machine.site("system", None)
    machine.site("dotvenv", "2.11.0")
    other = f"{IN_VENV}|-m|pip|install|torch==2.11.0|--index-url|https://download.pytorch.org/whl/cu126"
    calls = machine.run("--preset=cpu", "--train_files=x", SMI_GPUS="1", DRIVER=driver)
    assert calls[:-1] == [VENV[0], *[other] * ("570" in driver), VENV[1]]
    assert machine.err.splitlines()[1:] == [f"run.sh: the NVIDIA driver {driver} {words}"] * bool(words)


# ---- Other ways to call it -------------------------------------------------------------------------------------------
def test_repeated_runs(machine):
    """Each label with its own preset and data. Only the run of two processes is a ./run.sh. --repeat may stand
    anywhere."""
    argv = "--seed 3 --repeat 1 --label a --preset cpu --label b --train_files=x".split()
    log = r"""mkdir -p logs; for a in "$@"; do
      case "$a" in --run_label=*)
        a=${a#*=}; printf "run_label: $a\nseed: 3\nfinal_val_loss: 3\n" >"logs/$a.txt" ;; esac; done"""
    a = ["--run_label=a", "--seed=3", "--log_dir=logs", "--preset=cpu"]
    assert machine.run(*argv, TRAIN=log, **gpus(2)) == [
        "|".join(["system/python3|records/repeat.py", *argv]),
        "system/python3|train_gpt.py|--help|--log_dir=logs|--preset=cpu", STDLIB,  # it reads the arguments
        "system/python3|train_gpt.py|--help|--preset=record|--log_dir=logs|--train_files=x", f"['-'] {json.dumps(a)}",
        train(2, "--run_label=b", "--seed=3", "--preset=record", "--log_dir=logs", "--train_files=x")]
    assert machine.out == "-- a=logs/a.txt b=logs/b.txt\n"


def test_runs_side_by_side_find_the_data_there(machine):
    argv = "--repeat 1 --label a --parallel --label b".split()
    _, *first, a, b = machine.run(*argv, CUDA_VISIBLE_DEVICES="0,1", status=1)
    runs = [[f"--run_label={label}", "--seed=1", "--preset=cpu", "--log_dir=logs"] for label in "ab"]
    assert first == ["system/python3|train_gpt.py|--help|--preset=cpu|--log_dir=logs", STDLIB] * 2
    assert sorted([a, b]) == [f"['-'] {json.dumps(run)}" for run in runs]
    assert machine.run("data", "--preset", "record") == ["system/python3|train_gpt.py|--help|--preset|record", FINEWEB]
    assert machine.run("data") == ["system/python3|train_gpt.py|--help|--preset=cpu", STDLIB]
    assert machine.run("plan", "--preset", "record") == ["system/python3|train_gpt.py|--help|--preset|record"]
    assert machine.out == "1\00012\0--preset\0record\0"


def test_rerun_and_help(machine):
    for argv in ["--rerun", "logs/my log.txt", "--x=1"], ["--rerun=logs/my log.txt", "--x=1"]:
        assert machine.run(*argv, SMI_GPUS="1") == ["system/python3|records/rerun.py|logs/my log.txt|--x=1"]
    machine.site("system", "2.11.0", ["numpy"])  # nothing is installed, made or downloaded for the help of a preset
    for argv in ["--preset=single", "--help"], ["-h", "--preset=cpu"]:
        assert machine.run(*argv, **gpus(8)) == ["system/python3|train_gpt.py|" + "|".join(argv)]
    for argv in "--help", "data --help", "--repeat 2 --label a --help", "--x=1 --help":
        machine.site("system", None)
        assert machine.run(*argv.split()) == [] and "./run.sh test" in machine.out and "NPROC=" in machine.out
    assert machine.err == said("the settings need a Python with torch 2.11; the first run installs it")
    assert machine.run("--repeat", "1", "--label", "-h", status=1, PIP_STATUS="1") == VENV  # a signed factor


def test_the_tests_of_a_file(machine):
    (machine.repo / "tests").mkdir()
    (machine.repo / "tests/test_a.py").touch()
    for argv, files in [["tests/test_a.py"], ""], [["-x", "tests/test_a.py::b"], ""], [["-k", "a"], "tests|"]:
        assert machine.run("test", *argv) == [
            f"system/python3|-m|pytest|{files}-q|-n|auto|--dist|loadfile|" + "|".join(argv)]
    assert machine.run("test", "-k", "a", "--gpu") == ["system/python3|.ci/gpu.py|-k|a|--gpu"]
    assert machine.run("test", "tests/test_z.py", status=1) == [] and "no such file: tests/test_z.py" in machine.err
    assert machine.run("tests", "-x", status=1) == [] and "'tests' is no command: write test, data" in machine.err


def test_the_tests_of_a_gpu(tmp_path, monkeypatch, capsys):
    """Of the files that use one, whose names nobody lists. A file that fails shows why, and makes the status 1."""
    main = runpy.run_path(str(ROOT / ".ci/gpu.py"))["main"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="PyTorch finds no GPU here; ./run.sh test runs the tests on the CPU"):
        main([], tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (30 * 2**30, 99 * 2**30))
    texts = {"a": "def test_one(device): pass\ndef test_two(): pass", "b": "def test_b(device): assert 0",
             "c": "def test_c(): assert 0", "d": "def test_one(device): import os; os.abort()"}
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "conftest.py").write_text("import pytest\ndevice = pytest.fixture(lambda: 0)")
    files, gone = [str(tmp_path / f"test_{name}.py") for name in "abd"], "CRASHED, status -6"
    for words, status, ends in ([], 1, ["passed 2 passed", "FAILED 1 failed", gone]), (
            ["-k", "one"], 1, ["passed 1 passed, 1 deselected", "no test has this name", gone]), (
            [files[0]], 0, ["passed 2 passed"]), ([files[0], "-k", "none"], 1, ["no test has this name"]):
        assert main(["--gpu", *words, "-p", "no:cacheprovider"], tmp_path) == status
        out = capsys.readouterr().out
        rows = [" ".join(line.replace("|", " ").split()) for line in out.splitlines()[-len(ends):]]
        assert all(f"test_{name}.py {end}" in row for name, end, row in zip("abd", ends, rows)), rows
        assert ("def test_b(device): assert 0" in out) == (not words)


def test_it_starts_by_links_and_by_sh(machine, tmp_path):
    """A chain of links that are relative to their own folders. The sh of Debian is no bash. A relative DATA_PATH is
    that of the caller."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/speedrun").symlink_to("../link")
    (tmp_path / "link").symlink_to("my repo/run.sh")
    assert machine.run(program=[tmp_path / "a b/speedrun"]) == [STDLIB, CPU]
    calls = machine.run(program=[shutil.which("dash") or "sh", "run.sh"], cwd=machine.repo, NPROC="2")
    assert calls[-1] == train(2, "--preset=cpu")
    for path in ".", "some where":
        assert machine.run(DATA_PATH=path, TRAIN='echo "$DATA_PATH"') == [CPU]
        assert os.path.normpath(machine.out.strip()) == os.path.normpath(tmp_path / path)


def test_a_clone_with_the_line_ends_of_windows_starts(tmp_path):
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    for name in "run.sh", ".gitattributes":
        shutil.copy(ROOT / name, tmp_path)
    commit = "-c user.name=a -c user.email=a commit -qm a".split()
    for words in ["add", "."], commit, "-c core.autocrlf=true clone -q . clone".split():
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert (tmp_path / "clone/run.sh").read_bytes() == (ROOT / "run.sh").read_bytes()


def test_it_works_from_any_folder(machine, tmp_path):
    """And finds a Python of either name: here python3 has no torch, and python has."""
    machine.site("active", None)
    script(tmp_path / "active/bin/python3", PYTHON)
    (tmp_path / "system/bin/python3").unlink()
    env = {"PATH": f"{tmp_path}/active/bin:{machine.env['PATH']}", "CDPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    assert machine.run(cwd=tmp_path / "active", **env)[-1] == train(1, "--preset=cpu", python="system/python")
    assert (machine.repo / "data" / "stdlib").is_dir() and not (tmp_path / "active" / "data").exists()


@pytest.mark.parametrize("line, status, good", [
    ("final_val_loss: 2.5", 0, True), ("final_val_loss was never there", 0, False), ("final_val_loss: 2.5", 3, False)])
def test_ci_fails_unless_every_run_ends_with_a_loss(machine, line, status, good):
    """It runs the tests, then one process, then two."""
    calls = machine.folder / "ci calls"
    script(machine.repo / "run.sh", f"""#!/bin/bash
echo "${{NPROC:-}} $1" >>"{calls}"
[ "$1" = test ] || {{ echo "step: 3\n{line}\npeak_memory: 3"; exit {status}; }}
""")
    script(machine.repo / ".ci" / "run", (ROOT / ".ci" / "run").read_text())
    done = subprocess.run([str(machine.repo / ".ci" / "run")], env=machine.env, cwd=machine.folder, capture_output=True)
    assert (done.returncode == 0) == good
    assert calls.read_text().splitlines() == [" test", "1 --preset=cpu", "2 --preset=cpu"][:3 if good else 2]


@pytest.mark.parametrize("command", ["PYTHONPATH=$site", "mkdir -p data/stdlib"])
def test_ctrl_c_before_the_training(machine, command):
    """While run.sh looks for a Python, and while prepare.py works. No other Python is tried, and nothing is trained."""
    # `sleep` must be there when the signal comes: bash lives on where a command before it ends normally.
    machine.change(command, f'(sleep .3; touch "$CALLS.waits") & exec sleep 60; {command}')
    process = subprocess.Popen([str(machine.repo / "run.sh")], env=machine.env, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 20
    while not (machine.folder / "calls.waits").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.communicate(timeout=20) == ("", said("ended by Ctrl-C")) and process.returncode == 130
    assert not any("launch" in path.read_text() for path in machine.folder.glob("calls"))
