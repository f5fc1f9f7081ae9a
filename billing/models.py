"""All billing tables, re-exported from `billing/tables`."""

from billing.tables.add_ons import AddOn, AddOnHolding
from billing.tables.bank import BankLine
from billing.tables.budgets import Budget, OutboxMessage, WebhookEndpoint
from billing.tables.closing import ClosedCharges, ClosedDay, ClosedUnits, MovedDay
from billing.tables.exchange import ExchangeRate
from billing.tables.invoices import AuditRun, BillingPeriod, CreditNote, Invoice, InvoiceLine
from billing.tables.ledger import (
    CreditGrant,
    CreditUse,
    LedgerAccount,
    LedgerEntry,
    LedgerTransaction,
    TopUp,
)
from billing.tables.money_acts import MoneyAct
from billing.tables.month_end import SignedMonth
from billing.tables.organisations import ChildInvoice, OrganisationLink
from billing.tables.payments import (
    Dispute,
    DunningCase,
    ExportJob,
    ExportSchedule,
    MeteredSpan,
    Payment,
    PaymentCommand,
    PaymentCustomer,
    PaymentMethod,
    PaymentWebhook,
    Refund,
)
from billing.tables.plans import (
    BillingAccount,
    Plan,
    Seller,
    Subscription,
    TaxExemption,
    TaxQuote,
    TaxRate,
)
from billing.tables.prices import Adjustment, PriceVersionRow, Rerate, TierPosition
from billing.tables.rating import RatingShard, RatingWorker
from billing.tables.restores import Recovery, ReservedNumber, RestoreMark
from billing.tables.service import (
    DailyEndUserUsage,
    DailyEngineTime,
    DailyEngineUsage,
    DailyService,
    EnginePrice,
    HourlyService,
)
from billing.tables.usage import (
    Charge,
    DailyTenantUsage,
    DailyUsage,
    EngineReceipt,
    HourlyUsage,
    ParkedEvent,
    ReportedEvent,
    UsageBatch,
    UsageEventRow,
    UsageRetention,
)

__all__ = [
    "AddOn",
    "AddOnHolding",
    "Adjustment",
    "AuditRun",
    "BankLine",
    "BillingAccount",
    "BillingPeriod",
    "Budget",
    "Charge",
    "ChildInvoice",
    "ClosedCharges",
    "ClosedDay",
    "ClosedUnits",
    "CreditGrant",
    "CreditNote",
    "CreditUse",
    "DailyEndUserUsage",
    "DailyEngineTime",
    "DailyEngineUsage",
    "DailyService",
    "DailyTenantUsage",
    "DailyUsage",
    "Dispute",
    "DunningCase",
    "EnginePrice",
    "EngineReceipt",
    "ExchangeRate",
    "ExportJob",
    "ExportSchedule",
    "HourlyService",
    "HourlyUsage",
    "Invoice",
    "InvoiceLine",
    "LedgerAccount",
    "LedgerEntry",
    "LedgerTransaction",
    "MeteredSpan",
    "MoneyAct",
    "MovedDay",
    "OrganisationLink",
    "OutboxMessage",
    "ParkedEvent",
    "Payment",
    "PaymentCommand",
    "PaymentCustomer",
    "PaymentMethod",
    "PaymentWebhook",
    "Plan",
    "PriceVersionRow",
    "RatingShard",
    "RatingWorker",
    "Recovery",
    "Refund",
    "ReportedEvent",
    "Rerate",
    "ReservedNumber",
    "RestoreMark",
    "Seller",
    "SignedMonth",
    "Subscription",
    "TaxExemption",
    "TaxQuote",
    "TaxRate",
    "TierPosition",
    "TopUp",
    "UsageBatch",
    "UsageEventRow",
    "UsageRetention",
    "WebhookEndpoint",
]
