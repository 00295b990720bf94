"""What is made by peft; imported where peft is there."""
