"""Whatever liberties a server takes with framing, indexes, arguments and parts, what it means arrives."""

import json
from typing import Any

import pytest

from engine.protocol import GenerateRequest, SamplingParams
from gateway.answers.choices import ChoiceOutput
from gateway.answers.reasoning import reader_for
from gateway.engines.openai_response import ResponseParser
from gateway.request.engine import Job, Mailbox
from gateway.request.inference import InferenceRequest
from tests.gateway.drawn_answers import TOOLS, Drawn, draw

PROTECTS = ("gateway/engines", "gateway/answers")
FEW = 300


async def output_of(reads: list[bytes], content_type: str, tools: Any = TOOLS) -> ChoiceOutput:
    request = InferenceRequest(
        "/v1/chat/completions",
        "m",
        messages=[{"role": "user", "content": "Hi"}],
        stream=content_type == "text/event-stream",
        tools=tools,
    )
    job = Job(GenerateRequest("r", "t", [1] * 7, SamplingParams(500)), request)
    mailbox = Mailbox("r", lambda _: None)
    parser = ResponseParser("e", job, mailbox, lambda _: None)
    parser.on_headers(200, content_type)
    for read in reads:
        parser.on_data(read)
    parser.on_end()
    output = ChoiceOutput(0, None, (), None, reader_for(request))
    while chunks := await mailbox.take():
        for chunk in chunks:
            output.feed(chunk)
    return output


def check(drawn: Drawn, output: ChoiceOutput) -> None:
    said = "".join(output.text)
    assert said == drawn.text + drawn.refusal and output.refused == bool(drawn.refusal)
    assert "".join(output.reasoning) == drawn.reasoning
    expected = [(name, arguments) for _, name, arguments in drawn.calls]
    assert [(call.name, json.loads(call.arguments)) for call in output.calls] == expected
    assert [call.index for call in output.calls] == list(range(len(drawn.calls)))
    if drawn.style.ids:
        assert [call.id for call in output.calls] == [own_id for own_id, _, _ in drawn.calls]
    assert output.finish_reason == ("tool_calls" if drawn.calls else "stop")


async def compare(seeds: range) -> None:
    for seed in seeds:
        drawn = draw(seed)
        for reads, kind in (
            (drawn.reads, "text/event-stream"),
            ([drawn.whole], "application/json"),
        ):
            try:
                check(drawn, await output_of(reads, kind))
            except Exception as error:
                raise AssertionError(f"seed {seed}, {kind}: {drawn.style}") from error


async def test_what_a_server_means_arrives() -> None:
    await compare(range(FEW))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("arguments", ['{"city": "Be', "", '{"city": "Bern"}'])
async def test_a_call_that_a_server_cuts_has_what_there_is_of_it(
    stream: bool, arguments: str
) -> None:
    whole = {"id": "call_a", "function": {"name": "now", "arguments": "{}"}}
    cut = {"id": "call_b", "function": {"name": "add_task", "arguments": arguments}}
    listed = [{**call, "index": number} for number, call in enumerate((whole, cut))]
    said = {"delta" if stream else "message": {"tool_calls": listed}}
    body = json.dumps({"choices": [{"index": 0, **said, "finish_reason": "length"}]})
    kind = "text/event-stream" if stream else "application/json"
    sent = f"data: {body}\n\ndata: [DONE]\n\n" if stream else body
    output = await output_of([sent.encode()], kind)
    found = [(call.id, call.name, call.arguments) for call in output.calls]
    assert found == [("call_a", "now", "{}"), ("call_b", "add_task", arguments)]
    assert output.finish_reason == "length" and not "".join(output.text)


@pytest.mark.proof
async def test_what_a_server_means_arrives_of_many() -> None:
    await compare(range(FEW, FEW + 8_000))
