import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything reads it: no test asks the real Hub
