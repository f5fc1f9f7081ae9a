"""Serves requests: the only steps that know the request's context."""
