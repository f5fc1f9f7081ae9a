"""Answers that match a JSON schema, a regular expression or a grammar."""
