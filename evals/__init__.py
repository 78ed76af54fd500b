"""Evaluations that prove what the library claims, one package each."""
