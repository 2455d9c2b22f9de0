"""Train a log again: run the log's code with the log's settings, and say whether the losses are equal.

    python records/rerun.py LOG [--key=value ...]        ./run.sh --rerun does the same with the Python that it finds

The code of the log runs with all rights of the user, in a temporary folder. The new log is in logs/ of this repository.
Each --key=value replaces a setting of the log: --train_files=... and --val_files=... say where the data is.

Equal digits require an equal environment. So variables that the log records (env.OMP_NUM_THREADS and the like) get
their values from the log, but for folders, files, network devices and torchrun. Others keep their values on this
machine, and the report lists them. The exit status is 0 when the rerun finishes, whatever its losses are.
"""

import glob
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.run.config import read_arguments
from data.run.launch import gpu_count
from data.run.program import ROOT, UserError, run_program, user_error, user_path
from records import compare
from records.compare import Run

SCRIPT = "train_gpt.py"
SHARDS = "train_shards", "val_shards", "train_sha256", "val_sha256"  # older logs lack the last two
REQUIRED = "ranks", "command", "sources", *SHARDS[:2], "run_label", "device"
NAME = re.compile(r"(\w[\w.-]*/)*\w[\w.-]*")  # a dumped file stays in the folder: no absolute path, no ..
# Settings on which no loss depends, and what the rerun has instead: those of the checkpoint would count without them.
OFF = {"save": "false", "save_every": "0", "plot": "false", "sample_tokens": "0", "resume": "", "profile": ""}
# The log may not contain the code for the first four of these settings, and its run has a length.
REFUSED = "preset", "resume", "profile", "sample_tokens", "minutes", "train_tokens"
DIFFER_ANYWAY = {*OFF, "run_label", "log_dir", "command", "commit"}
# Variables of torchrun, devices of the network, folders and files, how threads wait: no loss depends on them.
OF_MACHINE = re.compile(r"env\.(TORCHELASTIC_.*|NCCL_(SOCKET|IB|NET)_.*|.*_(DIR|HOME|PATH|FILE)|OMP_WAIT_POLICY)")


# ---- From the log ----------------------------------------------------------------------------------------------------

def value_of(text) -> str:
    """A setting as the trainer had it: `quoted` of data/run/log.py writes some as JSON. Older logs have none."""
    try:
        return json.loads(text) if text.startswith('"') else text
    except ValueError:
        return text


def unpack(run: Run) -> list[tuple[str, str]]:
    """(name, text) of all dumped files, in the order of the log. The script is first, without a title. `write_header`
    of data/run/log.py writes the titles, and adds a line end to each text."""
    names = "|".join(re.escape(name) for name in run.facts.get("sources", "").split() if name != SCRIPT)
    script, *others = re.split(rf"\n-{{40}}\n# ({names})\n-{{40}}\n\n", run.source)
    return [(name, text.removesuffix("\n")) for name, text in zip([SCRIPT, *others[::2]], [script, *others[1::2]])]


def require_whole(path, run: Run):
    """Raises UserError unless the log has all settings and sources that a rerun requires."""
    names = [name for name in run.facts.get("sources", "").split() if name != SCRIPT]
    found = [name for name, text in unpack(run) if text or name != SCRIPT]
    missing = [f"`{key}`" for key in REQUIRED if key not in run.facts]
    missing += [f"the text of {name}" for name in [*names, SCRIPT] if name not in found]
    missing += ["validation losses"] * (not run.losses)
    wrong = [f"lacks {', '.join(missing)}; it cannot be trained again, like all older logs"] * bool(missing)
    wrong += [f"'{name}' among its sources may lead out of the folder; do not trust this log"
              for name in names if not NAME.fullmatch(name)]
    wrong += [f"holds {name} more than once; if these are two logs, give one of them"
              for name in names if found.count(name) > 1]
    if resumed := run.facts.get("resume"):
        wrong.append(f"this run went on from {resumed}; rerun the log in which it began")
    if wrong:
        raise UserError(f"{path}: {wrong[0]}")


def settings(run: Run, overrides) -> dict[str, str]:
    """The knobs of the rerun: the log's knobs with the user's overrides."""
    keys = list(run.facts)  # the machine, env.* and shards, then the knobs, then the choices of kernels, then SHA-256
    first = 1 + max(i for i, key in enumerate(keys) if key in SHARDS[:2] or key.startswith("env."))
    keys = takewhile(lambda key: not key.startswith("kernels."), keys[first:])
    knobs = {key: OFF.get(key, value_of(run.facts[key])) for key in keys}
    knobs |= {"run_label": "rerun_" + run.facts["run_label"], "log_dir": "logs"}
    knobs = {key: value for key, value in knobs.items() if value and key not in overrides} | overrides
    # A relative path would lead into the temporary folder.
    return knobs | {key: str(ROOT / user_path(knobs[key])) for key in ("log_dir", "init_from") if knobs.get(key)}


def environment(run: Run) -> dict[str, str]:
    """The variables of the rerun: this machine's variables with the values that the log records."""
    env = dict(os.environ)
    for key, value in run.facts.items():
        if key.startswith("env.") and not OF_MACHINE.fullmatch(key) and "/" not in value:
            env[key.removeprefix("env.")] = value_of(value)
    env["DATA_PATH"] = os.path.abspath(user_path(env.get("DATA_PATH") or ROOT))
    env.pop("PYTHONSAFEPATH", None)  # older code needs its folder on the path
    # A module that is missing in the log must not come from this repository.
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != ROOT]
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


