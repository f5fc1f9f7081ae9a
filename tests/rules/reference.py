"""Renders the reference pages from the code: `python -m tests.rules.reference` rewrites them, and
`test_reference.py` fails when they are stale.
"""

import argparse
from pathlib import Path

from core import metrics
from core.settings import PREFIX, Settings
from dashboards.alerts import runbooks
from gateway.cli.main import command_module, command_names

DOCS = Path(__file__).parents[2] / "docs"


def settings_page() -> str:
    rows = [
        "# Settings",
        "",
        "Environment variables, or lines of the file that `TOLLHOUSE_ENV_FILE` names (default",
        "`tollhouse.env` where it exists). The environment wins. A wrong value or an unknown",
        "`TOLLHOUSE_` name stops the start and is named.",
        "",
        "| variable | default | what it is |",
        "|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = f"`{default}`" if default not in ("", None, ()) else "empty"
        rows.append(f"| `{PREFIX}{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(rows) + "\n"


def metrics_page() -> str:
    rows = [
        "# Metrics",
        "",
        "Served by the gateway at `/metrics`. Nothing is labelled by tenant: per-tenant figures come",
        "from SQL. Engine workers serve their own page, which `serve` adds to its own; see",
        "`docs/engine/worker.md`.",
        "",
        "| metric | kind | labels | what it is |",
        "|---|---|---|---|",
    ]
    for collector in vars(metrics).values():
        if not hasattr(collector, "_documentation"):
            continue
        name = collector._name + ("_total" if collector._type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        rows.append(f"| `{name}` | {collector._type} | {labels} | {collector._documentation} |")
    return "\n".join(rows) + "\n"


def commands_page() -> str:
    rows = [
        "# Commands",
        "",
        "`tollhouse COMMAND --help` shows every option. `--json` prints JSON on every command that",
        "shows something. Exit 0 done, 1 failed, 2 wrong use.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    for name in command_names():
        module = command_module(name)
        rows.append(f"| `tollhouse {name}` | {module.HELP} |")
        if not hasattr(module, "configure"):
            continue
        parser = argparse.ArgumentParser()
        module.configure(parser)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb in action._choices_actions:
                    rows.append(f"| `tollhouse {name} {verb.dest}` | {verb.help} |")
    return "\n".join(rows) + "\n"


PAGES = {
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
    "runbooks.md": runbooks.page,
}

if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    for page, render in PAGES.items():
        (DOCS / page).write_text(render())
        print(f"wrote docs/{page}")
