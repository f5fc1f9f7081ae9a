"""A contender's side of the rounds: it says what it can run, then runs what it is asked for.

Stands alone, like the scripts that use it. Questions come on stdin; answers go by a pipe of their
own, for libraries print what they like on stdout.
"""

import json
import os
import sys
from collections.abc import Callable

ANSWERS = "ANSWERS_FD"  # the variable that names the pipe


def answer(scenarios: dict[str, Callable[[], float]]) -> None:
    """Each gives a rate. Until stdin ends; one name a line, one number a line."""
    with os.fdopen(int(os.environ[ANSWERS]), "w", buffering=1) as answers:
        answers.write(json.dumps(list(scenarios)) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(scenarios[line.strip()]()) + "\n")
