"""Stand-ins for vLLM and for libraries that are not installed, so that its test files can be imported."""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Iterator
from typing import Any

from vllm_suite.item import ITEM

# Libraries that a test file imports at its top; others ask whether theirs are there.
_WANTED = ("openai_harmony", "mcp", "pybase64", "soundfile", "librosa", "tests", "gpt_oss")


class Stub:
    """Stands for anything of vLLM. Using it while a test runs is noted."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        ITEM.touched = ITEM.touched or f"{self.__name__}.{name}"
        return Stub(f"{self.__name__}.{name}")

    def __call__(self, *given: Any, **_named: Any) -> Any:
        ITEM.touched = ITEM.touched or self.__name__
        # A decorator gives back what it decorates.
        alone = len(given) == 1 and isinstance(given[0], types.FunctionType | type)
        return given[0] if alone else Stub(f"{self.__name__}()")

    def __mro_entries__(self, _bases: Any) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, _key: Any) -> Any:
        return self

    def __or__(self, _other: Any) -> Any:
        return Any

    __ror__ = __or__


class _Loader(importlib.abc.Loader):
    def __init__(self, known: dict[str, dict[str, Any]]) -> None:
        self._known = known

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        made: dict[str, Any] = self._known.get(spec.name, {})
        module.__dict__.update(made)

        def _attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Stub(f"{spec.name}.{name}")

        module.__getattr__ = _attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


class Finder(importlib.abc.MetaPathFinder):
    """Finds vLLM's modules and its tests' helpers (first), or libraries that are not installed (last)."""

    def __init__(self, known: dict[str, dict[str, Any]], *, last: bool) -> None:
        self._known = known
        self._last = last

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = name.split(".")[0]
        own = top == "vllm" or name in self._known
        if own == self._last or (self._last and top not in _WANTED):
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(self._known), is_package=True)
