"""Everything around the model and its kernels: tokens, and in `run` the parts of a run."""

import sys
from importlib.util import find_spec

ADVICE = "activate .venv (source .venv/bin/activate), or start with ./run.sh"
if sys.version_info < (3, 10):  # before imports that an older Python cannot read
    sys.exit("error: this is Python %d.%d, but 3.10 or newer is needed: " % sys.version_info[:2] + ADVICE)

# One factor for each token of an n-gram, the last token first. The first two are those of PR 201 (classiclarryd).
NGRAM_FACTORS = 36313, 27191, 51637, 44987, 58379, 40507, 62539, 33941
# Rows of signs, a power of two, tell apart the n-grams that share a row of the table. Their factors, in the same order.
SIGN_ROWS, SIGN_FACTORS = 8192, (1, 1, 20011, 30011, 44021, 52609, 37013, 28001)


def require_packages(*names):
    """End the program with one line if this Python lacks a package."""
    if missing := [name for name in names if find_spec(name) is None]:
        sys.exit(f"error: {sys.executable} has no {' and no '.join(missing)}: {ADVICE}")
