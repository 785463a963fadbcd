"""``python -m blink_ref``: the same as ``blink-ref``."""

import sys

from blink_ref.cli import main

sys.exit(main())
