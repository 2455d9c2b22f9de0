"""The log of a run, on file and console; its header, which is enough to repeat the run; and how a run measures its
time: phases of the start, training time, ranges in a trace."""

import errno
import functools
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from data.run.config import flatten, read_arguments, render
from data.run.machine import PATHS, of_rank_0
from data.run.program import ROOT, UserError, own_modules, require_finite, user_error, user_path
from data.shards import data_root


class Log:
    """The log file and the console of rank 0; other ranks write nothing but the error that ends them. The file is
    line-buffered, so a killed run loses no line."""

    def __init__(self, config, rt):
        system, self.rank, self.is_main = config.system, rt.rank, rt.rank == 0
        self.path = of_rank_0(ROOT / user_path(system.log_dir) / f"{system.run_label}_{uuid.uuid4()}.txt", rt)
        self.terminal = self.is_main and sys.stdout.isatty()
        knobs, home = flatten(config), user_path("~")
        folders = {ROOT, data_root(), home, *(user_path(knobs[key]).parent for key in PATHS)}
        self.private = sorted((f"{folder}/" for folder in folders if len(folder.parts) > 1 and folder.is_absolute()),
                              key=len, reverse=True)  # folders, the inner ones first
        self.write_error = f"cannot write {self.path} or the console; make room, or choose another --log_dir"
        if self.is_main:
            with user_error(self.write_error):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # `failed` appends, too. A name of a file may have bytes that are no UTF-8.
                self.file = open(self.path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
            self.line(str(self.path), file=False)

    def line(self, text, console=True, file=True, end="\n"):
        if not self.is_main:
            return
        with user_error(self.write_error):  # a run without a log is useless
            if file:
                kept = self.without_folders(text) if text.startswith("warning: ") else text
                self.file.write(kept + "\n")  # one call (2.4 µs, Xeon at 2.5 GHz): the loader's thread also writes
            try:
                if console:
                    print(("\r\033[K" if self.terminal else "") + text, flush=True, end=end)
            except BrokenPipeError:
                raise UserError("the run ends, since nobody reads its output any more; a run without readers takes"
                                " > /dev/null, its log has every line") from None
            except OSError as error:
                if error.errno != errno.EIO:  # a terminal that has been closed does not end the run
                    raise

    def without_folders(self, text):
        """A text without the names of private folders, since logs are published."""
        return functools.reduce(lambda text, folder: text.replace(folder, ""), self.private, text)

    def ended(self, system, number, place=""):
        """The line about the signal that ends a run: how to go on. system: the section of the config."""
        advice = "there is no checkpoint"
        if newest := [system.resume, *sorted(self.path.with_suffix("").glob("state_step*.pt"))][-1]:
            advice = f"go on with --resume={shlex.quote(os.path.relpath(user_path(newest)))}"
        elif not (system.save or system.save_every):
            advice += ": --save_every=100 writes one every 100 steps"
        line = f"ended by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}{place}; {advice}"
        with suppress(UserError):
            self.line(line, console=False)
            self.line(f"\n{line}", file=False)

    def failed(self, message, error):
        """The error that ends the run, for the file, with its traceback if it is not the user's. `main` prints it on
        standard error, here on a line of its own."""
        text = f"error: {f'rank {self.rank}: ' if self.rank else ''}{message}\n"
        if not isinstance(error, UserError):
            trace = "".join(traceback.format_exception(error))
            text += re.sub(r'(?<=File ")[^"]*/(?=lib/python)', "", trace)
        with suppress(OSError, UserError):
            if self.path.exists():  # else this rank is on another machine
                with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(self.without_folders(text))
            if self.terminal:
                self.line("", file=False, end="")

    def step(self, step, total, loss, seconds, seconds_left=None):
        """The two lines of a step: its loss, which a diff can compare, and the training time. With `seconds_left`, a
        terminal shows one line in their place, which has the time to the end."""
        place, one_line = f"step:{step}/{total}", self.terminal and seconds_left is not None
        times = f"train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / max(step, 1):.2f}ms"
        self.line(f"{place} {loss}\n{place} {times}", console=not one_line)
        if one_line:
            minutes, seconds = divmod(round(seconds_left), 60)
            self.line(f"{place} {loss} {times} eta:{minutes}m{seconds:02d}s", file=False, end="")

    def validation(self, step, total, losses, parts, seconds):
        """The lines of a validation. parts: of `validations`; losses: over the first, at the end over all of these."""
        if parts[1:] and step == 0:
            self.line(f"val_loss: before the end over the first {parts[0][1]} tokens, then over all {parts[1][1]}")
        if losses[1:]:
            self.line(f"step:{step}/{total} val_tokens:{parts[0][1]} val_loss:{losses[0]:.4f}")
        self.step(step, total, f"val_loss:{losses[-1]:.4f}", seconds)
        require_finite(losses[-1], f"validation loss before step {step}")

    def saved(self, path):
        self.line(f"checkpoint: {quoted(published(str(path)))}")

    @contextmanager
    def moving(self, text, every=1.0):
        """Context manager: the last line of a terminal shows `text()`, anew every so many seconds."""
        done = threading.Event()

        def move():
            while not done.wait(every):
                self.line(text(), file=False, end="")
            self.line("", file=False, end="")

        thread = threading.Thread(target=move, daemon=True)
        if self.terminal:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self.terminal:
                thread.join()


class Stopwatch(dict):
    """{phase of the start: seconds}, in order. began: `time.perf_counter` at the start of the run."""

    def __init__(self, began):
        self.began = self.last = began
        self.lap("imports")

    def lap(self, phase):
        """Set `phase` to the time since the last call."""
        now = time.perf_counter()
        self[phase], self.last = now - self.last, now


class Clock:
    """Training time in seconds, without pauses, and the seconds of the pauses by their phase."""

    def __init__(self, seconds=0.0):
        self.counted, self.paused_seconds, self.began = seconds, {}, time.perf_counter()

    def seconds(self) -> float:
        return self.counted + time.perf_counter() - self.began

    @contextmanager
    def paused(self, phase):
        """Context manager: a pause. Yields the training time until now; inside the pause, `seconds` is wrong."""
        self.counted, pause = self.seconds(), time.perf_counter()
        yield self.counted
        self.began = time.perf_counter()
        self.paused_seconds[phase] = self.paused_seconds.get(phase, 0.0) + self.began - pause


def trace_range(name):
    """Context manager: mark a range of host time in the trace of a profiled step."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def trace_mark(name):
    """Mark a moment in the trace by an empty range."""
    with trace_range(name):
        pass


def loaded_sources() -> dict[str, str]:
    """{path: text} of train_gpt.py, then of every other loaded module of this repository. Raises UserError where the
    code of the trainer is missing: no log and no other rank could tell what ran."""
    files = ["train_gpt.py", *sorted({*own_modules().values()})]
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    if missing := [name for name in ("triton_kernels.py", "data/loader.py") if name not in sources]:
        raise UserError(f"{' and '.join(missing)} of this run lie outside {ROOT}, so no log could hold its code: copy"
                        " the whole project into one folder, without links")
    return sources


def quoted(text) -> str:
    """A value as a line of the log, which `value_of` in records/rerun.py reads back: in JSON if a reader might not see
    it as it is."""
    return text if text.isprintable() and text.strip() == text and text[:1] != '"' else json.dumps(text)


def published(path) -> str:
    """A path relative to the repository, or cut to its last part: logs are published, and folder names may be
    private."""
    if not path.startswith(("/", "~")) and ".." not in Path(path).parts:
        return path
    path = Path(os.path.abspath(user_path(path)))
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def revision(sources) -> str:
    """The commit of this repository, and whether git knows of a change in the sources, which are all in the commit;
    unknown if the commit has no train_gpt.py in this folder."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}  # of another repository

    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, encoding="utf-8", errors="replace",
                              check=True, env=env).stdout

    try:
        commit, _ = git("rev-parse", "HEAD", "HEAD:./train_gpt.py").split()
        changed = git("status", "--porcelain", "--ignored", "--untracked-files=all", "--", *sources)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} {'with changes' if changed else 'clean'}"


