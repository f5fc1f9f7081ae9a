"""A gateway with the demo model, where vLLM's tests start a server of their own."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from vllm_suite import wide_model
from vllm_suite.instruct import InstructServer

TREE = Path(__file__).parents[2]
INSTRUCT = "VLLM_SUITE_INSTRUCT"  # set: a stand-in for an instruct model answers
_DEMO = TREE / "engine" / "demo" / "weights"
_ADAPTER = TREE / "engine" / "demo" / "adapters" / "formal"
_READY_S = 120


class Gateways:
    """One gateway at a time, with the model name that is asked for."""

    def __init__(self) -> None:
        self.name = ""
        self.url = ""
        self.key = ""
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._adapters: list[str] = []
        self._instruct: InstructServer | None = None

    def serve(self, name: str, adapters: list[str]) -> None:
        """`adapters`: names under which the demo model's adapter is loaded."""
        if (self.name, self._adapters) == (name, adapters):
            return
        self.close()
        self._folder = tempfile.TemporaryDirectory()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
        environment = kept | {
            "TOLLHOUSE_DATA_DIR": self._folder.name,
            "TOLLHOUSE_PORT": "0",
            "TOLLHOUSE_MODEL": str(wide_model.write(_DEMO, Path(self._folder.name) / "wide")),
            "TOLLHOUSE_MODEL_NAME": name,
            "TOLLHOUSE_DTYPE": "float32",
            "TOLLHOUSE_LOG_LEVEL": "error",
            "TOLLHOUSE_ADAPTER_DIRS": str(_ADAPTER.parent),
        }
        if os.environ.get(INSTRUCT):
            self._instruct = self._instruct or InstructServer()
            environment["TOLLHOUSE_UPSTREAMS"] = json.dumps([self._instruct.entry(name)])
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli.main", "serve"],
            cwd=TREE, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the gateway did not start")
        self.url = json.loads(line)["url"]
        self.key = (Path(self._folder.name) / "demo-key").read_text().strip()
        self.name, self._adapters = name, adapters
        for each in adapters:
            self._load(each)

    def _load(self, adapter: str) -> None:
        body = json.dumps({"lora_name": adapter, "lora_path": str(_ADAPTER)}).encode()
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/load_lora_adapter", body, headers)
        urllib.request.urlopen(asked, timeout=_READY_S).close()

    def close(self) -> None:
        self.name = ""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_READY_S)
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()


GATEWAYS = Gateways()


class RemoteServer:
    """What vLLM's tests know as `RemoteOpenAIServer`: the gateway, under the model's name."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, arguments: list[str] | None = None, **_options: Any) -> None:
        given = [str(each) for each in arguments or []]
        names = [given[at + 1] for at, each in enumerate(given) if each == "--served-model-name"]
        modules = [given[at + 1] for at, each in enumerate(given) if each == "--lora-modules"]
        GATEWAYS.serve((names or [model])[0], [each.partition("=")[0] for each in modules])
        self.model = model
        self.host, _, port = GATEWAYS.url.removeprefix("http://").partition(":")
        self.port = int(port)
        self.proc = GATEWAYS._process

    def __enter__(self) -> "RemoteServer":
        return self

    def __exit__(self, *_given: Any) -> None:
        return

    @property
    def url_root(self) -> str:
        return GATEWAYS.url

    def url_for(self, *parts: str) -> str:
        return "/".join([GATEWAYS.url, *(part.strip("/") for part in parts)])

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._options(options))

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._anthropic(options))

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._anthropic(options))

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{GATEWAYS.url}/v1", "api_key": GATEWAYS.key, "max_retries": 0,
                "timeout": 120} | given  # fmt: skip

    def _anthropic(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": GATEWAYS.url, "api_key": GATEWAYS.key, "max_retries": 0} | given
