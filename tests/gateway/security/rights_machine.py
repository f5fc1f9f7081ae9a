"""A state machine over keys, members, links, sessions, projects and tenants, with a model of rights.

The model states what each credential may do at most: what its maker held when it was made, within
what its key, member, project and tenant hold now. Two processes serve one database; a second after
a change, neither grants more. Run it alone with `python -m tests.gateway.security.rights_machine`.
"""

import argparse
import ipaddress
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.clock import FakeClock
from core.counters_memory import MemoryCounters
from core.database import Database
from core.errors import TollhouseError
from core.tenants import (
    invitations,
    key_changes,
    keys,
    members,
    organisations,
    passwords,
    sign_on,
)
from core.tenants.access import Actor, authorise
from core.tenants.key_cache import KeyCache
from core.tenants.key_scopes import KeyScopes
from core.tenants.roles import Roles
from core.tenants.scope import scope_of_operator
from gateway.edge.auth.attempts import FailedAttempts
from gateway.edge.auth.dashboard_auth import DashboardAuth
from tests.migrated import migrated

# What the product promises, written out: who may give whom which role, and who may write what.
WITHIN = {
    "owner": {"owner", "admin", "finance", "developer", "viewer"},
    "admin": {"admin", "finance", "developer", "viewer"},
    "finance": {"finance", "viewer"},
    "developer": {"developer", "viewer"},
    "viewer": {"viewer"},
}
ROLES = tuple(WITHIN)
CAPPED = set(ROLES) - {"owner"}
WRITERS = {"owner", "admin"}  # of keys, members and projects
ROUTES = ("/v1/models", "/v1/files", "/admin/v1/keys", "/admin/v1/members", "/admin/v1/projects")
HOME, AWAY = "10.0.0.7", "203.0.113.7"
PASSWORD = "correct horse battery"
HASH = passwords.hash_password(PASSWORD)
_PASSWORD_ONE_IN = 12  # hashes are slow
_CHECKED = 4


@dataclass(frozen=True)
class Rights:
    """`routes` and `addresses` are those that are allowed."""

    role: str
    routes: frozenset[str] = frozenset(ROUTES)
    addresses: frozenset[str] = frozenset((HOME, AWAY))
    ends: datetime | None = None

    @property
    def is_bounded(self) -> bool:
        return self != Rights(self.role)

    def within(self, other: "Rights") -> bool:
        sooner = other.ends is None or (self.ends is not None and self.ends <= other.ends)
        return (
            self.role in WITHIN[other.role]
            and self.routes <= other.routes
            and self.addresses <= other.addresses
            and sooner
        )


@dataclass
class TenantModel:
    id: str
    status: str = "active"


@dataclass
class ProjectModel:
    id: str
    tenant: TenantModel
    open: bool = True


@dataclass
class MemberModel:
    id: str
    tenant: TenantModel
    email: str
    role: str
    enabled: bool = True
    password_cap: str | None = None  # the highest role with the password that is set
    account_cap: str | None = None  # the same, with the account that is linked
    link: str = ""
    link_cap: str = "owner"
    link_ends: datetime | None = None
    over: list[str] = field(default_factory=list)  # links that were used, or ended otherwise
    epoch: int = 0  # sessions of an earlier one are over

    def end_link(self) -> None:
        self.over += [self.link] if self.link else []
        self.link = ""


@dataclass
class KeyModel:
    id: str
    secret: str
    project: ProjectModel
    rights: Rights
    member: MemberModel | None
    revoked_at: datetime | None = None


@dataclass
class SessionModel:
    cookie: str
    owner: "KeyModel | MemberModel"
    epoch: int
    cap: str
    ends: datetime


Credential = KeyModel | SessionModel
Act = Callable[["RightsMachine"], bool]


class Escalation(AssertionError):
    pass


@dataclass
class Process:
    """What one gateway process keeps."""

    cache: KeyCache
    roles: Roles
    auth: DashboardAuth


