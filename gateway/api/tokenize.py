"""/tokenize, /detokenize and the token-count routes of OpenAI and Anthropic. None of them is billed."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta

from core.errors import BadRequest
from gateway.api.access import Caller, ServicesDep
from gateway.api.bodies import read_body, read_raw
from gateway.catalog.catalog import Target
from gateway.inference.chat.request import Message, parse_message
from gateway.inference.decoding import Request as Body
from gateway.inference.messages.request import parse_count
from gateway.inference.request import InferenceRequest
from gateway.inference.responses.request import parse_responses
from gateway.inference.sampling import Count
from gateway.prompts.prompt import prepare
from gateway.prompts.template_variables import checked
from gateway.prompts.tokenizing import TextCodec

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
async def tokenize(request: Request, services: ServicesDep, caller: Caller) -> dict[str, Any]:
    body = await read_body(request, services, _tokenize)
    target = services.pipeline.catalog.resolve(caller, body.model)
    codec = _codec(target)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest(
            "Exactly one of prompt and messages is required.",
            next_step="Send one of them.",
            param="prompt",
        )
    if body.messages is not None:
        messages = [parse_message(index, each) for index, each in enumerate(body.messages)]
        ask = InferenceRequest(
            route="/tokenize",
            model=body.model,
            messages=messages,
            max_tokens=1,
            chat_template_kwargs=checked(body.chat_template_kwargs),
        )
        context = target.model.context_length
        ids = (await prepare(ask, codec, context, caller)).ids
    else:
        ids = codec.encode(body.prompt or "", special=body.add_special_tokens is not False)
    answer = {"count": len(ids), "max_model_len": target.model.context_length, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [codec.token_text(token) for token in ids]
    return answer


@router.post("/detokenize")
async def detokenize(request: Request, services: ServicesDep, caller: Caller) -> dict[str, Any]:
    body = await read_body(request, services, _detokenize)
    codec = _codec(services.pipeline.catalog.resolve(caller, body.model))
    for token in body.tokens:
        if token >= codec.vocab_size:
            raise BadRequest(
                f"tokens contains {token}; the model's token ids are 0 to {codec.vocab_size - 1}.",
                next_step="Remove it.",
                param="tokens",
            )
    return {"prompt": codec.tokenizer.decode(body.tokens, skip_special_tokens=False)}


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
    ask = parse_count(await read_raw(request, services))
    return {"input_tokens": await _count(ask, services, caller)}


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, services: ServicesDep, caller: Caller) -> dict[str, Any]:
    ask = parse_responses(await read_raw(request, services))
    return {"object": "response.input_tokens", "input_tokens": await _count(ask, services, caller)}


async def _count(ask: InferenceRequest, services: ServicesDep, caller: Caller) -> int:
    target = services.pipeline.catalog.resolve(caller, ask.model)
    prompt = await prepare(ask, target.model.codec, target.model.context_length, caller)
    return len(prompt.ids)
