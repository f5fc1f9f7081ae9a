"""`tollhouse tenant`: tenants and their projects."""

import argparse
from typing import Any

from billing.adjustments.onboarding import BillingDetails, Customer, Owner, onboard
from billing.notices import request_sinks as sinks
from billing.notices.alert_targets import AlertTargets
from core.tenants import members, organisations, sign_on
from core.tenants.response_cache import ERASED, SETTING
from gateway.admin.accounts.command import add_billing_account
from gateway.admin.billing.plans_command import add_billing_plans
from gateway.admin.console import (
    ACTOR,
    PASSWORD_SOURCE,
    CommandContext,
    add_tenant,
    command_context,
    password_from,
    scope_named,
)
from gateway.admin.organisations.command import add_organisations
from gateway.admin.output import add_json, show
from gateway.admin.stored_data.command import add_stored_data
from gateway.admin.stored_data.erasing import erase_copies
from gateway.admin.subscriptions.command import add_add_ons, add_subscriptions


def add_response_cache(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    cache = verbs.add_parser("cache", help="show, set, turn off or erase the response cache")
    add_tenant(cache)
    cache.add_argument("--ttl", type=int, metavar="SECONDS", help="cache answers for so long")
    cache.add_argument("--sampled", action="store_true", help="also of temperatures above 0")
    cache.add_argument("--tools", action="store_true", help="also of requests with tools")
    cache.add_argument("--off", action="store_true", help="remove the rule, and erase the answers")
    cache.add_argument("--erase", action="store_true", help="erase the cached answers")
    add_json(cache)
    cache.set_defaults(run=_cache)


def _cache(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        if arguments.off or arguments.ttl is not None:
            rule = {
                "ttl_s": arguments.ttl,
                "sampled": arguments.sampled,
                "tools": arguments.tools,
            }
            settings = {SETTING: None if arguments.off else rule}
            organisations.change_tenant(session, scope, tools.clock, settings=settings)
        if arguments.off or arguments.erase:
            organisations.erase_cached_responses(session, scope, tools.clock)
        settings = organisations.get_tenant(session, scope).settings
    shown = {"rule": settings.get(SETTING), "erased_at": settings.get(ERASED)}
    show(shown, as_json=arguments.json, title="response cache")
    return 0


def add_request_log(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    logged = verbs.add_parser(
        "request-log", help="show, set or remove the receiver of records of requests"
    )
    add_tenant(logged)
    logged.add_argument(
        "--url", help="https://host/path, whose signing secret is shown once, or s3://bucket/prefix"
    )
    logged.add_argument(
        "--content", action="store_true", help="also texts, as moderation left them"
    )
    logged.add_argument(
        "--format",
        choices=(sinks.RECORDS, sinks.OTLP),
        default=sinks.RECORDS,
        help="otlp: traces in JSON, for OpenTelemetry collectors and Langfuse",
    )
    logged.add_argument("--sample-percent", type=int, default=100, metavar="N")
    logged.add_argument("--authorization", help="Authorization header that the receiver asks for")
    logged.add_argument("--off", action="store_true", help="log no more requests")
    add_json(logged)
    logged.set_defaults(run=_request_log)


def _request_log(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        if arguments.url and not sinks.is_bucket(arguments.url):
            AlertTargets(tools.settings.webhook_networks).check([arguments.url])
        shown = _changed(tools, arguments)
    show(shown, as_json=arguments.json, title="request log")
    return 0


def _changed(tools: CommandContext, arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the tenant's request log, changed as the arguments say."""
    with tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        if arguments.url:
            options = sinks.SinkOptions(
                arguments.content,
                arguments.format,
                arguments.sample_percent,
                arguments.authorization,
            )
            made = sinks.set_sink(session, scope, tools.clock, arguments.url, options)
            shown = {
                "url": made.url,
                "content": made.content,
                "format": made.format,
                "sample_percent": made.sample_percent,
            }
            if not made.is_bucket:
                shown["secret"] = made.secret
        else:
            if arguments.off:
                sinks.remove_sink(session, scope, tools.clock)
            sink = sinks.sink_of(session, scope)
            shown = {
                "url": sink.url if sink else None,
                "content": sink.content if sink else False,
                "format": sink.format if sink else None,
                "sample_percent": sink.sample_percent if sink else None,
            }
    return shown


def add_copies(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    erase = verbs.add_parser(
        "erase-copies",
        help="erase the copies of a tenant's cached prompts on disk, in Redis and in S3",
    )
    add_tenant(erase)
    add_json(erase)
    erase.set_defaults(run=_erase)


def _erase(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        with tools.database.read() as session:
            tenant = scope_named(session, arguments.tenant).tenant_id
        shown = erase_copies(tools.settings, tenant)
    show(shown, as_json=arguments.json, title="erased")
    return 0


HELP = "create, list and change tenants and their projects"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    new = verbs.add_parser("new", help="create a tenant with its project, owner and first key")
    new.add_argument("name", help="lower-case letters, digits and hyphens")
    new.add_argument("--display-name", default="")
    new.add_argument("--plan", default="standard", help="free, standard, premium or a stored plan")
    new.add_argument("--currency", default="USD")
    new.add_argument(
        "--timezone", default="UTC", help="time zone of the billing periods (default: UTC)"
    )
    new.add_argument("--legal-name", default="", help="name on invoices")
    new.add_argument("--address", default="", help="address on invoices")
    new.add_argument("--email", default="", help="e-mail address for invoices")
    new.add_argument("--tax-id", default="")
    new.add_argument("--tax-region", default="", help="ISO 3166 code, such as DE or US-NY")
    new.add_argument("--tax-exempt", action="store_true")
    new.add_argument("--owner", metavar="EMAIL", help="the first member, with the role owner")
    new.add_argument("--owner-password-file", metavar="FILE", help=PASSWORD_SOURCE)
    new.add_argument("--project", default="default", help="the first project (default: default)")
    new.add_argument("--key", default="", metavar="NAME", help="issue a first key of this name")
    new.set_defaults(run=_new)
    listed = verbs.add_parser("list", help="list all tenants")
    listed.set_defaults(run=_list)
    one = verbs.add_parser("show", help="show a tenant")
    add_tenant(one)
    one.set_defaults(run=_show)
    change = verbs.add_parser("set", help="change a tenant's plan, status or display name")
    add_tenant(change)
    change.add_argument("--plan", help="free, standard, premium or a stored plan")
    change.add_argument("--status", choices=organisations.STATUSES)
    change.add_argument("--display-name")
    change.set_defaults(run=_set)
    projects = verbs.add_parser("projects", help="list the projects of a tenant")
    add_tenant(projects)
    projects.set_defaults(run=_projects)
    add_project = verbs.add_parser("project-add", help="create a project")
    add_tenant(add_project)
    add_project.add_argument("name")
    add_project.set_defaults(run=_project_add)
    label_verb = verbs.add_parser(
        "project-labels", help="list the labels by which a project's requests are counted"
    )
    add_tenant(label_verb)
    label_verb.add_argument("name", help="of the project")
    label_verb.add_argument(
        "keys", nargs="*", help="names such as team and feature; none: no labels"
    )
    label_verb.set_defaults(run=_project_labels)
    add_json(label_verb)
    add_domain = verbs.add_parser(
        "domain-add", help="record an e-mail domain that you know to be the tenant's own"
    )
    remove_domain = verbs.add_parser("domain-remove", help="remove an e-mail domain of a tenant")
    for each, run in ((add_domain, _domain_add), (remove_domain, _domain_remove)):
        add_tenant(each)
        each.add_argument("domain")
        each.set_defaults(run=run)
    domains = verbs.add_parser("domains", help="list the e-mail domains of a tenant")
    add_tenant(domains)
    domains.set_defaults(run=_domains)
    add_add_ons(verbs)
    add_billing_account(verbs)
    add_billing_plans(verbs)
    add_copies(verbs)
    add_response_cache(verbs)
    add_request_log(verbs)
    add_stored_data(verbs)
    add_subscriptions(verbs)
    add_organisations(verbs)
    domain_verbs = (add_domain, remove_domain, domains)
    for each in (new, listed, one, change, projects, add_project, *domain_verbs):
        add_json(each)


def _new(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        customer = _customer(tools, arguments)
        with tools.database.transaction() as session:
            shown = onboard(session, tools.clock, customer, ACTOR).describe()
    show(shown, as_json=arguments.json, title="tenant")
    return 0


def _customer(tools: CommandContext, arguments: argparse.Namespace) -> Customer:
    details = ("legal_name", "address", "email", "tax_id", "tax_region", "tax_exempt")
    plain = ("name", "display_name", "plan", "currency", "timezone", "project", "key")
    owner = None
    if arguments.owner:
        password = password_from(arguments.owner_password_file)
        hashed = members.hash_for(tools.database, arguments.owner, password) if password else None
        owner = Owner(arguments.owner, password_hash=hashed)
    return Customer(
        **{name: getattr(arguments, name) for name in plain},
        billing=BillingDetails(**{name: getattr(arguments, name) for name in details}),
        owner=owner,
    )


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        rows = [organisations.describe(each) for each in organisations.all_tenants(session)]
    if not arguments.json:
        rows = [{name: row[name] for name in ("name", "id", "plan", "status")} for row in rows]
    show(rows, as_json=arguments.json, title="tenants")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        shown = organisations.describe(organisations.tenant_named(session, arguments.tenant))
    show(shown, as_json=arguments.json, title="tenant")
    return 0


def _set(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        changed = organisations.change_tenant(
            session,
            scope_named(session, arguments.tenant),
            tools.clock,
            plan=arguments.plan,
            status=arguments.status,
            display_name=arguments.display_name,
        )
        shown = organisations.describe(changed)
    show(shown, as_json=arguments.json, title="tenant")
    return 0


def _projects(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        shown = organisations.projects(session, scope_named(session, arguments.tenant))
        rows = [organisations.describe_project(each) for each in shown]
    show(rows, as_json=arguments.json, title="projects")
    return 0


def _project_add(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        created = organisations.create_project(session, scope, tools.clock, name=arguments.name)
        shown = organisations.describe_project(created)
    show(shown, as_json=arguments.json, title="project")
    return 0


def _project_labels(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        own = {each.name: each.id for each in organisations.projects(session, scope)}
        project_id = own.get(arguments.name, arguments.name)
        changed = organisations.set_label_keys(
            session, scope, tools.clock, project_id, arguments.keys
        )
        shown = organisations.describe_project(changed)
    show(shown, as_json=arguments.json, title="project")
    return 0


def _domain_add(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        sign_on.add_domain(session, scope, tools.clock, arguments.domain)
    return _domains(arguments)


def _domain_remove(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        sign_on.remove_domain(session, scope, tools.clock, arguments.domain)
    return _domains(arguments)


def _domains(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        listed = sign_on.domains(session, scope_named(session, arguments.tenant))
        rows = [{"domain": each.domain, "since": each.proved_at.isoformat()} for each in listed]
    show(rows, as_json=arguments.json, title="domains")
    return 0
