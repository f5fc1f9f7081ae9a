"""The stand-in for a GPU works with a torch that is built with CUDA, too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.gpu.cuda_stand_in import boundary, replace_class, with_base

_CLASSES = ("Stream", "Event", "CUDAGraph")


def _over_c(shown: type) -> type:
    """As in a build with CUDA: over a type of C, which takes no methods and is not made by `object`."""
    return with_base(shown, type("_C", (SimpleNamespace,), {}).__mro__[1])


@pytest.mark.parametrize("with_cuda", [False, True])
def test_streams_events_and_graphs(with_cuda: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if with_cuda:
            for name in _CLASSES:
                replace_class(patch, getattr(torch.cuda, name), _over_c(getattr(torch.cuda, name)))
            with pytest.raises(TypeError, match="immutable"):
                torch.cuda.Stream.__mro__[1].query = None  # type: ignore[method-assign, assignment]
        before = {name: getattr(torch.cuda, name) for name in _CLASSES}
        with pytest.MonkeyPatch.context() as inner, boundary(inner) as launches:
            _use()
            assert launches.kernels == ["graph"]
            assert launches.waits == 1
        assert all(getattr(torch.cuda, name) is shown for name, shown in before.items())


def _use() -> Any:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    assert isinstance(stream, torch.cuda.Stream)
    with torch.cuda.stream(stream):
        event.record(torch.cuda.current_stream())
    stream.wait_event(event)
    event.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.capture_end()
    graph.replay()
    with pytest.raises(AssertionError):
        event.record("a stream")
