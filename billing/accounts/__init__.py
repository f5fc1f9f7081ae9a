"""Billing accounts, their sellers and the periods that they are billed by."""
