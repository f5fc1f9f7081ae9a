"""Bedrock: signatures by a reading of SigV4's specification, frames cut anywhere, errors in a stream."""

import asyncio
import hashlib
import hmac
import json
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import pytest
from botocore.config import Config
from hypothesis import given
from hypothesis import strategies as st

from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.bedrock.frames import AwsFrames
from gateway.engines.ports.bedrock.port import BedrockPort
from tests.gateway.engines.ports.answers import FRAMES, MADE, converse_frames, frame
from tests.gateway.provider_server import Asked, Said, provider

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
MODEL = "arn:aws:bedrock:eu-west-1::inference-profile/eu.anthropic.claude-x-v1:0"


def signature_of(asked: Asked) -> str:
    """The signature that the request should have, by the steps of AWS's reference."""
    held = asked.headers["authorization"].removeprefix("AWS4-HMAC-SHA256 ")
    fields = dict(each.split("=", 1) for each in held.split(", "))
    scope = fields["Credential"].split("/")[1:]
    names = fields["SignedHeaders"].split(";")
    path = quote(urlsplit(asked.path).path, safe="/~")  # encoded again
    headers = "".join(f"{name}:{asked.headers[name].strip()}\n" for name in names)
    payload = hashlib.sha256(asked.raw).hexdigest()
    canonical = "\n".join(["POST", path, "", headers, ";".join(names), payload])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", asked.headers["x-amz-date"], "/".join(scope), digest])
    key = f"AWS4{SECRET}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_BEARER_TOKEN_BEDROCK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a session+of/theirs=")


@pytest.mark.parametrize("model", [MODEL, "anthropic.claude-sonnet-4-6-v1:0", "odd model~name"])
def test_our_signature_is_the_specifications_and_boto3s(model: str) -> None:
    with provider() as server:
        server.said = MADE["bedrock"].whole(False)
        # A session of its own: the default one keeps the credentials that it finds first.
        client = boto3.session.Session().client(
            "bedrock-runtime",
            region_name="eu-west-1",
            endpoint_url=server.url,
            config=Config(retries={"max_attempts": 0}),
        )
        question: Any = [{"role": "user", "content": [{"text": "Hi"}]}]
        client.converse(modelId=model, messages=question)
        theirs = server.last
        fields = {"url": server.url, "provider": "bedrock", "options": {"region": "eu-west-1"}}
        port = BedrockPort(Upstream(**fields))  # type: ignore[arg-type]
        path = f"/model/{quote(model, safe='')}/converse"
        raw = json.dumps({"messages": question}).encode()
        headers = dict(asyncio.run(port.headers(path, raw)))
        base = {"host": urlsplit(server.url).netloc, "content-type": "application/json"}
        named = {name.lower(): value for name, value in headers.items()}
        ours = Asked(path, {**base, **named}, raw)
    assert ours.path == theirs.path
    for asked in (ours, theirs):
        assert asked.headers["authorization"].endswith(f"Signature={signature_of(asked)}")
        assert asked.headers["x-amz-security-token"] == "a session+of/theirs="
    scopes = [
        each.headers["authorization"].partition(",")[0].split("/")[2:5] for each in (ours, theirs)
    ]
    assert scopes[0] == scopes[1]


def test_a_key_is_a_bearer() -> None:
    fields: Any = {"url": "http://x", "provider": "bedrock", "api_key": "abc"}
    port = BedrockPort(Upstream(**fields, options={"region": "eu-west-1"}))
    assert asyncio.run(port.headers("/", b"")) == {"authorization": "Bearer abc"}


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_frames_cut_anywhere_are_the_same_events(sizes: list[int]) -> None:
    raw = b"".join(converse_frames(True))
    whole = AwsFrames().feed(raw)
    frames, events, at = AwsFrames(), [], 0
    for size in sizes:
        events += frames.feed(raw[at : at + size])
        at += size
    events += frames.feed(raw[at:])
    assert events == whole
    assert [next(iter(json.loads(each))) for each in whole][-2:] == ["messageStop", "metadata"]


def test_a_damaged_frame_is_an_error() -> None:
    raw = bytearray(b"".join(converse_frames(False)))
    raw[40] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        AwsFrames().feed(bytes(raw))


def test_an_exception_within_a_stream_is_named() -> None:
    raw = frame("throttlingException", {"message": "slow down"}, "exception")
    assert json.loads(AwsFrames().feed(raw)[0]) == {"throttlingException": {"message": "slow down"}}
    assert Said(raw, FRAMES).kind == FRAMES
