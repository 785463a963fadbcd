"""``blink-ref bench kernels``: what each phase of a step costs, and how near to the machine's roofs it comes."""
