"""Admission: rate limits and money, as one reservation over all scopes."""
