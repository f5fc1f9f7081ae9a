"""All Prometheus metrics of the gateway and the workers. None is labelled by tenant: per-tenant
figures come from SQL. The engine worker serves its own metrics.
"""

from prometheus_client import Counter, Gauge, Histogram

from core.tallies import TallyCounter, TallyGauge, TallyHistogram

# 0.3 s is the SLO for the first token.
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60),
)

requests = TallyCounter(
    "tollhouse_requests", "Responses by route and HTTP status.", ["route", "status"]
)
request_seconds = TallyHistogram(
    "tollhouse_request_seconds",
    "Time from request to last byte, in seconds.",
    ["route"],
    buckets=LATENCY_BUCKETS,
)
first_token_seconds = TallyHistogram(
    "tollhouse_first_token_seconds",
    "Time from request to first token, in seconds.",
    ["model"],
    buckets=LATENCY_BUCKETS,
)
in_flight = TallyGauge(
    "tollhouse_in_flight_requests", "Requests in progress.", multiprocess_mode="livesum"
)
silent_connections = Counter(
    "tollhouse_silent_connections",
    "Connections that were closed because the other side had stopped answering on them, by service.",
    ["service"],
)
rejections = Counter("tollhouse_rejections", "Requests rejected, by reason.", ["reason"])
tokens = TallyCounter(
    "tollhouse_tokens", "Tokens by kind: input, cached, output, waived.", ["model", "kind"]
)
request_log = Counter(
    "tollhouse_request_log",
    "Records of requests for tenants' receivers, by result: sent, dropped.",
    ["result"],
)
response_cache = Counter(
    "tollhouse_response_cache",
    "Requests that ask for the response cache, by result: hit, miss, refresh, bypass.",
    ["result"],
)
response_cache_bytes = Gauge(
    "tollhouse_response_cache_bytes",
    "Memory of cached answers, in bytes.",
    multiprocess_mode="livesum",
)
limit_mode = Gauge(
    "tollhouse_limit_mode",
    "Mode of rate limits: 0 shared, 1 local share, 2 closed.",
    multiprocess_mode="livemax",
)
limit_queue = Gauge(
    "tollhouse_limit_queue_requests",
    "Requests waiting in the queues of plans.",
    multiprocess_mode="livesum",
)
limit_queue_seconds = Histogram(
    "tollhouse_limit_queue_seconds",
    "Time in the plan's queue, by the limit waited for.",
    ["reason"],
    buckets=LATENCY_BUCKETS,
)
limit_queue_position = Histogram(
    "tollhouse_limit_queue_position",
    "Requests ahead in the queue when a request joins it.",
    buckets=(0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
)
limit_shadow = Counter(
    "tollhouse_limit_shadow_refusals", "Requests that shadow limits would have rejected.", ["limit"]
)
task_seconds = Histogram(
    "tollhouse_task_seconds",
    "Run time of background tasks.",
    ["task"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600),
)
queue_age_seconds = Histogram(
    "tollhouse_queue_age_seconds",
    "Time that tasks waited in their queue.",
    ["queue"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600),
)
worker_silence_seconds = Gauge(
    "tollhouse_worker_silence_seconds",
    "Seconds since a worker took a task, or its scheduler sent one, by part: tasks, schedule.",
    ["part"],
    multiprocess_mode="mostrecent",
)
task_retries = Counter("tollhouse_task_retries", "Retries of failed tasks.", ["task"])
dead_letters = Counter("tollhouse_dead_letters", "Tasks that exhausted their retries.", ["task"])
payment_commands = Counter(
    "tollhouse_payment_commands", "Commands sent to the payment provider, by outcome.", ["outcome"]
)
payment_events = Counter(
    "tollhouse_payment_events",
    "Events received from the payment provider, by outcome.",
    ["outcome"],
)
invoice_failures = Counter(
    "tollhouse_invoice_failures", "Tenants that an invoice run could not bill, and failed runs."
)
tenant_failures = Counter(
    "tollhouse_tenant_failures",
    "Tenants left out by a billing task after an error, by task.",
    ["task"],
)
# Read from the database at every scrape (billing.reports.measures), so that each process that serves
# /metrics shows the same value.
database_up = Gauge(
    "tollhouse_database_up",
    "1 if the database answered the last scrape.",
    multiprocess_mode="mostrecent",
)
database_behind = Gauge(
    "tollhouse_database_behind",
    "1 while the database is restored from a backup and `tollhouse recover` has not run: nothing is "
    "numbered or collected.",
    multiprocess_mode="mostrecent",
)
audit_differences = Gauge(
    "tollhouse_audit_differences",
    "Differences found by the last audit.",
    multiprocess_mode="mostrecent",
)
audit_age_seconds = Gauge(
    "tollhouse_audit_age_seconds",
    "Time since the last stored audit, or since the first usage if there was none.",
    multiprocess_mode="mostrecent",
)
unrated_age_seconds = Gauge(
    "tollhouse_unrated_age_seconds",
    "Age of the oldest usage that is not rated; 0 if there is none.",
    multiprocess_mode="mostrecent",
)
clickhouse_down = Gauge(
    "tollhouse_clickhouse_down",
    "1 if the ClickHouse database of moved days does not answer, is another one, or is not set.",
    multiprocess_mode="mostrecent",
)
unmoved_age_seconds = Gauge(
    "tollhouse_unmoved_age_seconds",
    "How long the oldest closed day that should be on ClickHouse has waited to be moved; 0 if none.",
    multiprocess_mode="mostrecent",
)
parked_events = Gauge(
    "tollhouse_parked_events",
    "Usage events that cannot be stored or rated and need attention.",
    multiprocess_mode="mostrecent",
)
parked_exports = Gauge(
    "tollhouse_parked_exports",
    "Scheduled exports that failed and need attention.",
    multiprocess_mode="mostrecent",
)
dead_letters_waiting = Gauge(
    "tollhouse_dead_letters_waiting",
    "Tasks that exhausted their retries and were not replayed.",
    multiprocess_mode="mostrecent",
)
spool_waiting = Gauge(
    "tollhouse_spool_records",
    "Spool records not yet shipped to the database.",
    multiprocess_mode="livesum",
)
spool_parked = Gauge(
    "tollhouse_spool_parked_records",
    "Spool records that cannot be read, settled or stored and need attention.",
    multiprocess_mode="livesum",
)
spool_parked_adopted = Gauge(
    "tollhouse_spool_parked_adopted_records",
    "Parked records of spool files that processes left behind and this process adopted.",
    multiprocess_mode="livesum",
)
spool_age_seconds = Gauge(
    "tollhouse_spool_age_seconds",
    "How long shipping to the database has been failing; 0 if it succeeds.",
    multiprocess_mode="livemax",
)
stream_messages = Gauge(
    "tollhouse_stream_messages",
    "Messages of usage in the stream that are not in the database yet.",
    multiprocess_mode="mostrecent",
)
stream_age_seconds = Gauge(
    "tollhouse_stream_age_seconds",
    "Age of the oldest message in the stream that is not in the database yet; 0 if there is none.",
    multiprocess_mode="mostrecent",
)
breaker_open = Gauge(
    "tollhouse_breaker_open",
    "1 if the replica's circuit breaker is open after failures.",
    ["engine"],
    multiprocess_mode="livemax",
)
picker_decisions = Counter(
    "tollhouse_picker_decisions",
    "Requests that the endpoint picker placed (picked) or refused (none_ready, shed).",
    ["outcome"],
)
unserved_models = Gauge(
    "tollhouse_model_unserved",
    "1 if no engine can answer a request of the model now.",
    ["model"],
    multiprocess_mode="livemax",
)
hung = Counter(
    "tollhouse_hung_requests",
    "Requests moved off a hung replica before their first token.",
    ["engine"],
)
lost_with_engine = Counter(
    "tollhouse_lost_requests",
    "Requests not tried again, because their engine hung or died while it computed them.",
    ["engine"],
)
adapters_quarantined = Counter(
    "tollhouse_adapters_quarantined",
    "Adapters put into quarantine, because engines stopped with them.",
)
breaker_openings = Counter(
    "tollhouse_breaker_openings", "Times that a replica's circuit breaker opened.", ["engine"]
)
retries = Counter(
    "tollhouse_retries", "Requests retried on another replica before the first byte.", ["reason"]
)
adapter_preloads = Counter(
    "tollhouse_adapter_preloads", "Adapters loaded ahead of the first request for them.", ["engine"]
)
fallbacks = Counter(
    "tollhouse_fallbacks", "Requests served by a fallback model.", ["model", "instead"]
)
moderation_checks = TallyCounter(
    "tollhouse_moderation_checks",
    "Moderation decisions, by direction and action.",
    ["direction", "action"],
)
moderation_flags = Counter(
    "tollhouse_moderation_flags",
    "Moderation categories over their threshold, by action.",
    ["category", "action"],
)
moderation_holds = TallyCounter(
    "tollhouse_moderation_holds",
    "Times that text of a guarded answer began to wait, by what it waited for: score, rule.",
    ["reason"],
)
moderation_longest_hold = TallyHistogram(
    "tollhouse_moderation_longest_hold_characters",
    "Most characters of a guarded answer that waited at once.",
    buckets=(0, 8, 16, 32, 64, 128, 256, 512, 1_024, 8_192),
)
moderation_guard_seconds = Histogram(
    "tollhouse_moderation_guard_seconds",
    "Latency of guard models, by guard.",
    ["guard"],
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5),
)
moderation_seconds = TallyHistogram(
    "tollhouse_moderation_seconds",
    "Time to screen a prompt.",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1),
)
