"""A TenantScope is made in few places, and every one of them has checked who asks."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "gateway", "billing", "moderation", "dashboards", "migrations")
MAKERS = {"scope_of_key", "scope_of_member", "scope_of_operator", "TenantScope"}

# Where a scope may be made, and on what proof.
ALLOWED = {
    "core/tenants/scope.py": "the type itself",
    "core/tenants/access.py": "casbin allowed the act",
    "core/tenants/keys.py": "a valid key was shown",
    "core/tenants/organisations.py": "the tenant was made in this call",
    "billing/adjustments/onboarding.py": "the tenant was made in this call",
    "core/tenants/bootstrap.py": "the demo tenant of this deployment",
    "core/tenants/adapters.py": "weights that stop engines are in quarantine in every tenant",
}
# The command line on the machine itself, start-up and scheduled tasks act as the operator.
OPERATOR_ONLY = (
    "gateway/cli/",
    "gateway/cli/serve/startup.py",
    "billing/tasks",
    "moderation/tasks",
    "gateway/cli/demo",
)


def _calls(path: Path) -> set[str]:
    found: set[str] = set()
    source = path.read_text()
    if not any(name in source for name in MAKERS):
        return found  # most files: parsing them all takes seconds
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "id", None) or getattr(function, "attr", None)
            if name in MAKERS:
                found.add(name)
    return found


def test_only_the_authorisation_step_makes_a_scope() -> None:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name, made = str(path.relative_to(ROOT)), _calls(path)
            if not made or name in ALLOWED:
                continue
            assert made == {"scope_of_operator"}, f"{name} makes {sorted(made)}"
            command = name.startswith("gateway/admin/") and not name.endswith("routes.py")
            assert command or name.startswith(OPERATOR_ONLY), f"{name} acts as the operator"


def test_the_type_refuses_to_be_made_elsewhere() -> None:
    from core.tenants.scope import TenantScope

    try:
        TenantScope("org_x", None, "mem_x", "owner", object())
    except TypeError as error:
        assert "authorisation" in str(error)
    else:
        raise AssertionError("a TenantScope was made without proof")
