"""One session on a GPU: configurations, how each is built and run, and their records."""
