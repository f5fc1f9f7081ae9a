"""Which SDKs work: installs each into an environment of its own, runs it against a gateway, and writes
the table in docs/customer.md.

    python -m tests.sdk_matrix [NAME …]    all of them, or those named; the rest of the table stays

Environments are made in TOLLHOUSE_BENCH_HOME (default ~/.cache/tollhouse-sdks) and kept there. The
gateway has a fake engine: what is proved is the API, not the model. Those that turn answers into types
run on the built-in engine with the demo model, coding agents before an upstream with a long context.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.gateway.agent_upstream import asked, deployment_for_agents
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.own_engine import deployment_on_own_engine

PAGE = Path(__file__).parents[1] / "docs" / "customer.md"
BEGIN, END = "<!-- sdk matrix -->", "<!-- end of sdk matrix -->"
_INSTALL_S, _RUN_S = 600, 180

# Each check is a function `check_<what>` of a script; what it needs is in the environment variables
# URL, KEY and MODEL.
_HEAD = """
import os
URL, KEY, MODEL = os.environ["URL"], os.environ["KEY"], os.environ["MODEL"]
ASK = [{"role": "user", "content": "What is a toll?"}]
"""
_TAIL = """
import json, sys
for name, check in [(n[6:], f) for n, f in list(globals().items()) if n.startswith("check_")]:
    try:
        check()
        told = "ok"
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"[:300]
    print("RESULT", json.dumps([name.replace("_", " "), told]), flush=True)
"""


@dataclass(frozen=True)
class Sdk:
    name: str
    packages: tuple[str, ...]
    script: str
    node: bool = False
    own: bool = False  # on the built-in engine
    agent: bool = False  # before an upstream with a long context, since it sends long instructions


SDKS = (
    Sdk(
        "openai (Python)",
        ("openai",),
        """
from openai import OpenAI
client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
def check_chat(): assert client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4).usage
def check_stream(): assert len(list(client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4, stream=True))) > 2
def check_responses():
    first = client.responses.create(model=MODEL, input="Hi", max_output_tokens=4)
    client.responses.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=4)
    assert client.responses.retrieve(first.id).id == first.id
def check_conversations():
    made = client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Bo."}])
    client.responses.create(model=MODEL, input="Hi", conversation=made.id, max_output_tokens=4)
    assert len(client.conversations.items.list(made.id).data) == 3
    assert client.conversations.delete(made.id).deleted
def check_background():
    import time
    made = client.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=4)
    while made.status in ("queued", "in_progress"):
        time.sleep(0.1)
        made = client.responses.retrieve(made.id)
    numbers = [each.sequence_number for each in client.responses.retrieve(made.id, stream=True, starting_after=1)]
    assert made.usage.output_tokens == 4 and numbers == list(range(2, 2 + len(numbers))), numbers
def check_stored_completions():
    made = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4, store=True, metadata={"run": "7"})
    assert [each.id for each in client.chat.completions.list(metadata={"run": "7"})] == [made.id]
    assert client.chat.completions.update(made.id, metadata={"run": "8"}).metadata == {"run": "8"}
    assert client.chat.completions.messages.list(made.id).data[0].content == ASK[0]["content"]
    assert client.chat.completions.delete(made.id).deleted
def check_files_and_batches():
    import io, json, time
    body = {"model": MODEL, "messages": ASK, "max_tokens": 4}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(line)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while made.status not in ("completed", "failed"):
        time.sleep(0.2)
        made = client.batches.retrieve(made.id)
    assert json.loads(client.files.content(made.output_file_id).text)["response"]["status_code"] == 200
def check_moderations(): assert client.moderations.create(input="Hi").results[0].flagged is False
def check_completions(): assert client.completions.create(model=MODEL, prompt="Hi", max_tokens=4, logprobs=1).choices[0].logprobs.tokens
def check_models(): assert MODEL in [each.id for each in client.models.list()]
""",  # noqa: E501
    ),
    Sdk(
        "anthropic (Python)",
        ("anthropic",),
        """
from anthropic import Anthropic
client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL = {"name": "ls", "input_schema": {"type": "object", "properties": {}}}
def check_messages(): assert client.messages.create(model=MODEL, messages=ASK, max_tokens=4096, tools=[TOOL]).usage.output_tokens
def check_stream():
    with client.messages.stream(model=MODEL, messages=ASK, max_tokens=4) as stream:
        assert stream.get_final_message().stop_reason
