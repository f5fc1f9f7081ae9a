"""`tollhouse tenant erase-copies`: copies of a tenant's cached prompts outside the engines' memory."""

import argparse
import math

from core.settings import Settings
from engine.tiers.disk import DiskTier
from engine.tiers.open import open_remote
from engine.tiers.tier import Tier, owner_folder
from gateway.admin.console.context import command_context
from gateway.admin.console.options import add_tenant, scope_named
from gateway.admin.console.output import add_json, show

_UNBOUNDED = 1 << 62


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


def erase_copies(settings: Settings, tenant_id: str) -> dict[str, object]:
    """Where they were. An engine that runs finds them gone; what its own memory holds goes when it is
    evicted, or with the process."""
    folders = sorted((settings.data_dir / "kv-tier").glob("engine-*"))
    tiers: list[Tier] = [DiskTier(each, _UNBOUNDED, math.inf) for each in folders]
    places = [str(each) for each in folders]
    for place, url in (("Redis", settings.kv_tier_redis_url), ("S3", settings.kv_tier_s3_url)):
        if url:
            tiers.append(open_remote(url, 1.0))
            places.append(place)
    for tier in tiers:
        tier.erase(owner_folder(tenant_id))
        tier.close()
    return {"tenant": tenant_id, "places": places}
