"""/v1/organization by OpenAI's SDK and by the schemas that OpenAI publishes."""

from collections.abc import Iterator

import pytest
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI, PermissionDeniedError

from core.errors import Unauthenticated
from core.tenants import invitations, keys, members
from core.tenants.scope import scope_of_member
from tests.gateway.admin.conftest import Town
from tests.gateway.openai_schema import FILE, validator


@pytest.fixture
def client(town: Town) -> Iterator[OpenAI]:
    base = f"{town.client.base_url}/v1".replace("//v1", "/v1")
    key = town.acme.keys["owner"]
    with OpenAI(base_url=base, api_key=key, admin_api_key=key, max_retries=0) as made:
        yield made


def test_projects_are_made_renamed_listed_by_page_and_archived(client: OpenAI) -> None:
    projects = client.admin.organization.projects
    made = projects.create(name="search")
    assert answer_faults("Project", made.to_dict()) == []
    assert (made.object, made.name, made.status) == ("organization.project", "search", "active")
    assert projects.update(made.id, name="find").name == "find"
    assert projects.retrieve(made.id).name == "find"
    listed = list(projects.list(limit=1))  # the SDK follows `after` and `has_more`
    assert [each.name for each in listed] == ["default", "find"]
    with pytest.raises(ConflictError, match="already exists"):
        projects.update(made.id, name="default")
    with pytest.raises(BadRequestError, match="is not a valid name"):
        projects.create(name="Not A Slug")
    with pytest.raises(BadRequestError, match="not in this list"):
        projects.list(after="proj_nothing")
    with pytest.raises(BadRequestError, match="residency"):
        projects.create(name="other", residency="EU_STORAGE_PROCESSING")  # type: ignore[call-arg]
    archived = projects.archive(made.id)
    assert archived.status == "archived" and archived.archived_at is not None
    assert [each.name for each in projects.list()] == ["default"]
    assert len(list(projects.list(include_archived=True))) == 2
    with pytest.raises(NotFoundError):
        projects.retrieve("proj_nothing")


def test_invites_become_users_with_a_role_and_are_removed(client: OpenAI, town: Town) -> None:
    invites, users = client.admin.organization.invites, client.admin.organization.users
    invited = invites.create(email="Ann@acme.example", role="reader")
    link = invited.to_dict()["invitation"]
    assert isinstance(link, dict) and "/dashboard/invitation?token=" in str(link["url"])
    shown = invites.retrieve(invited.id)
    assert answer_faults("Invite", shown.to_dict()) == []
    assert (shown.status, shown.role, shown.email) == ("pending", "reader", "ann@acme.example")
    assert list(users.list()) == []
    with pytest.raises(ConflictError, match="already a member"):
        invites.create(email="ann@acme.example", role="owner")
    with pytest.raises(BadRequestError, match="same in all projects"):
        invites.create(
            email="bo@acme.example",
            role="reader",
            projects=[{"id": town.acme.project_id, "role": "member"}],
        )
    _accept(town, str(link["url"]).partition("token=")[2], "ann@acme.example")
    assert list(invites.list()) == [] and invites.retrieve(invited.id).status == "accepted"
    with pytest.raises(ConflictError, match="has accepted"):
        invites.delete(invited.id)
    user = users.retrieve(invited.id)
    assert answer_faults("User", user.to_dict()) == []
    assert [each.id for each in users.list(emails=["ann@acme.example"])] == [invited.id]
    assert list(users.list(emails=["bo@acme.example"])) == []
    assert users.update(invited.id, role="owner").role == "owner"
    with pytest.raises(BadRequestError, match="role"):
        users.update(invited.id, role="emperor")
    key = _key_of(town, invited.id)
    owner = client.admin.organization.projects.api_keys.retrieve(
        key.id, project_id=town.acme.project_id
    )
    assert answer_faults("ProjectApiKey", owner.to_dict()) == []
    assert owner.owner.type == "user" and owner.owner.user is not None
    assert owner.owner.user.email == "ann@acme.example"
    second = invites.create(email="bo@acme.example", role="owner")
    link = second.to_dict()["invitation"]
    assert isinstance(link, dict)
    _accept(town, str(link["url"]).partition("token=")[2], "bo@acme.example")
    assert users.delete(invited.id).deleted
    with pytest.raises(NotFoundError):
        users.retrieve(invited.id)
    assert town.call("GET", "/v1/models", key.secret).status_code == 401
    with pytest.raises(ConflictError, match="last owner"):
        users.delete(second.id)
    again = invites.create(email="ann@acme.example", role="reader")
    assert (again.id, again.status) == (invited.id, "pending")
    assert invites.delete(again.id).deleted and list(invites.list()) == []


