"""Alerts about answers: speed, errors, limits."""

from dashboards.alerts.alert import Alert, Runbook

SERVICE_ALERTS = (
    Alert(
        "FirstTokenSlow",
        "histogram_quantile(0.95, sum by (le) (rate(tollhouse_first_token_seconds_bucket[5m])))",
        ">",
        0.3,
        "10m",
        "warning",
        "p95 time to first token is above 300 ms",
        "Check waiting sequences and KV use on the engine dashboard. Add an engine or lower limits.",
        Runbook(
            "One request in twenty waits more than 300 ms for its first token. Requests wait for an "
            "engine, or their prompts are long and not cached.",
            (
                "[Traffic](/operator/traffic) shows p50 and p95 by model, engine and adapter, and the "
                "time in the plan's queue.",
                "[Engines](/operator/engines) shows which engine has sequences waiting, how full its "
                "KV cache is, and whose work it is.",
            ),
            (
                "If one engine is slow and the others are not, drain it: "
                "`tollhouse model drain NAME`, or Drain on [Engines](/operator/engines).",
                "If all engines have sequences waiting, add an engine to the file of "
                "`TOLLHOUSE_UPSTREAMS` and run `tollhouse model reload`.",
                "If one tenant has most of the work, lower its limit: "
                "`tollhouse limit set 100000 --unit total_tokens --per minute --tenant NAME`.",
                "If few prompts are cached, follow [PrefixHitRateLow](#PrefixHitRateLow).",
            ),
            "p95 of the last 15 minutes on [Traffic](/operator/traffic) is below 300 ms, and no engine "
            "has "
            "sequences waiting.",
        ),
        "seconds",
    ),
    Alert(
        "GoodputLow",
        'sum(rate(tollhouse_first_token_seconds_bucket{le="0.3"}[10m])) / '
        "sum(rate(tollhouse_first_token_seconds_count[10m]))",
        "<",
        0.95,
        "10m",
        "warning",
        "Less than 95 % of responses start within the SLO of 300 ms",
        "Find the slow model on the service dashboard. Add an engine, or lower the limits of the busiest "
        "tenant.",
        Runbook(
            "More than one response in twenty starts later than the SLO of 300 ms. It is the same fault "
            "as [FirstTokenSlow](#FirstTokenSlow), counted by responses instead of by p95.",
            (
                "[Traffic](/operator/traffic) orders models and engines by requests; compare their p95.",
                "[Engines](/operator/engines) shows where sequences wait.",
            ),
            (
                "Follow the steps of [FirstTokenSlow](#FirstTokenSlow).",
                "If only one model is slow, give it another engine, or a fallback chain in "
                "`TOLLHOUSE_FALLBACKS`.",
            ),
            "95 % of the responses of the last ten minutes started within 300 ms.",
        ),
        "share",
    ),
    Alert(
        "ErrorRateHigh",
        'sum(rate(tollhouse_requests_total{status=~"5.."}[5m])) / '
        "sum(rate(tollhouse_requests_total[5m]))",
        ">",
        0.001,
        "5m",
        "critical",
        "More than 0.1 % of responses are server errors",
        "Run tollhouse doctor, then search the gateway's log by request id.",
        Runbook(
            "Clients get errors that are not their own fault. Failed requests pay no request fee; tokens "
            "that were delivered are billed.",
            (
                "[Traffic](/operator/traffic) lists errors by cause: status, reason, model and engine.",
                "[Health](/operator/health) shows which component fails.",
                "`tollhouse doctor` checks every part of the deployment.",
            ),
            (
                "If the errors come from one engine, drain it: `tollhouse model drain NAME`. Its running "
                "requests finish, and the other engines get the new ones.",
                "If the status is 503 with `spool_unavailable`, the gateway's disk is full: free space.",
                "If the status is 503 with `limits_unavailable`, follow "
                "[LimitsNotShared](#LimitsNotShared).",
                "For any other cause, open one of the failed requests on [Requests](/requests) and "
                "search "
                "the gateway's log for its id.",
            ),
            "Errors by cause on [Traffic](/operator/traffic) is empty for the last 15 minutes.",
        ),
        "share",
    ),
    Alert(
        "LimitsNotShared",
        "max(tollhouse_limit_mode)",
        ">",
        0,
        "1m",
        "critical",
        "Redis is down. Rate limits follow the configured mode, and budget checks fail",
        "Restore Redis.",
        Runbook(
            "A gateway does not reach Redis. Each process enforces its own share of the rate limits "
            "(`TOLLHOUSE_LIMITS_WHEN_REDIS_DOWN`), and requests of tenants with a budget or prepaid "
            "credit are refused, because nobody can check them.",
            (
                "`tollhouse doctor` says what the counters answer.",
                "`tollhouse_rejections_total` counts the refused requests by reason.",
            ),
            (
                "Restore Redis, or point `TOLLHOUSE_REDIS_URL` to one that works and restart the "
                "gateways.",
                "If Redis lost its data, do nothing more: requests under budgets wait up to three "
                "seconds "
                "while spend and holds are built again from the database and the spools.",
            ),
            "The mode is 0 again with the first request that reaches Redis.",
        ),
    ),
    Alert(
        "ConnectionsSilent",
        "sum by (service) (increase(tollhouse_silent_connections_total[10m]))",
        ">",
        3,
        "0m",
        "warning",
        "Connections to a service stay open and pass nothing on",
        "Look for the balancer, firewall or host between that loses connections without closing them.",
        Runbook(
            "Connections were closed because the other side had stopped answering on them, although "
            "they were open: what is between drops connections without a word. Work goes on over new "
            "connections; what waited on the old ones failed, or was done again, after up to 15 s.",
            (
                "The logs of gateways and workers name the service and how long each was silent.",
                "`tollhouse doctor` says whether the service answers now.",
            ),
            (
                "Raise the idle time-out of the balancer or firewall above ten seconds, in which "
                "connections send keepalives.",
                "Look for hosts that failed or were moved at that time.",
            ),
            "`tollhouse_silent_connections_total` stays as it is.",
        ),
    ),
)
