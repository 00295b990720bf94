"""A masked autoencoder of transformers on scikit-learn's handwritten digits."""
