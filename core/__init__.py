"""The ground all packages stand on: settings, storage, queue, money, clock, ids, errors."""
