"""What deploys the product refers to settings, commands, files and metrics that exist."""

import argparse
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.settings import setting_names
from engine.worker.options import parse
from gateway.cli.main import command_names
from gateway.upstreams.config import read_upstreams
from tests.deploy.helm_templates import CHART, Unknown, render, values

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TEMPLATES = sorted(path.name for path in (CHART / "templates").glob("*.yaml"))
KINDS = {
    "ConfigMap", "Job", "StatefulSet", "Deployment", "Service", "PersistentVolumeClaim",
    "PodDisruptionBudget", "HorizontalPodAutoscaler", "ServiceMonitor", "PodMonitor", "PrometheusRule",
}  # fmt: skip


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def check_command(words: list[str]) -> None:
    assert words[0] in command_names(), words
    if words[0] == "engine":
        assert parse(words[1:]).config.model
        return
    from importlib import import_module

    parser = argparse.ArgumentParser()
    import_module(f"gateway.cli.commands.{words[0]}").configure(parser)
    parser.parse_args(words[1:])


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    )
    return found


def test_every_setting_that_is_named_exists() -> None:
    for path in [p for p in DEPLOY.rglob("*") if p.is_file() and not p.is_symlink()]:
        named = set(re.findall(r"TOLLHOUSE_[A-Z_]+", path.read_text()))
        assert named <= set(setting_names()), path


def test_annotations_are_text_also_where_a_digest_has_only_digits() -> None:
    for name in TEMPLATES:
        for document in render(name, values()):
            template = document.get("spec", {}).get("template", {})
            for each in (document, template):
                notes = each.get("metadata", {}).get("annotations", {})
                assert all(isinstance(value, str) for value in notes.values()), (name, notes)


def test_compose_starts_every_service() -> None:
    services = compose()["services"]
    assert set(services) == {
        "postgres", "redis", "rabbitmq", "migrate", "engine", "gateway", "worker", "prometheus",
        "grafana",
    }  # fmt: skip
    for name in ("migrate", "engine", "gateway", "worker"):
        check_command([str(word) for word in services[name]["command"]])
    upstreams = read_upstreams(services["gateway"]["environment"]["TOLLHOUSE_UPSTREAMS"])
    assert [each.url for each in upstreams] == ["tcp://engine:7000"]
    for service in services.values():
        for other in service.get("depends_on", {}):
            assert other in services
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in compose()["volumes"]
    assert services["engine"]["environment"] == {}


def test_prometheus_scrapes_what_listens_and_knows_our_rules() -> None:
    text = (DEPLOY / "prometheus.yaml").read_text()
    found = yaml.safe_load(text)
    targets = {
        t for job in found["scrape_configs"] for s in job["static_configs"] for t in s["targets"]
    }
    assert targets == {"gateway:9102", "engine:9100", "worker:9101"}
    mounts = " ".join(compose()["services"]["prometheus"]["volumes"])
    assert all(rule in mounts for rule in found["rule_files"])
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian's package `prometheus` has it")
    command = [promtool, "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yaml")]
    checked = subprocess.run(command, capture_output=True, timeout=30, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_grafana_finds_its_source_and_our_boards() -> None:
    source = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())["datasources"][0]
    assert source["type"] == "prometheus" and source["isDefault"]
    boards = yaml.safe_load((DEPLOY / "grafana" / "boards.yaml").read_text())["providers"][0]
    mounts = [v for v in compose()["services"]["grafana"]["volumes"] if "boards:" in v]
    assert mounts == [f"../dashboards/grafana:{boards['options']['path']}:ro"]


def test_the_image_holds_every_package_that_ships() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().split()
    for package in (
        "core",
        "billing",
        "moderation",
        "engine",
        "dashboards",
        "gateway",
        "migrations",
    ):
        assert f"COPY {package} {package}" in text
        assert f"!{package}" in ignored
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        assert f"!{name}" in ignored and name in text


