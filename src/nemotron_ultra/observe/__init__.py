"""What a person sees of a run: screen, metrics, pages."""
