"""Records of requests as objects of a bucket: on a server that speaks S3, by the operator alone."""

import gzip
import json
import time
from collections.abc import Iterator
from typing import Any

import boto3
import httpx
import pytest

from core import metrics
from core.tenants.operator import operator_token
from gateway.cli.main import main
from gateway.serving.request_log import log as request_log
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.s3_server import s3_server


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Deployment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setattr(request_log, "_OBJECT_S", 0.5)
        settings = {"export_store_url": address}
        with running_deployment(tmp_path_factory.mktemp("bucket"), settings=settings) as made:
            yield made


@pytest.fixture
def client(address: str, deployment: Deployment) -> Any:
    return boto3.client("s3", endpoint_url=address, region_name="us-east-1")


def put(deployment: Deployment, url: str, *, token: str = "", **changes: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else deployment.headers
    where = {"tenant": deployment.tenant_id} if token else {}
    return httpx.put(
        f"{deployment.url}/admin/v1/request-log",
        json={"url": url} | changes,
        params=where,
        headers=headers,
    )


def operator(deployment: Deployment) -> str:
    return operator_token(deployment.services.settings)


def chat(deployment: Deployment, text: str) -> str:
    answer = httpx.post(
        f"{deployment.url}/v1/chat/completions",
        json={"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]},
        headers=deployment.headers,
        timeout=60,
    )
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


def objects(client: Any, bucket: str) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for each in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        body = client.get_object(Bucket=bucket, Key=each["Key"])["Body"].read()
        found[each["Key"]] = [json.loads(line) for line in gzip.decompress(body).splitlines()]
    return found


def wait_for(client: Any, bucket: str, ids: set[str]) -> dict[str, list[dict[str, Any]]]:
    deadline = time.monotonic() + 60
    while True:
        found = objects(client, bucket)
        if ids <= {record["request_id"] for records in found.values() for record in records}:
            return found
        assert time.monotonic() < deadline, f"{bucket} has {found.keys()}"
        time.sleep(0.05)


def test_records_are_gathered_into_objects_by_tenant_and_hour(
    deployment: Deployment, client: Any
) -> None:
    client.create_bucket(Bucket="logs")
    answer = put(deployment, "s3://logs/gateway", token=operator(deployment), content=True)
    assert answer.status_code == 200 and answer.json()["secret"] is None
    deployment.services.pipeline.responses.request_log.view.refresh()
    ids = {chat(deployment, f"Question {n}") for n in range(6)}
    found = wait_for(client, "logs", ids)
    assert len(found) < 6  # several records an object
    for name, records in found.items():
        prefix, tenant, *hour, file = name.split("/")
        assert (prefix, tenant) == ("gateway", deployment.tenant_id)
        assert len(hour) == 4 and file.endswith(".jsonl.gz")
        assert all(each["output_tokens"] > 0 and each["choices"] for each in records)
    every = [each["request_id"] for records in found.values() for each in records]
    assert sorted(every) == sorted(ids)  # each once
    texts = [each["request"]["messages"][-1]["content"] for r in found.values() for each in r]
    assert sorted(texts) == [f"Question {n}" for n in range(6)]


def test_a_bucket_that_is_not_there_stops_no_request(
    deployment: Deployment, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "_ATTEMPTS", 1)
    dropped = metrics.request_log.labels("dropped")
    assert put(deployment, "s3://nowhere", token=operator(deployment)).status_code == 200
    deployment.services.pipeline.responses.request_log.view.refresh()
    before, deadline = dropped._value.get(), time.monotonic() + 60
    chat(deployment, "Hello")
    while dropped._value.get() == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_tenant_cannot_name_a_bucket(deployment: Deployment) -> None:
    """The gateway's own credentials would write there."""
    refused = put(deployment, "s3://logs/gateway")
    assert refused.status_code == 400
    assert "not a valid webhook URL" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "changes"),
    [
        ("s3://", {}),
        ("s3://UPPER/x", {}),
        ("s3://logs/../other", {"format": "otlp"}),
        ("s3://logs//x", {}),
        ("s3://logs", {"authorization": "Bearer x"}),
    ],
)
def test_a_wrong_bucket_is_refused_when_it_is_set(
    deployment: Deployment, url: str, changes: dict[str, Any]
) -> None:
    refused = put(deployment, url, token=operator(deployment), **changes)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "url"


def test_the_command_sets_it(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))
    command = ["tenant", "request-log", "--tenant", "demo", "--url", "s3://logs/x", "--json"]
    assert main(command) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["url"] == "s3://logs/x" and "secret" not in shown