def check_count_tokens(): assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
def check_batches():
    import time
    made = client.messages.batches.create(requests=[{"custom_id": "a", "params": {"model": MODEL, "messages": ASK, "max_tokens": 4}}])
    while made.processing_status != "ended":
        time.sleep(0.2)
        made = client.messages.batches.retrieve(made.id)
    assert [each.result.type for each in client.messages.batches.results(made.id)] == ["succeeded"]
def check_models(): assert MODEL in [each.id for each in client.models.list()]
""",  # noqa: E501
    ),
    Sdk(
        "openai (Node)",
        ("openai",),
        """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: URL + "/v1", apiKey: KEY, maxRetries: 0 });
checks.chat = async () => { const a = await client.chat.completions.create({ model: MODEL, messages: ASK, max_tokens: 4 }); if (!a.usage) throw Error("no usage"); };
checks.stream = async () => { let n = 0; for await (const _ of await client.chat.completions.create({ model: MODEL, messages: ASK, max_tokens: 4, stream: true })) n++; if (n < 3) throw Error("short"); };
checks.responses = async () => { const a = await client.responses.create({ model: MODEL, input: "Hi", max_output_tokens: 4 }); await client.responses.create({ model: MODEL, input: "And?", previous_response_id: a.id, max_output_tokens: 4 }); };
""",  # noqa: E501
        node=True,
    ),
    Sdk(
        "anthropic (Node)",
        ("@anthropic-ai/sdk",),
        """
import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
checks.messages = async () => { const a = await client.messages.create({ model: MODEL, messages: ASK, max_tokens: 4096 }); if (!a.usage.output_tokens) throw Error("no usage"); };
checks.stream = async () => { const a = await client.messages.stream({ model: MODEL, messages: ASK, max_tokens: 4 }).finalMessage(); if (!a.stop_reason) throw Error("no end"); };
""",  # noqa: E501
        node=True,
    ),
    Sdk(
        "anthropic tool runner (Python)",
        ("anthropic",),
        """
from anthropic import Anthropic, beta_tool
client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
@beta_tool
def get_weather(city: str) -> str:
    '''Weather of a city.'''
    return "sunny"
def runner(**more): return client.beta.messages.tool_runner(model=MODEL, max_tokens=100, messages=ASK, tools=[get_weather], **more)
def check_tool_runner(): assert runner().until_done().content[0].text == "A toll is a fee."
def check_streamed():
    for events in runner(stream=True):
        for _ in events:
            continue
    assert events.get_final_message().content[0].text == "A toll is a fee."
""",  # noqa: E501
        agent=True,
    ),
    Sdk(
        "anthropic tool runner (Node)",
        ("@anthropic-ai/sdk",),
        """
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const tool = betaTool({ name: "get_weather", description: "w", inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] }, run: () => "sunny" });
checks.toolRunner = async () => { const a = await client.beta.messages.toolRunner({ model: MODEL, max_tokens: 100, messages: ASK, tools: [tool] }); if (a.content[0].text !== "A toll is a fee.") throw Error(JSON.stringify(a)); };
""",  # noqa: E501
        node=True,
        agent=True,
    ),
    Sdk(
        "openai tool runner (Node)",
        ("openai",),
        """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: URL + "/v1", apiKey: KEY, maxRetries: 0 });
const tool = { type: "function", function: { name: "get_weather", description: "w", parse: JSON.parse, parameters: { type: "object", properties: { city: { type: "string" } } }, function: () => "sunny" } };
const said = async (more) => { const a = await client.chat.completions.runTools({ model: MODEL, messages: ASK, tools: [tool], ...more }).finalContent(); if (a !== "A toll is a fee.") throw Error(a); };
checks.runTools = () => said({});
checks.streamed = () => said({ stream: true });
""",  # noqa: E501
        node=True,
        agent=True,
    ),
    Sdk(
        "Vercel ai",
        ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic"),
        """
import { generateText, streamText } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createAnthropic } from "@ai-sdk/anthropic";
const openai = createOpenAI({ baseURL: URL + "/v1", apiKey: KEY });
const anthropic = createAnthropic({ baseURL: URL + "/v1", apiKey: KEY });
const said = async (model) => { const a = await generateText({ model, messages: ASK, maxOutputTokens: 8, maxRetries: 0 }); if (!a.text) throw Error("no text"); return a; };
checks.chat = () => said(openai.chat(MODEL));
checks.responses = async () => { const a = await said(openai.responses(MODEL)); await generateText({ model: openai.responses(MODEL), messages: [...ASK, ...a.response.messages, ...ASK], maxOutputTokens: 8, maxRetries: 0 }); };
checks.messages = () => said(anthropic(MODEL));
checks.stream = async () => { let text = ""; for await (const each of streamText({ model: openai.chat(MODEL), messages: ASK, maxOutputTokens: 8 }).textStream) text += each; if (!text) throw Error("no text"); };
""",  # noqa: E501
        node=True,
    ),
    Sdk(
        "langchain",
        ("langchain-openai", "langchain-anthropic"),
        """
