"""Whether the database was restored from a backup and lacks what was done since."""
