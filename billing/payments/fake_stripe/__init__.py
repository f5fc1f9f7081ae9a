"""A fake Stripe server: HTTP API, idempotency keys, signed webhooks and injected faults."""
