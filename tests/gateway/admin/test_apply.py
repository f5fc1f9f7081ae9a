"""`tollhouse apply` and `tollhouse export config`, on both databases."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import func, select

from billing.accounts.tables import BillingAccount
from billing.notices.tables import Budget
from billing.pricing import prices
from billing.pricing.tables import PriceVersionRow
from core.clock import SystemClock
from core.database import Database
from core.tenants import keys, limits, members, organisations
from core.tenants.models import ApiKey, Tenant
from core.tenants.scope import scope_of_operator
from gateway.cli.main import main
from tests.migrated import migrated

WHOLE = """
limit_plans:
  - {name: gold, priority: 2, weight: 8, limits: [{scope: tenant, unit: requests, limit: 600}]}
billing_plans:
  - {name: gold-monthly, base_fee: 49.90, included_usage: 20, included_seats: 3, limits_plan: gold}
prices:
  - model: small
    rates:
      input: 0.15
      cached_input: "0.075"
      output: {scheme: graduated, tiers: [{up_to: 1000000, price: 0.60}, {price: 0.40}]}
      image: {scheme: package, price: 5, size: 100, free: 10}
  - {model: small, from: 2031-01-01T00:00:00+00:00, rates: {input: 0.20, output: 0.80}}
tenants:
  - name: acme
    display_name: Acme & Söhne
    timezone: Europe/Berlin
    fallback: {small: [large]}
    billing: {legal_name: Acme GmbH, email: bills@acme.example, tax_region: DE, payment_terms_days: 30}
    subscription: {plan: gold-monthly, seats: 4}
    projects: [default, research]
    members: [{email: Ann@acme.example, role: owner, name: Ann}]
    keys:
      - name: ci
        project: research
        models: [small]
        routes: [/v1/chat/completions, /v1/models]
        canary: {small: {large: 5}}
        secret_file: secrets/ci
    limits:
      - {scope: key, unit: requests, limit: 3, period_s: 3600, target: ci}
      - {scope: project, unit: concurrent, limit: 2, target: research}
    budgets:
      - {name: research money, cap: 12.50, scope: project, target: research, window: week, hard: false}
    policies:
      - {level: key, target: ci, document: POLICY}
    prices:
      - {model: small, rates: {input: 0.10, output: 0.30}, discount_percent: "2.5"}
