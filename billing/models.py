"""All billing tables, re-exported from `billing/tables`."""

from billing.tables.budgets import Budget, OutboxMessage, WebhookEndpoint
from billing.tables.closing import ClosedDay
from billing.tables.invoices import AuditRun, BillingPeriod, CreditNote, Invoice, InvoiceLine
from billing.tables.ledger import (
    CreditGrant,
    CreditUse,
    LedgerAccount,
    LedgerEntry,
    LedgerTransaction,
    TopUp,
)
from billing.tables.payments import (
    Dispute,
    DunningCase,
    ExportJob,
    ExportSchedule,
    Payment,
    PaymentCommand,
    PaymentCustomer,
    PaymentMethod,
    PaymentWebhook,
    Refund,
)
from billing.tables.plans import BillingAccount, Plan, Seller, Subscription, TaxRate
from billing.tables.prices import Adjustment, PriceVersionRow, Rerate, TierPosition
from billing.tables.service import DailyService, HourlyService
from billing.tables.usage import (
    Charge,
    DailyTenantUsage,
    DailyUsage,
    EngineReceipt,
    HourlyUsage,
    ParkedEvent,
    UsageBatch,
    UsageEventRow,
    UsageRetention,
)

__all__ = [
    "Adjustment",
    "AuditRun",
    "BillingAccount",
    "BillingPeriod",
    "Budget",
    "Charge",
    "ClosedDay",
    "CreditGrant",
    "CreditNote",
    "CreditUse",
    "DailyService",
    "DailyTenantUsage",
    "DailyUsage",
    "Dispute",
    "DunningCase",
    "EngineReceipt",
    "ExportJob",
    "ExportSchedule",
    "HourlyService",
    "HourlyUsage",
    "Invoice",
    "InvoiceLine",
    "LedgerAccount",
    "LedgerEntry",
    "LedgerTransaction",
    "OutboxMessage",
    "ParkedEvent",
    "Payment",
    "PaymentCommand",
    "PaymentCustomer",
    "PaymentMethod",
    "PaymentWebhook",
    "Plan",
    "PriceVersionRow",
    "Refund",
    "Rerate",
    "Seller",
    "Subscription",
    "TaxRate",
    "TierPosition",
    "TopUp",
    "UsageBatch",
    "UsageEventRow",
    "UsageRetention",
    "WebhookEndpoint",
]
