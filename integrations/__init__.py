"""Integrations with other libraries, one package each."""
