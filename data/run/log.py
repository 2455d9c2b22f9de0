"""The log of a run, on file and console, and its header, which is enough to repeat the run."""

import os
import platform
import re
import shlex
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from data.run.disk import ROOT, user_path
from data.run.errors import UserError, user_error
from data.run.knobs import flatten, render


class Log:
    """The log file and the console of rank 0; other ranks write nothing.

    The file is line-buffered, so a killed run loses no line.
    """

    def __init__(self, config, rt):
        self.path = ROOT / user_path(config.system.log_dir) / f"{config.system.run_label}_{uuid.uuid4()}.txt"
        self.is_main, self.terminal = rt.rank == 0, rt.rank == 0 and sys.stdout.isatty()
        self.write_error = f"cannot write {self.path} or the console; make room, or choose another --log_dir"
        if self.is_main:
            with user_error(self.write_error):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "w", encoding="utf-8", buffering=1)
            self.line(str(self.path), file=False)

    def line(self, text, console=True, file=True, end="\n"):
        if not self.is_main:
            return
        with user_error(self.write_error):  # a run without a log is useless
            if file:
                self.file.write(text + "\n")  # one call (2.4 µs, Xeon at 2.5 GHz): the loader's thread also writes
            if console:
                try:
                    print(("\r\033[K" if self.terminal else "") + text, flush=True, end=end)
                except BrokenPipeError:
                    raise UserError("the run ends, since nobody reads its output any more; a run without readers takes"
                                    " > /dev/null, its log has every line") from None

    def interrupted(self, system):
        """The line at Ctrl-C: how to go on. system: the section of the config."""
        resumed = system.resume and user_path(system.resume)
        checkpoints = [resumed or None, *sorted(self.path.with_suffix("").glob("state_step*.pt"))]
        if newest := checkpoints[-1]:
            advice = f"go on with --resume={shlex.quote(os.path.relpath(newest))}"
        else:
            advice = "there is no checkpoint"
            advice += "" if system.save_every else ": --save_every=100 writes one every 100 steps"
        self.line(f"\nended by Ctrl-C; {advice}", file=False)

    def failed(self, message):
        """The error of rank 0 that ends the run, for the file; the console gets it on standard error, on a line of its
        own."""
        with suppress(UserError):
            self.line(f"error: {message}", console=False)
            if self.terminal:
                self.line("", file=False, end="")

    def progress(self, text, seconds_left):
        """A line per step in the file; on a terminal it stays in one place, with the expected time to the end."""
        self.line(text, console=not self.terminal)
        if self.terminal:
            minutes, seconds = divmod(round(seconds_left), 60)
            self.line(f"{text} eta:{minutes}m{seconds:02d}s", file=False, end="")

    @contextmanager
    def moving(self, text, every=1.0):
        """Context manager: the last line of a terminal shows the result of `text()`, which is called every so many
        seconds."""
        if not self.terminal:
            yield
            return
        done = threading.Event()

        def move():
            while not done.wait(every):
                self.line(text(), file=False, end="")
            self.line("", file=False, end="")

        thread = threading.Thread(target=move, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def loaded_sources() -> dict[str, str]:
    """{path: text} of train_gpt.py, then of every other loaded module of this repository.

    Skips the packages of a Python environment inside the repository.
    """
    script = ROOT / "train_gpt.py"
    files = {Path(file).resolve() for module in [*sys.modules.values()]
             if (file := getattr(module, "__dict__", {}).get("__file__"))}
    own = [file for file in files if file.is_relative_to(ROOT) and not file.is_relative_to(sys.prefix)]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
            for file in [script, *sorted(own)] if file.suffix == ".py"}


def published(text) -> str:
    """A value, or a --key=value argument, with a path made relative to the repository, or cut to its last part.

    Logs are published, and folder names may be private. A value that is not a path does not change.
    """
    key, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    if not value.startswith(("/", "..", "~")):
        return text
    path = Path(os.path.abspath(os.path.expanduser(value)))
    return key + equals + (str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name)


def revision(sources) -> str:
    """The commit of the repository, and whether the sources have changed since the commit."""
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, encoding="utf-8", errors="replace",
                              check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", *sources)
        return f"{git('rev-parse', 'HEAD')} {'with changes' if changed else 'clean'}"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def shards_line(shards) -> str:
    """The SHA-256 of all shards of a run, in name order; unknown where a file could not be read."""
    return "shards: " + " ".join(f"{part}_sha256=" + ",".join(each.digests.get(path, "unknown") for path in each.files)
                                 for part, each in shards.items())


def write_header(log, argv, sources: dict, config, machine: dict, choices: dict, shards: dict):
    """Writes sources, versions, machine, command, data and settings, which `./run.sh --rerun LOG` reads; then the
    kernels and the sizes of the micro-batches.

    argv: arguments of the run; sources: {path: text}; machine: {key: value} of the hardware, with the number of ranks;
    choices: {operation: name of its implementation}; shards: {part of the data: Shards}.
    """
    try:
        gpus = subprocess.run(["nvidia-smi"], capture_output=True, encoding="utf-8", errors="replace").stdout
        gpus = re.split(r"\s*\+-+\+\n\| Processes", gpus)[0]  # without processes and their paths
    except OSError:
        gpus = "nvidia-smi: not found"
    triton = sys.modules.get("triton")
    facts = machine | {"cores": os.cpu_count(), "platform": platform.platform(), "commit": revision(sources),
                       "command": shlex.join(["train_gpt.py", *map(published, argv)]), "sources": " ".join(sources)}
    for part, each in shards.items():
        facts[f"{part}_shards"] = " ".join(f"{path.name}:{size}" for path, (size, *_) in each.files.items())
    facts |= {f"env.{key}": value for key, value in sorted(os.environ.items())
              if key.startswith(("TORCH", "TRITON", "NCCL", "OMP_"))
              and not key.startswith("TORCHELASTIC")}  # these variables differ between runs
    facts |= {key: render(value) for key, value in flatten(config).items()}
    rule, short_rule = "=" * 100, "-" * 40
    (_, script), *others = sources.items()
    for text in (script, *(f"\n{short_rule}\n# {name}\n{short_rule}\n\n{source}" for name, source in others), rule,
                 f"Running Python {sys.version}",
                 f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda}",
                 f"Running Triton version {getattr(triton, '__version__', 'absent')}", gpus, rule,
                 *(f"{key}: {published(str(value))}" for key, value in facts.items()), rule):
        log.line(text, console=False)
    log.line("kernels: " + " ".join(f"{op}:{name}" for op, name in choices.items()))
    count = config.system.micro_batches
    tokens = [str(stage.batch_tokens // count) for stage in config.schedule.stages]
    log.line(f"tokens per micro-batch: {' '.join(tokens)}; micro-batches per rank: {count // machine['ranks']}")
