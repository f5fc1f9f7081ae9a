"""The prompt screened, the answer guarded, both recorded."""
