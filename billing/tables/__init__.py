"""The billing tables, one file per subject. `billing.models` re-exports them."""
