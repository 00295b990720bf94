"""``lightning-eff tune``: the search for the recipe that wins on the user's own module."""
