"""Moderation in the request path: prompt screening, output guards, decision records."""
