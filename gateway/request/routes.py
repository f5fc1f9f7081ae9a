"""Routes that a step below the formats names."""

RERANK_ROUTE = "/v1/rerank"
SCORE_ROUTE = "/v1/score"
