"""One file for each published package: how its module, loader and Trainer are made, and what it is refused."""
