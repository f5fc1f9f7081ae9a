"""Alembic migrations over the tables of core, billing and moderation."""
