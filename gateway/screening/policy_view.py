"""The moderation policies in force, cached in memory."""

from sqlalchemy import select

from core.database import Database
from core.tenants.keys import Principal
from moderation.models import PolicyVersion
from moderation.policies import LEVELS
from moderation.policy import Policy, default_policy

PolicyTarget = tuple[str, str, str]  # tenant, level, target
_MAX_KEYS = 20_000


class PolicyView:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._default = default_policy()
        self._in_force: dict[PolicyTarget, Policy] = {}
        self._of_key: dict[PolicyTarget, Policy] = {}  # by tenant, project and key, until a refresh

    def policy_of(self, principal: Principal) -> Policy:
        """The policy of the key, else of its project, else of its tenant, else the default."""
        owner = (principal.tenant_id, principal.project_id, principal.origin_id)
        of_key = self._of_key
        policy = of_key.get(owner)
        if policy is None:
            if len(of_key) >= _MAX_KEYS:
                of_key.clear()
            policy = of_key[owner] = self._resolve(principal)
        return policy

    def _resolve(self, principal: Principal) -> Policy:
        targets = (principal.origin_id, principal.project_id, principal.tenant_id)
        for level, target in zip(LEVELS, targets, strict=True):
            in_force = self._in_force.get((principal.tenant_id, level, target))
            if in_force is not None:
                return in_force
        return self._default

    def refresh(self) -> None:
        """Blocking; run in a thread."""
        in_force: dict[PolicyTarget, Policy] = {}
        with self._database.read() as session:
            for row in session.scalars(
                select(PolicyVersion)
                .where(PolicyVersion.retired_at.is_(None))
                .order_by(PolicyVersion.id)
            ):
                target = (row.tenant_id, row.level, row.target)
                known = self._in_force.get(target)
                same = known is not None and known.version == row.version
                in_force[target] = known if same and known else Policy.from_dict(row.document)
        self._in_force, self._of_key = in_force, {}
