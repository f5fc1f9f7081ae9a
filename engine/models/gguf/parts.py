"""The files of a GGUF model that is split into several, as llama-gguf-split names and numbers them."""

import re
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.json_fields import shown

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
_MOST = 65_535  # the format counts in 16 bits
_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def count_of(path: Path, metadata: dict[str, Any]) -> int:
    """1 for a file that is whole. Raises CheckpointError for a number that cannot be."""
    count = metadata.get(COUNT, 0)
    if type(count) is not int or not 0 <= count <= _MOST:
        raise CheckpointError(f"{path}: {COUNT} is {shown(count)}: it must be from 0 to {_MOST}")
    return max(count, 1)


def other_parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """Those after the first, which `path` must be: only it has the model's metadata."""
    count = count_of(path, metadata)
    if count == 1:
        return []
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path}: it is one of {count} parts, and not named NAME-00001-of-{count:05}.gguf: give "
            "the parts the names that they were published with"
        )
    check_number(path, metadata, 1, count)
    return [
        path.with_name(f"{match['stem']}-{n:05}-of-{count:05}.gguf") for n in range(2, count + 1)
    ]


def check_number(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    """Raises CheckpointError for a file that is not part `number`, from 1, of `count`."""
    found, total = metadata.get(NUMBER), count_of(path, metadata)
    if found == number - 1 and total == count and type(found) is int:
        return
    begin = f"{found + 1}" if type(found) is int else repr(found)
    raise CheckpointError(
        f"{path}: it is part {begin} of {total}, where part {number} of {count} is needed: give the "
        "first part of a model, in the folder of the others"
    )
