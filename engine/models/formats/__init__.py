"""Formats of quantised weights in safetensors files, one file each."""