def image_stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile."""
    parts = re.split(
        r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_gateway_s_image_is_without_torch_and_each_extra_exists() -> None:
    stages = image_stages()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = re.findall(r"\.whl\)\[([\w,$]+)\]", stages["gateway"] + stages["engine"])
    assert asked == ["pdf,parquet,s3,stripe,tracing", "$EXTRA"]
    named = {*asked[0].split(","), *re.findall(r"EXTRA=(\w+)", stages["engine"])}
    assert named <= set(project["optional-dependencies"]) and "engine" in named
    assert "torch" not in stages["gateway"].lower()
    assert stages["engine"].index(" torch\n") < stages["engine"].index("$EXTRA]")
    for stage in ("gateway", "engine"):
        assert stages[stage].count("-c /constraints.txt") == stages[stage].count("pip install")


def test_only_the_engine_runs_in_the_engine_s_image() -> None:
    services = compose()["services"]
    assert services["engine"]["image"] == "tollhouse-engine"
    assert services["engine"]["build"]["target"] == "engine"
    assert services["migrate"]["build"]["target"] == "gateway"
    assert {services[name]["image"] for name in ("migrate", "gateway", "worker")} == {"tollhouse"}
    made = [document for name in TEMPLATES for document in render(name, values())]
    images = {
        (each["args"][0], each["image"]) for document in made for each in containers(document)
    }
    assert {command for command, image in images if image.startswith("tollhouse-engine:")} == {
        "engine"
    }
    assert ("serve", "tollhouse:0.1.0") in images and ("worker", "tollhouse:0.1.0") in images


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_to_what_kubernetes_knows(name: str) -> None:
    for document in render(name, values()):
        assert document["kind"] in KINDS and document["apiVersion"]
        assert str(document["metadata"]["name"]).startswith("demo")
        for each in containers(document):
            check_command([str(word) for word in each["args"]])
            assert each["resources"] if "resources" in each else each["name"] == "migrate"
        spec = document.get("spec", {})
        if "template" in spec and "selector" in spec:
            wanted = spec["selector"]["matchLabels"]
            assert wanted.items() <= spec["template"]["metadata"]["labels"].items()


def test_the_chart_has_all_parts_of_the_production_mode() -> None:
    made = [document for name in TEMPLATES for document in render(name, values())]
    parts = {(document["kind"], document["metadata"]["name"]) for document in made}
    assert {
        ("StatefulSet", "demo-gateway"),
        ("StatefulSet", "demo-engine"),
        ("Deployment", "demo-worker"),
        ("Deployment", "demo-beat"),
        ("Service", "demo-gateway"),
        ("HorizontalPodAutoscaler", "demo-gateway"),
        ("PodDisruptionBudget", "demo-gateway"),
        ("ServiceMonitor", "demo"),
        ("PrometheusRule", "demo"),
    } <= parts
    assert any(kind == "Job" for kind, _ in parts)
    beat = next(d for d in made if d["metadata"]["name"] == "demo-beat")
    assert beat["spec"]["replicas"] == 1 and "--no-beat" not in containers(beat)[0]["args"]
    worker = next(
        d for d in made if d["metadata"]["name"] == "demo-worker" and "template" in d["spec"]
    )
    assert "--no-beat" in containers(worker)[0]["args"]
    engine = next(d for d in made if d["metadata"]["name"] == "demo-engine")
    assert "envFrom" not in containers(engine)[0]
    rules = next(d for d in made if d["kind"] == "PrometheusRule")
    alerts = yaml.safe_load((ROOT / "dashboards" / "grafana" / "alerts.yaml").read_text())
    assert rules["spec"] == alerts


def test_monitoring_can_be_left_out_and_a_wrong_value_is_found() -> None:
    given = values()
    assert render("monitoring.yaml", given | {"monitoring": {"enabled": False}}) == []
    with pytest.raises(Unknown):
        render("gateway.yaml", {name: value for name, value in given.items() if name != "image"})


def test_settings_of_the_chart_are_settings_and_hold_no_secret() -> None:
    for name in values()["settings"]:
        assert name in setting_names()
        assert not re.search(r"(TOKEN|KEY|SECRET|DATABASE_URL|REDIS_URL|BROKER_URL)$", name)
