"""The capacity plan: page, part, CSV and API show the same numbers, to operators only."""

import re

import httpx
import pytest

from tests.gateway.deployment import Deployment

PAGE = "/dashboard/operator/plan"
API = "/admin/v1/plan"
ASKED = "model=llama-3.1-70b&gpu=h100,h200&quantization=fp8&rate=20&prompt=1000&output=300"


def _text(answer: httpx.Response) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.text))


def test_page_and_api_show_the_same_plan(operator: httpx.Client) -> None:
    shown = operator.get(f"{API}?{ASKED}&ttft=300ms&tpot=40ms").json()
    page = operator.get(f"{PAGE}?{ASKED}&ttft=300&tpot=40")
    assert page.status_code == 200
    text = _text(page)
    plan = shown["plan"]
    assert f"{plan['devices']} × {plan['gpu']}" in text
    assert f"{shown['cost']['per_million_output_tokens']:,.2f} USD" in text
    assert "320.0 KiB" in text and "Little" in text
    assert len(re.findall("<svg", page.text)) >= 2


def test_the_first_page_is_a_plan(operator: httpx.Client) -> None:
    text = _text(operator.get(PAGE))
    assert "Goodput over load" in text and "Formulas" in text


def test_the_part_is_what_the_page_has(operator: httpx.Client) -> None:
    part = operator.get(f"{PAGE}/part?{ASKED}").text
    assert "<html" not in part and "Goodput over load" in part
    assert part.strip() in operator.get(f"{PAGE}?{ASKED}").text


def test_the_file_has_the_curve(operator: httpx.Client) -> None:
    lines = operator.get(f"{PAGE}?{ASKED}&format=csv").text.splitlines()
    curve = operator.get(f"{API}?{ASKED}").json()["curve"]
    assert len(lines) == 1 + len(curve)
    assert lines[1].startswith(f"{curve[0]['rate']},{curve[0]['goodput']}")


def test_what_cannot_be_is_said_and_kept(operator: httpx.Client) -> None:
    page = operator.get(f"{PAGE}?model=unheard-of&rate=7")
    assert page.status_code == 400
    assert "unheard-of" in page.text and 'value="7"' in page.text


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("model=unheard-of", 400), ("gpu=abacus", 400), ("rate=-1", 400), ("rate=inf", 400),
        ("tp=3&model=llama-3.1-70b", 400), ("unknown=1", 400), ("ttft=soon", 400), ("model=/etc", 400),
    ],
)  # fmt: skip
def test_the_api_refuses_what_cannot_be(operator: httpx.Client, query: str, status: int) -> None:
    answer = operator.get(f"{API}?{query}")
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_the_served_model_can_be_planned(deployment: Deployment, operator: httpx.Client) -> None:
    from gateway.catalog.model_files import model_name

    name = model_name(deployment.services.settings)
    answer = operator.get(f"{API}?model={name}&gpu=l4&rate=1")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"]["parameters"] > 0


def test_tenants_see_neither(deployment: Deployment, owner: httpx.Client) -> None:
    assert owner.get(PAGE).status_code == 403
    assert owner.get(f"{PAGE}/part").status_code == 403
    answer = owner.get(API, headers={"authorization": f"Bearer {deployment.key}"})
    assert answer.status_code == 403
