"""`tollhouse tenant cache`: the rule of a tenant's response cache, and the erasure of its answers."""

import argparse

from core.tenants import organisations
from core.tenants.response_cache import ERASED, SETTING
from gateway.admin.console import add_json, add_tenant, command_context, scope_named, show


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
