"""Names only."""


class GGMLQuantizationType:
    """Not used."""
