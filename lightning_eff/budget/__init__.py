"""How a run spends its budget of steps, epochs, tokens or seconds: learning rate and batch size schedules."""
