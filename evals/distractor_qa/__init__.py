"""Distractor QA: a misleading passage among real documents, retracted after it was read."""
