"""What a cut would compute wrongly, looked for at setup."""
