"""/tokenize, /detokenize and the token-count routes of OpenAI and Anthropic.

None of them is billed; all count against the request limits."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import APIRouter, Depends, Request, Response
from msgspec import Meta

from core.errors import BadRequest, UnsupportedParameter
from core.ids import REQUEST, new_id
from gateway.admission.request import AdmissionRequest
from gateway.catalog.catalog import Target
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.edge.decoding import Request as Body
from gateway.edge.decoding import parse_body
from gateway.formats.chat.request import Message, parse_message
from gateway.formats.messages.request import parse_count
from gateway.formats.responses.request import parse_responses
from gateway.formats.sampling import Count
from gateway.prompts.prompt import Prompt, prepare
from gateway.prompts.template_variables import checked
from gateway.request import media_parts
from gateway.request.inference import InferenceRequest
from gateway.serving.api.bodies import read_body, read_raw
from gateway.serving.api.dependencies import Caller, CatalogDep, LimitsDep, RequestRateDep

router = APIRouter(tags=["tokens"])


_ModelName = Annotated[str, Meta(min_length=1, max_length=300)]


class TokenizeBody(Body, kw_only=True):
    model: _ModelName | None = None  # may be left out with a key that has one model
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    model: _ModelName | None = None  # may be left out with a key that has one model
    tokens: list[Count]


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


@dataclass(frozen=True)
class _Targets:
    """The targets of the caller's requests, counted against the request limits of the plan. These
    routes are not billed, but they cost as much CPU as the prompt of an inference request."""

    caller: Caller
    catalog: CatalogDep
    request_rate: RequestRateDep

    async def counted(self, name: str | None) -> Target:
        """Without a name, of the only model that the key may use."""
        target = self.catalog.resolve(self.caller, name or self.catalog.only(self.caller))
        request = AdmissionRequest.without_prompt(new_id(REQUEST), self.caller, target.model.name)
        await self.request_rate.count(request)
        return target

    async def tokens(self, request: InferenceRequest) -> int:
        """The prompt tokens of the request. Raises UnsupportedParameter for images and audio, which
        only the upstream can count."""
        for kind in media_parts.CAPABILITIES & request.engine_parameters.keys():
            where = request.extra["named"][kind]
            raise UnsupportedParameter(
                f"{where} is not text: only the model's upstream counts the tokens of {kind}.",
                next_step="Leave it out; the answer's usage includes it.",
                param=where,
            )
        model = (await self.counted(request.model)).model
        prompt = await prepare(request, model.codec, model.context_length, self.caller)
        return len(prompt.ids)


TargetsDep = Annotated[_Targets, Depends(_Targets)]


@router.post("/tokenize")
async def tokenize(request: Request, targets: TargetsDep, limits: LimitsDep) -> Response:
    body = await read_body(request, limits, _tokenize)
    target = await targets.counted(body.model)
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
        given = InferenceRequest(
            route="/tokenize",
            model=target.public_name,
            messages=messages,
            max_tokens=1,
            chat_template_kwargs=checked(body.chat_template_kwargs),
        )
        prompt = await prepare(given, codec, target.model.context_length, targets.caller)

    def _answer() -> bytes:
        ids = prompt.ids if prompt is not None else _encode(codec, body)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": target.model.known_context,
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [codec.token_text(token) for token in ids]
        return orjson.dumps(answer)

    return await _json_from_thread(_answer)


@router.post("/detokenize")
async def detokenize(request: Request, targets: TargetsDep, limits: LimitsDep) -> Response:
    body = await read_body(request, limits, _detokenize)
    codec = _codec(await targets.counted(body.model))

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


@router.get("/tokenizer_info")
async def tokenizer_info(targets: TargetsDep, model: str | None = None) -> Mapping[str, Any]:
    """What the model's tokenizer files say, in vLLM's form: special tokens, chat template, length."""
    target = await targets.counted(model)
    codec = _codec(target)
    named: dict[str, str | int] = {}
    if codec.template is not None:
        named |= codec.template.tokens
        named["chat_template"] = codec.template.source
    if target.model.known_context is not None:
        named["model_max_length"] = target.model.known_context
    return {"tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": codec.vocab_size, **named}


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
async def count_tokens(request: Request, targets: TargetsDep, limits: LimitsDep) -> dict[str, int]:
    given = await parse_body(parse_count, await read_raw(request, limits))
    return {"input_tokens": await targets.tokens(given)}


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, targets: TargetsDep, limits: LimitsDep) -> dict[str, Any]:
    given = await parse_body(parse_responses, await read_raw(request, limits))
    return {"object": "response.input_tokens", "input_tokens": await targets.tokens(given)}