from langchain_openai import ChatOpenAI
from langchain_anthropic import ChatAnthropic
openai = ChatOpenAI(model=MODEL, base_url=URL + "/v1", api_key=KEY, max_tokens=4, max_retries=0)
def check_chat(): assert openai.invoke("Hi").content
def check_stream(): assert len(list(openai.stream("Hi"))) > 1
def check_messages(): assert ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0).invoke("Hi").content
""",  # noqa: E501
    ),
    Sdk(
        "llama-index",
        ("llama-index-llms-openai-like",),
        """
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(model=MODEL, api_base=URL + "/v1", api_key=KEY, is_chat_model=True, max_tokens=4, max_retries=0)
def check_complete(): assert llm.complete("Hi").text
def check_stream(): assert len(list(llm.stream_complete("Hi"))) > 1
""",  # noqa: E501
    ),
    Sdk(
        "litellm",
        ("litellm",),
        """
import litellm
more = {"messages": ASK, "max_tokens": 4, "api_key": KEY}
def check_chat(): assert litellm.completion(model="openai/" + MODEL, api_base=URL + "/v1", **more).usage
def check_stream(): assert len(list(litellm.completion(model="openai/" + MODEL, api_base=URL + "/v1", stream=True, **more))) > 1
def check_messages(): assert litellm.completion(model="anthropic/" + MODEL, api_base=URL, **more).usage
""",  # noqa: E501
    ),
    Sdk(
        "instructor",
        ("instructor",),
        """
import instructor
from typing import Literal
from openai import OpenAI
from pydantic import BaseModel, Field
class Box(BaseModel):
    colour: Literal["red", "blue"]
    count: int = Field(ge=1, le=9)
made = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
def box(mode):
    client = instructor.from_openai(made, mode=mode)
    found = client.chat.completions.create(model=MODEL, messages=ASK, response_model=Box, max_tokens=200, max_retries=0)
    assert isinstance(found, Box)
def check_json_schema(): box(instructor.Mode.JSON_SCHEMA)
def check_strict_tools(): box(instructor.Mode.TOOLS_STRICT)
def check_tools(): box(instructor.Mode.TOOLS)
""",  # noqa: E501
        own=True,
    ),
    Sdk(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]",),
        """
from typing import Literal
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
class Box(BaseModel):
    colour: Literal["red", "blue"]
    count: int = Field(ge=1, le=9)
provider = OpenAIProvider(base_url=URL + "/v1", api_key=KEY)
def run(kind, output):
    agent = Agent(kind(MODEL, provider=provider), output_type=output(Box), model_settings={"max_tokens": 200}, retries=0)
    assert isinstance(agent.run_sync("Hi").output, Box)
def check_json_schema_in_chat(): run(OpenAIChatModel, NativeOutput)
def check_tool_in_chat(): run(OpenAIChatModel, ToolOutput)
def check_json_schema_in_responses(): run(OpenAIResponsesModel, NativeOutput)
def check_tool_in_responses(): run(OpenAIResponsesModel, ToolOutput)
def weather(city: str) -> str:
    return "sun"
def said(model): return Agent(model, tools=[weather], model_settings={"max_tokens": 8}).run_sync("Hi").output
def check_chat(): assert said(OpenAIChatModel(MODEL, provider=provider))
def check_responses(): assert said(OpenAIResponsesModel(MODEL, provider=provider))
""",  # noqa: E501
        own=True,
    ),
    Sdk(
        "openai-agents",
        ("openai-agents",),
        """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
@function_tool
def weather(city: str) -> str:
    return "sun"
def run(kind):
    client = AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
    agent = Agent(name="a", model=kind(MODEL, client), tools=[weather], model_settings=ModelSettings(max_tokens=8))
    return Runner.run_sync(agent, "Hi").final_output
def check_chat(): assert run(OpenAIChatCompletionsModel)
def check_responses():
    # The fake engine never stops by itself, and this SDK takes an answer cut by max_tokens for an error.
    try:
        run(OpenAIResponsesModel)
    except Exception as error:
        assert "max_output_tokens" in str(error), error
""",  # noqa: E501
    ),
    Sdk(
        "llm",
        ("llm",),
        """
