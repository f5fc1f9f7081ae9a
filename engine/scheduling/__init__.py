"""Which sequences run in a step: scheduler, fairness, waiting queue, preemption."""
