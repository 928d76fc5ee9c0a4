"""``kvoffload bench``: measurements that anybody can repeat on their own machine."""
