"""The READMEs keep their word: every command is checked (a new one needs an entry in CHECKED), the worked examples are applied and
trained, and knobs, messages, links and numbers are those of the sources."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.run import get_args_parser

import test_guard
import train_gpt as T
from oracles import write_shard
from records import check

ROOT = Path(T.__file__).parent
README = (ROOT / "README.md").read_text()
WITH_COMMANDS = "README.md", "data/README.md", "records/README.md"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SMALL = ["--model_dim=48", "--micro_batches=2", "--val_tokens=1024", "--val_batch_tokens=512", "--val_every=2", "--sample_tokens=5"]
STEPS = ["--scheduled_steps=3", "--extension_steps=0"]


def code(text, language):
    """The fenced blocks of a language, without the indentation of lists."""
    return [re.sub("(?m)^" + indent, "", block) for indent, block in re.findall(rf"(?ms)^( *)```{language}\n(.*?)^\1```", text)]


def prose(text):
    """What is not in fenced blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```", "", text)


def commands(text):
    """Every line of the bash blocks, and inline code that is a command; without comments, on one line each."""
    lines = [re.sub(r"\s#\s.*", "", line) for block in code(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`((?:python|torchrun|pip|docker|\./run\.sh)\s[^`]+)`", prose(text))
    return {" ".join(line.split()) for line in lines + inline} - {""}


# ---- Commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder for DATA_PATH with a small corpus in the place of Python's library, and for logs."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "data/stdlib").mkdir(parents=True)
    for name, seed, count in ("train", 1, 24000), ("val", 2, 1025):
        tokens = np.random.default_rng(seed).integers(97, 123, count)
        tokens[::60] = 256
        write_shard(folder / f"data/stdlib/stdlib_{name}_000000.bin", tokens)
    return folder


def execute(command, corpus, *more, cwd=ROOT, **env):
    """stdout of `python ...` as typed, with more arguments."""
    argv = [sys.executable, *shlex.split(command)[1:], *more]
    done = subprocess.run(argv, cwd=cwd, env=ENV | {"DATA_PATH": str(corpus)} | env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(command, corpus, tmp_path, monkeypatch):
    """A small run; its output has the lines that the README shows."""
    out = execute(command, corpus, *SMALL, *STEPS, "--stage1.batch_tokens=1024", f"--log_dir={tmp_path}")
    shown = code(README, "text")[0]
    keys = [re.findall(r"^(\w+): \S+$|^(kernels|tokens per|peak memory|sample)\b", text, re.M) for text in (out, shown)]
    assert keys[0] == keys[1] and len(keys[0]) > 10
    shape = [re.sub(r"\d[\d.]*", "0", re.search(r"^step:.*val_loss.*$", text, re.M)[0]) for text in (out, shown)]
    assert shape[0] == shape[1]
    first, last = re.search(r"^kernels: (.*) \.\.\. (\S+)$", shown, re.M).groups()
    assert re.search(rf"^kernels: {first} .* {last}$", out, re.M)


def checks(command, corpus, tmp_path, monkeypatch):
    """The table of --check; for the CPU with the rows that the README shows."""
    monkeypatch.setenv("DATA_PATH", str(corpus))
    for name in "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES":  # set by the trainer, so put back afterwards
        monkeypatch.setenv(name, os.environ.get(name, ""))
    argv, cpu = shlex.split(command)[2:], "--preset=cpu" in command
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = T.main([*argv, *(["--val_tokens=1024", "--val_batch_tokens=512"] if cpu else [])])
    shown = next(block for block in code(README, "text") if block.startswith("what "))
    head, rows = zip(*((text.splitlines()[0], re.findall(r"^(\S[\w ]*?) *\|", text, re.M)) for text in (out.getvalue(), shown)))
    assert head[0] == head[1] and rows[0] == rows[1] and (status == 0 or not cpu), out.getvalue()


def guard(command, corpus, tmp_path, monkeypatch):
    """The program in test_guard.py, without the run, which its tests make; it writes the same file again."""
    stored = json.loads(test_guard.STORED.read_text())
    curves = iter([curve for curve in stored.values() if isinstance(curve, dict)] if "--write" in command else [stored["record74"]])
    monkeypatch.setattr(test_guard, "curve", lambda args: iter(next(curves)["losses"]))
    monkeypatch.setattr(test_guard, "STORED", copy := tmp_path / "guard.json")
    copy.write_bytes((ROOT / "tests/guard.json").read_bytes())
    with contextlib.redirect_stdout(io.StringIO()) as out:
        test_guard.main(shlex.split(command)[2:])
    assert "difference +0.0e+00" in out.getvalue() and copy.read_bytes() == (ROOT / "tests/guard.json").read_bytes()


def help_of(command, corpus, tmp_path, monkeypatch):
    assert "--out" in execute(command, corpus)


def caches(command, corpus, tmp_path, monkeypatch):
    """The three lines about caches, in a home of their own."""
    lines = next(block for block in code(README, "bash") if "TRITON_CACHE_DIR" in block)
    assert command in commands(f"```bash\n{lines}```")
    script = "set -e\n" + lines.replace("\ntar -c", '\nmkdir -p "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR/x"\ntar -c')
    script = script.replace("\ntar -x", "\nmv ~/.cache ~/old\nmkdir ~/.cache\ntar -x")
    script += 'ls -d "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR/x"'
    out = subprocess.check_output(["bash", "-c", script], cwd=tmp_path, env=ENV | {"HOME": str(tmp_path)}, text=True)
    assert out.splitlines() == [f"{tmp_path}/.cache/speedrun/inductor", f"{tmp_path}/.cache/speedrun/triton/x"]


def parsed(command, corpus, tmp_path, monkeypatch):
    """Needs GPUs: launcher and trainer understand the arguments, for as many processes as it starts."""
    argv = shlex.split(command.replace(".venv/bin/python -m torch.distributed.run ", "torchrun "))
    if argv[0] == "torchrun":
        options = get_args_parser().parse_args(argv[1:])
        assert options.training_script == "train_gpt.py"
        T.parse_config(options.training_script_args, int(options.nnodes.split(":")[0]) * int(options.nproc_per_node))
    else:
        assert argv[0] == "./run.sh"
        for preset, world in ("single", 1), ("record", 8):
            T.parse_config([f"--preset={preset}", *argv[1:]], world)


def container(command, corpus, tmp_path, monkeypatch):
    """Needs a daemon: the lines fit the recipe, and that fits the repository."""
    (recipe,) = code(README, "dockerfile")
    steps = dict(line.split(maxsplit=1) for line in recipe.splitlines())
    assert re.fullmatch(r"python:3\.\d+\.\d+-\w+", steps["FROM"]) and steps["CMD"] == '["./run.sh"]'
    assert (ROOT / steps["COPY"].split()[0]).exists() and steps["RUN"].endswith(steps["COPY"].split()[1] + steps["COPY"].split()[0])
    choice = re.search(r"sed '.*?' requirements.txt", (ROOT / "run.sh").read_text())[0]  # of the versions for a GPU
    assert f"{choice} >.venv/requirements.txt" in CHECKED
    assert steps["RUN"].startswith(choice.replace("sed ", "sed -i ").replace(" req", " /tmp/req") + " && pip install ")
    folder = steps["WORKDIR"]
    places = re.findall(r"(\w+)_CACHE_DIR=(\S+)/data/cache/", steps["ENV"])
    assert places == [("TORCHINDUCTOR", folder), ("TRITON", folder)]
    assert "data/*/" in (ROOT / ".gitignore").read_text().split()  # the cache and all data
    argv = shlex.split(command)
    if argv[1] == "build":
        assert argv[2:] == ["-t", "gpt-speedrun", "."]
    else:
        image = argv.index("gpt-speedrun")
        assert argv[1] == "run" and argv[image - 2:image] == ["-v", "$PWD:" + folder]
        assert not argv[image + 1:] or shlex.join(argv[image + 1:]) in CHECKED


EVALUATE, TRACE = "test_evaluate.py::test_commands_of_the_readme", "test_trace.py::test_commands_of_the_readme"
VENV, COMPARE = "test_run_sh.py::test_without_a_recent_torch_a_venv_is_made_once", "test_compare.py::test_commands_in_the_texts"
DATA = "test_prepare.py::test_commands_of_the_other_readme"
OWN = "test_prepare.py::test_own_text_to_a_sample_in_the_two_commands_of_the_readme"
REPEAT = "test_repeat.py::test_commands_with_repeat_in_the_readme"
CHECKED = {  # command -> what checks it: a function above, another test, or .ci/run
    "./run.sh": "test_run_sh.py::test_gpus_decide_processes_and_preset",
    "./run.sh --scheduled_steps=145 --extension_steps=4": parsed,
    "./run.sh --preset=cpu": ".ci/run",
    "./run.sh test": ".ci/run",
    "./run.sh --help": "test_run_sh.py::test_help_does_nothing_else",
    "python3 -m venv .venv": VENV,
    "sed 's/.*# GPU: //' requirements.txt >.venv/requirements.txt": "test_run_sh.py::test_a_gpu_gets_the_versions_that_were_measured",
    ".venv/bin/python -m pip install -r .venv/requirements.txt": VENV,
    "pip install -r requirements.txt": VENV,
    ".venv/bin/python data/prepare.py fineweb": DATA,
    ".venv/bin/python -m torch.distributed.run --standalone --nproc_per_node=8 train_gpt.py": parsed,
    "torchrun --standalone --nproc_per_node=8 train_gpt.py": parsed,
    "torchrun --standalone --nproc_per_node=1 train_gpt.py --preset=single": parsed,
    **{f"torchrun --nnodes=2 --node_rank={rank} --nproc_per_node=8 --master_addr=first --master_port=29500 train_gpt.py": parsed
       for rank in (0, 1)},
    "python train_gpt.py --preset=cpu": run,
    "python train_gpt.py --check": checks,
    "python train_gpt.py --preset=cpu --check": checks,
    "python train_gpt.py --help": "test_config.py::test_help_lists_every_knob",
    "docker build -t gpt-speedrun .": container,
    'docker run --rm --gpus=all --ipc=host -v "$PWD:/speedrun" gpt-speedrun': container,
    'docker run --rm -v "$PWD:/speedrun" gpt-speedrun ./run.sh --preset=cpu': container,
    "export TORCHINDUCTOR_CACHE_DIR=~/.cache/speedrun/inductor TRITON_CACHE_DIR=~/.cache/speedrun/triton": caches,
    "tar -cJf caches.tar.xz -C ~/.cache speedrun": caches,
    "tar -xJf caches.tar.xz -C ~/.cache": caches,
    "python data/prepare.py fineweb": DATA,
    "python data/prepare.py stdlib": DATA,
    "python data/prepare.py text my_folder --out mine": OWN,
    "python data/prepare.py text --help": help_of,
    "./run.sh --preset=cpu '--train_files=data/mine/mine_train_*.bin' '--val_files=data/mine/mine_val_*.bin' --val_tokens=8192"
    " --val_batch_tokens=8192 --sample_prompt=": OWN,
    "./run.sh --repeat 3 --label base --label low --muon_lr=0.02": REPEAT,
    "./run.sh --repeat 4 --parallel --label base --label low --muon_lr=0.02": REPEAT,
    "./run.sh --rerun logs/run_1.txt": "test_run_sh.py::test_rerun_gets_the_arguments_after_it",
    "./run.sh --repeat": REPEAT,  # named, not to be typed
    "python tests/bench_kernels.py": "test_bench.py::test_cases_run",
    "python tests/test_guard.py": guard,
    "python tests/test_guard.py --write": guard,
    "python train_gpt.py --preset=cpu --save_every=48": EVALUATE,
    "CKPT=$(ls -t logs/*/state_step*.pt | head -n 1)": EVALUATE,
    'python train_gpt.py --sample="$CKPT" --prompt="def " --tokens=300': EVALUATE,
    'python records/evaluate.py "$CKPT" --export=model.safetensors': EVALUATE,
    'python records/evaluate.py "$CKPT" --hellaswag --validate=false': EVALUATE,
    "python train_gpt.py --preset=cpu --profile=4:2": TRACE,
    "python records/trace.py logs/run_*_rank0.json.gz": TRACE,
    "python records/compare.py base='logs/base_*.txt' wide='logs/wide_*.txt'": COMPARE,
    "python records/compare.py base='logs/base_*.txt' wide='logs/wide_*.txt' --markdown --plot=logs/loss.svg": COMPARE,
    "python records/compare.py --diff logs/base_1.txt logs/wide_1.txt": COMPARE,
    "python records/compare.py --exchange=base,long base='logs/base_*.txt' long='logs/long_*.txt' wide='logs/wide_*.txt'": COMPARE,
    "python records/compare.py -a-b=logs/none +a-b=logs/a -a+b=logs/b +a+b=logs/both": COMPARE,
}


def test_every_command_has_a_check():
    found = set().union(*(commands((ROOT / name).read_text()) for name in WITH_COMMANDS))
    assert {"not in CHECKED": found - CHECKED.keys(), "gone": CHECKED.keys() - found} == {"not in CHECKED": set(), "gone": set()}


@pytest.mark.parametrize("command", CHECKED)
def test_command(command, corpus, tmp_path, monkeypatch):
    how = CHECKED[command]
    if how == ".ci/run":
        assert command in (ROOT / how).read_text()
    elif isinstance(how, str):
        file, test = how.split("::")
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text()
    else:
        how(command, corpus, tmp_path, monkeypatch)


# ---- Worked examples -------------------------------------------------------------------------------------------------

DIFFS = code(README, "diff")


def apply(diff, folder):
    """A diff whose hunks have no line numbers: what each takes out must be there exactly once."""
    for name, hunks in re.findall(r"^--- a/.*\n\+\+\+ b/(.*)\n((?:[ @+-].*\n)*)", diff, re.M):
        text = "\n" + (folder / name).read_text()
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.M)[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("\n" + "".join(line[1:] for line in lines if line[0] in keep) for keep in (" -", " +"))
            assert text.count(old) == 1 and old != new, f"{name} has this {text.count(old)} times:{old}"
            text = text.replace(old, new)
        (folder / name).write_text(text[1:])


@pytest.fixture
def copy(tmp_path):
    for folder in "data", "records":
        (tmp_path / folder).mkdir()
    for file in (path for folder in (".", "data", "records") for path in (ROOT / folder).glob("*.py")):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    return tmp_path


def test_worked_examples(corpus, copy):
    """All three in one copy, in the interpreter with the new kernel, and once more with the kernel that was there."""
    assert len(DIFFS) == 3
    for diff in DIFFS:
        apply(diff, copy)
    (choice,) = re.findall(r"`(--kernels=transpose_copy:\w+)`", README)
    own_stage = re.search(r"^\+ *Stage\((\d+), ", DIFFS[2], re.M)[1]
    args = [*SMALL, "--save=true", "--scheduled_steps=4", "--extension_steps=1",
            *(f"--stage{i}.batch_tokens=512" for i in (1, 2, 4, 5))]  # the new one as it is

    def trained(logs, *more):
        out = execute("python train_gpt.py --preset=cpu", corpus, *args, *more, f"--log_dir={logs}", cwd=copy, TRITON_INTERPRET="1")
        (log,), (saved,) = (copy / logs).glob("*.txt"), (copy / logs).glob("*/*.pt")
        return out, log.read_text().rpartition("Running Python")[2], torch.load(saved, weights_only=True)

    with ThreadPoolExecutor(2) as pool:
        (out, log, state), (_, _, without) = pool.map(lambda run: trained(*run), [("new", choice), ("old",)])

    gain = state["model"]["final_gain"]
    assert gain.shape == (48,) and gain.abs().min() > 0 and {"m", "v"} <= state["optimizer"]["final_gain"].keys()
    assert re.search(rf"^kernels: .* {choice.partition('=')[2]} ", out, re.M)
    assert all(torch.equal(x, without["model"][label]) for label, x in state["model"].items())
    assert f"\nstage3.batch_tokens: {own_stage}\n" in log and "\nstage5.batch_tokens: 512\n" in log  # five stages of one step each
    assert f"\ntokens per micro-batch: 256 256 {int(own_stage) // 2} 256 256;" in out and "\nstep:5/5 val_loss:" in out
    assert f"\ntokens: {4 * 512 + int(own_stage)}\n" in out


def test_the_new_kernel_transposes(copy):
    """Shapes that its tiles do and do not divide."""
    apply(DIFFS[1], copy)
    program = """if True:
        import torch, triton_kernels as tk
        for shape in (1, 1), (64, 128), (70, 201):
            x = torch.randn(shape).bfloat16()
            tk.IMPLEMENTATIONS["transpose_copy"]["tiled"](x, y := torch.full(shape[::-1], torch.nan, dtype=x.dtype))
            assert torch.equal(y, x.t())"""
    subprocess.run([sys.executable, "-c", program], cwd=copy, env=ENV | {"TRITON_INTERPRET": "1"}, check=True)


def test_a_parameter_without_a_row_stops_the_start():
    params = {label: torch.nn.Parameter(torch.zeros(1)) for label in [*(row.label for row in T.param_table(T.PRESETS["cpu"].model)), "final_gain"]}
    with pytest.raises(ValueError, match="final_gain"):
        T.NorMuonAndAdam(params, T.PRESETS["cpu"], T.Runtime(0, 1, torch.device("cpu")), None)


def test_an_example_that_no_longer_fits_is_noticed(copy):
    diff = DIFFS[0].replace("smear_lambda", "no_such_lambda")
    with pytest.raises(AssertionError, match="no_such_lambda"):
        apply(diff, copy)


# ---- The rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_knobs_exist(name):
    """Whatever stands in inline code and begins with two dashes."""
    mentioned = set(re.findall(r"(?<![\w-])--(\w[\w.]*)", " ".join(re.findall(r"`[^`]+`", prose((ROOT / name).read_text())))))
    scripts = "run.sh", "data/prepare.py", "tests/bench_kernels.py", "tests/test_guard.py", *(ROOT / "records").glob("*.py")
    sources = "\n".join((ROOT / script).read_text() for script in scripts)
    launcher = {option.removeprefix("--") for action in get_args_parser()._actions for option in action.option_strings}
    known = {*T.flatten(T.PRESETS["record"]), "preset", "check", "help", *launcher, *re.findall(r"--(\w+)", sources)}
    known |= {f"layer{i}" for i in range(12)} | {f"layer{i}.{field}" for i in range(12) for field in vars(T.Layer())}
    known |= {f"stage{i}" for i in range(1, 6)}  # the fifth is that of the worked example
    assert mentioned and {knob for knob in mentioned if knob.rstrip(".") not in known} == set()


def test_messages_are_those_of_the_sources():
    """The first column of the table of troubles."""
    section = README.partition("## When something goes wrong")[2].partition("\n## ")[0]
    messages = [text for row in re.findall(r"^\| (.*?) \| ", section, re.M) for text in re.findall(r"`(.+?)`", row)]
    files = ("train_gpt.py", "triton_kernels.py", *(f"data/{name}.py" for name in ("files", "knobs", "loader", "checkpoint", "log")), "run.sh",
             *(f"records/{script}.py" for script in ("check", "evaluate", "compare")))
    sources = re.sub(r'"\s*f?"', "", "".join((ROOT / file).read_text() for file in files))  # parts of one message joined
    assert len(messages) > 12 and [text for text in messages if text not in sources] == []


RECORDS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("records/*/README.md"))]


@pytest.mark.parametrize("file", [*WITH_COMMANDS, *RECORDS])
def test_links_lead_somewhere(file):
    def anchors(path):
        headings = re.findall(r"^#+ (.*)$", prose(path.read_text()), re.M)
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

    text, here = (ROOT / file).read_text(), ROOT / file
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = here.parent / name if name else here
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_numbers_of_the_readme():
    """That follow from the sources: memory of --preset=single, length and estimated time of the schedule."""
    text = " ".join(README.split())
    sentence = r"8 from (\d+) MiB on, 16 from (\d+), 32 from (\d+), 64 from (\d+), below that 128, and (\d+) at least"
    thresholds = list(map(int, re.search(sentence, text).groups()))
    configs = (T.parse_config(["--preset=single", f"--micro_batches={n}"]) for n in (8, 16, 32, 64, 128))
    estimates = [T.estimate_memory(config, 1) for config in configs]
    assert thresholds == pytest.approx([*(most for _, most in estimates[:-1]), estimates[-1][0]], abs=1)
    schedule = T.PRESETS["record"].schedule
    tokens = np.diff(T.stage_starts(schedule)) @ [stage.batch_tokens for stage in schedule.stages]
    assert f"{schedule.scheduled_steps} + {schedule.extension_steps} steps with {tokens / 1e6:.0f} million tokens" in text
    minutes = float(re.search(r"takes ([\d.]+) µs per token, so", text)[1]) * tokens / 60e6
    assert f"so {minutes:.1f} minutes" in text
    for rate, hours in ((250, "0.6"), (150, "1.0")):
        assert f"| {hours} h: an estimate | {rate} assumed" in text
        assert minutes * 790 / rate * 1.21 / 60 == pytest.approx(float(hours), abs=0.05)


def test_the_quick_start_is_on_the_first_screen():
    assert README.count("\n", 0, README.index("./run.sh --preset=cpu")) < 40
