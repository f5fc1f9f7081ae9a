"""Opens files of a model or an adapter, and nothing that is not a regular file: a pipe or a device
would never end."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MOST_TEXT_BYTES = 1 << 28  # the largest published tokenizer.json has a tenth of it


def open_regular(path: Path) -> BufferedReader:
    """To read. Raises OSError, also for what is not a regular file."""
    # Without waiting: a pipe would be opened when somebody writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_text(path: Path) -> str:
    """In UTF-8. Raises OSError, also above MOST_TEXT_BYTES, and UnicodeDecodeError."""
    with open_regular(path) as file:
        content = file.read(MOST_TEXT_BYTES + 1)
    if len(content) > MOST_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_TEXT_BYTES} bytes", str(path))
    return content.decode()
