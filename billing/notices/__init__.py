"""Messages to tenants: the outbox, mails and webhooks, and the budgets that cause alerts."""
