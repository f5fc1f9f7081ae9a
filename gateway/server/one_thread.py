"""Numpy's linear algebra on one thread, in the processes that serve.

The moderation classifier multiplies small matrices. OpenBLAS would spread them over the cores and
spin while it waits, which takes the cores from what serves: half of all throughput on two cores.
"""

import os
from importlib import import_module

_NAME = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Before anything else imports numpy; OpenBLAS reads the variable once, when it is loaded.

    The variable is taken back, so that an engine that is started here keeps all its threads.
    """
    if _NAME in os.environ:
        return
    os.environ[_NAME] = "1"
    try:
        import_module("numpy")
    finally:
        del os.environ[_NAME]
