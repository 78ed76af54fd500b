"""Erasing NIAH: two needles with one key; one is erased and the other must be answered."""
