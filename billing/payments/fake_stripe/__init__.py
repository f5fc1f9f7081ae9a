"""A Stripe that lives in a process: HTTP, idempotency keys, signed webhooks, and faults on demand."""
