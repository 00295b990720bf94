"""What micro-batches weigh in the loss of their batch, and how that is found."""
