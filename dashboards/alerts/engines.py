"""Alerts about engines: queues, memory, cache, replicas that fail."""

from dashboards.alerts.alert import Alert, Runbook

ENGINE_ALERTS = (
    Alert(
        "ModelNotServed",
        "max by (model) (tollhouse_model_unserved)",
        ">",
        0,
        "2m",
        "critical",
        "No engine serves a model",
        "Ask /readyz with the operator's token why its engines are not ready.",
        Runbook(
            "Requests of this model get 503 `model_loading` or `engine_unavailable`, or go "
            "to its fallback "
            "chain: its engines are away, still loading, drained, refused or behind open breakers.",
            (
                "[Engines](/operator/engines) and [Health](/operator/health) name the "
                "model's engines and "
                "their states.",
                "`tollhouse doctor` connects to each engine and says why it does not answer.",
            ),
            (
                "If an engine is away, start it, and look at the network and the CURVE keys "
                "between it and "
                "the gateway.",
                "If it is loading, wait: large models take minutes.",
                "If it is refused, it serves another model or other weights than its name "
                "says: correct it.",
                "If it is drained, `tollhouse model resume NAME`.",
            ),
            "The model's engines are ready on [Engines](/operator/engines).",
        ),
    ),
    Alert(
        "QueueDeep",
        "sum(tollhouse_engine_waiting)",
        ">",
        100,
        "5m",
        "warning",
        "More than 100 sequences are waiting for the engines",
        "Add an engine, or lower the limits of the busiest tenant.",
        Runbook(
            "Requests arrive faster than the engines finish them. Shares are fair between "
            "tenants, so a "
            "tenant with little work still waits little.",
            (
                "[Engines](/operator/engines) shows waiting sequences by engine, and each tenant's "
                "actual and "
                "fair share.",
                "[Traffic](/operator/traffic) shows what waits by model.",
            ),
            (
                "Add an engine to the file of `TOLLHOUSE_UPSTREAMS` and run `tollhouse model reload`.",
                "Until it runs, lower the limit of the tenant with the largest share: "
                "`tollhouse limit set 20 --unit concurrent --tenant NAME`.",
                "See that no engine is drained by mistake: `tollhouse model engines`; "
                "`tollhouse model resume NAME` gives it requests again.",
            ),
            "Waiting on [Engines](/operator/engines) is below 100 and falls.",
        ),
    ),
    Alert(
        "KvCacheFull",
        "max(tollhouse_engine_kv_usage)",
        ">",
        0.85,
        "10m",
        "warning",
        "The KV cache of an engine is more than 85 % full",
        "Preemptions are imminent. Add an engine or give it more memory.",
        Runbook(
            "An engine's memory for keys and values is nearly full. When it is full, the "
            "engine preempts "
            "sequences and computes them again; that time is not billed, but everybody waits.",
            (
                "[Engines](/operator/engines) shows the share in use by engine.",
                "`tollhouse_engine_preemptions_total` on the Grafana board `engine` shows whether "
                "sequences "
                "are preempted already.",
            ),
            (
                "Drain the fullest engine for some minutes: `tollhouse model drain NAME`, then "
                "`tollhouse model resume NAME`.",
                "If all are full, add an engine and run `tollhouse model reload`.",
                "For the next start, hold keys and values in 8 bits: `TOLLHOUSE_KV_DTYPE`.",
            ),
            "The share of every engine on [Engines](/operator/engines) is below 85 %.",
        ),
        "share",
    ),
    Alert(
        "PrefixHitRateLow",
        "sum(rate(tollhouse_engine_prefix_hits_total[1h])) / "
        "sum(rate(tollhouse_engine_prefix_queries_total[1h]))",
        "<",
        0.05,
        "2h",
        "info",
        "Less than 5 % of prompt tokens are found in the prefix cache",
        "Check prompt order. Dates and ids at the start of system prompts prevent cache hits.",
        Runbook(
            "Almost every prompt is computed from its first token. Answers are right, but slower and "
            "dearer "
            "than they need be.",
            (
                "[Traffic](/operator/traffic) shows the cached share by model and adapter.",
                "A request's page, from [Requests](/requests), shows which blocks of its prompt were "
                "cached.",
            ),
            (
                "Open a few requests of the largest tenant. If their first block differs each time, a "
                "date "
                "or an id stands at the start of the system prompt: ask the tenant to move it to the "
                "end.",
                "If conversations are long and the cache is small, keep copies outside the pool: "
                "`TOLLHOUSE_KV_TIER_RAM_MB`.",
            ),
            "The cached share on [Traffic](/operator/traffic) rises. With traffic that never repeats "
            "itself a "
            "low share is right: then silence this alert.",
        ),
        "share",
    ),
    Alert(
        "ThroughputGone",
        "sum(tollhouse_engine_running) > 0 and sum(rate(tollhouse_engine_generated_tokens_total[5m]))",
        "==",
        0,
        "5m",
        "critical",
        "Sequences are running but no tokens are generated",
        "Restart the stalled engine. Its requests are settled by the tokens delivered.",
        Runbook(
            "An engine holds requests and produces nothing: it hangs, or its device does.",
            (
                "[Engines](/operator/engines) shows running sequences by engine; ask twice, and the "
                "engine "
                "whose numbers stay the same hangs.",
                "Its log ends where it hangs.",
            ),
            (
                "Drain it, so that it gets no more requests: `tollhouse model drain NAME`.",
                "Restart its process. Delivered tokens are billed, the rest is waived.",
                "Give it requests again: `tollhouse model resume NAME`.",
                "Run `tollhouse audit`: it must report no difference.",
            ),
            "Tokens are generated again, and the audit is clean on "
            "[Reconciliation](/operator/reconciliation).",
        ),
    ),
    Alert(
        "AdapterQuarantined",
        "increase(tollhouse_adapters_quarantined_total[1h])",
        ">",
        0,
        "",
        "critical",
        "An adapter was put into quarantine, because engines stopped with it",
        "Look at who uploaded it and at the engine's log; release it only if the cause is another.",
        Runbook(
            "An engine hung or died while it read this adapter, or two did while they used it. Its "
            "requests are refused with `adapter_quarantined`, for every tenant that has the weights.",
            (
                "[Engines](/operator/engines) lists adapters in quarantine with tenant, digest and "
                "reason; the tenant's audit log has `adapter.quarantine`.",
                "The engine's log ends with where each of its threads was.",
            ),
            (
                "If the log points into the reading of the adapter, keep the quarantine and tell the "
                "tenant to upload other weights.",
                "If the cause was another, such as memory that ran out, release it: "
                "`POST /admin/v1/adapters/DIGEST/release` with the operator's token.",
            ),
            "No engine restarts any more, and the tenant's adapter is replaced or released.",
        ),
    ),
    Alert(
        "RequestsLost",
        "sum(increase(tollhouse_lost_requests_total[15m]))",
        ">",
        0,
        "",
        "warning",
        "An engine hung or died while it computed requests, which are not tried again",
        "Read the end of the engine's log, and see whether one tenant's requests are in each case.",
        Runbook(
            "One of these requests may be why the engine stopped. Their clients got 503 with "
            "`x-should-retry: false`, and were charged for delivered tokens only.",
            (
                "[Requests](/requests) with status 503 shows which requests and tenants they were.",
                "The engine's log ends with where each of its threads was, if it hung.",
            ),
            (
                "If the same tenant's requests are there each time, lower or suspend what it may send: "
                "`tollhouse limit set 1 --unit concurrent --tenant NAME`.",
                "If the process was killed from outside or memory ran out, give it more memory.",
            ),
            "No engine stopped for 15 minutes.",
        ),
    ),
    Alert(
        "BreakerOpen",
        "max by (engine) (tollhouse_breaker_open)",
        ">",
        0,
        "1m",
        "critical",
        "The circuit breaker of a replica is open after repeated failures",
        "Check the log of the engine that /readyz names. The other replicas serve its load.",
        Runbook(
            "A replica failed three times in ten seconds, and gets no requests but one probe "
            "at a time.",
            (
                "[Engines](/operator/engines) and [Health](/operator/health) name the replica; it is "
                "`silent`.",
                "Errors by cause on [Traffic](/operator/traffic) show what it answered.",
            ),
            (
                "Read the log of that engine. If it runs out of memory or its device is gone, restart "
                "it.",
                "If it stays down, drain it, so that it is not probed: `tollhouse model drain NAME`.",
                "If it will not come back, remove it from the file of `TOLLHOUSE_UPSTREAMS` and run "
                "`tollhouse model reload`.",
            ),
            "The replica is healthy on [Engines](/operator/engines): a probe was answered.",
        ),
    ),
)
