"""Triton's interpreter without the work that it repeats.

For each call of a device function it looks through its whole language for what to replace, it makes
types, shapes and constants of each result anew, finds the type of each sum by a dozen comparisons of
names, and computes sums of whole numbers again in 64 bits for a check that is dropped unless kernels are
debugged. All that takes longer than the numbers. What a kernel computes, and what the interpreter
refuses, stays: see `test_quick_interpreter`.
"""

import math
from collections.abc import Callable
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

operands = TritonSemantic.binary_op_type_checking_impl
computation_type = TritonSemantic.computation_type_impl
unwrap = core._unwrap_if_constexpr
check_handle = interpreter.TensorHandle.__post_init__
same_type = core.dtype.__eq__
_PLAIN = {core.tensor, core.dtype, int, float, bool, str, type(None)}
_FIELDS = {  # of a type, by its name
    "is_int": frozenset((*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES)),
    "is_int_signed": frozenset(core.dtype.SINT_TYPES),
    "is_int_unsigned": frozenset(core.dtype.UINT_TYPES),
    "is_floating": frozenset(core.dtype.FP_TYPES),
}
predicates = {name: getattr(core.dtype, name) for name in _FIELDS}


def _called(replacement: Any) -> Any:
    """The function below a name of the language, without those that check who calls it."""
    member = (getattr(replacement, "__kwdefaults__", None) or {}).get("member")
    if not hasattr(member, "__wrapped__"):
        return replacement
    function = member.__wrapped__

    def _call(*given: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return function(*given, **named)

    return _call


def _operator(name: str, *rest: Any, swapped: bool = False) -> Callable[..., Any]:
    """A method of a tensor that computes with another one or a number."""
    semantic = interpreter.interpreter_semantic
    compute = getattr(semantic, name)

    def _call(ours: Any, theirs: Any, _semantic: Any = None) -> Any:
        theirs = core._unwrap_if_constexpr(theirs)
        return compute(theirs, ours, *rest) if swapped else compute(ours, theirs, *rest)

    def _compare(ours: Any, theirs: Any, _semantic: Any = None) -> Any:
        return compute(ours, semantic.to_tensor(theirs))

    return (
        _compare if name in ("less_than", "less_equal", "greater_than", "greater_equal") else _call
    )


_OPERATORS = {
    "__add__": _operator("add", True),
    "__radd__": _operator("add", True, swapped=True),
    "__sub__": _operator("sub", True),
    "__rsub__": _operator("sub", True, swapped=True),
    "__mul__": _operator("mul", True),
    "__rmul__": _operator("mul", True, swapped=True),
    "__and__": _operator("and_"),
    "__lt__": _operator("less_than"),
    "__le__": _operator("less_equal"),
    "__gt__": _operator("greater_than"),
    "__ge__": _operator("greater_equal"),
}


def _replacement(owner: Any, name: str) -> Any:
    if owner is core.tensor and name in _OPERATORS:
        return _OPERATORS[name]
    return _called(vars(owner)[name])


# What the interpreter sets in the language for a function that sees `tl` and `tl.core`.
_scope = patch_language(SimpleNamespace(__globals__={"tl": tl, "core": core}))
REPLACED: list[tuple[Any, str, Any]] = [
    (owner, name, _replacement(owner, name)) for owner, name, _ in _scope._changes
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


def _operands(semantic: Any, left: Any, right: Any, *rules: Any, **named: Any) -> Any:
    """Operands of one type are only made as large as each other, like a pointer and whole numbers; a
    number beside a type is made once."""
    if named or len(rules) > 2 or type(left) is not core.tensor:
        return operands(semantic, left, right, *rules, **named)
    kind = left.dtype
    if type(right) is core.tensor:
        if kind.is_ptr():
            quick = rules[:1] == (True,) and right.dtype.is_int()
        else:
            quick = kind is right.dtype
        if quick:
            return semantic.broadcast_impl_value(left, right)
    elif type(right) in (int, float):
        made = vars(left.type).setdefault("_numbers", {})
        key = type(right), right, rules
        if key not in made:
            found = operands(semantic, left, right, *rules)
            if found[0] is not left:
                return found
            made[key] = found[1]
        return left, made[key]
    return operands(semantic, left, right, *rules)


def _computation_type(known: dict[Any, Any], semantic: Any, ours: Any, *rest: Any) -> Any:
    key = ours.name, rest[0], rest[1].name, *rest[2:]
    if key not in known:
        known[key] = computation_type(semantic, ours, *rest)
    return known[key]


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    return value.value if kind is core.constexpr else unwrap(value)


def _check_handle(made: Any) -> None:
    kind = made.dtype
    if type(kind) is not core.dtype or made.data.itemsize * 8 > max(8, kind.primitive_bitwidth):
        check_handle(made)


def _same_type(ours: Any, theirs: Any) -> bool:
    return ours is theirs or same_type(ours, theirs)


def install(patch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {}
    types: dict[Any, Any] = {}
    kinds: dict[Any, Any] = {}
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
    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", _operands)
    patch.setattr(
        TritonSemantic, "computation_type_impl", lambda *given: _computation_type(kinds, *given)
    )
    patch.setattr(core, "_unwrap_if_constexpr", _unwrap)
    patch.setattr(interpreter.TensorHandle, "__post_init__", _check_handle)
    patch.setattr(core.dtype, "__eq__", _same_type)
    for name, names in _FIELDS.items():
        patch.setattr(core.dtype, name, lambda kind, names=names: kind.name in names)
