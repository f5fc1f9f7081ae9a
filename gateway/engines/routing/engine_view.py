"""The engines' state for readiness and the admin API, and the operator's drains."""

import logging
from typing import Any

from core import engine_drains
from core.database import Database
from gateway.engines.routing.replicas import Replica
from gateway.engines.routing.router import Router

log = logging.getLogger("tollhouse.routing")


class EngineView:
    def __init__(self, database: Database, router: Router) -> None:
        self._database = database
        self._router = router

    def refresh(self) -> None:
        """Read drains from the database. Blocks; run it in a thread."""
        with self._database.read() as session:
            drained = set(engine_drains.drained(session))
        for replica in self._router.replicas():
            if replica.draining != (replica.name in drained):
                replica.draining = replica.name in drained
                log.warning(
                    "%s is %s", replica.name, "drained" if replica.draining else "in use again"
                )

    def readiness(self) -> dict[str, dict[str, Any]]:
        """The engines' parts of /readyz. None is `needed` by itself: `serving` is the verdict over all.
        `unserved` names models that no replica serves now."""
        served: dict[str, bool] = {}
        for model, replicas in self._router.models():
            served[model] = any(replica.serves() for replica in replicas)
        parts = {}
        for replica in self._router.replicas():
            own_models = [model for model, replicas in self._router.models() if replica in replicas]
            unserved = [model for model in own_models if not served[model]]
            state = {"needed": False, "unserved": unserved, **_status(replica)}
            parts[f"engine {replica.name}"] = state
        loading = self._router.loads.under_way()
        if loading:
            parts["adapters"] = {"ready": True, "loading": loading}
        return parts

    def served_models(self) -> list[str]:
        """Those of which a request can be answered now."""
        return [
            model
            for model, replicas in self._router.models()
            if any(replica.serves() and not replica.silent for replica in replicas)
        ]

    def addresses(self) -> dict[str, str]:
        """By name, of the engines in use that have one."""
        found = {each.name: getattr(each.client, "address", "") for each in self._router.replicas()}
        return {name: address for name, address in found.items() if address}

    def describe(self) -> list[dict[str, Any]]:
        """Engines with the load that they last reported; `in_flight` counts this process's requests."""
        rows = []
        for replica in self._router.replicas():
            models = [model for model, replicas in self._router.models() if replica in replicas]
            stats = replica.client.stats()
            load = {
                "running": stats.running if stats else None,
                "waiting": stats.waiting if stats else None,
                "blocks_free": stats.blocks_free if stats else None,
                "blocks_total": stats.blocks_total if stats else None,
            }
            rows.append(
                {"engine": replica.name, "models": models, **_status(replica), **load}
                | {"in_flight": replica.under_way, "adapters": len(replica.client.adapters())}
                | {"indexed_blocks": self._router.index.blocks(replica.name)}
            )
        return rows


def _status(replica: Replica) -> dict[str, Any]:
    status: dict[str, Any] = {"ready": replica.serves(), "state": replica.state()}
    if replica.client.refusal:
        status["refusal"] = replica.client.refusal
    startup_progress = replica.client.startup_progress()
    if startup_progress is not None:
        status |= {
            "loading_for_s": round(startup_progress.elapsed_s, 1),
            "expected_in_s": round(startup_progress.remaining_s, 1),
        }
    return status
