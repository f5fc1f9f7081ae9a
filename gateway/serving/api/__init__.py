"""Routes for tenants other than inference: models, files, batches, stored responses."""