from llm.default_plugins.openai_models import Chat
def check_chat():
    model = Chat(MODEL, model_name=MODEL, api_base=URL + "/v1")
    assert model.prompt("Hi", stream=False, key=KEY, max_tokens=4).text()
def check_stream():
    model = Chat(MODEL, model_name=MODEL, api_base=URL + "/v1")
    assert len(list(model.prompt("Hi", key=KEY, max_tokens=4))) >= 1
""",
    ),
    Sdk(
        "Codex",
        ("@openai/codex",),
        """
import { spawnSync } from "node:child_process";
const set = Object.entries({ model: MODEL, model_provider: "toll", "model_providers.toll.name": "toll", "model_providers.toll.base_url": URL + "/v1", "model_providers.toll.env_key": "KEY", "model_providers.toll.wire_api": "responses" }).flatMap(([name, value]) => ["-c", `${name}="${value}"`]);
const exec = (...mode) => { const env = { ...process.env, HOME: process.cwd() }; const done = spawnSync("node_modules/.bin/codex", ["exec", "--skip-git-repo-check", ...mode, ...set, "Say hello"], { input: "", encoding: "utf8", timeout: 150000, env }); if (!done.stdout.includes("A toll is a fee.")) throw Error((done.stdout + done.stderr).slice(-250)); };
checks.exec = () => exec();
checks.workspace = () => exec("--sandbox", "workspace-write");
checks.full_access = () => exec("--sandbox", "danger-full-access");
""",  # noqa: E501
        node=True,
        agent=True,
    ),
    Sdk(
        "Claude Code",
        ("@anthropic-ai/claude-code",),
        """
