"""No inference route goes round admission, moderation or the ledger; the API's document holds."""

from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from starlette.routing import Mount, Route

from gateway.app import InferenceEndpoint
from gateway.formats.registry import inference_surfaces
from gateway.serving.media.request import ENDPOINTS
from tests.gateway.deployment import MODEL, Deployment

# What answers POST under /v1 without generating: each for a reason.
WITHOUT_GENERATION = {
    **{
        endpoint.route: "passed to an upstream; serving/test_media.py follows every step"
        for endpoint in ENDPOINTS
    },
    "/v1/messages/count_tokens": "counts tokens",
    "/v1/responses/input_tokens": "counts tokens",
    "/v1/responses/{response_id}/cancel": "ends a background response",
    "/v1/chat/completions/{completion_id}": "changes labels",
    "/v1/chat/completions/batch": "is refused",
    "/v1/conversations": "keeps items",
    "/v1/conversations/{conversation_id}": "changes labels",
    "/v1/conversations/{conversation_id}/items": "keeps items",
    "/v1/load_lora_adapter": "registers an adapter",
    "/v1/unload_lora_adapter": "removes an adapter",
    "/v1/moderations": "scores; limited, priced and metered by its own event",
    "/v1/files": "keeps a file",
    "/v1/batches": "orders what tests/gateway/serving/test_batches.py follows through every step",
    "/v1/batches/{batch_id}/cancel": "ends a batch",
    "/v1/messages/batches": "orders what formats/test_coding_agents.py follows to its results",
    "/v1/messages/batches/{batch_id}/cancel": "ends a batch",
    "/v1/exports": "writes a file of figures",
    "/v1/events": "takes usage that the gateway did not serve",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Hello"]},
    "/v1/score": {"text_1": "Hi", "text_2": "Hello"},
}
# The others are followed by tests/gateway/formats/test_embeddings.py and test_own_embeddings.py.
STREAMED = sorted(set(BODIES) - {"/v1/embeddings", "/v1/rerank", "/v1/score"})


def routes_of(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, route) of every route, through the routers that FastAPI includes as they are."""
    for route in routes:
        if isinstance(route, Mount):
            continue
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from routes_of(included.routes, prefix + route.include_context.prefix)
            continue
        assert isinstance(route, Route | APIRoute), f"a route of an unknown kind: {route!r}"
        yield prefix + route.path, route


def test_every_inference_route_is_a_registered_surface(deployment: Deployment) -> None:
    surfaces = {surface.route for surface in inference_surfaces()}
    every = list(routes_of(deployment.app.router.routes))
    posts = {path: route for path, route in every if "POST" in (route.methods or ())}
    assert "/v1/moderations" in posts and "/tokenize" in posts
    endpoints = {
        path for path, route in posts.items() if isinstance(route.endpoint, InferenceEndpoint)
    }
    assert endpoints == surfaces == set(BODIES)
    others = {path for path in posts if path.startswith("/v1/")} - endpoints
    # Administration as at OpenAI: gateway/admin/test_openai_admin.py, and the access matrix.
    others = {path for path in others if not path.startswith("/v1/organization/")}
    assert others <= set(WITHOUT_GENERATION), others - set(WITHOUT_GENERATION)


@pytest.mark.parametrize("route", STREAMED)
@pytest.mark.parametrize("stream", [False, True])
def test_each_surface_passes_every_step(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, route: str, stream: bool
) -> None:
    pipeline = deployment.services.pipeline
    steps: list[str] = []

    def _spy(owner: Any, name: str, step: str) -> None:
        plain = getattr(owner, name)

        def _seen(*arguments: Any, **options: Any) -> Any:
            steps.append(step)
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, _seen)

    _spy(pipeline.auth, "principal", "auth")
    _spy(pipeline.admission, "reserve", "admission")
    _spy(pipeline.moderator, "screen", "moderation")
    _spy(pipeline.moderator, "guard", "guard")
    _spy(pipeline.metering.spool, "open", "opened")
    _spy(pipeline.metering.spool, "close", "closed")
    answer = httpx.post(
        f"{deployment.url}{route}",
        json={"model": MODEL, "stream": stream, **BODIES[route]},
        headers=deployment.headers,
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    if route == "/v1/responses":  # its key is read before the stored responses are
        assert steps.pop(0) == "auth"
    assert steps == ["auth", "admission", "moderation", "opened", "guard", "closed"]
    event = deployment.last_event()
    assert (event["route"], event["output_tokens"], event["streamed"]) == (route, 3, stream)


@pytest.mark.parametrize("route", sorted({*BODIES, "/tokenize", "/v1/models", "/admin/v1/keys"}))
def test_a_route_without_a_key_is_a_401(deployment: Deployment, route: str) -> None:
    method = "GET" if route in ("/v1/models", "/admin/v1/keys") else "POST"
    answer = httpx.request(method, f"{deployment.url}{route}", json=BODIES.get(route, {}))
    assert answer.status_code == 401, answer.text


FUZZED = (
    *BODIES,
    *("/tokenize", "/detokenize", "/v1/moderations", "/v1/batches"),
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/mcp"),
)


@pytest.mark.parametrize("path", FUZZED)
def test_no_body_of_the_openapi_document_causes_a_server_error(
    deployment: Deployment, path: str
) -> None:
    document = httpx.get(f"{deployment.url}/openapi.json", timeout=60).json()
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]

    @settings(max_examples=12, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def _holds(case: Any) -> None:
        answer = case.call(base_url=deployment.url, headers=deployment.headers, timeout=60)
        allowed = (503,) if path == "/v1/moderations" else ()  # where no classifier is shipped
        fine = answer.status_code < 500 or answer.status_code in allowed
        assert fine, (path, repr(case.body)[:500], answer.text)

    _holds()
