"""Bounds the time and the memory that a chat template takes.

A template is a program of the model's publisher, and reads what a client wrote. Loops, calls, filters,
assignments and the operators that make long values are counted; long values are refused before they
are made. Nothing is computed while a template is compiled.

On an event loop the limits are small: a rendering that passes them is done again in a thread.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from math import prod
from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import generate_lorem_ipsum

from core.clock import SystemClock
from core.errors import BadRequest

# Characters that a template makes; a step of it counts as many.
_STEP = 100
_WORK, _SECONDS = 2_000_000, 0.02  # on an event loop
_MOST_WORK, _MOST_SECONDS = 300_000_000, 5.0
_MOST_NUMBER = 100_000  # of an argument that says how long something is
_MOST_BITS = 10_000
_LOREM = 100  # words of a paragraph of `lipsum`, where nothing is said
_WIDE = re.compile(r"[0-9]{5,}|\*|\{[^{}]*\{")  # a width that may be large
_PIECES, _CHECKED = 64, 16  # pieces that are counted at once, and rounds between looks at the clock
# Methods whose result may be much longer than the text.
_GROWING = frozenset(
    ("format", "format_map", "translate", "expandtabs", "replace", "join", "ljust", "rjust", "center",
     "zfill")
)  # fmt: skip
# Filters whose result is no longer than the value; the others are counted.
_SMALL = frozenset(
    ("length", "count", "trim", "upper", "lower", "capitalize", "title", "default", "d", "first",
     "last", "string", "int", "float", "round", "abs", "safe", "escape", "e", "items")
)  # fmt: skip
_PLAIN = (int, float, bool, type(None))
_WIDENING = frozenset(("indent", "tojson", "center", "wordwrap", "batch", "slice", "truncate"))
_KEPT, _ROUNDS = "tollhouse_kept", "tollhouse_rounds"
_now = SystemClock.monotonic


class RenderingTakesLong(BadRequest):
    """Beyond the limits of the place where it was rendered."""


class _Work(threading.local):
    left = 0
    until = 0.0


_work = _Work()


def compiled(environment: Environment, source: str | nodes.Template) -> Template:
    """Raises jinja2.TemplateError."""
    tree = environment.parse(source) if isinstance(source, str) else source
    code = environment.compile(count_in(tree))
    return Template.from_code(environment, code, dict(environment.globals))


def render(template: Template, variables: Mapping[str, Any], *, is_trial: bool = False) -> str:
    """Raises RenderingTakesLong. `is_trial`: with the large limits wherever it is called."""
    limits = _MOST_WORK, _MOST_SECONDS
    if not is_trial and on_loop():
        limits = _WORK, _SECONDS
    _work.left, seconds = limits
    _work.until = _now() + seconds
    return template.render(variables)


def on_loop() -> bool:
    """Whether an event loop waits for this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Templates of it are rendered by `render`."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def limit(self) -> None:
        """To be called once all filters are set."""
        plain = ImmutableSandboxedEnvironment()
        plain.filters = dict(self.filters)
        for name in plain.filters.keys() - _SMALL:
            self.filters[name] = _limited(plain, name)
        self.filters |= {_KEPT: _kept, _ROUNDS: _rounds}
        self.concat = _joined  # type: ignore[method-assign]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is BuiltinMethodType:
            own = type(__obj.__self__)
            if own is dict or (own is str and __obj.__name__ not in _GROWING):
                kwargs.pop(
                    "_loop_vars", None
                )  # the compiler adds these for functions of the context
                kwargs.pop("_block_vars", None)
                return __obj(*args, **kwargs)  # it reached here, so the sandbox allows it
        _before(__obj, (*args, *(v for k, v in kwargs.items() if k[0] != "_")))
        return _kept(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _before_operator(operator, left, right)
        return _kept(super().call_binop(context, operator, left, right))


def count_in(template: nodes.Template) -> nodes.Template:
    """Counts rounds of loops and the sizes of what is assigned."""
    for loop in template.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, _ROUNDS)
    for each in template.find_all(nodes.Assign):
        if not isinstance(each.node, nodes.Const):
            each.node = _filtered(each.node, _KEPT)
    for block in template.find_all(nodes.AssignBlock):
        block.filter = _filtered(block.filter, _KEPT)
    return template


