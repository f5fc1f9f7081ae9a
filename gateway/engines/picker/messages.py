"""The messages of `envoy.service.ext_proc.v3` that a picker reads and writes, with the field numbers of
Envoy's API. What is not named here is skipped by whoever reads it, as protocol buffers promise.

They are made here because the one distribution of Envoy's messages brings files of other distributions.
"""

from typing import Any

from core.extras import imports_of

with imports_of("picker", "The endpoint picker"):
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.struct_pb2 import Struct

_PACKAGE = "tollhouse.picker"
_KINDS = {"bool": 8, "string": 9, "bytes": 12, "int32": 5}  # protocol buffers' own numbers
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3
_STRUCT = "google.protobuf.Struct"

# Message -> field -> (number, kind); a kind in brackets is repeated. Enumerations are sent as numbers.
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "[HeaderValue]")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "[HeaderValueOption]")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "NamedMetadata": {"key": (1, "string"), "value": (2, _STRUCT)},  # an entry of a map
    "Metadata": {"filter_metadata": (1, "[NamedMetadata]")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
}
# The fields of which a message has one, by the name of the choice.
_ONE_OF = {"ProcessingRequest": ("request", 7), "ProcessingResponse": ("response", 7)}


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="tollhouse/picker.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[Struct.DESCRIPTOR.file.name],
    )
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        choice, last = _ONE_OF.get(name, ("", 0))
        if choice:
            message.oneof_decl.add(name=choice)
        for field, (number, kind) in fields.items():
            single = kind.strip("[]")
            added = message.field.add(
                name=field,
                number=number,
                type=_KINDS.get(single, _MESSAGE),
                label=_REPEATED if kind != single else _OPTIONAL,
            )
            if single not in _KINDS:
                added.type_name = f".{single if '.' in single else f'{_PACKAGE}.{single}'}"
            if number <= last:
                added.oneof_index = 0
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(descriptor_pb2.FileDescriptorProto.FromString(Struct.DESCRIPTOR.file.serialized_pb))
_pool.Add(_file())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


HeaderValue, HeaderValueOption = _class("HeaderValue"), _class("HeaderValueOption")
HeaderMutation, StreamedBodyResponse = _class("HeaderMutation"), _class("StreamedBodyResponse")
BodyMutation, CommonResponse = _class("BodyMutation"), _class("CommonResponse")
HeadersResponse, BodyResponse = _class("HeadersResponse"), _class("BodyResponse")
TrailersResponse, HttpStatus = _class("TrailersResponse"), _class("HttpStatus")
ImmediateResponse, HttpHeaders = _class("ImmediateResponse"), _class("HttpHeaders")
HttpBody, ProcessingRequest = _class("HttpBody"), _class("ProcessingRequest")
ProcessingResponse = _class("ProcessingResponse")
OVERWRITE_OR_ADD = 2  # of HeaderValueOption.append_action