import { spawnSync } from "node:child_process";
checks.print = () => { const env = { ...process.env, HOME: process.cwd(), ANTHROPIC_BASE_URL: URL, ANTHROPIC_API_KEY: KEY, ANTHROPIC_MODEL: MODEL, ANTHROPIC_SMALL_FAST_MODEL: MODEL, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1" }; const done = spawnSync("node_modules/.bin/claude", ["-p", "Say hello"], { input: "", encoding: "utf8", timeout: 150000, env }); if (!done.stdout.includes("A toll is a fee.")) throw Error((done.stdout + done.stderr).slice(-250)); };
""",  # noqa: E501
        node=True,
        agent=True,
    ),
    Sdk(
        "mcp",
        ("mcp",),
        """
import asyncio, time
import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
def run(use):
    async def connected():
        async with httpx2.AsyncClient(headers={"authorization": "Bearer " + KEY}) as http:
            async with Client(streamable_http_client(URL + "/mcp", http_client=http)) as client:
                return await use(client)
    return asyncio.run(connected())
def check_tools():
    names = [each.name for each in run(lambda client: client.list_tools()).tools]
    assert {"get_usage", "list_keys", "list_limits", "list_invoices"} <= set(names), names
def check_usage():
    since = int(time.time()) - 3600
    answer = run(lambda client: client.call_tool("get_usage", {"start_time": since}))
    assert not answer.is_error and answer.structured_content["object"] == "page", answer
def check_keys():
    answer = run(lambda client: client.call_tool("list_keys", {}))
    assert not answer.is_error and answer.structured_content["data"] and KEY not in str(answer), answer
def check_bad_argument():
    try:
        run(lambda client: client.call_tool("get_usage", {"start_time": "today"}))
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert "start_time" in str(error), error
    else:
        raise AssertionError("served")
""",
    ),
    Sdk(
        "guidellm",
        ("guidellm",),
        """
import json, pathlib, subprocess, sys
pathlib.Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Question {n}?"}) + "\\n" for n in range(4)))
def check_run():
    done = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", "--backend", f"kind=openai_http,target={URL},model={MODEL},api_key={KEY}",
         "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2",
         "--data", "kind=json_file,path=prompts.jsonl", "--disable-progress"],
        capture_output=True, text=True, timeout=150,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "successful=2 errored=0" in told, told[-200:]
""",  # noqa: E501
    ),
)


def home() -> Path:
    made = Path(os.environ.get("TOLLHOUSE_BENCH_HOME") or Path.home() / ".cache/tollhouse-sdks")
    made.mkdir(parents=True, exist_ok=True)
    return made


def results_of(sdk: Sdk, environment: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The versions installed, and what each check said."""
    place = home() / _folder_of(sdk)
    made = (_node if sdk.node else _python)(sdk, place)
    done = subprocess.run(
        made,
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        env=os.environ | environment,
        cwd=place,
    )
    lines = [each for each in done.stdout.splitlines() if each.startswith("RESULT ")]
    if not lines:
        return _versions(sdk, place), {"start": (done.stderr.strip() or "no result")[-300:]}
    return _versions(sdk, place), dict(json.loads(each.removeprefix("RESULT ")) for each in lines)


def _python(sdk: Sdk, place: Path) -> list[str]:
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        command = [str(python), "-m", "pip", "install", "-q", *sdk.packages]
        subprocess.run(command, check=True, timeout=_INSTALL_S, stdout=sys.stderr)
    (place / "check.py").write_text(_HEAD + sdk.script + _TAIL)
    return [str(python), "check.py"]


def _node(sdk: Sdk, place: Path) -> list[str]:
    place.mkdir(exist_ok=True)
    if not (place / "node_modules").exists():
        command = ["npm", "install", "--silent", "--prefix", str(place), *sdk.packages]
        subprocess.run(command, check=True, timeout=_INSTALL_S, stdout=sys.stderr)
    lines = [each for each in sdk.script.splitlines() if each]
    imports = [each for each in lines if each.startswith("import ")]
    head = (
        "const { URL, KEY, MODEL } = process.env; const checks = {}; "
        'const ASK = [{ role: "user", content: "What is a toll?" }];'
    )
    tail = (
        "for (const [name, check] of Object.entries(checks)) { let told = 'ok'; try { await check(); } "
        "catch (error) { told = String(error).slice(0, 300); } "
        "console.log('RESULT ' + JSON.stringify([name, told])); }"
    )
    rest = [each for each in lines if each not in imports]
    (place / "check.mjs").write_text("\n".join([*imports, head, *rest, tail]))
    return ["node", "check.mjs"]


def _versions(sdk: Sdk, place: Path) -> str:
    found = []
    for package in sdk.packages:
        name = package.partition("[")[0]
        if sdk.node:
            described = json.loads((place / "node_modules" / name / "package.json").read_text())
            found.append(f"{name} {described['version']}")
        else:
            ask = f"from importlib.metadata import version; print(version({name!r}))"
            told = subprocess.run(
                [str(place / "bin" / "python"), "-c", ask], capture_output=True, text=True
            )
            found.append(f"{name} {told.stdout.strip()}")
    return ", ".join(found)


def row_of(sdk: Sdk, environment: dict[str, str]) -> str:
    try:
        versions, told = results_of(sdk, environment)
    except (subprocess.SubprocessError, OSError) as error:
        versions, told = "", {"install": f"{type(error).__name__}"}
    sys.stderr.write(f"{sdk.name} {versions} {told}\n")
    passed = ", ".join(name for name, each in told.items() if each == "ok")
    failed = ", ".join(name for name, each in told.items() if each != "ok")
    return f"| {sdk.name} | {versions} | {passed} | {failed} |"


def write_table(rows: dict[str, str]) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    known = {line.split("|")[1].strip(): line for line in old.splitlines() if line.count("|") == 5}
    merged = known | rows
    listed = [merged[sdk.name] for sdk in SDKS if sdk.name in merged]
    table = ["| SDK | versions | passes | fails |", "|---|---|---|---|", *listed]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(table) + "\n" + END + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of the SDKs; all without")
    names = parser.parse_args().names
    chosen = [sdk for sdk in SDKS if not names or sdk.name in names]
    for deployed in dict.fromkeys(_deployed_for(sdk) for sdk in chosen):
        with tempfile.TemporaryDirectory() as folder, deployed(Path(folder)) as made:
            environment = {"URL": made.url, "KEY": made.key, "MODEL": MODEL}
            for sdk in chosen:
                if _deployed_for(sdk) is deployed:
                    asked.clear()
                    write_table({sdk.name: row_of(sdk, environment)})
                    _keep_sent(sdk)


def _keep_sent(sdk: Sdk) -> None:
    """What came to the upstream of an agent, for whoever asks what it sends."""
    place = home() / "sent"
    place.mkdir(exist_ok=True)
    if asked:
        (place / f"{_folder_of(sdk)}.json").write_text(json.dumps(asked, indent=1))


def _folder_of(sdk: Sdk) -> str:
    return "".join(each if each.isalnum() else "-" for each in sdk.name)


def _deployed_for(sdk: Sdk) -> Callable[[Path], AbstractContextManager[Deployment]]:
    if sdk.agent:
        return deployment_for_agents
    return _on_own_engine if sdk.own else running_deployment


def _on_own_engine(folder: Path) -> AbstractContextManager[Deployment]:
    return deployment_on_own_engine(folder, num_blocks=512)


if __name__ == "__main__":
    main()
