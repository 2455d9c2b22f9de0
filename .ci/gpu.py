"""`./run.sh test --gpu`: the test files that use a GPU, each in a process of its own, since a fault on a GPU ends all
that its process does there. As many run at a time as cores and memory allow. A table comes last. Arguments go to
pytest."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.run.launch import allowed_cores, die_at_ctrl_c
from data.run.program import UserError, run_program
from records.compare import table

USES_GPU = re.compile(r"def \w+\(.*\bdevice\b|\bON_GPU\b|skipif\(not torch\.cuda")
ROOM = 12 * 2**30  # bytes of a GPU for one file
WORDS = "passed", "skipped", "failed", "error"


def main(argv, tests=ROOT / "tests") -> int:
    import torch
    if not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU here; ./run.sh test runs the tests on the CPU")

    def run(path):
        began, command = time.perf_counter(), [sys.executable, "-m", "pytest", "-q", path, *argv]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        counts = {word: count for count, word in re.findall(r"(\d+) ([a-z]+)", done.stdout.rstrip().split("\n")[-1])}
        fails = done.returncode not in (0, 5)  # 5: of this file, nothing has the name of -k
        print(done.stdout if fails else f"{path.name} is done", flush=True)
        return fails, [path.name, *(counts.get(word, "0") for word in WORDS), f"{time.perf_counter() - began:.0f}"]

    files = [path for path in sorted(tests.glob("test_*.py")) if USES_GPU.search(path.read_text(encoding="utf-8"))]
    with ThreadPoolExecutor(max(1, min(int(allowed_cores()), torch.cuda.mem_get_info()[0] // ROOM))) as pool:
        failed, rows = zip(*pool.map(run, files))
    print(table([["file", *WORDS, "seconds"], *rows]))
    return int(any(failed))


if __name__ == "__main__":
    die_at_ctrl_c()
    run_program(main)
