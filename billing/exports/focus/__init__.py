"""The FOCUS export (FinOps Open Cost and Usage Specification), in every version from one model."""
