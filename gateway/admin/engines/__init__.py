"""Engines: their state, draining, reloading and prices."""
