"""Span-neighbour accuracy: does erasing a foreign chunk restore the document round it? Compares erasers."""
