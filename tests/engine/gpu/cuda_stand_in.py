"""A GPU that is not there: torch's Python code over replaced C functions.

Only what torch.cuda calls in C is replaced, so its own argument checks run. With `fake_device`
tensors have the device `cuda:0` and no content: a read on the host or a tensor on another device
raises, as does a kernel that gets a tensor of another device. With `numbers_on_the_host` the same
code runs on host memory, so that its results can be compared.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpretedFunction

PROCESSORS = 8
MEMORY = 80 << 30


@dataclass
class Launches:
    """What was asked of the device."""

    kernels: list[str] = field(default_factory=list)
    waits: int = 0  # times that the host waited for the device
    # Of each launch, what Triton compiles a variant of the kernel for: the constants, the types, and
    # which whole numbers are 1 or divisible by 16.
    variants: set[Any] = field(default_factory=set)
    allocated: int = 0  # bytes that the device says are allocated
    peak: int = 0


class _Stream:
    """The C base of torch.cuda.Stream."""

    def __new__(cls, priority: int = 0, stream_id: int = 1, device_index: int = 0, **_: Any) -> Any:
        assert isinstance(priority, int)
        stream = object.__new__(cls)
        stream.stream_id, stream.device_index, stream.device_type = stream_id, device_index, 1
        stream.device = torch.device("cuda", device_index)
        return stream

    def __init__(self, *_: Any, **__: Any) -> None: ...


def _graph_base(launches: Launches) -> dict[str, Any]:
    def begin(self: Any, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        assert pool is None or isinstance(pool, tuple)

    return {
        "__new__": lambda cls, keep_graph=False: object.__new__(cls),
        "__init__": lambda self, *_, **__: None,
        "capture_begin": begin,
        "capture_end": lambda self: None,
        "replay": lambda self: launches.kernels.append("graph"),
        "pool": lambda self: (0, 1),
    }


def _event_base(launches: Launches) -> dict[str, Any]:
    def synchronize(self: Any) -> None:
        launches.waits += 1

    def on_stream(self: Any, stream: Any) -> None:
        assert isinstance(stream, torch.cuda.Stream)

    def make(cls: Any, **flags: bool) -> Any:
        assert all(isinstance(flag, bool) for flag in flags.values())
        return object.__new__(cls)

    return {
        "__new__": make,
        "__init__": lambda self, *_, **__: None,
        "record": on_stream,
        "wait": on_stream,
        "synchronize": synchronize,
        "query": lambda self: True,
        "elapsed_time": lambda self, other: 1.0,
    }


@contextmanager
def boundary(patch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """One device behind the functions that torch.cuda calls in C."""
    launches, current = Launches(), [0]
    streams: dict[int, int] = {0: 0}

    def to_device(index: int) -> int:
        assert type(index) is int and 0 <= index < 1, index
        before, current[0] = current[0], index
        return before

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        streams[device_index] = stream_id

    def wait() -> None:
        launches.waits += 1

    functions: dict[str, Callable[..., Any]] = {
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: current[0],
        "_cuda_setDevice": to_device,
        "_cuda_exchangeDevice": to_device,
        "_cuda_maybeExchangeDevice": to_device,
        "_cuda_getCurrentStream": lambda index: (streams[index], index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": wait,
        "_cuda_emptyCache": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": lambda index: {
            "allocated_bytes": {"all": {"current": launches.allocated, "peak": launches.peak}}
        },
        "_cuda_resetPeakMemoryStats": lambda index: None,
    }
    for name, function in functions.items():
        patch.setattr(torch._C, name, function, raising=False)
    patch.setattr(torch.cuda, "_exchange_device", to_device)
    patch.setattr(torch.cuda, "_maybe_exchange_device", to_device)
    patch.setattr(torch._C, "_has_cuda", True)
    patch.setattr(torch.cuda, "_initialized", True)
    patch.setattr(torch.cuda, "_cudart", SimpleNamespace(cudaMemGetInfo=lambda i: (MEMORY, MEMORY)))
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, major=9, minor=0)
    patch.setattr(torch.cuda, "_get_device_properties", lambda index: properties, raising=False)
    patch.setattr("torch.cuda.graphs._graph_pool_handle", lambda: (0, 1))
    for shown, base in (
        (torch.cuda.Stream, _Stream),
        (torch.cuda.Event, type("_Event", (), _event_base(launches))),
        (torch.cuda.CUDAGraph, type("_Graph", (), _graph_base(launches))),
    ):
        replace_class(patch, shown, with_base(shown, base))

    def record_stream(tensor: Tensor, stream: Any) -> None:
        assert isinstance(stream, torch.cuda.Stream)

    patch.setattr(Tensor, "record_stream", record_stream)
    patch.setattr(Tensor, "pin_memory", _pinned)
    yield launches


def with_base(shown: type, base: type) -> type:
    """torch's Python class over a base in Python: in a build with CUDA its own base is a type of C, which
    takes no other methods, and of which no instance is made without a driver."""
    cell = CellType()

    def _moved(value: Any) -> Any:
        if isinstance(value, staticmethod | classmethod):
            return type(value)(_moved(value.__func__))
        if not isinstance(value, FunctionType) or "__class__" not in value.__code__.co_freevars:
            return value
        names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closure = tuple(cell if name == "__class__" else each for name, each in names)
        copy = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
        )
        copy.__kwdefaults__ = value.__kwdefaults__
        return copy

    own = {k: _moved(v) for k, v in vars(shown).items() if k not in ("__dict__", "__weakref__")}
    made = type(shown.__name__, (base,), own)
    cell.cell_contents = made  # what `super()` in its methods means
    return made


def replace_class(patch: pytest.MonkeyPatch, shown: type, made: type) -> None:
    """Wherever torch.cuda has it by a name."""
    for name, module in list(sys.modules.items()):
        if name == "torch.cuda" or name.startswith("torch.cuda."):
            for own, value in list(vars(module).items()):
                if value is shown:
                    patch.setattr(module, own, made)


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin a tensor on {tensor.device}")
    return tensor.clone()


def _forgetful(tensor: Tensor) -> Tensor:
    return torch.empty(_pinned(tensor).shape, dtype=tensor.dtype)


def _check_kernel(launches: Launches) -> Callable[..., None]:
    def run(
        kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **constants: Any
    ) -> None:
        name = kernel.fn.__name__
        launches.kernels.append(name)
        plain = kernel.kwargs.get("do_not_specialize") or ()
        names = kernel.arg_names
        kinds = tuple(
            value.dtype
            if isinstance(value, Tensor)
            else (value == 1, value % 16 == 0)
            if isinstance(value, int) and names[number] not in plain
            else type(value)
            for number, value in enumerate(args)
        )
        launches.variants.add((name, kinds, tuple(sorted(constants.items()))))
        assert len(grid) <= 3 and all(type(n) is int and n > 0 for n in grid), (name, grid)
        assert all(n <= 65535 for n in grid[1:]), (name, grid)
        for number, value in enumerate(args):
            if isinstance(value, Tensor):
                assert isinstance(value, FakeTensor), f"{name}: argument {number} is on the host"
                assert value.device == torch.device("cuda", 0), (name, number, value.device)
            else:
                assert isinstance(value, int | float), (name, number, value)

    return run


@contextmanager
def _guarded_device() -> Iterator[None]:
    """A torch built without CUDA refuses some operations on `cuda` tensors because nothing can make
    that device the current one, and one built with it asks the driver: the guard of `meta` tensors does
    nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
    guards = (ctypes.c_void_p * 16).in_dll(library, name)
    cuda, meta = 1, 14  # c10::DeviceType
    before, guards[cuda] = guards[cuda], guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before or guards[meta]  # operations on tensors that are left


