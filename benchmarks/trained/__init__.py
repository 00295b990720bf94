"""The reference task of techniques that go on from a trained model."""
