import sys

from nemotron_ultra.generate import main

sys.exit(main())
