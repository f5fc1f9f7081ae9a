"""Marks kept outside the database, and the recovery of what a restored one lost."""
