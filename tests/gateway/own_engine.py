"""A gateway before the built-in engine, which runs the demo model in a thread of this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.runners.cpu.runner import load_runner
from engine.worker.server import Server
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.engines.clients import OWN_CAPABILITIES, Engines
from gateway.engines.remote import RemoteEngine
from tests.gateway.deployment import MODEL, Deployment, running_deployment


@contextmanager
def deployment_on_own_engine(
    folder: Path, *, num_blocks: int, **options: Any
) -> Iterator[Deployment]:
    """With `options` of the engine. In float32: in bfloat16, which some CPUs choose, an answer
    depends on its batch."""
    config = EngineConfig(
        model=str(MODEL_DIR), num_blocks=num_blocks, max_batch_tokens=256, threads=1,
        listen="tcp://127.0.0.1:0", dtype="float32", **options,
    )  # fmt: skip
    server = Server(config, load_runner(config))
    thread = threading.Thread(target=server.run)
    thread.start()
    model = ServedModel(MODEL, load_codec(MODEL_DIR), 1024, 0, capabilities=OWN_CAPABILITIES)
    engines = Engines({MODEL: [RemoteEngine("own", server.address)]}, [model])
    with running_deployment(folder, engines=engines) as running:
        running.worker = server
        yield running
    server.stop(0.0)
    thread.join(30)


@contextmanager
def openai_client(deployment: Deployment) -> Iterator[OpenAI]:
    """OpenAI's, after a first answer."""
    with OpenAI(
        base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=2, timeout=60
    ) as client:
        client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)
        yield client
