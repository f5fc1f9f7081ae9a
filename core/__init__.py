"""The ground every other package stands on: settings, storage, queue, money, clock, ids, errors, tenants."""
