"""Adam with states of low rank: update rules whose moments live in a projection of the gradients."""
