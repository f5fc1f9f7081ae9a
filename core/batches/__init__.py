"""Files that tenants upload, and batches of requests that run over them."""
