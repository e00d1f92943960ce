"""`python -m thermocline`: the same as the `thermocline` command."""

import sys

from thermocline.cli.main import main

sys.exit(main())
