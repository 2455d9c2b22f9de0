"""`./run.sh test --gpu [file ...] [argument ...]`: the test files that use a GPU, or the given ones, each in a process
of its own, since a fault on a GPU ends all that its process does there. As many run at a time as cores and memory
allow. A table comes last. The arguments go to pytest."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.run.launch import allowed_cores
from data.run.program import UserError, run_program
from records.compare import table

USES_GPU = re.compile(r"^def \w+\(.*\bdevice\b|\bON_GPU\b|^@pytest.mark.skipif\(not torch\.cuda", re.M)
ROOM = 12 * 2**30  # bytes of a GPU for one file
# By the exit status of pytest.
ENDS = {0: "passed", 1: "FAILED", 2: "ENDED EARLY", 4: "WRONG ARGUMENTS", 5: "no test has this name"}


def main(argv, tests=ROOT / "tests") -> int:
    import torch
    if not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU here; ./run.sh test runs the tests on the CPU")

    def run(path):
        began, command = time.perf_counter(), [sys.executable, "-m", "pytest", "-q", path, *options]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        fails = done.returncode not in (0, 5)
        print(done.stdout if fails else f"{Path(path).name} is done", flush=True)
        counts = re.sub(r"(, \d+ warnings?)? in .*", "", done.stdout.rstrip().rpartition("\n")[2]).strip("= ")
        end = ENDS.get(done.returncode, f"CRASHED, status {done.returncode}")
        counts *= done.returncode in (0, 1)
        return fails, [Path(path).name, end, counts, f"{time.perf_counter() - began:.0f}"]

    given = [argument for argument in argv if argument.partition("::")[0].endswith(".py")]
    options = [argument for argument in argv if argument not in (*given, "--gpu")]
    files = given or [str(path) for path in sorted(tests.glob("test_*.py"))
                      if USES_GPU.search(path.read_text(encoding="utf-8"))]
    with ThreadPoolExecutor(max(1, min(int(allowed_cores()), torch.cuda.mem_get_info()[0] // ROOM))) as pool:
        failed, rows = zip(*pool.map(run, files))
    print(table([["file", "end", "tests", "seconds"], *rows]))
    return int(any(failed) or all(row[1] == ENDS[5] for row in rows))


if __name__ == "__main__":
    run_program(main)
