"""Every Prometheus metric of the gateway side, declared once, by room. Nothing is labelled by tenant:
per-tenant figures come from SQL. The engine worker serves its own.
"""

from prometheus_client import Counter, Gauge, Histogram

# 0.3 is the bound of the SLO on first tokens.
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60),
)

requests = Counter(
    "tollhouse_requests", "Answers given, by route and HTTP status.", ["route", "status"]
)
request_seconds = Histogram(
    "tollhouse_request_seconds", "Door to last byte.", ["route"], buckets=LATENCY_BUCKETS
)
first_token_seconds = Histogram(
    "tollhouse_first_token_seconds", "Door to first token.", ["model"], buckets=LATENCY_BUCKETS
)
in_flight = Gauge("tollhouse_in_flight_requests", "Requests between door and ledger now.")
rejections = Counter("tollhouse_rejections", "Requests refused, by reason.", ["reason"])
tokens = Counter(
    "tollhouse_tokens", "Tokens by kind: input, cached, output, waived.", ["model", "kind"]
)
limit_mode = Gauge("tollhouse_limit_mode", "How limits count: 0 shared, 1 local share, 2 closed.")
limit_queue = Gauge("tollhouse_limit_queue_requests", "Requests that wait for a limit now.")
limit_queue_seconds = Histogram(
    "tollhouse_limit_queue_seconds",
    "Time in the plan's queue.",
    ["reason"],
    buckets=LATENCY_BUCKETS,
)
limit_queue_place = Histogram(
    "tollhouse_limit_queue_place",
    "Requests ahead at the time of queueing.",
    buckets=(0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
)
limit_shadow = Counter(
    "tollhouse_limit_shadow_refusals", "What limits on trial would have refused.", ["limit"]
)
task_seconds = Histogram(
    "tollhouse_task_seconds",
    "Time a background task ran.",
    ["task"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600),
)
queue_age_seconds = Histogram(
    "tollhouse_queue_age_seconds",
    "Time a task waited in its queue.",
    ["queue"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600),
)
task_retries = Counter("tollhouse_task_retries", "Tasks that failed and are tried again.", ["task"])
dead_letters = Counter("tollhouse_dead_letters", "Tasks that failed for good.", ["task"])
payment_commands = Counter(
    "tollhouse_payment_commands", "What the payment provider was told, by outcome.", ["outcome"]
)
payment_events = Counter(
    "tollhouse_payment_events", "Events of the payment provider, by outcome.", ["outcome"]
)
audit_differences = Gauge("tollhouse_audit_differences", "Differences that the last audit found.")
parked_events = Gauge("tollhouse_parked_events", "Usage events that wait for somebody.")
parked_exports = Gauge("tollhouse_parked_exports", "Scheduled exports that wait for somebody.")
spool_waiting = Gauge("tollhouse_spool_records", "Records on disk, not yet in the database.")
spool_age_seconds = Gauge(
    "tollhouse_spool_age_seconds", "How long shipping to the database has failed; 0 is well."
)
breaker_open = Gauge(
    "tollhouse_breaker_open", "Whether a replica is left alone after failures: 1 is so.", ["engine"]
)
hung = Counter(
    "tollhouse_hung_requests",
    "Requests taken from a replica that hung before their first token.",
    ["engine"],
)
breaker_openings = Counter(
    "tollhouse_breaker_openings", "Times that a replica was left alone.", ["engine"]
)
retries = Counter(
    "tollhouse_retries", "Requests given to another replica before the first byte.", ["reason"]
)
adapter_preloads = Counter(
    "tollhouse_adapter_preloads", "Adapters loaded before they were asked for.", ["engine"]
)
fallbacks = Counter(
    "tollhouse_fallbacks", "Requests that another model answered.", ["model", "instead"]
)
moderation_checks = Counter(
    "tollhouse_moderation_checks", "Verdicts, by direction and action.", ["direction", "action"]
)
moderation_flags = Counter(
    "tollhouse_moderation_flags", "Categories that fired, by action.", ["category", "action"]
)
moderation_guard_seconds = Histogram(
    "tollhouse_moderation_guard_seconds",
    "Time of a second opinion, by guard.",
    ["guard"],
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5),
)
moderation_seconds = Histogram(
    "tollhouse_moderation_seconds",
    "Time of screening a prompt.",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1),
)