# ---- Running and comparing -------------------------------------------------------------------------------------------

def execute(command, folder, env) -> int:
    """Runs the command and returns its exit status. The command has its own session, so it gets Ctrl-C only once,
    from this process: a second signal would disturb torchrun while it ends its processes."""
    child = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True)
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = [signal.signal(number, lambda number, _: child.send_signal(number)) for number in numbers]
    status = child.wait()
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def report(old: Run, new: Run) -> str:
    """Both curves, the differences between the machines, and the verdict."""
    steps = sorted(old.losses | new.losses)
    both = [step for step in steps if step in old.losses and step in new.losses]
    differences = {step: round(new.losses[step] - old.losses[step], 9) for step in both}  # decimal, as in the logs
    curves = (old.losses, ""), (new.losses, ""), (differences, "+")
    parts = [compare.table([["step", "log", "rerun", "difference"], *(
        [str(step), *(compare.number(values.get(step, math.nan), 4, sign) for values, sign in curves)]
        for step in steps)])]
    rows = [row for row in compare.changes(old, new) if not (
        row[0] in DIFFER_ANYWAY or OF_MACHINE.fullmatch(row[0]) or row[0] in SHARDS[2:] and row[1] == "–")]
    parts += [f"other data: {key} is '{theirs}' in the log, '{ours}' in the rerun"
              for key, theirs, ours in rows if key in SHARDS]
    others = [row for row in rows if row[0] not in SHARDS]
    parts.append(compare.table([["", "log", "rerun"], *others]) if others else "settings and machine are equal")

    worst = max(both, key=lambda step: (math.isnan(differences[step]), abs(differences[step])), default=None)
    verdict = "equal in every digit"
    if any(differences.values()):
        verdict = f"the largest difference is {abs(differences[worst]):.4f} at step {worst}"
    if len(both) < len(steps):
        verdict += f" ({len(both)} of {len(steps)} validations are in both logs)"
    return "\n\n".join([*parts, verdict if both else "the logs have no validation in common"])


def rerun(path: Path, overrides) -> int:
    """Trains the log at `path` again and prints the comparison. Returns the exit status, raises UserError."""
    old = compare.read_run(path)
    require_whole(path, old)
    knobs, env, ranks = settings(old, overrides), environment(old), int(old.facts["ranks"])
    gpus = ranks if knobs["device"] != "cuda" else gpu_count()
    if not gpus:
        raise UserError("the run was on GPUs and this machine has none; add --device=cpu (slow, other digits)")
    count = max(n for n in range(1, gpus + 1) if ranks % n == 0)  # fewer processes make more micro-steps each
    print(f"this executes the code in {path}, whoever wrote it")
    if count < ranks:
        print(f"{count} of the {ranks} processes fit on the GPUs here and make more micro-steps, so digits will differ")
    if not old.finished:
        print(f"the run in the log did not finish; the losses are compared up to its step {max(old.losses)}")
    sys.stdout.flush()  # before the trainer writes to the same output

    launcher = ["-m", "torch.distributed.run", "--standalone", "--local_addr=localhost", f"--nproc_per_node={count}"]
    command = [sys.executable, *launcher * (count > 1), SCRIPT, *(f"--{key}={value}" for key, value in knobs.items())]
    folder, pattern = Path(knobs["log_dir"]), glob.escape(knobs["run_label"]) + "_*.txt"
    before = {*folder.glob(pattern)}
    with tempfile.TemporaryDirectory(prefix="rerun_") as temporary:
        for name, text in unpack(old):
            with user_error(f"{path}: cannot unpack {name}"):
                Path(temporary, name).parent.mkdir(parents=True, exist_ok=True)
                Path(temporary, name).write_bytes(text.encode())
        status = execute(command, temporary, env)
    if status:
        for files in filter(None, map(knobs.get, ("train_files", "val_files"))):
            if not glob.glob(os.path.join(glob.escape(env["DATA_PATH"]), os.path.expanduser(files))):
                print(f"{files} is not on this machine: pass --train_files=... and --val_files=...", file=sys.stderr)
                break
        return status
    logs = {*folder.glob(pattern)} - before
    if len(logs) != 1:
        raise UserError(f"the run finished, but {len(logs)} new logs in {folder} match {pattern}")
    print("\n" + report(old, compare.read_run(logs.pop())), flush=True)
    return 0


def parse(argv) -> tuple[Path, dict[str, str]]:
    """The log, and the settings after it as {knob: text}. Raises UserError."""
    if not argv or argv[0].startswith("--"):
        raise UserError("expected a log, then settings as --key=value (see --help)")
    overrides = read_arguments(argv[1:])
    if refused := [f"--{key}" for key in REFUSED if key in overrides]:
        raise UserError(f"{', '.join(refused)}: a rerun has the settings of the log and only trains; leave it out")
    return user_path(argv[0]), overrides


def main(argv) -> int:
    if "--help" in argv:
        print(__doc__)
        return 0
    return rerun(*parse(argv))


if __name__ == "__main__":
    run_program(main)
