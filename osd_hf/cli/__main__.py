"""The commands by `python -m osd_hf.cli`."""

import sys

from osd_hf.cli.main import main

sys.exit(main())
