"""A contender's side of the rounds: it says what it can run, then runs what it is asked for.

Stands alone, like the scripts that use it. On stdout a line that begins with the mark is for the
benchmark; whatever else a library prints there is not.
"""

import json
import sys
from collections.abc import Callable

MARK = "@ "


def answer(scenarios: dict[str, Callable[[], float]]) -> None:
    """Each gives a rate. Until stdin ends; one name a line, one number a line."""
    _say(list(scenarios))
    for line in sys.stdin:
        _say(scenarios[line.strip()]())


def _say(what: object) -> None:
    print(MARK + json.dumps(what), flush=True)
