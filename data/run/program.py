"""What each program does around its `main`: errors of one line, files and folders, its end. This needs no package."""

import functools
import gc
import importlib.util
import json
import math
import os
import re
import stat
import sys
import sysconfig
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

from data.run import launch

ROOT = Path(__file__).resolve().parents[2]  # the folder of train_gpt.py

LESS_MEMORY = ("end other programs, lower --val_batch_tokens, try --cuda_graphs=false or, unless the run is resumed,"
               " raise --micro_batches (16, 32: smaller forward passes) or lower --ngram_rows")


class UserError(Exception):
    """A mistake the user can fix. `main` prints its one line and returns a nonzero status."""


class NotFinite(UserError):
    """A number that is nan or inf. What the run has now is worth less than its last checkpoint."""


def require_finite(value, name):
    """Raises NotFinite when a loss or a weight, a Python float, is nan or inf."""
    if not math.isfinite(value):
        raise NotFinite(f"the {name} is {value}: lower --muon_lr, --adam_lr and --table_lr, or check the data")


def one_line(error) -> str:
    """The message of an error on one line; for an OSError only the reason."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


@contextmanager
def user_error(message, *kinds):
    """Turns an OSError, or an error of `kinds`, into a UserError: the message, then the original message."""
    try:
        yield
    except (OSError, *kinds) as error:
        raise UserError(f"{message} ({one_line(error)})") from error


def is_out_of_memory(error) -> bool:
    """Whether PyTorch, CUDA, Triton or cuBLAS found too little memory."""
    return type(error).__name__ == "OutOfMemoryError" or bool(  # PyTorch's; programs without PyTorch import this file
        re.search("cuda.*out of memory|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator", str(error), re.I))


def error_message(error) -> str | None:
    """One line for an error that the user or the machine has caused; None for a bug."""
    text = " ".join(str(error).split())

    def says(pattern):
        return re.search(pattern, text, re.I)
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of {'GPU ' * ('CPUAllocator' not in text)}memory: {LESS_MEMORY} ({one_line(error)})"
    if says("no space left|disk quota|file too large"):  # a run's own files have other messages
        return ("a disk is full, or a quota: make room, or set TRITON_CACHE_DIR, the folder of compiled kernels, to one"
                f" on another disk ({text})")
    # A bug in a kernel is one also where NCCL, which was waiting, has noticed it.
    is_bug = says("cuda (error|fail|function)|device-side assert|invalid (usage|argument)")
    if not is_bug and says("connection (closed|reset)|broken pipe|timed out waiting|nccl"):
        return f"lost the connection to another process, which may say why ({one_line(error)})"
    return None


def told() -> Path:
    """A folder that exists once a process of this machine has told why the run ends. torchrun gives each process a
    folder in a common one."""
    return Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "/no/torchrun/error.json")).parent.parent / "told"


def claim_report(local) -> bool:
    """Claim to print why the run ends; True for the first process of a machine that asks. One report is enough. local:
    rank on this machine."""
    time.sleep(local > 0)  # the first process usually has the same message
    try:
        told().mkdir()
    except OSError as error:  # no torchrun, or no folders: printing twice is better than never
        return not isinstance(error, FileExistsError)
    return True


def user_path(text) -> Path:
    """A path that the user has written; ~ is the home folder, also where no shell has replaced it."""
    return Path(os.path.expanduser(text))


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # Path.exists may raise an error


def is_writable(folder: Path) -> bool:
    """Whether this process can make files in the folder. The folder need not exist yet."""
    return os.access(existing_folder(folder), os.W_OK | os.X_OK)


@contextmanager
def atomic_write(path):
    """Opens a binary file for writing. The file appears at `path` only when it is complete and on the disk. Raises
    UserError when it cannot be written."""
    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and error.__context__:  # torch.save raises its own error over the real one
            error = error.__context__
        if not isinstance(error, Exception):
            raise error from None  # Ctrl-C
        raise UserError(f"cannot write {path}: {one_line(error)}; make room, or choose another folder") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def keep_bytecode():
    """Keep the bytecode of imported modules in this repository, if PyTorch was installed without bytecode, as in some
    container images, which do not let Python write it. Every start would then translate 2300 files. This must run
    before torch is imported. Other processes read the environment variable."""
    spec = importlib.util.find_spec("torch")
    if sys.pycache_prefix is None and spec and not os.path.exists(spec.cached or ""):
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(ROOT / "__pycache__")
        sys.dont_write_bytecode = False


def open_outputs():
    """Opens the standard files that the shell has closed (`>&-`), to nowhere: the next file that is opened would take
    their place, and get what is printed."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the least number that is free, so that of the closed file
            os.set_inheritable(null, True)
            setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))


@functools.cache  # the files of 2000 modules take .1 s, and `serve` asks twice for each run
def resolved(file) -> Path:
    return Path(file).resolve()


def own_modules() -> dict[str, str]:
    """{name: path} of the loaded modules of this repository, without Python's own and installed packages, which an
    environment inside the repository brings."""
    places = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    places = {place for place in places if place.is_relative_to(ROOT) and place != ROOT}  # or above the repository
    files = {name: resolved(file) for name, module in [*sys.modules.items()]
             if (file := getattr(module, "__dict__", {}).get("__file__"))}
    own = {name: file.relative_to(ROOT) for name, file in files.items() if file.suffix == ".py"
           and file.is_relative_to(ROOT) and not any(map(file.is_relative_to, places))}
    return {name: file.as_posix() for name, file in own.items()
            if not {"site-packages", "dist-packages"} & {*file.parts}}


def serve(main) -> int:
    """Many runs in one process, which keeps imports, kernels and the GPU's context. Standard input is a socket: a line
    has the arguments of a run in JSON, and a byte answers once it has ended well. A run that fails ends the process
    with its status, so that nothing of it is left. main: function (argv, time of its start) -> exit status."""
    import torch

    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        raise UserError("- is for records/repeat.py: write --key=value, or ./run.sh --repeat for many runs")
    threads, seed, modules, env = torch.get_num_threads(), torch.initial_seed(), own_modules(), dict(os.environ)
    for line in sys.stdin:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        os.environ.clear()
        os.environ.update(env)
        if status := main(json.loads(line), time.perf_counter()):
            return status
        if launch.current and launch.current.number:  # it came after the last step
            return 128 + launch.current.number
        launch.watch_signals(lambda number: None)  # between two runs, each ends the process
        for name in own_modules().keys() - modules:  # would be among the sources in the next log
            del sys.modules[name]
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # each new stream has got one
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        os.write(0, b"\n")
    return 0


def run_program(main):
    """Calls main(argv) and ends the process with the status that it returns; None: the process goes on. Waits for no
    thread and no other process, which may hang after an error. A UserError ends it with one line, a closed pipe
    (`| head`) without a word."""
    open_outputs()
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    status = 1
    try:
        try:
            status = main(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        status = 141  # as a shell counts it
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
    if status is not None:
        os._exit(status)
