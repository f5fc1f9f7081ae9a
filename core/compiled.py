"""The C extension of a request's arithmetic, where this version has built it."""

__all__ = ["Bucket", "Fields", "Rows", "recorded_scores", "word_ids"]

_INTERFACE = 1  # of kernel.c
try:
    from core._kernel import INTERFACE, Bucket, Fields, Rows, recorded_scores, word_ids
except ImportError:  # installed without a C compiler
    INTERFACE = 0
if INTERFACE != _INTERFACE:  # not built, or by an earlier version
    Bucket = Fields = Rows = recorded_scores = word_ids = None  # type: ignore[assignment, misc]
