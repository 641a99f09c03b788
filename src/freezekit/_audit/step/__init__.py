"""audit_step: run the user's own step once, watch it, and put everything back."""
