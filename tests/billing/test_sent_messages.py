"""What goes out: the signature of a webhook, by the specification's example, and a mail by SMTP."""

import smtplib
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Any

import pytest

from billing import signing
from billing.models import OutboxMessage
from billing.outbox import NetworkSender
from core.errors import SettingError
from tests.billing.conftest import START


def _message(**fields: Any) -> OutboxMessage:
    plain = {
        "channel": "webhook",
        "target": "https://r.example",
        "subject": "A bill",
        "dedupe": "d",
    }
    return OutboxMessage(payload={"event": "x", "n": 1}, created_at=START, **plain | fields)


def test_a_signature_is_that_of_the_specification() -> None:
    at = datetime.fromtimestamp(1614265330, UTC)
    body = b'{"test": 2432232314}'
    made = signing.headers(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", at, body
    )
    signed = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert made == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": signed,
    }


class Server:
    """Stands for a mail server."""

    made: list[tuple[str, str, int, float]]
    done: list[Any]

    def __init__(self, kind: str, host: str, port: int, timeout: float) -> None:
        self.made.append((kind, host, port, timeout))

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.done.append("closed")

    def login(self, name: str, password: str) -> None:
        self.done.append((name, password))

    def send_message(self, mail: EmailMessage) -> None:
        self.done.append(mail)


@pytest.mark.parametrize(
    ("url", "made", "login"),
    [
        ("smtp://mail.example", ("SMTP", "mail.example", 25, 10.0), None),
        ("smtps://mail.example:465", ("SMTP_SSL", "mail.example", 465, 10.0), None),
        (
            "smtp://a%40b:p%2Fq@mail.example:587",
            ("SMTP", "mail.example", 587, 10.0),
            ("a@b", "p/q"),
        ),
        ("smtp://a@mail.example", ("SMTP", "mail.example", 25, 10.0), ("a", "")),
    ],
)
def test_a_mail_says_what_happened(
    monkeypatch: pytest.MonkeyPatch, url: str, made: tuple[Any, ...], login: Any
) -> None:
    Server.made, Server.done = [], []
    for kind in ("SMTP", "SMTP_SSL"):
        monkeypatch.setattr(
            smtplib, kind, lambda *args, _kind=kind, **more: Server(_kind, *args, **more)
        )
    message = _message(channel="email", target="to@r.example")
    message.payload = {"event": "x", "empty": "", "n": 0}
    NetworkSender(url).send(message)
    assert Server.made == [made]
    *before, mail, closed = Server.done
    assert before == ([login] if login else []) and closed == "closed"
    heads = (mail["Subject"], mail["From"], mail["To"])
    assert heads == ("A bill", "billing@tollhouse.invalid", "to@r.example")
    assert mail.get_content() == "A bill.\n\nevent: x\nn: 0\n"


@pytest.mark.parametrize("url", ["", "smtp://"])
def test_without_a_mail_server_a_mail_says_what_to_set(url: str) -> None:
    with pytest.raises(SettingError, match=r"No mail server is set\. Set TOLLHOUSE_SMTP_URL"):
        NetworkSender(url).send(_message(channel="email"))
