"""What all tests share."""

import os

# Ray reads its token once in a process, which may run tests of several clusters.
os.environ["RAY_AUTH_TOKEN"] = "0" * 64
