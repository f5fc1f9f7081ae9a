"""Limits numpy's linear algebra to one thread in the gateway processes.

The moderation classifier multiplies small matrices. OpenBLAS would spread them over all cores and
busy-wait, which halves the throughput of a gateway on two cores.
"""

import os
from importlib import import_module

_NAME = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Import numpy with one OpenBLAS thread. Call this before anything else imports numpy.

    OpenBLAS reads the variable once, when it is loaded. The variable is then removed, so that an
    engine process that is started from here uses all threads.
    """
    if _NAME in os.environ:
        return
    os.environ[_NAME] = "1"
    try:
        import_module("numpy")
    finally:
        del os.environ[_NAME]
