"""The load: wrk, which costs little, with prompts that differ, so that nobody answers from memory."""

import json
import random
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_PROMPTS = 512
_LUA = """
local requests, at = {{}}, 0
local headers = {{ {headers} }}
init = function(args)
  for line in io.lines("{bodies}") do
    requests[#requests + 1] = wrk.format("POST", "{path}", headers, line)
  end
end
request = function()
  at = at % #requests + 1
  return requests[at]
end
"""
NEW = "@@"  # in a body: a number that is new with every request
_LUA_NEW = """
local bodies, at = {{}}, os.time() * 1000000
local headers = {{ {headers} }}
init = function(args)
  for line in io.lines("{bodies}") do bodies[#bodies + 1] = line end
end
request = function()
  at = at + 1
  local body = string.gsub(bodies[at % #bodies + 1], "@@", string.format("%.0f", at))
  return wrk.format("POST", "{path}", headers, body)
end
"""
# Everyday questions; {0} and {1} are two different things of the list below.
_QUESTIONS = (
    "What is a {0}, and what does it have to do with a {1}?",
    "Explain to a child how a {0} works, in three sentences.",
    "Write a short poem about a {0} and a {1} in late summer.",
    "Which is older, the {0} or the {1}, and how do we know?",
    "Give me a recipe for a birthday cake in the shape of a {0}.",
    "Translate into French: the {0} stands beside the {1}.",
    "My {0} is broken. Where should I look first, and what tools do I need?",
    "Summarise the history of the {0} in two short paragraphs.",
)
_THINGS = (
    "bridge river market road cart coin ledger gate letter lantern orchard ferry clock mill garden"
    " library kettle bicycle telescope piano map compass harbour lighthouse train violin atlas"
)


@dataclass(frozen=True, slots=True)
class Server:
    """What is loaded: `path` is that of its chat completions."""

    url: str
    model: str
    key: str = "none"
    path: str = "/v1/chat/completions"
    headers: dict[str, str] = field(default_factory=dict)

    def all_headers(self) -> dict[str, str]:
        kind = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        return kind | self.headers


@dataclass(frozen=True, slots=True)
class Rate:
    per_s: float
    p50_ms: float
    answers: int
    failed: int  # answers that were not 2xx, and broken connections


def bodies(model: str, stream: bool) -> list[str]:
    """The same ones in every run."""
    chance = random.Random(20261121)
    made = []
    for _ in range(_PROMPTS):
        asked = chance.choice(_QUESTIONS).format(*chance.sample(_THINGS.split(), 2))
        messages = [{"role": "user", "content": asked}]
        made.append(json.dumps({"model": model, "stream": stream, "messages": messages}))
    return made


def check(server: Server, expected: str, *, stream: bool, body: str = "") -> None:
    """One answer, which must be what the upstream said. RuntimeError with the answer otherwise."""
    request = urllib.request.Request(
        server.url + server.path,
        (body or bodies(server.model, stream)[0]).encode(),
        server.all_headers(),
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"it answered {error.code}: {error.read()[:300]!r}") from None
    if (_streamed(said) if stream else _whole(said)) != expected:
        raise RuntimeError(f"its answer is not the upstream's: {said[:300]!r}")


def _whole(said: str) -> str:
    return str(json.loads(said)["choices"][0]["message"]["content"])


def _streamed(said: str) -> str:
    events = [line[6:] for line in said.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices") or []]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def run_wrk(
    home: Path,
    server: Server,
    *,
    connections: int,
    seconds: float,
    stream: bool,
    lines: list[str] | None = None,
) -> Rate:
    """`lines`: the bodies to send in turn, in place of the questions."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: it makes the load of this benchmark")
    header_lines = ", ".join(
        f'["{name}"]="{value}"' for name, value in server.all_headers().items()
    )
    prompts, script = home / "bodies.jsonl", home / "load.lua"
    lines = lines or bodies(server.model, stream)
    prompts.write_text("\n".join(lines) + "\n")
    template = _LUA_NEW if NEW in lines[0] else _LUA
    script.write_text(template.format(headers=header_lines, bodies=prompts, path=server.path))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "--timeout", "30s"]
    done = subprocess.run(
        [*command, "--latency", "-s", str(script), server.url],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=True,
    )
    return _read(done.stdout)


def _read(said: str) -> Rate:
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    half = re.search(r"50%\s+([\d.]+)(us|ms|s)", said)
    total = re.search(r"(\d+) requests in", said)
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", said)
    broken = re.search(
        r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", said
    )
    if rate is None or half is None or total is None:
        raise RuntimeError(f"wrk said what cannot be read:\n{said}")
    count = int(failed.group(1)) if failed else 0
    count += sum(map(int, broken.groups())) if broken else 0
    milliseconds = float(half.group(1)) * _UNITS[half.group(2)]
    return Rate(float(rate.group(1)), milliseconds, int(total.group(1)), count)
