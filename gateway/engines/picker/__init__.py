"""An endpoint picker for inference gateways on Kubernetes: placement for a proxy that is not ours."""
