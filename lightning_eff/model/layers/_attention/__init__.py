"""Which maps make queries, keys and values, before anything has run, and what is put in their places."""
