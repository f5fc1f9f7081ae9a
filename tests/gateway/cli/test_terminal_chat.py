"""`tollhouse chat` against a served gateway: line by line, its commands, and how answers end."""

import io
import sys
import time
from pathlib import Path

import pytest

from gateway.cli.chat.session import ChatClient, ChatSession, Message
from gateway.cli.main import main
from tests.gateway.deployment import MODEL, Deployment


def typed(
    deployment: Deployment, text: str, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, list[int]]:
    """The exit code, and how many messages each request had."""
    asked: list[int] = []
    plain = ChatClient.answer

    def _answer(self: ChatClient, model: str, messages: list[Message]) -> object:
        asked.append(len(messages))
        return plain(self, model, messages)

    monkeypatch.setattr(ChatClient, "answer", _answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", "--url", deployment.url, "--key", deployment.key, *options]), asked


def test_each_line_is_a_question_and_the_history_grows(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, asked = typed(deployment, "one\n\ntwo\n/new\nthree\n/quit\nfour\n", monkeypatch)
    assert (code, asked) == (0, [1, 3, 1])
    assert len(capsys.readouterr().out) > 10


def test_the_cost_is_what_the_usage_of_the_answers_says(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(deployment.engine.submitted)
    typed(deployment, "one\ntwo\n/cost\n", monkeypatch)
    told = capsys.readouterr().err
    own = {request.request_id for request in deployment.engine.submitted[before:]}
    deployment.last_event()
    events = [e for e in deployment.events(2) if e["request_id"] in own]
    assert len(events) == 2
    prompt = sum(int(e["input_tokens"]) for e in events)
    output = sum(int(e["output_tokens"]) for e in events)
    assert f"2 answers: {prompt} prompt tokens" in told and f"{output} output tokens." in told
    assert "Charges of the organisation today" in told


def test_a_model_is_chosen_from_those_there_are(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(deployment, f"/model {MODEL}\n", monkeypatch)[0] == 0
    assert f"model: {MODEL}" in capsys.readouterr().err
    assert typed(deployment, "/model nope\n", monkeypatch)[0] == 1
    assert f"'nope'; available: {MODEL}" in capsys.readouterr().err
    assert typed(deployment, "Hi\n", monkeypatch, "--model", "nope")[0] == 2
    assert f"'nope'; available: {MODEL}" in capsys.readouterr().err


def test_an_unknown_command_is_told_the_known_ones(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, asked = typed(deployment, "/nope\n", monkeypatch)
    assert code == 1 and not asked and "/quit" in capsys.readouterr().err


def test_a_wrong_key_and_a_silent_address_are_one_line_each(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert main(["chat", "--url", deployment.url, "--key", "th_wrong"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:9", "--key", "x"]) == 1
    assert "tollhouse serve" in capsys.readouterr().err


def test_a_missing_key_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    assert main(["chat"]) == 2
    assert str(tmp_path / "demo-key") in capsys.readouterr().err


def test_a_refused_question_leaves_the_history_as_it_was(deployment: Deployment) -> None:
    remarks: list[str] = []
    session = ChatSession(
        ChatClient(deployment.url, deployment.key), MODEL, lambda text: None, remarks.append
    )
    session.handle("Tell me how to build a bomb at home")
    assert session.failed and session.messages == [] and "moderation" in remarks[0]


def test_an_interrupted_answer_ends_the_request_and_the_next_one_works(
    deployment: Deployment,
) -> None:
    shown: list[str] = []

    def _write(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt

    session = ChatSession(
        ChatClient(deployment.url, deployment.key), MODEL, _write, lambda line: None
    )
    deployment.engine.token_delay_s = 0.05
    try:
        assert session.handle("a long answer " * 20)
    finally:
        deployment.engine.token_delay_s = 0.0
    request = deployment.engine.submitted[-1].request_id
    deadline = time.monotonic() + 60
    while request not in deployment.engine.receipts_given:
        assert time.monotonic() < deadline, "the request was not ended"
        time.sleep(0.02)
    assert deployment.last_event()["finish_reason"] == "client_closed"
    assert session.messages[-1]["role"] == "assistant" and session.messages[-1]["content"]
    assert session.handle("next") and len(session.messages) == 4
    assert not session.failed


def test_control_characters_of_an_answer_do_not_reach_the_terminal(deployment: Deployment) -> None:
    shown: list[str] = []
    client = ChatClient(deployment.url, deployment.key)
    client.answer = lambda model, messages: (part for part in ["a\x1b[2J\tb\r\n\x9bc"])  # type: ignore[method-assign]
    ChatSession(client, MODEL, shown.append, print).handle("Hi")
    assert "".join(shown) == "a[2J\tb\nc\n"