def shards_line(shards, read) -> str:
    """The SHA-256 of the validation shards and of the first `read` training shards, in name order; unknown of the
    others, and of a file that has changed."""
    tables = {"train": shards["train"].table(read), "val": shards["val"].table()}
    return "shards: " + " ".join(f"{part}_sha256=" + ",".join(known or "unknown" for *_, known in table)
                                 for part, table in tables.items())


def write_header(log, argv, sources: dict, config, machine: dict, choices: dict, shards: dict):
    """Writes sources, versions, machine, command, data and settings, which `./run.sh --rerun LOG` reads; then the
    kernels and the sizes of the micro-batches. sources: {path: text}; machine: {key: value} of the hardware, with the
    number of ranks; choices: {operation: name of its implementation}; shards: {part of the data: Shards}."""
    gpus, triton = "nvidia-smi: not found", sys.modules.get("triton")
    with suppress(OSError):
        gpus = subprocess.run(["nvidia-smi"], capture_output=True, encoding="utf-8", errors="replace").stdout
        gpus = re.split(r"\s*\+-+\+\n\| Processes", gpus)[0]  # without processes and their paths
    def public(texts):
        return {key: published(text) if key in PATHS else text for key, text in texts.items()}

    given = (f"--{key}={text}" for key, text in public(read_arguments(argv)).items())
    facts = {"cores": os.cpu_count(), "platform": platform.platform(), "commit": revision(sources),
             "command": shlex.join(["train_gpt.py", *given]), "sources": " ".join(sources)}
    facts |= {f"{part}_shards": str(each) for part, each in shards.items()}
    facts |= {f"env.{key}": published(value) for key, value in sorted(os.environ.items())
              if re.match("TORCH(?!ELASTIC)|TRITON|NCCL|OMP_", key)}  # torchrun's own differ between runs
    facts = machine | facts | public({key: render(value) for key, value in flatten(config).items()})
    rule, short_rule = "=" * 100, "-" * 40
    (_, script), *others = sources.items()
    for text in (script, *(f"\n{short_rule}\n# {name}\n{short_rule}\n\n{source}" for name, source in others), rule,
                 f"Running Python {sys.version}",
                 f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda}",
                 f"Running Triton version {getattr(triton, '__version__', 'absent')}", gpus, rule,
                 *(f"{key}: {quoted(str(value))}" for key, value in facts.items()), rule):
        log.line(text, console=False)
    log.line("kernels: " + " ".join(f"{op}:{name}" for op, name in choices.items()))
    count = config.system.micro_batches
    tokens = [str(stage.batch_tokens // count) for stage in config.schedule.stages]
    log.line(f"tokens per micro-batch: {' '.join(tokens)}; micro-batches per rank: {count // machine['ranks']}")
