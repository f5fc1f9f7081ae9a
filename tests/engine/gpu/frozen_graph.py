"""A CUDA graph where there is no GPU: what a function launched, with the grids, numbers and addresses of
its recording. A replay launches that again and runs none of the function, so whatever the host decided
while it recorded stays, as on a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

_READS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero"}  # the host would wait


class FrozenGraph:
    """Stands for `engine.runners.gpu.cuda_graphs.CudaGraph`."""

    def __init__(self, function: Callable[[], Tensor], pool: object = None) -> None:
        recorder = _Recorder()
        run = InterpretedFunction.run
        with pytest.MonkeyPatch.context() as patch, recorder:
            patch.setattr(
                InterpretedFunction, "run", lambda *args, **how: recorder.kernel(run, args, how)
            )
            self._output = function()
        self._calls = recorder.calls

    def replay(self) -> Tensor:
        for call in self._calls:
            call()
        return self._output


class _Recorder(TorchDispatchMode):
    """Keeps every launch: the tensors that it was given live on, as memory of a graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self._interpreting = False

    def kernel(self, run: Callable[..., None], args: tuple[Any, ...], how: dict[str, Any]) -> None:
        self._interpreting = True  # torch's calls in there are not launches
        try:
            run(*args, **how)
        finally:
            self._interpreting = False
        self.calls.append(partial(run, *args, **how))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if self._interpreting or "empty" in name:
            return out
        assert name not in _READS, f"{name} reads on the host, which a graph cannot record"
        if func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs))
            return out
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if not _addresses(made) <= _addresses(tree_leaves((args, kwargs))):  # otherwise a view
            self.calls.append(partial(_write_again, made, partial(func, *args, **kwargs)))
        return out


def _addresses(values: list[Any]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in values if isinstance(each, Tensor)}


def _write_again(made: list[Tensor], call: Callable[[], Any]) -> None:
    """Into the memory of the recording."""
    found = [each for each in tree_leaves(call()) if isinstance(each, Tensor)]
    for place, value in zip(made, found, strict=True):
        place.copy_(value)
