"""The C extension of the classifier, where this version has built it."""

__all__ = ["Kernel", "is_compiled"]

_INTERFACE = 3  # of kernel.c
try:
    from moderation.classifiers._kernel import INTERFACE, Kernel
except ImportError:  # installed without a C compiler
    INTERFACE = 0
if INTERFACE != _INTERFACE:  # not built, or by an earlier version
    Kernel = None  # type: ignore[assignment, misc]


def is_compiled() -> bool:
    return Kernel is not None
