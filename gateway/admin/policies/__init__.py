"""Moderation policies and appeals."""
