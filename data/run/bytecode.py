"""Bytecode of PyTorch for machines that have none. This module must be imported before torch, so it does not import it."""

import importlib.util
import os
import sys
from pathlib import Path


def keep_bytecode():
    """Keep the bytecode of imported modules in this repository, if PyTorch was installed without bytecode.

    Some container images contain PyTorch without bytecode, and do not let Python write bytecode. Every start would then
    translate 2300 files. The processes of the compiler read the environment variable.
    """
    spec = importlib.util.find_spec("torch")
    if sys.pycache_prefix is None and spec and not os.path.exists(spec.cached or ""):
        folder = Path(__file__).resolve().parents[2] / "__pycache__"
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