"""


@pytest.fixture
def folder(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def apply(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def _apply(text: str, *words: str, status: int = 0) -> Any:
        path = folder / "tollhouse.yaml"
        path.write_text(text)
        got = main(["apply", "-f", str(path), *words, "--json"])
        shown = capsys.readouterr()
        assert got == status, shown.err
        return json.loads(shown.out)["changes"] if shown.out else shown.err

    return _apply


@pytest.fixture
def whole(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["policy", "default", "--json"]) == 0
    return WHOLE.replace("POLICY", capsys.readouterr().out.strip())


def exported(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["export", "config", *words]) == 0
    return capsys.readouterr().out


def test_a_file_makes_everything_and_is_then_what_there_is(
    apply: Any, whole: str, folder: Path, database: Database
) -> None:
    drift = apply(whole, "--dry-run", status=2)
    with database.read() as session:
        assert session.scalar(select(func.count()).where(Tenant.name == "acme")) == 0
    assert apply(whole) == drift
    assert apply(whole, "--dry-run", "--prune") == []
    secret = folder / "secrets/ci"
    assert os.stat(secret).st_mode & 0o777 == 0o600
    now = SystemClock().now()
    with database.read() as session:
        found = keys.find(session, secret.read_text().strip(), now)
        assert found.scopes.models == {"small"} and found.currency == "USD"
        scope = scope_of_operator(found.tenant_id)
        projects = {each.name: each.id for each in organisations.projects(session, scope)}
        assert found.project_id == projects["research"]
        own = {
            (each.scope, each.unit, each.target): each.limit
            for each in limits.own_rules(session, scope)
        }
        assert own == {
            ("key", "requests", found.key_id): 3,
            ("project", "concurrent", projects["research"]): 2,
        }
        (budget,) = session.scalars(select(Budget))
        assert (budget.cap, budget.scope_id) == (12_500_000_000_000, projects["research"])
        account = session.get_one(BillingAccount, found.tenant_id)
        assert (account.legal_name, account.timezone, account.tax_region) == (
            "Acme GmbH",
            "Europe/Berlin",
            "DE",
        )
        (ann,) = members.all_of(session, scope)
        assert (ann.email, ann.role) == ("ann@acme.example", "owner")
        book = prices.load_price_book(session)
        listed = book.pin("", "small", None, now, "USD")
        own_price = book.pin(found.tenant_id, "small", None, now, "USD")
    # 150,000 picounits a token are 0.15 a million.
    assert {c.value: r.tiers[0].unit for c, r in listed.rates.items()} == {
        "input": 150_000,
        "cached_input": 75_000,
        "output": 600_000,
        "image": 5_000_000_000_000,
    }
    assert own_price.discount_ppm == 25_000


def test_an_export_changes_nothing_when_it_is_applied(
    apply: Any, whole: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(whole)
    written = exported(capsys)
    assert apply(written, "--prune") == []
    assert exported(capsys) == written
    only = yaml.safe_load(exported(capsys, "--tenant", "acme"))
    assert [each["name"] for each in only["tenants"]] == ["acme"] and len(only) == 1
    assert (folder / "secrets/ci").read_text().strip() not in written


def test_an_export_rebuilds_another_deployment(
    apply: Any,
    whole: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply(whole)
    written = exported(capsys)
    document = yaml.safe_load(written)
    for each in document["tenants"][0]["keys"]:
        each["secret_file"] = "again"
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", f"sqlite:///{folder}/other.sqlite3")
    migrated(f"sqlite:///{folder}/other.sqlite3").close()
    apply(yaml.safe_dump(document))
    assert exported(capsys) == written


def test_what_a_file_leaves_out_stays(apply: Any, whole: str, database: Database) -> None:
    apply(whole)
    assert apply("tenants: [{name: acme, display_name: Acme}]", "--prune") == [
        {"place": "tenant acme, display_name", "before": "Acme & Söhne", "after": "Acme"}
    ]
    assert apply("tenants: [{name: acme, limits: []}]") == []
    ended = apply("tenants: [{name: acme, limits: [], keys: []}]", "--prune")
    assert sorted(each["place"] for each in ended) == [
        "tenant acme, key ci",
        "tenant acme, limit project:concurrent research",
    ]
    with database.read() as session:
        (key,) = session.scalars(select(ApiKey))
        assert key.revoked_at is not None
        assert session.scalar(select(func.count()).select_from(Budget)) == 1


def test_changes_are_named_field_by_field(apply: Any, whole: str) -> None:
    apply(whole)
    changed = whole.replace("limit: 3,", "limit: 5,").replace("cap: 12.50", "cap: 13")
    changed = changed.replace("name: Ann}", "name: Anna}").replace("seats: 4", "seats: 5")
    changed = changed.replace("{input: 0.10, output: 0.30}", "{input: 0.11}")
    shown = {each["place"]: (each["before"], each["after"]) for each in apply(changed)}
    assert shown == {
        "tenant acme, limit key:requests:3600 ci, limit": (3, 5),
        "tenant acme, budget research money, cap": ("12.5", "13"),
        "tenant acme, member Ann@acme.example, name": ("Ann", "Anna"),
        "tenant acme, subscription": (
            {"plan": "gold-monthly", "seats": 4},
            {"plan": "gold-monthly", "seats": 5},
        ),
        "tenant acme, price small in USD": (
            {"input": "0.1", "output": "0.3"},
            {"input": "0.11"},
        ),
    }
    assert apply(changed) == []


def test_a_price_with_a_start_is_never_edited(apply: Any, whole: str) -> None:
    apply(whole)
    said = apply(whole.replace("{input: 0.20, output: 0.80}", "{input: 0.21}"), status=2)
    assert "a version begins then at {'input': '0.2', 'output': '0.8'}" in said


WRONG = {
    "aliases": ("a: &x [1]\nb: *x", "aliases are not read"),
    "twice": ("tenants: []\ntenants: []", "'tenants' is stated twice"),
    "no mapping": ("[1, 2]", "is not a mapping"),
    "unknown list": ("tenant: []", "tenant: Extra inputs are not permitted"),
    "unknown field": ("tenants: [{name: a, limitz: []}]", "tenants.a.limitz: Extra inputs"),
    "not a list": ("tenants: {name: a}", "tenants is not a list"),
    "wrong kind": (
        "tenants: [{name: a, plan: 3}]",
        "tenants.a.plan: Input should be a valid string",
    ),
    "two tenants": ("tenants: [{name: a}, {name: a}]", "tenant 'a' is stated twice"),
    "no plan": ("tenants: [{name: a, plan: nosuch}]", "tenant a: Unknown plan 'nosuch'"),
    "no role": ("tenants: [{name: a, members: [{email: a@b.example, role: boss}]}]", "role: Input"),
    "no secret": ("tenants: [{name: a, keys: [{name: k}]}]", "nothing says where its secret goes"),
    "no project": (
        "tenants: [{name: a, keys: [{name: k, project: p, secret_file: s}]}]",
        "names the project p, which does not exist",
    ),
    "no target": (
        "tenants: [{name: a, budgets: [{name: b, cap: 1, scope: key, target: k}]}]",
        "names no key that exists",
    ),
    "no variable": (
        "tenants: [{name: '${NOT_SET_ANYWHERE}'}]",
        "NOT_SET_ANYWHERE, which is not set",
    ),
    "no file": ("tenants: [{name: '${file:nosuch}'}]", "the file nosuch, which cannot be read"),
    "negative": ("billing_plans: [{name: p, base_fee: -1}]", "base_fee is negative"),
    "a price": ("prices: [{model: m, rates: {inputs: 1}}]", "'inputs' is not a component"),
    "itself": ("include: [tollhouse.yaml]", "includes itself"),
    "no include": ("include: [nosuch.yaml]", "nosuch.yaml is not a file"),
    "a tab": ("tenants:\n\t- name: a", "is not YAML"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_refused_and_changes_nothing(
    apply: Any, database: Database, folder: Path, wrong: str
) -> None:
    text, said = WRONG[wrong]
    before = "limit_plans: [{name: first, limits: []}]\n"
    text = text if text.startswith("[") else before + text
    assert said in apply(text, status=2)
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(Tenant)) == 0
        assert session.scalar(select(func.count()).select_from(PriceVersionRow)) == 0
    assert not list(folder.glob("**/.*.part"))


def test_a_plan_that_tenants_pay_for_never_changes(apply: Any, whole: str) -> None:
    apply(whole)
    assert "base_fee is 49900000000000, and plans never change" in apply(
        whole.replace("base_fee: 49.90", "base_fee: 59.90"), status=2
    )


def test_files_variables_and_directories(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = folder / "parts"
    (parts / "more").mkdir(parents=True)
    (parts / "a.yaml").write_text("include: [more]\ntenants: [{name: '${NAME:-beta}'}]")
    (parts / "b.json").write_text(
        '{"tenants": [{"name": "gamma", "display_name": "$$5 ${file:note}"}]}'
    )
    (parts / "note").write_text("a note\n")
    (parts / "more/c.yml").write_text("tenants: [{name: delta}]")
    monkeypatch.setenv("NAME", "alpha")
    assert main(["apply", "-f", str(parts)]) == 0
    assert "+ tenant alpha" in capsys.readouterr().out
    document = yaml.safe_load(exported(capsys))
    assert [each["name"] for each in document["tenants"]] == ["alpha", "delta", "gamma"]
    assert document["tenants"][2]["display_name"] == "$$5 a note"


def test_two_keys_of_one_name_are_told_apart_by_their_ids(
    apply: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("tenants: [{name: acme}]")
    for _ in range(2):
        assert main(["key", "new", "--tenant", "acme", "--name", "twin"]) == 0
    capsys.readouterr()
    written = exported(capsys)
    assert len({each["id"] for each in yaml.safe_load(written)["tenants"][0]["keys"]}) == 2
    assert apply(written, "--prune") == []


def test_the_example_of_the_guide_applies(apply: Any, folder: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/configuration.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    apply(example)
    assert apply(example, "--prune") == []
    assert (folder / "secrets/acme-ci").exists()


def test_editors_get_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {"limit_plans", "billing_plans", "prices", "tenants"}
