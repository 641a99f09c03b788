"""Features of a frozen backbone: the module that gives them, and the store that keeps them."""
