"""JSON schemas that others have published: every answer that finishes validates by `jsonschema`, and
what the engine does not take is refused by name.

    python -m tests.engine.decoding.published_schemas DIRECTORY [--sample 1000] [--seed 1]

DIRECTORY holds one schema a `.json` file, at any depth, as in the `data` folder of JSONSchemaBench
(Geng et al., 2025). The demo model writes the answers by chance, with a liking for what ends strings,
arrays and objects. One JSON line says how many finished, and why others were refused; exit status 1
tells that an answer does not validate.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from pathlib import Path

import jsonschema

from benchmarks.report import machine, progress
from engine.errors import RequestError
from engine.loop import Engine
from tests.engine.decoding.test_grammars import TOKENIZER, answer, constrained, make
from tests.engine.helpers import Collected

AT_ONCE, MOST_TOKENS, LIKING = 64, 1200, 5.0
ENDS = '"}]'


@dataclass
class Found:
    finished: int = 0
    too_long: int = 0  # ended by the limit of tokens
    refused: Counter[str] = field(default_factory=Counter)  # by the reason that was given
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    files = sorted(wanted.directory.rglob("*.json"))
    chosen = random.Random(wanted.seed).sample(files, min(wanted.sample, len(files)))
    found = Found()
    engine = make(max_running=32, num_blocks=4096, max_batch_tokens=512)
    for first in range(0, len(chosen), AT_ONCE):
        _answer(engine, chosen[first : first + AT_ONCE], found)
        progress(f"{first + AT_ONCE:,}: {found.finished} finished, {found.refused.total()} refused")
    told = {
        "schemas": len(chosen),
        "finished": found.finished,
        "too_long": found.too_long,
        "refused": found.refused.total(),
        "reasons": dict(found.refused.most_common(12)),
        "wrong": found.wrong,
        "seed": wanted.seed,
    }
    line = {"proof": "published_schemas", **told, "machine": machine()}
    sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    return 1 if found.wrong else 0


def _answer(engine: Engine, files: list[Path], found: Found) -> None:
    asked = list(_accepted(engine, files, found))
    said = Collected()
    while engine.busy:
        engine.step()
        said.take(engine)
    for file in asked:
        name = str(file)
        if said.reasons[name, 0] != "stop":
            found.too_long += 1
            continue
        found.finished += 1
        problem = _problem(file, answer(said, name))
        if problem:
            found.wrong.append(f"{file.parent.name}/{file.name}: {problem}"[:300])


def _accepted(engine: Engine, files: list[Path], found: Found) -> Iterator[Path]:
    for number, file in enumerate(files):
        schema = json.loads(file.read_text(encoding="utf-8"))
        request = constrained(
            str(file), "json_schema", schema, MOST_TOKENS, seed=number, logit_bias=_BIAS
        )
        try:
            engine.submit(request, "g")
        except RequestError as error:
            found.refused[_reason(error)] += 1
            continue
        yield file


def _reason(error: RequestError) -> str:
    """Its words without the names that the schema gives."""
    assert error.code == "invalid_grammar", error
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", str(error))[:160]


def _problem(file: Path, text: str) -> str:
    """In decimals: 7.27 is a multiple of 0.01, though not in binary floats."""
    schema = json.loads(file.read_text(encoding="utf-8"), parse_float=Decimal)
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        with localcontext(prec=400):  # for multiples: enough for any number that is written out
            validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
            validator.validate(json.loads(text, parse_float=Decimal))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


_BIAS = {token: LIKING for text, token in TOKENIZER.get_vocab().items() if text and text[0] in ENDS}

if __name__ == "__main__":
    sys.exit(main())
