"""Routers, one file a surface."""
