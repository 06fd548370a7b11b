"""Colibri inside other libraries: each needs its library, and nothing else of Colibri imports it."""
