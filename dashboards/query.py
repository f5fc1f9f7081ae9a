"""The query language of Requests and Usage: `model:tiny status:5xx cost>0.01 since:7d`.

A term is a field, an operator and a value; values may be quoted, several are separated by commas, and a
leading `-` excludes. All terms must hold. BadRequest names the term that is wrong.
"""

import re
from dataclasses import dataclass, replace
from datetime import date, timedelta
from decimal import Decimal, InvalidOperation

from billing.usage.day_range import Range
from core.clock import usual_day
from core.errors import BadRequest
from dashboards.filters import MAX_DAYS

NAMES = {
    "model": "base model",
    "adapter": "adapter, or none",
    "key": "name or id of a key",
    "project": "name or id of a project",
    "member": "e-mail or id of a member",
    "user": "end user, as the client sent it",
    "status": "200, 4xx, 5xx, error",
    "id": "request id, yours or ours",
    "route": "path of the API",
    "engine": "engine id",
    "end": "finish reason",
}
NUMBERS = {
    "cost": "charge, in your currency",
    "input": "input tokens",
    "cached": "cached tokens",
    "output": "output tokens",
    "first": "ms to the first token",
    "time": "ms from request to last byte",
}
DAYS = {
    "since": "today, 7d, month, lastmonth or a date like 2026-11-01",
    "until": "a date like 2026-11-21, inclusive",
}
_TERM = re.compile(r'(-?)(?:([a-z]+)(:|>=|<=|>|<))?("[^"]*"|[^\s"]+)')
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Term:
    field: str
    operator: str  # ":" or a comparison
    values: tuple[str, ...]
    excluded: bool = False

    def __str__(self) -> str:
        said = ",".join(self.values)
        if re.search(r"\s", said):
            said = f'"{said}"'
        return f"{'-' if self.excluded else ''}{self.field}{self.operator}{said}"

    @property
    def number(self) -> Decimal:
        """Of a term whose field is in NUMBERS."""
        return Decimal(self.values[0])


@dataclass(frozen=True, slots=True)
class Query:
    terms: tuple[Term, ...] = ()
    since: str = ""
    until: str = ""

    def __str__(self) -> str:
        days = [f"{name}:{value}" for name, value in self._days() if value]
        return " ".join([*map(str, self.terms), *days])

    def _days(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return ("since", self.since), ("until", self.until)

    def over(self, since: str) -> "Query":
        return replace(self, since=since, until="")

    def has(self, field: str, value: str) -> bool:
        return Term(field, ":", (value,)) in self.terms

    def toggled(self, field: str, value: str) -> "Query":
        """With the term, in place of others of its field; without it if it is there."""
        others = tuple(each for each in self.terms if each.field != field)
        if self.has(field, value):
            return replace(self, terms=others)
        return replace(self, terms=(*others, Term(field, ":", (value,))))

    def span(self, today: date, usual_days: int) -> Range:
        last = _day("until", self.until) if self.until else today
        first = last - timedelta(usual_days - 1)
        if self.since:
            first, last = _since(self.since, today, last)
        if first > last:
            raise _wrong(
                f"The range starts on {first}, after its end on {last}.", "Swap the dates."
            )
        if (last - first).days >= MAX_DAYS:
            raise _wrong(
                f"The range has {(last - first).days + 1} days; the maximum is {MAX_DAYS}.",
                "Choose a shorter range, or export the usage.",
            )
        return Range(first, last)


def parse(text: str) -> Query:
    if len(text) > _LONGEST:
        raise _wrong(f"The query has {len(text)} characters.", f"Use at most {_LONGEST}.")
    if not text.isprintable():
        raise _wrong("The query has control characters.", "Type it again without them.")
    found: list[Term] = []
    days: dict[str, str] = {}
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TERM.match(text, at)
        if match is None or (match.end() < len(text) and not text[match.end()].isspace()):
            raise _wrong(
                f"{text[at : at + 40]!r} cannot be read as a filter.",
                "Write field:value, and close quotation marks.",
            )
        at = match.end()
        term = _term(match)
        if term.field not in DAYS:
            found.append(term)
        elif term.field in days or term.excluded:
            raise _wrong(
                f"{str(term)!r} cannot be excluded or repeated.",
                f"Give {term.field} once, without -.",
            )
        else:
            days[term.field] = term.values[0]
    return Query(tuple(found), days.get("since", ""), days.get("until", ""))


def _term(match: re.Match[str]) -> Term:
    minus, field, operator, raw = match.groups()
    value = raw.strip('"')
    if field is None and value.startswith("req_"):
        field, operator = "id", ":"
    if field is None:
        raise _wrong(
            f"{value[:40]!r} does not say which field it filters.",
            f"Write model:{value[:40]}, for example.",
        )
    known = [*NAMES, *NUMBERS, *DAYS]
    if field not in known:
        raise _wrong(f"There is no field {field[:40]!r}.", f"Use one of {', '.join(known)}.")
    if field in NUMBERS:
        return Term(field, operator, (_number(field, value),), bool(minus))
    if operator != ":":
        raise _wrong(f"{field} is not a number, so {operator} cannot compare it.", f"Use {field}:")
    values = tuple(part for part in value.split(",") if part)
    if not values:
        raise _wrong(f"{field} has no value.", f"Write {field}: and {_about(field)}.")
    if field == "status":
        for each in values:
            if not re.fullmatch(r"[1-5](xx|\d\d)|error", each):
                raise _wrong(f"status is {each[:40]!r}.", f"Use {NAMES['status']}.")
    return Term(field, ":", values, bool(minus))


def _about(field: str) -> str:
    return {**NAMES, **NUMBERS, **DAYS}[field]


def _number(field: str, value: str) -> str:
    try:
        number = Decimal(value)
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or abs(number) >= 10**6 * (1000 if field != "cost" else 1):
        raise _wrong(f"{field} is {value[:40]!r}, which is not a number.", f"Write {field}>0.01.")
    return value


def _since(text: str, today: date, last: date) -> tuple[date, date]:
    month = today.replace(day=1)
    if text == "today":
        return today, last
    if text == "month":
        return month, last
    if text == "lastmonth":
        end = month - timedelta(1)
        return end.replace(day=1), end
    if re.fullmatch(r"\d{1,3}d", text):
        return last - timedelta(max(0, int(text[:-1]) - 1)), last
    return _day("since", text), last


def _day(field: str, text: str) -> date:
    try:
        return usual_day(date.fromisoformat(text))
    except ValueError:
        raise _wrong(f"{field} is {text[:40]!r}.", f"Use {DAYS[field]}.") from None


def _wrong(message: str, next_step: str) -> BadRequest:
    return BadRequest(message, next_step=next_step, param="q")
