"""Answers that are chosen among several: the best of some samples, and beam search."""
