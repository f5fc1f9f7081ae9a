"""SQLAlchemy compiles a statement once for all databases of the tests, not once for each.

It keeps what it compiled by the engine and its dialect, of which nearly every test makes its own: most of
the time of a test on money went into compiling the same statements.
"""

from typing import Any

from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

_make_engine = Engine.__init__
_compiled: LRUCache[Any, Any] = LRUCache(4_000)


def _kind(dialect: DefaultDialect) -> tuple[object, ...]:
    """What a compiled statement depends on."""
    return (
        type(dialect),
        dialect.paramstyle,
        dialect.server_version_info,
        dialect.default_schema_name,
        dialect.insert_returning,
        dialect.use_insertmanyvalues,
        dialect.label_length,
    )


def _same_kind(dialect: DefaultDialect, other: object) -> bool:
    return isinstance(other, DefaultDialect) and _kind(dialect) == _kind(other)


def _make_sharing(engine: Engine, *given: Any, **named: Any) -> None:
    _make_engine(engine, *given, **named)
    if engine._compiled_cache is not None:
        engine._compiled_cache = _compiled


def share() -> None:
    Engine.__init__ = _make_sharing  # type: ignore[method-assign]
    DefaultDialect.__eq__ = _same_kind  # type: ignore[method-assign,assignment]
    DefaultDialect.__hash__ = lambda dialect: hash(_kind(dialect))  # type: ignore[method-assign,assignment]
