"""Routing: which replica serves a request, and the state of each replica."""
