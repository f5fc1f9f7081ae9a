"""alt-profanity-check on the work: a score a text, and the median time by length.

Stands alone: it runs in an environment without this project. Prints what it found as JSON.
"""

import json
import statistics
import sys
import time

from profanity_check import predict_prob


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    scores = [float(score) for score in predict_prob(work["texts"])]
    p50 = {length: 1000 * _median(texts) for length, texts in work["timed"].items()}
    print(json.dumps({"scores": scores, "p50_ms": p50}))


def _median(texts: list[str]) -> float:
    for text in texts[:20]:
        predict_prob([text])
    spent = []
    for text in texts:
        began = time.perf_counter()
        predict_prob([text])
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
