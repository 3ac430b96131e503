"""``python -m refusion_lit.cli``."""

import sys

from refusion_lit.cli import main

sys.exit(main())
