"""The sections of the dashboard. casbin decides which of them a viewer sees."""

from dataclasses import dataclass

from dashboards.viewer import DashboardDeps, Viewer


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    path: str
    obj: str  # casbin's object; the act is "read"
    group: str
    operator: bool = False


SECTIONS = (
    Section("Overview", "/", "usage", "Use"),
    Section("Usage", "/usage", "usage", "Use"),
    Section("Requests", "/requests", "usage", "Use"),
    Section("Playground", "/playground", "usage", "Use"),
    Section("Adapters", "/adapters", "adapters", "Use"),
    Section("Prompts", "/prompts", "adapters", "Use"),
    Section("Costs", "/costs", "costs", "Money"),
    Section("Organisations", "/organisations", "costs", "Money"),
    Section("Invoices", "/invoices", "invoices", "Money"),
    Section("Limits and budgets", "/limits", "limits", "Money"),
    Section("Exports", "/exports", "exports", "Money"),
    Section("Safety", "/safety", "moderation", "Safety"),
    Section("Projects", "/projects", "projects", "Admin"),
    Section("Keys", "/keys", "keys", "Admin"),
    Section("Team", "/team", "members", "Admin"),
    Section("Single sign-on", "/single-sign-on", "members", "Admin"),
    Section("Request settings", "/request-settings", "tenant", "Admin"),
    Section("Webhooks", "/webhooks", "exports", "Admin"),
    Section("Health", "/operator/health", "operations", "Operations", operator=True),
    Section("Alerts", "/operator/alerts", "operations", "Operations", operator=True),
    Section("Traffic", "/operator/traffic", "operations", "Operations", operator=True),
    Section("Engines", "/operator/engines", "operations", "Operations", operator=True),
    Section("Capacity plan", "/operator/plan", "operations", "Operations", operator=True),
    Section("Configuration", "/operator/configuration", "operations", "Operations", operator=True),
    Section("Dead letters", "/operator/dead-letters", "operations", "Operations", operator=True),
    Section("Safety queue", "/operator/safety", "moderation", "Operations", operator=True),
    Section("Tenants", "/operator/tenants", "tenants", "All tenants", operator=True),
    Section("Models and prices", "/operator/prices", "prices", "All tenants", operator=True),
    Section("Plans and taxes", "/operator/plans", "prices", "All tenants", operator=True),
    Section("Seller", "/operator/seller", "prices", "All tenants", operator=True),
    Section("All invoices", "/operator/invoices", "operations", "Finance", operator=True),
    Section("All payments", "/operator/payments", "operations", "Finance", operator=True),
    Section("Bank statements", "/operator/bank-lines", "money", "Finance", operator=True),
    Section("Acts on money", "/operator/money-acts", "money", "Finance", operator=True),
    Section("Month end", "/operator/month-end", "money", "Finance", operator=True),
    Section("Parked usage", "/operator/parked", "operations", "Finance", operator=True),
    Section("Revenue", "/operator/revenue", "operations", "Finance", operator=True),
    Section("Cohorts", "/operator/cohorts", "operations", "Finance", operator=True),
    Section("Exchange rates", "/operator/exchange-rates", "operations", "Finance", operator=True),
    Section("Margin", "/operator/margin", "operations", "Finance", operator=True),
    Section("Ledger", "/operator/ledger", "operations", "Finance", operator=True),
    Section("Reconciliation", "/operator/reconciliation", "operations", "Finance", operator=True),
)


def sections_for(deps: DashboardDeps, viewer: Viewer) -> dict[str, list[Section]]:
    """The viewer's sections by group, in the order of `SECTIONS`; an operator's own come first."""
    groups: dict[str, list[Section]] = {}
    for section in sorted(SECTIONS, key=lambda each: not each.operator):
        if (viewer.operator or not section.operator) and deps.auth.may(viewer, section.obj, "read"):
            groups.setdefault(section.group, []).append(section)
    return groups
