"""Members enter by one-time links, set a new password the same way, and have states that are true."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email import message_from_string
from email.message import EmailMessage
from email.policy import default
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from billing.notices.outbox import NetworkSender, deliver
from billing.notices.tables import OutboxMessage
from core.tenants.models import Member
from tests.billing.notices.mailbox import Mailbox
from tests.gateway.deployment import Deployment, running_deployment

PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


@pytest.fixture(scope="module", params=["mails", "no mail"])
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mailbox: Mailbox
) -> Iterator[Deployment]:
    settings = {"smtp_url": mailbox.url if request.param == "mails" else ""}
    with running_deployment(tmp_path_factory.mktemp("links"), settings=settings) as made:
        yield made


@pytest.fixture
def browser(deployment: Deployment) -> Iterator[httpx.Client]:
    headers = {"origin": deployment.url}
    with httpx.Client(
        base_url=deployment.url, timeout=60, headers=headers, follow_redirects=True
    ) as made:
        yield made


def _add(deployment: Deployment, email: str, **more: Any) -> dict[str, Any]:
    body = {"email": email, "role": "admin"} | more
    answer = httpx.post(
        f"{deployment.url}/admin/v1/members", headers=deployment.headers, json=body, timeout=60
    )
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def _state(deployment: Deployment, member: str) -> str:
    answer = httpx.get(f"{deployment.url}/admin/v1/members", headers=deployment.headers, timeout=60)
    (found,) = [each for each in answer.json()["data"] if each["id"] == member]
    return str(found["state"])


def _accept(browser: httpx.Client, url: str, password: str = PASSWORD) -> httpx.Response:
    token = url.partition("token=")[2]
    return browser.post("/dashboard/invitation", data={"token": token, "password": password})


def _sign_in(browser: httpx.Client, email: str, password: str = PASSWORD) -> bool:
    answer = browser.post("/dashboard/sign-in", data={"email": email, "password": password})
    return answer.status_code == 200 and "Sign out" in answer.text


def test_an_invited_member_chooses_a_password_once_and_its_state_is_true(
    deployment: Deployment, browser: httpx.Client
) -> None:
    made = _add(deployment, "ivy@acme.example")
    url = made["invitation"]["url"]
    assert made["state"] == "invited" and _state(deployment, made["id"]) == "invited"
    shown = browser.get(url)
    assert "ivy@acme.example" in shown.text and shown.headers["cache-control"] == "no-store"
    short = _accept(browser, url, "short")
    assert short.status_code == 400 and "characters" in short.text
    assert "Sign out" in _accept(browser, url).text
    assert _state(deployment, made["id"]) == "active"
    again = _accept(browser, url, "another password")
    assert again.status_code == 401 and "expired or was used" in again.text
    assert _sign_in(browser, "ivy@acme.example")
    disabled = httpx.patch(
        f"{deployment.url}/admin/v1/members/{made['id']}",
        headers=deployment.headers,
        json={"disabled": True},
        timeout=60,
    )
    assert disabled.json()["state"] == "disabled"
    assert not _sign_in(browser, "ivy@acme.example")


def test_a_link_ends_with_its_time_and_with_a_newer_one(
    deployment: Deployment, browser: httpx.Client
) -> None:
    made = _add(deployment, "late@acme.example")
    first = made["invitation"]["url"]
    path = f"{deployment.url}/admin/v1/members/{made['id']}/invitation"
    second = httpx.post(path, headers=deployment.headers, timeout=60).json()["url"]
    assert browser.get(first).status_code == 401
    assert browser.get(second).status_code == 200
    with deployment.services.database.transaction() as session:
        over = datetime.now(UTC) - timedelta(seconds=1)
        changed = update(Member).where(Member.id == made["id"])
        session.execute(changed.values(invitation_expires_at=over))
    assert browser.get(second).status_code == 401
    assert _accept(browser, second).status_code == 401


def test_links_are_mailed_where_mail_is_set_and_leave_the_queue(
    deployment: Deployment, browser: httpx.Client, mailbox: Mailbox
) -> None:
    made = _add(deployment, "post@acme.example")
    mails = bool(deployment.services.settings.smtp_url)
    assert made["invitation"]["mailed"] is mails
    _accept(browser, made["invitation"]["url"])
    asked = browser.get("/dashboard/reset")
    assert ("Send the link" in asked.text) is mails
    said = [
        re.sub(r"\d\d:\d\d", "", browser.post("/dashboard/reset", data={"email": email}).text)
        for email in ("post@acme.example", "nobody@acme.example")
    ]
    assert said[0] == said[1]
    before = len(mailbox.mails)
    sender = NetworkSender(mailbox.url, networks=("127.0.0.0/8",))
    with deployment.services.database.read() as session:
        query = select(OutboxMessage).where(OutboxMessage.target == "post@acme.example")
        waiting = len(session.scalars(query).all())
    assert waiting == (2 if mails else 0), "an invitation, and a reset"
    deliver(deployment.services.database, deployment.services.clock, sender)
    sent = [each for each in mailbox.mails[before:] if "post@acme.example" in each]
    assert len(sent) == waiting
    with deployment.services.database.read() as session:
        for message in session.scalars(query):
            assert message.done_at is not None and "token=" not in str(message.payload)
    if mails:
        mail = message_from_string(sent[-1], policy=default)
        assert isinstance(mail, EmailMessage)
        text = mail.get_content()
        found = re.search(r"http\S+token=[\w-]+", text)
        assert found is not None and "works once" in text, text
        assert "Sign out" in _accept(browser, found[0], "a new long password").text
        assert _sign_in(browser, "post@acme.example", "a new long password")


def test_the_page_invites_and_sends_again(deployment: Deployment, browser: httpx.Client) -> None:
    browser.post("/dashboard/sign-in", data={"secret": deployment.key})
    added = {"act": "add", "email": "page@acme.example", "role": "viewer", "name": "P"}
    page = browser.post("/dashboard/team", data=added).text
    mails = bool(deployment.services.settings.smtp_url)
    links = re.findall(r"http://[^<\s]+/dashboard/invitation\?token=[\w-]+", page)
    assert bool(links) is not mails and ("A link was mailed" in page) is mails
    row = page[page.index("page@acme.example") :]
    assert "invited" in row[:600] and "Send a new invitation" in row
    if links:
        assert links[0] not in browser.get("/dashboard/team").text, "it is shown once"
