"""Train a log again: run the code that it holds with the settings that it holds, and say whether the losses are equal.

    python records/rerun.py LOG [--key=value ...]        ./run.sh --rerun does the same with the Python that it finds

The code of the log runs with all rights of the user, in a temporary folder. The new log lies in logs/ of this
repository. A --key=value replaces a setting of the log: --train_files=... and --val_files=... say where the data are.

Equal digits need an equal environment. So the variables that the log records (env.OMP_NUM_THREADS and the like) are set
as they are there, also where the user has set them to something else. Left out are folders and files of that machine,
the names of its network devices, and what torchrun sets by itself. A variable that the log does not have stays as it is
here, and is shown among the differences.

The exit status is 0 when the rerun finished, whatever its losses are; otherwise it is that of the trainer.
"""

import glob
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from records import compare
from records.compare import Run, UserError

ROOT, SCRIPT = Path(__file__).resolve().parents[1], "train_gpt.py"
SHARDS = "train_shards", "val_shards"
NEEDED = "ranks", "command", "sources", *SHARDS, "run_label", "device"
NAME = re.compile(r"(\w[\w.-]*/)*\w[\w.-]*")  # of a dumped file: not absolute and without .., so it stays in the folder
LEFT_OUT = "save", "save_every", "resume", "profile", "sample_tokens"  # settings on which no loss depends
REFUSED = "preset", "resume", "profile", "sample_tokens"  # the log has every setting, but maybe not the code of these
DIFFER_ANYWAY = {*LEFT_OUT, "run_label", "log_dir", "command", "commit"}
# Variables of torchrun, devices of the network, folders and files: no loss depends on them.
OF_MACHINE = re.compile(r"env\.(TORCHELASTIC_.*|NCCL_(SOCKET|IB|NET)_.*|.*_(DIR|HOME|PATH|FILE))")


# ---- From the log ----------------------------------------------------------------------------------------------------

def title(name) -> str:
    """What stands before the text of a file; `write_header` of data/log.py writes it."""
    return f"\n{'-' * 40}\n# {name}\n{'-' * 40}\n\n"


def require_whole(path, run: Run):
    """UserError unless the log has all that a rerun needs."""
    names = [name for name in run.facts.get("sources", "").split() if name != SCRIPT]
    lacks = [f"`{key}`" for key in NEEDED if key not in run.facts]
    lacks += [f"the text of {name}" for name in names if title(name) not in run.source]
    lacks += ["the text of " + SCRIPT] * (not run.source) + ["validation losses"] * (not run.losses)
    if lacks:
        raise UserError(f"{path}: lacks {', '.join(lacks)}; it cannot be trained again, like all older logs")
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(f"{path}: '{name}' among its sources may lead out of the folder; do not trust this log")
        if run.source.count(title(name)) > 1:
            raise UserError(f"{path}: holds {name} more than once; if these are two logs, give one of them")
    if not re.fullmatch("[1-9][0-9]*", run.facts["ranks"]):
        raise UserError(f"{path}: its ranks are '{run.facts['ranks']}', which is no number of processes")
    if resumed := run.facts.get("resume"):
        raise UserError(f"{path}: this run went on from {resumed}; train the log again in which it began")


def unpack(run: Run) -> dict[str, str]:
    """Name -> text of all dumped files. The script is first and has no title. The log added a line end to each text."""
    names = run.facts["sources"].split()
    places = sorted((run.source.index(title(name)), name) for name in names if name != SCRIPT)
    starts = [0, *(place + len(title(name)) for place, name in places)]
    ends = [*(place for place, _ in places), len(run.source)]
    texts = [run.source[start:end].removesuffix("\n") for start, end in zip(starts, ends)]
    return dict(zip([SCRIPT, *(name for _, name in places)], texts))


def settings(run: Run, given) -> dict[str, str]:
    """The knobs of the rerun: those of the log, then what the user has given."""
    keys = list(run.facts)  # the machine, env.* and shards, then the knobs, then the choices of kernels
    first = 1 + max(i for i, key in enumerate(keys) if key in SHARDS or key.startswith("env."))
    knobs = {key: run.facts[key] for key in takewhile(lambda key: not key.startswith("kernels."), keys[first:])}
    knobs |= {"run_label": "rerun_" + run.facts["run_label"], "log_dir": "logs"}
    knobs = {key: value for key, value in knobs.items() if key not in LEFT_OUT and key not in given} | given
    return knobs | {"log_dir": str(ROOT / knobs["log_dir"])}  # else it would be in the temporary folder


def environment(run: Run) -> dict[str, str]:
    env = dict(os.environ)
    for key, value in run.facts.items():
        if key.startswith("env.") and not OF_MACHINE.fullmatch(key) and "/" not in value:
            env[key.removeprefix("env.")] = value
    env["DATA_PATH"] = os.path.abspath(env.get("DATA_PATH") or ROOT)
    # What the log should hold but does not must not come from this repository instead.
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != ROOT]
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


# ---- Running and comparing -------------------------------------------------------------------------------------------

def gpu_count() -> int:
    import torch  # takes seconds, and a run on the CPU does not need the answer
    return torch.cuda.device_count()


