"""Alerts about usage on its way from the gateways to the charges."""

from dashboards.alerts.alert import Alert, Runbook

USAGE_ALERTS = (
    Alert(
        "SpoolStuck",
        "max(tollhouse_spool_age_seconds)",
        ">",
        300,
        "",
        "critical",
        "Usage has not reached the database for five minutes",
        "Restore the database. Nothing is lost while the gateway's disk has space.",
        Runbook(
            "A gateway serves requests, but cannot ship their usage. It waits in the spool on the "
            "gateway's "
            "disk. When that disk is full, the gateway refuses requests, because it could "
            "not bill them.",
            (
                "[Health](/operator/health) shows how many records wait in the spool of the "
                "gateway that "
                "answers.",
                "`tollhouse doctor` on that gateway says what the database, or the stream, answers.",
            ),
            (
                "Restore the database, or the stream of `TOLLHOUSE_STREAM_URL`.",
                "See how much space the disk of `TOLLHOUSE_DATA_DIR` has left, and free some if it is "
                "little.",
                "Do not delete the spool: it holds usage that nobody else has.",
            ),
            "The spool is shipped by itself: no records wait on [Health](/operator/health). Then "
            "`tollhouse audit` must report no difference.",
        ),
        "seconds",
    ),
    Alert(
        "StreamStuck",
        "max(tollhouse_stream_age_seconds)",
        ">",
        300,
        "",
        "critical",
        "Usage has lain in the stream for five minutes and is not in the database",
        "Run tollhouse doctor. Restore the database, or start tollhouse worker. Nothing is lost while "
        "the "
        "stream has space.",
        Runbook(
            "Gateways ship to the stream, and nothing takes usage out of it: no worker runs, or the "
            "database "
            "refuses what it stores.",
            (
                "`tollhouse doctor` shows the stream, the database and the workers.",
                "[Health](/operator/health) names the task queues without a worker.",
            ),
            (
                "If no worker runs, start one: `tollhouse worker`.",
                "If the database is down, restore it.",
                "See that the stream has space; when it is full, usage waits in the spools instead.",
            ),
            "The age of the stream is 0, and the requests are on [Requests](/requests).",
        ),
        "seconds",
    ),
    Alert(
        "TargetDown",
        "up == 0",
        "",
        0,
        "2m",
        "critical",
        "A gateway, engine or worker does not answer Prometheus",
        "See which target it is, and restart it if its process is gone.",
        Runbook(
            "A process is gone, hangs, or is not reached. Its metrics are missing, so that "
            "alerts which need "
            "them may not fire.",
            (
                "The page Targets of Prometheus names the process and the error of the last scrape.",
                "[Health](/operator/health) shows which parts the others miss.",
            ),
            (
                "If the process is gone, read the end of its log and start it.",
                "If it runs, mend the scrape: `TOLLHOUSE_METRICS_LISTEN`, "
                "`TOLLHOUSE_METRICS_TOKEN`, and the "
                "network between Prometheus and the process.",
                "If it was removed on purpose, remove it from Prometheus' targets.",
            ),
            "`up` is 1 for all targets.",
        ),
    ),
    Alert(
        "WorkerSilent",
        "max by (instance, part) (tollhouse_worker_silence_seconds)",
        ">",
        120,
        "1m",
        "critical",
        "A worker takes no tasks, or its scheduler sends none",
        "Restart the worker if its /healthz says so; otherwise restore the broker.",
        Runbook(
            "Each worker sends itself a task every ten seconds, through the broker. This one "
            "has taken none "
            "for two minutes (part `tasks`), or its scheduler has sent none (part "
            "`schedule`): usage is "
            "rated late, and invoices, payments and exports wait. Nothing is lost.",
            (
                "`/readyz` on the worker's port for metrics says which part fails: the "
                "broker, the tasks, the "
                "schedule or the database.",
                "`tollhouse doctor` says which queues have no worker.",
            ),
            (
                "If `/healthz` on that port is 503, restart the worker; a supervisor that "
                "asks it does so.",
                "If the broker is not reached, restore it: workers connect again by themselves.",
            ),
            "`/readyz` of the worker is 200. Then follow [RatingLate](#RatingLate).",
        ),
        "seconds",
    ),
    Alert(
        "DatabaseUnreachable",
        "absent(tollhouse_database_up == 1)",
        "",
        0,
        "5m",
        "critical",
        "No gateway or worker reaches the database, or none is scraped, so billing alerts cannot fire",
        "Restore the database, and check that Prometheus scrapes the gateways and the workers (port "
        "9101).",
        Runbook(
            "Every figure about billing comes from the database. Without it, or without Prometheus' "
            "scrapes, "
            "no alert about billing can be raised.",
            (
                "`tollhouse doctor` says what the database answers.",
                "The page Targets of Prometheus shows whether gateways (port 9102) and workers (port "
                "9101) "
                "are scraped.",
            ),
            (
                "Restore the database. Requests are served meanwhile, from what the gateways know.",
                "If the database answers, mend the scrapes: `TOLLHOUSE_METRICS_LISTEN`, "
                "`TOLLHOUSE_METRICS_TOKEN`, and the network between Prometheus and the processes.",
            ),
            "`tollhouse_database_up` is 1. Then follow [SpoolStuck](#SpoolStuck) until the spools are "
            "shipped.",
        ),
    ),
    Alert(
        "SpoolParked",
        "sum(tollhouse_spool_parked_records) + sum(tollhouse_spool_parked_adopted_records)",
        ">",
        0,
        "",
        "critical",
        "Usage records in a gateway's spool cannot be stored, and are not billed",
        "On that gateway run tollhouse usage parked list to see why, and tollhouse usage "
        "parked release "
        "to "
        "retry.",
        Runbook(
            "Records of a spool cannot be read, settled or stored. Their requests were served, and are "
            "not "
            "billed until this is fixed.",
            (
                "On that gateway's machine, `tollhouse usage parked list` shows each record with its "
                "reason.",
                "[Health](/operator/health) counts the parked records of the gateway that answers.",
            ),
            (
                "Mend the reason that the list names.",
                "Retry on that machine: `tollhouse usage parked release`.",
                "If a file is damaged, replay what the engines know: "
                "`tollhouse recover --from-receipts --dry-run`, then `tollhouse recover "
                "--from-receipts`.",
                "Run `tollhouse audit`.",
            ),
            "The list is empty, and the audit reports no lost request.",
        ),
    ),
    Alert(
        "EventsParked",
        "max(tollhouse_parked_events)",
        ">",
        0,
        "15m",
        "warning",
        "Usage events cannot be stored or rated, and are not billed",
        "Run tollhouse usage parked list to see why, and tollhouse usage parked release to retry.",
        Runbook(
            "Usage has reached the database but cannot be charged: a price is missing, its currency is "
            "another, or the event contradicts itself.",
            (
                "[Parked usage](/operator/parked) lists each event with its reason.",
                "`tollhouse usage parked list` shows the same.",
            ),
            (
                "If a price is missing, set it on [Models and prices](/operator/prices) or with "
                "`tollhouse price set --model NAME --currency EUR --input 0.10 --output 0.40`. "
                "Events that waited for it are released by themselves.",
                "Retry the others: `tollhouse usage parked release`, or Release on the page.",
                "Drop only what must not be billed: `tollhouse usage parked drop ID --by NAME`.",
            ),
            "[Parked usage](/operator/parked) is empty. Do not send invoices before that.",
        ),
    ),
    Alert(
        "RatingLate",
        "max(tollhouse_unrated_age_seconds)",
        ">",
        300,
        "5m",
        "warning",
        "Usage has waited for more than five minutes to be rated",
        "Start more workers, and exactly one with the schedule - tollhouse worker.",
        Runbook(
            "Usage is stored but has no charges yet. Pages show less than was used, and budgets count "
            "the "
            "running holds instead.",
            (
                "[Health](/operator/health) says how much waits, since when, and which queues have no "
                "worker.",
                "[Dead letters](/operator/dead-letters) shows a rating task that exhausted "
                "its retries.",
            ),
            (
                "If no worker runs, start one: `tollhouse worker`.",
                "If one runs and does not keep up, start more without the schedule: "
                "`tollhouse worker --queues rating --no-beat`.",
                "If a task failed, follow [DeadLetters](#DeadLetters).",
            ),
            "Rating on [Health](/operator/health) has no events waiting.",
        ),
        "seconds",
    ),
    Alert(
        "ClickHouseDown",
        "max(tollhouse_clickhouse_down)",
        ">",
        0,
        "5m",
        "critical",
        "Moved days of usage cannot be read: ClickHouse does not answer, or is not the one "
        "that has them",
        "Restore ClickHouse. Requests are served and billed meanwhile, and no day is moved or dropped.",
        Runbook(
            "Closed days of raw events and charges are on ClickHouse, and nobody can read them there. "
            "Exports of these days and queries on their events fail with 503, audits are not clean, "
            "and usage that arrives very late waits as `unchecked`. Current usage does not need "
            "ClickHouse.",
            (
                "`tollhouse doctor` says what ClickHouse answers, and up to which day usage is moved.",
                "[Requests](/requests) says so in a line above the requests that PostgreSQL holds.",
            ),
            (
                "Restore the server that `TOLLHOUSE_EVENTS_URL` names, with its data: it has the only "
                "copy of moved days.",
                "If the variable is not set, or names another database, name the one that has the days "
                "and restart gateways and workers.",
                "Run `tollhouse audit`: it compares every moved day with what it was closed with.",
            ),
            "`tollhouse_clickhouse_down` is 0, and the audit is clean on "
            "[Reconciliation](/operator/reconciliation). Usage that waited as `unchecked` is "
            "released by "
            "itself.",
        ),
    ),
    Alert(
        "DaysNotMoved",
        "max(tollhouse_unmoved_age_seconds)",
        ">",
        21_600,
        "10m",
        "warning",
        "A closed day of usage has waited for six hours to be moved to ClickHouse",
        "See the workers' log of billing.move_days, and that the disk of PostgreSQL has space.",
        Runbook(
            "PostgreSQL keeps more days of raw events and charges than "
            "`TOLLHOUSE_EVENTS_DAYS`, and its "
            "disk fills. Nothing is lost or billed twice: a day is read from where it is.",
            (
                "`tollhouse doctor` names the oldest day that waits, and how many do.",
                "The workers' log of `billing.move_days` says why: ClickHouse does not "
                "answer, or holds "
                "something else than what the day was closed with.",
                "[Dead letters](/operator/dead-letters) shows the task if it exhausted its retries.",
            ),
            (
                "If ClickHouse does not answer, follow [ClickHouseDown](#ClickHouseDown).",
                "If no worker runs the queue `invoices`, start one: `tollhouse worker`.",
                "If the sums differ, run `tollhouse audit`: it says which side was changed. "
                "The next run "
                "copies the day again.",
                "If the log says nothing, usage of that day waits for the service roll-ups: see that a "
                "worker has the queue `rating`.",
            ),
            "`tollhouse_unmoved_age_seconds` is 0.",
        ),
        "seconds",
    ),
)
