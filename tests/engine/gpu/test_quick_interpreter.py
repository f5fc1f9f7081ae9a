"""What the interpreter computes, refuses and restores is what Triton's own does."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from tests.engine.gpu import quick_interpreter


@pytest.fixture
def tritons_own() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", quick_interpreter.patch_language)
        patch.setattr(interpreter, "_get_np_dtype", quick_interpreter.numpy_dtype)
        patch.setattr(interpreter, "_convert_float", quick_interpreter.convert_float)
        patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
        patch.setattr(core.tensor, "__init__", quick_interpreter.make_tensor)
        patch.setattr(core.block_type, "__init__", quick_interpreter.make_block_type)
        patch.setattr(core.block_type, "with_element_ty", quick_interpreter.with_element_type)
        patch.setattr(TritonSemantic, "broadcast_impl_value", quick_interpreter.broadcast)
        patch.setattr(TritonSemantic, "binary_op_type_checking_impl", quick_interpreter.operands)
        patch.setattr(TritonSemantic, "computation_type_impl", quick_interpreter.computation_type)
        patch.setattr(core, "_unwrap_if_constexpr", quick_interpreter.unwrap)
        patch.setattr(interpreter.TensorHandle, "__post_init__", quick_interpreter.check_handle)
        patch.setattr(core.dtype, "__eq__", quick_interpreter.same_type)
        for name, predicate in quick_interpreter.predicates.items():
            patch.setattr(core.dtype, name, predicate)
        yield


@triton.jit
def _shares(values, width, BLOCK: tl.constexpr):
    peak = tl.max(values, 0)
    powers = tl.exp(values - peak)
    inside = tl.arange(0, BLOCK) < width
    return tl.where(inside, powers / tl.sum(tl.where(inside, powers, 0.0), 0), 0.0)


@triton.jit
def _mixed_kernel(x_ptr, codes_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):
    """Types of 8 to 64 bits, scalars and blocks of one and two dimensions, calls and loops."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(3):
        codes = tl.load(codes_ptr + step * width + columns, mask=inside, other=1)
        total += _shares(x * (step + 1), width, BLOCK) * (codes & 0x0F).to(tl.float32)
    square = total[:, None] * x[None, :] + tl.dot(total[:, None], x[None, :])
    wide = (square.to(tl.bfloat16).to(tl.float32) - codes[None, :].to(tl.int8)) * 0.5
    tl.store(out_ptr + row * stride + columns, tl.sum(wide, 0).to(tl.float16), mask=inside)


def compute() -> Tensor:
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(3, 20, generator=dice).bfloat16()
    codes = torch.randint(0, 255, (3, 20), generator=dice, dtype=torch.uint8)
    out = torch.zeros(3, 20, dtype=torch.float16)
    _mixed_kernel[(3,)](x, codes, out, 20, 20, BLOCK=32)
    return out


@pytest.fixture
def expected(tritons_own: None) -> Tensor:
    return compute()


def test_a_kernel_has_the_bits_of_tritons_own(request: pytest.FixtureRequest) -> None:
    found = compute()
    want = request.getfixturevalue("expected")
    assert torch.equal(found, want) and want.std() > 0.1


@triton.jit
def _convert_kernel(halves_ptr, floats_ptr, back_ptr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    floats = tl.load(halves_ptr + places).to(tl.float32)
    tl.store(floats_ptr + places, floats)
    tl.store(back_ptr + places, floats.to(tl.bfloat16))


def test_every_bfloat16_is_read_and_written_as_by_torch() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(torch.bfloat16)
    floats, back = torch.zeros(2**16), torch.zeros_like(halves)
    _convert_kernel[(4,)](halves, floats, back, BLOCK=2**14)
    assert torch.equal(floats.view(torch.int32), halves.float().view(torch.int32))
    assert torch.equal(back.view(torch.int16), halves.view(torch.int16))


@triton.jit
def _mismatched_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 8), tl.arange(0, 8) + tl.arange(0, 4))


@triton.jit
def _odd_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 8), tl.zeros([3], tl.int32))


@pytest.mark.parametrize(
    ("kernel", "refusal"),
    [(_mismatched_kernel, "incompatible dimensions"), (_odd_kernel, "must be a power of 2")],
)
def test_what_no_device_would_compute_is_refused(kernel: object, refusal: str) -> None:
    with pytest.raises(InterpreterError, match=refusal):
        kernel[(1,)](torch.zeros(8, dtype=torch.int32))  # type: ignore[index]


@pytest.mark.parametrize("fails", [False, True])
def test_the_language_is_restored_after_a_launch(fails: bool) -> None:
    before = tl.arange, core.arange, core.tensor.__add__, core.dtype.to_ir, tl.range
    if fails:
        with pytest.raises(InterpreterError):
            _mismatched_kernel[(1,)](torch.zeros(8, dtype=torch.int32))
    else:
        compute()
    assert (tl.arange, core.arange, core.tensor.__add__, core.dtype.to_ir, tl.range) == before
    assert core.is_builtin(tl.arange)
