"""Whole answers that are the text of one choice take a short way: it gives what the general parser
gives."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import GenerateRequest, SamplingParams
from gateway.engines.openai_response import ResponseParser
from gateway.engines.upstream_usage import UpstreamReceipt
from gateway.request.engine import Job, Mailbox
from gateway.request.inference import InferenceRequest
from tests.gateway.engines.test_plain_events import TEXT, USAGE

MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "content": TEXT,
        "role": st.just("assistant"),
        "refusal": st.sampled_from([None, "", "no"]),
        "reasoning": st.sampled_from([None, "", "hm"]),
        "reasoning_content": st.sampled_from([None, "", "hm"]),
        "tool_calls": st.sampled_from(
            [None, [], [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]]
        ),
    },
)
CHOICE = st.fixed_dictionaries(
    {"message": MESSAGE},
    optional={
        "index": st.sampled_from([0, 1, None, "0", 1.0]),
        "finish_reason": st.sampled_from([None, "stop", "", "length", 5]),
        "logprobs": st.sampled_from([None, {"content": []}, {"content": None}]),
    },
)
LEGACY = st.fixed_dictionaries({"text": TEXT}, optional={"finish_reason": st.just("stop")})
ANSWER = st.fixed_dictionaries(
    {"choices": st.one_of(st.lists(CHOICE, min_size=1, max_size=1), st.lists(CHOICE | LEGACY))},
    optional={
        "usage": st.one_of(USAGE, st.sampled_from([{}, [], "1", {"completion_tokens": "x"}])),
        "id": st.just("x"),
        "error": st.sampled_from([None, {"message": "no"}]),
    },
)
ODD = st.sampled_from(["", "[]", "{", "1", '{"choices":[{"message":5}]}', '{"choices":[{}]}'])


class GeneralParser(ResponseParser):
    """Without the short way."""

    def _take_plain_answer(self, body: bytes) -> bool:
        return False


def taken(kind: type[ResponseParser], body: str, *, counts: bool) -> tuple[Any, ...]:
    """(chunks, receipt, error, request ids that were closed)."""
    messages = [{"role": "user", "content": "Hi"}]
    request = InferenceRequest("/v1/chat/completions", "m", messages=messages)
    job = Job(GenerateRequest("r", "t", [1] * 7, SamplingParams(500)), request)
    closed: list[str] = []
    mailbox = Mailbox("r", lambda _: None)
    parser = kind("e", job, mailbox, closed.append, len if counts else None)
    parser.on_headers(200, "application/json")
    parser.on_data(body.encode())
    parser.on_end()
    error = mailbox._error
    return (
        list(mailbox._chunks),
        mailbox.receipt,
        error and (error.code, error.message),
        closed,
    )


@settings(max_examples=400, deadline=None)
@given(body=ANSWER.map(json.dumps) | ODD, counts=st.booleans())
def test_it_gives_what_the_general_parser_gives(body: str, counts: bool) -> None:
    ours = taken(ResponseParser, body, counts=counts)
    assert ours == taken(GeneralParser, body, counts=counts)
    assert ours[3] == ["r"]


def test_an_ordinary_answer_takes_it() -> None:
    class OnlyPlain(ResponseParser):
        def _parse_answer(self, body: bytes) -> Any:
            raise AssertionError("the general parser was asked")

    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi."}}
    body = json.dumps({"choices": [{**choice, "finish_reason": "stop"}], "usage": usage})
    chunks, receipt, error, _ = taken(OnlyPlain, body, counts=True)
    assert error is None and len(chunks) == 1
    assert isinstance(receipt, UpstreamReceipt) and (receipt.prompt, receipt.generated) == (7, 2)
