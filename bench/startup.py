"""How long a user waits: to import the package, for --help, and for the demo's first token.

Usage: python bench/startup.py [REPEATS]. Prints median and spread of whole processes, and keeps them in
bench/results/startup.json. Budgets on a
quiet machine: 0.3 s for import and help, 1 s for the first token.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import record

import glm_gpu
from glm_gpu.machine import cpu_name, num_physical_cores

PYTHON = sys.executable
CASES = {
    "python -c pass": ([PYTHON, "-c", "pass"], None),
    "import glm_gpu": ([PYTHON, "-c", "import glm_gpu"], 0.3),
    "glm-gpu --help": ([PYTHON, "-m", "glm_gpu", "--help"], 0.3),
    "glm-gpu run --help": ([PYTHON, "-m", "glm_gpu", "run", "--help"], 0.3),
    "first token of the demo": ([PYTHON, "-m", "glm_gpu", "run", "And it came to pass", "--max-tokens", "1"], 1.0),
}


def wall_s(command: list[str]) -> float:
    """Seconds that a process takes, start to end."""
    began = time.perf_counter()
    folder = Path(glm_gpu.__file__).parent.parent
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(f"{cpu_name()}, {num_physical_cores()} cores, load {os.getloadavg()[0]:.2f}, median of {repeats}")
    medians = {}
    for name, (command, budget_s) in CASES.items():
        wall_s(command)  # files into the page cache
        times = sorted(wall_s(command) for _ in range(repeats))
        medians[name] = statistics.median(times)
        limit = f"   budget {budget_s} s" if budget_s else ""
        print(f"{name:<24} {medians[name]:.3f} s   {times[0]:.3f} to {times[-1]:.3f}{limit}")
    print(record.save("startup", {"seconds": medians, "budgets": {n: case[1] for n, case in CASES.items()}}))


if __name__ == "__main__":
    main()
