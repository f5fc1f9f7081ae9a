"""`python -m billing.payments.fake_stripe --webhook http://127.0.0.1:8000/webhooks/stripe`: a Stripe
to try the product with, on TOLLHOUSE_STRIPE_API_BASE=http://127.0.0.1:12111.
"""

import argparse
import sys
import threading
import time

from billing.payments.fake_stripe.hooks import post
from billing.payments.fake_stripe.server import FakeStripe


def _deliver(stripe: FakeStripe, url: str, secret: str) -> None:
    """One after the other, again each second until it is taken."""
    sent = 0
    while True:
        while sent < len(stripe.books.events):
            try:
                taken = post(stripe.books.events[sent], url, secret) < 300
            except OSError:
                taken = False
            if not taken:
                break
            sent += 1
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=12111)
    parser.add_argument("--api-key", default="sk_test_fake")
    parser.add_argument("--webhook", default="", help="where events go")
    parser.add_argument("--secret", default="whsec_fake", help="signs them")
    wanted = parser.parse_args()
    stripe = FakeStripe(wanted.api_key, port=wanted.port)
    if wanted.webhook:
        arguments = (stripe, wanted.webhook, wanted.secret)
        threading.Thread(target=_deliver, args=arguments, daemon=True).start()
    sys.stderr.write(f"a fake Stripe listens on {stripe.url}\n")
    stripe.serve_forever()


if __name__ == "__main__":
    main()
