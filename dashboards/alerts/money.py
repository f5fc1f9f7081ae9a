"""Alerts about audits, invoices, exports and failed tasks."""

from dashboards.alerts.alert import Alert, Runbook

MONEY_ALERTS = (
    Alert(
        "DatabaseBehind",
        "max(tollhouse_database_behind)",
        ">",
        0,
        "",
        "critical",
        "The database was restored from a backup, and nothing is numbered or collected",
        "Run tollhouse recover.",
        Runbook(
            "The database lacks what happened after its backup: invoices and payments that the customers "
            "and the payment provider know. Invoices stay drafts and no payment is collected, so that "
            "nothing is done twice. Requests are served, metered and rated.",
            (
                "[Health](/operator/health) shows under *history* what the database lacks.",
                "`tollhouse recover --dry-run` says the same.",
            ),
            (
                "If the backup is the wrong one, restore a later one first.",
                "Run `tollhouse recover` on a machine that ran the tasks; with several of them, name the "
                "folders `restore` of the others' data directories with `--marks`.",
                "Do what its report lists: payments by hand, credit notes and changes that are lost.",
                "Run `tollhouse invoice run`, then `tollhouse audit`: it names invoices that differ from "
                "those that were issued.",
            ),
            "[Health](/operator/health) shows *history* as good, and `tollhouse audit` names only what "
            "you have dealt with.",
        ),
    ),
    Alert(
        "AuditLate",
        "max(tollhouse_audit_age_seconds)",
        ">",
        7500,
        "10m",
        "critical",
        "The hourly audit has not ended for two hours",
        "Check that the workers and their schedule run, and the log of billing.audit.",
        Runbook(
            "Nobody has checked for two hours that usage, charges, ledger and invoices agree. That says "
            "nothing about whether they do.",
            (
                "[Reconciliation](/operator/reconciliation) shows the last audits.",
                "[Health](/operator/health) shows whether every task queue has a worker.",
            ),
            (
                "Run one now: Audit now on [Reconciliation](/operator/reconciliation), or "
                "`tollhouse audit`.",
                "If the schedule does not run, start exactly one worker with it: `tollhouse worker`.",
                "If the audit failed, [Dead letters](/operator/dead-letters) has its error.",
            ),
            "[Reconciliation](/operator/reconciliation) has an audit of the last hour, without "
            "differences.",
        ),
        "seconds",
    ),
    Alert(
        "ReconciliationOff",
        "max(tollhouse_audit_differences)",
        "!=",
        0,
        "",
        "critical",
        "The audit found differences",
        "Run tollhouse audit to list them by request id. Do not send invoices until the audit is clean.",
        Runbook(
            "What the engines did, what is stored, what is charged, what the ledger says and what is on "
            "invoices do not agree. It is a fault until it is explained.",
            (
                "[Reconciliation](/operator/reconciliation) lists every difference by request id.",
                "`tollhouse audit` reads everything again and lists what it finds.",
            ),
            (
                "Send no invoices.",
                "If requests are lost, compare with the engines' receipts and store what is missing: "
                "`tollhouse recover --from-receipts --dry-run`, then `tollhouse recover "
                "--from-receipts`.",
                "If requests were not rated, follow [RatingLate](#RatingLate) and "
                "[EventsParked](#EventsParked).",
                "For any other difference keep the database as it is, save "
                "`tollhouse audit --json`, and find who changed these rows outside Tollhouse.",
            ),
            "`tollhouse audit` ends with exit status 0.",
        ),
    ),
    Alert(
        "InvoicesFailed",
        "sum(increase(tollhouse_invoice_failures_total[2h]))",
        ">",
        0,
        "",
        "critical",
        "The invoice run fails, or leaves out tenants",
        'Search the workers\' log for "no invoice for", fix the cause and run tollhouse invoice run.',
        Runbook(
            "The invoice run could not bill some tenants, or failed as a whole. One tenant that cannot "
            "be "
            "billed delays no other.",
            (
                "The workers' log has a line `no invoice for` with the tenant and the cause.",
                "[Month end](/operator/month-end) names tenants without a final invoice.",
            ),
            (
                "Mend the cause on the tenant's page, from [Tenants](/operator/tenants): most often its "
                "address, tax or time zone.",
                "Bill that tenant again: `tollhouse invoice run --tenant NAME`.",
                "Bill all that are due: `tollhouse invoice run --closed-only`.",
            ),
            "The run ends without a failure, and [All invoices](/operator/invoices) has the missing "
            "ones.",
        ),
    ),
    Alert(
        "TenantsLeftOut",
        "sum(increase(tollhouse_tenant_failures_total[1h]))",
        ">",
        0,
        "",
        "warning",
        "A billing task leaves out tenants after an error",
        'Search the workers\' log for "left out" and fix the cause.',
        Runbook(
            "A task that runs for every tenant (top-ups, budgets, subscriptions and the like) failed for "
            "some of them, and went on with the others.",
            (
                "The workers' log has a line with `left out`, the task, the tenant and the error.",
                "`tollhouse_tenant_failures_total` counts them by task.",
            ),
            (
                "Mend the cause on the tenant's page, from [Tenants](/operator/tenants).",
                "The task runs again by its schedule; nothing needs to be started.",
            ),
            "No new line with `left out` appears for an hour.",
        ),
    ),
    Alert(
        "DeadLetters",
        "max(tollhouse_dead_letters_waiting)",
        ">",
        0,
        "",
        "warning",
        "A task exhausted its retries",
        "Run tollhouse worker --dead to see why, fix the cause, and run tollhouse worker --replay.",
        Runbook(
            "A background task failed as often as it may, and waits for you. Its work is not done.",
            (
                "[Dead letters](/operator/dead-letters) shows each task with its last error.",
                "`tollhouse worker --dead` shows the same.",
            ),
            (
                "Mend the cause that the error names.",
                "Replay them: Replay on the page, or `tollhouse worker --replay`. Tasks may run twice "
                "without harm.",
            ),
            "[Dead letters](/operator/dead-letters) is empty.",
        ),
    ),
    Alert(
        "ExportsParked",
        "max(tollhouse_parked_exports)",
        ">",
        0,
        "15m",
        "warning",
        "Scheduled exports could not be written",
        "Run tollhouse doctor to see why, fix the destination and run tollhouse export retry.",
        Runbook(
            "A scheduled export failed six times: its destination refuses it, or is gone. No period is "
            "skipped; it is written when it is retried.",
            (
                "`tollhouse export jobs --status parked` lists them with their errors.",
                "A tenant sees its own on [Exports](/exports).",
            ),
            (
                "Mend the destination that the error names: its address, its credentials or its space.",
                "Retry: `tollhouse export retry`.",
            ),
            "`tollhouse export jobs --status parked` is empty.",
        ),
    ),
)
