"""What goes out: the signature of a webhook, by the specification's example, and a mail by SMTP."""

import ssl
from dataclasses import replace
from datetime import UTC, datetime
from email import message_from_string
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from billing.notices import signing
from billing.notices.outbox import NetworkSender, Outgoing
from core.errors import SettingError
from tests.billing.conftest import START
from tests.billing.notices.mailbox import Mailbox


def _message(**fields: Any) -> Outgoing:
    plain = Outgoing(
        1, "acme", "webhook", "https://r.example", "A bill", {"event": "x", "n": 1}, "d", 1
    )
    return replace(plain, **fields)


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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    """A server's, signed by itself, and the file to trust it by."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    address = x509.IPAddress(ip_address("127.0.0.1"))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    builder = builder.not_valid_before(START).not_valid_after(START.replace(year=2100))
    path = tmp_path_factory.mktemp("mail") / "server.pem"
    options = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    signed = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    path.write_bytes(key.private_bytes(*options) + signed)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context, path


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    ("user", "logins"), [("", []), ("a%40b:p%2Fq@", [("a@b", "p/q")]), ("a@", [("a", "")])]
)
def test_a_mail_says_what_happened(
    certificate: tuple[ssl.SSLContext, Path],
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    logins: list[tuple[str, str]],
    *,
    secure: bool,
) -> None:
    context, trusted = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    mailbox = Mailbox(context if secure else None)
    message = _message(channel="email", target="to@r.example")
    message = replace(message, payload={"event": "x", "empty": "", "n": 0})
    try:
        NetworkSender(mailbox.url.replace("//", f"//{user}")).send(message)
    finally:
        mailbox.close()
    assert mailbox.logins == logins
    (text,) = mailbox.mails
    mail = message_from_string(text)
    heads = (mail["Subject"], mail["From"], mail["To"])
    assert heads == ("A bill", "billing@tollhouse.invalid", "to@r.example")
    assert mail.get_payload().splitlines() == ["A bill.", "", "N: 0"]


def test_a_mail_server_whose_certificate_nobody_vouches_for_gets_no_mail_and_no_password(
    certificate: tuple[ssl.SSLContext, Path],
) -> None:
    mailbox = Mailbox(certificate[0])
    try:
        with pytest.raises(ssl.SSLCertVerificationError):
            NetworkSender(mailbox.url.replace("//", "//name:secret@")).send(
                _message(channel="email", target="to@r.example")
            )
    finally:
        mailbox.close()
    assert (mailbox.logins, mailbox.mails) == ([], [])


@pytest.mark.parametrize("url", ["", "smtp://"])
def test_without_a_mail_server_a_mail_says_what_to_set(url: str) -> None:
    with pytest.raises(SettingError, match=r"No mail server is set\. Set TOLLHOUSE_SMTP_URL"):
        NetworkSender(url).send(_message(channel="email"))
