"""Which samples, tokens and lengths a step sees, in a room for each; and where in the data a resumed run goes on."""