def cache_operations(patch: pytest.MonkeyPatch) -> None:
    """For a fake device that counts no operations of torch: its mode caches none on tensors of the
    inference mode, but those on tensors without gradients, and then takes half of the time. What may be
    done with the former is seen where kernels compute, in the interpreter."""

    def enter(mode: Any) -> None:
        mode.gradients = torch.no_grad()
        mode.gradients.__enter__()

    patch.setattr(torch.inference_mode, "__enter__", enter)
    patch.setattr(
        torch.inference_mode, "__exit__", lambda mode, *raised: mode.gradients.__exit__(*raised)
    )


@contextmanager
def fake_device(patch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Tensors on `cuda:0` that have no content, and kernels that only check their arguments."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_guarded_device())
        launches = stack.enter_context(boundary(patch))
        patch.setattr(InterpretedFunction, "run", _check_kernel(launches))
        # A new tensor without content: of a single number the mode would keep the value, and read it.
        patch.setattr(Tensor, "pin_memory", _forgetful)
        stack.enter_context(mode)
        yield launches


class _ToHost(TorchFunctionMode):
    """Puts on the host what the code places on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            cuda = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if cuda else value

        fields = {name: moved(value) for name, value in (kwargs or {}).items()}
        if fields.get("device") == "cuda":
            fields["device"] = "cpu"
        if "pin_memory" in fields:
            fields["pin_memory"] = False
        return func(*[moved(value) for value in args], **fields)


@contextmanager
def numbers_on_the_host(patch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """The GPU's code with its kernels in the interpreter and its tensors in host memory."""
    with boundary(patch) as launches, _ToHost():
        yield launches
