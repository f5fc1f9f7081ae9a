"""Celery workers: their application, metrics and dead tasks."""
