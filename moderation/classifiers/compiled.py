"""The C extension of the classifier and of the loose view, where this version has built it."""

__all__ = ["Kernel", "LooseText", "Window", "is_compiled"]

_INTERFACE = 4  # of kernel.c
try:
    from moderation.classifiers._kernel import INTERFACE, Kernel, LooseText, Window
except ImportError:  # installed without a C compiler
    INTERFACE = 0
if INTERFACE != _INTERFACE:  # not built, or by an earlier version
    Kernel = LooseText = Window = None  # type: ignore[assignment, misc]


def is_compiled() -> bool:
    return Kernel is not None
