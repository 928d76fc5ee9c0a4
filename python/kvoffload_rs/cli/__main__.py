"""``python -m kvoffload_rs.cli`` is the ``kvoffload`` command."""

import sys

from kvoffload_rs.cli import main

sys.exit(main())
