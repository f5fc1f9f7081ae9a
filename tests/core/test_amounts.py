"""Amounts of money in a column, up to the largest that the database stores."""

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select

from core.database import AmountTooLarge, Database, Units

_MOST = {"sqlite": 2**63 - 1, "postgresql": 10**38 - 1}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_amount_is_stored_and_one_more_is_refused(database_url: str, sign: int) -> None:
    database = Database(database_url)
    metadata = MetaData()
    table = Table("amounts", metadata, Column("id", Integer, primary_key=True), Column("n", Units))
    metadata.create_all(database.db_engine)
    most = sign * _MOST[database.dialect]
    with database.transaction() as session:
        session.execute(insert(table).values(id=1, n=most))
    with pytest.raises(AmountTooLarge, match="is larger than"), database.transaction() as session:
        session.execute(insert(table).values(id=2, n=most + sign))
    with database.read() as session:
        assert session.execute(select(table.c.n)).scalars().all() == [most]
    database.close()
