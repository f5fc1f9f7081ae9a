"""The `/admin/v1` routes."""
