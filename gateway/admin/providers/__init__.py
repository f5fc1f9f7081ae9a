"""Providers of models: their recorded answers."""
