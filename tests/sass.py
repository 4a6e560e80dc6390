"""What machine code consists of, by the disassembler that comes with Triton."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

from glm_gpu.kernels.cubins import Cubin, Specialization, bundled_tool, compile_kernel

# An instruction behind its address and predicate; a place that can be jumped to; a jump.
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z0-9_.]+)")
_LABEL = re.compile(r"\s*(\.L_x?_?\d+):")
_BRANCH = re.compile(r"BRA.*`\((\.L_x?_?\d+)\)")


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    Attributes:
        registers: of a thread.
        instructions: how often each occurs.
        loops: the same for each loop that holds no other.
    """

    registers: int
    instructions: Counter
    loops: tuple[Counter, ...]

    def count(self, pattern: str) -> int:
        """Instructions whose name matches."""
        return sum(number for name, number in self.instructions.items() if re.match(pattern, name))


def compile_one(specialization: Specialization, arch: int) -> tuple[int, Specialization, Code, int, list[int]]:
    """A kernel compiled: its architecture, itself, its code, its bytes of shared memory, bits of each parameter."""
    compiled = compile_kernel(specialization, arch)
    head = compiled.ptx.split(".entry", 1)[1].split(")", 1)[0]
    parameters = [int(bits) for bits in re.findall(r"\.param\s+\.[bufs](\d+)", head)]
    return arch, specialization, disassemble(compiled.cubin), compiled.cubin.shared_bytes, parameters


def disassemble(cubin: Cubin) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.image)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        lines = _run("nvdisasm", "-c", file.name).splitlines()
    labels, spans = {}, []
    for number, line in enumerate(lines):
        if match := _LABEL.match(line):
            labels[match[1]] = number
        if (match := _BRANCH.search(line)) and match[1] in labels:
            spans.append((labels[match[1]], number))
    inner = [span for span in spans if not any(_holds(span, other) for other in spans)]
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    return Code(registers, _count(lines), tuple(_count(lines[begin : end + 1]) for begin, end in inner))


def _run(tool: str, *arguments: str) -> str:
    command = [str(bundled_tool(tool)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _holds(span, other):
    return span != other and span[0] <= other[0] and other[1] <= span[1]


def _count(lines) -> Counter:
    return Counter(match[1] for line in lines if (match := _INSTRUCTION.match(line)))