@dataclass
class Town:
    database: Database
    clock: FakeClock
    processes: list[Process]
    name: str
    tenants: list[TenantModel] = field(default_factory=list)
    projects: list[ProjectModel] = field(default_factory=list)
    members: list[MemberModel] = field(default_factory=list)
    keys: list[KeyModel] = field(default_factory=list)
    sessions: list[SessionModel] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    made: int = 0

    # What the model holds now.

    def held(self, credential: Credential) -> Rights | None:
        """At most; None for nothing."""
        now = self.clock.now()
        if isinstance(credential, KeyModel):
            return self._of_key(credential, now)
        owner = credential.owner
        if credential.ends <= now:
            return None
        if isinstance(owner, KeyModel):
            rights = self._of_key(owner, now)
            unbounded = rights is not None and rights.routes == frozenset(ROUTES)
            return rights if unbounded else None
        alive = owner.enabled and owner.epoch == credential.epoch
        if not alive or owner.tenant.status == "closed":
            return None
        return Rights(_meet(owner.role, credential.cap))

    def _of_key(self, key: KeyModel, now: datetime) -> Rights | None:
        over = [at for at in (key.rights.ends, key.revoked_at) if at is not None and at <= now]
        if over or not key.project.open or key.project.tenant.status not in ("active",):
            return None
        if key.member is None:
            return key.rights
        if not key.member.enabled:
            return None
        return replace(key.rights, role=_meet(key.rights.role, key.member.role))

    def own_tenant(self, credential: Credential) -> TenantModel:
        owner = credential.owner if isinstance(credential, SessionModel) else credential
        return owner.tenant if isinstance(owner, MemberModel) else owner.project.tenant

    # What a process grants.

    def granted(
        self, process: Process, credential: Credential, address: str, route: str
    ) -> Actor | None:
        """The actor of a call, as the gateway's authenticators find it."""
        try:
            if isinstance(credential, SessionModel):
                with self.database.read() as session:
                    viewer = process.auth.find(session, credential.cookie, address)
                if viewer is None:
                    return None
                scope = viewer.scope
                return Actor(scope.actor, viewer.role, scope.tenant_id, scope.project_id)
            found = process.cache.cached(credential.secret)
            principal = found or process.cache.find(credential.secret)
        except TollhouseError:
            return None
        if not principal.scopes.allows_route(route):
            return None
        if not keys.address_allowed(principal.allowed_ips, address):
            return None
        return Actor(principal.key_id, principal.role, principal.tenant_id, principal.project_id)

    def check(self, choose: Callable[[Any], Any]) -> None:
        """One second after the last change, the newest credentials and some of the others."""
        self.clock.advance(1)
        for process in self.processes:
            process.cache.poll()
        every = [*self.keys, *self.sessions]
        some = [*self.keys[-1:], *self.sessions[-1:], *(choose(every) for _ in range(_CHECKED))]
        for credential in some:
            held = self.held(credential)
            address, route = choose((HOME, AWAY)), choose(ROUTES)
            for process in self.processes:
                self._check(process, credential, held, address, route)

    def _check(
        self,
        process: Process,
        credential: Credential,
        held: Rights | None,
        address: str,
        route: str,
    ) -> None:
        actor = self.granted(process, credential, address, route)
        if actor is None:
            return
        self.done["granted"] += 1
        if (
            held is None
            or actor.role not in WITHIN[held.role]
            or address not in held.addresses
            or route not in held.routes
            or actor.tenant_id != self.own_tenant(credential).id
        ):
            raise Escalation(f"{actor} from {address} on {route} by {credential}; it holds {held}")


def _meet(role: str, cap: str) -> str:
    both = WITHIN[role] & WITHIN[cap]
    return max(both, key=lambda each: len(WITHIN[each]))


