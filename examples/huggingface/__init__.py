"""GPT-2 from transformers, with random weights, on the data of examples/gpt."""
