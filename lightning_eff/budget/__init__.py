"""How the budget of a run (steps, epochs, tokens, seconds) is spent: schedules of the rate over all of it."""
