"""Which reads of a kernel's inner loop are waited for in the turn that makes them, by Triton's TTGIR.

Run as a program, it compiles the product of 4-bit codes for the compute capability that is given, and
prints a JSON line a kernel.
"""

import json
import re
import sys

_LOOP = re.compile(r"scf\.for .*?\n(.*?)\n\s*scf\.yield", re.DOTALL)
_LOAD = re.compile(r"(%\w+) = tt\.load ")


def waited(ttgir: str) -> list[str]:
    """The names of what is loaded into registers in a loop, and used before its next turn."""
    found = []
    for body in _LOOP.findall(ttgir):
        for name in _LOAD.findall(body):
            uses = len(re.findall(rf"{re.escape(name)}\b", body))
            found += [name] if uses > 1 else []
    return found


def main() -> None:
    from tests.engine.gpu import aot_compile as made

    def _shown(kernel: object) -> made.Compiled:
        text = kernel.asm["ttgir"]  # type: ignore[attr-defined]
        line = {"loops": len(_LOOP.findall(text)), "waited": waited(text)}
        line |= {"loads": sum(len(_LOAD.findall(body)) for body in _LOOP.findall(text))}
        sys.stdout.write(json.dumps(line) + "\n")
        return plain(kernel)

    plain, made._inspect = made._inspect, _shown
    made.formats.capability = lambda: made.TARGET.arch
    with made.compiling():
        made.quantized(4096, 4096, 4, 128)


if __name__ == "__main__":
    main()
