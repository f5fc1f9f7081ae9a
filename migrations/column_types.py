"""Column types of the revisions. They never change: a revision that needs another type adds it here."""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

BigKey = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
UtcDateTime = sa.DateTime(timezone=True)
# Money in picounits: numeric(38,0) on PostgreSQL, 64 bits on SQLite.
Units = sa.BigInteger().with_variant(sa.Numeric(38, 0), "postgresql")
# Ids in byte order, so that ids that begin with their time fall into monthly partitions.
OrderedId = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
