"""The demo as a script, and as a Space: `python app/app.py` takes the flags of `osd-hf app`."""

import sys

from osd_hf.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["app", *sys.argv[1:]]))