def test_admin_keys_and_service_accounts(client: OpenAI, town: Town) -> None:
    admin_keys = client.admin.organization.admin_api_keys
    made = admin_keys.create(name="robot", expires_in_seconds=3600)
    assert answer_faults("AdminApiKeyCreateResponse", made.to_dict()) == []
    assert made.expires_at == made.created_at + 3600 and made.redacted_value.endswith(
        made.value[-4:]
    )
    one = admin_keys.retrieve(made.id)
    assert answer_faults("AdminApiKey", one.to_dict()) == [] and not hasattr(one, "value")
    names = [each.name for each in admin_keys.list()]
    assert names == ["owner", "admin", "robot"]
    assert [each.name for each in admin_keys.list(order="desc")] == names[::-1]
    assert town.call("GET", "/v1/organization/users", made.value).status_code == 200
    assert admin_keys.delete(made.id).deleted
    assert not _is_known(town, made.value)
    with pytest.raises(BadRequestError, match="expires_in_seconds"):
        admin_keys.create(name="late", expires_in_seconds=0)
    accounts = client.admin.organization.projects.service_accounts
    account = accounts.create(town.acme.project_id, name="crawler")
    assert answer_faults("ProjectServiceAccountCreateResponse", account.to_dict()) == []
    assert account.api_key is not None
    assert town.call("GET", "/v1/models", account.api_key.value).status_code == 200
    assert "crawler" in [each.name for each in accounts.list(town.acme.project_id)]
    assert accounts.delete(account.id, project_id=town.acme.project_id).deleted
    assert not _is_known(town, account.api_key.value)
    with pytest.raises(NotFoundError):
        accounts.create(town.rival.project_id, name="crawler")


def test_a_service_account_outlives_the_member_who_made_it(town: Town) -> None:
    services = town.services
    with services.database.transaction() as session:
        owner = scope_of_member(town.rival.id, "operator", "owner")
        member = members.add(session, owner, services.clock, email="cy@rival.example", role="admin")
        scope = scope_of_member(town.rival.id, member.id, "admin")
        made = {
            kind: keys.issue(
                session,
                scope,
                services.clock,
                project_id=town.rival.project_id,
                name=kind,
                service_account=kind == "service",
            ).secret
            for kind in ("personal", "service")
        }
        members.change(session, owner, services.clock, member.id, disabled=True)
    answers = {kind: town.call("GET", "/v1/models", made[kind]).status_code for kind in made}
    assert answers == {"personal": 401, "service": 200}


def test_a_developer_may_not_administer(client: OpenAI, town: Town) -> None:
    with (
        client.with_options(admin_api_key=town.acme.keys["developer"]) as own,
        pytest.raises(PermissionDeniedError, match="does not permit"),
    ):
        own.admin.organization.users.list()


def _accept(town: Town, token: str, email: str) -> None:
    services = town.services
    hashed = members.hash_for(services.database, email, "a long password")
    with services.database.transaction() as session:
        invitations.accept_with_password(session, services.clock, token, hashed)


def _is_known(town: Town, secret: str) -> bool:
    """By the database: gateways learn of it within a second."""
    try:
        with town.services.database.read() as session:
            keys.find(session, secret, town.services.clock.now())
    except Unauthenticated:
        return False
    return True


def _key_of(town: Town, member_id: str) -> keys.IssuedKey:
    services = town.services
    scope = scope_of_member(town.acme.id, member_id, "owner")
    with services.database.transaction() as session:
        return keys.issue(
            session, scope, services.clock, project_id=town.acme.project_id, name="own"
        )


def answer_faults(name: str, answer: dict[str, object]) -> list[str]:
    """What OpenAI's schema `name` says against the answer; nothing where the document is absent."""
    return [each.message for each in validator(name).iter_errors(answer)] if FILE.is_file() else []
