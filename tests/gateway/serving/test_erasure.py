"""A name and a text, sent through every surface, are found nowhere after the erasure of their end user:
in no table, whose encrypted columns are opened, and in no file of the data directory."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.errors import TollhouseError
from core.responses.end_users import end_users_of
from gateway.admin.stored_data.end_users import MOST_ERASURES
from gateway.admin.stored_data.stored_data import StoredData
from gateway.formats.registry import inference_surfaces
from gateway.metering.spool_watch import wait_until_shipped
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.serving.stored_texts import (
    CHAT,
    MESSAGES,
    MINUTE_S,
    RESPONSES,
    WRITTEN,
    Person,
    in_files,
    in_tables,
    send_everything,
)


def erase(deployment: Deployment, person: Person) -> dict[str, int]:
    """After the usage of all requests is stored, as the guide says."""
    wait_until_shipped(deployment.services.settings)
    found: dict[str, int] = person.ask("POST", "/admin/v1/erasures", {"end_user": person.name})
    return found


def test_what_an_end_user_sent_is_found_nowhere_after_their_erasure(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as own:
        erin, bob = Person(own), Person(own)
        send_everything(erin)
        send_everything(bob)
        for person in (erin, bob):
            assert set(in_tables(own, person.text)) == WRITTEN, "the search finds what is there"
        before = sorted(in_tables(own, bob.text))
        erased = erase(own, erin)
        assert in_tables(own, erin.text) == in_tables(own, erin.name) == []
        assert sorted(in_tables(own, bob.text)) == before, "nothing of another goes"
        assert erased["responses"] == 5 and erased["completions"] == 3, erased
        assert (erased["conversations"], erased["idempotent_answers"]) == (1, 3)
        assert erased["file_lines"] == 6 and erased["unreadable"] == 0
        assert set(erase(own, erin).values()) == {0}
    for words in (erin.text, erin.name):
        assert in_files(tmp_path, words) == []


def test_all_surfaces_name_the_end_user_alike() -> None:
    """The reader of raw bodies, which idempotent requests and batches use, and each surface's own."""
    texts = {
        CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
        MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        RESPONSES: {"input": "Hi"},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/embeddings": {"input": "Hi"},
        "/v1/rerank": {"query": "Hi", "documents": ["a"]},
        "/v1/score": {"text_1": "Hi", "text_2": "a"},
    }
    fields: list[dict[str, Any]] = [
        {},
        {"user": "ann"},
        {"user": ""},
        {"safety_identifier": "bo"},
        {"user": "ann", "safety_identifier": "bo"},
        {"metadata": {"user_id": "cy"}},
    ]
    compared = 0
    for surface in inference_surfaces():
        for more in fields:
            body = {"model": MODEL, **texts[surface.route], **more}
            try:
                request = surface.parse(json.dumps(body).encode())
            except TollhouseError:
                continue  # a field that the surface does not have
            if request.extra_fields:
                continue  # one that it passes on, unread, where the operator lists it
            read = dict.fromkeys((request.end_user, request.safety_identifier))
            names = tuple(name for name in read if name)
            assert end_users_of(surface.route, body) == names, (surface, more)
            compared += 1
    assert compared >= 20


def test_erasures_of_a_tenant_beyond_its_queue_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), threading.Semaphore(0)

    def _erase(*_given: object) -> dict[str, int]:
        begun.release()
        assert go.wait(MINUTE_S)
        return {"responses": 1}

    monkeypatch.setattr(StoredData, "erase_end_user", _erase)
    with running_deployment(tmp_path) as deployment, ThreadPoolExecutor(MOST_ERASURES + 1) as pool:

        def _post(_: int) -> httpx.Response:
            url, body = f"{deployment.url}/admin/v1/erasures", {"end_user": "ann"}
            answer = httpx.post(url, json=body, headers=deployment.headers, timeout=MINUTE_S)
            if answer.status_code != 200:
                go.set()
            return answer

        answers = list(pool.map(_post, range(MOST_ERASURES + 1)))
        assert begun.acquire(timeout=MINUTE_S)
    statuses = sorted(each.status_code for each in answers)
    assert statuses == [200] * MOST_ERASURES + [429]
    [refused] = [each for each in answers if each.status_code == 429]
    assert refused.json()["error"]["code"] == "too_many_erasures"
    assert int(refused.headers["retry-after"]) >= 1
