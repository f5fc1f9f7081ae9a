"""Backticks are for our sources: no page shows one, with or without data, nor in a refused form."""

import re
from html import unescape

import httpx
import pytest

from dashboards.navigation import SECTIONS

PATHS = [
    *(section.path for section in SECTIONS),
    *("/safety/policy", "/payment-methods", "/operator/engines/upstreams", "/operator/engines/map"),
    *("/usage?q=price:1", "/usage?by=end_user", "/costs?by=key_id", "/requests?q=cost>x"),
]


def shown(page: str) -> str:
    """What is read on the page, without what is typed into text areas."""
    page = re.sub(r"<(script|style|textarea)\b.*?</\1>", "", page, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", " ", page))


@pytest.mark.parametrize("path", PATHS)
def test_no_page_shows_a_backtick_or_a_raw_link(operator: httpx.Client, path: str) -> None:
    answer = operator.get(f"/dashboard{path}")
    assert answer.status_code in (200, 400, 409), answer.status_code
    text = shown(answer.text)
    assert len(text) > 100
    assert "`" not in text, text[max(0, text.index("`") - 80) : text.index("`") + 80]
    assert "](/" not in text and "](#" not in text
    for title in re.findall(r'(?:title|aria-label|placeholder)="([^"]*)"', answer.text):
        assert "`" not in title, title


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/keys", {"act": "make", "name": ""}),
        (
            "/limits",
            {"act": "set", "unit": "requests", "scope": "key", "period": "x", "limit": "y"},
        ),
        ("/webhooks", {"act": "add", "url": "http://127.0.0.1/x"}),
        ("/operator/engines", {"act": "drain", "engine": "none"}),
        ("/operator/prices", {"act": "nothing"}),
        ("/operator/seller", {"act": "save", "name": ""}),
    ],
)
def test_no_refused_form_shows_a_backtick(
    operator: httpx.Client, path: str, fields: dict[str, str]
) -> None:
    answer = operator.post(f"/dashboard{path}", data=fields)
    assert answer.status_code >= 400
    assert "`" not in shown(answer.text)
