"""Subscriptions and add-ons."""
