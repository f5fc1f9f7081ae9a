"""Plans, add-ons, and the subscriptions of tenants to them."""
