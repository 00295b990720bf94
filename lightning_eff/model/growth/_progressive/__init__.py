"""Networks that grow by what a search finds: who a new block comes from, moving averages, and which network is best."""
