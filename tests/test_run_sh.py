"""run.sh and .ci/run with a Python that records what it is asked to do, so nothing is installed, fetched or trained.

The stand-in runs only `-c` programs, with the real interpreter and a site folder that the test fills: run.sh's search for
torch is the real one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
  case "$argument" in /dev/fd/*) cat "$argument" >"$CALLS.installed"; argument=requirements ;; esac
  line="$line|$argument"
done
echo "$line" >>"$CALLS"
echo "${OMP_NUM_THREADS:-}" >"$CALLS.threads"
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip") exit "${PIP_STATUS:-0}" ;;
  "data/prepare.py stdlib") mkdir -p data/stdlib; : >data/stdlib/stdlib_val_000000.bin ;;
  "-m torch.distributed.run") eval "${TRAIN:-}" ;;
  "records/repeat.py "*) exec "$REAL_PYTHON" "$@" ;;
esac
"""

TORCH = """import os
open(os.environ["CALLS"] + ".imported", "w")
class cuda:
    device_count = staticmethod(lambda: int(os.environ["TORCH_GPUS"]))
"""


class Machine:
    """A copy of run.sh in a folder with a space in its name, and everything it would find around it."""

    def __init__(self, folder: Path):
        self.folder, self.repo = folder, folder / "my repo"
        for name in "data", "records":
            (self.repo / name).mkdir(parents=True)
        for name in "requirements.txt", "records/repeat.py":
            shutil.copy(ROOT / name, self.repo / name)
        (self.repo / "records" / "compare.py").write_text("import sys; print(*sys.argv[1:])")
        text = (ROOT / "run.sh").read_text()
        assert text.count("/dev/nvidia0") == 1  # the machine that runs the tests may have it
        self.executable(self.repo / "run.sh", text.replace("/dev/nvidia0", "../nvidia0"))
        bin = folder / "system" / "bin"
        for name in ("python3", "python"):  # both, so that no real one further down PATH is found
            self.python(bin / name)
        self.executable(bin / "nvidia-smi", '#!/bin/sh\ni=0\nwhile [ $i -lt $SMI_GPUS ]; do echo "GPU $i: H100"; i=$((i+1)); done\n')
        self.env = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(folder), "CALLS": str(folder / "calls"),
                    "SITES": str(folder / "sites"), "REAL_PYTHON": sys.executable, "SMI_GPUS": "0", "TORCH_GPUS": "0"}

    def executable(self, path: Path, text: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def python(self, path: Path):
        self.executable(path, PYTHON)

    def site(self, name: str, torch: str | None, packages=PACKAGES):
        site = self.folder / "sites" / name
        shutil.rmtree(site, ignore_errors=True)
        for package in packages:
            (site / package).mkdir(parents=True)
            (site / package / "__init__.py").touch()
        if torch:
            (site / "torch").mkdir(parents=True)
            (site / "torch" / "__init__.py").write_text(TORCH)
            info = site / f"torch-{torch}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")

    def run(self, *argv, status=0, cwd=None, **env) -> list[str]:
        """Runs run.sh; returns what the stand-in was asked for, as `folder/python|argument|...`."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        done = subprocess.run([str(self.repo / "run.sh"), *argv], env={**self.env, **env}, cwd=cwd or self.folder,
                              capture_output=True, text=True)
        self.out, self.err = done.stdout, done.stderr
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        return calls.read_text().splitlines() if calls.exists() else []

    def threads(self) -> str:
        return (self.folder / "calls.threads").read_text().strip()


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.site("system", "2.13.0+cpu")
    return machine


STDLIB = "system/python3|data/prepare.py|stdlib"


def train(procs, *arguments, python="system/python3") -> str:
    return "|".join([python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={procs}", "train_gpt.py", *arguments])


# ---------------------------------------------------------------------------------------------------------------------
# Hardware, preset, data

@pytest.mark.parametrize("gpus, procs", [(1, 1), (2, 2), (3, 2), (5, 4), (8, 8), (9, 8)])
def test_gpus_decide_processes_and_preset(machine, gpus, procs):
    calls = machine.run(SMI_GPUS=str(gpus), TORCH_GPUS=str(gpus))
    assert calls == ["system/python3|data/prepare.py|fineweb", train(procs, "--preset=single" if procs == 1 else "--preset=record")]
    assert machine.threads() == "", "with GPUs the threads are torchrun's and the trainer's business"


def test_no_gpu_is_one_process_on_all_cores_with_the_cpu_preset(machine):
    calls = machine.run()
    assert calls == [STDLIB, train(1, "--preset=cpu")]
    assert machine.threads() == str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def test_torch_has_the_last_word_on_gpus(machine):
    assert machine.run(SMI_GPUS="8", TORCH_GPUS="0")[-1] == train(1, "--preset=cpu")
    assert "torch sees none" in machine.err
    assert machine.run(SMI_GPUS="8", TORCH_GPUS="2")[-1] == train(2, "--preset=record")


def test_a_torch_that_cannot_be_imported_ends_it(machine):
    (machine.folder / "sites" / "system" / "torch" / "__init__.py").write_text("raise ImportError('libcudart')")
    assert machine.run(SMI_GPUS="1", status=1) == []
    assert "libcudart" in machine.err and machine.err.endswith("run.sh: torch cannot be imported; the lines above say why\n")


def test_threads_are_shared_among_processes_unless_given(machine):
    machine.executable(machine.folder / "system" / "bin" / "nproc", "#!/bin/sh\necho 12\n")
    for procs, threads in (("1", "12"), ("2", "6"), ("8", "1")):
        assert machine.run(NPROC=procs)[-1] == train(procs, "--preset=cpu")
        assert machine.threads() == threads
    machine.run(NPROC="2", OMP_NUM_THREADS="5")
    assert machine.threads() == "5"


def test_nproc_overrides_the_gpus_and_is_checked(machine):
    assert machine.run(NPROC="1", SMI_GPUS="8", TORCH_GPUS="8")[-1] == train(1, "--preset=single")
    for bad in ("3", "0", "two", "16"):
        assert machine.run(NPROC=bad, status=1) == []
        assert machine.err == f"run.sh: NPROC={bad}: the trainer runs with 1, 2, 4 or 8 processes\n"


def test_arguments_arrive_unchanged_and_in_order(machine):
    arguments = ["--run_label=a  b*", "--x=$HOME `id` \\", "", "--y='\"'", "--x=again"]
    assert machine.run(*arguments)[-1] == train(1, "--preset=cpu", *arguments)


def test_own_preset_is_not_overridden_and_gets_its_data(machine):
    calls = machine.run("--a=1", "--preset=cpu", SMI_GPUS="8", TORCH_GPUS="8")
    assert calls == [STDLIB, train(1, "--a=1", "--preset=cpu")]
    assert machine.threads() != "", "a CPU run beside GPUs needs its threads as well"
    assert machine.run("--preset=record") == ["system/python3|data/prepare.py|fineweb", train(1, "--preset=record")]


def test_arguments_may_have_a_space_for_the_equals_sign(machine):
    env = {"SMI_GPUS": "8", "TORCH_GPUS": "8"}
    assert machine.run("--preset", "cpu", **env) == [STDLIB, train(1, "--preset", "cpu")]
    assert machine.run("--preset", "record", "--train_files", "x", **env) == [
        train(8, "--preset", "record", "--train_files", "x")]
    assert machine.run("--preset=cpu", "--preset", **env) == [train(1, "--preset=cpu", "--preset")], "the trainer refuses it"


@pytest.mark.parametrize("resume", [["--resume=logs/a.pt"], ["--resume", "logs/a.pt"]])
def test_a_checkpoint_brings_preset_and_data(machine, resume):
    assert machine.run(*resume) == [train(1, *resume)]
    assert machine.run(*resume, SMI_GPUS="2", TORCH_GPUS="2") == [train(2, *resume)]
    assert machine.run("--resume=")[-1] == train(1, "--preset=cpu", "--resume="), "empty, as it is in logs"


@pytest.mark.parametrize("gpus, preset", [("0", "cpu"), ("4", "record")])
def test_own_data_means_none_is_fetched(machine, gpus, preset):
    env = {"SMI_GPUS": gpus, "TORCH_GPUS": gpus}
    procs = max(int(gpus), 1)
    assert machine.run("--train_files=x*.bin", **env) == [train(procs, f"--preset={preset}", "--train_files=x*.bin")]
    assert machine.run(DATA_PATH="/somewhere", **env) == [train(procs, f"--preset={preset}")]


def test_data_that_is_there_is_not_prepared_again(machine):
    machine.run()
    assert machine.run() == [train(1, "--preset=cpu")]
    folder, env = machine.repo / "data" / "fineweb10B", {"SMI_GPUS": "1", "TORCH_GPUS": "1"}
    folder.mkdir()
    count = re.search(r"^FINEWEB_SHARDS = (\d+)", (ROOT / "data/prepare.py").read_text(), re.M)[1]
    shards = [folder / "fineweb_val_000000.bin"]
    shards += [folder / f"fineweb_train_{i:06d}.bin" for i in range(1, int(count) + 1)]
    for shard in shards:
        shard.touch()
    assert machine.run(**env) == [train(1, "--preset=single")]
    for shard in shards:  # an interrupted download is continued, a deleted shard fetched again
        shard.unlink()
        assert machine.run(**env) == ["system/python3|data/prepare.py|fineweb", train(1, "--preset=single")]
        shard.touch()


def test_nothing_is_trained_when_the_data_cannot_be_had(machine):
    python = machine.folder / "system" / "bin" / "python3"
    python.write_text(PYTHON.replace('"data/prepare.py stdlib") ', '"data/prepare.py stdlib") exit 7; '))
    assert machine.run(status=7) == [STDLIB]
    python.write_text(PYTHON.replace('"data/prepare.py stdlib") ', '"data/prepare.py fineweb") exit 7; '))
    assert machine.run(status=7, SMI_GPUS="1", TORCH_GPUS="1") == ["system/python3|data/prepare.py|fineweb"]


def test_a_second_start_only_starts(machine):
    machine.run()
    assert machine.run() == [train(1, "--preset=cpu")]
    assert machine.err == ""
    assert not (machine.folder / "calls.imported").exists(), "importing torch would take seconds"
    machine.run(SMI_GPUS="1", TORCH_GPUS="1")
    assert (machine.folder / "calls.imported").exists()  # proof that the line above can fail


# ---------------------------------------------------------------------------------------------------------------------
# Python

def test_only_missing_packages_are_installed(machine):
    machine.site("system", "2.11.0", ["numpy", "huggingface_hub", "triton"])
    pip = "system/python3|-m|pip|install|--quiet|--retries|1|-c|requirements|"
    assert machine.run()[0] == pip + "tiktoken"
    assert machine.run("test") == [pip + "tiktoken|pytest|pytest-xdist", "system/python3|-m|pytest|tests|-q|-n|auto|--dist|loadfile"]
    assert machine.run("--repeat", "1", status=1) == [pip + "tiktoken", "system/python3|records/repeat.py|--repeat|1"]


def test_training_goes_on_without_optional_packages_but_not_without_numpy(machine):
    machine.site("system", "2.13.0", ["numpy", "triton"])
    assert machine.run(PIP_STATUS="1")[-1] == train(1, "--preset=cpu")
    assert "could not install tiktoken huggingface_hub; going on without" in machine.err
    machine.site("system", "2.13.0", ["tiktoken", "huggingface_hub", "triton"])
    assert len(machine.run(PIP_STATUS="1", status=1)) == 1
    assert "could not install numpy; install by hand" in machine.err


IN_VENV = ".venv/python"
VENV = ["system/python3|-m|venv|.venv", f"{IN_VENV}|-m|pip|install|-r|requirements"]


@pytest.mark.parametrize("torch", [None, "2.10.1", "1.13.1+cu117"])
def test_without_a_recent_torch_a_venv_is_made_once(machine, torch):
    machine.site("system", torch)
    machine.site("dotvenv", "2.13.0")
    assert machine.run() == [*VENV, f"{IN_VENV}|data/prepare.py|stdlib", train(1, "--preset=cpu", python=IN_VENV)]
    assert ("torch older than 2.11" in machine.err) == bool(torch)
    assert machine.run() == [train(1, "--preset=cpu", python=IN_VENV)]
    assert machine.run("test", "-x") == [f"{IN_VENV}|-m|pytest|tests|-q|-n|auto|--dist|loadfile|-x"]
    with (machine.repo / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    assert machine.run() == [*VENV, train(1, "--preset=cpu", python=IN_VENV)]


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0+cu130", "2.15.0a0+git1234", "3.0.1"])
def test_a_recent_torch_is_used_as_it_is(machine, torch):
    machine.site("system", torch)
    assert machine.run("--train_files=x") == [train(1, "--preset=cpu", "--train_files=x")]


def test_a_failed_installation_is_named_and_tried_again(machine):
    machine.site("system", None)
    assert machine.run(PIP_STATUS="1", status=1) == VENV
    assert machine.err.splitlines()[-1].startswith("run.sh: could not install requirements.txt into .venv")
    assert machine.run()[:2] == VENV


def test_a_failed_venv_is_named(machine):
    machine.site("system", None)
    python = machine.folder / "system" / "bin" / "python3"
    python.write_text(PYTHON.replace('"-m venv") ', '"-m venv") exit 1; '))
    assert machine.run(status=1) == VENV[:1]
    assert "could not make .venv" in machine.err and "python3-venv" in machine.err


def test_a_python_that_is_too_old_is_named(machine):
    assert machine.run(OLD_PYTHON="yes", status=1) == []
    assert machine.err == "run.sh: no Python 3.10 or newer on PATH; install one and start again\n"


def test_python_is_looked_for_under_both_names(machine):
    machine.site("active", None)
    machine.python(machine.folder / "active" / "bin" / "python3")
    (machine.folder / "system" / "bin" / "python3").unlink()
    path = f"{machine.folder}/active/bin:{machine.env['PATH']}"  # python3 without torch, python with
    assert machine.run(PATH=path)[-1] == train(1, "--preset=cpu", python="system/python")


@pytest.fixture
def virtualenv(machine):
    folder = machine.folder / "active env"
    for name in ("python", "python3"):
        machine.python(folder / "bin" / name)
    return {"VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin:{machine.env['PATH']}"}


def test_an_active_virtualenv_comes_before_all_else(machine, virtualenv):
    machine.site("active", "2.12.0")
    assert machine.run(**virtualenv)[-1] == train(1, "--preset=cpu", python="active env/python")


def test_an_active_virtualenv_without_torch_gets_the_requirements(machine, virtualenv):
    machine.site("active", None, [])
    calls = machine.run(**virtualenv)
    assert calls[0] == "active env/python|-m|pip|install|-r|requirements"
    assert calls[-1] == train(1, "--preset=cpu", python="active env/python")
    assert not (machine.repo / ".venv").exists()
    assert machine.run(PIP_STATUS="1", status=1, **virtualenv) == calls[:1]
    assert "could not install requirements.txt into" in machine.err


def test_an_active_virtualenv_with_an_old_torch_is_left_alone(machine, virtualenv):
    machine.site("active", "2.4.0")
    machine.site("system", None)
    machine.site("dotvenv", "2.13.0")
    calls = machine.run(**virtualenv)
    assert calls[:2] == ["active env/python|-m|venv|.venv", VENV[1]]
    assert calls[-1] == train(1, "--preset=cpu", python=IN_VENV)
    assert "active env/bin/python has a torch older than 2.11 and is left as it is; using .venv" in machine.err


def test_a_gpu_gets_the_versions_that_were_measured(machine, virtualenv):
    """A GPU that comes later, too; in an active virtualenv; where packages are missing."""
    log = next(ROOT.glob("records/2026-11-21_h100/*.txt")).read_text()
    measured = dict(re.findall(r"^Running (?:Py)?([Tt]orch|Triton) (?:version )?([\d.]+)", log.lower(), re.M | re.I))

    def installed(**env):
        file = machine.folder / "calls.installed"
        file.unlink(missing_ok=True)
        machine.run("--preset=cpu", **env)
        lines = re.findall(r"^([\w-]+)==([\d.]+)", file.read_text(), re.M) if file.exists() else ()
        assert not lines or {"torch", *PACKAGES} == {name.replace("pytest-", "") for name, _ in lines}
        return {name: version for name, version in lines if name in measured}

    machine.site("system", None)
    machine.site("dotvenv", "2.11.0")
    usual = installed()
    assert usual.keys() == measured.keys() and usual.items().isdisjoint(measured.items()) and installed() == {}
    assert installed(SMI_GPUS="1") == measured and installed(SMI_GPUS="2") == {}
    assert installed() == usual
    (machine.folder / "nvidia0").touch()
    assert installed() == measured
    machine.site("active", None)
    assert installed(**virtualenv) == measured
    machine.site("active", "2.12.0", ["numpy", "triton"])
    assert installed(**virtualenv) == measured


# ---------------------------------------------------------------------------------------------------------------------
# Other ways to call it

def test_repeated_runs_are_runs_of_their_own(machine):
    """Each label with its own preset and data; --repeat may stand anywhere."""
    argv = "--seed 3 --repeat 1 --label a --preset cpu --label b --train_files=x".split()
    log = r"""mkdir -p logs; for a in "$@"; do
      case "$a" in --run_label=*) a=${a#*=}; printf "run_label: $a\nseed: 3\n" >"logs/$a.txt" ;; esac; done"""
    assert machine.run(*argv, TRAIN=log, SMI_GPUS="2", TORCH_GPUS="2") == [
        "|".join(["system/python3|records/repeat.py", *argv]), STDLIB,
        train(1, "--run_label=a", "--seed=3", "--log_dir=logs", "--preset=cpu"),
        train(2, "--preset=record", "--run_label=b", "--seed=3", "--log_dir=logs", "--train_files=x")]
    assert machine.out == "-- a=logs/a.txt b=logs/b.txt\n"


def test_runs_side_by_side_find_the_data_there(machine):
    argv = "--repeat", "1", "--label", "a", "--parallel", "--label", "b"
    _, first, *runs = machine.run(*argv, CUDA_VISIBLE_DEVICES="0,1", status=1)
    assert first == STDLIB and sorted(runs) == [
        train(1, "--preset=cpu", f"--run_label={label}", "--seed=1", "--log_dir=logs") for label in "ab"]
    assert machine.run("data", "--preset", "record") == ["system/python3|data/prepare.py|fineweb"] and machine.run("data") == []


def test_rerun_gets_the_arguments_after_it(machine):
    for argv in ["--rerun", "logs/my log.txt", "--x=1"], ["--rerun=logs/my log.txt", "--x=1"]:
        assert machine.run(*argv, SMI_GPUS="1") == ["system/python3|records/rerun.py|logs/my log.txt|--x=1"]


def test_test_subcommand_passes_its_arguments(machine):
    assert machine.run("test", "-k", "a or b") == ["system/python3|-m|pytest|tests|-q|-n|auto|--dist|loadfile|-k|a or b"]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_does_nothing_else(machine, flag):
    machine.site("system", None)
    assert machine.run(flag) == []
    for word in ("./run.sh test", "--repeat N", "NPROC=", "--train_files", "DATA_PATH"):
        assert word in machine.out


def test_it_works_from_any_folder(machine, tmp_path):
    (tmp_path / "other").mkdir()
    machine.run(cwd=tmp_path / "other", CDPATH=str(machine.folder))
    assert (machine.repo / "data" / "stdlib").is_dir() and not (tmp_path / "other" / "data").exists()


@pytest.mark.parametrize("lines, exit_status, good", [
    ("final_val_loss: 2.5\npeak_memory: 3", 0, True),
    ("step: 3\nfinal_val_loss was never reached", 0, False),
    ("final_val_loss: 2.5", 3, False),
])
def test_ci_fails_unless_every_run_ends_with_a_loss(machine, lines, exit_status, good):
    """And runs the tests first, then one process, then two."""
    calls = machine.folder / "ci calls"
    machine.executable(machine.repo / "run.sh", f"""#!/bin/bash
echo "${{NPROC:-}} $1" >>"{calls}"
[ "$1" = test ] && exit
echo "{lines}"
exit {exit_status}
""")
    machine.executable(machine.repo / ".ci" / "run", (ROOT / ".ci" / "run").read_text())
    done = subprocess.run([str(machine.repo / ".ci" / "run")], env=machine.env, cwd=machine.folder, capture_output=True)
    assert (done.returncode == 0) == good
    assert calls.read_text().splitlines() == [" test", "1 --preset=cpu", "2 --preset=cpu"][:3 if good else 2]
