"""Roles: casbin decides, using a policy in the database that is reloaded when it changes."""

import threading
from pathlib import Path

import casbin
from casbin_sqlalchemy_adapter import Adapter
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.database import Database, insert_new
from core.tenants import epochs
from core.tenants.models import PolicyRule

OPERATOR, ACCOUNTANT = "operator", "accountant"
# Of named operators. An accountant reads the books of all tenants and acts on money, nothing else.
OPERATOR_ROLES = (OPERATOR, ACCOUNTANT)
MEMBER_ROLES = ("owner", "admin", "finance", "developer", "viewer")
READ, WRITE = "read", "write"

# Objects of a tenant, and the operator's: "tenants", "prices", "roles", "operations" and "money".
OBJECTS = (
    "tenant",
    "projects",
    "members",
    "keys",
    "limits",
    "adapters",
    "audit",
    "usage",
    "costs",
    "invoices",
    "budgets",
    "payments",
    "exports",
    "moderation",
    "tenants",
    "prices",
    "roles",
    "operations",
    "money",
)
_OPERATOR_OBJECTS = ("tenants", "prices", "roles", "operations", "money")
_ACCOUNTANT_READS = (
    "tenant",
    "projects",
    "audit",
    "usage",
    "costs",
    "invoices",
    "budgets",
    "payments",
    "exports",
    "tenants",
    "prices",
    "operations",
    "money",
)
_INHERITS = (("developer", "viewer"), ("finance", "viewer"), ("admin", "developer"))
_READS = {
    "viewer": ("tenant", "projects", "usage", "adapters", "limits"),
    "developer": ("keys", "moderation"),
    "finance": ("costs", "invoices", "budgets", "payments", "exports", "audit"),
    "admin": ("members", "audit", "costs", "budgets", "exports"),
}
_WRITES = {
    "developer": ("adapters",),
    "finance": ("budgets", "payments", "exports"),
    "admin": ("projects", "members", "keys", "limits", "budgets", "exports", "moderation"),
}
_MAX_CACHED = 10_000
_CONF = str(Path(__file__).with_name("roles.conf"))


def default_policy() -> list[tuple[str, ...]]:
    """Rows (ptype, values…) of the initial policy; the operator may change it in the database."""
    lines: list[tuple[str, ...]] = [("g", child, parent) for child, parent in _INHERITS]
    lines += [("p", role, obj, READ) for role, objects in _READS.items() for obj in objects]
    lines += [("p", role, obj, WRITE) for role, objects in _WRITES.items() for obj in objects]
    owner_objects = [obj for obj in OBJECTS if obj not in _OPERATOR_OBJECTS]
    lines += [("p", "owner", obj, "*") for obj in owner_objects]
    lines.append(("p", OPERATOR, "*", "*"))
    lines += accountant_policy()
    return lines


def accountant_policy() -> list[tuple[str, ...]]:
    reads = [("p", ACCOUNTANT, obj, READ) for obj in _ACCOUNTANT_READS]
    return [*reads, ("p", ACCOUNTANT, "money", WRITE)]


def ensure_policy(session: Session) -> None:
    """Insert the default policy if there is none. Safe to run in two processes at once."""
    if session.scalar(select(func.count()).select_from(PolicyRule)):
        return
    rows = []
    for number, (ptype, *values) in enumerate(default_policy(), 1):
        filled = {f"v{index}": value for index, value in enumerate(values)}
        empty = dict.fromkeys(f"v{index}" for index in range(6))
        rows.append({"id": number, "ptype": ptype, **empty, **filled})
    insert_new(session, PolicyRule.__table__, rows, "id")  # type: ignore[arg-type]


def may_grant(actor_role: str, role: str) -> bool:
    """Nobody grants more rights than they have: only owners and the operator make owners."""
    if actor_role in (OPERATOR, "owner"):
        return role in MEMBER_ROLES
    return actor_role == "admin" and role in ("finance", "developer", "viewer", "admin")


_WITHIN = {
    "owner": MEMBER_ROLES,
    "admin": ("admin", "finance", "developer", "viewer"),
    "finance": ("finance", "viewer"),
    "developer": ("developer", "viewer"),
    "viewer": ("viewer",),
}


def lower_role(role: str, cap: str) -> str:
    """The highest role within both: what a key with `role` may do for a member whose role is `cap`."""
    if role in _WITHIN[cap]:
        return role
    return cap if cap in _WITHIN[role] else "viewer"


class Roles:
    """casbin's enforcer on the stored policy. Call `refresh` before `allows` if a session is open."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._enforcer: casbin.Enforcer | None = None
        self._decisions: dict[tuple[str, ...], bool] = {}
        self._epoch = -1

    def refresh(self, session: Session) -> None:
        epoch = epochs.current(session)
        if epoch == self._epoch and self._enforcer is not None:
            return
        with self._lock:
            self._enforcer = self._load()
            self._decisions = {}
            self._epoch = epoch

    def allows(self, role: str, own_tenant: str | None, tenant: str, obj: str, act: str) -> bool:
        """`own_tenant` is the actor's own tenant; None for the operator."""
        if self._enforcer is None:
            with self._lock:
                self._enforcer = self._load()
        # casbin evaluates every rule on each call; the result is cached until the policy changes.
        query = (role, own_tenant or "", tenant, obj, act)
        decision = self._decisions.get(query)
        if decision is None:
            decision = bool(self._enforcer.enforce(*query))
            if len(self._decisions) >= _MAX_CACHED:
                self._decisions.clear()
            self._decisions[query] = decision
        return decision

    def _load(self) -> casbin.Enforcer:
        adapter = Adapter(self._database.db_engine, PolicyRule, create_all_models=False)
        enforcer = casbin.Enforcer(_CONF, adapter)
        if not enforcer.get_policy():
            # Before the first tenant the database has no policy: use the default one.
            enforcer.enable_auto_save(False)
            for ptype, *values in default_policy():
                add = enforcer.add_grouping_policy if ptype == "g" else enforcer.add_policy
                add(*values)
        return enforcer
