"""Grafana boards and Prometheus alerts, written by `boards`."""
