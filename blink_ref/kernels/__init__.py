"""The model's arithmetic. Each file reads specification (NumPy), device function, cost."""
