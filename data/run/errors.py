"""Errors that end a run with one line."""

import os
import re
import time
from contextlib import contextmanager
from pathlib import Path


LESS_MEMORY = ("raise --micro_batches (16, 32: smaller forward passes), lower --val_batch_tokens, or try"
               " --cuda_graphs=false")


class UserError(Exception):
    """A mistake the user can fix. `main` prints its one line and returns a nonzero status."""


class NotFinite(UserError):
    """A number that is nan or inf. What the run has now is worth less than its last checkpoint."""


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
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of {'GPU ' * ('CPUAllocator' not in str(error))}memory: {LESS_MEMORY} ({one_line(error)})"
    if re.search("no space left|disk quota|file too large", str(error), re.I):  # a run's own files have other messages
        return ("a disk is full, or a quota: make room, or set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR, the"
                f" folders of compiled kernels, to folders on another disk ({' '.join(str(error).split())})")
    if re.search("cuda (error|fail|function)|device-side assert|invalid (usage|argument)", str(error), re.I):
        return None  # also where NCCL, which was waiting, has noticed it
    if re.search("connection (closed|reset)|broken pipe|timed out waiting|nccl", str(error), re.I):
        return f"lost the connection to another process, which may say why ({one_line(error)})"
    return None


def told() -> Path:
    """A folder that is there once a process of this machine has told why the run ends. torchrun gives each process a
    folder of its own in one common folder."""
    return Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "/no/torchrun/error.json")).parent.parent / "told"


def claim_report(local) -> bool:
    """Claim to print why the run ends; True for the first process of a machine that asks. One report is enough.

    local: rank on this machine.
    """
    time.sleep(local > 0)  # the first process usually has the same message
    try:
        told().mkdir()
    except FileExistsError:
        return False
    except OSError:  # no torchrun, or no folders: printing twice is better than never
        pass
    return True
