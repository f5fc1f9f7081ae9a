"""/v1/rerank and /v1/score: how similar texts are."""
