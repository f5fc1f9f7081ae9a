"""The picker as Envoy calls it: `envoy.service.ext_proc.v3` with bodies in full duplex.

Source: the endpoint picker protocol 1.0.0 of the Gateway API Inference Extension. A body goes back to
the proxy as it came; the address that the picker chose goes into a header and into dynamic metadata.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import orjson

from core.extras import imports_of
from gateway.engines.picker import messages as pb
from gateway.engines.picker.asks import ask_of
from gateway.engines.picker.picking import Picker, Placed, Refused

with imports_of("picker", "The endpoint picker"):
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

log = logging.getLogger("tollhouse.picker")
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = f"{DESTINATION}-subset"
SERVED = f"{DESTINATION}-served"
DROPPED = "x-llm-d-request-dropped-reason"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_CHUNK = 60_000  # bytes of a body message, below the 64 KiB that proxies take
# Bytes of a body that are read before the choice, and of all bodies that wait for it; the rest of a
# longer one passes on behind the choice.
_MOST_READ, _MOST_HELD = 16 << 20, 256 << 20


def handler_of(picker: Picker) -> Any:
    """The service with its one method, which takes the messages about one HTTP request of the proxy."""

    async def _process(messages: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        exchange = Exchange(picker)
        try:
            async for message in messages:
                for answer in exchange.take(message):
                    yield answer
        finally:
            exchange.end()

    method = grpc.stream_stream_rpc_method_handler(
        _process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})


class Exchange:
    """The messages about one HTTP request, in the proxy's order."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._placed: Placed | None = None
        self._refused = False
        self._steps: dict[str, Callable[[Any], Iterator[Any]]] = {
            "request_headers": self._request_headers,
            "request_body": self._request_body,
            "request_trailers": self._request_trailers,
            "response_headers": self._response_headers,
            "response_body": self._response_body,
            "response_trailers": self._response_trailers,
        }

    def take(self, message: Any) -> Iterator[Any]:
        """The answers to one message. After a refusal there are none."""
        kind = message.WhichOneof("request")
        if self._refused or kind is None:
            return
        yield from self._steps[kind](message)

    def end(self) -> None:
        self._let_go()
        if self._placed is not None:
            self._placed.ended()

    def _let_go(self) -> None:
        self._picker.held_bytes -= self._size
        self._body, self._size = [], 0

    def _request_headers(self, message: Any) -> Iterator[Any]:
        for header in message.request_headers.headers.headers:
            value = header.raw_value.decode("latin-1") or header.value
            self._headers[header.key.lower()] = value
        self._subset = subset_of(metadata_of(message))
        if message.request_headers.end_of_stream:
            yield self._place()

    def _request_body(self, message: Any) -> Iterator[Any]:
        body, last = message.request_body.body, message.request_body.end_of_stream
        if self._placed is None:
            self._body.append(body)
            self._size += len(body)
            self._picker.held_bytes += len(body)
            if last or self._size > _MOST_READ or self._picker.held_bytes > _MOST_HELD:
                yield self._place()
                if not self._refused:
                    yield from self._pass_on(last)
            return
        yield from streamed("request_body", body, last)

    def _request_trailers(self, message: Any) -> Iterator[Any]:
        if self._placed is None:
            yield self._place()
            if self._refused:
                return
            yield from self._pass_on(last=False)
        yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())

    def _response_headers(self, message: Any) -> Iterator[Any]:
        if self._placed is not None:
            self._placed.served(served_of(metadata_of(message)))
            if message.response_headers.end_of_stream:
                self._placed.ended()
        yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())

    def _response_body(self, message: Any) -> Iterator[Any]:
        last = message.response_body.end_of_stream
        if last:
            self.end()
        yield from streamed("response_body", message.response_body.body, last)

    def _response_trailers(self, message: Any) -> Iterator[Any]:
        self.end()
        yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def _place(self) -> Any:
        ask = ask_of(b"".join(self._body), self._headers, self._subset)
        try:
            self._placed = self._picker.pick(ask)
        except Refused as refusal:
            self._refused = True
            self._let_go()
            return refused(refusal)
        return destination(self._placed.servers)

    def _pass_on(self, last: bool) -> Iterator[Any]:
        body = b"".join(self._body)
        self._let_go()
        yield from streamed("request_body", body, last)


def metadata_of(message: Any) -> Mapping[str, Any]:
    return {each.key: each.value for each in message.metadata_context.filter_metadata}


def subset_of(metadata: Mapping[str, Any]) -> frozenset[str] | None:
    """Addresses that the proxy allows; None if it allows all."""
    fields = metadata["envoy.lb.subset_hint"].fields if "envoy.lb.subset_hint" in metadata else {}
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    texts = [each.string_value for each in value.list_value.values] or [value.string_value]
    return frozenset(each.strip() for text in texts for each in text.split(",") if each.strip())


def served_of(metadata: Mapping[str, Any]) -> str:
    fields = metadata["envoy.lb"].fields if "envoy.lb" in metadata else {}
    return str(fields[SERVED].string_value) if SERVED in fields else ""


def destination(servers: list[str]) -> Any:
    """The answer to the headers: where the request goes, with the servers to try after that."""
    value = ",".join(servers)
    answer = pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(
            response=pb.CommonResponse(
                header_mutation=pb.HeaderMutation(set_headers=[_header(DESTINATION, value)]),
                clear_route_cache=True,
            )
        )
    )
    fields = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    fields[DESTINATION].string_value = value
    return answer


def streamed(field: str, body: bytes, last: bool) -> Iterator[Any]:
    """A body as it came, in messages that a proxy takes."""
    for start in range(0, max(len(body), 1), _CHUNK):
        end = last and start + _CHUNK >= len(body)
        part = pb.StreamedBodyResponse(body=body[start : start + _CHUNK], end_of_stream=end)
        mutation = pb.BodyMutation(streamed_response=part)
        response = pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))
        yield pb.ProcessingResponse(**{field: response})


def refused(refusal: Refused) -> Any:
    kind = "rate_limit_error" if refusal.status == 429 else "server_error"
    error = {"message": str(refusal), "type": kind, "param": None, "code": refusal.reason}
    headers = [
        _header("content-type", "application/json"),
        _header("retry-after", "1"),
        _header(DROPPED, refusal.reason),
    ]
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=refusal.status),
            headers=pb.HeaderMutation(set_headers=headers),
            body=orjson.dumps({"error": error}),
            details=refusal.reason,
        )
    )


def _header(name: str, value: str) -> Any:
    header = pb.HeaderValue(key=name, raw_value=value.encode("latin-1"))
    return pb.HeaderValueOption(header=header, append_action=pb.OVERWRITE_OR_ADD)


class PickerServer:
    """The gRPC server, with the health services that a gateway asks."""

    def __init__(self, picker: Picker, address: str) -> None:
        self._picker = picker
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((handler_of(picker),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._server.add_insecure_port(address)
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._picker.servers.start()
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self._report()
        await self._server.start()
        self._watch = asyncio.create_task(self._keep_reporting())

    async def close(self, grace_s: float = 5.0) -> None:
        await self._health.enter_graceful_shutdown()
        if self._watch is not None:
            self._watch.cancel()
        await self._server.stop(grace_s)
        await self._picker.servers.close()

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self._report()

    async def _report(self) -> None:
        """Ready while a server of the pool is."""
        status = health_pb2.HealthCheckResponse
        state = status.SERVING if self._picker.servers.ready() else status.NOT_SERVING
        for service in ("readiness", SERVICE, ""):
            await self._health.set(service, state)
