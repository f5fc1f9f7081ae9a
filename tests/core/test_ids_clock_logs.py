"""Ids sort by time, the fake clock only goes forward, and log lines hold no secret."""

import json
import logging

import pytest

from core import ids, logs
from core.clock import FakeClock
from core.database import Database
from core.tenants import secrets
from core.tenants.roles import Roles


def test_ids_sort_by_time_and_do_not_repeat() -> None:
    made = [ids.new_id(ids.REQUEST, millis) for millis in (1, 2, 1_700_000_000_000, 2**48 - 1)]
    assert made == sorted(made)
    assert len({ids.new_id(ids.REQUEST) for _ in range(10_000)}) == 10_000
    assert made[0].startswith("req_")


def test_a_clock_does_not_run_backwards() -> None:
    clock = FakeClock()
    before = clock.now()
    clock.advance(days=1)
    assert (clock.now() - before).days == 1
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_a_key_with_a_typo_is_refused_without_a_look_up() -> None:
    secret = secrets.generate()
    assert secrets.well_formed(secret)
    for place in range(len(secret)):
        other = "b" if secret[place] == "a" else "a"
        assert not secrets.well_formed(secret[:place] + other + secret[place + 1 :])
    for wrong in ("", "th_", secret + "a", secret[:-1], secret.replace("th_", "sk_"), "ä" * 41):
        assert not secrets.well_formed(wrong)


@pytest.mark.parametrize("shape", ["console", "json"])
def test_log_lines_hold_no_secret(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    kept = root.handlers[:], root.level
    secret = secrets.generate()
    try:
        logs.configure("info", shape)
        logging.getLogger("t").info("key %s at postgresql://me:hunter2@host/db", secret)
        try:
            raise ValueError(f"refused {secret}")
        except ValueError:
            logging.getLogger("t").exception("failed")
    finally:
        root.handlers[:], root.level = kept[0], kept[1]
    written = capsys.readouterr().err
    assert secret not in written
    assert "hunter2" not in written
    assert secret[:7] in written
    if shape == "json":
        assert [json.loads(line)["level"] for line in written.splitlines()] == ["info", "error"]


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("Authorization: Bearer abcDEF123456.789", "abcDEF123456"),
        ('{"password": "hunter2hunter2", "user": "ann"}', "hunter2hunter2"),
        ("connect with api_key=Zx81-secret-value&x=1", "Zx81-secret-value"),
        ("upstream refused sk-proj-abcdefghijkl123456", "abcdefghijkl123456"),
        ("env AKIAIOSFODNN7EXAMPLE", "IOSFODNN7EXAMPLE"),
        ("jwt eyJhbGciOi.eyJzdWIiOiJhIn0.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
        ("ghp_0123456789abcdefghij", "0123456789abcdefghij"),
        ("redis://:letmein99@cache:6379/0", "letmein99"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADAN\n-----END PRIVATE KEY-----", "MIIEvQIBADAN"),
    ],
)
def test_secrets_of_other_products_are_masked(line: str, secret: str) -> None:
    assert secret not in logs.redact(line)


@pytest.mark.parametrize(
    "line",
    [
        "prompt_tokens: 512, cached_tokens: 128, token_delay_s=0.5",
        "key key_01HXYZ of tenant demo was revoked",
        "a basic request: 12 input tokens",
        "GET http://127.0.0.1:8000/v1/models 200",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    assert logs.redact(line) == line


def test_the_role_policy_is_not_logged(
    capsys: pytest.CaptureFixture[str], sqlite_database: Database
) -> None:
    root, level = logging.getLogger(), logging.getLogger().level
    handlers = root.handlers[:]
    try:
        logs.configure("info", "console")
        Roles(sqlite_database).allows("owner", "t1", "t1", "keys", "read")
        logging.getLogger("tollhouse.x").info("heard")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    said = capsys.readouterr().err
    assert "heard" in said and "Policy" not in said and "casbin" not in said, said
