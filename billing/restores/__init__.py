"""Notices that the database was restored from a backup, and brings back what other systems hold."""
