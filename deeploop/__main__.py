"""Run the command line: python -m deeploop."""

import sys

from deeploop.cli import main

sys.exit(main())
