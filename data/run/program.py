"""What each program does around its `main`. This module needs no package."""

import os
import sys
import traceback
from contextlib import suppress


def open_outputs():
    """Opens the standard files that the shell has closed (`>&-`), to nowhere: the next file that is opened would take
    their place, and get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))
            if null != number:
                os.close(null)


def run_program(main):
    """Calls main(argv) and ends the process with the status that it returns. Waits for no thread and no other process,
    which may hang after an error. A closed pipe (`| head`) ends it without a word."""
    open_outputs()
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    status = 1
    try:
        try:
            status = main(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        status = 141  # as a shell counts it
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
    os._exit(status)
