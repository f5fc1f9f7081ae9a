"""What deploys the product refers to settings, commands, files and metrics that exist.

The chart is rendered by Helm and validated by the schemas of Kubernetes.
"""

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
from gateway.catalog.upstreams import read_upstreams
from gateway.cli.main import command_module, command_names
from tests.deploy.tools import CHART, MISSING, available, faults, render

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# Everything that values.yaml leaves out.
ALL_ON = (
    "--set=ingress.enabled=true,ingress.host=llm.example.com,ingress.className=nginx",
    "--set=ingress.tlsSecret=tls,models.enabled=true,networkPolicy.monitoringNamespace=monitoring",
    "--set=image.pullSecrets={registry},gateway.adoptSpools={3,4},engine.replicas=2",
    "--set=engine.nodeSelector.gpu=yes,gateway.spool.storageClass=fast",
)
WITHOUT_SCHEMA = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}  # of the Prometheus operator
helm = pytest.mark.skipif(not available(), reason=MISSING)


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def check_command(words: list[str]) -> None:
    assert words[0] in command_names(), words
    if words[0] == "engine":
        assert parse(words[1:]).config.model
        return
    parser = argparse.ArgumentParser()
    command_module(words[0]).configure(parser)
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
    [torch] = [line for line in stages["engine"].splitlines() if line.endswith(" torch")]
    assert "-c /constraints.txt" in torch and "--no-deps" in torch
    pinned = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==[\d.]+$", pinned, re.MULTILINE)
    assert stages["engine"].index(" torch\n") < stages["engine"].index("$EXTRA]")
    for stage in ("gateway", "engine"):
        assert stages[stage].count("-c /constraints.txt") == stages[stage].count("pip install")


def test_only_the_engine_runs_in_the_engine_s_image() -> None:
    services = compose()["services"]
    assert services["engine"]["image"] == "tollhouse-engine"
    assert services["engine"]["build"]["target"] == "engine"
    assert services["migrate"]["build"]["target"] == "gateway"
    assert {services[name]["image"] for name in ("migrate", "gateway", "worker")} == {"tollhouse"}


@helm
def test_only_the_engine_s_pods_run_the_engine_s_image() -> None:
    images = {
        (each["args"][0], each["image"]) for document in render() for each in containers(document)
    }
    assert {command for command, image in images if image.startswith("tollhouse-engine:")} == {
        "engine"
    }
    assert ("serve", "tollhouse:0.1.0") in images and ("worker", "tollhouse:0.1.0") in images


@helm
@pytest.mark.parametrize("options", [(), ALL_ON], ids=["as it ships", "everything on"])
def test_the_chart_is_valid_and_starts_commands_that_exist(options: tuple[str, ...]) -> None:
    made = render(*options)
    assert not [
        fault for each in made if each["kind"] not in WITHOUT_SCHEMA for fault in faults(each)
    ]
    for document in made:
        assert str(document["metadata"]["name"]).startswith("demo")
        for each in containers(document):
            check_command([str(word) for word in each["args"]])
            assert each["resources"]["limits"]
        spec = document.get("spec", {})
        if "template" in spec and "selector" in spec:
            wanted = spec["selector"]["matchLabels"]
            assert wanted.items() <= spec["template"]["metadata"]["labels"].items()


@helm
def test_a_wrong_field_is_found_by_the_schema() -> None:
    [engine] = [each for each in render() if each["metadata"]["name"] == "demo-engine"][:1]
    engine["spec"]["replicaz"] = 1
    assert any("replicaz" in fault for fault in faults(engine))


def by_name(*options: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in render(*options)}


