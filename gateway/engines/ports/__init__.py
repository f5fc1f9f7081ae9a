"""Ports to providers of models: a folder each, behind the interface of `port.py`."""