class RightsMachine:
    """`choose(sequence)` decides; every call of `step` is one act and one check."""

    def __init__(
        self, town: Town, choose: Callable[[Any], Any], acts: "tuple[Act, ...] | None" = None
    ) -> None:
        self.town, self.choose, self.acts = town, choose, acts or ACTS
        for number in range(2 if not town.tenants else 0):
            self._new_tenant(number)

    def _new_tenant(self, number: int) -> None:
        town, clock = self.town, self.town.clock
        with town.database.transaction() as session:
            row = organisations.create_tenant(session, clock, name=f"{town.name}-{number}")
            tenant = TenantModel(row.id)
            scope = scope_of_operator(row.id)
            project = organisations.create_project(session, scope, clock, name="first")
            made = keys.issue(
                session, scope, clock, project_id=project.id, name="root", role="owner"
            )
        first = ProjectModel(project.id, tenant)
        town.tenants.append(tenant)
        town.projects.append(first)
        town.keys.append(KeyModel(made.id, made.secret, first, Rights("owner"), None))

    def step(self) -> str:
        act = self.choose(self.acts)
        name = act.__name__.removeprefix("_")
        try:
            done = act(self)
        except TollhouseError:
            done = False
        self.town.done[name if done else f"{name} refused"] += 1
        self.town.check(self.choose)
        return name

    # Acts through a credential. Each returns whether it was done; what was not allowed raises.

    def _by(self, route: str) -> "tuple[Credential, Actor, Rights] | None":
        """A credential that a process accepts for a call, from an address."""
        town = self.town
        every = [*town.keys, *town.sessions]
        able = [each for each in every if (held := town.held(each)) and held.role in WRITERS]
        of_members = [each for each in able if self._member_of(each) is not None]
        able = of_members if of_members and self.choose(range(2)) else able
        # A call by one that may do nothing is refused, and of little interest.
        credential = self.choose(able if able and self.choose(range(6)) else every)
        process, address = self.choose(town.processes), self.choose((HOME, AWAY))
        actor = town.granted(process, credential, address, route)
        held = town.held(credential)
        if actor is None:
            return None
        if held is None:
            raise Escalation(f"{credential} acts on {route} and holds nothing")
        return credential, actor, held

    def _call(
        self, route: str, obj: str, act: Callable[[Any, Any, Credential, Rights], Any]
    ) -> bool:
        by = self._by(route)
        if by is None:
            return False
        credential, actor, held = by
        roles = self.choose(self.town.processes).roles
        with self.town.database.transaction() as session:
            scope = authorise(session, roles, actor, None, obj, "write")
            if held.role not in WRITERS:
                raise Escalation(f"{credential} with {held} writes {obj}")
            after = act(session, scope, credential, held)
        after()
        return True

    def _member_of(self, credential: Credential) -> MemberModel | None:
        owner = credential.owner if isinstance(credential, SessionModel) else credential
        return owner if isinstance(owner, MemberModel) else owner.member

    def _issue(self) -> bool:
        wanted = Rights(
            self.choose(ROLES),
            self.choose([frozenset(ROUTES), frozenset(ROUTES[:2]), frozenset(ROUTES[2:])]),
            self.choose([frozenset((HOME, AWAY)), frozenset((HOME,))]),
            self.choose([None, self.town.clock.now() + timedelta(seconds=40)]),
        )
        drawn = self.choose(self.town.projects)

        def _act(session: Any, scope: Any, credential: Credential, held: Rights) -> Any:
            own = [each for each in self.town.projects if each.tenant.id == scope.tenant_id]
            project = self.choose(own) if self.choose(range(4)) else drawn
            made = keys.issue(
                session,
                scope,
                self.town.clock,
                project_id=project.id,
                name="k",
                role=wanted.role,
                scopes=_scopes(wanted),
                allowed_ips=_networks(wanted),
                expires_at=wanted.ends,
            )
            if not wanted.within(held) or project.tenant is not self.town.own_tenant(credential):
                raise Escalation(f"{credential} with {held} issued {wanted} in {project}")
            member = self._member_of(credential)
            new = KeyModel(made.id, made.secret, project, wanted, member)
            return lambda: self.town.keys.append(new)

        return self._call("/admin/v1/keys", "keys", _act)

    def _rotate(self) -> bool:
        key = self.choose(self.town.keys)
        overlap = timedelta(seconds=self.choose((0, 3, 60)))

        def _act(session: Any, scope: Any, credential: Credential, held: Rights) -> Any:
            made = keys.rotate(session, scope, self.town.clock, key.id, overlap=overlap)
            self._check_key(credential, held, key, key.rights)
            ended = self.town.clock.now() + overlap
            new = KeyModel(made.id, made.secret, key.project, key.rights, key.member)

            def _after() -> None:
                key.revoked_at = ended
                self.town.keys.append(new)

            return _after

        return self._call("/admin/v1/keys", "keys", _act)

    def _check_key(
        self, credential: Credential, held: Rights, key: KeyModel, wanted: Rights
    ) -> None:
        own = key.project.tenant is self.town.own_tenant(credential)
        if not own or not wanted.within(held):
            raise Escalation(f"{credential} with {held} makes {wanted} of {key}")

    def _narrow_or_widen(self) -> bool:
        key = self.choose(self.town.keys)
        routes = self.choose([None, ROUTES[:2], ROUTES[2:]])
        wanted = replace(key.rights, routes=frozenset(routes or ROUTES))

        def _act(session: Any, scope: Any, credential: Credential, held: Rights) -> Any:
            scopes = {"routes": list(routes) if routes else None}
            key_changes.change(
                session, scope, self.town.clock, key.id, key_changes.KeyChange(scopes=scopes)
            )
            self._check_key(credential, held, key, wanted)

            def _after() -> None:
                key.rights = wanted

            return _after

        return self._call("/admin/v1/keys", "keys", _act)

    def _revoke(self) -> bool:
        key = self.choose(self.town.keys)

        def _act(session: Any, scope: Any, credential: Credential, _held: Rights) -> Any:
            keys.revoke(session, scope, self.town.clock, key.id)
            if key.project.tenant is not self.town.own_tenant(credential):
                raise Escalation(f"{credential} revoked {key}")
            now = self.town.clock.now()

            def _after() -> None:
                key.revoked_at = min(key.revoked_at or now, now)

            return _after

        return self._call("/admin/v1/keys", "keys", _act)

    def _check_member(
        self, credential: Credential, held: Rights, tenant: TenantModel, *roles: str
    ) -> None:
        own = tenant is self.town.own_tenant(credential)
        if not own or held.is_bounded or not set(roles) <= WITHIN[held.role]:
            raise Escalation(f"{credential} with {held} changes a member to {roles}")

    def _near(self, tenant_id: str, drawn: MemberModel) -> MemberModel:
        """Mostly one of the own tenant, and half of these answer for a key."""
        answering = [each.member for each in self.town.keys if each.member is not None]
        others = answering if answering and self.choose(range(2)) else self.town.members
        own = [each for each in others if each.tenant.id == tenant_id]
        return self.choose(own) if own and self.choose(range(4)) else drawn  # type: ignore[no-any-return]

    def _add_member(self) -> bool:
        self.town.made += 1
        role, email = self.choose(ROLES), f"m{self.town.made}@{self.town.name}.example"
        password = HASH if self.choose(range(_PASSWORD_ONE_IN)) == 0 else None

        def _act(session: Any, scope: Any, credential: Credential, held: Rights) -> Any:
            made = members.add(
                session, scope, self.town.clock, email=email, role=role, password_hash=password
            )
            tenant = self.town.own_tenant(credential)
            self._check_member(credential, held, tenant, role)
            cap = held.role if password else None
            new = MemberModel(made.id, tenant, email, role, password_cap=cap)
            return lambda: self.town.members.append(new)

        return self._call("/admin/v1/members", "members", _act)

    def _change_member(self) -> bool:
        if not self.town.members:
            return False
        change: dict[str, Any] = self.choose(
            [
                {"role": self.choose(ROLES)},
                {"disabled": True},
                {"disabled": True, "keep_keys": True},
                {"disabled": False},
            ]
        )
        return self._change(self.choose(self.town.members), change)

    def _promote(self) -> bool:
        """Of one whose password or account another person may know, as far as there is one."""
        known = [
            each for each in self.town.members if {each.password_cap, each.account_cap} & CAPPED
        ]
        if not known:
            return False
        return self._change(
            self.choose(known), {"role": self.choose(("owner", "admin"))}, exact=True
        )

    def _change(self, drawn: MemberModel, change: dict[str, Any], *, exact: bool = False) -> bool:
        def _act(session: Any, scope: Any, credential: Credential, held: Rights) -> Any:
            member = drawn if exact else self._near(scope.tenant_id, drawn)
            members.change(session, scope, self.town.clock, member.id, **change)
            role = change.get("role", member.role)
            self._check_member(credential, held, member.tenant, member.role, role)
            kept = [each for each in self.town.keys if each.member is member]
            live = [each for each in kept if _is_live(each, self.town.clock.now())]
            answers = self._member_of(credential)

            def _after() -> None:
                member.role = role
                if "role" in change or change.get("disabled"):
                    member.epoch += 1
                    member.end_link()
                if "disabled" in change:
                    member.enabled = not change["disabled"]
                if change.get("keep_keys"):
                    for each in live:
                        each.member = answers

            return _after

        return self._call("/admin/v1/members", "members", _act)

    def _invite(self) -> bool:
        if not self.town.members:
            return False
        drawn, shown = self.choose(self.town.members), self.choose((True, False))

        def _act(session: Any, scope: Any, credential: Credential, held: Rights) -> Any:
            member = self._near(scope.tenant_id, drawn)
            made = invitations.invite(session, scope, self.town.clock, member.id, shown=shown)
            self._check_member(credential, held, member.tenant, member.role)

            def _after() -> None:
                member.end_link()
                member.link, member.link_ends = made.token, made.expires_at
                member.link_cap = held.role if shown else "owner"

            return _after

        return self._call("/admin/v1/members", "members", _act)

    def _open_link(self) -> bool:
        """Whoever has the link chooses the password, at times with one that is over."""
        invited = [each for each in self.town.members if each.link_ends is not None]
        if not invited or self.choose(range(_PASSWORD_ONE_IN // 2)):
            return False
        member = self.choose(invited)
        token = member.link
        if not token or (member.over and self.choose(range(4)) == 0):
            token = member.over[-1] if member.over else "a link that never was"
        with self.town.database.transaction() as session:
            process = self.choose(self.town.processes)
            found = invitations.accept_with_password(session, self.town.clock, token, HASH)
            cookie = process.auth.sign_in_member(session, found).cookie
        self._check_entry(member, token)
        if token != member.link:
            raise Escalation(f"{member} was entered by a link that is over")
        member.epoch += 1
        member.end_link()
        member.password_cap = member.link_cap
        self._session(cookie, member, member.link_cap)
        return True

    def _single_sign_on(self) -> bool:
        """By a link, or with the account that was linked by one."""
        known = [each for each in self.town.members if each.account_cap or each.link or each.over]
        if not known:
            return False
        member = self.choose(known[-3:])
        token = member.link if not member.account_cap or self.choose(range(3)) == 0 else ""
        if member.over and not token and (not member.account_cap or self.choose(range(4)) == 0):
            token = member.over[-1]
        identity = sign_on.ExternalIdentity(f"issuer {member.id}", "", invitation=token)
        with self.town.database.transaction() as session:
            process = self.choose(self.town.processes)
            found = sign_on.authenticate(session, self.town.clock, identity)
            cookie = process.auth.sign_in_member(session, found).cookie
        self._check_entry(member, token)
        if token != member.link and token:
            raise Escalation(f"{member} was entered by a link that is over")
        if token:
            cap = member.link_cap if member.account_cap != "owner" else "owner"
            member.end_link()
            member.account_cap = cap
        assert member.account_cap is not None
        self._session(cookie, member, member.account_cap)
        return True

    def _check_entry(self, member: MemberModel, token: str) -> None:
        late = token and member.link_ends and member.link_ends <= self.town.clock.now()
        if not member.enabled or member.tenant.status == "closed" or late:
            raise Escalation(f"{member} was entered by {token or 'an account'!r}")

    def _own_password(self) -> bool:
        """Who sets it is whoever signed in."""
        signed_in = [each for each in self.town.sessions if isinstance(each.owner, MemberModel)]
        if not signed_in or self.choose(range(_PASSWORD_ONE_IN // 2)):
            return False
        used = self.choose(signed_in[-3:])
        member = used.owner
        assert isinstance(member, MemberModel)
        process = self.choose(self.town.processes)
        actor = self.town.granted(process, used, HOME, ROUTES[0])
        if actor is None:
            return False
        with self.town.database.transaction() as session:
            scope = authorise(session, process.roles, actor, None, "members", "write")
            members.set_password(session, scope, self.town.clock, member.id, HASH)
        member.epoch += 1
        member.password_cap = used.cap
        return True

    def _session(self, cookie: str, owner: KeyModel | MemberModel, cap: str) -> None:
        epoch = owner.epoch if isinstance(owner, MemberModel) else 0
        ends = self.town.clock.now() + timedelta(hours=12)
        self.town.sessions.append(SessionModel(cookie, owner, epoch, cap, ends))

    def _sign_in(self) -> bool:
        """With a password or a key."""
        by_password = [each for each in self.town.members if each.password_cap is not None]
        owners: list[KeyModel | MemberModel] = [*self.town.keys]
        owners += by_password[-1:]
        owner, address = self.choose(owners), self.choose((HOME, AWAY))
        process = self.choose(self.town.processes)
        secret, proof = "", None
        if isinstance(owner, KeyModel):
            secret = owner.secret
        else:
            proof = members.check_password(self.town.database, owner.email, PASSWORD)
        with self.town.database.transaction() as session:
            given = {"secret": secret, "address": address}
            cookie = process.auth.sign_in(session, proof=proof, **given).cookie
        cap = "owner" if isinstance(owner, KeyModel) else owner.password_cap
        assert cap is not None
        self._session(cookie, owner, cap)
        return True

    def _new_project(self) -> bool:
        self.town.made += 1
        name = f"p{self.town.made}"

        def _act(session: Any, scope: Any, credential: Credential, _held: Rights) -> Any:
            made = organisations.create_project(session, scope, self.town.clock, name=name)
            new = ProjectModel(made.id, self.town.own_tenant(credential))
            return lambda: self.town.projects.append(new)

        return self._call("/admin/v1/projects", "projects", _act)

    def _archive(self) -> bool:
        if not self.town.projects[2:]:
            return False
        project = self.choose(self.town.projects[2:])

        def _act(session: Any, scope: Any, credential: Credential, _held: Rights) -> Any:
            organisations.archive_project(session, scope, self.town.clock, project.id)
            if project.tenant is not self.town.own_tenant(credential):
                raise Escalation(f"{credential} archived {project}")

            def _after() -> None:
                project.open = False

            return _after

        return self._call("/admin/v1/projects", "projects", _act)

    # Acts of the operator and of time.

    def _status(self) -> bool:
        tenant = self.choose(self.town.tenants)
        status = self.choose(("suspended", "closed")) if tenant.status == "active" else "active"
        with self.town.database.transaction() as session:
            scope = scope_of_operator(tenant.id)
            organisations.change_tenant(session, scope, self.town.clock, status=status)
        tenant.status = status
        return True

    def _operators_key(self) -> bool:
        project = self.choose(self.town.projects)
        role = self.choose(ROLES)
        with self.town.database.transaction() as session:
            scope = scope_of_operator(project.tenant.id)
            made = keys.issue(
                session, scope, self.town.clock, project_id=project.id, name="o", role=role
            )
        self.town.keys.append(KeyModel(made.id, made.secret, project, Rights(role), None))
        return True

    def _wait(self) -> bool:
        self.town.clock.advance(self.choose((5, 60, 3_600)))
        return True


ACTS = (
    *(RightsMachine._issue, RightsMachine._rotate, RightsMachine._narrow_or_widen),
    *(RightsMachine._revoke, RightsMachine._add_member, RightsMachine._change_member),
    *(RightsMachine._invite, RightsMachine._open_link, RightsMachine._sign_in),
    *(RightsMachine._issue, RightsMachine._rotate, RightsMachine._change_member),
    *(RightsMachine._sign_in, RightsMachine._new_project, RightsMachine._archive),
    *(RightsMachine._status, RightsMachine._operators_key, RightsMachine._wait),
    *(RightsMachine._single_sign_on, RightsMachine._own_password, RightsMachine._promote),
)
# Few others than those by which members come to keys, and their roles change.
ACTS_OF_MEMBERS = (
    *(RightsMachine._add_member, RightsMachine._invite, RightsMachine._invite),
    *(RightsMachine._single_sign_on, RightsMachine._single_sign_on, RightsMachine._own_password),
    *(RightsMachine._issue, RightsMachine._issue, RightsMachine._change_member),
    *(RightsMachine._sign_in, RightsMachine._wait, RightsMachine._promote),
)


def _is_live(key: KeyModel, now: datetime) -> bool:
    return all(at is None or at > now for at in (key.rights.ends, key.revoked_at))


def _scopes(rights: Rights) -> KeyScopes:
    return KeyScopes(routes=None if rights.routes == frozenset(ROUTES) else rights.routes)


def _networks(rights: Rights) -> tuple[str, ...]:
    if rights.addresses == frozenset((HOME, AWAY)):
        return ()
    return tuple(str(ipaddress.ip_network(each)) for each in sorted(rights.addresses))


def new_town(database: Database, name: str) -> Town:
    clock = FakeClock()
    processes = []
    for _ in range(2):
        roles = Roles(database)
        attempts = FailedAttempts(MemoryCounters(clock), clock)
        auth = DashboardAuth(roles, attempts, clock, "an operator's token of a test")
        processes.append(Process(KeyCache(database, clock), roles, auth))
    return Town(database, clock, processes, name)


# What random acts seldom come to: each act is repeated until its condition holds.
Until = Callable[[Town], bool]
PROMOTION: tuple[tuple[Act, Until], ...] = (
    (
        RightsMachine._operators_key,
        lambda town: any(each.rights.role == "admin" for each in town.keys),
    ),
    (RightsMachine._add_member, lambda town: bool(town.members)),
    (
        RightsMachine._invite,
        lambda town: any(each.link and each.link_cap in CAPPED for each in town.members),
    ),
    (
        RightsMachine._single_sign_on,
        lambda town: any(each.account_cap in CAPPED for each in town.members),
    ),
    (
        RightsMachine._promote,
        lambda town: any(
            each.account_cap in CAPPED and each.role == "owner" for each in town.members
        ),
    ),
    (
        RightsMachine._single_sign_on,
        lambda town: town.done["single_sign_on"] + town.done["single_sign_on refused"] > 12,
    ),
)


def story(
    database: Database, seed: int, acts: "tuple[tuple[Act, Until], ...]", most: int = 60
) -> Counter[str]:
    """One example in a given order, each act by drawn credentials and at most so many times."""
    drawn = random.Random(seed)
    town = new_town(database, f"s{seed}")
    for act, holds in acts:
        machine = RightsMachine(town, lambda each: drawn.choice(list(each)), (act,))
        for _ in range(most):
            if holds(town):
                break
            machine.step()
    return town.done


def walk(database: Database, seed: int, steps: int) -> Counter[str]:
    """One example: a town of its own, of so many steps."""
    drawn = random.Random(seed)
    acts = ACTS_OF_MEMBERS if seed % 2 else ACTS
    town = new_town(database, f"t{seed}")
    machine = RightsMachine(town, lambda each: drawn.choice(list(each)), acts)
    trail = []
    for _ in range(steps):
        try:
            trail.append(machine.step())
        except Escalation as found:
            raise Escalation(f"seed {seed}, after {' '.join(trail)}: {found}") from None
    return machine.town.done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=40, help="of one example")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", default="", help="default: a new SQLite file")
    arguments = parser.parse_args()
    done: Counter[str] = Counter()
    with TemporaryDirectory() as place:
        database = migrated(arguments.database or f"sqlite:///{Path(place) / 'rights.db'}")
        for number in range(-(-arguments.steps // arguments.length)):
            done += walk(database, arguments.seed + number, arguments.length)
        database.close()
    for name, count in sorted(done.items()):
        sys.stdout.write(f"{name}: {count}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
