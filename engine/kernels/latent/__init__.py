"""Multi-head latent attention (MLA, arXiv 2405.04434), with the projections absorbed."""
