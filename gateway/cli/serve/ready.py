"""The ready message, printed once the socket listens and a warm-up request was answered."""

import json
import logging
import shlex
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from core.errors import Unavailable
from core.settings import Settings
from gateway.catalog.model_files import DEMO_NAME, served_names
from gateway.cli.serve.startup import StartupInfo
from gateway.edge import release
from gateway.prompts.rendering import NO_CHAT_TEMPLATE
from gateway.serving.headers import WARM_UP_HEADER

VERSION = release.version()
_WARM_UP_S = 120.0
_ANSWER_S = 60.0
_LOG_EVERY_S = 5.0
log = logging.getLogger("tollhouse.start")


@dataclass(frozen=True, slots=True)
class Urls:
    gateway: str
    metrics: str  # the same, unless TOLLHOUSE_METRICS_LISTEN is set


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def warm_up(url: str, info: StartupInfo, model: str, token: str) -> str:
    """Wait for a first answer through the whole pipeline; without a demo key, until an engine
    serves the model. The operator's `token` marks the request as the system's own, which nobody is
    charged for.

    Returns the route that answered: a model without a chat template has only completions. Raises
    Unavailable after two minutes."""
    route = CHAT
    deadline = time.monotonic() + _WARM_UP_S
    log_at = time.monotonic() + _LOG_EVERY_S
    last = ""
    while time.monotonic() < deadline:
        try:
            last = _probe(url, info, model, route, token)
        except (OSError, HTTPException) as error:
            last = str(error)
        if not last:
            return route
        if NO_CHAT_TEMPLATE in last:
            route = COMPLETIONS
            continue
        if time.monotonic() > log_at:
            log_at += _LOG_EVERY_S
            log.warning("not ready yet: %s", last)
        time.sleep(0.2)
    raise Unavailable(f"The gateway did not become ready: {last}", next_step="See the log above.")


def announce(
    urls: Urls, settings: Settings, info: StartupInfo, engine_s: float | None, route: str = CHAT
) -> None:
    """Print a page for a terminal; otherwise one line of JSON, without the key."""
    if not sys.stdout.isatty():
        sys.stdout.write(ready_line(urls.gateway) + "\n")
    else:
        sys.stdout.write(_page(urls, settings, info, engine_s, route))
    sys.stdout.flush()


def ready_line(url: str) -> str:
    return json.dumps({"event": "ready", "url": url, "dashboard": f"{url}/dashboard"})


def curl_line(url: str, key: str, model: str, route: str = CHAT) -> str:
    asked = "What is Tollhouse?" if model == DEMO_NAME else "Write a haiku about the sea."
    body = {"model": model, "stream": True, **_prompt(route, asked)}
    parts = ["curl", "-N", f"{url}{route}"]
    parts += ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
    return shlex.join([*parts, "-d", json.dumps(body)])


def _prompt(route: str, text: str) -> dict[str, Any]:
    if route == COMPLETIONS:
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def _page(
    urls: Urls, settings: Settings, info: StartupInfo, engine_s: float | None, route: str
) -> str:
    url = urls.gateway
    mode = "embedded" if info.embedded else "production"
    model = served_names(settings)[0]
    lines = [f"Tollhouse {VERSION}  {mode}  data in {settings.data_dir}", ""]
    waited = f", ready in {engine_s:.1f} s" if engine_s is not None else ""
    lines.append(f"  serving    {model} at {url}/v1{waited}")
    if settings.model:
        lines.append(f"  files      {settings.model}")
    if settings.draft_model and engine_s is not None:
        lines.append(f"  draft      {settings.draft_model}")
    if info.adapters:
        lines.append(f"  adapters   {', '.join(f'{model}:{each}' for each in info.adapters)}")
    if info.key:
        credit = ", $10.00 credit" if info.fresh else ""
        lines += [
            f"  tenant     {info.tenant}{credit}",
            f"  key        {info.key}",
            f"             saved in {settings.data_dir / 'demo-key'}; `tollhouse key new` makes more",
            "",
            "Try it:",
            "",
            curl_line(url, info.key, model, route),
        ]
    lines += [
        "",
        "  chat       tollhouse chat",
        f"  dashboard  {url}/dashboard",
        f"  docs       {url}/docs",
        f"  metrics    {urls.metrics}/metrics",
        "Ctrl-C to stop.",
        "",
    ]
    return "\n".join(lines)


def _probe(url: str, info: StartupInfo, model: str, route: str, token: str) -> str:
    """An empty string if the gateway answered, otherwise the reason why not."""
    operator = {"Authorization": f"Bearer {token}"}  # always sees the parts
    problem, readiness = _fetch(urllib.request.Request(f"{url}/readyz", headers=operator))
    if problem:
        return problem
    parts = json.loads(readiness)["parts"].values()
    if any(model in part.get("unserved", ()) for part in parts):
        return f"no engine serves {model} yet"
    if not info.key:
        return ""
    body = {"model": model, "max_tokens": 1, **_prompt(route, "Hello")}
    headers = {
        "Authorization": f"Bearer {info.key}",
        "Content-Type": "application/json",
        WARM_UP_HEADER: token,
    }
    data = json.dumps(body).encode()
    return _fetch(urllib.request.Request(f"{url}{route}", data, headers))[0]


def _fetch(request: urllib.request.Request) -> tuple[str, str]:
    """(problem, body); no problem with 200. Ignores proxies of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            text = answer.read().decode(errors="replace")
            return "" if answer.status == 200 else text or f"HTTP {answer.status}", text
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode(errors="replace") or f"HTTP {error.code}", ""
