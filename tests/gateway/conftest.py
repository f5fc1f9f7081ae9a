"""One served house a module."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.gateway.served import House, served


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with served(tmp_path_factory.mktemp("house")) as made:
        yield made


@pytest.fixture
def client(house: House) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{house.url}/v1", api_key=house.key, max_retries=0, timeout=60) as made:
        yield made
