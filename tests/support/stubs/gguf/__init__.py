"""Stands in for a package that vLLM 0.21 imports, also in child processes, and never calls here."""
