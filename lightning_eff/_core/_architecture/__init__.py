"""The interface for techniques that change a module's parameters: replaced layers, other forms of weights, adapters."""
