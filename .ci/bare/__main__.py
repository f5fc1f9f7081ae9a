"""Installs what ships, alone: the wheel in new environments, then `make serve` and every other command of
the README in a new clone.

    python3 .ci/bare [--source DIRECTORY] [--every-python]

The wheel without an engine also runs on the newest Python that the machine has (`python3.14` and so on in
PATH, or pyenv's), with --every-python on each: what a Python removes is missing in its successors too.
Nothing of the checkout is reachable: every command runs in an empty directory, without PYTHONPATH.
A non-zero exit, a traceback in any output, a missing file or an undeclared dependency fails the run.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import venv
from pathlib import Path

import readme
from shell import Background, Failed, Shell, environment, free_port, megabytes, say

HERE = Path(__file__).parent
BASE_MB, SERVE_MB = 350, 1300
MODEL = "tollhouse-demo"
NEWER = ("3.12", "3.13", "3.14")
READY_S = 300
EVERY_HELP = """
from gateway.cli.main import command_names, main
for name in command_names():
    try:
        code = main([name, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert not code, (name, code)
"""
MODEL_DIRECTORY = "from engine.demo.paths import MODEL_DIR; print(MODEL_DIR)"


def main() -> int:
    parser = argparse.ArgumentParser(description="install what ships alone, and use it")
    parser.add_argument("--source", type=Path, default=HERE.parents[1], help="a git checkout")
    parser.add_argument("--every-python", action="store_true", help="not only the newest")
    options = parser.parse_args()
    source = options.source.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    pythons = newer_pythons() if options.every_python else newer_pythons()[-1:]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tollhouse-bare-") as folder:
        try:
            stages(source, Path(folder), pythons)
        except Failed as failure:
            say(f"{failure}\nbare: FAILED: {str(failure).splitlines()[0]}")
            return 1
    say(f"bare: passed in {time.monotonic() - began:.0f} s")
    return 0


def stages(source: Path, home: Path, pythons: list[Path]) -> None:
    clone(source, home / "source")
    wheel = build(home)
    served = new_environment(home / "served")
    install(served, home, "torch")
    install(served, home, f"{wheel}[engine]")
    client = new_environment(home / "client")
    install(client, home, "openai")
    serve_alone(served, client, home, pythons)
    check_size("the environment with the engine", served, None, SERVE_MB)
    clone(source, home / "cloned")
    make_serve(home / "cloned", client)


def clone(source: Path, target: Path) -> None:
    say(f"\n== a clone of {source.name}'s last commit ==")
    Shell(target.parent).run("git", "clone", "-q", "--no-hardlinks", source, target)


def build(home: Path) -> Path:
    tool = new_environment(home / "build")
    shell = Shell(home)
    shell.run(tool / "python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", home, "./source")
    return next(home.glob("tollhouse-*.whl"))


def new_environment(path: Path) -> Path:
    venv.create(path, with_pip=True, symlinks=True)
    return path / "bin"


def install(bin_: Path, home: Path, what: str, *, compiled: bool = False) -> None:
    began = time.monotonic()
    options = ["-q", "-c", home / "source/constraints.txt"] + ["--no-compile"] * (not compiled)
    Shell(home).run(bin_ / "python", "-m", "pip", "install", *options, what, limit_s=900)
    say(f"  {time.monotonic() - began:.0f} s")


def check_size(what: str, bin_: Path, empty: Path | None, most_mb: int) -> None:
    size = megabytes(bin_.parent) - (megabytes(empty.parent) if empty else 0)
    say(f"  {what}: {size} MB (at most {most_mb})")
    if size > most_mb:
        raise Failed(f"{what} takes {size} MB, more than {most_mb}")


def serve_alone(served: Path, client: Path, home: Path, pythons: list[Path]) -> None:
    say("\n== the wheel with its engine ==")
    directory = home / "empty"
    directory.mkdir()
    port = free_port()
    shell = Shell(directory, environment(TOLLHOUSE_PORT=port))
    shell.run(served / "python", "-m", "pip", "check")
    with Background(shell, served / "tollhouse", "serve", terminal=True) as server:
        paste(shell, server.wait_for("Ctrl-C to stop", READY_S))
        shell.run(served / "tollhouse", "demo", "--seconds", "5")
        audited(shell, served)
        url = f"http://127.0.0.1:{port}"
        key = (directory / "data/demo-key").read_text().strip()
        ask(shell, client, url, key)
        every_command(shell, served)
        gateway_alone(client, home, url, key)
        for python in pythons:
            newer_gateway(python, client, home, url, key)
        audited(shell, served)


def paste(shell: Shell, screen: str) -> None:
    line = next(line for line in screen.splitlines() if line.startswith("curl "))
    said = shell.run(*shlex.split(line.replace("curl ", "curl -sS --fail-with-body ", 1)))
    if not said.rstrip().endswith("data: [DONE]") or "Tollhouse" not in text_of(said):
        raise Failed(f"the printed curl line got\n{said}")
    say(f"  {text_of(said)}")


def text_of(stream: str) -> str:
    parts = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(c["delta"].get("content") or "" for part in parts for c in part["choices"])


def audited(shell: Shell, served: Path) -> None:
    said = json.loads(shell.run(served / "tollhouse", "audit", "--json"))
    figures = [said[name] for name in ("lost", "duplicated", "ledger_error")]
    if [int(figure) for figure in figures] != [0, 0, 0] or said["differences"]:
        raise Failed(f"audit: {said}")
    say("  lost 0, duplicated 0, ledger error 0")


def ask(shell: Shell, client: Path, url: str, key: str) -> None:
    script = HERE / "ask.py"
    say(shell.run(client / "python", "-I", script, f"{url}/v1", key, MODEL).rstrip())


def every_command(shell: Shell, served: Path) -> None:
    """Each command parses and explains itself; one process, as each would import the same again."""
    shell.run(served / "tollhouse", "--help")
    shell.run(served / "python", "-I", "-c", EVERY_HELP)


def gateway_alone(client: Path, home: Path, url: str, key: str) -> None:
    say("\n== the wheel without an engine ==")
    wheel = next(home.glob("tollhouse-*.whl"))
    bare = new_environment(home / "gateway")
    install(bare, home, str(wheel), compiled=True)
    check_size("the base install, as pip compiles it", bare, home / "build/bin", BASE_MB)
    directory = home / "also-empty"
    directory.mkdir()
    shell = Shell(directory, environment())
    every_command(shell, bare)
    said = shell.run(bare / "tollhouse", "serve", code=1)
    if "tollhouse[engine]" not in said:
        raise Failed(f"serve without torch does not name the extra 'engine':\n{said}")
    say(f"  {said.rstrip()}")
    forward(bare, client, directory, url, key)


def newer_pythons() -> list[Path]:
    pyenv = Path.home() / ".pyenv/versions"
    found = []
    for version in NEWER:
        named = shutil.which(
            f"python{version}", path=os.environ["PATH"].replace(".pyenv/shims", "")
        )
        kept = sorted(pyenv.glob(f"{version}.*/bin/python"))
        found += [Path(named)] if named else kept[-1:]
    if not found:
        say(f"\nno newer Python here ({', '.join(NEWER)}): the wheel ran on one only")
    return found


def newer_gateway(python: Path, client: Path, home: Path, url: str, key: str) -> None:
    shell = Shell(home)
    version = shell.run(python, "-c", "import platform; print(platform.python_version())").strip()
    say(f"\n== the wheel without an engine on Python {version} ==")
    shell.run(python, "-m", "venv", home / version)
    bare = home / version / "bin"
    install(bare, home, "./source")
    directory = home / f"empty-{version}"
    directory.mkdir()
    forward(bare, client, directory, url, key)


def forward(bare: Path, client: Path, directory: Path, url: str, key: str) -> None:
    """Serve from `directory`, with the gateway at `url` as the only upstream."""
    port = free_port()
    shell = Shell(directory, environment(TOLLHOUSE_PORT=port))
    shell.run(bare / "python", "-m", "pip", "check")
    # With a tokenizer the gateway reads the checkpoint's configuration, which needs no engine either.
    tokenizer = shell.run(bare / "python", "-I", "-c", MODEL_DIRECTORY).strip()
    entry = {"url": f"{url}/v1", "api_key": key, "upstream_model": MODEL, "tokenizer": tokenizer}
    shell.env["TOLLHOUSE_UPSTREAMS"] = json.dumps([entry])
    with Background(shell, bare / "tollhouse", "serve") as server:
        server.wait_for('{"event": "ready"', READY_S)
        own = (directory / "data/demo-key").read_text().strip()
        ask(shell, client, f"http://127.0.0.1:{port}", own)
        audited(shell, bare)


def make_serve(directory: Path, client: Path) -> None:
    say("\n== make serve in a new clone ==")
    port = free_port()
    shell = Shell(directory, environment(TOLLHOUSE_PORT=port))
    began = time.monotonic()
    with Background(shell, "make", "serve") as server:
        server.wait_for('{"event": "ready"', 420)
        key = (directory / "data/demo-key").read_text().strip()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "What is Tollhouse?"}]}
        url = f"http://127.0.0.1:{port}"
        words = ["curl", "-sS", "--fail-with-body", f"{url}/v1/chat/completions"]
        words += ["-d", json.dumps(body)]
        words += ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
        answer = json.loads(shell.run(*words))["choices"][0]["message"]["content"]
        say(f"  {answer}\n  first answer after {time.monotonic() - began:.0f} s")
        bin_ = directory / ".venv/bin"
        readme.follow(directory / "README.md", shell, bin_ / "tollhouse", client / "python", url)
        audited(shell, bin_)
    check_size("make serve's environment", directory / ".venv/bin", None, SERVE_MB)


if __name__ == "__main__":
    sys.exit(main())
