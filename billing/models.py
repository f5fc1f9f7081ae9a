"""Every table of billing, under one roof. Each subject has its file in `billing/tables`."""

from billing.tables.budgets import Budget, OutboxMessage
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
from billing.tables.usage import (
    Charge,
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
    "CreditGrant",
    "CreditNote",
    "CreditUse",
    "DailyUsage",
    "Dispute",
    "DunningCase",
    "EngineReceipt",
    "ExportJob",
    "ExportSchedule",
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
]
