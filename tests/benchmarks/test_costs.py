"""What the benchmark of a request's cost reads and sends: checked against counts made another way."""

import json
import os
import resource
import time

import pytest

from benchmarks import gateway
from benchmarks.gateway_load.costs import cpu_s, instructions_in, works
from benchmarks.gateway_load.load import NEW


def test_the_cpu_time_of_a_process_is_the_systems() -> None:
    before, read = resource.getrusage(resource.RUSAGE_SELF), cpu_s(os.getpid())
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        sum(range(1000))
    after = resource.getrusage(resource.RUSAGE_SELF)
    told = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s(os.getpid()) - read == pytest.approx(told, abs=0.05)


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("123456,,instructions,98765,100.00,,\n", 123456.0),
        ("77,,instructions:u,98765,100.00,,\n", 77.0),
        ("<not supported>,,instructions,0,100.00,,\n", None),
        ("Error:\nNo permission to enable instructions event.\n", None),
        ("", None),
    ],
)
def test_instructions_are_told_only_where_they_were_counted(said: str, count: float | None) -> None:
    assert instructions_in(said) == count


def test_works_are_what_their_names_say() -> None:
    made = {name: [json.loads(line) for line in lines] for name, lines in works("m").items()}
    assert set(made) == {"known", "new", "conversation", "tools"}
    assert not any(NEW in json.dumps(body) for body in made["known"])
    for name in ("new", "conversation", "tools"):
        assert all(NEW in body["messages"][-1]["content"] for body in made[name])
        assert all(body["messages"][-1]["role"] == "user" for body in made[name])
    for body in made["conversation"]:
        before = body["messages"][:-1]
        assert 20_000 <= sum(len(each["content"]) for each in before) < 22_000
        assert [each["role"] for each in before] == ["user", "assistant"] * (len(before) // 2)
        assert before == made["conversation"][0]["messages"][:-1]
    assert all(len(body["tools"]) == 6 for body in made["tools"])


def test_a_work_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gateway.main(["--against", ".", "--works", "known,unknown"])
    assert "unknown: unknown" in capsys.readouterr().err
