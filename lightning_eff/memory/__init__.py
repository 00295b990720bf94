"""What is kept between forward and backward: recomputation, offloading, compressed activations."""