def pod(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["spec"]["template"]["spec"]
    return found


PODS = (
    ("StatefulSet", "demo-gateway"),
    ("StatefulSet", "demo-engine"),
    ("StatefulSet", "demo-beat"),
    ("Deployment", "demo-worker"),
    ("Job", "demo-migrate"),
)


@helm
def test_the_chart_has_all_parts_of_the_production_mode() -> None:
    made = by_name()
    assert {
        *PODS,
        ("Service", "demo-gateway"),
        ("HorizontalPodAutoscaler", "demo-gateway"),
        ("PodDisruptionBudget", "demo-gateway"),
        ("NetworkPolicy", "demo-engine"),
        ("ServiceMonitor", "demo"),
        ("PrometheusRule", "demo"),
    } <= set(made)
    beat = made["StatefulSet", "demo-beat"]
    assert beat["spec"]["replicas"] == 1 and "--no-beat" not in containers(beat)[0]["args"]
    assert "--no-beat" in containers(made["Deployment", "demo-worker"])[0]["args"]
    assert "envFrom" not in containers(made["StatefulSet", "demo-engine"])[0]
    alerts_text = (ROOT / "dashboards" / "grafana" / "alerts.yaml").read_text()
    site = values()["settings"]["TOLLHOUSE_PUBLIC_URL"]
    alerts = yaml.safe_load(alerts_text.replace("{{ $externalLabels.tollhouse_url }}", site))
    assert made["PrometheusRule", "demo"]["spec"] == alerts


@helm
def test_volumes_are_writable_by_the_image_s_user() -> None:
    """Each mount is of a volume that exists, and the pod's group owns it."""
    made = by_name(*ALL_ON)
    user = re.search(r"useradd --uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    assert user is not None
    for key in PODS:
        found = pod(made[key])
        context = found["securityContext"]
        assert context["runAsUser"] == context["fsGroup"] == int(user[1]), key
        claims = made[key]["spec"].get("volumeClaimTemplates", [])
        there = {each["name"] for each in found.get("volumes", [])}
        there |= {each["metadata"]["name"] for each in claims}
        for each in containers(made[key]):
            mounts = {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
            assert set(mounts.values()) <= there and "/data" in mounts, key
    shared = {name for kind, name in made if kind == "PersistentVolumeClaim"}
    assert shared == {"demo-adapters", "demo-exports", "demo-models"}


@helm
def test_the_migration_runs_before_all_pods_and_needs_only_the_secret() -> None:
    made = by_name()
    job = made["Job", "demo-migrate"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    [container] = containers(job)
    assert container["envFrom"] == [{"secretRef": {"name": "tollhouse"}}]
    settings = {each["name"]: each["value"] for each in container["env"]}
    assert settings == made["ConfigMap", "demo-settings"]["data"]


@helm
@pytest.mark.parametrize(
    "changed", ["engine.replicas=3", *(f"settings.{name}=1" for name in values()["settings"])]
)
def test_pods_restart_when_a_setting_changes(changed: str) -> None:
    before, after = by_name(), by_name(f"--set-string={changed}")
    for key in PODS[:1] + PODS[2:4]:
        one, other = (
            each[key]["spec"]["template"]["metadata"]["annotations"] for each in (before, after)
        )
        assert one["checksum/settings"] != other["checksum/settings"], key
        assert all(isinstance(value, str) and value for value in one.values())
        assert "checksum/secret" in one


@helm
def test_files_of_scheduled_exports_survive_their_pod() -> None:
    made = by_name()
    directory = made["ConfigMap", "demo-settings"]["data"]["TOLLHOUSE_EXPORT_DIR"]
    for key in (PODS[0], PODS[2], PODS[3]):
        mounts = {m["mountPath"]: m["name"] for m in containers(made[key])[0]["volumeMounts"]}
        volumes = {each["name"]: each for each in pod(made[key])["volumes"]}
        claim = volumes[mounts[directory]]["persistentVolumeClaim"]["claimName"]
        assert claim == "demo-exports", key
    kept = made["PersistentVolumeClaim", "demo-exports"]["metadata"]["annotations"]
    assert kept == {"helm.sh/resource-policy": "keep"}


@helm
def test_the_spool_of_a_gateway_that_was_scaled_away_can_be_adopted() -> None:
    made = by_name(*ALL_ON)
    gateway = made["StatefulSet", "demo-gateway"]["spec"]
    assert gateway["persistentVolumeClaimRetentionPolicy"]["whenScaled"] == "Retain"
    [template] = gateway["volumeClaimTemplates"]
    adopter = made["StatefulSet", "demo-spool-3"]
    [volume] = pod(adopter)["volumes"]
    claim = volume["persistentVolumeClaim"]["claimName"]
    assert claim == f"{template['metadata']['name']}-demo-gateway-3"
    labels = adopter["spec"]["template"]["metadata"]["labels"]
    assert not made["Service", "demo-gateway"]["spec"]["selector"].items() <= labels.items()
    peers = made["NetworkPolicy", "demo-engine"]["spec"]["ingress"][0]["from"]
    assert any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in peers)


@helm
def test_models_pull_secrets_and_the_ingress_reach_their_pods() -> None:
    made = by_name(*ALL_ON)
    for key in PODS:
        assert pod(made[key])["imagePullSecrets"] == [{"name": "registry"}], key
    for key in PODS[:2]:
        mounts = [mount["mountPath"] for mount in containers(made[key])[0]["volumeMounts"]]
        assert "/models/shared" in mounts, key
    rule = made["Ingress", "demo"]["spec"]["rules"][0]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    ports = made["Service", backend["name"]]["spec"]["ports"]
    assert [port["name"] for port in ports] == [backend["port"]["name"]] == ["http"]
    upstreams = read_upstreams(made["ConfigMap", "demo-settings"]["data"]["TOLLHOUSE_UPSTREAMS"])
    assert len(upstreams) == 2


@helm
def test_every_pod_but_the_migration_has_probes() -> None:
    made = by_name()
    for key in PODS[:4]:
        [container] = containers(made[key])
        ports = {each["name"] for each in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports, (key, probe)


def test_an_engine_s_probes_tell_ready_from_alive() -> None:
    template = (CHART / "templates" / "engine.yaml").read_text()
    paths = dict(re.findall(r"(\w+)Probe: \{httpGet: \{path: (/\w+)", template))
    assert paths == {"startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz"}


def test_compose_checks_the_health_of_every_service_that_stays() -> None:
    for name, service in compose()["services"].items():
        assert ("healthcheck" in service) == (name != "migrate"), name
    services = compose()["services"]
    for name in ("engine", "gateway", "worker"):
        assert "/readyz" in services[name]["healthcheck"]["test"][-1], name


@helm
def test_a_worker_s_probes_ask_what_its_process_for_metrics_answers() -> None:
    made = by_name()
    for name in (("StatefulSet", "demo-beat"), ("Deployment", "demo-worker")):
        [container] = containers(made[name])
        assert container["args"][container["args"].index("--metrics-host") + 1] == "0.0.0.0"
        paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in PROBES}
        assert paths == {"/healthz", "/readyz"}
        for path in (*paths, "/metrics"):
            assert (
                f'"{path}"'
                in (ROOT / "gateway" / "admin" / "worker" / "metrics_server.py").read_text()
            )


PROBES = ("startup", "readiness", "liveness")


@helm
def test_every_port_that_listens_is_open_to_whom_it_is_meant_for() -> None:
    """Each pod that runs has a policy, and each of its ports is in it: to anybody for the API, to
    gateways and adopters of spools for engines, to the monitoring namespace for metrics."""
    made = by_name("--set=networkPolicy.monitoringNamespace=watch,gateway.adoptSpools={3}")
    policies = [each for (kind, _), each in made.items() if kind == "NetworkPolicy"]
    assert all(each["spec"]["policyTypes"] == ["Ingress"] for each in policies)
    for key in PODS[:4]:
        labels = made[key]["spec"]["template"]["metadata"]["labels"]
        [policy] = [each["spec"] for each in policies if selects(each["spec"], labels)]
        rules = {port["port"]: rule for rule in policy["ingress"] for port in rule["ports"]}
        [container] = containers(made[key])
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert set(rules) == set(ports.values()), key
        [peer] = rules[ports["metrics"]]["from"]
        watched = peer["namespaceSelector"]["matchLabels"]
        assert watched == {"kubernetes.io/metadata.name": "watch"}, key
        others = {name: rules[port].get("from") for name, port in ports.items()}
        assert others.pop("metrics") and set(others) <= {"http", "wire"}, key
        assert others.get("http") is None, "clients are anywhere"
        if key[1] == "demo-engine":
            peers = [each["podSelector"]["matchLabels"] for each in others["wire"]]
            allowed = [
                name
                for name in (*PODS[:4], ("StatefulSet", "demo-spool-3"))
                if any(
                    peer.items() <= made[name]["spec"]["template"]["metadata"]["labels"].items()
                    for peer in peers
                )
            ]
            assert allowed == [PODS[0], ("StatefulSet", "demo-spool-3")]


def selects(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    chosen = policy["podSelector"]
    return chosen["matchLabels"].items() <= labels.items() and all(
        labels[each["key"]] in each["values"] for each in chosen.get("matchExpressions", [])
    )


@helm
def test_monitoring_can_be_left_out_and_an_ingress_without_a_host_is_refused() -> None:
    kinds = {kind for kind, _ in by_name("--set=monitoring.enabled=false")}
    assert not kinds & WITHOUT_SCHEMA
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render("--set=ingress.enabled=true")
    assert "set the host name" in refused.value.stderr


def test_settings_of_the_chart_are_settings_and_hold_no_secret() -> None:
    for name in values()["settings"]:
        assert name in setting_names()
        assert not re.search(r"(TOKEN|KEY|SECRET|DATABASE_URL|REDIS_URL|BROKER_URL)$", name)