def processes(ranks: int, device: str) -> int:
    """How many processes to start for a run of `ranks`; the trainer makes more micro-steps where they are fewer."""
    if device == "cpu" or ranks <= (gpus := gpu_count()):
        return ranks
    if not gpus:
        raise UserError("the run was on GPUs and this machine has none; add --device=cpu (slow, other digits)")
    return max(n for n in range(1, gpus + 1) if ranks % n == 0)


def execute(command, folder, env) -> int:
    """Exit status of the command. It has a session of its own, so that Ctrl-C reaches it once, through this process:
    a second signal would disturb torchrun, which ends its processes after the first."""
    child = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True)
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = [signal.signal(number, lambda number, _: child.send_signal(number)) for number in numbers]
    status = child.wait()
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def report(old: Run, new: Run) -> str:
    """Both curves, what differs between the machines, and the verdict."""
    steps = sorted(old.losses | new.losses)
    both = [step for step in steps if step in old.losses and step in new.losses]
    apart = {step: round(new.losses[step] - old.losses[step], 9) for step in both}  # decimal numbers, as in the logs
    columns = (old.losses, ""), (new.losses, ""), (apart, "+")
    curve = [["step", "log", "rerun", "difference"]]
    for step in steps:
        curve.append([str(step), *(compare.number(values.get(step, math.nan), 4, sign) for values, sign in columns)])
    parts = [compare.table(curve, False)]

    rows = [row for row in compare.changes(old, new) if not (row[0] in DIFFER_ANYWAY or OF_MACHINE.fullmatch(row[0]))]
    data, others = ([row for row in rows if (row[0] in SHARDS) == wanted] for wanted in (True, False))
    parts += [f"other data: {key} is '{there}' in the log, '{here}' in the rerun" for key, there, here in data]
    parts.append(compare.table([["", "log", "rerun"], *others], False) if others else "settings and machine are equal")

    worst = max(apart, key=lambda step: (math.isnan(apart[step]), abs(apart[step])), default=None)
    verdict = "equal in every digit"
    if any(apart.values()):
        verdict = f"the largest difference is {abs(apart[worst]):.4f} at step {worst}"
    if len(apart) < len(steps):
        verdict += f" ({len(apart)} of {len(steps)} validations are in both logs)"
    return "\n\n".join([*parts, verdict if apart else "the logs have no validation in common"])


def rerun(path: Path, given) -> int:
    old = compare.read_run(path)
    require_whole(path, old)
    knobs, env, ranks = settings(old, given), environment(old), old.facts["ranks"]
    count = processes(int(ranks), knobs["device"])
    print(f"this executes the code in {path}, whoever wrote it")
    if count < int(ranks):
        print(f"{count} of the {ranks} processes fit on the GPUs here and make more micro-steps, so digits will differ")
    if not old.finished:
        print(f"the run in the log did not finish; the losses are compared up to its step {max(old.losses)}")
    sys.stdout.flush()  # before the trainer writes to the same place

    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
    command = [sys.executable, *launcher, SCRIPT, *(f"--{key}={value}" for key, value in knobs.items())]
    pattern = os.path.join(glob.escape(knobs["log_dir"]), glob.escape(knobs["run_label"]) + "_*.txt")
    before = set(glob.glob(pattern))
    with tempfile.TemporaryDirectory(prefix="rerun_") as folder:
        for name, text in unpack(old).items():
            try:
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, name).write_bytes(text.encode())
            except OSError as error:
                raise UserError(f"{path}: cannot unpack {name}: {error.strerror}") from None
        status = execute(command, folder, env)
    if status:
        for files in filter(None, map(knobs.get, ("train_files", "val_files"))):
            if not glob.glob(os.path.join(glob.escape(env["DATA_PATH"]), os.path.expanduser(files))):
                print(f"{files} is not on this machine: pass --train_files=... and --val_files=...", file=sys.stderr)
                break
        return status
    logs = set(glob.glob(pattern)) - before
    if len(logs) != 1:
        raise UserError(f"the run ended well, but {len(logs)} new logs match {pattern}; use records/compare.py")
    print("\n" + report(old, compare.read_run(Path(logs.pop()))), flush=True)
    return 0


def parse(argv) -> tuple[Path, dict[str, str]]:
    """The log, and the settings that are given as --key=value or --key value."""
    logs, given, rest = [], {}, iter(argv)
    for argument in rest:
        key, equals, value = argument.partition("=")
        if not key.startswith("--"):
            logs.append(argument)
        elif equals or not (value := next(rest, "--")).startswith("--"):
            given[key[2:]] = value
        else:
            raise UserError(f"argument '{key}': write --key=value (see --help)")
    if len(logs) != 1:
        raise UserError(f"expected one log, and settings as --key=value (see --help), not {len(logs)} logs")
    if refused := [f"--{key}" for key in REFUSED if key in given]:
        raise UserError(f"{', '.join(refused)}: a rerun has the settings of the log and only trains; leave it out")
    return Path(logs[0]), given


def main(argv) -> int:
    if "--help" in argv:
        print(__doc__)
        return 0
    try:
        return rerun(*parse(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character
    sys.exit(main(sys.argv[1:]))
