"""Triton's interpreter without the work that it repeats.

For each call of a device function it looks through its whole language for what to replace, it makes
types, shapes and constants of each result anew, and it computes sums of whole numbers again in 64 bits
for a check that is dropped unless kernels are debugged. All that takes longer than the numbers. What a
kernel computes, and what the interpreter refuses, stays: see `test_quick_interpreter`.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

patch_language = interpreter._patch_lang
numpy_dtype = interpreter._get_np_dtype
convert_float = interpreter._convert_float
make_tensor = core.tensor.__init__
make_block_type = core.block_type.__init__
with_element_type = core.block_type.with_element_ty
broadcast = TritonSemantic.broadcast_impl_value

# What the interpreter sets in the language for a function that sees `tl` and `tl.core`.
_scope = patch_language(SimpleNamespace(__globals__={"tl": tl, "core": core}))
REPLACED: list[tuple[Any, str, Any]] = [
    (owner, name, vars(owner)[name]) for owner, name, _ in _scope._changes
]
_scope.restore()


class _OfALaunch(interpreter._LangPatchScope):
    """The language is replaced from here until `restore`."""

    launched = False

    def __init__(self) -> None:
        super().__init__()
        type(self).launched = True
        for owner, name, replacement in REPLACED:
            self.set_attr(owner, name, replacement)

    def restore(self) -> None:
        super().restore()
        type(self).launched = False


def _patch_once(function: Any) -> Any:
    return interpreter._LangPatchScope() if _OfALaunch.launched else _OfALaunch()


def _numpy_dtype(known: dict[str, Any], dtype: Any) -> Any:
    element = dtype.scalar
    if element.name not in known:
        known[element.name] = numpy_dtype(element)
    return known[element.name]


def _convert_quickly(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """A bfloat16 has the upper bits of a float32; the interpreter builds it of its parts, and loses the
    smallest of all. It cuts where hardware rounds, here too."""
    if given == tl.bfloat16 and wanted == tl.float32:
        return values.view(np.uint16).astype(np.uint32) << 16
    if given == tl.float32 and wanted == tl.bfloat16 and rounding is None:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return convert_float(values, given, wanted, rounding)


def _make_tensor_quickly(made: Any, handle: Any, type: Any) -> None:
    """Tensors of one type share its shape, which no kernel changes."""
    shared = vars(type).get("_shared")
    if shared is None:
        shape = type.shape if type.is_block() else ()
        values = core.tuple([core.constexpr(size) for size in shape])
        shared = type._shared = (values, core.constexpr(math.prod(shape)), type.scalar)
    made.handle, made.type = handle, type
    made.shape, made.numel, made.dtype = shared


def _make_block_type_quickly(known: dict[Any, Any], made: Any, element: Any, shape: Any) -> None:
    """Types of numbers are known by their names; those of pointers are made for each launch."""
    if element.is_ptr() or not isinstance(shape, list | tuple | core.tuple):
        return make_block_type(made, element, shape)
    sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
    key = element.name, *sizes
    if key not in known:
        make_block_type(made, element, shape)
        known[key] = vars(made)
    made.__dict__ = known[key]


def _with_element_type(block: Any, element: Any) -> Any:
    """Kept beside the element, so that no other gets its address."""
    known = vars(block).setdefault("_with_element_type", {})
    if id(element) not in known:
        known[id(element)] = element, with_element_type(block, element)
    return known[id(element)][1]


def _broadcast(semantic: Any, left: Any, right: Any) -> Any:
    ours, theirs = left.type, right.type
    if ours.is_block() and theirs.is_block() and ours.shape.values == theirs.shape.values:
        return left, right
    return broadcast(semantic, left, right)


def install(patch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {}
    types: dict[Any, Any] = {}
    unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch.setattr(interpreter, "_patch_lang", _patch_once)
    patch.setattr(interpreter, "_get_np_dtype", lambda dtype: _numpy_dtype(known, dtype))
    patch.setattr(interpreter, "_convert_float", _convert_quickly)
    patch.setattr(interpreter.interpreter_builder, "options", unchecked)
    patch.setattr(core.tensor, "__init__", _make_tensor_quickly)
    patch.setattr(
        core.block_type, "__init__", lambda *given: _make_block_type_quickly(types, *given)
    )
    patch.setattr(core.block_type, "with_element_ty", _with_element_type)
    patch.setattr(TritonSemantic, "broadcast_impl_value", _broadcast)
