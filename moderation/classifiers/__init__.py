"""Classifiers behind one port."""
