"""The engines' state for readiness and the admin API, and the operator's drains."""

import logging
from typing import Any

from core import drains
from core.database import Database
from gateway.routing.replicas import Place
from gateway.routing.router import Router

log = logging.getLogger("tollhouse.routing")


class EngineView:
    def __init__(self, database: Database, router: Router) -> None:
        self._database = database
        self._router = router

    def refresh(self) -> None:
        """Read drains from the database. Blocks; run it in a thread."""
        with self._database.read() as session:
            drained = set(drains.drained(session))
        for place in self._router.places():
            if place.draining != (place.name in drained):
                place.draining = place.name in drained
                log.warning("%s is %s", place.name, "drained" if place.draining else "in use again")

    def readiness(self) -> dict[str, dict[str, Any]]:
        """The parts of /readyz. An engine is not `needed` while other replicas serve its models."""
        served: dict[str, bool] = {}
        for model, places in self._router.models():
            served[model] = any(place.serves() for place in places)
        parts = {}
        for place in self._router.places():
            mine = [model for model, places in self._router.models() if place in places]
            needed = not all(served[model] for model in mine)
            parts[f"engine {place.name}"] = {"needed": needed, **_standing(place)}
        loading = self._router.loads.under_way()
        if loading:
            parts["adapters"] = {"ready": True, "loading": loading}
        return parts

    def listed(self) -> list[dict[str, Any]]:
        """Engines with the load that they last reported; `under_way` counts this process's requests."""
        found = []
        for place in self._router.places():
            models = [model for model, places in self._router.models() if place in places]
            stats = place.client.stats()
            load = {
                "running": stats.running if stats else None,
                "waiting": stats.waiting if stats else None,
                "blocks_free": stats.blocks_free if stats else None,
                "blocks_total": stats.blocks_total if stats else None,
            }
            found.append(
                {"engine": place.name, "models": models, **_standing(place), **load}
                | {"under_way": place.under_way, "adapters": len(place.client.adapters())}
                | {"indexed_blocks": self._router.index.blocks(place.name)}
            )
        return found


def _standing(place: Place) -> dict[str, Any]:
    made: dict[str, Any] = {"ready": place.serves(), "state": place.state()}
    coming = place.client.coming()
    if coming is not None:
        made |= {"loading_for_s": round(coming.for_s, 1), "expected_in_s": round(coming.left_s, 1)}
    return made
