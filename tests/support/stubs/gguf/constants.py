"""Names only."""


class Keys:
    """Not used."""


class VisionProjectorType:
    """Not used."""