def _filtered(node: Any, name: str) -> nodes.Filter:
    line = node.lineno if node is not None else 1
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def _limited(plain: Environment, name: str) -> Callable[..., Any]:
    @pass_context  # so that it is never computed while the template is compiled
    def _filter(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        _before_filter(name, value, given)
        return _kept(plain.call_filter(name, value, args, kwargs, context, context.eval_ctx))

    return _filter


def _spend(steps: int, size: int = 0) -> None:
    left = _work.left = _work.left - steps * _STEP - size
    if left < 0:
        raise _too_long()


def _look() -> None:
    if _now() > _work.until:
        raise _too_long()


def _too_long() -> RenderingTakesLong:
    return RenderingTakesLong(
        "The model's chat template takes too long, or makes too long a text, for these messages.",
        next_step="Send fewer or shorter messages, or ask the operator to correct the template.",
        param="messages",
    )


def _kept(value: Any) -> Any:
    """Counts a value that the template made."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is str:
        _spend(1, len(value))
    elif isinstance(value, Iterator) and not isinstance(value, LoopContext):
        return _counted(value)
    else:
        _spend(1, _size(value))
        _look()
    return value


def _size(value: Any, depth: int = 0) -> int:
    """As text, roughly. A value that stands in it several times counts each time."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return _sizes((*value, *value.values()), depth)
    if isinstance(value, list | tuple):
        return _sizes(value, depth)
    return 8


def _sizes(values: Iterable[Any], depth: int) -> int:
    total, most = 0, _work.left
    for each in values:
        total += 64 + (len(each) if type(each) is str else _size(each, depth + 1))
        if total > most:
            raise _too_long()
    return total


def _rounds(values: Any) -> Any:
    try:
        count = len(values)
    except TypeError:
        return _counted(values)
    _spend(1 + count)
    _look()
    return values if count < _CHECKED else _Rounds(values)


class _Rounds:
    """Of a long loop: looks at the clock while it runs."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        for place, value in enumerate(self._values):
            if not place % _CHECKED:
                _look()
            yield value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend(1, _size(value))
        _look()
        yield value


def _joined(pieces: Iterable[str]) -> str:
    """What a template or a macro writes."""
    whole: list[str] = []
    found = iter(pieces)
    while part := list(islice(found, _PIECES)):
        _spend(1, sum(map(len, part)))
        whole += part
    return "".join(whole)


def _before(called: Any, given: tuple[Any, ...]) -> None:
    """The work that a call will be, before it is done."""
    sizes = sum(map(_size, given)) if given else 0
    method = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
    own = getattr(method, "__self__", None)
    if isinstance(own, str | bytes):
        return _before_method(method.__name__, own, given, sizes)
    if isinstance(own, int) or called is generate_lorem_ipsum:
        _check_numbers(given)
    if called is generate_lorem_ipsum:
        _spend(_LOREM * prod(max(1, abs(each)) for each in given if isinstance(each, int)))
    _spend(1, sizes)
    _look()


def _before_method(name: str, own: str | bytes, given: tuple[Any, ...], sizes: int) -> None:
    _check_numbers(given)
    numbers = sum(each for each in given if isinstance(each, int))
    if name in ("format", "format_map", "translate", "expandtabs"):
        if name.startswith("format") and _WIDE.search(str(own)):
            raise _too_long()
        _spend(1, (own.count("{") + 1 if name.startswith("f") else len(own)) * (sizes + numbers))  # type: ignore[arg-type]
    elif name == "replace":
        new = given[1] if len(given) > 1 else ""
        _spend(1, len(own) + (_occurrences(own, given[0]) * _size(new) if given else 0))
    elif name == "join":
        parts = given[0] if given else ()
        count = len(parts) if hasattr(parts, "__len__") else _MOST_NUMBER
        _spend(1 + count // 8, sizes + count * len(own))
    else:
        _spend(1, len(own) // 8 + sizes + numbers)


def _before_filter(name: str, value: Any, given: tuple[Any, ...]) -> None:
    if name in _WIDENING:
        _check_numbers(given)
    size = _size(value)
    sizes = sum(map(_size, given)) if given else 0
    numbers = sum(each for each in given if isinstance(each, int))
    if name == "replace" and isinstance(value, str) and len(given) > 1:
        _spend(1, size + _occurrences(value, given[0]) * _size(given[1]))
    elif name == "format":
        if _WIDE.search(str(value)):
            raise _too_long()
        _spend(1, (str(value).count("%") + 1) * sizes)
    elif name == "join" and given:
        count = len(value) if hasattr(value, "__len__") else _MOST_NUMBER
        _spend(1, size + count * sizes)
    elif name in _WIDENING:
        _spend(1, (size + 1) * (numbers + 1) // 8 if numbers > 8 else size)
    else:
        _spend(1, size // 8)


def _occurrences(text: Any, old: Any) -> int:
    return len(text) + 1 if not old else text.count(old) if type(old) is type(text) else 0


def _before_operator(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
        if bits > _MOST_BITS:
            raise _too_long()
    elif operator == "*":
        count = left if isinstance(left, int) else right if isinstance(right, int) else 1
        value = right if isinstance(left, int) else left
        _spend(1, max(0, count) * _size(value))
    elif operator == "%" and isinstance(left, str):
        if _WIDE.search(left):
            raise _too_long()
        _spend(1, (left.count("%") + 1) * _size(right))


def _check_numbers(given: tuple[Any, ...]) -> None:
    for each in given:
        if isinstance(each, int) and abs(each) > _MOST_NUMBER:
            raise _too_long()
