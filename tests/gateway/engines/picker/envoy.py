"""A real Envoy in front of servers of a pool, asking a picker where each request goes."""

import json
import os
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

_TYPE = "type.googleapis.com/envoy.extensions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_envoy(
    tmp_path: Path, picker_port: int, servers: list[str], *, fail_open: bool = False
) -> Iterator[str]:
    """Its URL. The header `test-subset` of a request becomes the subset that the proxy allows."""
    port, admin = free_port(), free_port()
    path = tmp_path / "envoy.json"
    picker = _picker(picker_port, fail_open=fail_open)
    path.write_text(json.dumps(_configuration(_address(port), _address(admin), picker, servers)))
    binary = Path(sysconfig.get_path("purelib")) / "envoy/_bin/envoy"
    with (tmp_path / "envoy.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, "-c", path, "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"],
            stdout=log,
            stderr=log,
            env={**os.environ, "ENVOY_UID": "0"},
        )
    try:
        _wait(f"http://127.0.0.1:{admin}/ready", process, tmp_path / "envoy.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"Envoy is not ready\n{log.read_text()}")


def _picker(port: int, *, fail_open: bool) -> dict[str, Any]:
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    filter_ = {
        "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "5s"},
        "failure_mode_allow": fail_open,
        "message_timeout": "5s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    cluster = {
        "name": "picker",
        "type": "STATIC",
        "typed_extension_protocol_options": http2,
        "load_assignment": _assignment("picker", [f"127.0.0.1:{port}"]),
    }
    return {"filter": {"name": "picker", "typed_config": filter_}, "cluster": cluster}


def _configuration(
    listen: dict[str, Any], admin: dict[str, Any], picker: dict[str, Any], servers: list[str]
) -> dict[str, Any]:
    subset = {  # as a gateway writes it for a pool that a route narrows
        "@type": f"{_TYPE}.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": "test-subset",
                "on_header_present": {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "key": "x-gateway-destination-endpoint-subset",
                    "type": "STRING",
                },
                "remove": True,
            }
        ],
    }
    route = {
        "cluster": "pool",
        "retry_policy": {"retry_on": "connect-failure,reset-before-request", "num_retries": 2},
    }
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "pool",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "pool",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        "http_filters": [
            {"name": "subset", "typed_config": subset},
            picker["filter"],
            {"name": "router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}},
        ],
    }
    # As Envoy Gateway takes what a picker chose, with a list as the order of retries.
    chosen = {
        "@type": f"{_TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}},
            {"header": "x-gateway-destination-endpoint"},
        ],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "round_robin",
                        "typed_config": {
                            "@type": f"{_TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"
                        },
                    }
                }
            ]
        },
    }
    policy = {"typed_extension_config": {"name": "chosen", "typed_config": chosen}}
    pool = {
        "name": "pool",
        "type": "STATIC",
        "load_balancing_policy": {"policies": [policy]},
        "load_assignment": _assignment("pool", servers),
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {
        "admin": {"address": admin},
        "static_resources": {
            "listeners": [{"address": listen, "filter_chains": [chain]}],
            "clusters": [picker["cluster"], pool],
        },
    }


def _assignment(name: str, addresses: list[str]) -> dict[str, Any]:
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
