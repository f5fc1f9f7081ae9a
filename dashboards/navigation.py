"""The sections of the dashboard. casbin decides which of them a viewer sees."""

from dataclasses import dataclass

from dashboards.viewer import DashboardDeps, Viewer


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    path: str
    obj: str  # casbin's object; the act is "read"
    operator: bool = False


SECTIONS = (
    Section("Overview", "/", "usage"),
    Section("Usage", "/usage", "usage"),
    Section("Costs", "/costs", "costs"),
    Section("Requests", "/requests", "usage"),
    Section("Projects", "/projects", "projects"),
    Section("Keys", "/keys", "keys"),
    Section("Adapters", "/adapters", "adapters"),
    Section("Limits and budgets", "/limits", "limits"),
    Section("Invoices", "/invoices", "invoices"),
    Section("Exports", "/exports", "exports"),
    Section("Webhooks", "/webhooks", "exports"),
    Section("Safety", "/safety", "moderation"),
    Section("Playground", "/playground", "usage"),
    Section("Team", "/team", "members"),
    Section("Tenants", "/operator/tenants", "tenants", operator=True),
    Section("Revenue", "/operator/revenue", "operations", operator=True),
    Section("Margin", "/operator/margin", "operations", operator=True),
    Section("Reconciliation", "/operator/reconciliation", "operations", operator=True),
    Section("Models and prices", "/operator/prices", "prices", operator=True),
    Section("Engines", "/operator/engines", "operations", operator=True),
    Section("Safety queue", "/operator/safety", "moderation", operator=True),
    Section("Dead letters", "/operator/dead-letters", "operations", operator=True),
    Section("Health", "/operator/health", "operations", operator=True),
)


def sections_for(deps: DashboardDeps, viewer: Viewer) -> list[Section]:
    return [
        section
        for section in SECTIONS
        if (viewer.operator or not section.operator) and deps.auth.may(viewer, section.obj, "read")
    ]
