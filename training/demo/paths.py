"""The folder of the texts that the demo model learns from."""

from pathlib import Path

CORPUS_DIR = Path(__file__).with_name("corpus")
