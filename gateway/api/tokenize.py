"""/tokenize, /detokenize and the token-count routes of OpenAI and Anthropic.

None of them is billed; all count against the request limits."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from core.errors import BadRequest
from core.ids import REQUEST, new_id
from core.tenants.keys import Principal
from gateway.admission.request import AdmissionRequest
from gateway.api.access import Caller, ServicesDep
from gateway.api.bodies import read_body, read_raw
from gateway.catalog.catalog import Target
from gateway.inference.chat.request import Message, parse_message
from gateway.inference.decoding import Request as Body
from gateway.inference.decoding import parse_body
from gateway.inference.messages.request import parse_count
from gateway.inference.request import InferenceRequest
from gateway.inference.responses.request import parse_responses
from gateway.inference.sampling import Count
from gateway.prompts.prompt import Prompt, prepare
from gateway.prompts.template_variables import checked
from gateway.prompts.tokenizing import TextCodec
from gateway.wiring import Services

router = APIRouter(tags=["tokens"])


class TokenizeBody(Body, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    tokens: list[Count]


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


@router.post("/tokenize")
async def tokenize(request: Request, services: ServicesDep, caller: Caller) -> Response:
    body = await read_body(request, services, _tokenize)
    target = await _counted_target(services, caller, body.model)
    codec = _codec(target)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest(
            "Exactly one of prompt and messages is required.",
            next_step="Send one of them.",
            param="prompt",
        )
    prompt: Prompt | None = None
    if body.messages is not None:
        messages = [parse_message(index, each) for index, each in enumerate(body.messages)]
        ask = InferenceRequest(
            route="/tokenize",
            model=body.model,
            messages=messages,
            max_tokens=1,
            chat_template_kwargs=checked(body.chat_template_kwargs),
        )
        prompt = await prepare(ask, codec, target.model.context_length, caller)

    def _answer() -> bytes:
        ids = prompt.ids if prompt is not None else _encode(codec, body)
        answer = {"count": len(ids), "max_model_len": target.model.context_length, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [codec.token_text(token) for token in ids]
        return orjson.dumps(answer)

    return await _json_from_thread(_answer)


@router.post("/detokenize")
async def detokenize(request: Request, services: ServicesDep, caller: Caller) -> Response:
    body = await read_body(request, services, _detokenize)
    codec = _codec(await _counted_target(services, caller, body.model))

    def _answer() -> bytes:
        largest = max(body.tokens, default=0)
        if largest >= codec.vocab_size:
            raise BadRequest(
                f"tokens contains {largest}; the model's token ids are 0 to "
                f"{codec.vocab_size - 1}.",
                next_step="Remove it.",
                param="tokens",
            )
        return orjson.dumps({"prompt": codec.decode(body.tokens, special=True)})

    return await _json_from_thread(_answer)


async def _counted_target(services: Services, caller: Principal, name: str) -> Target:
    """The target of a request, counted against the request limits of the plan. These routes are not
    billed, but they cost as much CPU as the prompt of an inference request."""
    target = services.pipeline.catalog.resolve(caller, name)
    request = AdmissionRequest.without_prompt(new_id(REQUEST), caller, target.model.name)
    await services.limiter.request_rate.count(request)
    return target


async def _json_from_thread(answer: Callable[[], bytes]) -> Response:
    return Response(await asyncio.to_thread(answer), media_type="application/json")


def _encode(codec: TextCodec, body: TokenizeBody) -> list[int]:
    return codec.encode(body.prompt or "", special=body.add_special_tokens is not False)


def _codec(target: Target) -> TextCodec:
    if target.model.codec is None:
        raise BadRequest(
            f"The gateway has no tokenizer for {target.model.name}.",
            next_step="Set `tokenizer` in its TOLLHOUSE_UPSTREAMS entry.",
            param="model",
        )
    return target.model.codec


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, services: ServicesDep, caller: Caller) -> dict[str, int]:
    ask = await parse_body(parse_count, await read_raw(request, services))
    return {"input_tokens": await _count(ask, services, caller)}


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, services: ServicesDep, caller: Caller) -> dict[str, Any]:
    ask = await parse_body(parse_responses, await read_raw(request, services))
    return {"object": "response.input_tokens", "input_tokens": await _count(ask, services, caller)}


async def _count(ask: InferenceRequest, services: ServicesDep, caller: Caller) -> int:
    target = await _counted_target(services, caller, ask.model)
    prompt = await prepare(ask, target.model.codec, target.model.context_length, caller)
    return len(prompt.ids)
