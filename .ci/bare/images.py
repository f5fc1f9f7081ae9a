"""Builds both images of deploy/Dockerfile with buildah and uses them as deploy/compose.yaml does.

    python3 .ci/bare/images.py [--torch-index URL] [--database URL --redis URL --broker URL]

No daemon and no registry are needed: where `python:3.11-slim` cannot be pulled, Debian 12 with its
Python 3.11 stands in for it (debootstrap). Containers share the network of the machine. pip's settings,
its `find-links` directories and the machine's certificates are mounted while images are built. With a
database (an empty one), Redis and a broker, migration, worker and gateway run as in production; without
them the gateway uses its embedded stores. Exits with 3 where a tool or a right is missing.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

from shell import Background, Failed, Shell, environment, free_port, say

SOURCE = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim"
MODEL = "tollhouse-demo"
USER = 10001
SECRET = "a-token-of-this-run-only"  # what the operator would set as TOLLHOUSE_ADMIN_TOKEN
BUILD_S, READY_S = 1500, 150


def main() -> int:
    parser = argparse.ArgumentParser(description="build the images and use them")
    parser.add_argument(
        "--torch-index", help="the Dockerfile's TORCH_INDEX; empty: pip's own index"
    )
    parser.add_argument("--database", help="an empty PostgreSQL database")
    parser.add_argument("--redis")
    parser.add_argument("--broker")
    given = parser.parse_args()
    if missing := [tool for tool in ("buildah", "debootstrap") if not shutil.which(tool)]:
        say(f"images: NOT RUN: {' and '.join(missing)} missing")
        return 3
    if os.geteuid():
        say("images: NOT RUN: chroots need root")
        return 3
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tollhouse-images-") as folder:
        try:
            Images(Path(folder)).build(given.torch_index).use(production(given))
        except Failed as failure:
            say(f"{failure}\nimages: FAILED: {str(failure).splitlines()[0]}")
            return 1
    say(f"images: passed in {time.monotonic() - began:.0f} s")
    return 0


def production(given: argparse.Namespace) -> dict[str, str]:
    """The settings that deploy/compose.yaml gives to gateway, worker and migration."""
    urls = {"DATABASE": given.database, "REDIS": given.redis, "BROKER": given.broker}
    if not any(urls.values()):
        return {}
    if not all(urls.values()):
        raise SystemExit("--database, --redis and --broker belong together")
    return {f"TOLLHOUSE_{name}_URL": url for name, url in urls.items()}


class Images:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._shell = Shell(home, environment(STORAGE_DRIVER="vfs", BUILDAH_ISOLATION="chroot"))
        store = "--root", str(home / "store"), "--runroot", str(home / "run")
        self._buildah = ("buildah", *store)

    def build(self, torch_index: str | None) -> "Images":
        context = self._home / "context"
        context.mkdir()
        packed = subprocess.run(
            ["git", "archive", "HEAD"], cwd=SOURCE, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "x", "-C", str(context)], input=packed.stdout, check=True)
        self._provide_base()
        index = [] if torch_index is None else ["--build-arg", f"TORCH_INDEX={torch_index}"]
        for target, tag in (("gateway", "tollhouse"), ("engine", "tollhouse-engine")):
            say(f"\n== the image {tag} ==")
            words = "bud", "--pull-never", "--layers=false", "-f", context / "deploy/Dockerfile"
            mounts = self._mounts()
            self._run(*words, "--target", target, *index, *mounts, "-t", tag, context)
        return self

    def _provide_base(self) -> None:
        pulled = subprocess.run(
            [*self._buildah, "pull", "-q", BASE],
            env=self._shell.env,
            capture_output=True,
            check=False,
        )
        if not pulled.returncode:
            return
        say(f"{BASE} cannot be pulled: Debian's Python 3.11 stands in for it")
        root = self._home / "debian"
        packages = "--include=python3,python3-pip,ca-certificates"
        self._shell.run(
            "debootstrap", "--variant=minbase", packages, "bookworm", root, limit_s=BUILD_S
        )
        (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()  # as in Docker's own image
        (root / "usr/bin/python").symlink_to("python3")
        (name,) = self._run("from", "scratch").split()
        self._run("add", "-q", name, root, "/")
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self._run("config", "--env", path, "--cmd", "python3", name)
        self._run("commit", "-q", name, BASE)
        self._run("rm", name)
        shutil.rmtree(root)

    def _mounts(self) -> list[str]:
        """What pip of this machine reads, for the time of the build."""
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        config = self._home / "pip.conf"
        found: dict[str, str] = {}
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            found[name.partition(".")[2]] = value.strip("'\"")
        config.write_text("\n".join(["[global]", *(f"{n} = {v}" for n, v in found.items())]))
        paths = [word for value in found.values() for word in value.split() if word[0] == "/"]
        mounts = [f"{config}:/etc/pip.conf:ro"]
        mounts += [f"{path}:{path}:ro" for path in sorted({*paths}) if Path(path).exists()]
        return [word for mount in mounts for word in ("-v", mount)]

    def use(self, settings: dict[str, str]) -> None:
        say("\n== engine, migration, worker and gateway in containers ==")
        engine_port, port, metrics, worker_metrics = (free_port() for _ in range(4))
        common = {
            "TOLLHOUSE_UPSTREAMS": f"tcp://127.0.0.1:{engine_port}",
            "TOLLHOUSE_MODEL": "/models/demo",
            "TOLLHOUSE_MODEL_NAME": MODEL,
            "TOLLHOUSE_ADMIN_TOKEN": SECRET,
            "TOLLHOUSE_PORT": port,
            **settings,
        }
        gateway = self._in("tollhouse", "gateway", common)
        self._run(*gateway, "tollhouse", "migrate")
        key = self._customer(gateway)
        listen = "--listen", f"tcp://127.0.0.1:{engine_port}", "--metrics-port", metrics
        words = "tollhouse", "engine", "--model", "/models/demo", *listen
        engine = self._in("tollhouse-engine", "engine", {})
        with contextlib.ExitStack() as running:
            running.enter_context(Background(self._shell, *self._buildah, *engine, *words))
            running.enter_context(
                Background(self._shell, *self._buildah, *gateway, "tollhouse", "serve")
            )
            if settings:
                worker = self._in("tollhouse", "worker", common)
                work = "tollhouse", "worker", "--metrics-port", worker_metrics
                running.enter_context(Background(self._shell, *self._buildah, *worker, *work))
                wait_for(f"http://127.0.0.1:{worker_metrics}/healthz")
            wait_for(f"http://127.0.0.1:{metrics}/healthz")
            wait_for(f"http://127.0.0.1:{port}/readyz")
            self._ask(f"http://127.0.0.1:{port}/v1", key)
            said = json.loads(self._run(*gateway, "tollhouse", "audit", "--json"))
        if said["lost"] or said["duplicated"] or float(said["ledger_error"]):
            raise Failed(f"audit: {said}")
        say("  lost 0, duplicated 0, ledger error 0")

    def _customer(self, gateway: list[str]) -> str:
        """The API key of a new tenant, which has a price."""
        price = "price", "set", "--model", MODEL, "--input", "1", "--output", "2"
        self._run(*gateway, "tollhouse", *price)
        new = "tollhouse", "tenant", "new", "shop", "--owner", "ann@example.com", "--key", "first"
        found = re.search(r"\bth_\w+", self._run(*gateway, *new))
        if found is None:
            raise Failed("`tollhouse tenant new` printed no key")
        return found[0]

    def _ask(self, base_url: str, key: str) -> None:
        client = self._home / "client"
        venv.create(client, with_pip=True)
        python = client / "bin/python"
        self._shell.run(python, "-m", "pip", "install", "-q", "openai", limit_s=300)
        script = Path(__file__).with_name("ask.py")
        say(self._shell.run(python, "-I", script, base_url, key, MODEL).rstrip())

    def _in(self, image: str, name: str, settings: dict[str, str]) -> list[str]:
        """`buildah run` in a container of this name, with a volume of its own on /data."""
        volume = self._home / f"data-{name}"
        if not volume.exists():
            volume.mkdir()
            os.chown(volume, USER, USER)  # Docker takes the owner from the image's directory
            self._run("from", "--pull-never", "--name", name, image)
        words = ["run", "-v", f"{volume}:/data"]
        for setting, value in settings.items():
            words += ["--env", f"{setting}={value}"]
        return [*words, name, "--"]

    def _run(self, *words: str | Path) -> str:
        return self._shell.run(*self._buildah, *words, limit_s=BUILD_S)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as late:
            if time.monotonic() > deadline:
                raise Failed(f"{url}: {late}") from None
            time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
