"""`python -m paddlenlp_galvatron`: the command `galvatron`."""

import sys

from .cli.main import main

sys.exit(main())
