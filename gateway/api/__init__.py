"""FastAPI routers, one file per API."""
