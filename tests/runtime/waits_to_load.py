"""Is imported when the file that ``LOAD_WHEN`` names exists."""

import os
import time

while not os.path.exists(os.environ["LOAD_WHEN"]):
    time.sleep(0.01)
