import sys

from nemotron_ultra.prep import main

sys.exit(main())
