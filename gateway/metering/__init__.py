"""Metering: what is billed and what is waived, the durable spool, and shipping to the database."""
