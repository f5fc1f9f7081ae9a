"""A pytest plugin: vLLM's tests find a Tollhouse gateway where they start a vLLM server.

Every module of vLLM, and every library that is not installed, is a stand-in. What matters is what a
test asks over HTTP: an item without a request, or that fails after it has used a stand-in, says
nothing about the gateway. Each item's outcome is a line of JSON in the file that VLLM_SUITE_OUT names.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from vllm_suite.item import ITEM
from vllm_suite.served import GATEWAYS, TREE, RemoteServer
from vllm_suite.stubs import Finder
from vllm_suite.watched import watch

_FIXTURES = ("tests.entrypoints.conftest", "tests.entrypoints.openai.responses.conftest")


def _tokenizer(*_given: Any, **_named: Any) -> Any:
    """Of the model that is served, whatever its name is."""
    from transformers import AutoTokenizer

    folder = os.environ.get("VLLM_SUITE_TOKENIZER") or str(TREE / "engine" / "demo" / "weights")
    return AutoTokenizer.from_pretrained(folder)


def _same(*given: Any, **_named: Any) -> Any:
    """A decorator with or without arguments, which changes nothing."""
    if len(given) == 1 and callable(given[0]):
        return given[0]
    return lambda function: function


KNOWN: dict[str, dict[str, Any]] = {
    "tests.utils": {
        "RemoteOpenAIServer": RemoteServer,
        "create_new_process_for_each_test": _same,
        "large_gpu_mark": lambda *_a, **_k: [],
        "ROCM_EXTRA_ARGS": [],
        "ROCM_ENV_OVERRIDES": {},
        "VLLM_PATH": Path("."),
    },
    "tests.conftest": {},
    "vllm.tokenizers": {"get_tokenizer": _tokenizer, "cached_get_tokenizer": _tokenizer},
    "vllm.transformers_utils.tokenizer": {"get_tokenizer": _tokenizer},
}


def pytest_configure(config: pytest.Config) -> None:
    sys.meta_path.insert(0, Finder(KNOWN, last=False))
    sys.meta_path.append(Finder(KNOWN, last=True))
    sys.path.insert(0, str(config.rootpath))
    # Adapters are not fetched: a request for one is a request for a model that is not here.
    huggingface_hub.snapshot_download = lambda *_a, **_k: "adapter"
    for name in _FIXTURES:
        config.pluginmanager.register(importlib.import_module(name), name)
    watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    GATEWAYS.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    ITEM.begin()
    yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    _tell(
        report.nodeid,
        report.outcome,
        report.longreprtext if report.failed else str(report.longrepr or ""),
    )


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tell(report.nodeid, "uncollected", report.longreprtext)


def _tell(item: str, outcome: str, why: str) -> None:
    line = {"item": item, "outcome": outcome, "why": why[-2_000:], **asdict(ITEM)}
    with open(os.environ["VLLM_SUITE_OUT"], "a") as out:
        out.write(json.dumps(line) + "\n")
