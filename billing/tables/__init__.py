"""The tables of billing, one file a subject. `billing.models` gathers them."""
