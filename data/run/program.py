"""What each program does around its `main`. This module needs no package."""

import os
import sys
import traceback
from contextlib import suppress

from data.run.errors import UserError


def open_outputs():
    """Opens the standard files that the shell has closed (`>&-`), to nowhere: the next file that is opened would take
    their place, and get what is printed."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the least number that is free, so that of the closed file
            os.set_inheritable(null, True)
            setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))


def run_program(main):
    """Calls main(argv) and ends the process with the status that it returns. Waits for no thread and no other process,
    which may hang after an error. A UserError ends it with one line, a closed pipe (`| head`) without a word."""
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
    os._exit(status)
