"""`tollhouse prompt`: prompt templates of a tenant and their versions."""

import argparse
import json
from pathlib import Path
from typing import Any

from core.errors import BadRequest
from core.tenants import prompt_templates
from gateway.admin.console import add_tenant, command_context, scope_named
from gateway.admin.output import add_json, show

HELP = "create, version, list, show and remove prompt templates"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    new = verbs.add_parser("new", help="create a prompt with its first version")
    new.add_argument("name")
    new.set_defaults(run=_new)
    add = verbs.add_parser("add-version", help="add a version, which requests use from now on")
    add.add_argument("prompt_id")
    add.add_argument("--keep-current", action="store_true", help="keep the version in use")
    add.set_defaults(run=_add_version)
    for each in (new, add):
        each.add_argument("--system", default="", metavar="TEXT", help="text of a system message")
        each.add_argument("--user", default="", metavar="TEXT", help="text of a user message")
        each.add_argument("--file", metavar="PATH", help="JSON list of messages instead")
    use = verbs.add_parser("use", help="choose the version of requests that name none")
    use.add_argument("prompt_id")
    use.add_argument("version", type=int)
    use.set_defaults(run=_use)
    listed = verbs.add_parser("list", help="list the prompts of a tenant")
    listed.set_defaults(run=_list)
    one = verbs.add_parser("show", help="show the versions of a prompt")
    one.add_argument("prompt_id")
    one.set_defaults(run=_show)
    remove = verbs.add_parser("remove", help="delete a prompt and its versions")
    remove.add_argument("prompt_id")
    remove.set_defaults(run=_remove)
    for each in (new, add, use, listed, one, remove):
        add_tenant(each)
        add_json(each)


def _new(arguments: argparse.Namespace) -> int:
    messages = _messages(arguments)
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        row = prompt_templates.create(
            session, scope, tools.clock, name=arguments.name, messages=messages
        )
        shown = prompt_templates.describe(row)
    show(shown, as_json=arguments.json, title="prompt")
    return 0


def _add_version(arguments: argparse.Namespace) -> int:
    messages = _messages(arguments)
    with command_context() as tools, tools.database.transaction() as session:
        made = prompt_templates.add_version(
            session,
            scope_named(session, arguments.tenant),
            tools.clock,
            arguments.prompt_id,
            messages,
            current=not arguments.keep_current,
        )
        shown = prompt_templates.describe_version(made)
    show(shown, as_json=arguments.json, title="version")
    return 0


def _use(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        row = prompt_templates.change(
            session, scope, tools.clock, arguments.prompt_id, current_version=arguments.version
        )
        shown = prompt_templates.describe(row)
    show(shown, as_json=arguments.json, title="prompt")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        found = prompt_templates.all_of(session, scope_named(session, arguments.tenant))
        rows = [prompt_templates.describe(each) for each in found]
    show(rows, as_json=arguments.json, title="prompts")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        scope = scope_named(session, arguments.tenant)
        row = prompt_templates.get(session, scope, arguments.prompt_id)
        found = prompt_templates.versions(session, row)
        rows = [prompt_templates.describe_version(each) for each in found]
    if not arguments.json:
        rows = [each | {"messages": json.dumps(each["messages"])} for each in rows]
    show(rows, as_json=arguments.json, title="versions")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        row = prompt_templates.remove(session, scope, tools.clock, arguments.prompt_id)
        shown = {"id": row.id, "deleted": True}
    show(shown, as_json=arguments.json, title="prompt")
    return 0


def _messages(arguments: argparse.Namespace) -> Any:
    """Of the file, else of the options."""
    if arguments.file is None:
        given = (("system", arguments.system), ("user", arguments.user))
        return [{"role": role, "content": text} for role, text in given if text]
    try:
        return json.loads(Path(arguments.file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"{arguments.file} is not a JSON list of messages: {error}.",
            next_step='Write [{"role": "system", "content": "You help {{customer}}."}].',
        ) from None
