"""`benchmarks.engine_gpu --toy` without a GPU, with no more packages than the script names: kernels in
Triton's interpreter, tensors in host memory. Prints, as JSON, what each section left in memory.
Whatever a cycle of references keeps counts as left."""

import gc
import json
import sys
from typing import Any

import pytest
import torch
import torch._dynamo  # modes of torch import it, which fails where a device only seems to be

from tests.engine.few_packages import hide_others
from tests.engine.gpu.cuda_stand_in import numbers_on_the_host
from tests.engine.gpu.frozen_graph import FrozenGraph
from tests.engine.gpu.quick_interpreter import install


def live_bytes() -> int:
    """Of all tensors that Python's objects hold."""
    tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def main() -> int:
    hide_others()
    for name in [name for name in sys.modules if name.split(".")[0] in ("pytest", "_pytest")]:
        del sys.modules[name]
    from benchmarks import engine_gpu
    from benchmarks.gpu import sections, timing
    from engine.runners.gpu import runner as gpu_runner
    from engine.runners.gpu import tuning as gpu_tuning

    left: list[dict[str, Any]] = []
    run_section = timing.run_section

    def watched(name: str, seconds: float, deadline: float, body: Any) -> bool:
        good = run_section(name, seconds, deadline, body)
        left.append({"section": name, "good": good, "bytes": live_bytes()})
        return good

    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        patch.setattr(timing, "run_section", watched)
        patch.setattr(timing, "_FLUSHED", 1)
        patch.setattr(timing.torch.cuda, "_sleep", lambda cycles: None, raising=False)
        # Of others, tensors in host memory have products of a CPU's own.
        patch.setattr(sections, "DTYPE", torch.float32)
        patch.setattr(engine_gpu, "has_device", lambda: True)
        patch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
        patch.setattr(engine_gpu, "machine", lambda: {"gpu": "none"})
        for module in (gpu_runner, gpu_tuning):
            patch.setattr(module, "CudaGraph", FrozenGraph)
        gc.collect()
        gc.disable()
        with numbers_on_the_host(patch):
            torch.cuda.set_device(sections.DEVICE)
            before = live_bytes()
            status = engine_gpu.main(["--toy", *sys.argv[1:]])
    found = {"status": status, "before": before, "left": left}
    sys.stdout.write(json.dumps(found) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
