"""`python -m billing.payments.fake_stripe --webhook http://127.0.0.1:8000/webhooks/stripe` runs a fake
Stripe server to try the product with. Set TOLLHOUSE_STRIPE_API_BASE=http://127.0.0.1:12111.
"""

import argparse
import sys
import threading
import time

from billing.payments.fake_stripe.server import FakeStripe
from billing.payments.fake_stripe.webhooks import post


def _deliver(stripe: FakeStripe, url: str, secret: str) -> None:
    """Deliver events in order; a rejected event is retried every second."""
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
    parser.add_argument("--webhook", default="", help="URL that receives the events")
    parser.add_argument("--secret", default="whsec_fake", help="webhook signing secret")
    wanted = parser.parse_args()
    stripe = FakeStripe(wanted.api_key, port=wanted.port)
    if wanted.webhook:
        arguments = (stripe, wanted.webhook, wanted.secret)
        threading.Thread(target=_deliver, args=arguments, daemon=True).start()
    sys.stderr.write(f"fake Stripe listening on {stripe.url}\n")
    stripe.serve_forever()


if __name__ == "__main__":
    main()
