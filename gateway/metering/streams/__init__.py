"""A durable stream between gateways and the database: NATS JetStream or Kafka."""
