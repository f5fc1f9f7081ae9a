"""On PostgreSQL, which holds no NUL and no text beyond its column: what a client sends is stored or
refused with 400. Every text of every body, query and path of the product's own OpenAPI document, once
with a NUL and once as long as the document allows it."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.dashboards.browser_client import browser
from tests.gateway.deployment import running_deployment

_METHODS = ("get", "post", "put", "patch", "delete")
_DEPTH = 4  # levels of a body
_UNBOUNDED = 6000  # characters, where the document names no most
NUL = "a\x00b"


class Schemas:
    """Values by the schemas of a document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def plain(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Without references, and of alternatives the first that is not null."""
        if "$ref" in schema:
            found: Any = self._document
            for name in schema["$ref"].split("/")[1:]:
                found = found[name]
            return self.plain(found)
        for each in schema.get("anyOf", ()):
            if (chosen := self.plain(each)).get("type") != "null":
                return chosen | {k: schema[k] for k in ("examples",) if k in schema}
        return schema

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        schema = self.plain(schema)
        for name in ("examples", "enum"):
            if schema.get(name):
                return schema[name][0]
        if schema.get("default") or "const" in schema:
            return schema.get("const", schema.get("default"))
        match schema.get("type"):
            case "string":
                if schema.get("format") == "date-time":
                    return "2026-01-02T00:00:00Z"
                return (
                    "1" if "\\d" in schema.get("pattern", "") else "a" * schema.get("minLength", 1)
                )
            case "integer" | "number":
                return schema.get("minimum", 1)
            case "boolean":
                return False
            case "array":
                return [self.value(schema.get("items", {}), depth + 1)] if depth < _DEPTH else []
            case _:
                named = schema.get("properties", {}) if depth < _DEPTH else {}
                return {name: self.value(each, depth + 1) for name, each in named.items()}

    def texts(
        self, schema: dict[str, Any], path: tuple[str | int, ...] = ()
    ) -> Iterator[tuple[tuple[str | int, ...], int]]:
        """The places of texts in a value, and how long each may be."""
        schema = self.plain(schema)
        if schema.get("type") == "string" and not {"enum", "const"} & {*schema}:
            yield path, schema.get("maxLength", _UNBOUNDED)
        elif len(path) >= _DEPTH:
            return
        elif schema.get("type") == "array":
            yield from self.texts(schema.get("items", {}), (*path, 0))
        else:
            for name, each in schema.get("properties", {}).items():
                yield from self.texts(each, (*path, name))


def with_text(body: Any, path: tuple[str | int, ...], text: str) -> Any:
    changed = copy.deepcopy(body)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = text
    return changed


def calls(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and what else httpx sends."""
    schemas = Schemas(document)
    for path, operations in document["paths"].items():
        for method in sorted({*operations} & {*_METHODS}):
            operation = operations[method]
            named = [schemas.plain(each) for each in operation.get("parameters", ())]
            in_path = [each["name"] for each in named if each["in"] == "path"]
            values = {name: "demo" if name == "tenant" else "1" for name in in_path}
            query = {
                each["name"]: schemas.value(each["schema"])
                for each in named
                if each["in"] == "query" and each.get("required")
            }
            for name in in_path:
                yield method, path.format(**values | {name: "a%00b"}), {"params": query}
            for each in named:
                for place, most in schemas.texts(each["schema"]):
                    if each["in"] == "query" and not place:
                        for text in (NUL, "x" * most):
                            changed = query | {each["name"]: text}
                            yield method, path.format(**values), {"params": changed}
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content and path != "/mcp":
                body = schemas.value(content["schema"])
                for place, most in schemas.texts(content["schema"]):
                    for text in (NUL, "x" * most):
                        sent = {"params": query, "json": with_text(body, place, text)}
                        yield method, path.format(**values), sent


def test_every_text_is_stored_or_refused(tmp_path: Path, postgres_url: str) -> None:
    failed, count = [], 0
    with running_deployment(tmp_path, settings={"database_url": postgres_url}) as made:
        document = httpx.get(f"{made.url}/openapi.json", timeout=60).json()
        with httpx.Client(base_url=made.url, timeout=60) as client:
            for method, path, sent in calls(document):
                operator = path.startswith("/admin/")
                secret = made.services.operator_token if operator else made.key
                headers = {"authorization": f"Bearer {secret}", "connection": "close"}
                answer = client.request(method, path, headers=headers, **sent)
                count += 1
                if answer.status_code >= 500 and answer.status_code != 503:
                    failed.append(f"{method} {path} {str(sent)[:300]}: {answer.text[:200]}")
    assert not failed, f"{len(failed)} of {count}:\n" + "\n".join(failed)
    assert count > 500


def test_a_page_refuses_them_too(tmp_path: Path, postgres_url: str) -> None:
    with running_deployment(tmp_path, settings={"database_url": postgres_url}) as made:
        client = browser(made, made.services.operator_token)
        for page in ("ledger", "invoices", "payments"):
            found = client.get(f"/dashboard/operator/{page}", params={"q": NUL, "search": NUL})
            assert found.status_code == 400, f"{page}: {found.status_code}"
            assert "cannot hold" in found.text
        client.close()
