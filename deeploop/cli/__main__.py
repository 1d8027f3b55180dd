"""Run the command line: python -m deeploop.cli."""

import sys

from deeploop.cli import main

sys.exit(main())
