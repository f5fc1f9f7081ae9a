"""What every package shares: settings, storage, queue, money, clock, ids, errors."""
