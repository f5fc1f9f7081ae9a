"""What the store of moved days asks of ClickHouse, word by word, and what it makes of the answers. That
the words find the right rows is tested on ClickHouse's own engine, in `tests/contracts`."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from billing.archive.columns import COLUMNS
from billing.archive.hours import hour_definitions
from billing.usage.raw_rows import Grouping, Reading, Wanted
from billing.usage.tables import Charge, UsageEventRow
from tests.billing.archive.recorded_clickhouse import Recorded, archive_on

E, C = UsageEventRow, Charge
DAY = datetime(2026, 1, 2, tzinfo=UTC)
NEXT = DAY + timedelta(days=1)
COUNTS = (
    *("requests", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens"),
    *(
        "adapter_requests",
        "gpu_seconds",
        "moderation_calls",
        "audio_seconds",
        "images",
        "characters",
    ),
    *("cache_write_5m_tokens", "cache_write_1h_tokens", "audio_input_tokens"),
    *("image_input_tokens", "reasoning_tokens", "audio_output_tokens", "image_output_tokens"),
    *("searches", "tool_calls"),
)
AMOUNTS = tuple(
    f"{name}amount"
    for name in (
        *("input_", "cached_", "output_", "waived_", "request_", "adapter_", "gpu_"),
        *("moderation_", "audio_", "image_", "character_"),
        *("cache_write_5m_", "cache_write_1h_", "audio_input_", "image_input_", "reasoning_"),
        *("audio_output_", "image_output_", "search_", "tool_call_", ""),
    )
)
REQUESTS = "sum(if(e.kind in ('gpu_seconds', 'moderation') or e.status >= 500, 0, e.quantity))"
OF_ROWS = ", ".join(
    (
        REQUESTS,
        *(f"sum(e.{name})" for name in COUNTS[1:5]),
        *(f"sum(coalesce(e.charge_{name}, 0))" for name in COUNTS[5:]),
        *(f"sum(coalesce(e.charge_{name}, toDecimal128(0, 0)))" for name in AMOUNTS),
    )
)
OF_HOURS = ", ".join(f"sum(e.{name})" for name in (*COUNTS, *AMOUNTS))
ONE_PARTITION = " settings do_not_merge_across_partitions_select_final = 1"


def _within(at: str) -> str:
    return (
        f"{at} >= fromUnixTimestamp64Micro({{start:Int64}}, 'UTC')"
        f" and {at} < fromUnixTimestamp64Micro({{end:Int64}}, 'UTC')"
        " and e.day >= {first_day:Date} and e.day <= {last_day:Date}"
    )


SPAN: dict[str, Any] = {
    "start": 1_767_312_000_000_000,
    "end": 1_767_398_400_000_000,
    "first_day": "2026-01-01",
    "last_day": "2026-01-02",
}
WANTED = Wanted(DAY, NEXT, last_day=DAY)


def test_rows_are_asked_for_by_time_tenant_and_condition() -> None:
    client = Recorded({"select e.request_id": [("req_1", Decimal(7)), ("req_0", None)]})
    reading = Reading((E.request_id, C.amount), (E.occurred_at, E.request_id))
    archive = archive_on(client)
    assert list(archive.rows(WANTED, reading)) == [("req_1", 7), ("req_0", None)]
    falling = replace(reading, falling=True, conditions=(E.status >= 400,), limit=7)
    own = replace(WANTED, tenant_id="acme", project_id="proj")
    list(archive.rows(own, falling))
    shown = "select e.request_id, e.charge_amount from tollhouse_usage e final where "
    owned = " and e.tenant_id = {tenant_id:String} and e.project_id = {project_id:String}"
    assert client.asked == [
        (
            f"{shown}{_within('e.occurred_at')} order by e.occurred_at, e.request_id{ONE_PARTITION}",
            SPAN,
        ),
        (
            f"{shown}{_within('e.occurred_at')}{owned} and (e.status >= 400)"
            f" order by e.occurred_at desc, e.request_id desc limit 7{ONE_PARTITION}",
            SPAN | {"tenant_id": "acme", "project_id": "proj"},
        ),
    ]


@pytest.mark.parametrize(
    ("start", "last", "first_day", "last_day"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), DAY, "1970-01-01", "2026-01-02"),
        (datetime(1970, 1, 3, tzinfo=UTC), DAY, "1970-01-02", "2026-01-02"),
        (DAY, datetime.min.replace(tzinfo=UTC), "2026-01-01", "1970-01-01"),
    ],
)
def test_days_begin_where_clickhouse_s_do(
    start: datetime, last: datetime, first_day: str, last_day: str
) -> None:
    client = Recorded()
    wanted = Wanted(start, NEXT, last_day=last)
    list(archive_on(client).rows(wanted, Reading((E.model,), (E.model,))))
    ((_, given),) = client.asked
    assert (given["first_day"], given["last_day"]) == (first_day, last_day)


def test_sums_by_bucket_come_from_whole_hours() -> None:
    values = (1_767_312_000, "demo", True, "USD", *range(len(COUNTS) + len(AMOUNTS)))
    client = Recorded({"select intDiv": [values]})
    wanted = replace(WANTED, tenant_id="acme")
    matching = (("member_id", ("", "x")), ("model", ("demo",)))
    grouping = Grouping(86_400, ("model", "batch", "currency"), matching, True)
    (row,) = archive_on(client).buckets(wanted, grouping)
    names = ("bucket", "model", "batch", "currency", *COUNTS, *AMOUNTS)
    assert row == dict(zip(names, values, strict=True))
    keys = "intDiv(toUnixTimestamp(e.hour), 86400) * 86400, e.model, toBool(e.batch), e.currency"
    assert client.asked == [
        (
            f"select {keys}, {OF_HOURS} from tollhouse_hours e where {_within('e.hour')}"
            " and e.tenant_id = {tenant_id:String}"
            " and coalesce(e.member_id, '') in {m0:Array(String)} and e.model in {m1:Array(String)}"
            f" and (e.batch) group by {keys} order by {keys}",
            SPAN | {"tenant_id": "acme", "m0": ["", "x"], "m1": ["demo"]},
        )
    ]


HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("wanted", "grouping", "from_rows"),
    [
        (WANTED, Grouping(3600), False),
        (WANTED, Grouping(7200), False),
        (WANTED, Grouping(60), True),
        (WANTED, Grouping(5400), True),
        (WANTED, Grouping(3600, ("end_user",)), True),
        (WANTED, Grouping(3600, ("engine_id",)), False),
        (WANTED, Grouping(3600, (), (("end_user", ("ada",)),)), True),
        (WANTED, Grouping(3600, conditions=(E.status >= 400,)), True),
        (replace(WANTED, start=DAY + HOUR), Grouping(3600), False),
        (replace(WANTED, start=DAY + timedelta(minutes=1)), Grouping(3600), True),
        (replace(WANTED, end=NEXT + timedelta(seconds=1)), Grouping(3600), True),
        (replace(WANTED, end=NEXT + timedelta(microseconds=1)), Grouping(3600), True),
    ],
)
def test_what_the_hours_do_not_tell_comes_from_the_rows(
    wanted: Wanted, grouping: Grouping, from_rows: bool
) -> None:
    client = Recorded()
    list(archive_on(client).buckets(wanted, grouping))
    ((query, _),) = client.asked
    source = (
        "tollhouse_usage e final where e.occurred_at"
        if from_rows
        else "tollhouse_hours e where e.hour"
    )
    assert f" from {source} >=" in query
    assert (OF_ROWS if from_rows else OF_HOURS) in query


def test_buckets_of_rows_by_batch_and_currency() -> None:
    client = Recorded()
    conditions = (E.status >= 400, E.model == "it's")
    grouping = Grouping(60, ("batch", "currency"), (), False, conditions)
    list(archive_on(client).buckets(WANTED, grouping))
    ((query, _),) = client.asked
    keys = (
        "intDiv(toUnixTimestamp(e.occurred_at), 60) * 60, toBool(e.batch_job is not null),"
        " e.charge_currency"
    )
    assert query == (
        f"select {keys}, {OF_ROWS} from tollhouse_usage e final where {_within('e.occurred_at')}"
        " and not (e.batch_job is not null) and (e.status >= 400) and (e.model = 'it\\'s')"
        f" group by {keys} order by {keys}"
    )
    for name in ("password", "batch; drop"):
        with pytest.raises(ValueError, match="is not stored"):
            list(archive_on(client).buckets(WANTED, Grouping(60, (name,))))


def test_a_day_is_copied_summed_and_removed() -> None:
    client = Recorded({"select count() from tollhouse_hours_new": [(3,)]})
    archive = archive_on(client)
    archive.store(DAY, [])
    archive.store(DAY, [("a", 1), ("b", 2)])
    archive.clear(DAY)
    day = date(2026, 1, 2)
    assert client.inserts == [
        ("tollhouse_usage", ("day", *COLUMNS), [(day, "a", 1), (day, "b", 2)])
    ]
    assert client.commands == ["alter table tollhouse_usage drop partition '2026-01-02'"]
    client.commands.clear()
    archive.sum_hours(DAY)
    drop_new = "alter table tollhouse_hours_new drop partition '2026-01-02'"
    key = (
        "e.tenant_id, e.project_id, e.key_id, e.model, e.kind, e.engine_id, e.adapter, e.member_id,"
        " e.charge_price_version, e.charge_usage_period_id, e.charge_bill_period_id,"
        " e.charge_currency, e.batch_job is not null,"
        " toBool(e.charge_gpu_seconds + e.charge_moderation_calls = 0)"
    )
    names = ", ".join(each.partition(" ")[0] for each in hour_definitions())
    insert = (
        f"insert into tollhouse_hours_new (day, {names}) select toDate('2026-01-02'),"
        f" toDateTime(toStartOfHour(e.occurred_at), 'UTC'), {key}, {OF_ROWS}"
        " from tollhouse_usage e final where e.day = '2026-01-02'"
        f" group by toStartOfHour(e.occurred_at), {key}"
    )
    replaced = "replace partition '2026-01-02' from tollhouse_hours_new"
    assert client.commands == [
        drop_new,
        insert,
        f"alter table tollhouse_hours {replaced}",
        drop_new,
    ]
    assert client.asked[-1][1] == {"day": "2026-01-02"}
    client.answers = {"select count() from tollhouse_hours_new": [(0,)]}
    archive.sum_hours(DAY)
    assert client.commands[-2] == "alter table tollhouse_hours drop partition '2026-01-02'"


def test_the_sums_and_groups_of_a_day() -> None:
    charge = ("acme", "u", "b", "pv", 1, *range(11), *map(Decimal, range(12)))
    client = Recorded(
        {
            "select distinct day": [(date(2026, 1, 2),), (date(2026, 1, 3),)],
            "select count(), sum(input_tokens)": [(5, 10, None, 7, 0, 4, Decimal(99))],
            "select charge_tenant_id": [charge],
            "select tenant_id, usage_period_id": [charge],
        }
    )
    archive = archive_on(client)
    assert archive.days() == [DAY, NEXT]
    assert archive.sums(DAY) == {
        "events": 5,
        "input_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 7,
        "waived_tokens": 0,
        "charges": 4,
        "units": 99,
    }
    (rows,), (hours,) = archive.groups(DAY), archive.hour_groups(DAY)
    assert rows == hours and rows[:4] == ("acme", "u", "b", "pv") and rows[4] is True
    assert list(rows[5:]) == [*range(11), *range(12)]
    sums = [f"sum({name})" for name in (*COUNTS, *AMOUNTS)]
    key = (
        "charge_tenant_id, charge_usage_period_id, charge_bill_period_id, charge_price_version,"
        " charge_gpu_seconds + charge_moderation_calls = 0"
    )
    of_hours = "tenant_id, usage_period_id, bill_period_id, price_version, tokens"
    assert [query for query, _ in client.asked] == [
        "select distinct day from tollhouse_usage order by day",
        "select count(), sum(input_tokens), sum(cached_tokens), sum(output_tokens),"
        " sum(waived_tokens), count(charge_transaction_id), sum(charge_amount)"
        " from tollhouse_usage final where day = {day:Date}",
        f"select {key}, {', '.join(each.replace('(', '(charge_') for each in sums)}"
        " from tollhouse_usage final where day = {day:Date} and charge_transaction_id is not null"
        f" group by {key}",
        f"select {of_hours}, {', '.join(sums)} from tollhouse_hours"
        f" where day = {{day:Date}} and currency is not null group by {of_hours}",
    ]
    assert [given for _, given in client.asked[1:]] == [{"day": "2026-01-02"}] * 3


def test_requests_postings_and_charges_up_to_a_day() -> None:
    client = Recorded(
        {
            "select request_id": [("a",), ("b",)],
            "select charge_transaction_id": [("t1", Decimal(5))],
            "select e.model": [("demo", Decimal(9))],
        }
    )
    archive = archive_on(client)
    assert archive.known(("a", "b", "c"), DAY) == {"a", "b"}
    assert archive.posted(("t1", "t2"), DAY) == {"t1": 5}
    charged = archive.charged(DAY, (E.model,), (C.amount, C.output_amount), (E.status < 500,))
    assert list(charged) == [("demo", 9)]
    assert client.asked == [
        (
            "select request_id from tollhouse_usage where request_id in {ids:Array(String)}"
            " and day <= {day:Date}",
            {"ids": ["a", "b", "c"], "day": "2026-01-02"},
        ),
        (
            "select charge_transaction_id, sum(charge_amount) from tollhouse_usage final"
            " where charge_transaction_id in {ids:Array(String)} and day <= {day:Date}"
            " group by charge_transaction_id",
            {"ids": ["t1", "t2"], "day": "2026-01-02"},
        ),
        (
            "select e.model, sum(e.charge_amount), sum(e.charge_output_amount)"
            " from tollhouse_usage e final where e.day <= {day:Date}"
            " and e.charge_transaction_id is not null and (e.status < 500) group by e.model"
            + ONE_PARTITION,
            {"day": "2026-01-02"},
        ),
    ]


def test_a_name_is_erased_where_it_is() -> None:
    client = Recorded({"select count()": [(2,)]})
    assert archive_on(client).erase("acme", "o'neil") == 2
    where = "tenant_id = {tenant:String} and end_user = {user:String}"
    named = {"tenant": "acme", "user": "o'neil"}
    assert client.asked == [(f"select count() from tollhouse_usage final where {where}", named)]
    assert client.commands == [
        "alter table tollhouse_usage update end_user = null"
        " where tenant_id = 'acme' and end_user = 'o\\'neil' settings mutations_sync = 2"
    ]
    nobody = Recorded({"select count()": [(0,)]})
    assert archive_on(nobody).erase("acme", "x") == 0 and nobody.commands == []


def test_an_erased_tenant_leaves_no_name_and_no_label() -> None:
    client = Recorded({"select count()": [(2,)]})
    assert archive_on(client).erase("acme", None) == 2
    (command,) = client.commands
    for name in ("end_user", "client_request_id", "member_id", "labels"):
        assert f"{name} = null" in command and f"{name} is not null" in command, name
    assert "where tenant_id = 'acme' and (" in command
