"""What a picker reads of a request, and whom it refuses, without a proxy."""

import asyncio
import json
from typing import Any

import pytest

from gateway.engines.picker.asks import ask_of
from gateway.engines.picker.learned_prefixes import BLOCK_BYTES, LearnedPrefixes, block_keys
from gateway.engines.picker.picking import Picker, Refused
from gateway.engines.picker.servers import adapters_of, fixed
from tests.gateway.engines.picker.model_servers import running_servers

pytest.importorskip("grpc", reason="the extra 'picker' is not installed")
from gateway.engines.picker import external_processor
from gateway.engines.picker import messages as pb
from gateway.engines.picker.external_processor import Exchange, metadata_of, subset_of


def asked(text: str, fairness: str = "", **more: Any) -> Any:
    body = {"model": "base", "messages": [{"role": "user", "content": text}], **more}
    return ask_of(json.dumps(body).encode(), {"x-llm-d-inference-fairness-id": fairness}, None)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"\xff\xfe", b'{"model": 3, "messages": 4, "max_tokens": "x"}', b"[" * 9999,
     b'{"model": null, "prompt": {}, "cache_salt": 1, "max_tokens": -3}', b'"\\ud800"'],
)  # fmt: skip
def test_any_body_is_placed(body: bytes) -> None:
    ask = ask_of(body, {}, None)
    assert ask.model == "" and ask.prompt_tokens >= 1 and ask.output_tokens > 0


def test_turns_of_a_conversation_share_their_beginning_and_others_share_nothing() -> None:
    first = [{"role": "user", "content": "a" * 3000}]
    then = [*first, {"role": "assistant", "content": "b" * 900}]
    one, two = (
        ask_of(json.dumps({"model": "m", "messages": m}).encode(), {}, None).keys
        for m in (first, then)
    )
    assert len(one) == 11 and two[:11] == one and len(two) > 13
    for other in ({"model": "n"}, {"model": "m", "cache_salt": "s"}, {"model": "m", "system": "x"}):
        keys = ask_of(json.dumps({**other, "messages": first}).encode(), {}, None).keys
        assert not {*keys} & {*one}


def test_a_server_forgets_what_was_sent_longest_ago() -> None:
    prefixes = LearnedPrefixes(4)
    old, new = (list(block_keys(name, b"x" * BLOCK_BYTES * 3)) for name in ("old", "new"))
    prefixes.sent("a", old)
    prefixes.sent("b", old, capacity=2)
    assert prefixes.overlap(old) == {"a": 3}, "b's first block is gone, and with it the chain"
    prefixes.sent("a", new)
    assert prefixes.blocks("a") == 4 and prefixes.overlap(new) == {"a": 3}
    assert prefixes.overlap(old) == {}
    prefixes.forget("a")
    assert prefixes.blocks("a") == 0 and prefixes.overlap(new) == {}


def test_the_newest_list_of_adapters_counts() -> None:
    page = (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",'
        'waiting_lora_adapters="c"} 1.5e9\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="gone"} 1.4e9\n'
        'vllm:lora_requests_info{running_lora_adapters="bad"} nothing\n'
    )
    assert adapters_of(page) == {"a", "b", "c"} and adapters_of("") == frozenset()


def test_who_holds_more_than_a_share_of_full_servers_is_refused() -> None:
    async def _run() -> None:
        with running_servers(2) as servers:
            picker = Picker(fixed(each.address for each in servers), {}, 5)
            await picker.servers.start()
            placed = [picker.pick(asked(f"{n}", "many")) for n in range(9)]
            assert {each.servers[0] for each in placed} == {each.address for each in servers}
            placed.append(picker.pick(asked("one", "few")))
            for server in servers:
                server.waiting = 5
            await picker.servers.look()
            with pytest.raises(Refused) as refusal:
                picker.pick(asked("more", "many"))
            assert refusal.value.status == 429 and refusal.value.reason == "share"
            placed.append(picker.pick(asked("two", "few")))
            for each in (*placed, *placed):  # twice: the second changes nothing
                each.ended()
            assert [each.under_way for each in picker.servers.ready()] == [0, 0]
            picker.pick(asked("alone", "many")).ended()
            await picker.servers.close()

    asyncio.run(_run())


def test_a_body_too_long_to_read_passes_on_behind_the_choice() -> None:
    async def _run() -> None:
        with running_servers(1) as servers:
            picker = Picker(fixed([servers[0].address]), {}, 5)
            await picker.servers.start()
            exchange, part = Exchange(picker), b"y" * (6 << 20)
            assert not list(exchange.take(pb.ProcessingRequest(request_headers=pb.HttpHeaders())))
            body = b""
            for number in range(4):
                message = pb.HttpBody(body=part, end_of_stream=number == 3)
                answers = list(exchange.take(pb.ProcessingRequest(request_body=message)))
                kinds = [each.WhichOneof("response") for each in answers]
                assert not kinds if number < 2 else kinds.count("request_headers") == (number == 2)
                parts = [each.request_body.response.body_mutation.streamed_response for each in answers
                         if each.HasField("request_body")]  # fmt: skip
                body += b"".join(each.body for each in parts)
                assert [each.end_of_stream for each in parts[:-1]] == [False] * len(parts[:-1])
            assert parts[-1].end_of_stream and body == part * 4
            exchange.end()
            assert picker.servers.ready()[0].under_way == 0
            await picker.servers.close()

    asyncio.run(_run())


def test_a_long_page_is_read_whole_and_an_endless_one_is_not() -> None:
    async def _run() -> None:
        with running_servers(2) as (long, endless):
            long.waiting, long.filler = 3, "# a line\n" * 60_000
            endless.filler = "# a line\n" * 2_000_000
            picker = Picker(fixed([long.address, endless.address]), {}, 5)
            await picker.servers.start()
            (ready,) = picker.servers.ready()
            assert ready.address == long.address
            assert ready.stats is not None and ready.stats.waiting == 3
            await picker.servers.close()

    asyncio.run(_run())


def test_bodies_that_wait_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def _run() -> None:
        with running_servers(1) as servers:
            picker = Picker(fixed([servers[0].address]), {}, 5)
            await picker.servers.start()
            message = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x" * 1000))
            slow, other = Exchange(picker), Exchange(picker)
            assert not list(slow.take(message)) and picker.held_bytes == 1000
            monkeypatch.setattr(external_processor, "_MOST_HELD", 1500)
            kinds = [each.WhichOneof("response") for each in other.take(message)]
            assert kinds == ["request_headers", "request_body"], "it is placed by what is there"
            assert picker.held_bytes == 1000
            slow.end()
            other.end()
            assert picker.held_bytes == 0
            await picker.servers.close()

    asyncio.run(_run())


def test_a_subset_is_read_as_a_text_or_a_list() -> None:
    name = "x-gateway-destination-endpoint-subset"
    for value in ("10.0.0.1:80, [fd00::7]:8000", ["10.0.0.1:80", "[fd00::7]:8000"]):
        message = pb.ProcessingRequest()
        added = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        field = added.value.fields[name]
        if isinstance(value, str):
            field.string_value = value
        else:
            for each in value:
                field.list_value.values.add(string_value=each)
        assert subset_of(metadata_of(message)) == {"10.0.0.1:80", "[fd00::7]:8000"}
    assert subset_of({}) is None
