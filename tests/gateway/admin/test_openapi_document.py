"""What /openapi.json says of parameters, content types and methods is what the routes do."""

import re
import time
from typing import Any

import httpx
import pytest

from core.errors import BadRequest
from gateway.edge.decoding import check_range
from tests.gateway.deployment import Deployment

METHODS = {"get", "post", "put", "patch", "delete"}


@pytest.fixture(scope="module")
def document(deployment: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{deployment.url}/openapi.json").json()
    return found


def sample(parameter: dict[str, Any]) -> Any:
    """A value as a generated client sends it."""
    schema = parameter["schema"]
    kind = schema["type"]
    if kind == "array":
        items = schema["items"]
        items = items.get("anyOf", [items])[0]
        return items.get("enum", items.get("examples", ["model"]))[:1]
    values = {"integer": int(time.time()) - 3600, "boolean": "false", "string": "x"}
    return schema.get("enum", [values[kind]])[0]


@pytest.mark.parametrize("path", ["/v1/organization/usage/completions", "/v1/organization/costs"])
def test_every_parameter_that_the_document_lists_is_taken(
    deployment: Deployment, document: dict[str, Any], path: str
) -> None:
    listed = document["paths"][path]["get"]["parameters"]
    named = {each["name"]: sample(each) for each in listed if each["name"] != "tenant"}
    assert {"start_time", "end_time", "bucket_width", "group_by", "limit", "page"} <= named.keys()
    assert [each["name"] for each in listed if each.get("required")] == ["start_time"]
    named |= {"time_zone": "Asia/Kolkata"} | {"limit": 5, "end_time": named["start_time"] + 60}
    named["page"] = f"page_{named['start_time']}"
    for name, value in named.items():
        asked = {"start_time": named["start_time"], name: value}
        answer = httpx.get(f"{deployment.url}{path}", params=asked, headers=deployment.headers)
        assert answer.status_code == 200, (name, answer.text)
    items = next(each["schema"]["items"] for each in listed if each["name"] == "group_by")
    named_groups, labels = items["anyOf"]
    for group in [*named_groups["enum"], *labels["examples"]]:
        asked = {"start_time": named["start_time"], "group_by": group}
        answer = httpx.get(f"{deployment.url}{path}", params=asked, headers=deployment.headers)
        assert answer.status_code == 200, (group, answer.text)
    for name in ("bucket_width", "group_by"):  # it is read, and not only taken
        asked = {"start_time": named["start_time"], name: "nonsense"}
        answer = httpx.get(f"{deployment.url}{path}", params=asked, headers=deployment.headers)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_content_types_are_those_of_the_document(
    deployment: Deployment, document: dict[str, Any]
) -> None:
    def kinds(path: str) -> set[str]:
        return set(document["paths"][path]["get"]["responses"]["200"]["content"])

    for form in ("csv", "jsonl"):
        url = f"{deployment.url}/v1/exports?format={form}"
        kind = httpx.get(url, headers=deployment.headers).headers["content-type"]
        assert kind.partition(";")[0] in kinds("/v1/exports")
    assert kinds("/metrics") == {"text/plain"}
    assert "202" in document["paths"]["/mcp"]["post"]["responses"]
    assert "400" in document["paths"]["/webhooks/stripe"]["post"]["responses"]


def test_a_wrong_method_is_405_with_all_that_are_right(
    deployment: Deployment, document: dict[str, Any]
) -> None:
    with httpx.Client(base_url=deployment.url, headers=deployment.headers) as client:
        for path, operations in document["paths"].items():
            address = re.sub(r"\{[^}]*\}", "x", path)
            answer = client.request("TRACE", address)
            assert answer.status_code == 405, path
            allowed = set(answer.headers["allow"].split(", "))
            documented = {each.upper() for each in operations if each in METHODS}
            assert documented <= allowed, path
            assert "TRACE" not in allowed


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-(2**63), 2**63 - 1, "between -9223372036854775808 and 9223372036854775807"),
        (0.01, 100, "between 0.01 and 100"),
    ],
)
def test_bounds_are_written_in_full(low: float, high: float, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        check_range("seed", 2**64, low, high)
