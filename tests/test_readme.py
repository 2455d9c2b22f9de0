"""Every command of the READMEs is parsed or executed, the worked examples train; knobs, messages and paths exist."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.run import get_args_parser

import test_guard
import train_gpt as T
from data import prepare
from data.run.config import flatten
from data.run.memory import needed_memory
from data.run.program import UserError
from oracles import write_library
from records import compare, evaluate, repeat, rerun

ROOT = Path(T.__file__).parent
README, GUIDE = ((ROOT / name).read_text() for name in ("README.md", "records/guide.md"))
WITH_COMMANDS = "README.md", "data/README.md", "records/README.md", "records/guide.md", "records/techniques.md"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SMALL = ["--model_dim=48", "--micro_batches=2", "--val_tokens=1024", "--val_batch_tokens=512", "--val_every=2",
         "--sample_tokens=5"]


def code(text, language):
    """The fenced blocks of a language, without the indentation of lists."""
    blocks = re.findall(rf"(?ms)^( *)```{language}\n(.*?)^\1```", text)
    return [re.sub("(?m)^" + indent, "", block) for indent, block in blocks]


def prose(text):
    """The text without its fenced blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```", "", text)


def commands(text):
    """Every line of the bash blocks, and inline code that is a command; without comments, each on one line."""
    lines = [line for block in code(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"(^|\s)#\s.*", "", line) for line in lines]
    inline = re.findall(r"`((?:python|torchrun|pip|docker|\./run\.sh)\s[^`]+)`", prose(text))
    return {" ".join(line.split()) for line in lines + inline} - {""}


COMMANDS = sorted(set().union(*(commands((ROOT / name).read_text()) for name in WITH_COMMANDS)))
SHELL = {  # commands that neither Python nor run.sh parses; the tests of run.sh execute some of their kind
    "python3 -m venv .venv", ".venv/bin/python -m pip install -r requirements.txt", "pip install -r requirements.txt",
    "tar -cJf caches.tar.xz -C ~ .triton/cache", "tar -xJf caches.tar.xz -C ~",
    "CKPT=$(ls -t logs/*/state_step*.pt | head -n 1)"}


@pytest.fixture
def no_work(monkeypatch):
    """Programs parse their arguments, but fetch and prepare nothing."""
    monkeypatch.setattr(evaluate, "fetch_hellaswag", lambda: "hellaswag.jsonl")
    for name in "fineweb", "text", "stdlib":
        monkeypatch.setattr(prepare, name, lambda **options: None)


def parse_trainer(argv, world=1):
    if "--help" in argv or any(argument.startswith(("--sample=", "--resume=", "--init_from=")) for argument in argv):
        return T.main(argv)
    T.parse_config([argument for argument in argv if argument != "--check"], world)


def parse_prepare(argv):
    try:
        assert prepare.main(argv) == 0
    except SystemExit as end:
        assert "--help" in argv and end.code == 0


def run_guard(argv):
    """With the stored curves in place of runs, the program shows no difference."""
    stored, written = test_guard.STORED.read_text(), []
    curves = [curve["losses"] for curve in json.loads(stored).values() if isinstance(curve, dict)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_guard, "STORED", SimpleNamespace(read_text=lambda: stored, write_text=written.append))
        patch.setattr(test_guard, "curve", lambda args: iter(curves.pop(0)))
        test_guard.main(argv)
    assert written == ([stored] if argv else [])


def parse_run_sh(argv):
    if f"\n./run.sh {' '.join(argv)}" in (ROOT / "run.sh").read_text():  # a command as --help has it
        return
    if argv[0] == "test":
        return [(ROOT / path).resolve(strict=True) for path in argv[1:]]
    if argv[0] == "data":  # the data of the run with the other arguments
        argv = argv[1:]
    if argv[0] == "--rerun":
        return rerun.parse(argv[1:])
    if argv[0] in ("--repeat", "--race"):
        for arguments in repeat.parse(argv)[-1].values():
            T.parse_config(arguments)
    else:
        for preset, world in ("single", 1), ("record", 8):
            parse_trainer([f"--preset={preset}", *argv], world)


def parse_torchrun(argv):
    options = get_args_parser().parse_args(argv)
    assert options.training_script == "train_gpt.py"
    parse_trainer(options.training_script_args, int(options.nnodes.split(":")[0]) * int(options.nproc_per_node))


PARSERS = {
    "./run.sh": parse_run_sh, "docker": list, "torchrun": parse_torchrun, "train_gpt.py": parse_trainer,
    "data/prepare.py": parse_prepare, "records/evaluate.py": evaluate.main, "records/compare.py": compare.parse,
    "records/trace.py": list, "records/pack.py": list, "tests/bench_kernels.py": list, "tests/test_guard.py": run_guard}


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, no_work, capsys):
    """Its program exists and understands the arguments. A new program needs an entry in PARSERS."""
    program, *argv = shlex.split(re.sub(r"^\.venv/bin/python -m torch\.distributed\.run", "torchrun", command))
    if command in SHELL:
        return
    if program in ("python", ".venv/bin/python"):
        program, *argv = argv
    assert "/" not in program and not program.endswith(".py") or (ROOT / program).exists()
    try:
        failed = PARSERS[program](argv) == 1
    except UserError as error:
        failed = not print(f"error: {error}", file=sys.stderr)
    out, err = capsys.readouterr()
    assert err.startswith("error: $CKPT is no checkpoint") if "$CKPT" in command else not failed, err
    assert program != "tests/test_guard.py" or "difference +0.0e+00" in out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder for DATA_PATH with a small corpus in place of Python's library."""
    return write_library(tmp_path_factory.mktemp("readme"))


def execute(command, corpus, *more, cwd=ROOT, **env):
    """stdout of `python ...` as typed, with more arguments."""
    argv = [sys.executable, *shlex.split(command)[1:], *more]
    done = subprocess.run(argv, cwd=cwd, env=ENV | {"DATA_PATH": str(corpus)} | env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_output(corpus, tmp_path):
    """A small run prints the lines that the guide shows, --check the rows of its table. Its table of MiB is today's."""
    def parts(text, first):
        line = re.sub(r"\d[\d.]*", "0", re.search(first, text, re.M)[0])
        return line, re.findall(r"^(\w+): \S+$|^(kernels|tokens per|peak memory|sample)\b|^(\S[\w ]*?) *\|", text, re.M)
    run = execute("python train_gpt.py --preset=cpu", corpus, *SMALL, "--scheduled_steps=3", "--extension_steps=0",
                  "--stage1.batch_tokens=1024", f"--log_dir={tmp_path}")
    check = execute("python train_gpt.py --preset=cpu --check", corpus, "--val_tokens=1024", "--val_batch_tokens=512")
    table = next(block for block in code(GUIDE, "text") if block.startswith("what "))
    for out, shown, first in (run, code(GUIDE, "text")[0], r"^step:.*val_loss.*$"), (check, table, r"\A.*"):
        assert parts(out, first) == parts(shown, first) and len(parts(shown, first)[1]) > 8
    table = re.findall(r"^\| (\d+)" + r" \| (\d{4,5})" * 5 + r" \|$", GUIDE, re.M)
    memory = [needed_memory(T.parse_config(f"--preset=single --micro_batches={row[0]} --ngram_rows={n},{n}".split()), 1)
              for row in table for n in ("5e5", "1e6", "2e6", "4e6", "8e6")]
    assert len(table) == 6 and [f"{mib:.0f}" for _, mib in memory] == [mib for row in table for mib in row[1:]]


DIFFS = code(README + GUIDE, "diff")  # a parameter, an activation, Adam for a bank, a kernel, a stage, a preset


@pytest.fixture
def copy(tmp_path):
    for folder in ".", "data", "data/run", "records":
        (tmp_path / folder).mkdir(exist_ok=True)
        for file in (ROOT / folder).glob("*.py"):
            shutil.copy(file, tmp_path / folder)
    return tmp_path


def test_worked_examples(corpus, copy):
    """All in one copy, once with the new kernel and once with the old kernel; and the lines of Python."""
    assert len(DIFFS) == 6
    for diff in DIFFS:
        subprocess.run(["git", "apply"], cwd=copy, input=diff, text=True, check=True,
                       env=ENV | {"GIT_CEILING_DIRECTORIES": str(copy.parent)})
    (choice,) = re.findall(r"`(--kernels=transpose_copy:\w+)`", GUIDE)
    new_tokens = int(re.search(r"^\+ *Stage\((\d+), ", DIFFS[4], re.M)[1])
    args = [*SMALL, "--save=true", "--scheduled_steps=4", "--extension_steps=1",
            *(f"--stage{i}.batch_tokens=512" for i in (1, 2, 4, 5))]  # all but the new stage
    def trained(logs, *more):
        out = execute("python train_gpt.py --preset=cpu", corpus, *args, *more, f"--log_dir={logs}", cwd=copy,
                      TRITON_INTERPRET="1")
        (log,), (saved,) = (copy / logs).glob("*.txt"), (copy / logs).glob("*/*.pt")
        return out, log.read_text().rpartition("Running Python")[2], torch.load(saved, weights_only=True)
    with ThreadPoolExecutor(2) as pool:
        (out, log, state), (_, _, without) = pool.map(lambda run: trained(*run), [("new", choice), ("old",)])
    assert "  --muon_lr=0.02 " in execute("python train_gpt.py --preset=mine --help", corpus, cwd=copy)
    gain = state["model"]["final_gain"]
    assert gain.shape == (48,) and gain.abs().min() > 0
    assert {"m", "v"} <= state["optimizer"]["final_gain"].keys()
    assert state["optimizer"]["vo_bank"].keys() == {"m", "v", "average"}  # not the state of Muon
    assert state["model"]["vo_bank"].float().norm(dim=(2, 3)).min() > 1  # it began at random
    saved, = (copy / "new").glob("*/*.pt")
    program = re.sub(r'"logs/[^"]*"', repr(str(saved)), next(x for x in code(GUIDE, "python") if "generate" in x))
    text, ids = execute(f"python -c {shlex.quote(program)}", corpus, cwd=copy).rsplit("\n[", 1)
    assert text.startswith("def ") and len(ids.split(",")) == int(re.search(r"count=(\d+)", program)[1])
    assert re.search(rf"^kernels: .* {choice.partition('=')[2]} ", out, re.M)
    assert all(torch.equal(x, without["model"][label]) for label, x in state["model"].items())
    assert f"\nstage3.batch_tokens: {new_tokens}\n" in log and "\nstage5.batch_tokens: 512\n" in log
    assert f"\ntokens: {4 * 512 + new_tokens}\n" in out and "\nstep:5/5 val_loss:" in out  # one step of each stage


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_knobs_exist(name):
    """Every word in inline code that begins with two dashes."""
    inline = " ".join(re.findall(r"`[^`]+`", prose((ROOT / name).read_text())))
    mentioned = set(re.findall(r"(?<![\w-])--(\w[\w.]*)", inline))
    scripts = "run.sh", "data/prepare.py", "tests/test_guard.py", *(ROOT / "records").glob("*.py")
    sources = "\n".join((ROOT / script).read_text() for script in scripts)
    launcher = {option.removeprefix("--") for action in get_args_parser()._actions for option in action.option_strings}
    known = {*flatten(T.Config()), "depth", "preset", "check", "help", *launcher, *re.findall(r"--(\w+)", sources)}
    known |= {f"layer{i}" for i in range(12)} | {f"layer{i}.{field}" for i in range(12) for field in vars(T.Layer())}
    known |= {f"stage{i}" for i in range(1, 6)}  # the worked example makes the fifth
    assert mentioned and {knob for knob in mentioned if knob.rstrip(".") not in known} == set()


def test_messages_are_those_of_the_sources():
    """The first column of the tables of troubles."""
    sections = (text.partition("## When something goes wrong")[2].partition("\n## ")[0] for text in (README, GUIDE))
    messages = [text for section in sections for row in re.findall(r"^\| (.*?) \| ", section, re.M)
                for text in re.findall(r"`(.+?)`", row)]
    files = [path for folder in (".", "data", "data/run", "records") for path in (ROOT / folder).glob("*.py")]
    sources = re.sub(r'"\s*f?"', "", "".join(path.read_text() for path in [*files, ROOT / "run.sh"]))  # joins parts
    assert len(messages) > 12 and [text for text in messages if text not in sources] == []


RECORDS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("records/*/README.md"))]


@pytest.mark.parametrize("file", [*WITH_COMMANDS, *RECORDS])
def test_links_and_paths_exist(file):
    def anchors(path):
        headings = re.findall(r"^#+ (.*)$", prose(path.read_text()), re.M)
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    path = ROOT / file
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for name in re.findall(r"`((?:tests|records|data)/[\w/]+\.py)`", path.read_text()):
        assert (ROOT / name).exists(), name
